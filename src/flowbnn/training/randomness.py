"""Every source of randomness that a training run draws on, saved and put back."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowbnn.errors import FlowBNNError

__all__ = ["Randomness", "loader_generators", "seed_all"]


def seed_all(seed: int) -> None:
    """Seed torch (all devices), numpy's global generator and ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The loader's own generators: its ``generator`` and those of its samplers, each once, in a fixed order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


class Randomness:
    """The global generators of torch (CPU and CUDA), numpy and ``random``, and any generators handed in.

    Args:
        generators: of the loader, and those that the step draws from.
        device: the one device of a process that is one of several; its state is then the first (and only) one of ``cuda``, so
            that all processes, each on a device of its own, can share one state. None keeps those of all devices.

    >>> source = torch.Generator().manual_seed(0)
    >>> randomness = Randomness([source])
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
        return {**self.torch_state(), **host_state()}

    def torch_state(self) -> dict[str, Any]:
        """torch's part of the state: two microseconds, so that it can be kept at every step."""
        if self.device is not None:
            cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        else:
            known = torch.cuda.is_available() and torch.cuda.is_initialized()
            cuda = torch.cuda.get_rng_state_all() if known else []
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "generators": [generator.get_state() for generator in self.generators],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state` or :meth:`torch_state` gave."""
        self.check(state["generators"])
        torch.set_rng_state(state["torch"])
        if self.device is not None:
            if state["cuda"] and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"][0], self.device)
        elif state["cuda"] and torch.cuda.is_available():
            for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value, device)
        for generator, value in zip(self.generators, state["generators"], strict=True):
            generator.set_state(value)
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
            np.random.set_state(state["numpy"])  # noqa: NPY002

    def try_out(self, state: dict[str, Any], source: str | Path) -> None:
        """Find out whether :meth:`restore` would accept a stored state; the present one stays."""
        present = self.state()
        try:
            _check_host_state(state)
            self.restore(state)
        except FlowBNNError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise FlowBNNError(
                f"'{source}' is damaged: its random state is refused ({error!r:.150})"
            ) from None
        finally:
            self.restore(present)

    def check(self, states: Sequence[Any]) -> None:
        """Refuse a state with another number of generators."""
        if len(states) != len(self.generators):
            raise FlowBNNError(
                f"the checkpoint holds the state of {len(states)} random generators, this run has "
                f"{len(self.generators)}: give the loader and train(generators=...) the same ones as before"
            )


def _check_host_state(state: dict[str, Any]) -> None:
    """What ``random`` and numpy do not check themselves: numpy reads beyond its table from a position outside it."""
    if not {"torch", "cuda", "generators", "python", "numpy"} <= state.keys():
        raise KeyError("a generator's state is missing")
    numpy_state = state["numpy"]
    if numpy_state["bit_generator"] == "MT19937":
        place = numpy_state["state"]["pos"]
        if type(place) is not int or not 0 <= place <= 624:
            raise ValueError(f"numpy's position is {place!r:.40}")


def host_state() -> dict[str, Any]:
    """The state of ``random`` and of numpy's global generator."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.asarray(words, dtype=np.int64), gauss),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
    }
