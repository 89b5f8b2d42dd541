"""Conversion of a network to a stochastic network (:func:`to_stochastic`), and back (:func:`to_deterministic`).

Layers keep their class, name and weights. The noise is a child module of its layer, called by a forward hook.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of
from flowbnn.errors import FlowBNNError, nearest, quote_names, warn
from flowbnn.networks import copy_network, deepcopy_network
from flowbnn.noise import Layout, Noise, Recipe, noise_layers
from flowbnn.noise.adapters import calls_layers_only, enclosing_adapter, guard_adapters
from flowbnn.noise.base import layers_with_noise, make_noise_modes
from flowbnn.noise.batched import draw_examples
from flowbnn.noise.contexts import NoiseGroup, NoiseMode, OptionalGenerator, Shape
from flowbnn.noise.inspection import matrix_share, warn_mostly_plain
from flowbnn.noise.layout import (
    absorbs,
    layout_of,
    output_layout,
    registration_advice,
    weight_scale,
    wrappable_layers,
)
from flowbnn.numerics import constant
from flowbnn.options import Hint, checked

Rule = str | type[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Conversion:
    """Row of the table of a conversion.

    Args:
        layer: Name of the layer.
        kind: Class of the layer.
        noise: Recipe of the noise.
        site: Site of the noise.
        dim: Length of the noise vector.
        parameters: Number of parameters of the noise.
    """

    layer: str
    kind: str
    noise: str
    site: str
    dim: int
    parameters: int


class ConversionTable(tuple[Conversion, ...]):
    """Tuple of :class:`Conversion` that prints as a table.

    Attributes:
        share: Share of the matrix weights of the network that belong to layers with noise. It is printed if it is not 1.
    """

    share: float = 1.0

    def __str__(self) -> str:
        header = tuple(column.name for column in fields(Conversion))
        rows = [(*astuple(row)[:4], str(row.dim), f"{row.parameters:,}") for row in self]
        rows.append(("", "", "", "", "", f"{sum(row.parameters for row in self):,}"))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rows = [header, tuple("-" * width for width in widths), *rows]
        alignment = "<<<<>>"
        cells = [[f"{c:{a}{w}}" for c, a, w in zip(row, alignment, widths, strict=True)] for row in rows]
        lines = ["  ".join(row).rstrip() for row in cells]
        if self.share < 1.0:
            lines.insert(0, f"noise reaches {100 * self.share:.0f} % of the matrix weights")
        return "\n".join(lines)


@checked
def to_stochastic(
    model: nn.Module,
    rules: Annotated[Mapping[Rule, Recipe | None], Hint('such as {"*": NormalAffine()}')],
    *,
    joint: Literal["full", "chain", "low-rank", "layers"] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Returns a stochastic copy of a network, whose layers multiply their input by learned noise.

    Classes, names, weights, tied weights, hooks and parametrizations of the layers are kept. ``state_dict`` also has the noise.
    With the noise off (``with noise_mode(model, "off")``) the copy returns the same outputs as the original.

    Torch's nested tensors are disabled in a ``TransformerEncoder``, because they bypass its layers. In evaluation mode its
    outputs at padded positions are then not zero, just as in training mode.

    Args:
        model: Any ``nn.Module``. Linear, convolutional (also transposed), recurrent and attention layers have noise on their input,
            embeddings on their output. Other classes are added by :func:`~flowbnn.noise.register_layer`.
        rules: Mapping from layers to recipes. A key is the name of a layer, a glob (``"encoder.*"``), a module class or a predicate
            ``(name, module) -> bool``. ``None`` instead of a recipe means no noise. If several rules match a layer, the most specific
            one applies: a name, then a predicate, a class, a longer glob, a shorter glob. Among equally specific rules the last one
            applies.
        joint: Structure of one noise vector that all layers with the same recipe share, as ``joint`` of
            :class:`~flowbnn.noise.Recipe`.
        inplace: If True, the network itself is converted instead of a copy.

    Returns:
        The stochastic network.

    Raises:
        FlowBNNError: If a rule matches no layer, no layer can have noise, or the network already has noise.

    >>> from flowbnn.noise import NormalAffine, NormalPlanar
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> bayesian = to_stochastic(network, {"0": NormalPlanar(length=2), "*": NormalAffine()})
    >>> print(describe(bayesian))
    layer  kind    noise                   site     dim  parameters
    -----  ------  ----------------------  -------  ---  ----------
    0      Linear  NormalPlanar(length=2)  channel    4          26
    2      Linear  NormalAffine()          channel    8          16
                                                                 42
    """
    if not inplace:
        model = copy_network(model, "use inplace=True")
    layers = wrappable_layers(model)
    if noise_layers(model):
        raise FlowBNNError(f"{type(model).__name__} already has noise; use to_deterministic", kind="model")
    if not layers:
        raise _no_layers(model)
    recipes = _choose_recipes(model, layers, rules)
    if joint is not None:
        recipes = {name: replace(recipe, joint=joint) for name, recipe in recipes.items()}
    groups: list[tuple[Recipe, list[str]]] = []
    for name, recipe in recipes.items():
        # layers of a joint vector may have their examples on different axes
        group_recipe = replace(recipe, batch_axis=None)
        matches = [names for other, names in groups if recipe.joint is not None and other == group_recipe]
        if matches:
            matches[0].append(name)
        else:
            groups.append((group_recipe, [name]))
    for recipe, names in groups:
        layouts = [_noise_layout(model, name, layers[name], recipes[name]) for name in names]
        noises = [recipe.build(layouts[0])] if recipe.joint is None else recipe.build_joint(layouts)
        for name, noise in zip(names, noises, strict=True):
            _attach_noise(layers[name], noise, recipes[name])
    _add_group_hooks(model, list(noise_layers(model).values()))
    guard_adapters(model, recipes)
    if len(recipes) == len(layers):
        warn_mostly_plain(model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            # nested tensors bypass the forward of the layers, and so the noise
            module.use_nested_tensor = False
            vars(module)["flowbnn_nested"] = True
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        # a callback warns of a training without the KL divergence
        vars(model)["configure_callbacks"] = partial(_lightning_callbacks, model)
    return model


def _lightning_callbacks(module: Any) -> list[Any]:
    """Returns the callbacks of a ``LightningModule``, and one that warns of training without the KL divergence."""
    callbacks = type(module).configure_callbacks(module)
    # a higher package, used by Lightning only
    guard = import_module("flowbnn.integrations.lightning").KLGuard()
    return [*(callbacks if isinstance(callbacks, list | tuple) else [callbacks]), guard]


def _no_layers(model: nn.Module) -> FlowBNNError:
    """Returns the error for a network without layers that can have noise, which names the modules that hold its weights."""
    name = type(model).__name__
    owners = {n: module for n, module in model.named_modules() if [*module.parameters(recurse=False)]}
    if not owners:
        return FlowBNNError(f"{name} has no weights for noise", kind="model", argument="model")
    first_name, module = next(iter(owners.items()))
    owner = f"layer '{first_name}' ({type(module).__name__})" if first_name else f"{name} itself"
    weights = quote_names([n for n, _ in module.named_parameters(recurse=False)])
    text = f"{name} has no layer for noise: {owner} holds the parameters {weights}"
    advice = registration_advice([type(module).__name__])
    return FlowBNNError(f"{text}; {advice}", kind="model", argument="model", layers=[*owners])


def _rank(rule: Rule, name: str, module: nn.Module) -> tuple[int, int] | None:
    """Returns the rank of a rule for a layer (higher is more specific), or None if the rule does not match."""
    if isinstance(rule, str):
        if any(character in rule for character in "*?["):
            return (
                (0, sum(character not in "*?[]" for character in rule)) if fnmatchcase(name, rule) else None
            )
        return (3, 0) if name == rule else None
    if isinstance(rule, type):
        return (1, -type(module).__mro__.index(rule)) if isinstance(module, rule) else None
    return (2, 0) if rule(name, module) else None


def _choose_recipes(
    model: nn.Module, layers: dict[str, nn.Module], rules: Mapping[Rule, Recipe | None]
) -> dict[str, Recipe]:
    """Returns the recipe of the most specific rule for each layer that gets noise."""
    aliases = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    canonical_names = {id(module): name for name, module in layers.items()}
    winners: dict[str, tuple[tuple[int, int], Recipe | None]] = {}
    problem = 'no layer has noise; use {"*": NormalAffine()}'
    for rule, recipe in rules.items():
        # a shared module matches each of its names
        layer_rule = canonical_names.get(aliases.get(rule, 0), rule) if isinstance(rule, str) else rule
        ranks = {name: _rank(layer_rule, name, module) for name, module in layers.items()}
        if not any(ranks.values()):
            problem, winners = _describe_mismatch(rule, model, layers), {}
            break
        for name, rank in ranks.items():
            if rank is not None and (name not in winners or rank >= winners[name][0]):
                winners[name] = (rank, recipe)
    recipes = {name: winners[name][1] for name in layers if name in winners}
    noise_recipes = {name: recipe for name, recipe in recipes.items() if recipe is not None}
    if not noise_recipes:
        raise FlowBNNError(problem, kind="rules", argument="rules")
    return noise_recipes


def _describe_mismatch(rule: Rule, model: nn.Module, layers: dict[str, nn.Module]) -> str:
    """Returns the message about a rule that matches no layer, with a suggestion."""
    if list(layers) == [""]:
        return f"rule {rule!r} matches no layer; use '*'"
    if not isinstance(rule, str):
        return f"rule {getattr(rule, '__name__', rule)} matches no layer{nearest('', layers)}"
    parent, named = rule.rpartition(".")[0], dict(model.named_modules(remove_duplicate=False))
    value = (named | dict(model.named_parameters())).get(rule)
    kind = "" if value is None else f" ({type(value).__name__})"
    if any(name.startswith(rule + ".") for name in layers):
        advice = f"; use {rule + '.*'!r}"
    elif parent in layers:  # of a parameter, or of a layer inside of attention
        advice = f"; use {parent!r}"
    else:
        advice = nearest(rule, layers)
    return f"rule {rule!r}{kind} matches no layer{advice}"


def _noise_layout(model: nn.Module, name: str, module: nn.Module, recipe: Recipe) -> Layout:
    """Returns the position of the noise on a layer, with the axis of the examples that the recipe or the network requires."""
    layout = layout_of(module) if recipe.side == "input" else output_layout(module)
    axis = recipe.batch_axis
    if axis == "none":
        return layout._replace(batch_axis=None)
    if axis is None and _sequence_first(model, name):
        axis = 1
    if axis is not None and axis != layout.batch_axis:
        layout = layout._replace(batch_axis=axis, unbatched_ndim=max(layout.unbatched_ndim, axis + 1))
    return layout


def _sequence_first(model: nn.Module, name: str) -> bool:
    """Returns True if the layer is inside a sequence-first transformer layer of torch."""
    parts = name.split(".")
    for end in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:end]))
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return not parent.self_attn.batch_first
    return False


def _attach_noise(module: nn.Module, noise: Noise, recipe: Recipe | None = None) -> None:
    """Makes noise a child of its layer, on the same device, and registers its hook."""
    reference = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), None)
    if reference is not None:
        noise.to(reference.device)
        if reference.dtype == torch.float64:
            noise.double()
    noise.train(module.training)
    noise.recipe = recipe
    name = "noise" if not hasattr(module, "noise") else "flowbnn_noise"
    module.add_module(name, noise)
    if noise.layout.side == "output":
        _move_first(module._forward_hooks, module.register_forward_hook(noise.output_hook).id)
    elif noise.passes_through:
        _move_first(module._forward_hooks, module.register_forward_hook(noise.pass_through_hook).id)
    else:
        module.register_forward_pre_hook(noise.input_hook, with_kwargs=True)


class FixedNoise(Noise):
    """Constant factors in a buffer. :func:`~flowbnn.noise.noise_layers` does not include them.

    Args:
        noise: Noise to replace.
        vector: Constant factors.
        seed: Seed of the draw at site ``position``. A noise map is drawn at the first input of its size, and stored.
        index: Index of that draw.
    """

    is_constant = True

    def __init__(self, noise: Noise, vector: Tensor, seed: int | None = None, index: int = 0) -> None:
        super().__init__(noise.layout, "channel" if seed is None else noise.site)
        self.label, self.default_mode = "fixed", NoiseMode("shared", 1)
        self.register_buffer("vector", vector.detach().clone())
        # in a tuple, so that the noise is not registered as a submodule
        self.source = (noise, seed or 0, vector.device, index) if self.site == "position" else None

    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        return self.mean().expand(*shape, -1)

    def mean(self) -> Tensor:
        return self.get_buffer("vector")

    def shared_vectors(
        self, samples: int, seed: int, device: torch.device, make_generator: Any = None
    ) -> Tensor:
        return self.mean()[None]

    def shared_maps(
        self, positions: Shape, start: int, stop: int, seed: int, device: torch.device, call: int = 0
    ) -> Tensor:
        name = "_".join(map(str, ("map", call, *positions)))
        if self._buffers.get(name) is None:
            assert self.source is not None
            noise, layer_seed, source_device, index = self.source
            maps = constant(
                lambda: noise.shared_maps(positions, index, index + 1, layer_seed, source_device, call).to(
                    device
                )
            )
            if torch.compiler.is_exporting():
                return maps
            self.register_buffer(name, maps, persistent=False)
        return self.get_buffer(name)


@checked
def to_deterministic(model: nn.Module, *, absorb: bool = False) -> nn.Module:
    """Returns a copy of a stochastic network without noise, with its current weights.

    Args:
        model: Stochastic network. A network without noise, such as one from ``posterior.sample``, is copied.
        absorb: If True, the copy keeps the mean of the noise, multiplied into the weights where that is safe. The mean is a buffer in
            attention, recurrent and tied layers, and for noise on the output. It is also a buffer inside modules that are not torch's
            own, because their code may read the weights. If False, a warning is raised if the trained means are not one.

    Returns:
        The network without noise.

    >>> from flowbnn.noise import NormalAffine
    >>> network = nn.Linear(3, 2)
    >>> plain = to_deterministic(to_stochastic(network, {"*": NormalAffine()}))
    >>> torch.equal(plain.weight, network.weight), len(plain.state_dict())
    (True, 2)
    """
    model = deepcopy_network(model)
    layers = noise_layers(model)
    if not absorb:
        _warn_dropped_means(layers)
    means = {name: FixedNoise(noise, noise.mean()) for name, noise in layers.items()} if absorb else {}
    _replace_noise(model, means)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "flowbnn_nested", False):
            module.use_nested_tensor = True
            del vars(module)["flowbnn_nested"]
    return model


@torch.no_grad()
def fix_noise(model: nn.Module, samples: int, seed: int | None) -> list[nn.Module]:
    """Returns copies of a stochastic network whose noise is fixed, one for each shared draw of ``seed``."""
    source = deepcopy_network(model).eval()
    layers, device, networks = noise_layers(source), device_of(source), []
    modes = make_noise_modes(source, "shared", samples, seed)
    seeds = {name: modes[noise.key].seed for name, noise in layers.items()}
    vectors = {name: noise.shared_vectors(samples, seeds[name], device) for name, noise in layers.items()}
    for index in range(samples):
        network = deepcopy_network(source)
        factors = {
            name: FixedNoise(noise, vectors[name][index], seeds[name], index)
            for name, noise in layers.items()
        }
        _replace_noise(network, factors)
        for module in network.modules():
            vars(module).pop("flowbnn_nested", None)  # nested tensors stay disabled, as in predictions
        networks.append(network)
    return networks


def _replace_noise(model: nn.Module, constants: Mapping[str, FixedNoise]) -> None:
    """Replaces all noise of a network by constant factors, in the weights where that is safe, otherwise in buffers."""
    buffers: dict[str, Noise] = {}
    layers = noise_layers(model)
    for submodule in model.modules():
        _unhook(submodule)
    for name, noise in layers.items():
        module: Any = model.get_submodule(name)
        for child_name, child in list(module.named_children()):
            if child is noise:
                delattr(module, child_name)
        factor_noise = constants.get(name)
        on_input = (
            factor_noise is not None
            and factor_noise.site == "channel"
            and factor_noise.layout.side == "input"
        )
        if factor_noise is not None and on_input and _absorbs(model, name):
            module.weight.data.mul_(weight_scale(module, factor_noise.mean().to(module.weight)))
        elif factor_noise is not None:
            _attach_noise(module, factor_noise)
            buffers[name] = factor_noise
    if buffers:
        _add_group_hooks(model, list(buffers.values()))
    guard_adapters(model, buffers, [name for name in constants if name not in buffers])


def _add_group_hooks(model: nn.Module, layers: list[Noise]) -> None:
    """Adds hooks to the root that mark the start and the end of a forward pass."""
    group = NoiseGroup(layers, draw_examples)
    handle = model.register_forward_pre_hook(group.begin, with_kwargs=True)
    _move_first(model._forward_pre_hooks, handle.id)
    model.register_forward_hook(group.end, always_call=True)


def _move_first(hooks: dict[int, Any], key: int) -> None:
    """Moves a hook before all others.

    The other hooks are inserted again. ``prepend=True`` is not enough: it only moves the entry of an ordered dictionary, but torch 2.11
    compiles hooks in the order of their insertion.
    """
    for other_key in [other_key for other_key in hooks if other_key != key]:
        hooks[other_key] = hooks.pop(other_key)


def _absorbs(model: nn.Module, name: str) -> bool:
    """Returns True if noise on the input of a layer can be multiplied into its weight, because nothing else reads the weight.

    No other module may share the weight. All parents of the layer must be modules of torch, because other code may read the weight. A
    LoRA adapter reads it only to merge it.
    """
    module = model.get_submodule(name)
    if not absorbs(module):
        return False
    weight = module._parameters["weight"]
    users = sum(weight is value for other in model.modules() for value in other._parameters.values())
    adapter = enclosing_adapter(model, name)
    if adapter is not None and calls_layers_only(adapter):
        return users == 1
    path = name.split(".")
    parents = [model.get_submodule(".".join(path[:end])) for end in range(len(path) if name else 0)]
    return users == 1 and all(type(parent).__module__.startswith("torch.") for parent in parents)


@torch.no_grad()
def _warn_dropped_means(layers: Mapping[str, Noise]) -> None:
    """Raises a warning if trained noise, whose means are not one, is removed."""
    fitted = {name: noise for name, noise in layers.items() if noise.fitted}
    shifts = {name: float((noise.mean() - 1).square().mean().sqrt()) for name, noise in fitted.items()}
    if shifts and max(shifts.values()) > 0.02:
        name = max(shifts, key=shifts.__getitem__)
        text = f"means of the noise up to {shifts[name]:.2f} away from one (layer '{name}') are dropped; set absorb=True to keep them"
        warn(text, kind="mean", layers=[name])


def _unhook(module: nn.Module) -> None:
    """Removes the hooks of noise and of its group, except the hooks of constant factors."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            first = owner.layers[0] if isinstance(owner, NoiseGroup) else owner
            if isinstance(first, Noise) and not first.is_constant:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


@checked
def describe(model: nn.Module) -> ConversionTable:
    """Returns the table of the layers with noise.

    >>> from flowbnn.noise import NormalAffine
    >>> print(describe(to_stochastic(nn.Linear(4, 2), {"*": NormalAffine()})))
    layer          kind    noise           site     dim  parameters
    -------------  ------  --------------  -------  ---  ----------
    (the network)  Linear  NormalAffine()  channel    4           8
                                                                  8
    """
    table = ConversionTable(
        Conversion(
            name or "(the network)",
            type(model.get_submodule(name)).__name__,
            noise.label,
            noise.site,
            noise.layout.dim,
            sum(p.numel() for p in noise.parameters()),
        )
        for name, noise in layers_with_noise(model).items()
    )
    table.share = matrix_share(model)[0]
    return table
