r"""Observation models of counts: Poisson and negative binomial, with a log link.

The outputs of the network are logarithms of means. A network with a known exposure :math:`e`, such as the length of a period, adds
its logarithm to its output, so that it predicts a rate per unit of exposure:

>>> import torch, flowbnn as fb
>>> class RateNetwork(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.body = torch.nn.Linear(3, 1)
...
...     def forward(self, inputs, exposure):
...         return self.body(inputs) + exposure.log().unsqueeze(1)
>>> loader = [(torch.randn(8, 3), torch.full((8,), 2.0), torch.arange(8))]  # inputs, exposures, counts
>>> posterior = fb.MLE(epochs=1).fit(RateNetwork(), loader, likelihood="poisson", progress=False)
>>> posterior.predict((torch.zeros(2, 3), torch.ones(2))).mean.shape
torch.Size([2])
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.errors import pluralize, value_error
from flowbnn.likelihoods.base import misfit_error, observed_information, stack_outputs, with_columns
from flowbnn.likelihoods.regression import RealLikelihood
from flowbnn.options import Positive, checked
from flowbnn.predictive.base import check_samples
from flowbnn.predictive.counts import CountPredictive, check_counts, count_log_prob


class CountLikelihood(RealLikelihood):
    """Base class for observation models of counts. A subclass defines :meth:`parameters_of` and ``outputs_per_target``."""

    outputs_per_target: int = 1

    def parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logarithms of means and dispersions ``[..., D]`` for outputs ``[..., D * outputs_per_target]``."""
        log_mean = outputs.double().clamp(-80.0, 80.0)  # float32 represents the gradient exp(80)
        return log_mean, torch.full_like(log_mean, -math.inf)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probability of the counts of each example, ``[B]``.

        Args:
            outputs: Outputs of the network, ``[B, D * outputs_per_target]``, or ``[B]`` for one output.
            targets: Counts ``[B, D]``, or ``[B]`` if D is 1.
        """
        log_mean, log_dispersion = self.parameters_of(with_columns(outputs, 2))
        counts = targets.reshape(log_mean.shape)
        result = count_log_prob(log_mean, log_dispersion, counts).sum(-1)
        return result.to(torch.promote_types(outputs.dtype, torch.float32))

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the logarithm of the mean counts, ``[B, D]``."""
        return self.parameters_of(with_columns(outputs, 2))[0]

    def link(self, targets: Tensor) -> Tensor:
        """Returns the logarithm of counts, ``[B, D]``. One half is added, because zero has no logarithm."""
        return (targets.double().reshape(len(targets), -1) + 0.5).log()

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns counts as floating point numbers in double precision."""
        return targets.double()

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CountPredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, D * outputs_per_target]``, or ``[S, B]``."""
        outputs = check_samples(with_columns(outputs, 3), "outputs")[0]
        return CountPredictive(*self.parameters_of(outputs), sample_counts, self.shape)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if targets are no counts, or if their number does not fit the outputs.

        Args:
            outputs: Outputs of the network, ``[B, D * outputs_per_target]``, or ``[B]`` for one output.
            targets: Counts ``[B, D]``, or ``[B]`` if D is 1.
        """
        number = self.outputs_per_target
        width = outputs.shape[1] if outputs.ndim == 2 else 1
        has_outputs = outputs.ndim in (1, 2) and width % number == 0
        has_targets = (
            targets.shape[:1] == outputs.shape[:1] and targets.numel() * number == len(outputs) * width
        )
        if not (has_outputs and has_targets):
            hint = f"{type(self).__name__} needs {pluralize(number, 'output')} per target"
            raise misfit_error(outputs, targets, hint, "targets" if has_outputs else "outputs")
        check_counts(targets)


class Poisson(CountLikelihood):
    r"""Likelihood of counts, :math:`y \sim \mathrm{Poisson}(e^{f(x)})`, with variance equal to the mean.

    The output is the logarithm of the rate. For an exposure, the network adds its logarithm to the output.

    >>> round(Poisson().log_prob(torch.zeros(1, 1), torch.tensor([2])).item(), 4)  # -1 - log(2)
    -1.6931
    """

    def information(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the Fisher information of the log-rates, ``[B, D]``, which is the rate."""
        return self.mean(outputs).exp().to(outputs.dtype)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean rate."""
        return stack_outputs(outputs).logsumexp(0) - math.log(len(outputs))


class NegativeBinomial(CountLikelihood):
    r"""Likelihood of overdispersed counts, with mean :math:`\mu = e^{f(x)}` and variance :math:`\mu + \alpha \mu^2`.

    This is the second form of [Cameron and Trivedi 1986](https://doi.org/10.1002/jae.3950010104), a Poisson distribution whose rate
    has a gamma distribution.

    Args:
        dispersion: Dispersion :math:`\alpha`. With ``"predicted"`` the network has twice as many outputs, and the second half is
            :math:`\log \alpha` of each target. A number is a known dispersion.

    >>> likelihood = NegativeBinomial(1.0)
    >>> round(likelihood.log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # geometric: log(1 / 4)
    -1.3863
    """

    @checked
    def __init__(self, dispersion: Literal["predicted"] | Positive = "predicted") -> None:
        super().__init__()
        self.dispersion = dispersion
        self.outputs_per_target = 2 if dispersion == "predicted" else 1

    def extra_repr(self) -> str:
        return f"{self.dispersion!r}"

    def parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logarithms of means and dispersions ``[..., D]``."""
        if self.dispersion != "predicted":
            log_mean = super().parameters_of(outputs)[0]
            return log_mean, torch.full_like(log_mean, math.log(float(self.dispersion)))
        if outputs.shape[-1] % 2:
            raise value_error("outputs", "log-means and log-dispersions", tuple(outputs.shape), kind="shape")
        outputs, log_dispersion = outputs.chunk(2, -1)
        limit = 15.0  # a smaller dispersion cannot be told from a Poisson distribution
        return super().parameters_of(outputs)[0], log_dispersion.double().clamp(-limit, limit)

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of the outputs. Those of the dispersion are not changed."""
        if self.dispersion != "predicted":
            return loc, scale
        return torch.cat([loc, torch.zeros_like(loc)]), torch.cat([scale, torch.ones_like(scale)])

    def information(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the Fisher information of the log-means, ``[B, D]``, or the observed information of all outputs."""
        if self.dispersion == "predicted":
            return observed_information(self, outputs, targets)
        log_mean, log_dispersion = self.parameters_of(with_columns(outputs, 2))
        return torch.sigmoid(log_mean + log_dispersion).div(log_dispersion.exp()).to(outputs.dtype)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean. A predicted dispersion gets the variance of the mixture."""
        stacked = stack_outputs(outputs)
        log_means, log_dispersions = self.parameters_of(stacked)
        log_mean = log_means.logsumexp(0) - math.log(len(outputs))
        if self.dispersion != "predicted":
            return log_mean.to(stacked.dtype)
        # the variance is mu + mean(mu_s^2 (1 + alpha_s)) - mu^2
        square = 2.0 * (log_means - log_mean) + torch.nn.functional.softplus(log_dispersions)
        log_dispersion = square.exp().mean(0).sub(1.0).clamp_min(1e-12).log()
        return torch.cat([log_mean, log_dispersion], -1).to(stacked.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "dispersion": self.dispersion}
