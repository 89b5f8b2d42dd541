"""The posterior of a Laplace approximation: a Gaussian around the trained weights."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Likelihood
from flowbnn.methods.laplace.blocks import BLOCKS, Block, Diagonal, Full, Kronecker
from flowbnn.methods.laplace.jacobian import Jacobian, flat_outputs
from flowbnn.methods.laplace.layers import without_nested
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.batches import call, move, take
from flowbnn.posterior.forward import device_of, dtype_of, evaluating
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History

__all__ = ["PREDICTIVES", "LaplacePosterior"]

KEPT = 2**26  # bytes of draws that are kept from batch to batch
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

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether predictions can pass the network through ``torch.compile``."""
        return self.predictive == "sampled" and self.told["direct"] is None

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        direct = self.told["direct"]
        if self.predictive == "probit":
            one = prediction.run(inputs, [self._shrunk])
            return one.expand(len(samples), *one.shape[1:])
        if direct is not None:
            return self._by_features(inputs, samples, prediction, self.model.get_submodule(direct))
        if self.predictive == "linearized":
            return prediction.run(inputs, self._linearized(samples, prediction), len(samples))
        return super().outputs(inputs, samples, prediction)

    def _shrunk(self, inputs: Any) -> Tensor:
        r"""Logits shrunk by their variance, :math:`f / \sqrt{1 + \pi v / 8}` (MacKay 1992): one answer, without draws."""
        outputs = call(self.model, inputs)
        variance = self.functional_variance(inputs, diagonal=True).reshape(outputs.shape)
        return outputs * (1.0 + torch.pi / 8.0 * variance).rsqrt().to(outputs.dtype)

    def _linearized(self, samples: range, prediction: Prediction) -> Iterator[Callable[[Any], Tensor]]:
        r"""The network made linear in its weights, :math:`f(x) + J(x) (w - \hat w)`, with one draw of the weights after the other."""
        jacobian = prediction.keep("jacobian", lambda: Jacobian(self.model, self.names))
        for index in samples:
            drawn = self.weights(index, prediction.seed)
            tangents = {name: value - self.centre[name] for name, value in drawn.items()}
            yield lambda some, tangents=tangents: sum(jacobian.push(some, tangents))  # type: ignore[misc]

    def _by_features(self, inputs: Any, samples: range, prediction: Prediction, layer: Any) -> Tensor:
        r"""Draws of the layer that gives the outputs: :math:`f(x) + \Delta\, \phi(x)`, with features and outputs computed once."""
        features: list[Tensor] = []

        def network(some: Any) -> Tensor:
            features.clear()
            outputs = call(self.model, some)
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            return torch.cat([outputs.to(dtype), features[0].to(dtype)], 1)

        with layer.register_forward_pre_hook(lambda _, args: features.append(args[0])):
            joined = prediction.run(inputs, [network])[0]
        outputs, phi = joined[:, : len(layer.weight)], joined[:, len(layer.weight) :].contiguous()
        result = outputs.new_empty(len(samples), *outputs.shape)
        with torch.autocast(prediction.device.type, enabled=False):
            for place, index in enumerate(samples):
                weight, bias = self._moved(index, prediction, layer)
                result[place] = torch.addmm(outputs + bias.to(outputs), phi, weight.to(phi))
        return result

    def _moved(self, index: int, prediction: Prediction, layer: Any) -> tuple[Tensor, Tensor]:
        """How far the layer's weight (transposed) and bias are from their centre in a sample; some are kept for the next batches."""
        kept: dict[int, tuple[Tensor, Tensor]] = prediction.keep("moved", dict)
        if index in kept:
            return kept[index]
        own = dict(self.model.named_parameters())
        weight, bias = torch.zeros_like(layer.weight), layer.weight.new_zeros(1, len(layer.weight))
        for name, value in self.weights(index, prediction.seed).items():
            if own[name] is layer.weight:
                weight = value - self.centre[name]
            else:
                bias = (value - self.centre[name]).reshape(bias.shape)
        pair = weight.T.contiguous(), bias
        if (len(kept) + 1) * weight.numel() * weight.element_size() <= KEPT:
            kept[index] = pair
        return pair

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
