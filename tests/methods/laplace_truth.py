"""Reference curvatures by automatic differentiation, for the tests of the Laplace approximation."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import flowbnn as fb


def batches(inputs: Tensor, targets: Tensor, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def explicit_jacobian(network: nn.Module, names: list[str], inputs: Tensor) -> Tensor:
    """Returns the Jacobian ``[B, C, P]``, in the order of ``names``."""
    network.eval()
    values = {name: dict(network.named_parameters())[name].detach() for name in names}
    jacobian = jacrev(lambda weights: functional_call(network, weights, (inputs,)))(values)
    return torch.cat([jacobian[name].flatten(2) for name in names], 2)


def output_hessian(likelihood: fb.likelihoods.Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the Hessian ``[B, C, C]`` of the negative log-likelihood."""
    hessian = jacrev(jacrev(lambda f, y: -likelihood.log_prob(f[None], y[None])[0]))
    return torch.stack([hessian(f, y) for f, y in zip(outputs.detach(), targets, strict=True)])


def explicit_ggn(
    network: nn.Module,
    names: list[str],
    likelihood: fb.likelihoods.Likelihood,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Returns the generalized Gauss-Newton matrix ``[P, P]``."""
    jacobian = explicit_jacobian(network, names, inputs)
    hessian = output_hessian(likelihood, network(inputs), targets)
    return torch.einsum("ncp,nck,nkq->pq", jacobian, hessian, jacobian)


def covariance(posterior: fb.methods.LaplacePosterior) -> Tensor:
    """Returns the covariance ``[P, P]`` of all weights, in the order of ``posterior.names``."""
    shapes = {name: posterior.mode[name].shape for name in posterior.names}
    size = sum(shape.numel() for shape in shapes.values())
    identity = torch.eye(size, dtype=next(iter(posterior.mode.values())).dtype)
    columns = identity.split([shape.numel() for shape in shapes.values()], 1)
    rows = {
        name: column.reshape(size, 1, *shape)
        for column, (name, shape) in zip(columns, shapes.items(), strict=True)
    }
    roots = torch.cat([block.whiten(rows) for block in posterior.blocks], 2)[:, 0]
    return roots @ roots.T


def flat(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Concatenates draws ``{name: [S, ...]}`` into ``[S, P]``."""
    return torch.cat([values[name].flatten(1) for name in names], 1)
