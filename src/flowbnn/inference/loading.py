"""A saved posterior of any kind."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.stored import Stored
from flowbnn.training import load_tensors

__all__ = ["load_posterior"]


def load_posterior(path: str | Path | Stored, network: nn.Module) -> Posterior:
    """Read what ``posterior.save(path)`` wrote, of whatever method, into a copy of ``network``, the plain network it was made from.

    Raises:
        FlowBNNError: where the file is damaged or was made from another architecture.
    """
    if not isinstance(network, nn.Module):
        raise FlowBNNError(
            f"a posterior is loaded into a network (nn.Module) like the one it was made from, not into a {type(network).__name__}"
        )
    _, document = path.contents if isinstance(path, Stored) else load_tensors(path)
    kind = document.get("kind") if isinstance(document, dict) else None
    kinds: dict[str, Any] = {found.kind: found for found in _descendants(Posterior)}
    if not isinstance(kind, str) or kind not in kinds or not hasattr(kinds[kind], "load"):
        raise FlowBNNError(
            f"'{path}' holds a {kind or 'file of another kind'}, which is no posterior of this version"
        )
    # a copy, as fit makes one: a second posterior read into the same network must not change the first
    return kinds[kind].load(path, deepcopy(network))


def _descendants(kind: type[Posterior]) -> Iterator[type[Posterior]]:
    for below in kind.__subclasses__():
        yield below
        yield from _descendants(below)
