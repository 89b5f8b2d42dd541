"""The order in which each member of an ensemble sees the data, the same whether members are trained together or one by one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import split_batch
from flowbnn.inference.fitting import undisturbed
from flowbnn.training.randomness import loader_generators

__all__ = ["Aside", "Orders", "member_seed", "own_order"]


def member_seed(seed: int, member: int) -> int:
    """The seed of one member's initialization and order."""
    return (seed * 1_000_003 + member) % 2**32


@contextmanager
def own_order(loader: Any, seed: int) -> Iterator[None]:
    """Generators that the loader brings are seeded for a member; the orders of its own come back afterwards."""
    generators = loader_generators(loader)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Aside:
    """A loader of held-out data whose passes leave the order of the training data alone."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with undisturbed(self.loader):
            yield from self.loader


class Orders:
    """A loader that gives each of several members a batch of its own, stacked on the second axis: ``[rows, members, ...]``.

    Each member draws from generators of its own, seeded as a training of this member alone is.

    Args:
        loader: gone through once for each member.
        seeds: one for each member.
    """

    def __init__(self, loader: Any, seeds: list[int]) -> None:
        self.loader, self.seeds = loader, seeds
        self.places = [torch.default_generator, *loader_generators(loader)]
        self.streams = [
            [torch.Generator(place.device).manual_seed(seed) for place in self.places] for seed in seeds
        ]

    @property
    def generators(self) -> list[torch.Generator]:
        """All generators, to be kept in checkpoints."""
        return [generator for stream in self.streams for generator in stream]

    @property
    def sampler(self) -> Any:
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    @contextmanager
    def _drawing(self, member: int) -> Iterator[None]:
        before = [place.get_state() for place in self.places]
        for place, own in zip(self.places, self.streams[member], strict=True):
            place.set_state(own.get_state())
        try:
            yield
        finally:
            for place, own, state in zip(self.places, self.streams[member], before, strict=True):
                own.set_state(place.get_state())
                place.set_state(state)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        passes = []
        for member in range(len(self.seeds)):
            with self._drawing(member):
                passes.append(iter(self.loader))
        while True:
            batches = []
            for member, batch in enumerate(passes):
                with self._drawing(member):
                    batches.append(next(batch, None))
            if all(batch is None for batch in batches):
                return
            if any(batch is None for batch in batches):
                raise FlowBNNError(
                    "this loader gives more batches in one pass than in another, so members cannot be trained together; "
                    "say together=False"
                )
            yield (
                stacked([split_batch(batch)[0] for batch in batches]),
                stacked([split_batch(batch)[1] for batch in batches]),
            )


def stacked(parts: list[Any]) -> Any:
    """Batches of one shape side by side on a second axis."""
    first = parts[0]
    if isinstance(first, Tensor):
        if any(part.shape != first.shape for part in parts):
            raise FlowBNNError(
                f"this loader gives batches of different shapes ({tuple(first.shape)} and others), so members cannot be trained "
                "together; say together=False"
            )
        return torch.stack(parts, 1)
    if isinstance(first, Mapping):
        return {name: stacked([part[name] for part in parts]) for name in first}
    return tuple(stacked(list(column)) for column in zip(*parts, strict=True))
