r"""The Hessian of the loss in the network's outputs, :math:`\Lambda = -\nabla^2_f \log p(y \mid f)`, or an estimate of it.

It is never written out for all classes at once: callers need its sum over examples, its diagonal, one row, or some columns of a square
root.
"""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood


class Exact:
    r""":math:`\mathrm{diag}(v)` for outputs with targets of their own, :math:`\mathrm{diag}(p) - p p^T` for a softmax.

    The columns of a root of the latter are :math:`\sqrt{p_k} (e_k - p)`. The values are ``[b, C]``.
    """

    def __init__(self, values: Tensor, softmax: bool = False) -> None:
        self.values, self.softmax, self.count = values, softmax, values.shape[1]

    def total(self) -> Tensor:
        """The sum over examples, ``[C, C]``."""
        total = self.values.sum(0).diag()
        return total - self.values.T @ self.values if self.softmax else total

    def diagonal(self) -> Tensor:
        """``[b, C]``."""
        return self.values * (1.0 - self.values) if self.softmax else self.values

    def row(self, index: int) -> Tensor:
        """One row of each matrix, ``[b, C]``."""
        row = -self.values[:, index, None] * self.values if self.softmax else torch.zeros_like(self.values)
        row[:, index] += self.values[:, index]
        return row

    def columns(self, low: int, high: int) -> Tensor:
        """Columns of a square root, ``[b, high - low, C]``; there are ``count``."""
        roots, values = self.values[:, low:high].sqrt(), self.values
        if self.softmax:
            columns = (-roots).unsqueeze(2) * values.unsqueeze(1)
        else:
            columns = values.new_zeros(len(values), high - low, values.shape[1])
        index = torch.arange(high - low, device=values.device)
        columns[:, index, low + index] += roots
        return columns


class OuterProducts:
    """Outer products of gradients ``[b, C]``, with the methods of :class:`Exact`."""

    count = 1

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def total(self) -> Tensor:
        return self.gradients.T @ self.gradients

    def diagonal(self) -> Tensor:
        return self.gradients.square()

    def row(self, index: int) -> Tensor:
        return self.gradients[:, index, None] * self.gradients

    def columns(self, low: int, high: int) -> Tensor:
        return self.gradients.unsqueeze(1)


OutputHessian = Exact | OuterProducts


def check_likelihood(likelihood: Likelihood, predictive: str) -> None:
    """Refuse a likelihood whose Hessian in the outputs is not known, or that has no probit approximation."""
    known, reason = isinstance(likelihood, Categorical | Bernoulli | Gaussian), ""
    if not known or (isinstance(likelihood, Gaussian) and likelihood.noise == "predicted"):
        reason = (
            f"Laplace takes a Categorical, a Bernoulli or a Gaussian likelihood with known or learned noise, not {likelihood!r}; "
            "DeepEnsemble and SWAG take noise='predicted'"
        )
    elif predictive == "probit" and isinstance(likelihood, Gaussian):
        reason = "predictive='probit' is for classes; regression takes 'linearized'"
    if reason:
        raise FlowBNNError(reason, kind="likelihood")


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, kind: str, generator: torch.Generator
) -> OutputHessian:
    """For outputs ``[b, C]``: exact (``"ggn"``), of the observed targets (``"fisher"``), or of drawn ones (``"sampled"``)."""
    if isinstance(likelihood, Categorical):
        p = outputs.softmax(1)
        if kind == "ggn":
            return Exact(p, softmax=True)
        if kind == "sampled":
            drawn = torch.rand(len(p), 1, generator=generator, dtype=torch.float64).to(p.device)
            targets = (p.double().cumsum(1) < drawn).sum(1).clamp_max(p.shape[1] - 1)
        gradient = p.clone()
        gradient[torch.arange(len(p), device=p.device), targets.to(p.device).long()] -= 1.0
    elif isinstance(likelihood, Bernoulli):
        p = outputs.sigmoid()
        if kind == "ggn":
            return Exact(p * (1.0 - p))
        truth = targets.reshape(p.shape).to(p)
        if kind == "sampled":
            truth = (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        gradient = p - truth
    elif isinstance(likelihood, Gaussian):
        mean, variance = likelihood.moments(outputs)
        predicted = likelihood.noise == "predicted"  # whose Fisher information in the log-variance is 1 / 2
        if kind == "ggn":
            parts = [1.0 / variance, torch.full_like(variance, 0.5)]
            return Exact(torch.cat(parts, 1) if predicted else parts[0])
        away = (mean - targets.to(mean).reshape(mean.shape)) * variance.rsqrt()
        if kind == "sampled":
            away = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        gradient = away * variance.rsqrt()
        if predicted:
            gradient = torch.cat([gradient, 0.5 * (1.0 - away.square())], 1)
    else:
        raise FlowBNNError(
            f"the curvature of {likelihood!r} in the network's outputs is not known; take a Categorical, a Bernoulli or a Gaussian "
            "likelihood",
            kind="likelihood",
            argument="likelihood",
        )
    return OuterProducts(gradient)
