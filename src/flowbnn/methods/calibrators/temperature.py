r"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599): calibration by one number, fitted on held-out data.

.. math:: \hat T = \arg\min_T \; -\sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i) / T) + \frac{(\log T)^2}{2 \tau^2}

It is the first calibration method to try, on a trained network or on top of any other method. It changes no weights. For a single
network it changes no predicted class either.
"""

from dataclasses import field
from typing import Any, ClassVar

from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.errors import warn
from flowbnn.likelihoods import RealLikelihood
from flowbnn.methods.base import register_method
from flowbnn.methods.calibrators.base import CalibratedPosterior, OutputCalibrator
from flowbnn.methods.calibrators.log_temperature import (
    PRIOR_SCALE,
    TemperatureFit,
    apply_temperature,
    fit_temperatures,
)
from flowbnn.options import Positive, checked, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.mixture import MemberClasses
from flowbnn.predictive import CategoricalPredictive


@register_method
@options(repr=False)
class Temperature(OutputCalibrator):
    r"""Temperature scaling of a trained network, or on top of a method. It never changes weights.

    Args:
        method: Method that is fitted first. None scales the network as it is, and trains nothing.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the held-out data. None for the default of the posterior.
        prior_scale: Standard deviation :math:`\tau` of the prior of :math:`\log T`, or None for no prior. A regression has none.

    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = 6.0 * torch.randn(500, 3, generator=generator)  # three times too large
    >>> labels = torch.multinomial((logits / 3.0).softmax(-1), 1, generator=generator)[:, 0]
    >>> round(Temperature().fit(nn.Identity(), (logits, labels), progress=False).temperature)
    3
    """

    prior_scale: Positive | None = field(default=PRIOR_SCALE, kw_only=True)  # type: ignore[assignment]

    def calibrate_outputs(
        self, posterior: Posterior, outputs: Tensor, targets: Tensor
    ) -> "TemperedPosterior":
        """Returns the posterior at the temperature of the held-out data; see :meth:`OutputCalibrator.calibrate_outputs`."""
        if isinstance(posterior, TemperedPosterior):
            posterior = posterior.posterior
        (fit,) = fit_temperatures(posterior, outputs, targets, prior_scale=self.prior_scale)
        return TemperedPosterior(posterior, check_temperature(fit, posterior, self.prior_scale is not None))

    def identity_calibration(self, posterior: Posterior, outputs: Tensor) -> "TemperedPosterior":
        """Returns a posterior with the same predictions; see :meth:`OutputCalibrator.identity_calibration`."""
        apply_temperature(posterior._predictive(outputs), 1.0)  # refuses distributions without a temperature
        return TemperedPosterior(posterior, 1.0)


def check_temperature(fit: TemperatureFit, posterior: Posterior, has_prior: bool) -> float:
    """Returns the temperature to use, and warns if the likelihood alone does not determine it.

    Args:
        fit: Fit to the held-out data.
        posterior: Posterior that is scaled.
        has_prior: True if the temperature has a prior.
    """
    temperature, cause = fit.temperature, ""
    if not fit.bound:
        return temperature
    if fit.bound == "low" and not isinstance(posterior.likelihood, RealLikelihood):
        cause = " for perfect predictions"
        temperature = temperature if has_prior else 1.0
    text = f"the likelihood has no maximum{cause}, so T={temperature:.3g}; provide more data, and check the labels"
    warn(text, kind="validation", temperature=temperature)
    return temperature


class TemperedPosterior(CalibratedPosterior):
    r"""Posterior whose predictions are scaled by a temperature :math:`T`. Above 1, the inner posterior is overconfident.

    For classification, the logits of every sample are divided by :math:`T`. For regression, the predictive distribution is scaled
    about its mean, so that its standard deviation is multiplied by :math:`T`. ``networks``, ``sample`` and ``draws`` then return
    networks of the inner posterior without scaling, because the mean prediction depends on all networks.

    Args:
        posterior: Inner posterior, of any method.
        temperature: Temperature :math:`T`.

    >>> import torch, flowbnn as fb
    >>> inner = fb.methods.PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical())
    >>> TemperedPosterior(inner, 2.0).predict(torch.ones(4, 2)).probabilities.shape
    torch.Size([4, 3])
    """

    kind: ClassVar[str] = "tempered"

    @checked
    def __init__(self, posterior: Posterior, temperature: Positive) -> None:
        super().__init__(posterior)
        self.temperature = float(temperature)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.posterior!r}, temperature={self.temperature:.4g})"

    def transform(self, predictive: Any, sample_counts: Tensor | None) -> Any:
        """Returns the predictive distribution at the temperature."""
        result = apply_temperature(predictive, self.temperature, sample_counts)
        if isinstance(self.likelihood, MemberClasses):  # a mixture has no logits, and thus no energy
            counts = None if sample_counts is None else result.sample_counts
            return CategoricalPredictive(result.log_samples, counts)
        return result

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

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}


class DividedOutputs(nn.Module):
    """Network whose outputs are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        return call(self.network, named_inputs or inputs) / self.temperature
