"""Several views of an input: each sampled network answers by the mean of what it says of all of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import rows
from flowbnn.likelihoods import Likelihood

__all__ = ["View", "check_views", "viewing"]

View = Callable[[Any], Any]


def check_views(views: Sequence[View]) -> tuple[View, ...]:
    """Refuse what is no sequence of functions."""
    if not isinstance(views, list | tuple):
        raise FlowBNNError("views is a sequence of functions of a batch of inputs, such as [mirrored]")
    for view in views:
        if not callable(view):
            raise FlowBNNError(f"a view is a function of a batch of inputs, not a {type(view).__name__}")
    return tuple(views)


@contextmanager
def viewing(
    drawing: AbstractContextManager[Any], views: tuple[View, ...], likelihood: Likelihood
) -> Iterator[Any]:
    """What a prediction draws from, with every sample's answers averaged over the input and its views."""
    with drawing as draw:

        def both(inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None) -> Tensor:
            found = [draw(inputs, low, high)]
            for view in views:
                seen = view(inputs)
                if type(seen) is not type(inputs) or rows(seen) != rows(inputs):
                    raise FlowBNNError(
                        f"a view gives as many inputs as it is given, of the same kind: {rows(inputs)} rows, not "
                        + (f"{rows(seen)}" if type(seen) is type(inputs) else f"a {type(seen).__name__}")
                    )
                found.append(draw(seen, low, high))
            whole = likelihood.average(found)
            return whole if out is None else out.copy_(whole)

        both.passes = draw  # type: ignore[attr-defined]
        yield both
