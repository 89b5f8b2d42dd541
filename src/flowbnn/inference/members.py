"""A posterior that is a list of networks: an ensemble, or the states of a Markov chain."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.weights import WeightPosterior
from flowbnn.likelihoods import Likelihood
from flowbnn.training import History

__all__ = ["MemberPosterior", "check_members", "state_of"]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers of a network, each tied one once."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in found.items()}


class MemberPosterior(WeightPosterior):
    """Networks of one architecture that count alike.

    A prediction with as many samples as there are members takes each once, which is the default; with fewer it takes members spread
    evenly over the list, with more it begins anew.

    Args:
        model: the network.
        likelihood: how outputs speak of targets.
        members: weights (and buffers) ``{name: [M, ...]}``.
        history: the training record.
    """

    kind: ClassVar[str] = "members"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        sizes = {len(value) for value in members.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise FlowBNNError("a list of networks needs the same number, at least one, of every weight")
        self.members, self.size = dict(members), sizes.pop()
        self.default_samples = self.size

    @classmethod
    def from_states(
        cls,
        model: nn.Module,
        likelihood: Likelihood,
        states: Sequence[Mapping[str, Tensor]],
        history: History | None = None,
        **more: Any,
    ) -> "MemberPosterior":
        """From one dictionary of weights for each member."""
        if not states:
            raise FlowBNNError("there is no network in the list")
        members = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        return cls(model, likelihood, members, history, **more)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.size} networks of {type(self.model).__name__}, {self.likelihood!r})"
        )

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        return {name: value[index % self.size] for name, value in self.members.items()}

    def chosen(self, index: int, samples: int) -> int:
        """Which member is sample ``index`` of so many: fewer than there are members are spread over the list."""
        return index * self.size // samples if samples < self.size else index % self.size

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Members ``{name: [samples, ...]}``, those that a prediction with so many samples takes."""
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        taken = torch.tensor([self.chosen(index, samples) for index in range(samples)])
        return {name: value[taken.to(value.device)] for name, value in self.members.items()}

    def drawing(self, samples: int, **options: Any) -> Any:
        passes = super().drawing(samples, **options)
        if samples < self.size:  # states of a chain that follow each other are alike
            passes.source = _Spread(self, samples)
        return passes

    def sample(self, seed: int | None = None) -> nn.Module:
        """One of the networks, at random."""
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        return self.member(int(torch.randint(self.size, (), generator=generator)))

    def member(self, index: int) -> nn.Module:
        """The network of this number."""
        if not 0 <= index < self.size:
            raise FlowBNNError(f"there are {self.size} networks, numbered from 0, so none of number {index}")
        return self.network_of({name: value[index] for name, value in self.members.items()})

    def state(self) -> dict[str, Tensor]:
        return self.members

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "MemberPosterior":
        check_members(point.model, state)
        return cls(point.model, point.likelihood, state, point.history)


def check_members(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Whether weights ``{name: [M, ...]}`` are those of networks like this one."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for name, value in state.items():
        if name not in own or value.shape[1:] != own[name].shape:
            raise ValueError(f"its member weights '{name}' do not fit the network")


class _Spread:
    def __init__(self, posterior: MemberPosterior, samples: int) -> None:
        self.posterior, self.samples = posterior, samples

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        return self.posterior.weights(self.posterior.chosen(index, self.samples), seed)
