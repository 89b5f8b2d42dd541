"""Stochastic network as a function of one noise vector per example, and derivatives of its log-likelihood in the noise."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import call, dtype_of, repeat, take
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.derivatives import output_hessian
from flowbnn.noise.base import Noise, make_noise_modes, noise_layers
from flowbnn.noise.contexts import NoiseContext, PreparedDraws
from flowbnn.posterior.operation_rules import OperationRules, RuleFinder


class NoiseDerivatives(NamedTuple):
    """Derivatives of a log-likelihood in the noise.

    Args:
        outputs: Outputs of the network, ``[B, ...]``.
        log_likelihood: Log-likelihood of each example, ``[B]``.
        gradient: Sum of the gradients over examples, ``[D]``.
        roots: Rows of a root of the generalized Gauss-Newton matrix, ``[B K, D]``.
    """

    outputs: Tensor
    log_likelihood: Tensor
    gradient: Tensor
    roots: Tensor


class RowGradients(NamedTuple):
    """Gradients of the log-likelihood of each example in its noise.

    Args:
        outputs: Outputs of the network, ``[B, ...]``.
        log_likelihood: Log-likelihood of each example, ``[B]``.
        gradient: Gradient for each example, ``[B, D]``.
    """

    outputs: Tensor
    log_likelihood: Tensor
    gradient: Tensor


class NoisyNetwork:
    """Network as a function of one noise vector per example.

    Args:
        model: Stochastic network; it is set to evaluation mode.
        likelihood: Observation model of the targets.

    Raises:
        FlowBNNError: If the noise of a layer is drawn at every position.
    """

    def __init__(self, model: nn.Module, likelihood: Likelihood) -> None:
        self.model, self.likelihood = model.eval(), likelihood
        self.layers: dict[str, Noise] = noise_layers(model)
        for name, noise in self.layers.items():
            if noise.site != "channel":
                text = f"noise of layer '{name}' must have site='channel', got {noise.site!r}"
                raise FlowBNNError(text, kind="site", layer=name)
        self.sizes = [noise.layout.dim for noise in self.layers.values()]
        self.dtype = dtype_of(model) or torch.get_default_dtype()
        self.needs_rules: bool | None = None  # unknown before the first pass

    def outputs(self, inputs: Any, vectors: Tensor) -> Tensor:
        """Returns outputs ``[B, ...]``, with at least two axes, where example ``i`` has the noise ``vectors[i]``.

        Args:
            inputs: Inputs of the network.
            vectors: Noise of all layers for each example, ``[B, D]``.
        """
        by_layer = zip(self.layers.values(), vectors.split(self.sizes, -1), strict=True)
        draws = {noise.key: values for noise, values in by_layer}
        prepared = PreparedDraws(draws, torch.is_grad_enabled(), required=True)
        try:
            with (
                NoiseContext(make_noise_modes(self.model, "sample"), prepared=prepared, sharded=False),
                self._operation_rules(),
            ):
                outputs = call(self.model, inputs)
        except FlowBNNError as error:
            name = next((name for name, n in self.layers.items() if n.key == error.fields.get("key")), None)
            if name is None:
                raise
            text = f"layer '{name}' has no batch axis or runs twice (activation checkpointing); set its rule to None"
            raise FlowBNNError(text, kind="unsupported", argument="rules", layer=name) from error
        return outputs if outputs.ndim > 1 else outputs.unsqueeze(1)

    @contextmanager
    def _operation_rules(self) -> Iterator[None]:
        """Context manager in which operations run in a faster form, if the first pass has any that torch runs slowly."""
        if self.needs_rules is None:
            with RuleFinder() as finder:
                yield
            self.needs_rules = finder.needs_rules
        else:
            with OperationRules() if self.needs_rules else nullcontext():
                yield

    def passes(
        self, vectors: Tensor, inputs: Any, targets: Tensor, rows: int
    ) -> Iterator[tuple[slice, Any, Tensor, Tensor]]:
        """Yields forward passes over all combinations of data and noise vectors.

        Args:
            vectors: Noise vectors ``[S, D]``.
            inputs: Inputs of all examples.
            targets: Targets of all examples.
            rows: Maximum number of rows of a pass.

        Yields:
            The slice of the vectors in the pass, and inputs, targets and noise of its rows.
        """
        vectors_per_pass = max(1, rows // len(targets))
        for first in range(0, len(vectors), vectors_per_pass):
            chunk = vectors[first : first + vectors_per_pass].to(self.dtype)
            count = len(chunk)
            for low in range(0, len(targets), rows):
                chunk_inputs, chunk_targets = take((inputs, targets), low, low + rows)
                noise = chunk.repeat_interleave(len(chunk_targets), 0)
                pass_inputs, pass_targets = repeat(chunk_inputs, count), repeat(chunk_targets, count)
                yield slice(first, first + count), pass_inputs, pass_targets, noise

    def gradients(self, vectors: Tensor, inputs: Any, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Returns log-likelihoods ``[S]`` of all data under noise vectors ``[S, D]``, and their gradients ``[S, D]``, in float64."""
        gradients = torch.zeros(vectors.shape, dtype=torch.float64, device=vectors.device)
        values = gradients.new_zeros(len(vectors))
        for index, pass_inputs, pass_targets, noise in self.passes(vectors.detach(), inputs, targets, rows):
            with torch.enable_grad():
                outputs = self.outputs(pass_inputs, noise.requires_grad_())
                log_prob = self.likelihood.log_prob(outputs, pass_targets)
                (gradient,) = torch.autograd.grad(log_prob.sum(), noise)
            shape = (index.stop - index.start, -1)
            values[index] += log_prob.detach().reshape(shape).sum(1, dtype=torch.float64)
            gradients[index] += gradient.reshape(*shape, vectors.shape[-1]).sum(1, dtype=torch.float64)
        return values, gradients

    def row_gradients(self, inputs: Any, targets: Tensor, vectors: Tensor) -> "RowGradients":
        """Returns the log-likelihood of each example and its gradient in the noise.

        Args:
            inputs: Inputs of the network.
            targets: Targets of the examples.
            vectors: Noise of each example, ``[B, D]``.
        """
        leaf = vectors.detach().to(self.dtype).requires_grad_()
        with torch.enable_grad():
            outputs = self.outputs(inputs, leaf)
            log_prob = self.likelihood.log_prob(outputs, targets)
            (gradient,) = torch.autograd.grad(log_prob.sum(), leaf)
        return RowGradients(outputs.detach(), log_prob.detach(), gradient)

    def derivatives(
        self,
        inputs: Any,
        targets: Tensor,
        vectors: Tensor,
        generator: torch.Generator,
        exact: int = 3,
        labels: int | None = None,
    ) -> NoiseDerivatives:
        """Computes gradient and Gauss-Newton matrix of the log-likelihood in the noise.

        Args:
            inputs: Inputs of the network.
            targets: Targets of the examples.
            vectors: Noise of each example, ``[B, D]``.
            generator: Generator of drawn labels.
            exact: Number of outputs up to which the Gauss-Newton matrix is exact. It takes one backward pass per output.
            labels: Number of labels to draw for each example above ``exact`` outputs; None for ``exact``.
        """
        labels = exact if labels is None else labels
        leaf = vectors.requires_grad_()
        with torch.enable_grad():
            outputs = self.outputs(inputs, leaf)
            log_prob = self.likelihood.log_prob(outputs, targets)
            (gradient,) = torch.autograd.grad(log_prob.sum(), leaf, retain_graph=True)
            flat, constant = outputs.flatten(1), outputs.detach()
            columns = []
            if flat.shape[1] <= exact:
                hessian = output_hessian(self.likelihood, constant, targets, "ggn", generator)
                columns = list(hessian.columns(0, hessian.count).unbind(1))
            else:
                for _ in range(labels):
                    sampled = output_hessian(self.likelihood, constant, targets, "sampled", generator)
                    columns.append(sampled.columns(0, 1)[:, 0] / labels**0.5)
            roots = [
                torch.autograd.grad(flat, leaf, column.to(flat), retain_graph=number + 1 < len(columns))[0]
                for number, column in enumerate(columns)
            ]
        return NoiseDerivatives(outputs.detach(), log_prob.detach(), gradient.sum(0), torch.cat(roots))
