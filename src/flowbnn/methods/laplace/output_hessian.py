r"""The Hessian of the loss in the network's outputs, :math:`\Lambda = -\nabla^2_f \log p(y \mid f)`, or an estimate of it.

It is never written out for all classes at once: callers need its sum over examples, its diagonal, one row, or some columns of a square
root.
"""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

__all__ = ["Independent", "OuterProducts", "OutputHessian", "Softmax", "check_likelihood", "output_hessian"]


class OutputHessian:
    """Matrices ``[C, C]``, one for each of ``b`` examples; ``count`` columns of a square root make each up."""

    count: int

    def total(self) -> Tensor:
        """The sum over examples, ``[C, C]``."""
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        """``[b, C]``."""
        raise NotImplementedError

    def row(self, index: int) -> Tensor:
        """One row of each, ``[b, C]``."""
        raise NotImplementedError

    def columns(self, low: int, high: int) -> Tensor:
        """Columns of a square root, ``[b, high - low, C]``."""
        raise NotImplementedError


class Softmax(OutputHessian):
    r""":math:`\mathrm{diag}(p) - p p^T`; the columns of a root are :math:`\sqrt{p_k} (e_k - p)`.

    >>> p = torch.tensor([[0.2, 0.3, 0.5]])
    >>> root = Softmax(p).columns(0, 3)[0].T
    >>> torch.allclose(root @ root.T, p[0].diag() - p.T @ p)
    True
    """

    def __init__(self, probabilities: Tensor) -> None:
        self.p, self.count = probabilities, probabilities.shape[1]

    def total(self) -> Tensor:
        return self.p.sum(0).diag() - self.p.T @ self.p

    def diagonal(self) -> Tensor:
        return self.p * (1.0 - self.p)

    def row(self, index: int) -> Tensor:
        row = -self.p[:, index, None] * self.p
        row[:, index] += self.p[:, index]
        return row

    def columns(self, low: int, high: int) -> Tensor:
        roots = self.p[:, low:high].sqrt()
        columns = (-roots).unsqueeze(2) * self.p.unsqueeze(1)
        index = torch.arange(high - low, device=self.p.device)
        columns[:, index, low + index] += roots
        return columns


class Independent(OutputHessian):
    """A diagonal Hessian ``[b, C]``: every output has a target of its own."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.count = values, values.shape[1]

    def total(self) -> Tensor:
        return self.values.sum(0).diag()

    def diagonal(self) -> Tensor:
        return self.values

    def row(self, index: int) -> Tensor:
        row = torch.zeros_like(self.values)
        row[:, index] = self.values[:, index]
        return row

    def columns(self, low: int, high: int) -> Tensor:
        columns = self.values.new_zeros(len(self.values), high - low, self.values.shape[1])
        index = torch.arange(high - low, device=self.values.device)
        columns[:, index, low + index] = self.values[:, low:high].sqrt()
        return columns


class OuterProducts(OutputHessian):
    """Sums of outer products of gradients ``[b, M, C]``."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients, self.count = gradients, gradients.shape[1]

    def total(self) -> Tensor:
        flat = self.gradients.flatten(0, 1)
        return flat.T @ flat

    def diagonal(self) -> Tensor:
        return self.gradients.square().sum(1)

    def row(self, index: int) -> Tensor:
        return (self.gradients[..., index : index + 1] * self.gradients).sum(1)

    def columns(self, low: int, high: int) -> Tensor:
        return self.gradients[:, low:high]


def check_likelihood(likelihood: Likelihood, predictive: str) -> None:
    """Refuse a likelihood whose Hessian in the outputs is not known, or that has no probit approximation."""
    if not isinstance(likelihood, Categorical | Bernoulli | Gaussian) or (
        isinstance(likelihood, Gaussian) and likelihood.noise == "predicted"
    ):
        raise FlowBNNError(
            f"Laplace takes a Categorical, a Bernoulli or a Gaussian likelihood with known or learned noise, not {likelihood!r}; "
            "DeepEnsemble and SWAG take noise='predicted'",
            kind="likelihood",
        )
    if predictive == "probit" and isinstance(likelihood, Gaussian):
        raise FlowBNNError(
            "predictive='probit' is for classes; regression takes 'linearized'", kind="likelihood"
        )


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """For outputs ``[b, C]``: exact (``"ggn"``), of the observed targets (``"fisher"``), or of drawn ones (``"sampled"``)."""
    if isinstance(likelihood, Categorical):
        p = outputs.softmax(1)
        if kind == "ggn":
            return Softmax(p)
        if kind == "sampled":
            drawn = torch.rand(len(p), 1, generator=generator, dtype=torch.float64).to(p.device)
            targets = (p.double().cumsum(1) < drawn).sum(1).clamp_max(p.shape[1] - 1)
        gradient = p.clone()
        gradient[torch.arange(len(p), device=p.device), targets.to(p.device).long()] -= 1.0
        return OuterProducts(gradient.unsqueeze(1))
    if isinstance(likelihood, Bernoulli):
        p = outputs.sigmoid()
        if kind == "ggn":
            return Independent(p * (1.0 - p))
        truth = targets.reshape(p.shape).to(p)
        if kind == "sampled":
            truth = (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        return OuterProducts((p - truth).unsqueeze(1))
    assert isinstance(likelihood, Gaussian)
    mean, variance = likelihood.moments(outputs)
    if kind == "ggn":
        return Independent(1.0 / variance)
    if kind == "sampled":
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return OuterProducts((noise * variance.rsqrt()).unsqueeze(1))
    return OuterProducts(((mean - targets.to(mean).reshape(mean.shape)) / variance).unsqueeze(1))
