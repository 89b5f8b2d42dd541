"""Classifier for scikit-learn."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from flowbnn.errors import quote_names, requirement_error, value_error
from flowbnn.options import Probability, check
from flowbnn.sklearn.base import BayesianEstimator, draw_seed


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """Classifier with a Bayesian neural network, for use with scikit-learn.

    Args:
        method: Method that fits the posterior: a name (``"ensemble"``, ``"map"``, ``"laplace"``, ``"node-noise"``, ``"mc-dropout"``,
            ``"swag"``, ``"hmc"`` and all others of :data:`flowbnn.methods.METHODS`), or an object such as ``fb.DeepEnsemble(10)``.
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
            The name of a calibrator, such as ``"vector"`` or ``"matrix"``, or an object, is also possible.
        standardize: If True, inputs are scaled to zero mean and unit variance.
        random_state: Seed or generator of the fit. Predictions of a fitted estimator never vary.
        verbose: If True, shows a progress bar.
        fit_options: Further options of ``method.fit``, such as ``{"accelerator": "cpu", "precision": "64-true"}``.

    Attributes:
        classes_: Labels in sorted order.
        posterior_: Fitted :class:`~flowbnn.Posterior`. Its data are those of :meth:`to_tensors`.
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
            value, fields = f"one class ({self.classes_.tolist()[0]!r})", {"kind": "targets", "argument": "y"}
            raise requirement_error("BayesianClassifier", "at least 2 classes", value, **fields)
        return self._fit(np.asarray(X), torch.from_numpy(labels).long(), "auto", len(self.classes_))

    def _encode_targets(self, y: Any) -> Tensor:
        labels = column_or_1d(y)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            expected = f"among the classes {quote_names([str(name) for name in self.classes_])} of the fit"
            raise value_error("y", expected, repr(unknown.tolist()[0]), kind="targets")
        return torch.from_numpy(np.searchsorted(self.classes_, labels))

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
        draws = self.predict_dist(X).sample(n_samples, seed=draw_seed(random_state))
        return self.classes_[draws.T.numpy()]
