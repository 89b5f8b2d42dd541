"""The posterior of a deep ensemble."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.members import MemberPosterior, check_members
from flowbnn.inference.point_posterior import PointPosterior
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.weights import WeightPasses
from flowbnn.likelihoods import Gaussian, Likelihood, log_variance
from flowbnn.training import History

__all__ = ["EnsemblePosterior"]

NOISE = "noise of the members"  # no weight has spaces in its name


class EnsemblePosterior(MemberPosterior):
    r"""Networks that were trained apart and count alike.

    Where each member has learned its own noise :math:`\sigma_m`, the predictive is the mixture
    :math:`\frac1M \sum_m \mathcal N(f_m(x), \sigma_m^2)`; ``likelihood`` then holds the noise of the mean
    variance, and :meth:`likelihood_of` that of a member.

    Args:
        model, likelihood, members, history: as in :class:`MemberPosterior`.
        log_scales: logarithms of the members' own noise ``[M, D]``, where it is learned.
    """

    kind: ClassVar[str] = "ensemble"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        log_scales: Tensor | None = None,
    ) -> None:
        super().__init__(model, likelihood, members, history)
        self.log_scales = log_scales

    @classmethod
    def from_points(
        cls, points: Sequence[PointPosterior], history: History | None = None
    ) -> "EnsemblePosterior":
        """From one trained network for each member."""
        if not points:
            raise FlowBNNError("there is no network in the list")
        states = [dict(one.model.named_parameters()) | dict(one.model.named_buffers()) for one in points]
        members = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
        likelihood, log_scales = deepcopy(points[0].likelihood), None
        if isinstance(likelihood, Gaussian) and likelihood.noise == "learned":
            own = [dict(one.likelihood.named_parameters())["log_scale"] for one in points]
            log_scales = torch.stack([scale.detach() for scale in own])
            with torch.no_grad():
                likelihood.log_scale.copy_((2.0 * log_scales).exp().mean(0).log() / 2.0)
        model = deepcopy(points[0].model).eval()
        return cls(model, likelihood, members, history, log_scales)

    def likelihood_of(self, index: int) -> Likelihood:
        """The likelihood of the member of this number."""
        likelihood = deepcopy(self.likelihood)
        if self.log_scales is not None and isinstance(likelihood, Gaussian):
            likelihood.log_scale.data = self.log_scales[index].clone()
        return likelihood

    def drawing(self, samples: int, **options: Any) -> Any:
        passes = super().drawing(samples, **options)
        if self.log_scales is None:
            return passes
        noisy = NoisyPasses(
            self, samples, passes.seed, passes.max_batch, options.get("precision"), passes.compile
        )
        noisy.source = passes.source
        taken = torch.tensor([self.chosen(index, samples) for index in range(samples)])
        noisy.log_variances = log_variance(self.log_scales[taken.to(self.log_scales.device)])
        return noisy

    def _predictive(self, outputs: Tensor, spent: Tensor | None = None) -> Any:
        if self.log_scales is None:
            return super()._predictive(outputs, spent)
        known = Gaussian("predicted")  # NoisyPasses gives the noise with the outputs
        if spent is None:
            return known.predictive(outputs)
        return known.predictive(outputs[: int(spent.max())], spent.to(outputs.device))

    def state(self) -> dict[str, Tensor]:
        return self.members if self.log_scales is None else {**self.members, NOISE: self.log_scales}

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "EnsemblePosterior":
        state = dict(state)
        log_scales = state.pop(NOISE, None)
        check_members(point.model, state)
        learned = isinstance(point.likelihood, Gaussian) and point.likelihood.noise == "learned"
        if learned != (log_scales is not None):
            raise ValueError("the noise of its members does not fit its likelihood")
        made = cls(point.model, point.likelihood, state, point.history, log_scales)
        if log_scales is not None and log_scales.shape != (made.size, point.likelihood.dim):
            raise ValueError("the noise of its members does not fit their number")
        return made


class NoisyPasses(WeightPasses):
    """Outputs of one member after the other, each with the log-variance of that member's noise beside it."""

    log_variances: Tensor

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        high = self.samples if high is None else high
        means = super().__call__(inputs, low, high)
        noise = self.log_variances[low:high].to(means).unsqueeze(1).expand_as(means)
        outputs = torch.cat([means, noise], -1)
        return outputs if out is None else out.copy_(outputs)
