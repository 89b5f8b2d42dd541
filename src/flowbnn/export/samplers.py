"""All sampled networks of a prediction as one module, which ``torch.export`` can trace.

A :class:`SampledNetworks` holds the draws of K samples and computes the outputs ``[K, B, ...]`` of a batch from them. Noise and dropout
masks multiply the rows ``[K * B, ...]`` of one network. Sampled weights are stacked, and ``torch.vmap`` runs the network over them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import apply, call, has_row_axis, tensors_of
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import append_log_variance
from flowbnn.methods.calibrators.base import CalibratedPosterior
from flowbnn.methods.dropout import DropoutMasks, DropoutPosterior, MaskedDropout, example_axes
from flowbnn.methods.laplace.posterior import LaplacePosterior
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.contexts import MappedDraws, NoiseContext, RowCountChanged, forward_sample
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import forward_with_weights
from flowbnn.posterior.mixture import MixturePosterior, natural_outputs
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.prediction import clone_sharing_tensors
from flowbnn.posterior.weights import MemberPosterior, WeightPosterior


class SampledNetworks(nn.Module):
    """Base class for the sampled networks of a prediction. Subclasses define ``forward(inputs, draws)``.

    Args:
        network: Network in evaluation mode.
        draws: Weights, noise or masks of the samples, ``[K, ...]``, by name.
        samples: Number K of samples.
    """

    def __init__(self, network: nn.Module, draws: Mapping[str, Tensor], samples: int) -> None:
        super().__init__()
        self.network, self.draws, self.samples = network, dict(draws), samples

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        """Returns outputs ``[K, B, ...]``.

        Args:
            inputs: Inputs of B examples.
            draws: Draws by name, such as the attribute ``draws``.
        """
        raise NotImplementedError


def batch_rows(inputs: Any) -> Any:
    """Returns the number of rows of inputs, which is symbolic in a graph."""
    return next(tensor.shape[0] for tensor in tensors_of(inputs) if tensor.ndim)


def repeat_rows(tensor: Tensor, samples: int, axis: int = 0) -> Tensor:
    """Returns K copies of the rows of a tensor, those of each sample adjacent: ``[..., B, ...]`` becomes ``[..., K * B, ...]``.

    >>> repeat_rows(torch.tensor([1, 2]), 2)
    tensor([1, 2, 1, 2])
    """
    shape = list(tensor.shape)
    expanded = tensor.unsqueeze(axis).expand(*shape[:axis], samples, *shape[axis:])
    return expanded.reshape(*shape[:axis], samples * shape[axis], *shape[axis + 1 :])


def spread(draws: Tensor, rows: Any, axis: int = 0) -> Tensor:
    """Returns draws ``[K, ...]`` for K blocks of rows, ``[K * rows, ...]``.

    Args:
        draws: Draws.
        rows: Number of rows of each block.
        axis: Axis of the rows in the result. The draws have size 1 there.

    >>> spread(torch.tensor([[1], [2]]), 2, axis=0)
    tensor([1, 1, 2, 2])
    """
    moved = draws.movedim(0, axis)
    shape = list(moved.shape)
    expanded = moved.expand(*shape[: axis + 1], rows, *shape[axis + 2 :])
    return expanded.reshape(*shape[:axis], shape[axis] * rows, *shape[axis + 2 :])


def split_samples(outputs: Tensor, samples: int, rows: Any) -> Tensor:
    """Returns outputs ``[K, B, ...]`` of a network that ran on K blocks of B rows, or on B rows that no draw has changed.

    Raises:
        RowCountChanged: If the network returned another number of rows.
    """
    if outputs.shape[0] == samples * rows:
        return outputs.reshape(samples, rows, *outputs.shape[1:])
    if outputs.shape[0] == rows:
        return outputs.unsqueeze(0).expand(samples, *outputs.shape)
    raise RowCountChanged(f"the network returned {outputs.shape[0]} rows")


# -------------------- noise


class NoiseRows(SampledNetworks):
    """Sampled networks with multiplicative noise: each block of rows has the noise of one sample.

    Args:
        posterior: Posterior with noise.
        inputs: Few examples on the device of the network.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
        late: If True, rows are repeated at the first noise, so that what comes before is computed once. Networks in which noisy and
            other rows meet need False.
    """

    def __init__(
        self, posterior: NoisePosterior, inputs: Any, prediction: Prediction, samples: int, late: bool
    ) -> None:
        layers, trace = noise_layers(posterior.model), prediction.measure(inputs)
        modes = make_noise_modes(layers, "shared", prediction.samples, prediction.seed)
        shared = SharedDraws(list(layers.values()), modes, prediction.device)
        tensors = shared.tensors(trace.noise_shapes, 0, samples)
        names = {layer.key: name or "network" for name, layer in layers.items()}
        self_keys, draws = {}, {}
        for (key, number), tensor in tensors.items():
            name = f"noise.{names[key]}" + (f".{number}" if number else "")
            self_keys[name], draws[name] = (key, number), tensor.detach().clone()
        super().__init__(clone_sharing_tensors(prediction.model), draws, samples)
        self.keys, self.modes, self.late = self_keys, modes, late
        self.layers = {name: layer for name, layer in layers.items() if layer.key in names}
        for module in self.network.modules():  # their hooks stay; the file does not need their parameters
            for name, child in list(module._modules.items()):
                if isinstance(child, Noise) and not child.is_constant:
                    del module._modules[name]

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        rows = batch_rows(inputs)
        total = self.samples * rows
        mapped = {key: spread(draws[name].unsqueeze(1), rows) for name, key in self.keys.items()}
        with ExitStack() as stack:
            if self.late:
                self._repeat_at_noise(stack, rows, total)
            else:
                inputs = apply(inputs, partial(_repeat_batch, rows=rows, samples=self.samples))
            stack.enter_context(NoiseContext(self.modes, mapped=MappedDraws(mapped, total), sharded=False))
            outputs = call(self.network, inputs)
        return split_samples(outputs, self.samples, rows)

    def _repeat_at_noise(self, stack: ExitStack, rows: Any, total: Any) -> None:
        """Registers hooks that repeat the rows that a layer with noise gets, or returns if its noise multiplies the output."""
        for name, layer in self.layers.items():
            axis, module = layer.layout.batch_axis, self.network.get_submodule(name)
            if axis is None:
                raise RowCountChanged(f"layer '{name}' has no batch axis")
            grow = partial(_grow, rows=rows, samples=self.samples, axis=axis)
            if layer.layout.side == "output" or layer.passes_through:
                hook = partial(_grow_output, grow)
                stack.enter_context(module.register_forward_hook(hook, prepend=True))
            else:
                hook = partial(_grow_input, grow)
                stack.enter_context(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))


def _repeat_batch(tensor: Tensor, rows: Any, samples: int) -> Tensor:
    return repeat_rows(tensor, samples) if tensor.ndim and tensor.shape[0] == rows else tensor


def _grow(value: Any, rows: Any, samples: int, axis: int) -> Any:
    """Returns K copies of the rows of a tensor that has B of them, and other values unchanged."""
    if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == rows:
        return repeat_rows(value, samples, axis)
    return value


def _grow_input(grow: Callable[[Any], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    copies: dict[int, Any] = {}  # a tensor that is passed twice (self-attention) stays one tensor

    def copy(value: Any) -> Any:
        return copies.setdefault(id(value), grow(value)) if isinstance(value, Tensor) else value

    return tuple(copy(value) for value in args), {name: copy(value) for name, value in kwargs.items()}


def _grow_output(grow: Callable[[Any], Any], module: nn.Module, args: Any, output: Any) -> Any:
    return grow(output)


class NoiseMaps(NoiseRows):
    """Sampled networks with multiplicative noise, by vmap over the draws: correct even if the rows of a batch interact."""

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        keys = tuple(self.keys.values())

        def one_sample(vectors: list[Tensor]) -> Tensor:
            return forward_sample(self.network, keys, vectors, inputs)

        return torch.vmap(one_sample)([draws[name] for name in self.keys])


# -------------------- dropout


class DropoutRows(SampledNetworks):
    """Sampled networks with dropout masks: each block of rows has the masks of one sample.

    Args:
        posterior: Posterior with dropout layers.
        inputs: Few examples on the device of the network.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
        late: If True, rows are repeated at the first dropout layer.
    """

    def __init__(
        self, posterior: DropoutPosterior, inputs: Any, prediction: Prediction, samples: int, late: bool
    ) -> None:
        network = clone_sharing_tensors(prediction.model)
        axes = posterior.axes if posterior.axes is not None else example_axes(network, inputs)
        masks, drawn = DropoutMasks(network, axes), dict[str, list[Tensor]]()
        names = {module: name for name, module in network.named_modules()}
        with masks:
            for index in range(samples):
                masks.select(prediction.seed, index)
                call(network, inputs)
                for layer, masked in masks.layers.items():
                    for (number, *_), mask in masked.masks.items():
                        drawn.setdefault(f"mask.{names[layer]}.{number}", []).append(mask)
        super().__init__(network, {name: torch.stack(each) for name, each in drawn.items()}, samples)
        self.late, self.masks = late, DropoutMasks(network, axes)
        self.masks.layers = {
            layer: RowMasks(layer, names[layer], axes.get(names[layer], [])) for layer in self.masks.layers
        }

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        rows = batch_rows(inputs)
        for masked in self.masks.layers.values():
            masked.draws, masked.rows, masked.samples = draws, rows, self.samples
        if not self.late:
            inputs = apply(inputs, partial(_repeat_batch, rows=rows, samples=self.samples))
        with self.masks:
            return split_samples(call(self.network, inputs), self.samples, rows)


class RowMasks(MaskedDropout):
    """Forward hook that applies the masks of K samples to K blocks of rows.

    Args:
        layer: Dropout layer.
        name: Name of the layer.
        axes: Axis of the examples at each call of the layer.
    """

    draws: Mapping[str, Tensor]
    rows: Any
    samples: int

    def __init__(self, layer: nn.Module, name: str, axes: Any) -> None:
        super().__init__(layer, axes)
        self.name = name

    def __call__(self, layer: nn.Module | None, args: Any, x: Tensor) -> Tensor:
        axis = self.example_axis()
        if axis is None:
            raise RowCountChanged(f"layer '{self.name}' has no batch axis")
        x = _grow(x, self.rows, self.samples, axis)
        if x.shape[axis] != self.samples * self.rows:
            raise RowCountChanged(f"layer '{self.name}' has {x.shape[axis]} rows")
        return super().__call__(layer, args, x)

    def _mask(self, number: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
        axis = self.axes[number] if number < len(self.axes) else 0
        return spread(self.draws[f"mask.{self.name}.{number}"], self.rows, axis or 0).to(x)


# -------------------- weights


class StackedWeights(SampledNetworks):
    """Sampled networks with weights of their own, which are stacked, by vmap over them.

    Args:
        posterior: Posterior over weights.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
    """

    def __init__(self, posterior: WeightPosterior, prediction: Prediction, samples: int) -> None:
        sets = [
            {name: value.detach().clone() for name, value in weights.items()}
            for weights in posterior.stream(range(samples), prediction)
        ]
        draws = {f"weights.{name}": torch.stack([weights[name] for weights in sets]) for name in sets[0]}
        super().__init__(clone_sharing_tensors(prediction.model), draws, samples)
        for module in self.network.modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None and any(tensor is used for used in _tensors(posterior, sets[0])):
                        holder[name] = _placeholder(tensor)

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        def one_sample(weights: dict[str, Tensor]) -> Tensor:
            return forward_with_weights(self.network, weights, inputs)

        return torch.vmap(one_sample)({name.removeprefix("weights."): value for name, value in draws.items()})


class WeightLoop(StackedWeights):
    """Sampled networks with weights of their own, one after the other, for networks that vmap cannot run."""

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        named = {name.removeprefix("weights."): value for name, value in draws.items()}
        sets = ({name: value[index] for name, value in named.items()} for index in range(self.samples))
        return torch.stack([forward_with_weights(self.network, weights, inputs) for weights in sets])


def _tensors(posterior: WeightPosterior, names: Iterable[str]) -> list[Tensor]:
    """Returns the tensors of the network that differ between samples."""
    tensors = {
        **dict(posterior.model.named_parameters(remove_duplicate=False)),
        **dict(posterior.model.named_buffers(remove_duplicate=False)),
    }
    return [tensors[name] for name in names]


def _placeholder(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape and class that takes no space in a file, because sampled weights replace it."""
    empty = torch.zeros(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class NetworkList(SampledNetworks):
    """Sampled networks one after the other, each with all its weights: serves every posterior that has ``networks``.

    Args:
        networks: Sampled networks.
    """

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__(nn.ModuleList(networks), {}, len(networks))

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([call(network, inputs) for network in self.network])  # type: ignore[union-attr]


class OutputLayer(SampledNetworks):
    r"""Sampled output layers of a Laplace approximation, :math:`f(x) + \Delta \phi(x)`, after one pass of the network.

    Args:
        posterior: Laplace approximation of the output layer.
        prediction: Prediction with the seed and the number of samples.
        samples: Number of samples.
    """

    def __init__(self, posterior: LaplacePosterior, prediction: Prediction, samples: int) -> None:
        deviations = [posterior._deviations(index, prediction.seed) for index in range(samples)]
        draws = {f"deviation.{name}": torch.stack([d[name] for d in deviations]) for name in deviations[0]}
        super().__init__(clone_sharing_tensors(prediction.model), draws, samples)
        self.posterior = posterior

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        outputs, features = self.posterior._outputs_and_features(self.network, inputs)
        result = outputs.unsqueeze(0)
        for deviation in draws.values():
            if deviation.ndim > 2:
                result = result + torch.matmul(features, deviation.mT)
            else:
                result = result + deviation.unsqueeze(1)
        return result


class Deterministic(SampledNetworks):
    """One network without draws, whose outputs serve all samples.

    Args:
        network: Network.
        forward: Function of the network and the inputs that returns the outputs.
    """

    def __init__(self, network: nn.Module, forward: Callable[[nn.Module, Any], Tensor] = call) -> None:
        super().__init__(network, {}, 1)
        self.function = forward

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        return self.function(self.network, inputs).unsqueeze(0)


# -------------------- posteriors of posteriors


class AppendedNoise(SampledNetworks):
    """Outputs of members with the log-variance of the observation noise of each member.

    Args:
        inner: Sampled networks.
        log_noise: Logarithms ``[K, D]`` of the noise.
    """

    def __init__(self, inner: SampledNetworks, log_noise: Tensor) -> None:
        super().__init__(inner, inner.draws, inner.samples)
        self.log_noise = log_noise

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        means = self.network(inputs, draws)
        return append_log_variance(means, self.log_noise.to(means).unsqueeze(1))


class MixtureNetworks(SampledNetworks):
    """Sampled networks of the members of a mixture, in the order of its schedule.

    Args:
        posterior: Mixture.
        members: Sampled networks of each member that the schedule uses, by the index of the member.
        samples: Number of samples.
    """

    def __init__(
        self, posterior: MixturePosterior, members: Mapping[int, SampledNetworks], samples: int
    ) -> None:
        draws = {
            f"member.{index}.{name}": value
            for index, member in members.items()
            for name, value in member.draws.items()
        }
        super().__init__(
            nn.ModuleDict({str(index): member for index, member in members.items()}), draws, samples
        )
        self.posteriors, self.schedule = posterior.members, posterior.schedule(samples)
        self.likelihoods = nn.ModuleList(member.likelihood for member in posterior.members)

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        values: dict[int, Tensor] = {}
        for index, member in self.network.items():  # type: ignore[operator]
            prefix = f"member.{index}."
            own = {name.removeprefix(prefix): v for name, v in draws.items() if name.startswith(prefix)}
            values[int(index)] = natural_outputs(self.posteriors[int(index)]._predictive(member(inputs, own)))
        rows = [values[index][number if values[index].shape[0] > 1 else 0] for index, number in self.schedule]
        return torch.stack(rows)


# -------------------- choice


def make_samplers(
    posterior: Posterior, inputs: Any, prediction: Prediction, samples: int
) -> list[Callable[[], SampledNetworks]]:
    """Returns functions that make the sampled networks of a posterior, the most efficient first.

    Args:
        posterior: Posterior of any method.
        inputs: Few examples on the device of the network.
        prediction: Prediction of the posterior, with the seed and the number of samples.
        samples: Number of samples to make, at most those of the prediction.
    """
    if isinstance(posterior, CalibratedPosterior):
        return make_samplers(posterior.posterior, inputs, prediction, samples)
    if isinstance(posterior, MixturePosterior):
        return [partial(_make_mixture, posterior, inputs, prediction, samples)]
    if isinstance(posterior, NoisePosterior):
        by_rows = [partial(NoiseRows, posterior, inputs, prediction, samples, late) for late in (True, False)]
        interact = not has_row_axis(inputs) or prediction.measure(inputs).dependence == "rows"
        return [
            *([] if interact else by_rows),
            partial(NoiseMaps, posterior, inputs, prediction, samples, False),
        ]
    if isinstance(posterior, DropoutPosterior):
        by_rows = [
            partial(DropoutRows, posterior, inputs, prediction, samples, late) for late in (True, False)
        ]
        return [*by_rows, lambda: NetworkList(posterior.networks(samples, prediction.seed))]
    if isinstance(posterior, LaplacePosterior) and posterior.predictive != "sampled":
        return [partial(_make_laplace, posterior, prediction, samples)]
    if isinstance(posterior, LaplacePosterior) and posterior.output_layer is not None:
        return [partial(OutputLayer, posterior, prediction, samples)]
    if isinstance(posterior, WeightPosterior):
        return [
            partial(_make_stacked, kind, posterior, prediction, samples)
            for kind in (StackedWeights, WeightLoop)
        ]
    if isinstance(posterior, PointPosterior):
        return [lambda: Deterministic(clone_sharing_tensors(prediction.model))]
    return [lambda: NetworkList(posterior.networks(samples, prediction.seed))]


def _make_laplace(posterior: LaplacePosterior, prediction: Prediction, samples: int) -> SampledNetworks:
    """Returns the networks of a Laplace approximation that needs no derivatives."""
    if posterior.output_layer is None:
        text = f"a {posterior.predictive} Laplace approximation needs derivatives; export posterior.use('sampled')"
        raise FlowBNNError(text, kind="unsupported", argument="model")
    if posterior.predictive == "probit":
        return Deterministic(clone_sharing_tensors(prediction.model), posterior._probit)
    return OutputLayer(posterior, prediction, samples)


def _make_stacked(
    kind: type[StackedWeights], posterior: WeightPosterior, prediction: Prediction, samples: int
) -> SampledNetworks:
    """Returns the networks of a posterior over weights, with the observation noise of its members if they have it."""
    networks = kind(posterior, prediction, samples)
    if not isinstance(posterior, MemberPosterior) or posterior.log_noise is None:
        return networks
    seed = prediction.options.seed
    chosen = [posterior.chosen(index, prediction.samples, seed) for index in range(samples)]
    return AppendedNoise(networks, posterior.log_noise[chosen])


def _make_mixture(
    posterior: MixturePosterior, inputs: Any, prediction: Prediction, samples: int
) -> SampledNetworks:
    """Returns the networks of the members of a mixture, each by the first kind that runs."""
    members: dict[int, SampledNetworks] = {}
    schedule = posterior.schedule(samples)
    for index, member in enumerate(posterior.members):
        numbers = [number for owner, number in schedule if owner == index]
        if numbers:
            count = 1 if member.default_samples == 1 else max(numbers) + 1
            with Prediction(member.model, prediction.options, samples, member.cache) as inner:
                members[index] = _first_that_runs(make_samplers(member, inputs, inner, count), inputs)
    return MixtureNetworks(posterior, members, samples)


def _first_that_runs(makers: Sequence[Callable[[], SampledNetworks]], inputs: Any) -> SampledNetworks:
    """Returns the first sampled networks that run on the inputs. The last error is raised if none do."""
    for make in makers[:-1]:
        try:
            sampler = make()
            sampler(inputs, sampler.draws)
            return sampler
        except Exception:  # a network whose rows are not those of its inputs
            continue
    return makers[-1]()
