"""Layers and trainable parameters of a network: selection errors, dropout layers, and statistics of BatchNorm layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, move, split_weighted_batch
from flowbnn.errors import FlowBNNError, nearest, quote_names, requirement_error
from flowbnn.networks import evaluation_mode
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state


def unsupported_layer(
    model: nn.Module, layer: str, owner: str, alternative: str, reason: str = "", argument: str = "layers"
) -> FlowBNNError:
    """Returns the error for a layer that a method or an option does not support.

    Args:
        model: Network.
        layer: Name of the layer.
        owner: Method or option, as the user writes it.
        alternative: Method or option that supports the layer.
        reason: Reason in a few words.
        argument: Argument at fault.

    >>> print(unsupported_layer(nn.Sequential(nn.GRU(2, 2)), "0", "MNF", "BayesByBackprop", "not linear"))
    MNF does not support layer '0' (GRU, not linear); use BayesByBackprop, or exclude the layer with layers=
    """
    module = model.get_submodule(layer)
    kind = type(module)
    parent = next((base for base in kind.__mro__ if base.__module__.startswith("torch.nn.")), nn.Module)
    origin, details = kind.__name__, [reason]
    if parent is not kind:  # another library may have its own Linear
        origin = f"{kind.__module__}.{kind.__name__}"
        if parent is not nn.Module and reason in ("", "unsupported type", "not linear"):
            details = [f"a subclass of nn.{parent.__name__}"]
    raw = [name for name, _ in module.named_parameters(recurse=False)]
    if parent is nn.Module and raw:
        details = [f"with own parameters {quote_names(raw)}"]
    text = ", ".join(filter(None, [origin, *details]))
    where = f"layer '{layer}'" if layer else "the network itself"
    return FlowBNNError(
        f"{owner} does not support {where} ({text}); use {alternative}, or exclude the layer with layers=",
        kind="layer",
        argument=argument,
        layer=layer,
        reason=reason,
    )


def no_layer_selected(
    choice: Any, names: Iterable[str], target: str = "trainable weights", parameters: Iterable[str] = ()
) -> FlowBNNError:
    """Returns the error for an argument ``layers`` that selects nothing.

    Args:
        choice: Value of the argument.
        names: Names that could be selected.
        target: Objects to select.
        parameters: Names of the parameters of the network, one of which may have been given instead of its layer.

    >>> print(no_layer_selected("fc11", ["conv1", "fc1"]))
    layers='fc11' selects no trainable weights; did you mean 'fc1'?
    >>> print(no_layer_selected("token", ["", "head"], parameters=["token", "head.weight"]))
    layers='token' selects no trainable weights; 'token' is a parameter, use layers=''
    """
    names = list(names)
    hint = nearest(choice, filter(None, names)) if isinstance(choice, str) and choice not in names else ""
    if isinstance(choice, str) and choice in parameters:
        hint = f"; '{choice}' is a parameter, use layers='{choice.rpartition('.')[0]}'"
    return FlowBNNError(f"layers={choice!r} selects no {target}{hint}", kind="layer", argument="layers")


def disable_nested_tensors(model: nn.Module) -> nn.Module:
    """Disables nested tensors in transformers, which bypass the hooks of layers. Returns the network."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def check_real_weights(parameters: Mapping[str, Tensor]) -> None:
    """Raises FlowBNNError if one of these parameters is complex, because the posteriors of weights are densities of real vectors."""
    name = next((name for name, value in parameters.items() if value.is_complex()), None)
    if name is not None:
        value, hint = f"complex '{name}'", "use DeepEnsemble, or torch.view_as_real"
        fields = {"kind": "network", "argument": "network", "parameter": name}
        raise requirement_error("this method", "real weights", value, hint, **fields)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, tied ones once, by name.

    Raises:
        FlowBNNError: If one of them is complex.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    check_real_weights(parameters)
    return parameters


# -------------------- dropout


def dropout_layers(model: nn.Module) -> list[Any]:
    """Returns the dropout layers of a network with a positive rate.

    >>> dropout_layers(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.0)))
    [Dropout(p=0.5, inplace=False)]
    """
    types = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return [module for module in model.modules() if isinstance(module, types) and module.p > 0]


def layers_with_inner_dropout(model: nn.Module) -> dict[str, Any]:
    """Returns the layers that apply dropout internally, by name: attention, and recurrent networks of several layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase)
        and module.dropout > 0
        and getattr(module, "num_layers", 2) > 1
    }


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Context manager that sets all dropout rates to 0 and restores them at the end."""
    attributes = [(module, "p") for module in dropout_layers(model)]
    attributes += [(module, "dropout") for module in layers_with_inner_dropout(model).values()]
    rates = [getattr(module, name) for module, name in attributes]
    for module, name in attributes:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for (module, name), rate in zip(attributes, rates, strict=True):
            setattr(module, name, rate)


# -------------------- BatchNorm


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the normalization layers with running statistics."""
    norm = nn.modules.batchnorm._NormBase
    return [m for m in model.modules() if isinstance(m, norm) and m.running_mean is not None]


@contextmanager
def refuse_checkpointing(model: nn.Module) -> Iterator[None]:
    """Context manager that raises FlowBNNError if layers with parameters run in a backward pass (activation checkpointing).

    For methods that draw weights in every forward pass. The second run of a layer would see other weights than the first, and the
    gradients would be wrong.

    Args:
        model: Network.
    """

    def check(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            text = "activation checkpointing needs equal weights in both passes, but this method draws them; remove checkpoint(...)"
            raise FlowBNNError(text, kind="unsupported", argument="network")

    layers = [module for module in model.modules() if module._parameters]
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def recompute_batch_norm(model: nn.Module, loader: Iterable[Any], seed: int) -> None:
    """Replaces running statistics by means over the batches of one pass, with all other layers in evaluation mode.

    Args:
        model: Network, modified in place.
        loader: Batches of inputs and targets.
        seed: Seed of a shuffled loader; all generators are restored.
    """
    layers = batch_norm_layers(model)
    momenta = [layer.momentum for layer in layers]
    with evaluation_mode(model), preserve_rng_state(loader, seed):
        for layer in layers:
            layer.reset_running_stats()  # type: ignore[operator]
            layer.momentum = None  # type: ignore[assignment]
            layer.train()
        for batch in loader:
            call(model, move(split_weighted_batch(batch).inputs, device_of(model), dtype_of(model)))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def batch_norm_statistics(
    make_network: Callable[[int], nn.Module], count: int, loader: Iterable[Any], seed: int, progress: bool
) -> dict[str, Tensor]:
    """Returns the buffers ``{name: [count, ...]}`` of several networks, with running statistics of the data.

    Args:
        make_network: Function from an index to a network.
        count: Number of networks.
        loader: Batches of inputs and targets.
        seed: Seed of a shuffled loader.
        progress: If True, shows a progress bar.
    """
    states = []
    for index in track(range(count), "BatchNorm statistics", progress and is_main_process()):
        network = make_network(index)
        recompute_batch_norm(network, loader, seed)
        states.append(dict(network.named_buffers()))
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def reset_parameters(network: nn.Module) -> list[str]:
    """Calls ``reset_parameters`` of every layer. Returns the parameters that did not change, except constant ones.

    Frozen parameters (``requires_grad=False``) are restored, and so are the buffers of layers whose parameters are all frozen.

    >>> reset_parameters(nn.Linear(2, 2))
    []
    """
    trainable = {name: value for name, value in network.named_parameters() if value.requires_grad}
    initial = {name: value.detach().clone() for name, value in trainable.items()}
    frozen: list[Tensor] = [value for value in network.parameters() if not value.requires_grad]
    for module in network.modules():
        parameters = list(module.parameters())
        if parameters and not any(value.requires_grad for value in parameters):
            frozen += module.buffers()
    frozen_values = [(value, value.detach().clone()) for value in frozen]
    with torch.no_grad():
        for value in trainable.values():
            value.add_(0.125)  # a parameter that still has this offset afterwards was not reset
        marked = {name: value.clone() for name, value in trainable.items()}
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        unchanged = [name for name, value in trainable.items() if torch.equal(value, marked[name])]
        for name in unchanged:
            trainable[name].copy_(initial[name])
        for tensor, initial_value in frozen_values:
            tensor.copy_(initial_value)
    return [name for name in unchanged if bool((initial[name] != initial[name].flatten()[0]).any())]
