"""Several views of an input (test-time augmentation): each sampled network answers by the mean of its predictions for all of them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowbnn.batches import explaining, rows
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood

View = Callable[[Any], Any]
Outputs = Callable[[Any, range, Any], Tensor]


def averaged(outputs: Outputs, likelihood: Likelihood) -> Outputs:
    """As :meth:`Posterior.outputs`, with every sample's answers averaged over the input and its views."""

    def average(inputs: Any, samples: range, prediction: Any) -> Tensor:
        seen = [inputs, *(_seen(view, inputs) for view in prediction.options.views)]
        return likelihood.average([outputs(view, samples, prediction) for view in seen])

    return average


def _seen(view: View, inputs: Any) -> Any:
    name = getattr(view, "__name__", type(view).__name__)
    with explaining(inputs, f"the view {name} fails on inputs of"):
        seen = view(inputs)
    if type(seen) is not type(inputs) or rows(seen) != rows(inputs):
        given = f"{rows(seen)} rows" if type(seen) is type(inputs) else f"a {type(seen).__name__}"
        raise FlowBNNError(
            f"the view {name} must give as many inputs as it is given, of the same kind: {rows(inputs)} rows, not {given}",
            kind="shape",
            argument="views",
        )
    return seen
