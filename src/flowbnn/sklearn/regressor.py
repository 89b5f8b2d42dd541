"""Regressor for scikit-learn."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from flowbnn.errors import requirement_error
from flowbnn.likelihoods import RealLikelihood, Survival
from flowbnn.likelihoods.base import build_likelihood
from flowbnn.methods import Calibrator, Method
from flowbnn.options import Probability, check
from flowbnn.sklearn.base import BayesianEstimator, NetworkFactory, draw_seed


class PredictionInterval(NamedTuple):
    """Predictive intervals as arrays.

    Args:
        low: Lower ends.
        high: Upper ends.
    """

    low: NDArray[Any]
    high: NDArray[Any]


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regressor with a Bayesian neural network, for use with scikit-learn.

    Args:
        method: Method that fits the posterior: a name (``"ensemble"``, ``"map"``, ``"laplace"``, ``"node-noise"``, ``"mc-dropout"``,
            ``"swag"``, ``"hmc"`` and all others of :data:`flowbnn.methods.METHODS`), or an object such as ``fb.DeepEnsemble(10)``.
        likelihood: Distribution of the targets. ``"gaussian"`` has one learned noise scale, ``"heteroscedastic"`` a noise scale that
            depends on the inputs. ``"mixture"`` and ``"flow"`` have noise of any shape. ``"poisson"`` and ``"negative_binomial"`` are
            for counts, ``"quantiles"`` for quantiles, and ``"survival"`` for times and events in two columns. An object of
            :mod:`flowbnn.likelihoods` is also possible.
        hidden_sizes: Widths of the hidden layers.
        activation: Activation function, ``"relu"``, ``"tanh"``, ``"silu"`` or ``"gelu"``.
        embedding: ``"periodic"`` adds sines and cosines of each input (:class:`~flowbnn.models.PeriodicEmbedding`), for functions that
            change quickly.
        network: Network that replaces the perceptron of ``hidden_sizes``, or a function ``(num_inputs, num_outputs) -> network``. The
            function is called in every fit. A network is copied.
        epochs: Number of passes over the data. None ends at a plateau on a held-out tenth of the data.
        lr: Learning rate. None is the default of the method.
        batch_size: Number of rows in a batch. ``"auto"`` is 64, or 256 for at least 10,000 rows.
        samples: Number of sampled networks in a prediction. None is the default of the posterior.
        calibrate: Calibration on held-out rows. True fits a temperature (:class:`flowbnn.Temperature`) on a tenth of the rows.
            The name of a calibrator, such as ``"refit"``, or an object, is also possible.
        standardize: If True, inputs are scaled to zero mean and unit variance.
        random_state: Seed or generator of the fit. Predictions of a fitted estimator never vary.
        verbose: If True, shows a progress bar.
        fit_options: Further options of ``method.fit``, such as ``{"accelerator": "cpu", "precision": "64-true"}``.

    Attributes:
        posterior_: Fitted :class:`~flowbnn.Posterior`. Its data are those of :meth:`to_tensors`, its outputs are in the units of ``y``.
        scaler_: Scaler of the inputs, or None.
        n_iter_: Number of epochs.
        n_features_in_: Number of columns at fit.
        feature_names_in_: Names of the columns at fit, if all are strings.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BayesianRegressor("map", hidden_sizes=(16,), epochs=20, lr=0.01, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> low, high = model.predict_interval(X, level=0.9)
    >>> mean.shape, std.shape, bool(0.8 < ((low < y) & (y < high)).mean() < 1.0)
    ((3,), (3,), True)
    """

    def __init__(
        self,
        method: str | Method = "ensemble",
        *,
        likelihood: str | RealLikelihood = "gaussian",
        hidden_sizes: Sequence[int] = (50, 50),
        activation: str = "relu",
        embedding: Literal["periodic"] | None = None,
        network: nn.Module | NetworkFactory | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        batch_size: int | Literal["auto"] = "auto",
        samples: int | None = None,
        calibrate: bool | str | Calibrator = False,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            method,
            hidden_sizes=hidden_sizes,
            activation=activation,
            embedding=embedding,
            network=network,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            samples=samples,
            calibrate=calibrate,
            standardize=standardize,
            random_state=random_state,
            verbose=verbose,
            fit_options=fit_options,
        )
        self.likelihood = likelihood

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fits the posterior.

        Args:
            X: Inputs ``[N, F]``: an array, or a data frame of numbers.
            y: Targets ``[N]`` or ``[N, D]``.

        Raises:
            ValueError: If the data are invalid.
        """
        X, y = validate_data(
            self,
            X,
            y,
            dtype=(np.float64, np.float32),
            y_numeric=True,
            multi_output=True,
            ensure_min_samples=2,
        )
        targets = torch.from_numpy(np.array(y, dtype=np.float64))
        likelihood = self._make_likelihood(targets[0].numel())
        return self._fit(np.asarray(X), targets, likelihood, count_outputs(likelihood, targets))

    def _encode_targets(self, y: Any) -> Tensor:
        return torch.from_numpy(np.array(y, dtype=np.float64))

    def _make_likelihood(self, dim: int) -> RealLikelihood:
        """Returns the likelihood of ``dim`` targets."""
        names = Literal[
            "gaussian",
            "heteroscedastic",
            "mixture",
            "flow",
            "poisson",
            "negative_binomial",
            "quantiles",
            "survival",
        ]
        check("likelihood", self.likelihood, names | RealLikelihood, owner=type(self).__name__)
        if isinstance(self.likelihood, RealLikelihood):
            return self.likelihood
        settings: dict[str, Any] = {"likelihood": self.likelihood}
        if self.likelihood == "heteroscedastic":
            settings = {"likelihood": "gaussian", "noise": "predicted"}
        if self.likelihood in ("gaussian", "heteroscedastic", "mixture", "flow"):
            settings["dim"] = dim
        likelihood: Any = build_likelihood(settings)
        return likelihood

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Returns the predictive mean, ``[N]`` or ``[N, D]``, and the predictive standard deviation on request.

        Args:
            X: Inputs ``[N, F]``.
            return_std: If True, returns the mean and the standard deviation.
        """
        if return_std:
            return tuple(self._map_rows(X, lambda p: p.mean.double(), lambda p: p.std.double()))
        return self._map_rows(X, lambda p: p.mean.double())[0]

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> PredictionInterval:
        """Returns central predictive intervals with ends ``low`` and ``high``, ``[N]`` or ``[N, D]``.

        Args:
            X: Inputs ``[N, F]``.
            level: Probability of the intervals.
        """
        check("level", level, Probability)
        (ends,) = self._map_rows(X, lambda p: torch.stack([*p.interval(level)], 1).double())
        return PredictionInterval(ends[:, 0], ends[:, 1])

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draws targets from the predictive distribution, ``[N, n_samples]`` or ``[N, D, n_samples]``.

        All rows of a draw are predicted by the same network.

        Args:
            X: Inputs ``[N, F]``.
            n_samples: Number of draws.
            random_state: Seed or generator of the draws.
        """
        draws = self.predict_dist(X).sample(n_samples, seed=draw_seed(random_state))
        return draws.movedim(0, -1).double().numpy()

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Returns the coefficient of determination, or the concordance index of censored times.

        Args:
            X: Inputs ``[N, F]``.
            y: Targets, or times and events ``[N, 2]``.
            sample_weight: Weights of the rows. Censored times have none.
        """
        if self.likelihood != "survival" and not isinstance(self.likelihood, Survival):
            return float(super().score(X, y, sample_weight))
        if sample_weight is not None:
            raise requirement_error("concordance", "no sample_weight", argument="sample_weight")
        targets = torch.from_numpy(np.array(y, dtype=np.float64))
        predictive: Any = self.predict_dist(X)
        return float(predictive.evaluate(targets)["concordance"])


def count_outputs(likelihood: RealLikelihood, targets: Tensor) -> int:
    """Returns the number of outputs that a network needs for a likelihood of some targets."""
    units = torch.ones(likelihood.link(targets[:1]).numel())
    return len(likelihood.output_units(units, units)[0])
