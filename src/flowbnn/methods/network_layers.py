"""Helpers for the layers and the trainable parameters of a network."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError, nearest


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
    details = ", ".join(filter(None, [type(model.get_submodule(layer)).__name__, reason]))
    return FlowBNNError(
        f"{owner} does not support layer '{layer}' ({details}); use {alternative}, or exclude the layer with layers=",
        kind="layer",
        argument=argument,
        layer=layer,
    )


def no_layer_selected(choice: Any, names: Iterable[str], target: str = "trainable weights") -> FlowBNNError:
    """Returns the error for an argument ``layers`` that selects nothing.

    Args:
        choice: Value of the argument.
        names: Names that could be selected.
        target: Objects to select.

    >>> print(no_layer_selected("fc11", ["conv1", "fc1"]))
    layers='fc11' selects no trainable weights; did you mean 'fc1'?
    """
    hint = nearest(choice, names) if isinstance(choice, str) else ""
    return FlowBNNError(f"layers={choice!r} selects no {target}{hint}", kind="layer", argument="layers")


def disable_nested_tensors(model: nn.Module) -> nn.Module:
    """Disables nested tensors in transformers, which bypass the hooks of layers. Returns the network."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, tied ones once, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
