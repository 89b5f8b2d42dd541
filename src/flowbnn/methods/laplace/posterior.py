"""The posterior of a Laplace approximation: a Gaussian around the trained weights."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Likelihood
from flowbnn.methods.laplace.blocks import BLOCKS, Block, Diagonal, Full, Kronecker
from flowbnn.methods.laplace.jacobian import Jacobian, flat_outputs
from flowbnn.methods.laplace.layers import without_nested
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.batches import call, move, rows, take
from flowbnn.posterior.forward import Compile, Passes, Result, device_of, dtype_of, evaluating
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History

__all__ = ["PREDICTIVES", "FeaturePasses", "LaplacePosterior", "LinearizedPasses", "ProbitPasses"]

# -------------------- laplace_passes.py

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


PREDICTIVES = ("linearized", "sampled", "probit")


class LaplacePosterior(WeightPosterior):
    r"""Weights :math:`w \sim \mathcal N(\hat w, (H + \delta I)^{-1})` of some layers; the others stay as they are.

    Args:
        model: the network with the weights :math:`\hat w`.
        likelihood: how outputs speak of targets.
        blocks: the Gaussians around zero, with the precision of the prior in each.
        predictive: how :meth:`predict` goes from weights to outputs: ``"linearized"``, ``"sampled"`` or ``"probit"``.
        told: what else is known, as plain values: ``log_evidence``, ``precisions`` (of the prior, by layer), ``memory`` (bytes that
            were needed), ``damping``, ``direct`` (the layer that gives the outputs, where it is all that is covered).
        history: the training record.
    """

    kind: ClassVar[str] = "laplace"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        blocks: list[Block],
        predictive: str,
        told: Mapping[str, Any],
        history: History | None = None,
    ) -> None:
        super().__init__(without_nested(model), likelihood, history)
        self.blocks, self.told = blocks, dict(told)
        own = dict(model.named_parameters())
        self.centre = {name: own[name].detach() for name in self.names}
        self.use(predictive)

    def use(self, predictive: str) -> "LaplacePosterior":
        """Predict in another way from now on."""
        if predictive not in PREDICTIVES:
            raise FlowBNNError(
                f"predictive is {' or '.join(repr(one) for one in PREDICTIVES)}, not {predictive!r}"
            )
        if predictive == "probit" and not isinstance(self.likelihood, Categorical | Bernoulli):
            raise FlowBNNError("predictive='probit' is for classes; regression takes 'linearized'")
        self.predictive = predictive
        self.default_samples = 1 if predictive == "probit" else Posterior.default_samples
        return self

    def __repr__(self) -> str:
        layers, size = self.told["precisions"], sum(block.size for block in self.blocks)
        return (
            f"LaplacePosterior({self.blocks[0].kind}, {size:,} weights of {len(layers)} layer{'s' * (len(layers) > 1)} of "
            f"{type(self.model).__name__}, {self.likelihood!r}, {self.predictive})"
        )

    @property
    def names(self) -> list[str]:
        return [name for block in self.blocks for name in block.shapes]

    @property
    def log_evidence(self) -> float:
        """Laplace's estimate of the marginal likelihood of the training data."""
        return self.told["log_evidence"]

    @property
    def memory(self) -> int:
        """Bytes that the fit needed."""
        return self.told["memory"]

    @property
    def prior_scale(self) -> float | dict[str, float]:
        """Standard deviation of the prior: a number, or one for each layer where they differ."""
        scales = {name: delta**-0.5 for name, delta in self.told["precisions"].items()}
        return next(iter(scales.values())) if len(set(scales.values())) == 1 else scales

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        generator, found = generator_of(seed, index), {}
        for block in self.blocks:
            for name, value in block.draw(generator, self.centre[next(iter(block.shapes))].dtype).items():
                found[name] = self.centre[name] + value
        return found

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self.names if name not in values]
        if missing:
            raise FlowBNNError(f"log_prob needs all weights of the posterior; '{missing[0]}' is not there")
        total = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
        for block in self.blocks:
            moved = {name: values[name].to(self.centre[name]) - self.centre[name] for name in block.shapes}
            total = total - 0.5 * (
                block.quadratic(moved) - block.log_det() + block.size * math.log(2 * math.pi)
            )
        return total

    @torch.no_grad()
    def functional_variance(self, inputs: Any, diagonal: bool = False) -> Tensor:
        r"""Covariance :math:`J \Sigma J^T` of the outputs of the linearized network, ``[B, C, C]``, or its diagonal ``[B, C]``."""
        inputs = move(inputs, device_of(self.model), dtype_of(self.model))
        if self.told["direct"] is not None and not isinstance(self.blocks[0], Full):
            blocks = self._direct_variance(inputs)
            return blocks.diagonal(dim1=1, dim2=2) if diagonal else blocks
        with evaluating(self.model):
            count = flat_outputs(self.model, take(inputs, 0, 1)).shape[1]
            jacobian, found = Jacobian(self.model, self.names), []
            one = torch.eye(count, dtype=dtype_of(self.model), device=device_of(self.model))
            spans: dict[tuple[int, int], list[Tensor]] = {}
            for start, stop, low, high in jacobian.chunks(inputs, count):
                columns = one[low:high].expand(stop - start, -1, -1)
                part = jacobian.rows(take(inputs, start, stop), columns)
                roots = torch.cat([block.roots(part) for block in self.blocks], 2)
                spans.setdefault((start, stop), []).append(roots.square().sum(2) if diagonal else roots)
            for parts in spans.values():
                whole = torch.cat(parts, 1)
                found.append(whole if diagonal else whole @ whole.transpose(1, 2))
        return torch.cat(found)

    def _direct_variance(self, inputs: Any) -> Tensor:
        """Of the layer that gives the outputs, whose Jacobian needs no differentiation."""
        module, kept = self.model.get_submodule(self.told["direct"]), []
        with module.register_forward_pre_hook(lambda _, args: kept.append(args[0])), evaluating(self.model):
            flat_outputs(self.model, inputs)
        own, block = dict(self.model.named_parameters()), self.blocks[0]
        columns = [
            kept[0] if own[name].ndim > 1 else kept[0].new_ones(len(kept[0]), 1) for name in block.shapes
        ]
        assert isinstance(block, Diagonal | Kronecker)
        return block.linear_variance(columns)

    def drawing(
        self,
        samples: int,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
    ) -> Any:
        if not shared:
            raise FlowBNNError("a draw of weights serves all inputs; leave shared=True")
        direct = self.told["direct"]
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        if self.predictive == "sampled" and direct is None:
            return super().drawing(
                samples, shared=shared, seed=seed, max_batch=max_batch, precision=precision, compile=compile
            )
        if compile is True:
            raise FlowBNNError(
                f"predictive='{self.predictive}' does not compile for prediction; leave compile as it is"
            )
        if self.predictive == "probit":
            return ProbitPasses(self, samples, max_batch, precision)
        if direct is not None:
            return FeaturePasses(self, direct, samples, seed, max_batch, precision, compile)
        return LinearizedPasses(self, samples, seed, max_batch, precision)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, block in enumerate(self.blocks)
            for name, tensor in block.tensors.items()
        }

    def settings(self) -> dict[str, Any]:
        return {
            "predictive": self.predictive,
            "told": self.told,
            "blocks": [
                {"kind": block.kind, "prior": block.prior, "names": list(block.shapes)}
                for block in self.blocks
            ],
        }

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "LaplacePosterior":
        own, blocks = dict(point.model.named_parameters()), []
        for index, each in enumerate(settings["blocks"]):
            tensors = {
                name.partition(".")[2]: value for name, value in state.items() if name.startswith(f"{index}.")
            }
            shapes = {name: tuple(own[name].shape) for name in each["names"]}
            block = BLOCKS[each["kind"]](shapes, tensors, float(each["prior"]))
            if block.eigenvalues.numel() != block.size:
                raise ValueError(f"the curvature of '{each['names'][0]}' does not fit its weights")
            blocks.append(block)
        told = settings["told"]
        if not blocks or not {"log_evidence", "precisions", "memory", "direct"} <= set(told):
            raise ValueError("it lacks what a Laplace posterior keeps")
        return cls(point.model, point.likelihood, blocks, settings["predictive"], told, point.history)
