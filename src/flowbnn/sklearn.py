"""Estimators for scikit-learn: :class:`BayesianClassifier` and :class:`BayesianRegressor`.

They fit any method of flowbnn to tables, and work in pipelines, cross-validation and grid searches. Inputs and targets are standardized
inside, and predictions are in the units of the data.

>>> from sklearn.datasets import load_iris
>>> from sklearn.pipeline import make_pipeline
>>> from sklearn.preprocessing import PolynomialFeatures
>>> X, y = load_iris(return_X_y=True)
>>> model = make_pipeline(PolynomialFeatures(2), BayesianClassifier("map", epochs=20, lr=0.01, random_state=0)).fit(X, y)
>>> model.predict_proba(X[:2]).shape, bool(model.score(X, y) > 0.9)
((2, 3), True)

The module needs scikit-learn, which ``import flowbnn`` does not: ``pip install flowbnn[sklearn]``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("flowbnn.sklearn needs scikit-learn: pip install flowbnn[sklearn]") from error

from flowbnn.batches import dtype_of
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods import Flow, Gaussian, Likelihood, Mixture, RealLikelihood
from flowbnn.methods import MAP, METHODS, Calibrator, Method, Posterior, Temperature
from flowbnn.options import Count, Ge, Positive, Probability, SampleCount, call_factory, check
from flowbnn.predictive import Predictive
from flowbnn.predictive.continuous import Interval
from flowbnn.regression import TargetStatistics, is_varying, scale_dtype, set_output_scale
from flowbnn.training.randomness import preserve_rng_state

__all__ = ["BayesianClassifier", "BayesianRegressor", "nll_score"]

NetworkFactory = Callable[[int, int], nn.Module]
ALIASES = {"ensemble": "deep-ensemble", "dropout": "mc-dropout"}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}
PARAMETERS: dict[str, Any] = {  # valid values, checked by fit
    "method": str | Method,
    "hidden_sizes": Sequence[Count],
    "activation": Literal["relu", "tanh", "silu", "gelu"],
    "network": nn.Module | Callable | None,
    "epochs": Annotated[int, Ge(0)] | None,
    "lr": Positive | None,
    "batch_size": Count | Literal["auto"],
    "samples": SampleCount | None,
    "calibrate": bool | str | Calibrator,
    "standardize": bool,
    "verbose": bool,
    "fit_options": Mapping[str, Any] | None,
}
MAX_ROWS = 8192  # rows of one prediction, which bounds the memory of its samples


class _BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators: parameters, fit and prediction of a posterior."""

    def __init__(
        self,
        method: str | Method = "ensemble",
        *,
        hidden_sizes: Sequence[int] = (50, 50),
        activation: str = "relu",
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
        self.method = method
        self.hidden_sizes = hidden_sizes
        self.activation = activation
        self.network = network
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.samples = samples
        self.calibrate = calibrate
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose
        self.fit_options = fit_options

    # -------------------- fit

    def _fit(self, X: NDArray[Any], targets: Tensor, likelihood: Likelihood | str, num_outputs: int) -> Self:
        """Fits the posterior.

        Args:
            X: Inputs that have been validated, ``[N, F]``.
            targets: Targets as the likelihood expects them.
            likelihood: Likelihood, or ``"auto"``.
            num_outputs: Number of outputs of the network.
        """
        for name, annotation in PARAMETERS.items():
            check(name, getattr(self, name), annotation, owner=type(self).__name__)
        method = self._make_method()
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = StandardScaler().fit(X) if self.standardize else None
        with preserve_rng_state(None, self._seed):
            network = self._make_network(X.shape[1], num_outputs)
            if isinstance(likelihood, RealLikelihood) and network is not self.network:
                _standardize_outputs(network, likelihood, targets)
            size = (
                min(len(X), 64 if len(X) < 10_000 else 256) if self.batch_size == "auto" else self.batch_size
            )
            loader = TensorLoader(
                self._to_inputs(X, dtype_of(network)),
                targets,
                batch_size=size,
                shuffle=True,
                generator=torch.Generator().manual_seed(self._seed),
            )
            options = {"seed": self._seed, "progress": self.verbose, **(self.fit_options or {})}
            self.posterior_: Posterior = method.fit(network, loader, likelihood=likelihood, **options)
        self.n_iter_ = self.posterior_.history.epochs
        return self

    def _make_method(self) -> Method:
        """Returns the method with ``epochs`` and ``lr``, inside of the calibrator if there is one."""
        method = self.method if isinstance(self.method, Method) else _find_method(self.method, "method")()
        if isinstance(self.method, str) and isinstance(method, Calibrator):
            method = replace(method, method=MAP())
        changes = {name: getattr(self, name) for name in ("epochs", "lr") if getattr(self, name) is not None}
        if isinstance(method, Calibrator) and method.method is not None:
            method = replace(method, method=replace(method.method, **changes))
        else:
            method = replace(method, **changes)
        if self.calibrate is False:
            return method
        calibrator = Temperature() if self.calibrate is True else self.calibrate
        if isinstance(calibrator, str):
            calibrator = _find_method(calibrator, "calibrate")()
        if not isinstance(calibrator, Calibrator) or isinstance(method, Calibrator):
            text = f"calibrate needs a calibrator of another method, got {calibrator!r} and method={method!r}; set calibrate=True"
            raise FlowBNNError(text, kind="value", argument="calibrate")
        return replace(calibrator, method=method)

    def _make_network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        """Returns the network of the user, the result of the factory, or a multilayer perceptron."""
        if isinstance(self.network, nn.Module):
            return self.network
        if self.network is not None:
            network: nn.Module = call_factory(
                self.network, num_inputs, num_outputs, name="network", kind=nn.Module
            )
            return network
        layers: list[nn.Module] = []
        width = num_inputs
        for size in self.hidden_sizes:
            layers += [nn.Linear(width, int(size)), ACTIVATIONS[self.activation]()]
            width = int(size)
        return nn.Sequential(*layers, nn.Linear(width, num_outputs))

    # -------------------- prediction

    def _to_inputs(self, X: NDArray[Any], dtype: torch.dtype | None) -> Tensor:
        """Returns standardized inputs as a tensor."""
        values = X if self.scaler_ is None else self.scaler_.transform(X)
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype or torch.float32)

    def _read_inputs(self, X: Any) -> Tensor:
        """Validates inputs as scikit-learn does, and returns them as a tensor."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        return self._to_inputs(X, dtype_of(self.posterior_.model))

    def _predict_rows(self, inputs: Tensor) -> Any:
        return self.posterior_.predict(
            inputs, self.samples, seed=self._seed, progress=False, keep_samples=True
        ).cpu()

    def _map_rows(self, X: Any, *functions: Callable[[Any], Tensor]) -> list[NDArray[Any]]:
        """Returns functions of the predictive distribution, each an array ``[N, ...]``, computed for some rows at a time."""
        parts = []
        for rows in self._read_inputs(X).split(MAX_ROWS):
            predictive = self._predict_rows(rows)
            parts.append([function(predictive) for function in functions])
        return [torch.cat(values).numpy() for values in zip(*parts, strict=True)]

    def predict_dist(self, X: ArrayLike) -> Predictive:
        """Returns the predictive distribution of flowbnn, with all its quantities.

        The tensors of the distribution are in the order of the rows. Class indices refer to ``classes_``.

        Args:
            X: Inputs ``[N, F]``.
        """
        predictive: Predictive = self._predict_rows(self._read_inputs(X))
        return predictive


class BayesianClassifier(ClassifierMixin, _BayesianEstimator):
    """Classifier with a Bayesian neural network, for use with scikit-learn.

    Args:
        method: Method that fits the posterior: a name (``"ensemble"``, ``"map"``, ``"laplace"``, ``"node-noise"``, ``"mc-dropout"``,
            ``"swag"``, ``"hmc"`` and all others of :data:`flowbnn.methods.METHODS`), or an object such as ``fb.DeepEnsemble(10)``.
        hidden_sizes: Widths of the hidden layers.
        activation: Activation function, ``"relu"``, ``"tanh"``, ``"silu"`` or ``"gelu"``.
        network: Network that replaces the perceptron of ``hidden_sizes``, or a function ``(num_inputs, num_outputs) -> network``. The
            function is called in every fit. A network is copied.
        epochs: Number of passes over the data. None ends at a plateau on a held-out tenth of the data.
        lr: Learning rate. None is the default of the method.
        batch_size: Number of rows in a batch. ``"auto"`` is 64, or 256 for at least 10,000 rows.
        samples: Number of sampled networks in a prediction. None is the default of the posterior.
        calibrate: Calibration on held-out rows. True fits a temperature (:class:`flowbnn.Temperature`) on a tenth of the rows. The
            name of another calibrator, or an object, is also possible.
        standardize: If True, inputs are scaled to zero mean and unit variance.
        random_state: Seed or generator of the fit. Predictions of a fitted estimator never vary.
        verbose: If True, shows a progress bar.
        fit_options: Further options of ``method.fit``, such as ``{"accelerator": "cpu", "precision": "64-true"}``.

    Attributes:
        classes_: Labels in sorted order.
        posterior_: Fitted :class:`~flowbnn.Posterior`. Its inputs are those of ``scaler_``.
        scaler_: Scaler of the inputs, or None.
        n_iter_: Number of epochs.
        n_features_in_: Number of columns at fit.
        feature_names_in_: Names of the columns at fit, if all are strings.

    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True, as_frame=True)
    >>> y = y.map({0: "barolo", 1: "grignolino", 2: "barbera"})
    >>> model = BayesianClassifier("map", hidden_sizes=(16,), epochs=20, lr=0.01, random_state=0).fit(X, y)
    >>> model.classes_.tolist(), bool(model.score(X, y) > 0.95)
    (['barbera', 'barolo', 'grignolino'], True)
    >>> model.predict_set(X[:2], level=0.9)
    array([[False,  True, False],
           [False,  True, False]])
    """

    classes_: NDArray[Any]

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fits the posterior.

        Args:
            X: Inputs ``[N, F]``: an array, or a data frame of numbers.
            y: Labels ``[N]``: numbers, strings or booleans.

        Raises:
            ValueError: If the data are invalid, or if there is only one class.
        """
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            text = f"y has only one class, {self.classes_.tolist()[0]!r}; BayesianClassifier needs at least 2 classes"
            raise FlowBNNError(text, kind="targets", argument="y")
        return self._fit(np.asarray(X), torch.from_numpy(labels).long(), "auto", len(self.classes_))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Returns the most probable label of each row, ``[N]``.

        Args:
            X: Inputs ``[N, F]``.
        """
        (probabilities,) = self._map_rows(X, lambda predictive: predictive.probabilities)
        return self.classes_[probabilities.argmax(1)]

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Returns the predictive probabilities of all classes, ``[N, C]``, in the order of ``classes_``.

        Args:
            X: Inputs ``[N, F]``.
        """
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Returns the logarithms of the predictive probabilities, ``[N, C]``, without underflow.

        Args:
            X: Inputs ``[N, F]``.
        """
        (values,) = self._map_rows(X, lambda p: p.log_probabilities.double().log_softmax(-1))
        return values

    def predict_set(self, X: ArrayLike, level: float = 0.9) -> NDArray[np.bool_]:
        """Returns the smallest sets of classes with at least this predictive probability, as booleans ``[N, C]``.

        Args:
            X: Inputs ``[N, F]``.
            level: Probability of the sets.
        """
        check("level", level, Probability)
        (values,) = self._map_rows(X, lambda predictive: predictive.credible_set(level))
        return values

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draws labels from the predictive distribution, ``[N, n_samples]``. All rows of a draw are predicted by the same network.

        Args:
            X: Inputs ``[N, F]``.
            n_samples: Number of draws.
            random_state: Seed or generator of the draws.
        """
        draws = self.predict_dist(X).sample(n_samples, seed=_draw_seed(random_state))
        return self.classes_[draws.T.numpy()]


class BayesianRegressor(RegressorMixin, _BayesianEstimator):
    """Regressor with a Bayesian neural network, for use with scikit-learn.

    Args:
        method: Method that fits the posterior: a name (``"ensemble"``, ``"map"``, ``"laplace"``, ``"node-noise"``, ``"mc-dropout"``,
            ``"swag"``, ``"hmc"`` and all others of :data:`flowbnn.methods.METHODS`), or an object such as ``fb.DeepEnsemble(10)``.
        likelihood: Distribution of the targets. ``"gaussian"`` has one learned noise scale, ``"heteroscedastic"`` a noise scale that
            depends on the inputs. ``"mixture"`` and ``"flow"`` have noise of any shape. An object of :mod:`flowbnn.likelihoods` is
            also possible.
        hidden_sizes: Widths of the hidden layers.
        activation: Activation function, ``"relu"``, ``"tanh"``, ``"silu"`` or ``"gelu"``.
        network: Network that replaces the perceptron of ``hidden_sizes``, or a function ``(num_inputs, num_outputs) -> network``. The
            function is called in every fit. A network is copied.
        epochs: Number of passes over the data. None ends at a plateau on a held-out tenth of the data.
        lr: Learning rate. None is the default of the method.
        batch_size: Number of rows in a batch. ``"auto"`` is 64, or 256 for at least 10,000 rows.
        samples: Number of sampled networks in a prediction. None is the default of the posterior.
        calibrate: Calibration on held-out rows. True fits a temperature (:class:`flowbnn.Temperature`) on a tenth of the rows. The
            name of another calibrator, or an object, is also possible.
        standardize: If True, inputs are scaled to zero mean and unit variance.
        random_state: Seed or generator of the fit. Predictions of a fitted estimator never vary.
        verbose: If True, shows a progress bar.
        fit_options: Further options of ``method.fit``, such as ``{"accelerator": "cpu", "precision": "64-true"}``.

    Attributes:
        posterior_: Fitted :class:`~flowbnn.Posterior`. Its inputs are those of ``scaler_``, its outputs are in the units of ``y``.
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
        return self._fit(np.asarray(X), targets, likelihood, _count_outputs(likelihood, targets[0].numel()))

    def _make_likelihood(self, dim: int) -> RealLikelihood:
        """Returns the likelihood of ``dim`` targets."""
        names = Literal["gaussian", "heteroscedastic", "mixture", "flow"]
        check("likelihood", self.likelihood, names | RealLikelihood, owner=type(self).__name__)
        if isinstance(self.likelihood, RealLikelihood):
            return self.likelihood
        if self.likelihood == "gaussian":
            return Gaussian(dim=dim)
        if self.likelihood == "heteroscedastic":
            return Gaussian("predicted", dim=dim)
        return Flow(dim=dim) if self.likelihood == "flow" else Mixture(dim=dim)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Returns the predictive mean, ``[N]`` or ``[N, D]``, and the predictive standard deviation on request.

        Args:
            X: Inputs ``[N, F]``.
            return_std: If True, returns the mean and the standard deviation.
        """
        if return_std:
            return tuple(self._map_rows(X, lambda p: p.mean.double(), lambda p: p.std.double()))
        return self._map_rows(X, lambda p: p.mean.double())[0]

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> Interval:
        """Returns central predictive intervals with ends ``low`` and ``high``, ``[N]`` or ``[N, D]``.

        Args:
            X: Inputs ``[N, F]``.
            level: Probability of the intervals.
        """
        check("level", level, Probability)
        (ends,) = self._map_rows(X, lambda p: torch.stack([*p.interval(level)], 1).double())
        return Interval(ends[:, 0], ends[:, 1])

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draws targets from the predictive distribution, ``[N, n_samples]`` or ``[N, D, n_samples]``.

        All rows of a draw are predicted by the same network.

        Args:
            X: Inputs ``[N, F]``.
            n_samples: Number of draws.
            random_state: Seed or generator of the draws.
        """
        draws = self.predict_dist(X).sample(n_samples, seed=_draw_seed(random_state))
        return draws.movedim(0, -1).double().numpy()


def nll_score(estimator: BaseEstimator, X: Any, y: Any) -> float:
    """Returns the mean predictive log-likelihood of data, as a ``scoring`` function of scikit-learn. Larger is better.

    For several targets it is the log-density of all of them.

    Args:
        estimator: Fitted :class:`BayesianClassifier` or :class:`BayesianRegressor`.
        X: Inputs ``[N, F]``.
        y: Labels, or targets in the units of the data.

    >>> from sklearn.model_selection import cross_val_score
    >>> X = np.linspace(-1.0, 1.0, 60)[:, None]
    >>> model = BayesianRegressor("map", hidden_sizes=(8,), epochs=20, lr=0.01, random_state=0)
    >>> cross_val_score(model, X, X[:, 0] ** 2, cv=3, scoring=nll_score).shape
    (3,)
    """
    predictive = estimator.predict_dist(X)
    if not isinstance(estimator, BayesianClassifier):
        return float(predictive.log_prob(torch.from_numpy(np.array(y, dtype=np.float64))).mean())
    labels = np.searchsorted(estimator.classes_, np.asarray(y))
    return float(predictive.log_prob(torch.from_numpy(labels)).mean())


def _find_method(name: str, argument: str) -> type[Method]:
    """Returns the class of a method.

    Args:
        name: Name of the method in kebab-case or snake_case, or a short name.
        argument: Argument that holds the name.

    Raises:
        FlowBNNError: If there is no such method.

    >>> _find_method("deep_ensemble", "method").__name__, _find_method("ensemble", "method").__name__
    ('DeepEnsemble', 'DeepEnsemble')
    """
    key = ALIASES.get(name, name).replace("_", "-")
    if key not in METHODS:
        text = f"unknown method '{name}'{nearest(name, [*ALIASES, *METHODS])}"
        raise FlowBNNError(text, kind="value", argument=argument)
    return METHODS[key]


def _count_outputs(likelihood: RealLikelihood, dim: int) -> int:
    """Returns the number of outputs of a network for a likelihood of ``dim`` targets."""
    if isinstance(likelihood, Gaussian):
        return 2 * dim if likelihood.noise == "predicted" else dim
    return int(getattr(likelihood, "num_outputs", dim))


def _standardize_outputs(network: nn.Module, likelihood: RealLikelihood, targets: Tensor) -> None:
    """Sets a fresh network to return outputs in the units of the targets, so that its weights see standardized targets."""
    statistics = TargetStatistics()
    statistics.add(targets)
    varying = is_varying(statistics.mean, statistics.variance)
    scale = torch.where(varying, statistics.variance.sqrt(), 1.0)
    dtype = scale_dtype(network, statistics)
    set_output_scale(network, *(value.to(dtype) for value in likelihood.output_units(statistics.mean, scale)))


def _draw_seed(random_state: Any) -> int:
    """Returns a seed from a seed or generator of scikit-learn."""
    return int(check_random_state(random_state).randint(2**31 - 1))
