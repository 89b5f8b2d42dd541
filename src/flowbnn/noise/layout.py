"""Position of a noise vector on a layer's tensor: the axes of the features and of the examples."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked

FORWARD: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Layout(NamedTuple):
    """Position of the noise of one layer.

    Args:
        dim: Length of the noise vector, the number of features of the layer's input.
        feature_axis: Axis of the features, counted from the end (``-1`` for a linear layer, ``-3`` for a 2-d convolution).
        batch_axis: Axis of the examples of a batched input; None if the input has none (an embedding of positions).
        unbatched_ndim: Number of axes of one example without a batch axis.
        side: ``"input"``, or ``"output"`` on request and for layers without real-valued inputs (an embedding).
        split: Lengths of the pieces of the vector, for layers with inputs of different widths (attention with its own key and value
            widths).
        fan_out: Number of outputs per input feature if every output reads one feature (a depthwise convolution, a convolution of a
            grey image), else 0. Noise on such an input passes through the layer, ``f(z x) - b = z (f(x) - b)``. It multiplies the
            output instead, which saves the gradient of the images, and at prediction all passes of the layer but one.
        examples_first: Order of the rows in a network that flattens time steps or frames into them. True if all rows of one example
            are adjacent (``x.flatten(0, 1)`` with the examples first), False if all examples of one step are.
        one_draw: True if one draw serves all examples of a batch in training, because the examples interact.
    """

    dim: int
    feature_axis: int = -1
    batch_axis: int | None = 0
    unbatched_ndim: int = 1
    side: Literal["input", "output"] = "input"
    split: tuple[int, ...] = ()
    fan_out: int = 0
    examples_first: bool = True
    one_draw: bool = False


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns True if a layer runs the forward of its torch class, and not that of a subclass or an instance."""
    for name in ("forward", "_conv_forward"):
        if name in vars(module) or getattr(type(module), name, None) is not getattr(kind, name, None):
            return False
    return True


def _linear(module: nn.Linear) -> Layout:
    single = module.in_features == 1 and is_unmodified(module, nn.Linear)
    return Layout(module.in_features, fan_out=module.out_features if single else 0)


def _convolution(kind: type[nn.Module], axes: int, module: Any) -> Layout:
    single = module.in_channels == module.groups and is_unmodified(module, kind)
    fan_out = module.out_channels // module.groups if single else 0
    return Layout(module.in_channels, feature_axis=-1 - axes, unbatched_ndim=1 + axes, fan_out=fan_out)


def _attention(module: nn.MultiheadAttention) -> Layout:
    widths = (module.embed_dim, module.kdim, module.vdim)
    are_equal = widths == (module.embed_dim,) * 3
    return Layout(
        module.embed_dim if are_equal else sum(widths),
        batch_axis=0 if module.batch_first else 1,
        unbatched_ndim=2,
        split=() if are_equal else widths,
    )


_LAYOUTS: dict[type[nn.Module], Callable[..., Layout]] = {
    nn.Linear: _linear,
    **{kind: partial(_convolution, kind, axes + 1) for axes, kind in enumerate(FORWARD[1:])},
    **{kind: partial(_convolution, kind, axes + 1) for axes, kind in enumerate(TRANSPOSED)},
    nn.RNNBase: lambda m: Layout(m.input_size, batch_axis=0 if m.batch_first else 1, unbatched_ndim=2),
    nn.RNNCellBase: lambda m: Layout(m.input_size),
    nn.MultiheadAttention: _attention,
    nn.Embedding: lambda m: Layout(m.embedding_dim, side="output"),
    nn.EmbeddingBag: lambda m: Layout(m.embedding_dim, side="output"),
}
# linear layers of libraries that need not be installed, by the full name of the class
_NAMED_LAYOUTS: dict[str, Callable[..., Layout]] = {
    # GPT-2; its weight is transposed
    "transformers.pytorch_utils.Conv1D": lambda m: Layout(m.weight.shape[0]),
    "torch_geometric.nn.dense.linear.Linear": lambda m: Layout(m.in_channels),
}


def _layout_function(module: nn.Module) -> Callable[..., Layout] | None:
    """Returns the function of the nearest registered class of a module, or None."""
    for kind in type(module).__mro__:
        function = _LAYOUTS.get(kind) or _NAMED_LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")
        if function is not None:
            return function
    return None


@checked
def register_layer(kind: type[nn.Module], layout: Callable[..., Layout]) -> None:
    """Registers a layer class, so that :func:`~flowbnn.to_stochastic` can add noise to it.

    Args:
        kind: Module class. Its subclasses are included.
        layout: Function from a module of that class to its :class:`Layout`.

    >>> class Scale(nn.Module):
    ...     def __init__(self, features):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(features))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> import torch
    >>> register_layer(Scale, lambda module: Layout(len(module.weight)))
    >>> layout_of(Scale(7)).dim
    7
    """
    _LAYOUTS[kind] = layout


def registration_advice(classes: Sequence[str]) -> str:
    """Returns advice on classes of layers that are not registered, with the arguments of :func:`register_layer`.

    Args:
        classes: Names of the classes, the most important one first.

    >>> registration_advice(["KANLinear"])
    'use flowbnn.noise.register_layer(KANLinear, lambda layer: flowbnn.noise.Layout(number_of_input_features))'
    """
    name = classes[0] if classes else "MyLayer"
    return f"use flowbnn.noise.register_layer({name}, lambda layer: flowbnn.noise.Layout(number_of_input_features))"


def wrappable(module: nn.Module) -> bool:
    """Returns True if a layer can have noise."""
    return _layout_function(module) is not None


def wrappable_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers that can have noise, by name. The output projection of attention, which is never called, is left out."""
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    return {name: m for name, m in model.named_modules() if wrappable(m) and id(m) not in inner}


def layout_of(module: nn.Module) -> Layout:
    """Returns the layout of the nearest registered class of ``module``."""
    function = _layout_function(module)
    layout = None if function is None else function(module)
    if layout is not None and layout.dim > 0:
        return layout
    reason = "has no input width yet; run one batch through the lazy network first"
    if layout is None:
        reason = f"cannot have noise; {registration_advice([type(module).__name__])}"
    raise FlowBNNError(f"a {type(module).__name__} {reason}", kind="layer")


def output_layout(module: nn.Module) -> Layout:
    """Returns the layout of noise on the output of a linear layer or a convolution, bias included, or of an embedding.

    >>> output_layout(nn.Conv2d(3, 8, 5))[:2]
    (8, -3)
    """
    layout = layout_of(module)
    if layout.side == "output":
        return layout
    if not isinstance(module, (*FORWARD, *TRANSPOSED)):
        text = f"side='output' is for linear layers and convolutions, got a {type(module).__name__}"
        raise FlowBNNError(text, kind="layer", argument="side")
    width: Any = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    return layout._replace(dim=width, side="output", fan_out=0)


def absorbs(module: nn.Module) -> bool:
    """Returns True if noise on the input of a layer can be multiplied into its weight: an unmodified torch layer.

    >>> absorbs(nn.Conv2d(4, 8, 3, groups=2)), absorbs(nn.GRU(4, 8))
    (True, False)
    """
    kind = next((kind for kind in (*FORWARD, *TRANSPOSED) if isinstance(module, kind)), None)
    return kind is not None and module._parameters.get("weight") is not None and is_unmodified(module, kind)


def weight_scale(module: nn.Module, vector: Tensor) -> Tensor:
    """Returns the factor of the weight that makes the layer compute ``layer(vector * x)``. It broadcasts against the weight.

    >>> import torch
    >>> layer, x, z = nn.Linear(3, 2, bias=False), torch.randn(5, 3), torch.rand(3)
    >>> torch.allclose(x @ (layer.weight * weight_scale(layer, z)).T, layer(x * z))
    True
    """
    weight: Any = module.weight
    ones = (1,) * (weight.ndim - 2)
    if isinstance(module, TRANSPOSED):
        return vector.view(-1, 1, *ones)
    groups: Any = getattr(module, "groups", 1)
    if groups == 1:
        return vector.view(1, -1, *ones)
    return (
        vector.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0).view(*weight.shape[:2], *ones)
    )
