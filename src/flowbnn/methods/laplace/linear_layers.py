r"""Covariance of the outputs of a network under Gaussians over the weights of linear layers.

The gradient of an output in the weights of a linear layer is an outer product :math:`g a^T` of the gradient :math:`g` in the output of
the layer and its input :math:`a`. The covariance needs the vectors only, and never a row of the Jacobian.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import rows, take
from flowbnn.memory import is_out_of_memory
from flowbnn.methods.laplace.blocks import CurvatureBlock, LayerBlock
from flowbnn.methods.laplace.derivatives import Jacobian, differentiable_attention


class LinearLayers:
    """Linear layers of a network, each with a Gaussian over its weights.

    Args:
        network: Network in evaluation mode.
        blocks: Zero-mean Gaussians over the weights of one layer each.
    """

    max_bytes = 2**27  # of the gradients of a chunk of examples

    def __init__(self, network: nn.Module, blocks: Sequence[CurvatureBlock]) -> None:
        self.network = network
        self.layers: dict[str, LayerBlock] = {}
        for block in blocks:
            name = next(iter(block.shapes)).rpartition(".")[0]
            if isinstance(block, LayerBlock) and _has_weights(network, name, block):
                self.layers[name] = block
        self.complete = len(self.layers) == len(blocks)

    def variance(self, inputs: Any, num_outputs: int, diagonal: bool) -> Tensor | None:
        """Returns the covariance ``[b, C, C]`` of the outputs, or its diagonal ``[b, C]``.

        Returns None if a weight does not belong to a linear layer that is called once with a vector for every example, or if torch
        cannot differentiate the network this way.

        Args:
            inputs: Inputs of the network.
            num_outputs: Number of outputs of an example.
            diagonal: If True, returns only the diagonal.
        """
        if not self.complete:
            return None
        jacobian, chunks = (
            Jacobian(self.network, [name for b in self.layers.values() for name in b.shapes]),
            [],
        )
        width = sum(len(self.network.get_parameter(f"{name}.weight")) for name in self.layers)
        element_size = next(iter(jacobian.values.values())).element_size()
        # other activations of the network, which the backward pass computes as well, are taken to be ten times as large
        num_rows = max(1, self.max_bytes // (10 * element_size * width * num_outputs))
        for start in range(0, rows(inputs), num_rows):
            chunk = take(inputs, start, min(start + num_rows, rows(inputs)))
            factors = self._factors(jacobian, chunk, num_outputs)
            if factors is None:
                return None
            terms = [
                block.linear_variance(columns, gradients, diagonal=diagonal)
                for block, (columns, gradients) in zip(self.layers.values(), factors, strict=True)
            ]
            chunks.append(torch.stack(terms).sum(0))
        return torch.cat(chunks)

    def _factors(
        self, jacobian: Jacobian, inputs: Any, num_outputs: int
    ) -> list[tuple[list[Tensor], Tensor]] | None:
        """Returns, for each layer, the inputs ``[b, D]`` of each of its weights and the gradients ``[b, C, out]`` in its outputs."""
        features, activations = dict[str, Tensor](), dict[str, Tensor]()
        leaves, repeated = jacobian.leaves(), list[str]()

        def record(name: str, module: nn.Linear, args: Any, output: Tensor) -> Tensor:
            if name in features or len(args) != 1 or args[0].ndim != 2:
                repeated.append(name)
                return output
            bias = None if module.bias is None else module.bias.detach()
            output = F.linear(args[0], module.weight.detach(), bias)
            activations[name] = output = output if output.requires_grad else output.requires_grad_()
            features[name] = args[0].detach().clone()
            return output.clone()  # an in-place activation must not change the stored tensor

        with ExitStack() as hooks, torch.enable_grad(), differentiable_attention():
            for name in self.layers:
                layer = self.network.get_submodule(name)
                hook = lambda *args, name=name: record(name, *args)  # noqa: E731
                hooks.enter_context(layer.register_forward_hook(hook, prepend=True))
            outputs = jacobian.outputs(leaves, inputs)
            if repeated or len(features) < len(self.layers):
                return None
            flat = outputs.reshape(len(outputs), -1)
            identity = torch.eye(num_outputs, dtype=flat.dtype, device=flat.device)
            cotangents = identity.unsqueeze(1).expand(-1, len(flat), -1)
            targets = [*(activations[name] for name in self.layers), *leaves.values()]
            try:
                gradients = torch.autograd.grad(
                    flat, targets, cotangents, is_grads_batched=True, allow_unused=True
                )
            except RuntimeError as error:  # no batching rule
                if is_out_of_memory(error):
                    raise
                return None
        if any(gradient is not None for gradient in gradients[len(self.layers) :]):
            return None  # a weight is also used outside of its layer
        factors = []
        for (name, block), gradient in zip(self.layers.items(), gradients, strict=False):
            values = features[name]
            ones = values.new_ones(len(values), 1)
            columns = [values if len(shape) > 1 else ones for shape in block.shapes.values()]
            if gradient is None:
                gradient = values.new_zeros(num_outputs, *activations[name].shape)
            factors.append((columns, gradient.transpose(0, 1)))
        return factors


def _has_weights(network: nn.Module, name: str, block: CurvatureBlock) -> bool:
    """Returns True if the weights of a block are those of one linear layer."""
    try:
        module = network.get_submodule(name)
    except AttributeError:
        return False
    is_linear = type(module) is nn.Linear and "forward" not in vars(module)
    return is_linear and set(module._parameters) <= {"weight", "bias"} and f"{name}.weight" in block.shapes
