"""Random generators of a training run: seeding, saving and restoring."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flowbnn.distributions.draws import GENERATOR_LOCK


def seed_all(seed: int) -> None:
    """Seeds torch (all devices), numpy's global generator and ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader and of its samplers, each once, in a fixed order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(value for value in generators if isinstance(value, torch.Generator)))


class RandomState:
    """State of the global generators of torch (CPU and CUDA), numpy and ``random``, and of further generators.

    Args:
        generators: Further generators, such as those of a loader.
        device: Device of one of several processes. Its state is then the only CUDA state, so that processes on different devices can
            exchange their states. None saves the states of all CUDA devices.

    >>> source = torch.Generator().manual_seed(0)
    >>> random_state = RandomState([source])
    >>> before = random_state.state()
    >>> first = torch.rand(1), torch.rand(1, generator=source), random.random()
    >>> random_state.restore(before)
    >>> first == (torch.rand(1), torch.rand(1, generator=source), random.random())
    True
    """

    def __init__(
        self, generators: Iterable[torch.Generator] = (), device: torch.device | None = None
    ) -> None:
        self.generators: list[torch.Generator] = list(generators)
        self.device = device

    def state(self) -> dict[str, Any]:
        """Returns the state of all generators as nested tensors and plain values."""
        version, words, gauss = random.getstate()
        kind, numbers, *position = np.random.get_state(legacy=True)  # noqa: NPY002
        return {
            **self.torch_state(),
            "python": (version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss),
            "numpy": (kind, torch.from_numpy(np.array(numbers, dtype=np.int64)), *position),
        }

    def torch_state(self) -> dict[str, Any]:
        """Returns the state of torch's generators, which takes two microseconds and can be saved at every step."""
        states = list(map(torch.Generator.get_state, self.generators))
        return {"torch": torch.get_rng_state(), "cuda": self.cuda_state(), "generators": states}

    def cuda_state(self) -> list[torch.Tensor]:
        """Returns the states of the CUDA generators."""
        if self.device is not None:
            return [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def seed(self, seed: int) -> None:
        """Seeds all generators except those of CUDA."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        for generator in (torch.default_generator, *self.generators):
            generator.manual_seed(seed)

    def check(self, state: dict[str, Any]) -> None:
        """Raises an error if a state cannot be restored. The generators are not changed."""
        for value in (state["torch"], *state.get("generators", [])):
            torch.Generator().set_state(value)
        if "python" in state:
            version, words, gauss = state["python"]
            _, numbers, position, *_ = state["numpy"]
            for values in (words, numbers):
                if values.dtype != torch.int64 or not bool(((values >= 0) & (values < 2**32)).all()):
                    raise ValueError("no 32-bit words")
            random.Random().setstate((version, tuple(words.tolist()), gauss))
            # numpy's generator has 624 words; it would read memory outside of them
            if numbers.shape != (624,) or position not in range(625):
                raise ValueError(f"random state {tuple(numbers.shape)} at position {position}")

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state returned by :meth:`state` or :meth:`torch_state`, or the entries of it that are present."""
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            devices: Any = [self.device] if self.device is not None else range(torch.cuda.device_count())
            for device, value in zip(devices, state["cuda"], strict=False):
                torch.cuda.set_rng_state(value, device)
        if "generators" in state:
            for generator, value in zip(self.generators, state["generators"], strict=True):
                generator.set_state(value)
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
            kind, numbers, *position = state["numpy"]
            np.random.set_state((kind, numbers.numpy(), *position))  # noqa: NPY002


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
    """Context manager that seeds torch's CPU generator and restores it at its end.

    Args:
        seed: Seed of the block, or None to use the generator as it is.

    >>> with temporary_seed(0):
    ...     first = torch.rand(1)
    >>> with temporary_seed(0):
    ...     bool(first == torch.rand(1))
    True
    """
    if seed is None:
        yield
        return
    with GENERATOR_LOCK, torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def sampling_context(device: torch.device, seed: int | None) -> Iterator[None]:
    """Context manager without gradients that seeds torch's generators and restores them at its end.

    Args:
        device: Device whose generator is seeded beside that of the CPU.
        seed: Seed of the block, or None to use the generators as they are.
    """
    with torch.no_grad():
        if seed is None:
            yield
            return
        with GENERATOR_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
