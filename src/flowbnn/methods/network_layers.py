"""Helpers for layers that differ between training and evaluation, and for trainable parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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


def disable_nested_tensors(model: nn.Module) -> nn.Module:
    """Disables nested tensors in transformers, which bypass the hooks of layers. Returns the network."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, tied ones once, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
