"""Adapters of fine-tuned networks, such as LoRA of peft, in a network with noise.

An adapter layer holds its original layer as ``base_layer``, and ``merge`` adds the adapter to the weights of that layer. Noise that is
not in the weights would be dropped without a word by ``merge`` or ``save_pretrained``. Both then raise an error.
"""

from collections.abc import Collection
from typing import Any, NoReturn

from torch import nn

from flowbnn.errors import FlowBNNError


def is_adapter(module: nn.Module) -> bool:
    """Returns True for an adapter around a base layer, into which it can be merged."""
    return "base_layer" in module._modules and callable(getattr(type(module), "merge", None))


def enclosing_adapter(model: nn.Module, name: str) -> nn.Module | None:
    """Returns the innermost adapter that a layer is inside of, or None."""
    path = name.split(".")
    parents = (model.get_submodule(".".join(path[:end])) for end in range(len(path) - 1, -1, -1))
    return next((parent for parent in parents if is_adapter(parent)), None)


def calls_layers_only(adapter: nn.Module) -> bool:
    """Returns True if the forward pass of an adapter calls its layers and reads no weight of theirs, as LoRA does (but not DoRA)."""
    has_factors = all(isinstance(adapter._modules.get(name), nn.ModuleDict) for name in ("lora_A", "lora_B"))
    decomposed: Any = getattr(adapter, "use_dora", {})
    return has_factors and not any(decomposed.values())


def guard_adapters(model: nn.Module, in_hooks: Collection[str], in_weights: Collection[str] = ()) -> None:
    """Lets ``merge`` and ``save_pretrained`` raise an error where they would drop noise, and restores them elsewhere.

    Args:
        model: Network, which is changed in place.
        in_hooks: Names of the layers that multiply by noise in a hook.
        in_weights: Names of the layers whose weights hold the noise.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        hooks = any(layer.startswith(prefix) for layer in in_hooks)
        # peft saves the adapters alone
        base = [layer for layer in in_weights if layer.startswith(prefix) and not _is_adapter_weight(layer)]
        if is_adapter(module):
            _set_refusal(module, "merge", _refuse_merge, hooks)
        if callable(getattr(type(module), "save_pretrained", None)):
            lost = hooks or (bool(base) and hasattr(module, "peft_config"))
            _set_refusal(module, "save_pretrained", _refuse_save, lost)


def _is_adapter_weight(name: str) -> bool:
    """Returns True if a layer belongs to an adapter and not to its base layer."""
    return any(part.startswith("lora_") for part in name.split("."))


def _set_refusal(module: nn.Module, name: str, refusal: Any, refuse: bool) -> None:
    """Replaces a method of a module by a function that raises an error, or removes the replacement."""
    if refuse:
        vars(module)[name] = refusal
    elif vars(module).get(name) is refusal:
        del vars(module)[name]


def _refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    text = "merging would drop the noise of this network; merge a network from posterior.sample(seed), with noise on linear layers only"
    raise FlowBNNError(text, kind="merge")


def _refuse_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise FlowBNNError("save_pretrained would drop the noise; use posterior.save(path)", kind="save")
