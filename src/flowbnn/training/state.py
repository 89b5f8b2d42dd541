"""Nested state (of optimizers, schedules, generators) as a JSON tree and a flat dictionary of tensors."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["decode_state", "encode_state"]

KIND = "__kind__"


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON tree of ``value``; its tensors go into ``tensors`` under ``name/...`` and leave their name behind.

    Tuples, deques, counters, numpy arrays and dictionaries whose keys are not strings are marked, so that
    :func:`decode_state` gives back the same types.

    >>> tensors = {}
    >>> tree = encode_state({"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, 0.999)}, "optimizer", tensors)
    >>> tensors
    {'optimizer/state/0/exp_avg': tensor([1., 1.])}
    >>> decode_state(tree, tensors)
    {'state': {0: {'exp_avg': tensor([1., 1.])}}, 'betas': (0.9, 0.999)}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {KIND: "tensor", "name": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {KIND: "array", "value": encode_state(torch.from_numpy(value.copy()), name, tensors)}
    if isinstance(value, Mapping):
        items = [
            [encode_state(k, name, {}), encode_state(v, f"{name}/{k}", tensors)] for k, v in value.items()
        ]
        if isinstance(value, Counter):
            return {KIND: "counter", "items": items}
        if all(isinstance(key, str) for key in value) and KIND not in value:
            return dict(items)
        return {KIND: "map", "items": items}
    if isinstance(value, (list, tuple, deque)):
        parts = [encode_state(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return {KIND: "tuple" if isinstance(value, tuple) else "deque", "items": parts}
    raise FlowBNNError(
        f"cannot store {name!r}: a {type(value).__name__} is neither a number, text nor a tensor"
    )


def decode_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode_state`."""
    if isinstance(tree, list):
        return [decode_state(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(KIND)
    if kind is None:
        return {key: decode_state(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind == "array":
        return decode_state(tree["value"], tensors).numpy()
    if kind in ("map", "counter"):
        pairs = {decode_state(key, tensors): decode_state(value, tensors) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind in ("tuple", "deque"):
        parts = [decode_state(part, tensors) for part in tree["items"]]
        return tuple(parts) if kind == "tuple" else deque(parts)
    raise KeyError(f"unknown kind {kind!r}")
