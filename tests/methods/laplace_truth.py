"""Curvatures written out by automatic differentiation, to hold a Laplace approximation against."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import flowbnn as fb


def batches(inputs: Tensor, targets: Tensor, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def explicit_jacobian(network: nn.Module, names: list[str], inputs: Tensor) -> Tensor:
    """``[B, C, P]`` in the order of ``names``."""
    network.eval()
    values = {name: dict(network.named_parameters())[name].detach() for name in names}
    found = jacrev(lambda some: functional_call(network, some, (inputs,)))(values)
    return torch.cat([found[name].flatten(2) for name in names], 2)


def output_hessian(likelihood: fb.likelihoods.Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """``[B, C, C]`` of minus the log-likelihood."""
    hessian = jacrev(jacrev(lambda f, y: -likelihood.log_prob(f[None], y[None])[0]))
    return torch.stack([hessian(f, y) for f, y in zip(outputs.detach(), targets, strict=True)])


def explicit_ggn(
    network: nn.Module,
    names: list[str],
    likelihood: fb.likelihoods.Likelihood,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    jacobian = explicit_jacobian(network, names, inputs)
    hessian = output_hessian(likelihood, network(inputs), targets)
    return torch.einsum("ncp,nck,nkq->pq", jacobian, hessian, jacobian)


def covariance(posterior: fb.methods.LaplacePosterior) -> Tensor:
    """``[P, P]`` of all its weights, in the order of its names."""
    shapes = {name: posterior.centre[name].shape for name in posterior.names}
    size = sum(shape.numel() for shape in shapes.values())
    one = torch.eye(size, dtype=next(iter(posterior.centre.values())).dtype)
    parts = one.split([shape.numel() for shape in shapes.values()], 1)
    rows = {
        name: part.reshape(size, 1, *shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }
    roots = torch.cat([block.roots(rows) for block in posterior.blocks], 2)[:, 0]
    return roots @ roots.T


def flat(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """``[S, P]`` of draws ``{name: [S, ...]}``."""
    return torch.cat([values[name].flatten(1) for name in names], 1)
