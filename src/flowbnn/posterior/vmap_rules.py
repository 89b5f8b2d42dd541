"""Equivalent forms of torch operations that ``torch.vmap`` runs slowly or not at all.

Vmap moves the samples of a BatchNorm layer into its channels, which copies every feature map and loses the ``channels_last`` memory
format. It has no rule for adaptive average pooling of such feature maps. On CUDA devices it refuses a convolution under autocast whose
bias has another dtype than its input (torch 2.11). An operation without an entry here runs as torch runs it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Samples = int | None  # axis of the samples, or None if they share a value


class VmapRules(TorchFunctionMode):
    """Context manager in which operations run in the form that vmap handles best. Their results are the same.

    >>> from torch import nn
    >>> layer, x = nn.BatchNorm2d(2).eval(), torch.randn(5, 4, 2, 3, 3)
    >>> def normalize(x):
    ...     with VmapRules():
    ...         return layer(x)
    >>> torch.equal(torch.vmap(normalize)(x), layer(x.flatten(0, 1)).view_as(x))
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


class RuleFinder(TorchFunctionMode):
    """Context manager that finds out whether a forward pass has an operation that :class:`VmapRules` change.

    Networks without such operations run without rules, because torch passes every operation and every attribute of a tensor to a
    context manager of this kind, which takes a tenth of a small pass.

    Attributes:
        needs_rules: True if the pass has such an operation.

    >>> from torch import nn
    >>> with RuleFinder() as finder:
    ...     outputs = nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 4, 4))
    ...     before = finder.needs_rules
    ...     outputs = nn.AdaptiveAvgPool2d(1)(outputs)
    >>> before, finder.needs_rules
    (False, True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs_rules = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = None if self.needs_rules else RULES.get(func)
        if rule is adaptive_average_pool:
            self.needs_rules = is_single(args[1] if len(args) > 1 else (kwargs or {}).get("output_size"))
        elif rule is convolution:
            self.needs_rules = args[0].is_cuda if args else True
        elif rule is not None:
            self.needs_rules = True
        return func(*args, **(kwargs or {}))


def batch_norm(
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalizes by the running statistics without moving the samples into the channels."""
    if training or running_mean is None or running_var is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not torch.compiler.is_compiling():
        return BatchNormInEvaluation.apply(input, running_mean, running_var, weight, bias, eps)
    # compiled, these operations are a part of the kernels around them
    scale = torch.rsqrt(running_var + eps) * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - running_mean * scale
    shape = (-1,) + (1,) * (input.dim() - 2)
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


class BatchNormInEvaluation(torch.autograd.Function):
    """BatchNorm by running statistics, whose samples are rows for vmap. Predictions need no gradients, so it has no backward pass."""

    @staticmethod
    def forward(
        x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Samples, ...], x: Tensor, *statistics: Any) -> tuple[Tensor, int]:
        samples, *others = in_dims
        if samples is None or any(axis is not None for axis in others):
            raise RuntimeError("BatchNorm statistics depend on the sample")
        x = x.movedim(samples, 0)
        outputs = BatchNormInEvaluation.apply(x.flatten(0, 1), *statistics)
        return outputs.unflatten(0, x.shape[:2]), 0


def convolution(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Converts the bias to the dtype of the input, as autocast does later."""
    if bias is not None and bias.dtype != input.dtype:
        bias = bias.to(input.dtype)
    return func(input, weight, bias, *args, **kwargs)


def is_single(output_size: Any) -> bool:
    """Returns True if the output of a pool has one position."""
    return output_size == 1 or (isinstance(output_size, tuple | list) and all(n == 1 for n in output_size))


def adaptive_average_pool(func: Callable[..., Tensor], input: Tensor, output_size: Any) -> Tensor:
    """Takes the mean over all positions if the output has one position."""
    axes = {F.adaptive_avg_pool1d: (-1,), F.adaptive_avg_pool2d: (-2, -1)}[func]
    if is_single(output_size):
        return input.mean(axes, keepdim=True)
    return func(input, output_size)


RULES: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: batch_norm,
    F.adaptive_avg_pool1d: adaptive_average_pool,
    F.adaptive_avg_pool2d: adaptive_average_pool,
    **dict.fromkeys([F.conv1d, F.conv2d, F.conv3d], convolution),
    **dict.fromkeys([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d], convolution),
}
