"""The posterior of a Laplace approximation: a Gaussian around the trained weights, and three ways to predict with it."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    check_finite,
    device_of,
    dtype_of,
    evaluation_mode,
    move,
    rewrap_forward_errors,
    take,
)
from flowbnn.errors import pluralize
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import BLOCKS, Block, Diagonal, Kronecker
from flowbnn.methods.laplace.derivatives import Jacobian, check_likelihood, flat_outputs
from flowbnn.methods.layer_modes import without_nested
from flowbnn.options import checked
from flowbnn.posterior.base import Posterior, Prediction, part_of
from flowbnn.posterior.twin import twin
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History

PredictiveName = Literal["linearized", "sampled", "probit"]
KEPT = 2**26  # bytes of draws that are kept from batch to batch


class LaplacePosterior(WeightPosterior):
    r"""Weights :math:`w \sim \mathcal N(\hat w, (H + \delta I)^{-1})` of some layers; the others are fixed.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`; the weights are :math:`\hat w`.
        blocks: the Gaussians around zero, with the precision of the prior in each.
        predictive: how :meth:`predict` gets from weights to outputs: ``"linearized"``, ``"sampled"`` or ``"probit"``.
        log_evidence: Laplace's estimate of the log marginal likelihood of the training data.
        precisions: of the prior, by layer.
        direct: the layer that gives the outputs, where it is the only one covered.
    """

    kind: ClassVar[str] = "laplace"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        blocks: list[Block],
        predictive: PredictiveName,
        *,
        log_evidence: float,
        precisions: Mapping[str, float],
        direct: str | None,
        history: History | None = None,
    ) -> None:
        super().__init__(without_nested(model), likelihood, history)
        self.blocks, self.precisions = blocks, dict(precisions)
        self.log_evidence, self.direct = log_evidence, direct
        self.centre = {name: model.get_parameter(name).detach() for name in self.names}
        self.use(predictive)

    @checked
    def use(self, predictive: PredictiveName) -> "LaplacePosterior":
        """Predict in another way from now on."""
        check_likelihood(self.likelihood, predictive)
        self.predictive = predictive
        self.default_samples = 1 if predictive == "probit" else Posterior.default_samples
        self.compiles = predictive == "sampled" and self.direct is None
        return self

    def __repr__(self) -> str:
        layers, size = len(self.precisions), sum(block.size for block in self.blocks)
        return (
            f"LaplacePosterior({self.blocks[0].kind}, {pluralize(size, 'weight')} of {pluralize(layers, 'layer')} of "
            f"{type(self.model).__name__}, {self.likelihood!r}, {self.predictive})"
        )

    @property
    def names(self) -> list[str]:
        return [name for block in self.blocks for name in block.shapes]

    @property
    def prior_scale(self) -> float | dict[str, float]:
        """Standard deviation of the prior: a number, or one for each layer where they differ."""
        scales = {name: delta**-0.5 for name, delta in self.precisions.items()}
        return next(iter(scales.values())) if len(set(scales.values())) == 1 else scales

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        generator, weights = generator_of(seed, index), {}
        for block in self.blocks:
            dtype = self.centre[next(iter(block.shapes))].dtype
            for name, value in block.draw(generator, dtype).items():
                weights[name] = self.centre[name] + value
        return weights

    def _moves(self, index: int, seed: int) -> dict[str, Tensor]:
        """How far the weights of a sample are from their centre."""
        return {name: value - self.centre[name] for name, value in self.weights(index, seed).items()}

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
        for block in self.blocks:
            moved = {name: values[name].to(self.centre[name]) - self.centre[name] for name in block.shapes}
            quadratic, size = block.quadratic(moved), block.size
            total = total - 0.5 * (quadratic - block.log_det() + size * math.log(2 * math.pi))
        return total

    # the linearized network

    @checked
    @torch.no_grad()
    def functional_variance(self, inputs: Any, diagonal: bool = False) -> Tensor:
        r"""Covariance :math:`J \Sigma J^T` of the outputs of the linearized network, ``[B, C, C]``, or its diagonal ``[B, C]``."""
        check_finite(inputs)
        return self._variance(twin(self.model), inputs, diagonal)

    def _variance(self, network: nn.Module, inputs: Any, diagonal: bool) -> Tensor:
        inputs, block = move(inputs, device_of(network), dtype_of(network)), self.blocks[0]
        with evaluation_mode(network), rewrap_forward_errors(inputs):
            if self.direct is not None and isinstance(block, Diagonal | Kronecker):
                features = self._with_features(network, inputs)[1]
                ones = features.new_ones(len(features), 1)
                columns = [features if len(shape) > 1 else ones for shape in block.shapes.values()]
                covariance = block.linear_variance(columns)
                return covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance
            count = flat_outputs(network, take(inputs, 0, 1)).shape[1]
            jacobian = Jacobian(network, self.names)
            one = torch.eye(count, dtype=dtype_of(network), device=device_of(network))
            roots: dict[int, list[Tensor]] = {}  # by the first example of a chunk
            for start, stop, low, high in jacobian.chunks(inputs, count):
                cotangents = one[low:high].expand(stop - start, -1, -1)
                rows = jacobian.rows(take(inputs, start, stop), cotangents)
                root = torch.cat([each.roots(rows) for each in self.blocks], 2)
                roots.setdefault(start, []).append(root.square().sum(2) if diagonal else root)
        chunks = [torch.cat(parts, 1) for parts in roots.values()]
        return torch.cat(chunks if diagonal else [chunk @ chunk.transpose(1, 2) for chunk in chunks])

    def _with_features(self, network: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        """Outputs of the network, and the inputs of the layer that gives them."""
        assert self.direct is not None
        layer, features = network.get_submodule(self.direct), list[Tensor]()
        with layer.register_forward_pre_hook(lambda _, args: features.append(args[0])):
            return call(network, inputs), features[0]

    # predictions

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        if self.predictive == "probit":
            one = prediction.run(inputs, [partial(self._probit, prediction.model)])
            return one.expand(len(samples), *one.shape[1:])
        if self.direct is not None:
            return self._by_features(inputs, samples, prediction)
        if self.predictive == "linearized":
            return prediction.run(inputs, self._linearized(samples, prediction), len(samples))
        return super().outputs(inputs, samples, prediction)

    def _probit(self, network: nn.Module, inputs: Any) -> Tensor:
        r"""Logits shrunk by their variance, :math:`f / \sqrt{1 + \pi v / 8}` (MacKay 1992): one answer, without draws."""
        outputs = call(network, inputs)
        variance = self._variance(network, inputs, diagonal=True).reshape(outputs.shape)
        return outputs * (1.0 + torch.pi / 8.0 * variance).rsqrt().to(outputs.dtype)

    def _linearized(self, samples: range, prediction: Prediction) -> Iterator[Callable[[Any], Tensor]]:
        r"""The network made linear in its weights, :math:`f(x) + J(x) (w - \hat w)`, for one draw of the weights after the other."""
        jacobian = prediction.state.get("jacobian", lambda: Jacobian(prediction.model, self.names))
        for index in samples:
            tangents = self._moves(index, prediction.seed)
            yield lambda rows, tangents=tangents: sum(jacobian.push(rows, tangents))  # type: ignore[misc]

    def _by_features(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        r"""Draws of the layer that gives the outputs: :math:`f(x) + \Delta\, \phi(x)`, with features and outputs computed once."""

        def network(rows: Any) -> Tensor:
            outputs, features = self._with_features(prediction.model, rows)
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            return torch.cat([outputs.to(dtype), features.to(dtype)], 1)

        joined = prediction.run(inputs, [network])[0]
        layer: Any = self.model.get_submodule(self.direct or "")
        outputs, features = joined[:, : layer.out_features], joined[:, layer.out_features :].contiguous()
        result = outputs.new_empty(len(samples), *outputs.shape)

        def moves(index: int) -> tuple[Tensor, Tensor]:
            weight = features.new_zeros(features.shape[1], outputs.shape[1])
            bias = outputs.new_zeros(1, outputs.shape[1])
            for moved in self._moves(index, prediction.seed).values():
                if moved.ndim > 1:
                    weight = moved.T.contiguous().to(features)
                else:
                    bias = moved[None].to(outputs)
            return weight, bias

        few = prediction.samples * layer.weight.nbytes <= KEPT
        with torch.autocast(prediction.device.type, enabled=False):
            for place, index in enumerate(samples):
                drawn = partial(moves, index)
                weight, bias = prediction.state.get(("moves", index), drawn) if few else drawn()
                result[place] = torch.addmm(outputs + bias, features, weight)
        return result

    # saving and loading

    def state(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, block in enumerate(self.blocks)
            for name, tensor in block.tensors.items()
        }

    def settings(self) -> dict[str, Any]:
        names = ("predictive", "log_evidence", "precisions", "direct")
        blocks = [
            {"kind": block.kind, "prior": block.prior, "names": list(block.shapes)} for block in self.blocks
        ]
        return {**{name: getattr(self, name) for name in names}, "blocks": blocks}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        blocks, given = [], dict(settings)
        for index, saved in enumerate(given.pop("blocks")):
            shapes = {name: point.model.get_parameter(name).shape for name in saved["names"]}
            blocks.append(BLOCKS[saved["kind"]](shapes, part_of(state, str(index)), float(saved["prior"])))
        return cls(point.model, point.likelihood, blocks, history=point.history, **given)
