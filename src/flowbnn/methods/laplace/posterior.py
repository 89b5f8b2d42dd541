"""Posterior of a Laplace approximation: a Gaussian around the trained weights, with three predictives."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import call, check_finite, device_of, dtype_of, move, rewrap_forward_errors, take
from flowbnn.errors import pluralize
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.laplace.blocks import (
    CurvatureBlock,
    DiagonalBlock,
    FullBlock,
    KroneckerBlock,
    LayerBlock,
)
from flowbnn.methods.laplace.derivatives import Jacobian, check_likelihood, flat_outputs
from flowbnn.methods.laplace.layer_selection import channels_last
from flowbnn.methods.laplace.linear_layers import LinearLayers
from flowbnn.methods.network_layers import disable_nested_tensors
from flowbnn.networks import evaluation_mode
from flowbnn.options import checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.files import check_shapes, select_prefix
from flowbnn.posterior.prediction import clone_sharing_tensors
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.training import History

PredictiveName = Literal["linearized", "sampled", "probit"]


class LaplacePosterior(WeightPosterior):
    r"""Gaussian posterior :math:`w \sim \mathcal N(\hat w, (H + \delta I)^{-1})` over the weights of some layers.

    The weights of all other layers are fixed.

    Args:
        model: Network whose weights are the mode :math:`\hat w`.
        likelihood: Observation model of the targets.
        blocks: Zero-mean Gaussians, each with the precision of its prior.
        predictive: Method of prediction, ``"linearized"``, ``"sampled"`` or ``"probit"``.
        log_evidence: Laplace estimate of the log marginal likelihood of the training data.
        precisions: Precisions of the prior, by layer.
        output_layer: Name of the output layer if no other layer has a posterior, else None.
        history: Training record.

    Attributes:
        validation_nll: Negative log-likelihood of the validation data by prior scale, relative to that of the highest evidence. Empty
            without validation data.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = fb.Laplace(epochs=0).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.names, posterior.use("probit").predict(torch.zeros(1, 2)).num_samples
    (['weight', 'bias'], 1)
    """

    kind: ClassVar[str] = "laplace"
    validation_nll: dict[float, float]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        blocks: list[CurvatureBlock],
        predictive: PredictiveName,
        *,
        log_evidence: float,
        precisions: Mapping[str, float],
        output_layer: str | None,
        history: History | None = None,
    ) -> None:
        super().__init__(disable_nested_tensors(model), likelihood, history)
        self.blocks, self.precisions = blocks, dict(precisions)
        self.log_evidence, self.output_layer, self.validation_nll = log_evidence, output_layer, {}
        self.mode = {name: model.get_parameter(name).detach() for name in self.names}
        self.use(predictive)

    @checked
    def use(self, predictive: PredictiveName) -> "LaplacePosterior":
        """Switches the predictive of this posterior, and returns it.

        Args:
            predictive: Method of prediction, ``"linearized"``, ``"sampled"`` or ``"probit"``.
        """
        check_likelihood(self.likelihood, predictive)
        self.predictive = predictive
        self.default_samples = 1 if predictive == "probit" else Posterior.default_samples
        self.supports_compile = predictive == "sampled" and self.output_layer is None
        return self

    def __repr__(self) -> str:
        num_layers, size = len(self.precisions), sum(block.size for block in self.blocks)
        return (
            f"LaplacePosterior({self.blocks[0].kind}, {pluralize(size, 'weight')} of {pluralize(num_layers, 'layer')} of "
            f"{type(self.model).__name__}, {self.likelihood!r}, {self.predictive})"
        )

    @property
    def names(self) -> list[str]:
        return [name for block in self.blocks for name in block.shapes]

    @property
    def prior_scale(self) -> float | dict[str, float]:
        """Standard deviation of the prior: a float, or a dictionary by layer if the layers differ."""
        scales = {name: delta**-0.5 for name, delta in self.precisions.items()}
        return next(iter(scales.values())) if len(set(scales.values())) == 1 else scales

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        generator, weights = generator_of(seed, index), {}
        for block in self.blocks:
            dtype = self.mode[next(iter(block.shapes))].dtype
            for name, value in block.draw(generator, dtype).items():
                weights[name] = self.mode[name] + value
        return weights

    def _deviations(self, index: int, seed: int) -> dict[str, Tensor]:
        """Returns the differences of sampled weights from the mode."""
        return {name: value - self.mode[name] for name, value in self.weights(index, seed).items()}

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
        for block in self.blocks:
            deviation = {name: values[name].to(self.mode[name]) - self.mode[name] for name in block.shapes}
            quadratic, size = block.quadratic_form(deviation), block.size
            total = total - 0.5 * (quadratic - block.log_det() + size * math.log(2 * math.pi))
        return total

    @checked
    @torch.no_grad()
    def functional_variance(self, inputs: Any, diagonal: bool = False) -> Tensor:
        r"""Returns the covariance :math:`J \Sigma J^T` of the outputs of the linearized network, ``[B, C, C]``.

        Args:
            inputs: Inputs of the network.
            diagonal: If True, returns only the diagonal, ``[B, C]``.
        """
        check_finite(inputs)
        return self._variance(clone_sharing_tensors(self.model), inputs, diagonal)

    def _variance(self, network: nn.Module, inputs: Any, diagonal: bool) -> Tensor:
        """Returns the covariance of the outputs, or its diagonal, in closed form for linear layers and by the Jacobian otherwise."""
        inputs, block = move(inputs, device_of(network), dtype_of(network)), self.blocks[0]
        with evaluation_mode(network), rewrap_forward_errors(inputs):
            if self.output_layer is not None and isinstance(block, LayerBlock):
                outputs, features = self._outputs_and_features(network, inputs)
                if diagonal or outputs.ndim == 2:  # positions depend on each other through the weights
                    shape, features = features.shape[:-1], features.flatten(0, -2)
                    # len() would fix the batch size of an exported file
                    ones = features.new_ones(features.shape[0], 1)
                    columns = [features if len(sizes) > 1 else ones for sizes in block.shapes.values()]
                    variance = block.linear_variance(columns, diagonal=diagonal)
                    if not diagonal:
                        return variance
                    return self._to_network_layout(variance.unflatten(0, shape)).flatten(1)
            num_outputs = flat_outputs(network, take(inputs, 0, 1)).shape[1]
            if network is not self.model:  # hooks are set on the layers of a clone
                covariance = LinearLayers(network, self.blocks).variance(inputs, num_outputs, diagonal)
                if covariance is not None:
                    return covariance
            jacobian = Jacobian(network, self.names)
            identity = torch.eye(num_outputs, dtype=dtype_of(network), device=device_of(network))
            roots: dict[int, list[Tensor]] = {}  # by the first example of a chunk
            for start, stop, low, high in jacobian.chunks(inputs, num_outputs):
                cotangents = identity[low:high].expand(stop - start, -1, -1)
                rows = jacobian.rows(take(inputs, start, stop), cotangents)
                root = torch.cat([block.whiten(rows) for block in self.blocks], 2)
                roots.setdefault(start, []).append(root.square().sum(2) if diagonal else root)
        chunks = [torch.cat(columns, 1) for columns in roots.values()]
        return torch.cat(chunks if diagonal else [chunk @ chunk.transpose(1, 2) for chunk in chunks])

    def _outputs_and_features(self, network: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        """Returns the outputs of the network and the inputs of its output layer, both with their channels on the last axis."""
        assert self.output_layer is not None
        layer, features = network.get_submodule(self.output_layer), list[Tensor]()
        with layer.register_forward_pre_hook(lambda _, args: features.append(args[0])):
            return channels_last(layer, call(network, inputs)), channels_last(layer, features[0])

    def _to_network_layout(self, values: Tensor, axis: int = 1) -> Tensor:
        """Returns values with channels on the last axis in the layout of the outputs, with channels on ``axis`` after a convolution."""
        layer = self.model.get_submodule(self.output_layer or "")
        return values if isinstance(layer, nn.Linear) else values.movedim(-1, axis)

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        if self.predictive == "probit":
            outputs = prediction.run(inputs, [partial(self._probit, prediction.clone)])
            return outputs.expand(len(samples), *outputs.shape[1:])
        if self.output_layer is not None:
            return self._sample_output_layer(inputs, samples, prediction)
        if self.predictive == "linearized":
            return prediction.run(inputs, self._linearized(samples, prediction), len(samples))
        return super().outputs(inputs, samples, prediction)

    def _probit(self, network: nn.Module, inputs: Any) -> Tensor:
        r"""Returns logits divided by :math:`\sqrt{1 + \pi v / 8}` for their variance :math:`v` (MacKay 1992), without sampling."""
        outputs = call(network, inputs)
        variance = self._variance(network, inputs, diagonal=True).reshape(outputs.shape)
        return outputs * (1.0 + torch.pi / 8.0 * variance).rsqrt().to(outputs.dtype)

    def _linearized(self, samples: range, prediction: Prediction) -> Iterator[Callable[[Any], Tensor]]:
        r"""Yields the linearized network :math:`f(x) + J(x) (w - \hat w)` of each sample."""
        jacobian = prediction.state.get("jacobian", lambda: Jacobian(prediction.clone, self.names))
        for index in samples:
            tangents = self._deviations(index, prediction.seed)
            yield lambda rows, tangents=tangents: sum(jacobian.push(rows, tangents))  # type: ignore[misc]

    def _sample_output_layer(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        r"""Samples the output layer alone: :math:`f(x) + \Delta\, \phi(x)`, with one forward pass for outputs and features."""

        def network(rows: Any) -> Tensor:
            outputs, features = self._outputs_and_features(prediction.clone, rows)
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            return torch.cat([outputs.to(dtype), features.to(dtype)], -1)

        joined = prediction.run(inputs, [network])[0]
        layer: Any = self.model.get_submodule(self.output_layer or "")
        num_outputs = len(layer.weight)
        shape = (*joined.shape[:-1], num_outputs)
        joined = joined.flatten(0, -2)  # positions are rows
        outputs, features = joined[:, :num_outputs], joined[:, num_outputs:].contiguous()
        result = outputs.new_empty(len(samples), *outputs.shape)

        def draw(index: int) -> tuple[Tensor, Tensor]:
            weight = features.new_zeros(features.shape[1], outputs.shape[1])
            bias = outputs.new_zeros(1, outputs.shape[1])
            for deviation in self._deviations(index, prediction.seed).values():
                if deviation.ndim > 1:
                    weight = deviation.flatten(1).T.contiguous().to(features)
                else:
                    bias = deviation[None].to(outputs)
            return weight, bias

        # draws are cached from batch to batch up to 64 MiB
        cacheable = prediction.samples * layer.weight.nbytes <= 2**26
        with torch.autocast(prediction.device.type, enabled=False):
            for position, index in enumerate(samples):
                draw_index = partial(draw, index)
                weight, bias = (
                    prediction.state.get(("deviations", index), draw_index) if cacheable else draw_index()
                )
                result[position] = torch.addmm(outputs + bias, features, weight)
        return self._to_network_layout(result.reshape(len(samples), *shape), axis=2)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, block in enumerate(self.blocks)
            for name, tensor in block.tensors.items()
        }

    def settings(self) -> dict[str, Any]:
        names = ("predictive", "log_evidence", "precisions", "output_layer")
        blocks = [
            {"kind": block.kind, "prior": block.prior, "names": list(block.shapes)} for block in self.blocks
        ]
        return {**{name: getattr(self, name) for name in names}, "blocks": blocks}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        blocks, options = list[CurvatureBlock](), dict(settings)
        block_types = {cls.kind: cls for cls in (DiagonalBlock, FullBlock, KroneckerBlock)}
        for index, saved in enumerate(options.pop("blocks")):
            shapes = {name: point.model.get_parameter(name).shape for name in saved["names"]}
            tensors, prior = select_prefix(state, str(index)), float(saved["prior"])
            blocks.append(block := block_types[saved["kind"]](shapes, tensors, prior))
            check_shapes(block.tensors, block.tensor_shapes)
        return cls(point.model, point.likelihood, blocks, history=point.history, **options)
