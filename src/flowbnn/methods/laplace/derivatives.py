r"""Derivatives of the outputs of a network in its weights, and of the loss in the outputs.

The Hessian of the loss in the outputs, :math:`\Lambda = -\nabla^2_f \log p(y \mid f)`, is never materialized for all classes at once.
Callers need its sum over examples, its diagonal, one row, or some columns of a square root.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowbnn.batches import NetworkCaller, apply, call, rows, take
from flowbnn.errors import FlowBNNError, requirement_error
from flowbnn.likelihoods import (
    Bernoulli,
    Categorical,
    ConditionalDensity,
    Gaussian,
    Heads,
    Likelihood,
    RealLikelihood,
)
from flowbnn.likelihoods.classes import squeeze_channel
from flowbnn.memory import is_out_of_memory
from flowbnn.methods.laplace.layer_selection import channels_last
from flowbnn.numerics import FORWARD_MODE_LOCK


def flat_outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Returns the outputs of the network as ``[b, C]``."""
    outputs = call(model, inputs)
    return outputs.reshape(len(outputs), -1)


def batched_outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Returns the outputs of the network as ``[b, C]``, or with their axes of positions."""
    outputs = call(model, inputs)
    return outputs if outputs.ndim > 2 else outputs.reshape(len(outputs), -1)


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Context manager that selects an attention kernel with vmap and forward-mode support, and silences torch's own warnings.

    The kernel, the filters of warnings and the levels of forward mode belong to the process, so one thread at a time enters.
    """
    with FORWARD_MODE_LOCK, warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


class Jacobian:
    """Jacobian of the outputs of a network in evaluation mode, with respect to some of its weights.

    Args:
        model: Network in evaluation mode.
        names: Names of the parameters to differentiate in.

    >>> jacobian = Jacobian(nn.Linear(2, 3).eval(), ["weight"])
    >>> jacobian.rows(torch.ones(5, 2), torch.eye(3).expand(5, 3, 3))["weight"].shape
    torch.Size([5, 3, 3, 2])
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.caller, self.names = NetworkCaller(model), names
        self.values = {f"network.{name}": model.get_parameter(name).detach() for name in names}
        self.size = sum(value.numel() for value in self.values.values())
        # fastest first; an implementation that torch does not support for this network is dropped
        self.row_functions = [self._rows_vectorized, self._rows_sequential]
        self.push_functions = [self._push_forward, self._push_backward]

    def outputs(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Returns the outputs of the network with these weights."""
        return functional_call(self.caller, dict(values), (inputs,))

    def leaves(self) -> dict[str, Tensor]:
        """Returns copies of the weights that require gradients."""
        return {name: value.clone().requires_grad_() for name, value in self.values.items()}

    def chunks(self, inputs: Any, count: int, max_bytes: int = 2**27) -> Iterator[tuple[int, int, int, int]]:
        """Yields first and last example, first and last of ``count`` columns, of chunks whose rows take at most ``max_bytes``."""
        element_size = next(iter(self.values.values())).element_size()
        # a row, its copy in torch.func, and the result of the caller
        max_rows = max(1, max_bytes // (3 * element_size * self.size))
        num_examples = rows(inputs)
        examples, columns = max(1, max_rows // count), min(count, max_rows)
        for start in range(0, num_examples, examples):
            for low in range(0, count, columns):
                yield start, min(start + examples, num_examples), low, min(low + columns, count)

    def rows(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Returns ``columns[b, k] @ J[b]`` as ``{name: [b, K, ...]}``, for ``columns`` of shape ``[b, K, C]``."""
        return _first_supported(self.row_functions, inputs, columns)

    def push(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the outputs ``[b, ...]`` of the network, and the Jacobian times ``tangents``."""
        return _first_supported(self.push_functions, inputs, tangents)

    def _rows_vectorized(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Computes :meth:`rows` by vmap over examples and columns."""

        def example_rows(example: Any, cotangents: Tensor) -> dict[str, Tensor]:
            batch = apply(example, lambda tensor: tensor.unsqueeze(0))
            pull = vjp(lambda values: self.outputs(values, batch).flatten(), self.values)[1]
            return vmap(pull)(cotangents)[0]

        with differentiable_attention():
            rows = vmap(example_rows)(inputs, columns)
        return {name.removeprefix("network."): value for name, value in rows.items()}

    def _rows_sequential(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Computes :meth:`rows` by one backward pass per example and column."""
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
        return {name: torch.stack(values).unflatten(0, columns.shape[:2]) for name, values in rows.items()}

    def _push_forward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes :meth:`push` by forward-mode differentiation."""
        named_tangents = {f"network.{name}": tangents[name] for name in self.names}
        with differentiable_attention():
            outputs = jvp(lambda values: self.outputs(values, inputs), (self.values,), (named_tangents,))
        return outputs[0], outputs[1]

    def _push_backward(self, inputs: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Differentiates twice: cotangents times the Jacobian are linear in the cotangents, with the Jacobian as derivative."""
        leaves = self.leaves()
        with torch.enable_grad(), differentiable_attention():
            outputs = self.outputs(leaves, inputs)
            cotangents = torch.zeros_like(outputs, requires_grad=True)
            gradients = torch.autograd.grad(
                outputs, list(leaves.values()), cotangents, create_graph=True, materialize_grads=True
            )
            pushed = torch.autograd.grad(gradients, cotangents, [tangents[name] for name in self.names])[0]
        return outputs.detach(), pushed


def _first_supported(functions: list[Callable[..., Any]], *args: Any) -> Any:
    """Calls the functions in order until one succeeds; a function that fails is removed from the list, except the last."""
    failure: Exception = RuntimeError()
    for function in tuple(functions):
        try:
            return function(*args)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            failure = error
            if is_out_of_memory(error):
                raise
            if len(functions) > 1:
                functions.remove(function)
    reason = str(failure).partition("\n")[0][:120]
    text = f"torch cannot differentiate this network ({reason}); select fewer layers, or use predictive='sampled'"
    raise FlowBNNError(text, kind="derivative")


# -------------------- the Hessian of the loss in the outputs


class ExactHessian:
    r"""Exact Hessians of a batch: :math:`\mathrm{diag}(v)` for independent outputs, :math:`a (\mathrm{diag}(p) - p p^T)` for a softmax.

    The columns of a root of the latter are :math:`\sqrt{a p_k} (e_k - p)`.

    Args:
        values: Values :math:`v` or probabilities :math:`p`, ``[b, C]``.
        softmax: If True, the Hessian is that of a softmax.
        weights: Weights :math:`a` of the examples, ``[b, 1]``, of a softmax. None for ones.
    """

    def __init__(self, values: Tensor, softmax: bool = False, weights: Tensor | None = None) -> None:
        self.values, self.softmax, self.count = values, softmax, values.shape[1]
        self.weights = weights

    def total(self) -> Tensor:
        """Returns the sum over examples, ``[C, C]``."""
        weighted = self._weigh(self.values)
        total = weighted.sum(0).diag()
        return total - weighted.T @ self.values if self.softmax else total

    def diagonal(self) -> Tensor:
        """Returns the diagonals, ``[b, C]``."""
        return self._weigh(self.values * (1.0 - self.values)) if self.softmax else self.values

    def row(self, index: int) -> Tensor:
        """Returns one row of each matrix, ``[b, C]``."""
        row = -self.values[:, index, None] * self.values if self.softmax else torch.zeros_like(self.values)
        row[:, index] += self.values[:, index]
        return self._weigh(row)

    def _weigh(self, values: Tensor) -> Tensor:
        """Returns values times the weights of the examples."""
        return values if self.weights is None else self.weights * values

    def columns(self, low: int, high: int) -> Tensor:
        """Returns columns ``low`` to ``high`` of the ``count`` columns of a square root, ``[b, high - low, C]``."""
        roots, values = self.values[:, low:high].sqrt(), self.values
        if self.softmax:
            columns = (-roots).unsqueeze(2) * values.unsqueeze(1)
        else:
            columns = values.new_zeros(len(values), high - low, values.shape[1])
        index = torch.arange(high - low, device=values.device)
        columns[:, index, low + index] += roots
        return columns if self.weights is None else self.weights.sqrt().unsqueeze(1) * columns


class OuterProductHessian:
    """Outer products of gradients as estimates of the Hessians, with the methods of :class:`ExactHessian`.

    Args:
        gradients: Gradients of the loss in the outputs, ``[b, C]``.
    """

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


class MatrixHessian:
    """Hessians of a batch as matrices, with the methods of :class:`ExactHessian`.

    Args:
        matrices: Positive semidefinite matrices ``[b, C, C]``.
    """

    def __init__(self, matrices: Tensor) -> None:
        self.matrices, self.count = matrices, matrices.shape[1]

    def total(self) -> Tensor:
        return self.matrices.sum(0)

    def diagonal(self) -> Tensor:
        return self.matrices.diagonal(dim1=1, dim2=2)

    def row(self, index: int) -> Tensor:
        return self.matrices[:, index]

    def columns(self, low: int, high: int) -> Tensor:
        # torch has no eigenvalues in half precision
        single = self.matrices.to(torch.promote_types(self.matrices.dtype, torch.float32))
        values, vectors = torch.linalg.eigh(single)
        roots = (vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)).mT
        return roots[:, low:high].to(self.matrices.dtype)


class PositionHessian:
    """Hessians of outputs at positions, which do not interact, with the methods of :class:`ExactHessian` that backward passes need.

    Args:
        blocks: Hessians of all positions of all examples, one after the other.
        shape: Shape of the outputs with the classes last, ``(b, *positions, C)``.
        axis: Axis of the classes in the outputs of the network.
    """

    def __init__(self, blocks: ExactHessian | OuterProductHessian, shape: tuple[int, ...], axis: int) -> None:
        self.blocks, self.shape, self.axis = blocks, shape, axis
        # drawn targets of different positions are independent, so one column has the gradients of all
        self.is_joint = isinstance(blocks, OuterProductHessian)
        self.count = 1 if self.is_joint else blocks.count * math.prod(shape[1:-1])

    def _to_outputs(self, values: Tensor) -> Tensor:
        """Returns values ``[b * T, C]`` as ``[b, K]``, in the order of the outputs of the network."""
        return values.reshape(self.shape).movedim(-1, self.axis).flatten(1)

    def diagonal(self) -> Tensor:
        return self._to_outputs(self.blocks.diagonal())

    def columns(self, low: int, high: int) -> Tensor:
        if isinstance(self.blocks, OuterProductHessian):
            return self._to_outputs(self.blocks.gradients).unsqueeze(1)
        columns, (rows, classes) = list[Tensor](), (self.shape[0], self.shape[-1])
        for index in range(low, high):
            position, number = divmod(index, self.blocks.count)
            root = self.blocks.columns(number, number + 1).reshape(rows, -1, classes)
            values = torch.zeros_like(root)
            values[:, position] = root[:, position]
            columns.append(self._to_outputs(values))
        return torch.stack(columns, 1)


def layer_rows(curvature: "OutputHessian", outputs: Tensor, module: nn.Module) -> "OutputHessian":
    """Returns the Hessians of the output layer at each position, as rows in the order of its inputs.

    Args:
        curvature: Hessians of the outputs.
        outputs: Outputs of the network, ``[b, ...]``.
        module: Output layer, a linear layer or a 1x1 convolution.
    """
    if isinstance(curvature, PositionHessian):
        return curvature.blocks
    if outputs.ndim == 2 or isinstance(curvature, MatrixHessian):
        return curvature
    values = curvature.gradients if isinstance(curvature, OuterProductHessian) else curvature.values
    rows = channels_last(module, values.reshape(outputs.shape)).flatten(0, -2)
    return OuterProductHessian(rows) if isinstance(curvature, OuterProductHessian) else ExactHessian(rows)


OutputHessian = ExactHessian | OuterProductHessian | MatrixHessian | PositionHessian


def has_curvature(likelihood: Likelihood) -> bool:
    """Returns True if the curvature of a likelihood in the outputs is known."""
    if isinstance(likelihood, Heads):
        return all(has_curvature(head) for head in likelihood.heads.values())
    defines_information = type(likelihood).information is not Likelihood.information
    known = Categorical | Bernoulli | ConditionalDensity | Gaussian
    return defines_information or isinstance(likelihood, known)


def check_likelihood(likelihood: Likelihood, predictive: str) -> None:
    """Raises FlowBNNError if the Hessian of the likelihood is unknown, or if it has no probit approximation."""
    if not has_curvature(likelihood):
        text = f"the curvature of {likelihood!r} is unknown; define its information(), or use DeepEnsemble"
        raise FlowBNNError(text, kind="likelihood", argument="likelihood")
    if predictive == "probit" and isinstance(likelihood, RealLikelihood):
        fields = {"kind": "likelihood", "argument": "predictive"}
        raise requirement_error(
            "predictive='probit'", "classes", repr(likelihood), "use 'linearized'", **fields
        )


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """Returns the Hessian of the loss in the outputs.

    Args:
        likelihood: Observation model.
        outputs: Outputs of the network, ``[b, C]``, or in the shape that the likelihood expects.
        targets: Observed targets.
        kind: ``"ggn"`` (exact), ``"fisher"`` (gradients of the observed targets) or ``"sampled"`` (gradients of drawn targets).
        generator: Generator of the drawn targets.
    """
    if type(likelihood).information is not Likelihood.information:
        return _information_hessian(likelihood, outputs, targets, kind, generator)
    if isinstance(likelihood, Heads):
        return _heads_hessian(likelihood, outputs, targets, kind, generator)
    if isinstance(likelihood, Categorical):
        return _categorical_hessian(likelihood, outputs, targets, kind, generator)
    if isinstance(likelihood, Bernoulli):
        return _bernoulli_hessian(likelihood, outputs, targets, kind, generator)
    if isinstance(likelihood, Gaussian):
        return _gaussian_hessian(likelihood, outputs, targets, kind, generator)
    if isinstance(likelihood, ConditionalDensity):
        return _density_hessian(likelihood, outputs, targets, kind, generator)
    return _information_hessian(likelihood, outputs, targets, kind, generator)


def _heads_hessian(
    likelihood: Heads, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """Returns the block-diagonal curvature of independent heads."""
    parts, values = likelihood.split_outputs(outputs), likelihood.split_targets(targets)
    hessians = [
        output_hessian(head, parts[name], values[name], kind, generator)
        for name, head in likelihood.heads.items()
    ]
    # an outer product of gradients of independent heads has blocks of mean zero off the diagonal
    if all(isinstance(hessian, OuterProductHessian) for hessian in hessians):
        return OuterProductHessian(torch.cat([hessian.columns(0, 1)[:, 0] for hessian in hessians], 1))
    columns = [hessian.columns(0, hessian.count).to(outputs) for hessian in hessians]
    blocks = [root.mT @ root for root in columns]
    matrices = outputs.new_zeros(len(outputs), outputs.shape[1], outputs.shape[1])
    place = 0
    for block in blocks:
        size = block.shape[1]
        matrices[:, place : place + size, place : place + size] = block
        place += size
    return MatrixHessian(matrices)


def _information_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """Returns the curvature that the likelihood defines, or outer products of gradients for many outputs."""
    has_many_outputs = outputs[:1].numel() > 64 and type(likelihood).information is Likelihood.information
    if kind == "fisher" or has_many_outputs:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            log_prob = likelihood.log_prob(leaf, targets).sum()
        return OuterProductHessian(torch.autograd.grad(log_prob, leaf)[0].flatten(1))
    matrices = likelihood.information(outputs, targets).detach()
    hessian = ExactHessian(matrices) if matrices.ndim == 2 else MatrixHessian(matrices)
    if kind == "ggn":
        return hessian
    # random combinations of the columns of a root are unbiased, as gradients of drawn targets are
    columns = hessian.columns(0, hessian.count)
    normal = torch.randn(columns.shape[:2], generator=generator, dtype=columns.dtype).to(columns.device)
    return OuterProductHessian((normal.unsqueeze(1) @ columns).squeeze(1))


def _categorical_hessian(
    likelihood: Categorical, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    r"""Returns the Hessian of :math:`-\sum_c a_c \log p_c`, with class weights, label smoothing and ignored positions in :math:`a`."""
    logits, labels = likelihood.classes_last(outputs, targets.to(outputs.device))
    rows = logits.flatten(0, -2)
    p, target_weights = rows.softmax(1), likelihood.target_weights(labels, logits).flatten(0, -2)
    weights = target_weights.sum(1, keepdim=True)
    is_plain = outputs.ndim == 2 and likelihood.class_weights is None
    if kind == "ggn":
        blocks: Any = ExactHessian(p, softmax=True, weights=None if is_plain else weights)
    elif kind == "sampled":
        uniform = torch.rand(len(p), 1, generator=generator, dtype=torch.float64).to(p.device)
        drawn = (p.double().cumsum(1) < uniform).sum(1).clamp_max(p.shape[1] - 1)
        blocks = OuterProductHessian(weights.sqrt() * (p - nn.functional.one_hot(drawn, p.shape[1])))
    else:
        blocks = OuterProductHessian(weights * p - target_weights)
    if outputs.ndim == 2:
        return blocks
    return PositionHessian(blocks, tuple(logits.shape), 1 if likelihood.class_axis == 1 else -1)


def _bernoulli_hessian(
    likelihood: Bernoulli, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """Returns the curvature of independent labels, with their weights in the loss."""
    logits = squeeze_channel(outputs)
    labels = likelihood.hide_ignored(targets.to(logits.device).reshape(logits.shape)).to(logits)
    zero, one = (values.reshape(len(outputs), -1) for values in likelihood.target_weights(labels))
    p, weights = logits.reshape(one.shape).sigmoid(), zero + one
    if kind == "ggn":
        return ExactHessian(weights * p * (1.0 - p))
    if kind == "sampled":
        drawn = (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        return OuterProductHessian(weights.sqrt() * (p - drawn))
    return OuterProductHessian(weights * p - one)


def _gaussian_hessian(
    likelihood: Gaussian, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """Returns the curvature in the means, followed by the log-variances if they are predicted."""
    mean, variance = likelihood.moments(outputs)
    heteroscedastic = likelihood.noise == "predicted"
    if kind == "ggn":
        if not heteroscedastic:
            return ExactHessian(1.0 / variance)
        # the Fisher information in the log-variance is 1 / 2
        return ExactHessian(torch.cat([1.0 / variance, torch.full_like(variance, 0.5)], 1))
    residual = (mean - targets.to(mean).reshape(mean.shape)) * variance.rsqrt()
    if kind == "sampled":
        residual = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
    gradient = residual * variance.rsqrt()
    if heteroscedastic:
        gradient = torch.cat([gradient, 0.5 * (1.0 - residual.square())], 1)
    return OuterProductHessian(gradient)


def _density_hessian(
    likelihood: ConditionalDensity, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    r"""Returns the Fisher information :math:`E_y[g g^T]`, with gradients :math:`g` of the log-density by autograd.

    The Hessian of an observed target may have negative eigenvalues. Its expectation over targets is the Fisher information, which has
    none. The expectation of each target is computed by quadrature.
    """
    if kind != "ggn":
        if kind == "sampled":
            seed = int(torch.randint(2**31 - 1, (), generator=generator))
            targets = likelihood.predictive(outputs.detach().unsqueeze(0)).sample(1, seed)[0]
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            log_prob = likelihood.log_prob(leaf, targets).sum()
        return OuterProductHessian(torch.autograd.grad(log_prob, leaf)[0])
    with torch.no_grad():
        points, weights = likelihood.nodes(outputs.detach())
    count, num_rows = points.shape[:2]
    with torch.enable_grad():
        leaf = outputs.detach().repeat(count, 1).requires_grad_()
        sums = likelihood.log_densities(leaf, points.flatten(0, 1)).sum(0).unbind()
    matrices = outputs.new_zeros(num_rows, outputs.shape[1], outputs.shape[1])
    for index, total in enumerate(sums):
        (gradient,) = torch.autograd.grad(total, leaf, retain_graph=True)
        root = gradient.unflatten(0, (count, num_rows)) * weights[..., index].sqrt().unsqueeze(-1)
        matrices += torch.einsum("mbi,mbj->bij", root, root)
    return MatrixHessian(matrices)
