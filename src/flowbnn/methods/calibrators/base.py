"""Base classes of post-hoc calibrators and of the posteriors that they return.

A calibrator takes a trained network, or a posterior of any method, and data that the weights were not trained on. It trains nothing:

>>> import torch, flowbnn as fb
>>> network, generator = torch.nn.Identity(), torch.Generator().manual_seed(0)  # the inputs are logits
>>> logits = 2.0 * torch.randn(200, 3, generator=generator)
>>> held_out = logits, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
>>> for calibrator in (fb.Temperature(), fb.VectorScaling(), fb.MatrixScaling()):
...     print(calibrator.fit(network, held_out, progress=False).predict(torch.zeros(1, 3)).probabilities.shape)
torch.Size([1, 3])
torch.Size([1, 3])
torch.Size([1, 3])

``Temperature(fb.MAP())`` fits a method first: ``fit`` then takes training data, and calibrates on ``validation`` or on a part of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import field, fields, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from flowbnn.data.formats import as_loader, columns_of
from flowbnn.errors import FlowBNNError, close_words, describe_value, requirement_error
from flowbnn.methods.base import FitOptions, Method, PointMethod, misplaced_setting
from flowbnn.methods.calibrators.label_problems import warn_contradiction, warn_unusable
from flowbnn.methods.data_summary import check_loader, first_batch
from flowbnn.methods.loader_split import split_loader
from flowbnn.methods.preparation import prepare, refuse_inference_mode
from flowbnn.networks import copy_network, input_columns, set_input_columns
from flowbnn.noise.base import check_without_noise
from flowbnn.options import Count, Probability, accepts_options_of, checked, options
from flowbnn.posterior.base import Posterior, PredictOptions
from flowbnn.posterior.gated import GatedPosterior, check_without_gate
from flowbnn.posterior.weights import PointPosterior
from flowbnn.posterior.wrapper import WrappedPosterior
from flowbnn.predictive import CategoricalPredictive
from flowbnn.regression import fit_residual_scale
from flowbnn.training.device import move_to_accelerator
from flowbnn.training.randomness import preserve_rng_state


@options(repr=False)
class Calibrator(Method, ABC):
    """Base class for methods that calibrate a trained network, or another method, on held-out data.

    Subclasses define :meth:`calibrate`. Those that need only the outputs of the network are subclasses of :class:`OutputCalibrator`.

    Args:
        method: Method that is fitted first. None calibrates the network as it is, and trains nothing.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the held-out data. None for the default of the posterior.
    """

    needs_weights: ClassVar[bool] = False

    method: Method | None = None
    validation_fraction: Probability = field(default=0.1, kw_only=True)
    samples: Count | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        defaults = {setting.name: setting.default for setting in fields(Method)}
        inherited = [
            setting for setting in fields(self) if setting.default == defaults.get(setting.name, ...)
        ]
        changed = next((s.name for s in inherited if getattr(self, s.name) != s.default), None)
        if changed is not None:
            value = getattr(self, changed)
            if self.method is None:
                raise _training_setting(type(self).__name__, changed, value, changed)
            raise misplaced_setting(changed, type(self.method).__name__, value)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module | Posterior, loader: Any, **kwargs: Any) -> Posterior:
        """Calibrates a trained network, or fits ``method`` and calibrates its posterior.

        Args:
            network: Trained network, which is not changed, or a posterior of any method. With ``method`` it is a network to train.
                A posterior with a density gate keeps its gate and fallback.
            loader: Held-out batches of ``(inputs, targets)``, or one pair. With ``method`` these are training data.
            kwargs: Options of :class:`~flowbnn.methods.FitOptions`. Without ``method`` only ``likelihood``, ``accelerator``, ``seed``
                and ``progress`` are used. With ``method`` the calibration uses ``validation``, by default a random fraction of the
                loader. A method that trains nothing, such as ``MAP(epochs=0)``, leaves all of the loader to the calibration.
        """
        refuse_inference_mode()
        if isinstance(network, GatedPosterior):
            return GatedPosterior(self.fit(network.posterior, loader, **kwargs), network.gate)
        if self.method is None:
            columns = network.columns if isinstance(network, Posterior) else input_columns(network)
            held_out = as_loader(loader, stage="validation", columns=columns)
            posterior, held_out, options = self._wrap_network(network, held_out, kwargs)
        else:
            posterior, held_out, options = self._fit_method(network, loader, kwargs)
        return self.calibrate(posterior, held_out, seed=options.seed or 0, progress=options.progress)

    @abstractmethod
    def calibrate(
        self, posterior: Posterior, held_out: Iterable[Any], *, seed: int = 0, progress: bool = True
    ) -> Posterior:
        """Returns the calibrated posterior.

        Args:
            posterior: Posterior of any method.
            held_out: Batches of ``(inputs, targets)`` to which the posterior was not fitted.
            seed: Seed of the predictions.
            progress: If True, shows a progress bar.
        """

    def _wrap_network(
        self, network: Any, held_out: Any, kwargs: dict[str, Any]
    ) -> tuple[Posterior, Any, FitOptions]:
        """Returns the network as a posterior, with the held-out data and the options."""
        name = type(self).__name__
        trained = {setting.name for setting in fields(Method)}
        settings = {setting.name for setting in fields(self)} - trained
        accepted = {option.name for option in fields(FitOptions)} - trained
        for key in kwargs:
            close = next(iter(close_words(key, [*accepted, *settings, *trained])), "")
            if close in settings:
                raise misplaced_setting(close, name, kwargs[key])
            if close in trained:
                raise _training_setting(name, close, kwargs[key], key)
        options = FitOptions(**kwargs)
        supported = "likelihood", "accelerator", "seed", "progress"
        unused = next((option for option in kwargs if option not in supported), None)
        if unused is not None:
            hint = f"use {name}(fb.MAP())"
            raise requirement_error(
                unused, "a trained method", hint=hint, kind="unsupported", argument=unused
            )
        check_loader(held_out, "calibration")
        if isinstance(network, Posterior):
            return network, held_out, options
        return point_posterior(network, held_out, options, name), held_out, options

    def _fit_method(
        self, network: Any, loader: Iterable[Any], kwargs: dict[str, Any]
    ) -> tuple[Posterior, Any, FitOptions]:
        """Fits the inner method, and returns its posterior, the held-out data and the options."""
        assert self.method is not None
        _, loader, options = self.method.setup(network, loader, kwargs)
        if (
            options.validation_loader is None
            and isinstance(self.method, PointMethod)
            and not self.method.trains
        ):
            return self.method.fit(network, loader, **kwargs), loader, options
        if options.validation_loader is None:
            loader, validation = split_loader(loader, self.validation_fraction, options.seed or 0)
            num_data = options.num_data
            if num_data is not None:
                num_data = max(1, round(num_data * (1.0 - self.validation_fraction)))
            options = replace(options, validation=validation, num_data=num_data)
        kwargs = {**kwargs, "validation": options.validation_loader, "num_data": options.num_data}
        return self.method.fit(network, loader, **kwargs), options.validation_loader, options


@options(repr=False)
class OutputCalibrator(Calibrator):
    """Base class for calibrators that need only the outputs of a posterior. They work with any posterior.

    Subclasses define :meth:`calibrate_outputs` and :meth:`identity_calibration`.

    Args:
        method: Method that is fitted first. None calibrates the network as it is, and trains nothing.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the held-out data. None for the default of the posterior.
    """

    checks_labels: ClassVar[bool] = False  # True to warn about labels that contradict the predictions

    @checked
    def calibrate(
        self, posterior: Posterior, held_out: Iterable[Any], *, seed: int = 0, progress: bool = True
    ) -> Posterior:
        """Returns the calibrated posterior; see :meth:`Calibrator.calibrate`.

        A warning is raised, and predictions are not changed, if all targets are equal or if there are fewer than 4.
        """
        outputs, targets = collect_outputs(posterior, held_out, self.samples, seed, progress)
        predictive = posterior._predictive(outputs)
        if warn_unusable(predictive, targets):
            return self.identity_calibration(posterior, outputs)
        if self.checks_labels:
            warn_contradiction(predictive, targets)
        return self.calibrate_outputs(posterior, outputs, targets)

    @abstractmethod
    def calibrate_outputs(self, posterior: Posterior, outputs: Tensor, targets: Tensor) -> Posterior:
        """Returns the calibrated posterior.

        Args:
            posterior: Posterior of any method.
            outputs: Sampled outputs of the posterior for the held-out data, ``[S, N, ...]``, in float64.
            targets: Targets of the held-out data.
        """

    @abstractmethod
    def identity_calibration(self, posterior: Posterior, outputs: Tensor) -> Posterior:
        """Returns a calibrated posterior with the same predictions as ``posterior``, for held-out data that cannot calibrate it.

        Args:
            posterior: Posterior of any method.
            outputs: Sampled outputs of the posterior for the held-out data, ``[S, N, ...]``, in float64.
        """


def _training_setting(calibrator: str, name: str, value: Any, argument: str) -> FlowBNNError:
    """Returns the error for a setting of a training, passed to a calibrator that trains nothing.

    Args:
        calibrator: Name of the calibrator.
        name: Name of the setting.
        value: Value of the setting.
        argument: Name of the argument, which may be misspelled.
    """
    hint = f"use {calibrator}(fb.MAP({name}={describe_value(value)}))"
    requirement = "a method to train"
    return requirement_error(name, requirement, hint=hint, kind="unknown setting", argument=argument)


def point_posterior(network: Any, held_out: Any, options: FitOptions, owner: str) -> PointPosterior:
    """Returns a copy of a trained network as a posterior, with a likelihood that fits the held-out data.

    Args:
        network: Trained network.
        held_out: Batches of ``(inputs, targets)``. A learned noise scale is fitted to their residuals.
        options: Options with the likelihood, the accelerator and the seed.
        owner: Name of the calibrator, for messages.

    Raises:
        FlowBNNError: If the network is no module, or has noise.
    """
    check_without_noise(network, owner)
    model = move_to_accelerator(copy_network(network), options.accelerator).eval()
    likelihood = prepare(model, held_out, options, trained=False).likelihood
    with preserve_rng_state(held_out, options.seed or 0):
        fit_residual_scale(model, likelihood, held_out)
    return PointPosterior(set_input_columns(model, columns_of(held_out)), likelihood)


def collect_outputs(
    posterior: Posterior, held_out: Iterable[Any], samples: int | None, seed: int, progress: bool
) -> tuple[Tensor, Tensor]:
    """Returns sampled outputs ``[S, N, ...]`` for held-out data in float64, and the targets.

    Args:
        posterior: Posterior of any method.
        held_out: Batches of ``(inputs, targets)``, or one pair.
        samples: Number of samples. None for the default of the posterior.
        seed: Seed of the predictions.
        progress: If True, shows a progress bar.

    Raises:
        FlowBNNError: If the posterior has a density gate, whose fallback cannot be calibrated.
    """
    check_without_gate(posterior)
    held_out = as_loader(held_out, stage="validation", argument="held_out", columns=posterior.columns)
    first_batch(held_out, "calibration")
    outputs, _, targets = posterior.collect(held_out, PredictOptions(samples, seed=seed, progress=progress))
    assert targets is not None
    targets = posterior.likelihood.canonical_targets(targets).to(outputs.device)
    return outputs.double(), targets


def class_log_samples(posterior: Posterior, outputs: Tensor, owner: str) -> Tensor:
    """Returns the log-probabilities ``[S, N, C]`` of sampled outputs.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, N, ...]``.
        owner: Name of the calibrator, for messages.

    Raises:
        FlowBNNError: If the targets are not classes.
    """
    predictive = posterior._predictive(outputs)
    if not isinstance(predictive, CategoricalPredictive):
        value, hint = repr(posterior.likelihood), "use fb.Temperature or fb.calibrate"
        raise requirement_error(owner, "classes", value, hint, kind="likelihood", argument="likelihood")
    return predictive.log_samples


class CalibratedPosterior(WrappedPosterior):
    """Base class for posteriors whose predictive distribution is a function of that of an inner posterior.

    Subclasses define :meth:`transform`, and ``settings``, ``state`` and :meth:`from_inner` for saving.

    Args:
        posterior: Inner posterior, of any method.
    """

    def __init__(self, posterior: Posterior) -> None:
        check_without_gate(posterior)
        super().__init__(posterior)

    def transform(self, predictive: Any, sample_counts: Tensor | None) -> Any:
        """Returns the calibrated predictive distribution.

        Args:
            predictive: Predictive distribution of the inner posterior.
            sample_counts: Number of samples of each row, if it differs between rows.
        """
        return self._unsupported("transform; define it")

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        return self.transform(self.posterior._predictive(outputs, sample_counts), sample_counts)

    def wrap(self, posterior: Posterior) -> Posterior:
        """Returns another posterior with the same calibration."""
        return self.from_inner(posterior, self.state(), self.settings())
