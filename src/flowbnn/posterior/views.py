"""Several views of an input: each sampled network answers by the mean of its predictions for all of them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.batches import failure, rows

__all__ = ["View", "averaged"]

View = Callable[[Any], Any]


def averaged(posterior: Any, inputs: Any, samples: range, prediction: Any) -> Tensor:
    """As :meth:`Posterior.outputs`, with every sample's answers averaged over the input and its views."""
    outputs = [posterior.outputs(inputs, samples, prediction)]
    for view in prediction.options.views:
        name = getattr(view, "__name__", type(view).__name__)
        try:
            seen = view(inputs)
        except FlowBNNError:
            raise
        except Exception as error:
            raise FlowBNNError(f"the view {name} fails on inputs of {failure(inputs, error)}") from error
        if type(seen) is not type(inputs) or rows(seen) != rows(inputs):
            given = f"{rows(seen)} rows" if type(seen) is type(inputs) else f"a {type(seen).__name__}"
            raise FlowBNNError(
                f"the view {name} must give as many inputs as it is given, of the same kind: {rows(inputs)} rows, not {given}",
                kind="shape",
                argument="views",
            )
        outputs.append(posterior.outputs(seen, samples, prediction))
    return posterior.likelihood.average(outputs)
