r"""Which weights of a network are random, how their noise is drawn in training, and the network that computes with them.

A linear map :math:`y = W x` whose weights are Gaussian around their mean has outputs that are Gaussian around theirs, so that the
noise can be added behind the layer instead of inside it. Both ways below serve linear layers and convolutions (with groups, strides
and any padding) and lower the variance of gradients, since the examples of a batch no longer share one draw:

* *local reparameterization* (Kingma, Salimans and Welling 2015, https://arxiv.org/abs/1506.02557):
  one normal number for every output, scaled by
  :math:`\sqrt{\sigma^2 * x^2}`. For a linear layer that sees one vector per example this is exact. Where an example has several
  positions (convolutions, sequences) every position is drawn by itself: each one's distribution is exact, what they share is lost, as
  in the papers that use it for convolutions.
* *Flipout* (Wen et al. 2018, https://arxiv.org/abs/1803.04386):
  one draw :math:`\Delta W` for the batch, whose signs are flipped at random for every example,
  :math:`y = \bar W x + r \circ \Delta W (s \circ x)`. It is exact for all positions of an example; the examples are on the first axis.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import call, device_of, dtype_of, evaluation_mode, move, watch_modules
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.noise.layout import FORWARD, absorbs
from flowbnn.noise.passes import RowShard
from flowbnn.numerics import full_precision
from flowbnn.posterior.weights import StandIns

Way = Literal["reparameterization", "local", "flipout"]
_LEAST = {torch.float64: 1e-60}  # variance: below it, the root has no slope to speak of
_CHANNELS = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
LayerChoice = str | type[nn.Module] | Callable[[str, nn.Module], bool] | None
_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def owners(model: nn.Module) -> dict[str, list[str]]:
    """The layers that hold each parameter, by its name; a tied one has several, or one that holds it twice."""
    holders: dict[int, list[str]] = {}
    for layer, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(layer)
    return {name: holders[id(parameter)] for name, parameter in model.named_parameters()}


def tied(model: nn.Module) -> set[str]:
    """Parameters that stand in several places."""
    return {name for name, layers in owners(model).items() if len(layers) > 1}


def title(model: nn.Module, layer: str) -> str:
    """A layer as messages name it."""
    return f"'{layer}' ({type(model.get_submodule(layer)).__name__})"


def _matches(choice: Any, layer: str, module: nn.Module) -> bool:
    if choice is None:
        return not isinstance(module, _NORMS)
    if isinstance(choice, str):  # a name covers what is inside of it
        above = layer.split(".")
        return any(fnmatchcase(".".join(above[: end + 1]), choice) for end in range(len(above)))
    if isinstance(choice, type):
        return isinstance(module, choice)
    return bool(choice(layer, module))


def chosen_weights(model: nn.Module, choice: LayerChoice) -> list[str]:
    """Names of the parameters of the chosen layers that are to be learned; a tied one counts where one of its layers is chosen.

    >>> chosen_weights(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), None)
    ['0.weight', '0.bias']
    """
    held = owners(model)
    layers = {layer for several in held.values() for layer in several}
    picked = {layer for layer in layers if _matches(choice, layer, model.get_submodule(layer))}
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point() and picked.intersection(held[name])
    ]
    if names:
        return names
    reason = f"layers={choice!r} matches no layer with weights to learn" if choice is not None else ""
    if isinstance(choice, str):
        reason += nearest(choice, dict.fromkeys(layer for layers in held.values() for layer in layers))
    raise FlowBNNError(
        reason
        or "only normalisation layers of this network have weights to learn; choose them with layers='*'",
        kind="layer",
    )


def base_scales(mean: Mapping[str, Tensor], share: float, fallback: float) -> dict[str, Tensor]:
    """Standard deviations to start from: a share of each tensor's size; where it is all zeros, of the size of all of them."""
    total = sum(float(value.square().sum()) for value in mean.values())
    overall = (total / max(1, sum(value.numel() for value in mean.values()))) ** 0.5 or fallback
    scales = {}
    for name, value in mean.items():
        size = float(value.square().mean().sqrt()) if value.numel() else 0.0
        scales[name] = torch.full_like(value, share * (size if size > 1e-3 * overall else overall))
    return scales


def seen_by(model: nn.Module, inputs: Any) -> dict[str, list[int]]:
    """How often layers that are linear maps are called in a pass, as the number of axes of each call's input."""
    maps = {name: part for name, part in model.named_modules() if is_linear_map(part)}
    axes: dict[str, list[int]] = {name: [] for name in maps}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        axes[name].append((args[0] if args else kwargs["input"]).ndim)

    with watch_modules(maps, record, None), evaluation_mode(model):
        call(model, move(inputs, device_of(model), dtype_of(model)))
    return axes


class Ways(NamedTuple):
    """How weights are drawn: ``"local"`` or ``"flipout"`` by layer, and by parameter. What is not named is drawn plainly."""

    layers: dict[str, str]
    parameters: dict[str, Way]


def ways_of(model: nn.Module, names: list[str], estimator: str, inputs: Any) -> Ways:
    """The way of every layer, or one line that names a layer which an estimator asked for by name cannot serve."""
    layers: dict[str, str] = {}
    parameters: dict[str, Way] = {}
    if estimator == "reparameterization":
        return Ways(layers, parameters)
    calls, several, held = seen_by(model, inputs), tied(model), owners(model)
    for layer in dict.fromkeys(held[name][0] for name in names if name not in several):
        module = model.get_submodule(layer)
        mine = [name for name in names if held[name] == [layer]]
        own = [name for name, places in held.items() if layer in places]
        if several.intersection(own):
            continue  # part of it is tied, and one draw of that must serve all its places
        if estimator == "auto":
            if isinstance(module, nn.Linear) and calls.get(layer) == [2] and len(mine) == len(own):
                layers[layer] = "local"
        elif not calls.get(layer):
            why = (
                "is never called itself"
                if layer in calls
                else "is no linear layer or convolution of torch's own"
            )
            raise FlowBNNError(
                f"layer {title(model, layer)} cannot be drawn by estimator='{estimator}': it {why}; "
                "estimator='auto' or 'reparameterization' serves it, or leave it out with layers=",
                kind="layer",
            )
        elif any(name.rpartition(".")[2] == "weight" for name in mine):
            layers[layer] = estimator
        parameters.update({name: layers[layer] for name in mine if layer in layers})  # type: ignore[misc]
    return Ways(layers, parameters)


def is_linear_map(module: nn.Module) -> bool:
    """Whether the layer is a linear map of torch's own, with a weight of its own: a linear layer or a convolution.

    >>> is_linear_map(nn.Conv2d(4, 8, 3, groups=2)), is_linear_map(nn.ConvTranspose2d(4, 8, 3)), is_linear_map(nn.GRU(4, 8))
    (True, False, False)
    """
    return isinstance(module, FORWARD) and absorbs(module)


def apply_weights(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer computes with other weights."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    layer: Any = module
    return layer._conv_forward(x, weight, bias)


def rows_of(
    share: RowShard | None, shape: torch.Size, batched: bool, like: Tensor, signs: bool = False
) -> Tensor:
    """Normal numbers (or signs) of this shape; where a batch is spread over processes, the rows that are here of the whole's."""

    def draw(rows: int | None) -> Tensor:
        whole = shape if rows is None else torch.Size((rows, *shape[1:]))
        if signs:
            drawn = torch.empty(whole, dtype=like.dtype, device=like.device)
            return drawn.bernoulli_(0.5).mul_(2.0).sub_(1.0)
        return standard_normal(whole, torch.promote_types(like.dtype, torch.float32), like.device)

    if share is None or not batched or shape[0] % (share.stop - share.start):
        return draw(None)
    return share.of(shape[0], draw)


def local_noise(
    module: nn.Module, x: Tensor, std: Tensor, bias_std: Tensor | None, share: RowShard | None = None
) -> Tensor:
    r"""What random weights add to a layer's output: :math:`\sqrt{\sigma_W^2 * x^2 + \sigma_b^2} \circ \epsilon`.

    >>> layer = nn.Linear(3, 2)
    >>> local_noise(layer, torch.ones(5, 3), torch.full((2, 3), 0.1), None).shape
    torch.Size([5, 2])
    """
    # variances are too small for float16
    narrow = torch.get_autocast_dtype(x.device.type) == torch.float16
    with full_precision(x) if narrow else nullcontext():
        bias = None if bias_std is None else bias_std.square()
        variance = apply_weights(module, x.square(), std.square(), bias)
        normal = rows_of(share, variance.shape, _batched(module, x), variance)
        return variance.clamp_min(_LEAST.get(variance.dtype, 1e-30)).sqrt() * normal


def flipout_noise(
    module: nn.Module, x: Tensor, delta: Tensor, bias_delta: Tensor | None, share: RowShard | None = None
) -> Tensor:
    r"""What one draw of the weights' noise adds to a layer's output, its signs flipped for every example.

    >>> layer = nn.Conv2d(4, 6, 3, groups=2)
    >>> flipout_noise(layer, torch.ones(5, 4, 8, 8), torch.zeros_like(layer.weight), None).shape
    torch.Size([5, 6, 6, 6])
    """
    spatial, batched = _spatial(module), _batched(module, x)
    axis = -1 - spatial

    def signs(width: int, ndim: int) -> Tensor:
        shape = [1] * ndim
        shape[axis] = width
        if batched:
            shape[0] = x.shape[0]
        return rows_of(share, torch.Size(shape), batched, x, signs=True)

    moved = apply_weights(module, x * signs(x.shape[axis], x.ndim), delta, bias_delta)
    return moved * signs(moved.shape[axis], moved.ndim)


def _spatial(module: nn.Module) -> int:
    return next(count for kind, count in _CHANNELS.items() if isinstance(module, kind))


def _batched(module: nn.Module, x: Tensor) -> bool:
    return x.ndim > _spatial(module) + 1


def gaussian_kl(mean: Tensor, log_std: Tensor, prior_scale: float) -> Tensor:
    r""":math:`\sum_i \log\frac{\sigma_0}{\sigma_i} + \frac{\sigma_i^2 + \mu_i^2}{2\sigma_0^2} - \frac12`, to a prior around zero.

    >>> gaussian_kl(torch.zeros(3), torch.zeros(3), 1.0)
    tensor(0.)
    """
    squares = (2.0 * log_std).exp().sum() + mean.square().sum()
    constant = mean.numel() * (math.log(prior_scale) - 0.5)
    return squares / (2.0 * prior_scale**2) - log_std.sum() + constant


class DrawnNetwork(nn.Module):
    """A network that computes with other tensors in the place of these parameters, tied ones in all their places.

    It is left as it is but for hooks on some layers, which :meth:`release` takes off.
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.network, self.hooks = network, []  # type: tuple[nn.Module, list[Any]]
        self.shared: dict[str, Tensor] | None = None  # what the hooks of a pass use; None outside of one
        own = dict(network.named_parameters())
        wanted = {id(own[name]): name for name in names}
        self.places = [
            (module._parameters, key, wanted[id(parameter)])
            for module in network.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in wanted
        ]

    def run(
        self, values: Mapping[str, Tensor | None], shared: dict[str, Tensor], *args: Any, **kw: Any
    ) -> Any:
        """A pass of the network with these tensors, which gradients reach."""
        self.shared = shared
        try:
            with StandIns((held, key, values[name]) for held, key, name in self.places):
                return self.network(*args, **kw)
        finally:
            self.shared = None

    def release(self) -> None:
        """Take the hooks off."""
        while self.hooks:
            self.hooks.pop().remove()
