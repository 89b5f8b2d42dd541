"""Posteriors that are the states of Markov chains, and what their chains say of themselves."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.diagnostics.chains import FEWEST, effective_sample_size, split_rhat
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Likelihood
from flowbnn.noise import weight_scale
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import MemberPosterior
from flowbnn.training import History

__all__ = ["ChainDiagnostics", "ChainPosterior", "NoiseChainPosterior"]

RHAT = 1.05
ENOUGH = 100  # draws of a chain from which on its R-hat is worth a warning
COLUMNS = 4096  # weights whose chains are judged together


@dataclass(frozen=True)
class ChainDiagnostics:
    """What chains say of themselves.

    A network computes the same with its hidden units in another order, so chains may sit in different copies of one function and the
    R-hat of single weights says little: judge by the function values (``*_outputs``: log-probabilities, or outputs of a regression, at
    training inputs) and by the log-density.

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
            f"{self.chains} chains of {self.draws} draws: R-hat {self.rhat_outputs:.3f} and ESS {self.ess_outputs:.0f} of function "
            f"values, R-hat {self.rhat_weights:.3f} of weights, {self.divergences} divergences, acceptance {self.acceptance:.2f}"
        )


class ChainPosterior(MemberPosterior):
    """The draws of Markov chains over weights.

    Args:
        model: the network.
        likelihood: how outputs speak of targets.
        members: weights ``{name: [C * S, ...]}``, chain after chain.
        history: the record of the training before the chains.
        record: for each draw ``[C, S]`` its ``energy``, ``acceptance``, ``divergent``, ``gradients`` and ``depth``; ``outputs``,
            function values ``[C, S, K]``; ``step_size``, of every chain.
        told: plain values: the method and its settings.
    """

    kind: ClassVar[str] = "chains"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        record: Mapping[str, Tensor] | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, likelihood, members, history)
        self.record, self.told = dict(record or {}), dict(told or {})

    def __repr__(self) -> str:
        chains, draws = self.record["energy"].shape
        return f"{type(self).__name__}({self.told.get('method', 'chains')}, {chains} chains of {draws} draws, {self.likelihood!r})"

    @property
    def chains(self) -> dict[str, Tensor]:
        """What was sampled, by chain: ``{name: [C, S, ...]}``."""
        shape = self.record["energy"].shape
        return {name: value.reshape(*shape, *value.shape[1:]) for name, value in self.members.items()}

    def diagnostics(self) -> ChainDiagnostics:
        """R-hat, effective sample sizes, divergences and acceptance."""
        record = self.record
        chains, draws = record["energy"].shape
        outputs = _judged(record["outputs"].double())
        density = _judged(record["energy"][..., None])
        weights = _judged(*(value.flatten(2) for value in self.chains.values()))
        return ChainDiagnostics(
            rhat_outputs=outputs[0],
            ess_outputs=outputs[1],
            tail_ess_outputs=outputs[2],
            rhat_density=density[0],
            ess_density=density[1],
            rhat_weights=weights[0],
            ess_weights=weights[1],
            tail_ess_weights=weights[2],
            mixed_weights=weights[3],
            divergences=int(record["divergent"].sum()),
            acceptance=float(record["acceptance"].mean()),
            step_size=tuple(record["step_size"].tolist()),
            gradients=float(record["gradients"].double().mean()),
            depth=float(record["depth"].double().mean()),
            chains=chains,
            draws=draws,
        )

    def warn(self) -> None:
        """Say what is wrong with the chains, if anything is."""
        record = self.record
        divergences, total = int(record["divergent"].sum()), record["divergent"].numel()
        if divergences:
            warnings.warn(
                f"{divergences} of {total} transitions diverged: near them the posterior is narrower than a step, so draws there are "
                "missing; raise target_accept, or the warm-up",
                FlowBNNWarning,
            )
        if record["energy"].shape[1] >= ENOUGH:
            rhat = _judged(record["outputs"].double())[0]
            if rhat > RHAT:
                warnings.warn(
                    f"the chains do not agree on the function yet (R-hat {rhat:.2f} of outputs at training inputs, above {RHAT}); run "
                    "them longer, or read posterior.diagnostics() before trusting them",
                    FlowBNNWarning,
                )

    def state(self) -> dict[str, Tensor]:
        tensors = {f"member.{name}": value for name, value in self.members.items()}
        return tensors | {f"record.{name}": value for name, value in self.record.items()}

    def settings(self) -> dict[str, Any]:
        return self.told

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "ChainPosterior":
        members = {k.removeprefix("member."): v for k, v in state.items() if k.startswith("member.")}
        record = {k.removeprefix("record."): v.cpu() for k, v in state.items() if k.startswith("record.")}
        shape = record["energy"].shape
        cls.check_members(point.model, members, shape.numel())
        return cls(point.model, point.likelihood, members, point.history, record, settings)

    @staticmethod
    def check_members(model: nn.Module, members: dict[str, Tensor], number: int) -> None:
        own = dict(model.named_parameters())
        for name, value in members.items():
            if name not in own or value.shape != (number, *own[name].shape):
                raise ValueError(f"its draws of '{name}' do not fit the network")


class NoiseChainPosterior(ChainPosterior):
    """The draws of Markov chains over one vector of noise for every layer; a sample is the network with that noise in its weights.

    ``members`` holds the noise, ``{layer: [C * S, dim]}``.
    """

    kind: ClassVar[str] = "noise-chains"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        sites = {name: self.model.get_submodule(name) for name in self.members}
        # held here, because a prediction puts other weights in the network's place
        self.bases: dict[str, Any] = {name: module.weight for name, module in sites.items()}
        self.sites = sites

    @property
    def names(self) -> list[str]:
        return [f"{name}.weight" if name else "weight" for name in self.members]

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        found = {}
        for key, (name, noise) in zip(self.names, self.members.items(), strict=True):
            base = self.bases[name].detach()
            found[key] = base * weight_scale(self.sites[name], noise[index % self.size].to(base))
        return found

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Weights ``{name: [samples, ...]}``, with the noise in them."""
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        found = [self.weights(self.chosen(index, samples), 0) for index in range(samples)]
        return {name: torch.stack([one[name] for one in found]) for name in self.names}

    def member(self, index: int) -> nn.Module:
        """The network of this number."""
        if not 0 <= index < self.size:
            raise FlowBNNError(f"there are {self.size} networks, numbered from 0, so none of number {index}")
        return self.network_of(self.weights(index, 0))

    @staticmethod
    def check_members(model: nn.Module, members: dict[str, Tensor], number: int) -> None:
        for name, value in members.items():
            weight: Any = model.get_submodule(name).weight
            if value.ndim != 2 or len(value) != number:
                raise ValueError(f"its noise of '{name}' is no list of vectors")
            weight * weight_scale(
                model.get_submodule(name), value[0].to(weight)
            )  # raises where it does not fit


def _judged(*parts: Tensor) -> tuple[float, float, float, float]:
    """The worst R-hat, bulk and tail effective sample size of quantities ``[C, S, K]``, and the share whose R-hat is below the
    limit."""
    rhat, bulk, tail, fine, count = 1.0, float("inf"), float("inf"), 0, 0
    for whole in parts:
        if whole.shape[1] < FEWEST:
            return (float("nan"),) * 4
        for part in whole.split(COLUMNS, -1):
            found = split_rhat(part)
            rhat = max(rhat, float(found.max()))
            bulk = min(bulk, float(effective_sample_size(part, "bulk").min()))
            tail = min(tail, float(effective_sample_size(part, "tail").min()))
            fine, count = fine + int((found < RHAT).sum()), count + found.numel()
    return rhat, bulk, tail, fine / max(1, count)
