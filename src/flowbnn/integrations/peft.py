r"""Noise on LoRA adapters of ``peft``, and files that hold adapters and noise without the base model.

An adapter computes :math:`W x + s B A x` with the low rank :math:`r`. Noise on the input of :math:`B` is a vector of :math:`r` factors,
:math:`W x + s B (z \circ A x)`. A Gaussian there is ScalaBL (Samplawski et al. 2025, https://arxiv.org/abs/2506.21408). Flows give
posteriors of other shapes at the same cost, because :math:`r` is small.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, describe_value, optional_import, requirement_error

with optional_import("flowbnn.integrations.peft", "peft", "flowbnn[huggingface]"):
    import peft

from flowbnn.convert import to_stochastic
from flowbnn.networks import copy_network
from flowbnn.noise import NormalAffine, Recipe, freeze, noise_layers
from flowbnn.posterior.base import Posterior, load_posterior
from flowbnn.posterior.files import check_listed_tensors, list_tensors
from flowbnn.training import save_tensors
from flowbnn.training.storage import TensorFile


def to_stochastic_lora(
    model: nn.Module, recipe: Recipe | None = None, *, inplace: bool = False, train_weights: bool = True
) -> nn.Module:
    """Returns a copy of a ``PeftModel`` with noise on its LoRA adapters.

    Noise multiplies the input of every ``lora_B``, a vector as long as the rank. The base model stays frozen. Before training,
    ``lora_B`` is zero and noise has no effect, so train the adapters first or together with the noise.

    Args:
        model: Model of ``peft.get_peft_model``.
        recipe: Recipe of the noise. ``NormalAffine()`` by default, which is ScalaBL. ``NormalPlanar(4)`` is a flow.
        inplace: If True, the model itself is converted.
        train_weights: If False, the weights of the adapters are frozen, and ``fb.fit`` trains the noise alone.

    Raises:
        FlowBNNError: If the model has no LoRA adapters.
    """
    if not any("lora_B" in name.split(".") for name, _ in model.named_modules()):
        value, hint = describe_value(model), "use peft.get_peft_model(model, LoraConfig(...))"
        fields = {"kind": "model", "argument": "model"}
        raise requirement_error("to_stochastic_lora", "LoRA adapters", value, hint, **fields)
    converted = to_stochastic(model, {"*.lora_B.*": recipe or NormalAffine()}, inplace=inplace)
    if not train_weights:
        freeze(converted, "weights")
    return converted


def save_adapters(posterior: Posterior, path: str | Path) -> Path:
    """Writes the adapters, the noise and the likelihood of a posterior to one file, without the frozen base model.

    Args:
        posterior: Posterior of a ``PeftModel``, such as from ``fb.fit(to_stochastic_lora(model), loader)``.
        path: Path of the file.

    Returns:
        Path of the file.

    Raises:
        FlowBNNError: If the network is no ``PeftModel``, or has several adapters.
    """
    model: Any = posterior.model
    configs = getattr(model, "peft_config", {})
    if len(configs) != 1:
        value, fields = f"{len(configs)} adapters", {"kind": "save", "argument": "posterior"}
        raise requirement_error("save_adapters", "one adapter", value, "use posterior.save", **fields)
    adapter, config = next(iter(configs.items()))
    frozen = _base_tensors(model, frozen=True)
    tensors = {name: value for name, value in posterior.tensors().items() if name not in frozen}
    settings = _plain({**config.to_dict(), "inference_mode": False})
    document = {**posterior.document(), "adapter": {"name": adapter, "config": settings}}
    return save_tensors(
        path, tensors, {**document, "tensors": list_tensors(tensors), "card": posterior.card()}
    )


def load_adapters(path: str | Path, base: nn.Module) -> Posterior:
    """Reads a file of :func:`save_adapters` onto a fresh base model.

    Args:
        path: Path of the file.
        base: Base model with its pretrained weights and without adapters. It is copied.

    Returns:
        The posterior, whose network is a ``PeftModel`` of the base model.

    Raises:
        FlowBNNError: If the file has no adapters, or if they do not fit the base model.
    """
    adapter = TensorFile(path).document.get("adapter")
    if not isinstance(adapter, Mapping):
        text = f"'{path}' has no adapters; write it with save_adapters, or use fb.load_posterior"
        raise FlowBNNError(text, kind="file")
    config = peft.PeftConfig.from_peft_type(**adapter["config"])
    with torch.random.fork_rng():
        try:
            network = peft.get_peft_model(copy_network(base), config, adapter_name=adapter["name"])
        except ValueError as error:
            text = f"adapters of '{path}' do not fit {type(base).__name__}: {str(error).splitlines()[0]}"
            raise FlowBNNError(text, kind="architecture", argument="base") from error
    return load_posterior(AdapterFile(path, network.eval()), network)


class AdapterFile(TensorFile):
    """File of adapters, completed by the tensors of the base model.

    Args:
        path: Path of the file.
        network: ``PeftModel`` of the base model.
    """

    def __init__(self, path: str | Path, network: nn.Module) -> None:
        super().__init__(path)
        check_listed_tensors(self)
        state = {f"network.{name}": value.detach().cpu() for name, value in network.state_dict().items()}
        self.base = {name: value for name, value in state.items() if name in _base_tensors(network)}
        self.views = {**self.base, **self.views}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the base model and of the file."""
        with self.reading():
            stored = TensorFile(self.path).tensors
        return {**self.base, **stored}


def _base_tensors(model: nn.Module, frozen: bool = False) -> set[str]:
    """Returns the names of the parameters of the base model in files, including aliases of tied ones.

    Args:
        model: ``PeftModel``.
        frozen: If True, trainable parameters are left out.
    """
    noise = {id(value) for layer in noise_layers(model).values() for value in layer.parameters()}
    adapter_parts = "lora_", "modules_to_save"  # beginnings of the names of modules that belong to adapters
    return {
        f"network.{name}"
        for name, value in model.named_parameters(remove_duplicate=False)
        if id(value) not in noise
        and not (frozen and value.requires_grad)
        and not any(part.startswith(adapter_parts) for part in name.split("."))
    }


def _plain(value: Any) -> Any:
    """Returns settings as values of JSON. Sets become sorted lists, and enumerations their values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(entry) for entry in value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return getattr(value, "value", value)
