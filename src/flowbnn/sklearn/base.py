"""Base class of the estimators: parameters, fit and prediction of a posterior."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from flowbnn.batches import dtype_of
from flowbnn.data import TensorLoader
from flowbnn.errors import check_name, value_error
from flowbnn.likelihoods import Likelihood, RealLikelihood
from flowbnn.methods import (
    MAP,
    METHODS,
    Calibrator,
    LastLayerRefit,
    MatrixScaling,
    Method,
    Posterior,
    Temperature,
    VectorScaling,
)
from flowbnn.models import PeriodicEmbedding
from flowbnn.options import Count, Ge, Positive, SampleCount, call_factory, check
from flowbnn.predictive import Predictive
from flowbnn.regression import TargetStatistics, is_varying, scale_dtype, set_output_scale
from flowbnn.training.randomness import preserve_rng_state

NetworkFactory = Callable[[int, int], nn.Module]
ALIASES = {"ensemble": "deep-ensemble", "dropout": "mc-dropout"}
CALIBRATORS: dict[
    str, type[Calibrator]
] = {  # the short names are those of the candidates of flowbnn.calibrate
    "temperature": Temperature,
    "vector": VectorScaling,
    "vector-scaling": VectorScaling,
    "matrix": MatrixScaling,
    "matrix-scaling": MatrixScaling,
    "refit": LastLayerRefit,
    "last-layer-refit": LastLayerRefit,
}
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
    "embedding": Literal["periodic"] | None,
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


class BayesianEstimator(BaseEstimator, ABC):
    """Base class of both estimators, see :class:`~flowbnn.sklearn.BayesianClassifier` for the parameters."""

    _max_rows = 8192  # rows of one prediction, which bounds the memory of its samples

    def __init__(
        self,
        method: str | Method = "ensemble",
        *,
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
        self.method = method
        self.hidden_sizes = hidden_sizes
        self.activation = activation
        self.embedding = embedding
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
        self._seed = draw_seed(self.random_state)
        self.scaler_ = StandardScaler().fit(X) if self.standardize else None
        with preserve_rng_state(None, self._seed):
            network = self._make_network(X.shape[1], num_outputs)
            if isinstance(likelihood, RealLikelihood) and network is not self.network:
                standardize_outputs(network, likelihood, targets)
            default_size = min(len(X), 64 if len(X) < 10_000 else 256)
            loader = TensorLoader(
                self._to_inputs(X, dtype_of(network)),
                targets,
                batch_size=default_size if self.batch_size == "auto" else self.batch_size,
                shuffle=True,
                generator=torch.Generator().manual_seed(self._seed),
            )
            options = {"seed": self._seed, "progress": self.verbose, **(self.fit_options or {})}
            self.posterior_: Posterior = method.fit(network, loader, likelihood=likelihood, **options)
        self.n_iter_ = self.posterior_.history.epochs
        return self

    def _make_method(self) -> Method:
        """Returns the method with ``epochs`` and ``lr``, inside of the calibrator if there is one."""
        method = self.method if isinstance(self.method, Method) else find_method(self.method)()
        if isinstance(self.method, str) and isinstance(method, Calibrator):
            method = replace(method, method=MAP())
        changes = {name: getattr(self, name) for name in ("epochs", "lr") if getattr(self, name) is not None}
        if isinstance(method, Calibrator) and method.method is not None:
            method = replace(method, method=replace(method.method, **changes))
        else:
            method = replace(method, **changes)
        if self.calibrate is False:
            return method
        calibrator: Any = Temperature() if self.calibrate is True else self.calibrate
        if isinstance(calibrator, str):
            calibrator = find_calibrator(calibrator)()
        if not isinstance(calibrator, Calibrator) or isinstance(method, Calibrator):
            value = f"{calibrator!r} with method={method!r}"
            raise value_error("calibrate", "a calibrator of another method", value, "set calibrate=True")
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
        if self.embedding is not None:
            embedding = PeriodicEmbedding(num_inputs)
            layers, width = [embedding], embedding.outputs
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

    @abstractmethod
    def _encode_targets(self, y: Any) -> Tensor:
        """Returns targets as ``posterior_`` expects them."""

    def to_tensors(self, X: ArrayLike, y: ArrayLike | None = None) -> Any:
        """Returns data as ``posterior_`` expects them, for functions of flowbnn such as ``fb.conformalize`` and ``fb.evaluate``.

        Args:
            X: Inputs ``[N, F]``.
            y: Targets, or None.

        Returns:
            Standardized inputs, or a pair of them and of targets. Targets of a classifier are indices into ``classes_``. Those of a
            regressor keep their units.
        """
        inputs = self._read_inputs(X)
        if y is None:
            return inputs
        check_consistent_length(X, y)
        return inputs, self._encode_targets(y)

    def _predict_rows(self, inputs: Tensor) -> Any:
        return self.posterior_.predict(
            inputs, self.samples, seed=self._seed, progress=False, keep_samples=True
        ).cpu()

    def _map_rows(self, X: Any, *functions: Callable[[Any], Tensor]) -> list[NDArray[Any]]:
        """Returns functions of the predictive distribution, each an array ``[N, ...]``, computed for some rows at a time."""
        parts = []
        for rows in self._read_inputs(X).split(self._max_rows):
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


def find_method(name: str) -> type[Method]:
    """Returns the class of a method.

    Args:
        name: Name of the method in kebab-case or snake_case, or a short name.

    Raises:
        FlowBNNError: If there is no such method.

    >>> find_method("deep_ensemble").__name__, find_method("ensemble").__name__
    ('DeepEnsemble', 'DeepEnsemble')
    """
    key = ALIASES.get(name, name).replace("_", "-")
    if key not in METHODS:
        check_name(name, [*ALIASES, *METHODS], "method", argument="method")
    return METHODS[key]


def find_calibrator(name: str) -> type[Calibrator]:
    """Returns the class of a calibrator.

    Args:
        name: Name of the calibrator in kebab-case or snake_case, or of a candidate of :func:`flowbnn.calibrate`.

    Raises:
        FlowBNNError: If there is no such calibrator.

    >>> find_calibrator("vector_scaling").__name__, find_calibrator("vector").__name__
    ('VectorScaling', 'VectorScaling')
    """
    key = name.replace("_", "-")
    if key not in CALIBRATORS:
        check_name(name, CALIBRATORS, "calibrator", argument="calibrate")
    return CALIBRATORS[key]


def standardize_outputs(network: nn.Module, likelihood: RealLikelihood, targets: Tensor) -> None:
    """Sets a fresh network to return outputs in the units of the targets, so that its weights see standardized targets."""
    statistics = TargetStatistics()
    statistics.add(likelihood.link(targets))
    varying = is_varying(statistics.mean, statistics.variance)
    scale = torch.where(varying, statistics.variance.sqrt(), 1.0)
    dtype = scale_dtype(network, statistics)
    set_output_scale(network, *(value.to(dtype) for value in likelihood.output_units(statistics.mean, scale)))


def draw_seed(random_state: Any) -> int:
    """Returns a seed from a seed or generator of scikit-learn."""
    return int(check_random_state(random_state).randint(2**31 - 1))
