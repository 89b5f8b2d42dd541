"""Detection of networks that return probabilities, because the likelihoods of classes take logits."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flowbnn.errors import warn
from flowbnn.likelihoods.base import Likelihood
from flowbnn.likelihoods.classes import Bernoulli, Categorical
from flowbnn.numerics import is_concrete


class SigmoidRecorder(TorchFunctionMode):
    """Context manager that records the results of all sigmoids.

    >>> with SigmoidRecorder() as sigmoids:
    ...     probabilities, ones = torch.sigmoid(torch.ones(2, 1)), torch.ones(2, 1)
    >>> sigmoids.recorded(probabilities.squeeze(1)), sigmoids.recorded(ones)
    (True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_sigmoid = getattr(func, "__name__", "") in ("sigmoid", "sigmoid_", "special_expit")
        if is_sigmoid and type(result) is Tensor and is_concrete(result):
            self.results.append(result)
        return result

    def recorded(self, outputs: Tensor) -> bool:
        """Returns True if the tensor is a result of a sigmoid, up to its shape, its precision and clamping."""
        same_size = (each.flatten().to(outputs) for each in self.results if each.numel() == outputs.numel())
        return any(torch.allclose(each, outputs.flatten(), atol=1e-5) for each in same_size)


def warn_probabilities(likelihood: Likelihood, outputs: Tensor, from_sigmoid: bool) -> None:
    """Warns if the network returns probabilities, because likelihoods take logits.

    Args:
        likelihood: Likelihood of the targets.
        outputs: Outputs of the network.
        from_sigmoid: If True, the outputs are the result of a sigmoid.
    """
    if not isinstance(likelihood, Categorical | Bernoulli):
        return
    in_unit_interval = bool(((outputs >= 0) & (outputs <= 1)).all())
    sums_to_one = bool(((outputs.sum(-1) - 1).abs() < 1e-3).all())
    if in_unit_interval and (sums_to_one if isinstance(likelihood, Categorical) else from_sigmoid):
        text = "the network returns probabilities instead of logits; remove its last softmax or sigmoid"
        warn(text, kind="probabilities")
