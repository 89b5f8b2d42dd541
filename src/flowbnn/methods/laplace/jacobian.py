"""Jacobians of a network's outputs in some of its weights: rows of them example by example, and their products with a vector."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowbnn.errors import FlowBNNError
from flowbnn.methods.fitting import Called
from flowbnn.posterior.batches import apply, call, rows, take
from flowbnn.posterior.forward import out_of_memory

__all__ = ["ROW_BYTES", "Jacobian", "flat_outputs"]

ROW_BYTES = 2**27  # of rows that are held at once


def flat_outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Outputs as ``[b, C]``."""
    outputs = call(model, inputs)
    return outputs.reshape(len(outputs), -1)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Attention in a form that torch can map over and differentiate forward, without torch's warnings about itself."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


class Jacobian:
    """The derivatives of a network's outputs with respect to some of its weights.

    Args:
        model: the network, in evaluation mode.
        names: of the weights.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        own = dict(model.named_parameters())
        self.caller, self.names = Called(model), names
        self.values = {f"network.{name}": own[name].detach() for name in names}
        self.size = sum(value.numel() for value in self.values.values())
        self.one_by_one = self.backward_twice = False

    def outputs(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        return functional_call(self.caller, dict(values), (inputs,))

    def chunks(self, inputs: Any, count: int) -> Iterator[tuple[int, int, int, int]]:
        """First and last example, first and last of ``count`` columns: chunks whose rows fit into ``ROW_BYTES``."""
        element = next(iter(self.values.values())).element_size()
        most = max(1, ROW_BYTES // (3 * element * self.size))
        total = rows(inputs)
        examples, columns = max(1, most // count), min(count, most)
        for start in range(0, total, examples):
            for low in range(0, count, columns):
                yield start, min(start + examples, total), low, min(low + columns, count)

    def rows(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """``columns[b, k] @ J[b]`` for ``columns`` ``[b, K, C]``, as ``{name: [b, K, ...]}``."""
        if not self.one_by_one:
            try:
                return self._rows_by_vmap(inputs, columns)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if out_of_memory(error):
                    raise
                self.one_by_one = True  # recurrent layers, and what else torch cannot map over
        return self._rows_one_by_one(inputs, columns)

    def _rows_by_vmap(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        def rows_of(example: Any, cotangents: Tensor) -> dict[str, Tensor]:
            single = apply(example, lambda tensor: tensor.unsqueeze(0))
            pull = vjp(lambda values: self.outputs(values, single).flatten(), self.values)[1]
            return vmap(pull)(cotangents)[0]

        with _differentiable():
            rows = vmap(rows_of)(inputs, columns)
        return {name.removeprefix("network."): value for name, value in rows.items()}

    def _rows_one_by_one(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for index in range(len(columns)):
            leaves = {name: value.clone().requires_grad_() for name, value in self.values.items()}
            with torch.enable_grad():
                outputs = self.outputs(leaves, take(inputs, index, index + 1)).flatten()
            for column in columns[index]:
                gradients = torch.autograd.grad(
                    outputs, list(leaves.values()), column, retain_graph=True, materialize_grads=True
                )
                for name, gradient in zip(self.names, gradients, strict=True):
                    rows[name].append(gradient)
        return {name: torch.stack(parts).unflatten(0, columns.shape[:2]) for name, parts in rows.items()}

    def push(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs ``[b, ...]`` of the network, and the Jacobian times ``tangents``.

        By forward differentiation, or where torch has none for a layer by differentiating backward twice: products with the
        transposed Jacobian are linear in their cotangents, and the derivative in these is the Jacobian.
        """
        ways = (self._push_backward,) if self.backward_twice else (self._push_forward, self._push_backward)
        for way in ways:
            try:
                return way(inputs, tangents)
            except (RuntimeError, NotImplementedError) as error:
                if out_of_memory(error):
                    raise
                self.backward_twice, reason = True, str(error).partition("\n")[0][:120]
        raise FlowBNNError(
            f"torch cannot differentiate this network in its weights ({reason}); predict with predictive='sampled'",
            kind="derivative",
        )

    def _push_forward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        moved = {f"network.{name}": tangents[name] for name in self.names}
        with _differentiable():
            outputs = jvp(lambda values: self.outputs(values, inputs), (self.values,), (moved,))
        return outputs[0], outputs[1]

    def _push_backward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in self.values.items()}
        with torch.enable_grad(), _differentiable():
            outputs = self.outputs(leaves, inputs)
            cotangents = torch.zeros_like(outputs, requires_grad=True)
            gradients = torch.autograd.grad(
                outputs, list(leaves.values()), cotangents, create_graph=True, materialize_grads=True
            )
            pushed = torch.autograd.grad(gradients, cotangents, [tangents[name] for name in self.names])[0]
        return outputs.detach(), pushed
