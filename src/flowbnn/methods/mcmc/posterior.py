"""Posteriors that are the states of Markov chains, and the diagnostics of these chains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn.errors import pluralize, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.mcmc.potential import LOG_NOISE, Sites, noisy_weights
from flowbnn.metrics.convergence import FEWEST, effective_sample_size, split_rhat
from flowbnn.noise.layout import layout_of
from flowbnn.posterior.base import Posterior, part_of
from flowbnn.posterior.weights import MemberPosterior, check_members
from flowbnn.training import History

RHAT = 1.05
ENOUGH = 100  # draws of a chain from which on its R-hat is worth a warning
COLUMNS = 4096  # weights whose chains are compared at once


@dataclass(frozen=True)
class ChainDiagnostics:
    """How well chains have mixed.

    A network computes the same with its hidden units in another order, so chains may sit in different copies of one function and the
    R-hat of single weights says little: look at the function values (``*_outputs``: log-probabilities, or outputs of a regression, at
    training inputs) and at the log-density.

    Args:
        rhat_outputs, ess_outputs, tail_ess_outputs: the worst over the function values.
        rhat_density, ess_density: of the log posterior density.
        rhat_weights, ess_weights, tail_ess_weights: the worst over the weights (or noise variables); ``mixed_weights`` is the share
            of them with an R-hat below 1.05.
        divergences: transitions whose energy error was so large that the step size did not resolve the curvature there.
        acceptance: mean acceptance probability of the draws.
        step_size: of every chain after warm-up.
        gradients: per draw, on average.
        depth: doublings of NUTS's trajectories, on average (0 for HMC).
        chains, draws: their number, and draws of each.
    """

    rhat_outputs: float
    ess_outputs: float
    tail_ess_outputs: float
    rhat_density: float
    ess_density: float
    rhat_weights: float
    ess_weights: float
    tail_ess_weights: float
    mixed_weights: float
    divergences: int
    acceptance: float
    step_size: tuple[float, ...]
    gradients: float
    depth: float
    chains: int
    draws: int

    def __str__(self) -> str:
        return (
            f"{pluralize(self.chains, 'chain')} of {pluralize(self.draws, 'draw')}: R-hat {self.rhat_outputs:.3f} and ESS "
            f"{self.ess_outputs:.0f} of function values, R-hat {self.rhat_weights:.3f} of weights, "
            f"{pluralize(self.divergences, 'divergence')}, acceptance {self.acceptance:.2f}"
        )


class ChainPosterior(MemberPosterior):
    """The draws of Markov chains over weights.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`.
        members: weights ``{name: [C * S, ...]}``, chain after chain.
        record: for each draw ``[C, S]`` its ``energy``, ``acceptance``, ``divergent``, ``gradients`` and ``depth``; ``outputs``,
            function values ``[C, S, K]``; ``step_size``, of every chain; ``log_noise`` ``[C, S, D]``, where noise was learned.
        sampler: the method and its settings, as plain values.
    """

    kind: ClassVar[str] = "chains"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        *,
        record: Mapping[str, Tensor],
        sampler: Mapping[str, Any],
    ) -> None:
        levels = record.get(LOG_NOISE)
        super().__init__(
            model, likelihood, members, history, None if levels is None else levels.flatten(0, 1)
        )
        self.record, self.sampler = dict(record), dict(sampler)

    def __repr__(self) -> str:
        chains, draws = self.record["energy"].shape
        found = f"{pluralize(chains, 'chain')} of {pluralize(draws, 'draw')}"
        return f"{type(self).__name__}({self.sampler['method']}, {found}, {self.likelihood!r})"

    @property
    def chains(self) -> dict[str, Tensor]:
        """What was sampled, by chain: ``{name: [C, S, ...]}``."""
        shape = self.record["energy"].shape
        return {name: value.unflatten(0, shape) for name, value in self.members.items()}

    def diagnostics(self) -> ChainDiagnostics:
        """R-hat, effective sample sizes, divergences and acceptance."""
        record = self.record
        outputs = _worst(record["outputs"].double())
        density = _worst(record["energy"][..., None])
        weights = _worst(*(value.flatten(2) for value in self.chains.values()))
        return ChainDiagnostics(
            *outputs[:3],
            *density[:2],
            *weights,
            divergences=int(record["divergent"].sum()),
            acceptance=float(record["acceptance"].mean()),
            step_size=tuple(record["step_size"].tolist()),
            gradients=float(record["gradients"].double().mean()),
            depth=float(record["depth"].double().mean()),
            chains=record["energy"].shape[0],
            draws=record["energy"].shape[1],
        )

    def warn(self) -> None:
        """Warn of divergences, and of chains that do not agree."""
        divergent = self.record["divergent"]
        if bool(divergent.any()):
            line = (
                f"{int(divergent.sum())} of {divergent.numel()} transitions diverged: near them the posterior is narrower than a "
                "step, so draws there are missing; raise target_accept, or the warm-up"
            )
            warn(line, kind="divergence", divergences=int(divergent.sum()))
        outputs = self.record["outputs"].double()
        if outputs.shape[1] >= ENOUGH and (rhat := _worst(outputs)[0]) > RHAT:
            line = (
                f"the chains do not agree on the function yet (R-hat {rhat:.2f} of outputs at training inputs, above {RHAT}); run "
                "them longer, or read posterior.diagnostics() before trusting them"
            )
            warn(line, kind="rhat", rhat=rhat)

    def state(self) -> dict[str, Tensor]:
        members = {f"member.{name}": value for name, value in self.members.items()}
        return members | {f"record.{name}": value for name, value in self.record.items()}

    def settings(self) -> dict[str, Any]:
        return self.sampler

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        members = part_of(state, "member")
        record = {name: value.cpu() for name, value in part_of(state, "record").items()}
        return cls(point.model, point.likelihood, members, point.history, record=record, sampler=settings)


class NoiseChainPosterior(ChainPosterior):
    """The draws of Markov chains over one vector of noise for every layer; a sample is the network with that noise in its weights.

    ``members`` holds the noise, ``{layer: [C * S, dim]}``, and ``draws`` gives it; ``sample`` and ``member`` give networks.
    """

    kind: ClassVar[str] = "noise-chains"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        parts = {name: self.model.get_submodule(name) for name in self.members}
        # the present weights, in whose place a prediction puts others
        self.sites: Sites = {name: (part, part.weight.detach()) for name, part in parts.items()}  # type: ignore[operator]

    def check_members(self, members: Mapping[str, Tensor]) -> None:
        parts = dict(self.model.named_modules())
        own = {name: torch.empty(layout_of(parts[name]).dim) for name in members if name in parts}
        check_members(own, members)

    @property
    def names(self) -> list[str]:
        return list(self.weights(0, 0))

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        return noisy_weights(self.sites, super().weights(index, seed))


def _worst(*parts: Tensor) -> tuple[float, float, float, float]:
    """The worst R-hat, bulk and tail effective sample size of quantities ``[C, S, K]``, and the share with an R-hat below 1.05."""
    rhat, bulk, tail, mixed, count = 1.0, float("inf"), float("inf"), 0, 0
    for part in (chunk for whole in parts for chunk in whole.split(COLUMNS, -1)):
        if part.shape[1] < FEWEST:
            return (float("nan"),) * 4
        each = split_rhat(part)
        rhat = max(rhat, float(each.max()))
        bulk = min(bulk, float(effective_sample_size(part, "bulk").min()))
        tail = min(tail, float(effective_sample_size(part, "tail").min()))
        mixed, count = mixed + int((each < RHAT).sum()), count + each.numel()
    return rhat, bulk, tail, mixed / max(1, count)
