"""Densities as modules that ``torch.export`` can trace."""

from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of
from flowbnn.density.density import Density
from flowbnn.errors import FlowBNNError, describe_value, requirement_error
from flowbnn.networks import evaluation_mode
from flowbnn.training.randomness import sampling_context


class DensityGraph(nn.Module):
    """Module from examples to their log-density.

    Args:
        density: Density.
    """

    def __init__(self, density: Density) -> None:
        super().__init__()
        self.network = density

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        return {"log_prob": self.network.log_prob(tensors[0])}


class SampleGraph(nn.Module):
    """Module from draws of the base distribution to examples and their log-density.

    Args:
        density: Density.
    """

    def __init__(self, density: Density) -> None:
        super().__init__()
        self.network = density

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        density, z = self.network, tensors[0]
        flow = flow_of(density)
        x, log_det = flow.transform(z, None)
        log_prob = flow._batch_base(flow.base.log_prob(z)) - flow._batch_log_det(log_det)
        if density.loc is not None and density.scale is not None:
            x, log_prob = density.loc + density.scale * x, log_prob - density.scale.log().sum()
        return {"samples": x, "log_prob": log_prob}


def flow_of(density: Density) -> Any:
    """Returns the flow of a density as a distribution with a base and a transform.

    Raises:
        FlowBNNError: If the distribution has no base, or if its transform draws random numbers.
    """
    flow = density._distribution(None)
    if not hasattr(flow, "base") or not hasattr(flow, "transform"):
        raise _unsupported("a base distribution", flow)
    if flow.transform.stochastic or flow.transform.discrete:
        raise _unsupported("a deterministic transform", flow.transform)
    return flow


def _unsupported(requirement: str, value: Any) -> FlowBNNError:
    """Returns the error about a density whose base noise cannot be an input."""
    hint = "use noise='fixed'"
    return requirement_error("noise='input'", requirement, describe_value(value), hint, argument="noise")


def base_draws(density: Density, seed: int, count: int = 1) -> dict[str, Tensor]:
    """Returns draws of the base distribution, those of ``density.sample(count, seed=seed)``.

    Args:
        density: Density.
        seed: Seed of the draws.
        count: Number of examples.
    """
    with torch.no_grad(), evaluation_mode(density), sampling_context(device_of(density), seed):
        return {"noise": flow_of(density).base.sample((count,))}
