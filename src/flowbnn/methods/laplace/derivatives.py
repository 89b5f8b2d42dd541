r"""Derivatives of a network's outputs in some of its weights, and of the loss in the outputs.

The Hessian of the loss in the outputs, :math:`\Lambda = -\nabla^2_f \log p(y \mid f)`, or an estimate of it, is never written out for
all classes at once: callers need its sum over examples, its diagonal, one row, or some columns of a square root.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowbnn.batches import NetworkCaller, apply, call, is_out_of_memory, rows, take
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

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
        self.caller, self.names = NetworkCaller(model), names
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
            if is_out_of_memory(error):
                break
            if len(ways) > 1:
                ways.remove(way)
    reason = str(failed).partition("\n")[0][:120]
    line = f"torch cannot differentiate this network in its weights ({reason}); cover fewer layers, or take predictive='sampled'"
    raise failed if is_out_of_memory(failed) else FlowBNNError(line, kind="derivative")


# -------------------- the Hessian of the loss in the outputs


class Exact:
    r""":math:`\mathrm{diag}(v)` for outputs with targets of their own, :math:`\mathrm{diag}(p) - p p^T` for a softmax.

    The columns of a root of the latter are :math:`\sqrt{p_k} (e_k - p)`. The values are ``[b, C]``.
    """

    def __init__(self, values: Tensor, softmax: bool = False) -> None:
        self.values, self.softmax, self.count = values, softmax, values.shape[1]

    def total(self) -> Tensor:
        """The sum over examples, ``[C, C]``."""
        total = self.values.sum(0).diag()
        return total - self.values.T @ self.values if self.softmax else total

    def diagonal(self) -> Tensor:
        """``[b, C]``."""
        return self.values * (1.0 - self.values) if self.softmax else self.values

    def row(self, index: int) -> Tensor:
        """One row of each matrix, ``[b, C]``."""
        row = -self.values[:, index, None] * self.values if self.softmax else torch.zeros_like(self.values)
        row[:, index] += self.values[:, index]
        return row

    def columns(self, low: int, high: int) -> Tensor:
        """Columns of a square root, ``[b, high - low, C]``; there are ``count``."""
        roots, values = self.values[:, low:high].sqrt(), self.values
        if self.softmax:
            columns = (-roots).unsqueeze(2) * values.unsqueeze(1)
        else:
            columns = values.new_zeros(len(values), high - low, values.shape[1])
        index = torch.arange(high - low, device=values.device)
        columns[:, index, low + index] += roots
        return columns


class OuterProducts:
    """Outer products of gradients ``[b, C]``, with the methods of :class:`Exact`."""

    count = 1

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def total(self) -> Tensor:
        return self.gradients.T @ self.gradients

    def diagonal(self) -> Tensor:
        return self.gradients.square()

    def row(self, index: int) -> Tensor:
        return self.gradients[:, index, None] * self.gradients

    def columns(self, low: int, high: int) -> Tensor:
        return self.gradients.unsqueeze(1)


OutputHessian = Exact | OuterProducts


def check_likelihood(likelihood: Likelihood, predictive: str) -> None:
    """Refuse a likelihood whose Hessian in the outputs is not known, or that has no probit approximation."""
    known, reason = isinstance(likelihood, Categorical | Bernoulli | Gaussian), ""
    if not known or (isinstance(likelihood, Gaussian) and likelihood.noise == "predicted"):
        reason = (
            f"Laplace takes a Categorical, a Bernoulli or a Gaussian likelihood with known or learned noise, not {likelihood!r}; "
            "DeepEnsemble and SWAG take noise='predicted'"
        )
    elif predictive == "probit" and isinstance(likelihood, Gaussian):
        reason = "predictive='probit' is for classes; regression takes 'linearized'"
    if reason:
        raise FlowBNNError(reason, kind="likelihood")


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """For outputs ``[b, C]``: exact (``"ggn"``), of the observed targets (``"fisher"``), or of drawn ones (``"sampled"``)."""
    if isinstance(likelihood, Categorical):
        p = outputs.softmax(1)
        if kind == "ggn":
            return Exact(p, softmax=True)
        if kind == "sampled":
            drawn = torch.rand(len(p), 1, generator=generator, dtype=torch.float64).to(p.device)
            targets = (p.double().cumsum(1) < drawn).sum(1).clamp_max(p.shape[1] - 1)
        gradient = p.clone()
        gradient[torch.arange(len(p), device=p.device), targets.to(p.device).long()] -= 1.0
    elif isinstance(likelihood, Bernoulli):
        p = outputs.sigmoid()
        if kind == "ggn":
            return Exact(p * (1.0 - p))
        truth = targets.reshape(p.shape).to(p)
        if kind == "sampled":
            truth = (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        gradient = p - truth
    elif isinstance(likelihood, Gaussian):
        mean, variance = likelihood.moments(outputs)
        predicted = likelihood.noise == "predicted"  # whose Fisher information in the log-variance is 1 / 2
        if kind == "ggn":
            parts = [1.0 / variance, torch.full_like(variance, 0.5)]
            return Exact(torch.cat(parts, 1) if predicted else parts[0])
        away = (mean - targets.to(mean).reshape(mean.shape)) * variance.rsqrt()
        if kind == "sampled":
            away = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        gradient = away * variance.rsqrt()
        if predicted:
            gradient = torch.cat([gradient, 0.5 * (1.0 - away.square())], 1)
    else:
        raise FlowBNNError(
            f"the curvature of {likelihood!r} in the network's outputs is not known; take a Categorical, a Bernoulli or a Gaussian "
            "likelihood",
            kind="likelihood",
            argument="likelihood",
        )
    return OuterProducts(gradient)
