"""Equivalent forms of torch operations that torch, or ``torch.vmap``, runs slowly or not at all.

Vmap moves the samples of a BatchNorm layer into its channels, which copies every feature map and loses the ``channels_last`` memory
format. It has no rule for adaptive average pooling of such feature maps. On CUDA devices it refuses a convolution under autocast whose
bias has another dtype than its input (torch 2.11). On a CPU torch's max-pooling takes ten times as long as maxima of shifted feature
maps, and its adaptive average pooling three times as long as average pooling. An operation without an entry here runs as torch runs it.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Samples = int | None  # axis of the samples, or None if they share a value


class OperationRules(TorchFunctionMode):
    """Context manager in which operations run in a form that is faster, or that vmap supports. Their results are the same.

    >>> from torch import nn
    >>> layer, x = nn.BatchNorm2d(2).eval(), torch.randn(5, 4, 2, 3, 3)
    >>> def normalize(x):
    ...     with OperationRules():
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
    """Context manager that finds out whether a forward pass has an operation that :class:`OperationRules` change.

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
            self.needs_rules = changes_average_pool(func, *args, **(kwargs or {}))
        elif rule is max_pool:
            self.needs_rules = max_pool_windows(func, *args, **(kwargs or {})) is not None
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
    if training or running_mean is None or running_var is None or needs_gradient(input):
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not torch.compiler.is_compiling():
        return BatchNormInEvaluation.apply(input, running_mean, running_var, weight, bias, eps)
    # compiled, these operations are a part of the kernels around them
    scale = torch.rsqrt(running_var + eps) * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - running_mean * scale
    shape = (-1,) + (1,) * (input.dim() - 2)
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


class BatchNormInEvaluation(torch.autograd.Function):
    """BatchNorm by running statistics, whose samples are rows for vmap. It has no backward pass."""

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
    """Takes the mean over all positions if the output has one position, or over windows of equal size on a CPU."""
    axes = AVERAGE_AXES[func]
    if is_single(output_size):
        return input.mean(axes, keepdim=True)
    if (windows := average_pool_windows(func, input, output_size)) is None:
        return func(input, output_size)
    if max(windows) == 1:
        return input.clone()
    pool: Callable[..., Tensor] = F.avg_pool1d if len(axes) == 1 else F.avg_pool2d
    return pool(input, windows)


def changes_average_pool(func: Callable[..., Tensor], input: Tensor, output_size: Any) -> bool:
    """Returns True if :func:`adaptive_average_pool` does not use torch's own operation."""
    return is_single(output_size) or average_pool_windows(func, input, output_size) is not None


def average_pool_windows(
    func: Callable[..., Tensor], input: Tensor, output_size: Any
) -> tuple[int, ...] | None:
    """Returns the size of the windows of an adaptive pool, or None if they differ, or if torch's own operation is used.

    Args:
        func: Operation of torch.
        input: Feature maps ``[..., height, width]`` or ``[..., length]``.
        output_size: Size of the output, or a size per axis, where None keeps that of the input.

    >>> x = torch.zeros(1, 3, 8, 6)
    >>> average_pool_windows(F.adaptive_avg_pool2d, x, (4, None)), average_pool_windows(F.adaptive_avg_pool2d, x, 5)
    ((2, 1), None)
    """
    sizes = input.shape[-len(AVERAGE_AXES[func]) :]
    outputs = tuple(output_size) if isinstance(output_size, tuple | list) else (output_size,) * len(sizes)
    if not is_plain_cpu(input) or len(outputs) != len(sizes):
        return None
    pairs = [(size, size if output is None else output) for size, output in zip(sizes, outputs, strict=True)]
    if any(output == 0 or size % output for size, output in pairs):
        return None
    return tuple(size // output for size, output in pairs)


def needs_gradient(input: Tensor) -> bool:
    """Returns True if gradients are computed through a tensor."""
    return torch.is_grad_enabled() and input.requires_grad


def is_plain_cpu(input: Any) -> bool:
    """Returns True for a tensor on a CPU outside of ``torch.compile``, which makes fast kernels of torch's own pools."""
    return isinstance(input, Tensor) and input.device.type == "cpu" and not torch.compiler.is_compiling()


def max_pool(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Takes maxima of shifted feature maps, one axis after the other."""
    windows = max_pool_windows(func, input, *args, **kwargs)
    if windows is None:
        return func(input, *args, **kwargs)
    for axis, (kernel, stride) in windows.items():
        input = input.movedim(axis, -1)
        starts, length = range(kernel), input.shape[-1] - kernel + 1
        shifted = [input[..., start : start + length : stride] for start in starts]
        input = reduce(torch.maximum, shifted).movedim(-1, axis)
    return input


def max_pool_windows(
    func: Callable[..., Any],
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> dict[int, tuple[int, int]] | None:
    """Returns size and stride of the windows of a max-pool for each of its axes, or None if torch's own operation is used.

    The maxima of shifted feature maps have no fast gradient, and leave out padding, dilation and indices.

    >>> x = torch.zeros(1, 3, 8, 8)
    >>> max_pool_windows(F.max_pool2d, x, (3, 2)), max_pool_windows(F.max_pool2d, x, 3, padding=1)
    ({-2: (3, 3), -1: (2, 2)}, None)
    """
    if not is_plain_cpu(input) or needs_gradient(input) or ceil_mode or return_indices:
        return None
    axes = (-1,) if func is F.max_pool1d else (-2, -1)
    kernels, strides, paddings, dilations = (
        tuple(value) * (len(axes) // len(value)) if isinstance(value, tuple | list) else (value,) * len(axes)
        for value in (kernel_size, stride or kernel_size, padding, dilation)
    )
    is_plain = not any(paddings) and all(value == 1 for value in dilations)
    if not is_plain or any(input.shape[axis] < kernel for axis, kernel in zip(axes, kernels, strict=True)):
        return None
    return dict(zip(axes, zip(kernels, strides, strict=True), strict=True))


AVERAGE_AXES: dict[Any, tuple[int, ...]] = {F.adaptive_avg_pool1d: (-1,), F.adaptive_avg_pool2d: (-2, -1)}
RULES: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    **dict.fromkeys([F.max_pool1d, F.max_pool2d], max_pool),
    F.adaptive_avg_pool1d: adaptive_average_pool,
    F.adaptive_avg_pool2d: adaptive_average_pool,
    **dict.fromkeys([F.conv1d, F.conv2d, F.conv3d], convolution),
    **dict.fromkeys([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d], convolution),
}
