"""Independent Gaussians over the weights of a network: their posterior, and the network that draws them in training."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, check_name, check_shape, value_error
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.variational.weight_noise import SampledNetwork, flipout_noise, local_noise
from flowbnn.methods.variational.weight_selection import Estimator
from flowbnn.noise.contexts import current_row_shard
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.files import select_prefix
from flowbnn.posterior.weights import WeightPosterior, generator_of, named_parts
from flowbnn.training import History


class GaussianWeightPosterior(WeightPosterior):
    """Independent Gaussians over the weights of a network.

    The network holds the means. :meth:`sample` returns a copy with sampled weights.

    Args:
        model: Network with the weights at their means.
        likelihood: Observation model of the targets.
        std: Standard deviations by parameter name; all other parameters are deterministic.
        history: Training record.

    >>> import flowbnn as fb
    >>> layer = nn.Linear(2, 1)
    >>> posterior = GaussianWeightPosterior(layer, fb.likelihoods.Gaussian(noise=0.1), {"weight": torch.full((1, 2), 0.5)})
    >>> posterior.draws(3, seed=0)["weight"].shape, posterior.names
    (torch.Size([3, 1, 2]), ['weight'])
    """

    kind: ClassVar[str] = "gaussian weights"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        std: Mapping[str, Tensor],
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        parameters = dict(model.named_parameters())
        if not std:
            raise FlowBNNError("std is empty", argument="std")
        for name, value in std.items():
            check_name(name, parameters, "parameter", kind="name", argument="std")
            check_shape(f"std['{name}']", value, parameters[name].shape, argument="std")
            if not bool((value >= 0).all()):
                lowest = f"{float(value.min()):.3g}"
                raise value_error(f"std['{name}']", "non-negative", lowest, kind="value", argument="std")
        # the order of the network, because draws depend on the order and files do not store it
        self.shapes = {name: parameters[name].shape for name in parameters if name in std}
        self.flat_mean, self.flat_std = self.flatten(parameters), self.flatten(std)
        self.training_weights: GaussianWeights | None = None  # set during training

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Means by parameter name."""
        return named_parts(self.flat_mean, self.shapes)

    @property
    def std(self) -> dict[str, Tensor]:
        """Standard deviations by parameter name."""
        return named_parts(self.flat_std, self.shapes)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenates parameters into one vector."""
        return torch.cat([values[name].detach().flatten() for name in self.shapes])

    def update_from_training(self) -> None:
        """Copies the current means and standard deviations during training."""
        weights = self.training_weights
        if weights is not None:
            self.flat_mean = self.flatten(named_parts(weights.mean, weights.shapes))
            self.flat_std = self.flatten(named_parts(weights.log_std.exp(), weights.shapes))

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        prediction.state.get("training weights", self.update_from_training)
        return super().outputs(inputs, samples, prediction)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        mean = self.flat_mean
        normal = standard_normal(mean.shape, mean.dtype, mean.device, generator_of(seed, index, mean.device))
        return named_parts(torch.addcmul(mean, self.flat_std, normal), self.shapes)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        flat = torch.cat([values[name].flatten() for name in self.shapes]).to(self.flat_mean)
        error = (flat - self.flat_mean) / self.flat_std
        constant = 0.5 * len(flat) * math.log(2.0 * math.pi)
        return -0.5 * error.square().sum() - self.flat_std.log().sum() - constant

    def state(self) -> dict[str, Tensor]:
        return {f"std.{name}": value.contiguous() for name, value in self.std.items()}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, select_prefix(state, "std"), point.history)


class GaussianWeights(nn.Module):
    r"""Means and log standard deviations of all random weights, concatenated into two vectors.

    Drawing and the KL of all layers then take few operations on long vectors.

    Args:
        mean: Means by parameter name.
        std: Standard deviations by parameter name.
        estimators: Estimators by parameter name; plain reparameterization for all others.
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        estimators: Mapping[str, Estimator] | None = None,
    ) -> None:
        super().__init__()
        estimators = {name: (estimators or {}).get(name, "reparameterization") for name in mean}
        order: list[str] = []
        for estimator in ("reparameterization", "flipout", "local"):
            order += [name for name in mean if estimators[name] == estimator]
        sizes = {name: value.numel() for name, value in mean.items()}
        self.shapes = {name: mean[name].shape for name in order}
        # the first weights are drawn; weights with flipout or local reparameterization stay at their means
        self.num_drawn = sum(sizes[name] for name in mean if estimators[name] == "reparameterization")
        self.num_normals = self.num_drawn + sum(sizes[name] for name in mean if estimators[name] == "flipout")
        self.mean = nn.Parameter(torch.cat([mean[name].detach().flatten() for name in order]))
        self.log_std = nn.Parameter(torch.cat([std[name].detach().flatten() for name in order]).log())

    def forward(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draws the weights of a forward pass.

        Returns:
            The weights of the network, which are draws, or means if noise is added to the outputs. Then the tensors for this noise,
            which are deviations from the mean for Flipout and standard deviations for local reparameterization.
        """
        scale, mean = self.log_std.exp(), self.mean
        if self.num_normals:
            normal = standard_normal(torch.Size((self.num_normals,)), mean.dtype, mean.device)
            if self.num_normals < len(mean):
                normal = torch.cat([normal, torch.ones_like(mean[self.num_normals :])])
            scale = scale * normal
        if self.num_drawn == len(mean):
            return named_parts(mean + scale, self.shapes), {}
        count = self.num_drawn
        values = torch.cat([mean[:count] + scale[:count], mean[count:]])
        return named_parts(values, self.shapes), named_parts(scale, self.shapes)

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """Returns the entropy of all weights."""
        return self.log_std.sum() + 0.5 * self.mean.numel() * (1.0 + math.log(2.0 * math.pi))


class GaussianNetwork(SampledNetwork):
    """Network with Gaussian weights, drawn in every forward pass.

    Args:
        network: Network.
        weights: Distribution of the weights.
        estimators: Estimators of the layers with noise on their outputs, ``"local"`` or ``"flipout"``.
    """

    def __init__(self, network: nn.Module, weights: GaussianWeights, estimators: Mapping[str, str]) -> None:
        super().__init__(network, weights.shapes)
        self.weights = weights
        names = {id(p): name for name, p in network.named_parameters()}
        for layer, estimator in estimators.items():
            module = network.get_submodule(layer)
            parameters = {key: names[id(p)] for key, p in module._parameters.items() if p is not None}
            noise = flipout_noise if estimator == "flipout" else local_noise
            hook = self._noise_hook(parameters["weight"], parameters.get("bias", ""), noise)
            self.hooks.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _noise_hook(self, weight: str, bias: str, noise: Any) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            tensors = self.hook_tensors
            if tensors is None:
                return None
            x = args[0] if args else kwargs["input"]
            added = noise(module, x, tensors[weight], tensors.get(bias), current_row_shard())
            return output + added.to(output.dtype)

        return hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values, hook_tensors = self.weights()
        return self.forward_with(values, hook_tensors, *args, **kwargs)
