"""Several views of an input: each sampled network answers by the mean of what it says of all of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.posterior.batches import failure, rows

__all__ = ["View", "Viewed", "check_views"]

View = Callable[[Any], Any]


def check_views(views: Sequence[View]) -> tuple[View, ...]:
    """Refuse what is no sequence of functions."""
    if not isinstance(views, list | tuple):
        raise FlowBNNError("views is a sequence of functions of a batch of inputs, such as [mirrored]")
    for view in views:
        if not callable(view):
            raise FlowBNNError(f"a view is a function of a batch of inputs, not a {type(view).__name__}")
    return tuple(views)


class Viewed:
    """Used as what it wraps (see :meth:`Posterior.drawing`), with every sample's answers averaged over the input and its views."""

    def __init__(
        self, drawing: AbstractContextManager[Any], views: tuple[View, ...], likelihood: Likelihood
    ) -> None:
        self.drawing, self.views, self.likelihood = drawing, views, likelihood

    def __enter__(self) -> Self:
        self.passes = self.drawing.__enter__()
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        return self.drawing.__exit__(*exc)

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        found = [self.passes(inputs, low, high)]
        for view in self.views:
            try:
                seen = view(inputs)
            except FlowBNNError:
                raise
            except Exception as error:
                name = getattr(view, "__name__", type(view).__name__)
                raise FlowBNNError(f"the view {name} fails on inputs of {failure(inputs, error)}") from error
            if type(seen) is not type(inputs) or rows(seen) != rows(inputs):
                raise FlowBNNError(
                    f"a view gives as many inputs as it is given, of the same kind: {rows(inputs)} rows, not "
                    + (f"{rows(seen)}" if type(seen) is type(inputs) else f"a {type(seen).__name__}")
                )
            found.append(self.passes(seen, low, high))
        whole = self.likelihood.average(found)
        return whole if out is None else out.copy_(whole)
