"""Every source of randomness that a training run draws on, saved and restored."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flowbnn.distributions.draws import GENERATOR_LOCK


def seed_all(seed: int) -> None:
    """Seed torch (all devices), numpy's global generator and ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The loader's own generators: its ``generator`` and those of its samplers, each once, in a fixed order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(one for one in generators if isinstance(one, torch.Generator)))


class RandomState:
    """The global generators of torch (CPU and CUDA), numpy and ``random``, and any generators handed in.

    ``device`` is that of one of several processes; its state is then the only one of ``cuda``, so that all processes, each on a device
    of its own, can share one state. None keeps those of all devices.

    >>> source = torch.Generator().manual_seed(0)
    >>> randomness = RandomState([source])
    >>> before = randomness.state()
    >>> first = torch.rand(1), torch.rand(1, generator=source), random.random()
    >>> randomness.restore(before)
    >>> first == (torch.rand(1), torch.rand(1, generator=source), random.random())
    True
    """

    def __init__(
        self, generators: Iterable[torch.Generator] = (), device: torch.device | None = None
    ) -> None:
        self.generators: list[torch.Generator] = list(generators)
        self.device = device

    def state(self) -> dict[str, Any]:
        """Everything, as nested tensors and plain values."""
        version, words, gauss = random.getstate()
        kind, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
        return {
            **self.torch_state(),
            "python": (version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss),
            "numpy": (kind, torch.from_numpy(np.array(numbers, dtype=np.int64)), *rest),
        }

    def torch_state(self) -> dict[str, Any]:
        """torch's part of the state: two microseconds, so that it can be kept at every step."""
        cuda: list[torch.Tensor] = []
        if self.device is not None and self.device.type == "cuda":
            cuda = [torch.cuda.get_rng_state(self.device)]
        elif self.device is None and torch.cuda.is_initialized():
            cuda = torch.cuda.get_rng_state_all()
        own = list(map(torch.Generator.get_state, self.generators))
        return {"torch": torch.get_rng_state(), "cuda": cuda, "generators": own}

    def seed(self, seed: int) -> None:
        """Seed all but those of CUDA."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        for generator in (torch.default_generator, *self.generators):
            generator.manual_seed(seed)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` or :meth:`torch_state` gave."""
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            places: Any = [self.device] if self.device is not None else range(torch.cuda.device_count())
            for device, value in zip(places, state["cuda"], strict=False):
                torch.cuda.set_rng_state(value, device)
        for generator, value in zip(self.generators, state["generators"], strict=True):
            generator.set_state(value)
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
            kind, numbers, *rest = state["numpy"]
            np.random.set_state((kind, numbers.numpy(), *rest))  # noqa: NPY002


@contextmanager
def preserve_rng_state(loader: Any, seed: int | None = None) -> Iterator[None]:
    """Context manager that restores all global generators and those of a loader, so that the loader can be read inside.

    Args:
        loader: Loader whose generators are restored, or None.
        seed: Seed of all generators inside the block. With a seed, a shuffled loader always gives the same batches.
    """
    randomness = RandomState(loader_generators(loader))
    state = randomness.state()
    if seed is not None:
        randomness.seed(seed)
    try:
        yield
    finally:
        randomness.restore(state)


@contextmanager
def temporary_seed(seed: int | None) -> Iterator[None]:
    """Parameters that begin at random begin from this seed; torch's generator is put back afterwards. None leaves it alone."""
    if seed is None:
        yield
        return
    with GENERATOR_LOCK, torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def sampling_context(device: torch.device, seed: int | None) -> Iterator[None]:
    """Without gradients, from torch's generators at this seed, which are put back afterwards; None leaves them alone."""
    with torch.no_grad():
        if seed is None:
            yield
            return
        with GENERATOR_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
