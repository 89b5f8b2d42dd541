"""All sampled networks of a prediction as one module, which ``torch.export`` can trace, for every kind of posterior.

Noise and dropout masks multiply the rows of one network (:mod:`flowbnn.export.blocks`). Sampled weights are stacked, and
``torch.vmap`` runs the network over them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, has_row_axis
from flowbnn.errors import requirement_error
from flowbnn.export.blocks import DropoutRows, NoiseLoop, NoiseRows, SampledNetworks
from flowbnn.likelihoods import append_log_variance
from flowbnn.methods.calibrators.base import CalibratedPosterior
from flowbnn.methods.dropout import DropoutPosterior
from flowbnn.methods.laplace.posterior import LaplacePosterior
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import forward_with_weights
from flowbnn.posterior.gated import GatedPosterior
from flowbnn.posterior.mixture import MixturePosterior, natural_outputs
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.prediction import clone_sharing_tensors
from flowbnn.posterior.weights import MemberPosterior, PointPosterior, WeightPosterior

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
                    if tensor is not None and any(tensor is other for other in _tensors(posterior, sets[0])):
                        holder[name] = _placeholder(tensor)  # type: ignore[assignment]

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
        return torch.stack([call(network, inputs) for network in self.network])  # type: ignore[attr-defined]


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
        log_noise: Logarithms ``[K, D]`` of the noise, which belong to the draws.
    """

    def __init__(self, inner: SampledNetworks, log_noise: Tensor) -> None:
        super().__init__(inner, {**inner.draws, "log_noise": log_noise.clone()}, inner.samples)

    def forward(self, inputs: Any, draws: Mapping[str, Tensor]) -> Tensor:
        means = self.network(inputs, {name: value for name, value in draws.items() if name != "log_noise"})
        return append_log_variance(means, draws["log_noise"].to(means).unsqueeze(1))


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
            member_draws = {
                name.removeprefix(prefix): v for name, v in draws.items() if name.startswith(prefix)
            }
            values[int(index)] = natural_outputs(
                self.posteriors[int(index)]._predictive(member(inputs, member_draws))
            )
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
    if isinstance(posterior, CalibratedPosterior | GatedPosterior):
        return make_samplers(posterior.posterior, inputs, prediction, samples)
    if isinstance(posterior, MixturePosterior):
        return [partial(_make_mixture, posterior, inputs, prediction, samples)]
    if isinstance(posterior, NoisePosterior):
        by_rows = [
            partial(NoiseRows, posterior, inputs, prediction, samples, shares_prefix)
            for shares_prefix in (True, False)
        ]
        interact = not has_row_axis(inputs) or prediction.measure(inputs).dependence == "rows"
        return [
            *([] if interact else by_rows),
            partial(NoiseLoop, posterior, inputs, prediction, samples),
        ]
    if isinstance(posterior, DropoutPosterior):
        masked = [
            partial(DropoutRows, posterior, inputs, prediction, samples, shares_prefix)
            for shares_prefix in (True, False)
        ]
        return [*masked, lambda: NetworkList(posterior.networks(samples, prediction.seed))]
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
    jacobian = posterior.predictive == "probit" and posterior.blocks[0].kind == "full"
    if posterior.output_layer is None or jacobian:
        hint = "export posterior.use('sampled')"
        raise requirement_error(
            f"predictive='{posterior.predictive}'", "derivatives", hint=hint, argument="model"
        )
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
    chosen = posterior.member_indices(prediction.samples, seed)[:samples]
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
