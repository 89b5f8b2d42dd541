"""Rows of Jacobians example by example, for any layer, a bounded number of them at once; and Jacobians times a vector."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.batches import apply, call, rows, take

__all__ = ["ROW_BYTES", "Jacobian", "flat_outputs"]

ROW_BYTES = 2**27  # of rows that are held at once


def flat_outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Outputs as ``[b, C]``."""
    outputs = call(model, inputs)
    return outputs.reshape(len(outputs), -1)


@contextmanager
def _quietly() -> Iterator[None]:
    """Attention in a form that torch can map over and differentiate forward, without torch's remarks about itself."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


class _Flat(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any) -> Tensor:
        return flat_outputs(self.network, inputs)


class Jacobian:
    """The derivatives of a network's outputs with respect to some of its weights.

    Args:
        model: the network, in evaluation mode.
        names: of the weights.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        own = dict(model.named_parameters())
        self.caller, self.names = _Flat(model), names
        self.values = {f"network.{name}": own[name].detach() for name in names}
        self.size = sum(value.numel() for value in self.values.values())
        self.one_by_one = self.backward_twice = False

    def outputs(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        return functional_call(self.caller, dict(values), (inputs,))

    def chunks(self, inputs: Any, count: int) -> Iterator[tuple[int, int, int, int]]:
        """First and last example, first and last of ``count`` columns: parts whose rows fit."""
        each = next(iter(self.values.values())).element_size()
        most = max(1, ROW_BYTES // (3 * each * self.size))
        total = rows(inputs)
        examples, columns = max(1, most // count), min(count, most)
        for start in range(0, total, examples):
            for low in range(0, count, columns):
                yield start, min(start + examples, total), low, min(low + columns, count)

    def rows(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """``columns[b, k] @ J[b]`` for ``columns`` ``[b, K, C]``, as ``{name: [b, K, ...]}``."""
        if not self.one_by_one:
            try:
                return self._together(inputs, columns)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if "memory" in str(error):
                    raise
                self.one_by_one = True  # recurrent layers, and what else torch cannot map over
        return self._one_by_one(inputs, columns)

    def _together(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        def one(example: Any, some: Tensor) -> dict[str, Tensor]:
            single = apply(example, lambda tensor: tensor.unsqueeze(0))
            pull = vjp(lambda values: self.outputs(values, single)[0], self.values)[1]
            return vmap(pull)(some)[0]

        with _quietly():
            found = vmap(one)(inputs, columns)
        return {name.removeprefix("network."): value for name, value in found.items()}

    def _one_by_one(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for index in range(len(columns)):
            leaves = {name: value.clone().requires_grad_() for name, value in self.values.items()}
            with torch.enable_grad():
                outputs = self.outputs(leaves, take(inputs, index, index + 1))[0]
            for column in columns[index]:
                gradients = torch.autograd.grad(
                    outputs, list(leaves.values()), column, retain_graph=True, allow_unused=True
                )
                for name, leaf, gradient in zip(self.names, leaves.values(), gradients, strict=True):
                    found[name].append(torch.zeros_like(leaf) if gradient is None else gradient)
        lead = columns.shape[:2]
        return {name: torch.stack(parts).unflatten(0, lead) for name, parts in found.items()}

    def push(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs ``[b, ...]`` of the network, and the Jacobian times ``tangents``.

        By forward differentiation, or where torch has none for a layer by differentiating twice backward: products with the
        transposed Jacobian are linear in what they are given, and their derivative in that is the Jacobian.
        """
        ways = (self._twice,) if self.backward_twice else (self._forward, self._twice)
        for way in ways:
            try:
                return way(inputs, tangents)
            except (RuntimeError, NotImplementedError) as error:
                if "memory" in str(error):
                    raise
                self.backward_twice, told = True, str(error).partition("\n")[0][:120]
        raise FlowBNNError(
            f"torch cannot differentiate this network in its weights ({told}); predict with predictive='sampled'"
        )

    def _forward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        moved = {f"network.{name}": tangents[name] for name in self.names}
        caller = _Plain(self.caller.network)
        with _quietly():
            found = jvp(lambda values: functional_call(caller, values, (inputs,)), (self.values,), (moved,))
        return found[0], found[1]

    def _twice(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        caller = _Plain(self.caller.network)
        leaves = {name: value.clone().requires_grad_() for name, value in self.values.items()}
        with torch.enable_grad(), _quietly():
            outputs = functional_call(caller, leaves, (inputs,))
            given = torch.zeros_like(outputs, requires_grad=True)
            found = torch.autograd.grad(
                outputs, list(leaves.values()), given, create_graph=True, materialize_grads=True
            )
            moved = torch.autograd.grad(found, given, [tangents[name] for name in self.names])[0]
        return outputs.detach(), moved


class _Plain(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any) -> Tensor:
        return call(self.network, inputs)
