r"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599): calibration by one number, fitted on held-out data.

.. math:: \hat T = \arg\min_T \; -\sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i) / T)

It is the first calibration method to try, on top of any other method. It changes no weights. For a single network it changes no
predicted class either.
"""

import math
from collections.abc import Iterable
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.batches import as_loader, call
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import RealLikelihood
from flowbnn.methods.base import FitOptions, Method, misplaced_setting, register_method
from flowbnn.methods.data_summary import first_batch
from flowbnn.methods.loader_split import split_loader
from flowbnn.options import Count, Positive, Probability, Seed, accepts_options_of, checked, options
from flowbnn.posterior.base import (
    Posterior,
    Prediction,
    PredictOptions,
    load_posterior,
    open_posterior_file,
    rewrap_load_errors,
)
from flowbnn.posterior.gated import GatedPosterior
from flowbnn.predictive import CategoricalPredictive
from flowbnn.training.storage import TensorFile


@register_method
@options(repr=False)
class Temperature(Method):
    """Temperature scaling on top of a method.

    Args:
        method: Method that fits the posterior; None to train the network as :class:`~flowbnn.MAP` does.
        validation_fraction: Fraction of the training data that is held out if ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the validation data; None for the default of the posterior.
        epochs: Number of epochs of the training. This and the settings below require ``method=None``.
        lr: Learning rate of the training.
        optimizer: Function from parameter groups to an optimizer.
        schedule: Function from optimizer and number of steps to a learning-rate schedule.
        prior_scale: Standard deviation of the prior of the weights.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> loader = [(inputs, (inputs[:, 0] + inputs[:, 1].sin() * inputs[:, 1] > 0).long())]
    >>> Temperature(fb.MAP(epochs=100, lr=0.1)).fit(nn.Linear(2, 2), loader, progress=False).kind
    'tempered'
    """

    method: Method | None = None
    validation_fraction: Probability = field(default=0.1, kw_only=True)
    samples: Count | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        changed = next((f.name for f in fields(Method) if getattr(self, f.name) != f.default), None)
        if self.method is not None and changed is not None:
            raise misplaced_setting(changed, type(self.method).__name__, getattr(self, changed))

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **kwargs: Any) -> "TemperedPosterior":
        """Fits the posterior and its temperature; see :meth:`Method.fit`.

        The temperature is fitted to ``validation``, by default a random fraction of the loader.
        """
        model, options = (self.method or self).setup(network, loader, kwargs)
        if options.validation is None:
            loader, validation = split_loader(loader, self.validation_fraction, options.seed or 0)
            num_data = options.num_data
            if num_data is not None:
                num_data = max(1, round(num_data * (1.0 - self.validation_fraction)))
            options = replace(options, validation=validation, num_data=num_data)
        posterior: Posterior
        if self.method is None:
            posterior = self.fit_point(model, loader, options)
        else:
            kwargs = {**kwargs, "validation": options.validation, "num_data": options.num_data}
            posterior = self.method.fit(network, loader, **kwargs)
        assert options.validation is not None
        return temper(
            posterior,
            options.validation,
            samples=self.samples,
            seed=options.seed or 0,
            progress=options.progress,
        )


@checked
def temper(
    posterior: Posterior,
    validation: Iterable[Any],
    *,
    samples: Count | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> "TemperedPosterior":
    """Returns the posterior with the temperature that maximizes the likelihood of held-out data.

    Args:
        posterior: Posterior of any method; the temperature of a tempered posterior is fitted again.
        validation: Batches of ``(inputs, targets)`` to which the posterior was not fitted.
        samples: Number of samples of the predictions; None for the default of the posterior.
        seed: Seed of the predictions.
        progress: If True, shows a progress bar.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> loader = [(inputs, (inputs[:, 0] + inputs[:, 1].sin() * inputs[:, 1] > 0).long())]
    >>> posterior = fb.MLE(epochs=300, lr=0.1).fit(nn.Linear(2, 2), loader, progress=False)
    >>> round(temper(posterior, loader).temperature, 2)  # its training data
    1.0
    """
    if isinstance(posterior, GatedPosterior):
        text = "the fallback of a density gate has no temperature; temper the posterior first, then call fb.gated"
        raise FlowBNNError(text, kind="unsupported", argument="posterior")
    if isinstance(posterior, TemperedPosterior):
        posterior = posterior.posterior
    validation = as_loader(validation)
    first_batch(validation, purpose="temperature scaling")
    outputs, _, targets = posterior.collect(validation, PredictOptions(samples, seed=seed, progress=progress))
    assert targets is not None
    targets = posterior.likelihood.canonical_targets(targets).to(outputs.device)
    return TemperedPosterior(posterior, best_temperature(posterior, outputs.double(), targets))


def best_temperature(
    posterior: Posterior, outputs: Tensor, targets: Tensor, bounds: tuple[float, float] = (1e-2, 1e2)
) -> float:
    r"""Returns the minimizer of the negative log-likelihood (NLL) over :math:`u = \log T`.

    The best point of a grid is refined by Newton's method, safeguarded by bisection within its cell.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, B, ...]``.
        targets: Targets of the validation data.
        bounds: Smallest and largest temperature; a warning is raised if the minimum is not between them.
    """
    low, high = (math.log(bound) for bound in bounds)
    size = 17
    grid = [low + (high - low) * index / (size - 1) for index in range(size)]
    values = [_nll_and_derivatives(posterior, outputs, targets, u, derivatives=False)[0] for u in grid]
    best = min(range(size), key=lambda index: (values[index], abs(grid[index])))
    at_low = values[0] <= values[best]
    if at_low or best == size - 1:
        temperature = bounds[0] if at_low else bounds[1]
        reason = f"no temperature in {bounds} is optimal"
        if at_low and not isinstance(posterior.likelihood, RealLikelihood):
            temperature, reason = 1.0, "all validation examples are classified correctly at any temperature"
        text = f"{reason}, so {temperature:g} is used; provide more data"
        warn(text, kind="validation", temperature=temperature)
        return temperature
    left, right, u = grid[best - 1], grid[best + 1], grid[best]
    for _ in range(60):
        _, slope, curvature = _nll_and_derivatives(posterior, outputs, targets, u)
        left, right = (u, right) if slope < 0 else (left, u)
        newton = u - slope / curvature if curvature > 0 else math.inf
        proposal = newton if left < newton < right else (left + right) / 2
        if abs(proposal - u) < 1e-12 or slope == 0.0:
            break
        u = proposal
    return math.exp(u)


def _nll_and_derivatives(
    posterior: Posterior,
    outputs: Tensor,
    targets: Tensor,
    u: float,
    derivatives: bool = True,
    max_elements: int = 2**21,
) -> tuple[float, float, float]:
    """Returns the mean NLL at ``T = exp(u)`` and its first two derivatives in ``u``, in chunks of ``max_elements`` outputs."""
    num_rows = max(1, max_elements // max(1, outputs[:, :1].numel()))
    nll, slope, curvature = 0.0, 0.0, 0.0
    with torch.set_grad_enabled(derivatives):
        for start in range(0, len(targets), num_rows):
            log_t = torch.tensor(u, dtype=outputs.dtype, device=outputs.device, requires_grad=derivatives)
            chunk = slice(start, start + num_rows)
            predictive = apply_temperature(posterior._predictive(outputs[:, chunk]), log_t.exp())
            loss = predictive.nll(targets[chunk]).sum()
            nll += loss.item()
            if derivatives:
                (first,) = torch.autograd.grad(loss, log_t, create_graph=True)
                (second,) = torch.autograd.grad(first, log_t)
                slope, curvature = slope + first.item(), curvature + second.item()
    return nll / len(targets), slope / len(targets), curvature / len(targets)


class TemperedPosterior(Posterior):
    r"""Posterior whose predictions are scaled by a temperature :math:`T`. Above 1, the inner posterior is overconfident.

    For classification, the logits of every sample are divided by :math:`T`. For regression, the predictive distribution is scaled
    about its mean, so that its standard deviation is multiplied by :math:`T`. ``networks``, ``sample`` and ``draws`` then return
    networks of the inner posterior without scaling, because the mean prediction depends on all networks.

    Args:
        posterior: Inner posterior, of any method.
        temperature: Temperature :math:`T`.

    >>> import flowbnn as fb
    >>> inner = fb.methods.PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical())
    >>> TemperedPosterior(inner, 2.0).predict(torch.ones(4, 2)).probabilities.shape
    torch.Size([4, 3])
    """

    kind: ClassVar[str] = "tempered"

    @checked
    def __init__(self, posterior: Posterior, temperature: Positive) -> None:
        super().__init__(posterior.model, posterior.likelihood, posterior.history)
        self.posterior, self.temperature = posterior, float(temperature)
        self.default_samples, self.cache = posterior.default_samples, posterior.cache
        self.supports_compile, self.requires_shared = posterior.supports_compile, posterior.requires_shared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.posterior!r}, temperature={self.temperature:.4g})"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns outputs of the inner posterior."""
        return self.posterior.outputs(inputs, samples, prediction)

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        predictive = self.posterior._predictive(outputs, sample_counts)
        return apply_temperature(predictive, self.temperature, sample_counts)

    def networks(self, samples: int, seed: int | None = None) -> list[nn.Module]:
        """Returns networks of the inner posterior; for classification, their logits are divided by the temperature."""
        return [self._scaled(network) for network in self.posterior.networks(samples, seed)]

    def sample(self, seed: int | None = None) -> nn.Module:
        """Returns one network of the inner posterior; for classification, its logits are divided by the temperature."""
        return self._scaled(self.posterior.sample(seed))

    def _scaled(self, network: nn.Module) -> nn.Module:
        if isinstance(self.likelihood, RealLikelihood):
            return network
        return DividedOutputs(network, self.temperature).eval()

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Returns draws of the inner posterior."""
        return self.posterior.draws(samples, seed)

    def log_prob(self, values: Any) -> Tensor:
        """Returns log-densities of the inner posterior; the temperature changes predictions, not weights."""
        return self.posterior.log_prob(values)

    def document(self) -> dict[str, Any]:
        return {**super().document(), "temperature": self.temperature, "inner": self.posterior.document()}

    def tensors(self) -> dict[str, Tensor]:
        return self.posterior.tensors()

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> "Posterior":
        """Loads a saved posterior into ``network``, which stays unchanged if it does not fit."""
        file = open_posterior_file(path, network, [cls.kind])
        with rewrap_load_errors(file):
            temperature = file.document["temperature"]
            inner_file = file.with_document(dict(file.document["inner"]))
        inner = load_posterior(inner_file, network)
        with rewrap_load_errors(file):
            return cls(inner, temperature)


class DividedOutputs(nn.Module):
    """Network whose outputs are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        return call(self.network, named_inputs or inputs) / self.temperature


def apply_temperature(predictive: Any, temperature: Any, sample_counts: Tensor | None = None) -> Any:
    """Returns a predictive distribution at a temperature.

    Args:
        predictive: Predictive distribution of classes or of real-valued targets.
        temperature: Temperature, a float or a scalar tensor.
        sample_counts: Number of samples of each row, if it differs between rows.
    """
    sample_counts = None if sample_counts is None else predictive.sample_counts
    if isinstance(predictive, CategoricalPredictive):
        return CategoricalPredictive(predictive.logits / temperature, sample_counts)
    return predictive.rescale(temperature)
