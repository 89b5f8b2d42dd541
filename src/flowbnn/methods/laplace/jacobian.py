"""Jacobians of a network's outputs in some of its weights: rows of them example by example, and their products with a vector."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowbnn.batches import apply, call, out_of_memory, rows, take
from flowbnn.errors import FlowBNNError
from flowbnn.methods.fitting import Called

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
    """The derivatives of the outputs of a network, in evaluation mode, with respect to the weights of these names."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.caller, self.names = Called(model), names
        self.values = {f"network.{name}": model.get_parameter(name).detach() for name in names}
        self.size = sum(value.numel() for value in self.values.values())
        # the ways from the fastest on; one that torch has not for a layer of this network is dropped
        self.ways_of_rows = [self._rows_by_vmap, self._rows_one_by_one]
        self.ways_of_push = [self._push_forward, self._push_backward]

    def outputs(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        return functional_call(self.caller, dict(values), (inputs,))

    def leaves(self) -> dict[str, Tensor]:
        """Copies of the weights to differentiate in."""
        return {name: value.clone().requires_grad_() for name, value in self.values.items()}

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
        return _first_that_works(self.ways_of_rows, inputs, columns)

    def push(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs ``[b, ...]`` of the network, and the Jacobian times ``tangents``."""
        return _first_that_works(self.ways_of_push, inputs, tangents)

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
            leaves = self.leaves()
            with torch.enable_grad():
                outputs = self.outputs(leaves, take(inputs, index, index + 1)).flatten()
            for column in columns[index]:
                gradients = torch.autograd.grad(
                    outputs, list(leaves.values()), column, retain_graph=True, materialize_grads=True
                )
                for name, gradient in zip(self.names, gradients, strict=True):
                    rows[name].append(gradient)
        return {name: torch.stack(parts).unflatten(0, columns.shape[:2]) for name, parts in rows.items()}

    def _push_forward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        moved = {f"network.{name}": tangents[name] for name in self.names}
        with _differentiable():
            outputs = jvp(lambda values: self.outputs(values, inputs), (self.values,), (moved,))
        return outputs[0], outputs[1]

    def _push_backward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """By differentiating twice: cotangents times the Jacobian are linear in them, with the Jacobian as derivative."""
        leaves = self.leaves()
        with torch.enable_grad(), _differentiable():
            outputs = self.outputs(leaves, inputs)
            cotangents = torch.zeros_like(outputs, requires_grad=True)
            gradients = torch.autograd.grad(
                outputs, list(leaves.values()), cotangents, create_graph=True, materialize_grads=True
            )
            pushed = torch.autograd.grad(gradients, cotangents, [tangents[name] for name in self.names])[0]
        return outputs.detach(), pushed


def _first_that_works(ways: list[Callable[..., Any]], *args: Any) -> Any:
    failed: Exception = RuntimeError()
    for way in tuple(ways):
        try:
            return way(*args)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            failed = error
            if out_of_memory(error):
                break
            if len(ways) > 1:
                ways.remove(way)
    reason = str(failed).partition("\n")[0][:120]
    line = f"torch cannot differentiate this network in its weights ({reason}); cover fewer layers, or take predictive='sampled'"
    raise failed if out_of_memory(failed) else FlowBNNError(line, kind="derivative")
