r"""Curvature and log-likelihood of a network by one pass over the data."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move, split_batch
from flowbnn.likelihoods import Categorical, Likelihood
from flowbnn.methods.data_summary import empty_loader
from flowbnn.methods.fitting import likelihood_not_finite
from flowbnn.methods.laplace.accumulators import (
    CONVOLUTIONS,
    CurvatureAccumulator,
    JacobianAccumulator,
    LastLayerAccumulator,
    LayerwiseAccumulator,
)
from flowbnn.methods.laplace.blocks import CurvatureBlock
from flowbnn.methods.laplace.derivatives import Jacobian, output_hessian
from flowbnn.methods.laplace.layer_selection import Layers, LayerTrace, shares_weights


class Curvature(NamedTuple):
    """Curvature of the log-likelihood from one pass over the data.

    Args:
        blocks: Curvature of each layer, or of all layers as one block if the structure is ``"full"``.
        matrix: Curvature of all layers as a matrix if the structure is ``"full"``, otherwise None.
        log_likelihood: Log-likelihood of all targets.
        num_examples: Number of examples.
    """

    blocks: list[CurvatureBlock]
    matrix: Tensor | None
    log_likelihood: float
    num_examples: int


@dataclass
class CurvatureFit:
    """Log-likelihood of the data as a function of the weights of selected layers.

    Args:
        model: Network in evaluation mode.
        layers: Layers that get a posterior.
        calls: Record of the layers that the network calls.
        likelihood: Observation model of the targets.
        batches: Function from the label of a progress bar to one pass over the data.
        check: Function that checks the targets of a batch.
        structure: Structure of the curvature, ``"kron"``, ``"diag"`` or ``"full"``.
        hessian: Hessian in the outputs: ``"ggn"``, ``"fisher"``, or ``"sampled"`` with targets drawn from the seed.
        seed: Seed of drawn targets.
        num_data: Number of examples that the loader represents. None for the number of examples that it yields.
    """

    model: nn.Module
    layers: Layers
    calls: LayerTrace
    likelihood: Likelihood
    batches: Callable[[str], Iterable[Any]]
    check: Callable[[Any], None]
    structure: str
    hessian: str
    seed: int
    num_data: int | None

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters of the layers, by name."""
        return {name: self.model.get_parameter(name) for shapes in self.layers.values() for name in shapes}

    @property
    def output_layer(self) -> str | None:
        """Name of the output layer if it is the only selected layer, and the classes are its outputs, else None."""
        name = self.calls.output_layer
        if name is None or list(self.layers) != [name]:
            return None
        if len(self.calls.output_shape) > 1 and isinstance(self.likelihood, Categorical):
            is_last = isinstance(self.model.get_submodule(name), nn.Linear)
            return name if (self.likelihood.class_axis == -1) == is_last else None
        return name

    def examples(self, description: str) -> Iterator[tuple[Any, Tensor]]:
        """Yields inputs and targets of every batch, on the device of the network."""
        device, dtype = device_of(self.model), dtype_of(self.model)
        for batch in self.batches(description):
            self.check(batch)
            inputs, targets = split_batch(batch)
            yield move(inputs, device, dtype), targets.to(device)

    @torch.no_grad()
    def measure(self) -> Curvature:
        """Computes curvature and log-likelihood by one pass over the data."""
        accumulator_cls: type[CurvatureAccumulator] = JacobianAccumulator
        # the gradient of an example is a sum over its positions, which the Fisher matrix of the output layer alone does not have
        sums_gradients = self.hessian == "fisher" and len(self.calls.output_shape) > 1
        if self.output_layer is not None and not sums_gradients:
            accumulator_cls = LastLayerAccumulator
        elif self.structure == "kron" or (
            self.structure == "diag" and all(map(self._layerwise, self.layers))
        ):
            accumulator_cls = LayerwiseAccumulator
        accumulator = accumulator_cls(self.model, self.layers, self.structure)
        generator = torch.Generator().manual_seed(self.seed)
        log_likelihood, num_examples = torch.zeros((), dtype=torch.float64), 0
        with accumulator.hooks:
            for inputs, targets in self.examples("curvature"):
                hessian = partial(
                    output_hessian, self.likelihood, targets=targets, kind=self.hessian, generator=generator
                )
                outputs = accumulator.add(inputs, hessian)
                log_likelihood += self.likelihood.log_prob(outputs, targets).double().sum().cpu()
                num_examples += len(outputs)
        if not num_examples:
            raise empty_loader("the curvature")
        if not bool(torch.isfinite(log_likelihood)):
            raise likelihood_not_finite()
        weight = self.example_weight(num_examples)
        return Curvature(*accumulator.blocks(weight), float(log_likelihood) * weight, num_examples)

    def example_weight(self, num_examples: int) -> float:
        """Returns the number of examples that each example of the loader represents."""
        return 1.0 if self.num_data is None else self.num_data / num_examples

    def _layerwise(self, name: str) -> bool:
        """Returns True if :class:`LayerwiseAccumulator` supports the diagonal of this layer."""
        module, shape = self.model.get_submodule(name), self.calls.shapes.get(name, torch.Size())
        supported = (
            (type(module) is nn.Linear and len(shape) == 2)
            or (type(module) in CONVOLUTIONS and module.groups == 1)
            or (
                type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
                and module.running_mean is not None
            )
        )
        supported = supported and set(module._parameters) <= {
            "weight",
            "bias",
        }  # weight norm and pruning have others
        called_once = self.calls.counts[name] == 1 and shape[:1] == (self.calls.num_rows,)
        return supported and called_once and shares_weights(self.model, name) is None

    def gradient(self, num_examples: int) -> dict[str, Tensor]:
        """Returns the gradient of the log-likelihood of all data. ``num_examples`` is the number of examples that the loader yields."""
        jacobian = Jacobian(self.model, list(self.weights))
        leaves = jacobian.leaves()
        total = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        for inputs, targets in self.examples("gradient"):
            with torch.enable_grad():
                outputs = jacobian.outputs(leaves, inputs)
                outputs = outputs if outputs.ndim > 2 else outputs.reshape(len(outputs), -1)
                log_likelihood = self.likelihood.log_prob(outputs, targets).sum()
            gradients = torch.autograd.grad(log_likelihood, list(leaves.values()), materialize_grads=True)
            for name, gradient in zip(total, gradients, strict=True):
                total[name] += self.example_weight(num_examples) * gradient
        return total
