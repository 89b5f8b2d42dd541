"""Predictions of Laplace posteriors that do not run the network once for every draw of its weights."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from flowbnn.inference.batches import call, rows
from flowbnn.inference.laplace_rows import Jacobian
from flowbnn.inference.passes import Compile
from flowbnn.inference.running import Passes, Result

__all__ = ["FeaturePasses", "LinearizedPasses", "ProbitPasses"]

KEPT = 2**26  # bytes of draws that are kept from call to call


class FeaturePasses(Passes):
    r"""Draws of the layer that gives the outputs: :math:`f(x) + \Delta\, \phi(x)`, with features and outputs computed once.

    Args:
        posterior: has ``weights(index, seed)`` and ``centre``.
        layer: the name of the layer.
        samples, seed: of the draws.
    """

    def __init__(
        self,
        posterior: Any,
        layer: str,
        samples: int,
        seed: int,
        max_batch: int | None,
        precision: str | None,
        compile: Compile,
    ) -> None:
        super().__init__(posterior.model, max_batch, precision, compile if compile != "auto" else False)
        self.posterior, self.samples, self.seed = posterior, samples, seed
        self.module: Any = self.model.get_submodule(layer)
        self.kept = dict[int, tuple[Tensor, Tensor]]()
        self.features: Tensor | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self.stack.callback(self.module.register_forward_pre_hook(self._see).remove)
        return self

    def _see(self, module: nn.Module, args: Any) -> None:
        self.features = args[0]

    def _run(self, some: Any, size: int, fast: Any) -> Tensor:
        outputs = call(self.model, some)
        assert self.features is not None
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        return torch.cat([outputs.to(dtype), self.features.to(dtype)], 1)

    def moved(self, index: int) -> tuple[Tensor, Tensor]:
        """How far the layer's weight (transposed) and bias are from their centre in a sample."""
        if index in self.kept:
            return self.kept[index]
        drawn, own = self.posterior.weights(index, self.seed), dict(self.model.named_parameters())
        weight, bias = self.module.weight, self.module.bias
        found = [torch.zeros_like(weight), weight.new_zeros(1, len(weight))]
        for name, value in drawn.items():
            at = 0 if own[name] is weight else 1
            found[at] = (value - self.posterior.centre[name]).reshape(found[at].shape)
        assert bias is None or found[1].numel() == bias.numel()
        pair = found[0].T.contiguous(), found[1]
        if (len(self.kept) + 1) * pair[0].numel() * pair[0].element_size() <= KEPT:
            self.kept[index] = pair
        return pair

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        inputs, high = self.ready(inputs), self.samples if high is None else high
        found = Result(None, 1, rows(inputs))

        def write(outputs: Tensor, start: int, stop: int) -> None:
            found.write(outputs.unsqueeze(0), 0, 1, start, stop)

        self.through(inputs, write)
        width = self.module.weight.shape[0]
        outputs, features = found.tensor[0, :, :width], found.tensor[0, :, width:].contiguous()
        with torch.autocast(self.device.type, enabled=False):
            if out is None:
                out = outputs.new_empty(high - low, *outputs.shape)
            for index in range(low, high):
                weight, bias = self.moved(index)
                out[index - low] = torch.addmm(outputs + bias.to(outputs), features, weight.to(features))
        return out


class LinearizedPasses(Passes):
    r"""The network made linear in its weights, :math:`f(x) + J(x) (w - \hat w)`, with one draw of the weights after the other."""

    def __init__(
        self, posterior: Any, samples: int, seed: int, max_batch: int | None, precision: str | None
    ) -> None:
        super().__init__(posterior.model, max_batch, precision, False)
        self.posterior, self.samples, self.seed = posterior, samples, seed
        self.jacobian = Jacobian(posterior.model, posterior.names)

    def _run(self, some: Any, size: int, fast: Any) -> Tensor:
        outputs, moved = self.jacobian.push(some, self.tangents)
        return outputs + moved

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        inputs, high = self.ready(inputs), self.samples if high is None else high
        result = Result(out, high - low, rows(inputs))
        for index in range(low, high):
            drawn = self.posterior.weights(index, self.seed)
            self.tangents: Mapping[str, Tensor] = {
                name: value - self.posterior.centre[name] for name, value in drawn.items()
            }

            def write(outputs: Tensor, start: int, stop: int, at: int = index - low) -> None:
                result.write(outputs.unsqueeze(0), at, at + 1, start, stop)

            self.through(inputs, write)
        return result.tensor


class ProbitPasses(Passes):
    r"""Logits shrunk by their variance, :math:`f / \sqrt{1 + \pi v / 8}` (MacKay 1992): one answer, without draws."""

    def __init__(self, posterior: Any, samples: int, max_batch: int | None, precision: str | None) -> None:
        super().__init__(posterior.model, max_batch, precision, False)
        self.posterior, self.samples = posterior, samples

    def _run(self, some: Any, size: int, fast: Any) -> Tensor:
        outputs = call(self.model, some)
        variance = self.posterior.functional_variance(some, diagonal=True).reshape(outputs.shape)
        return outputs * (1.0 + torch.pi / 8.0 * variance).rsqrt().to(outputs.dtype)

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        inputs, high = self.ready(inputs), self.samples if high is None else high
        result = Result(None, 1, rows(inputs))
        self.through(inputs, partial(_write_first, result))
        one = result.tensor.expand(high - low, *result.tensor.shape[1:])
        if out is None:
            return one
        out.copy_(one)
        return out


def _write_first(result: Result, outputs: Tensor, start: int, stop: int) -> None:
    result.write(outputs.unsqueeze(0), 0, 1, start, stop)
