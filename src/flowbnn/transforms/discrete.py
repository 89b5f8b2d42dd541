r"""Flows of categories and of integers: no volume changes, and probabilities are exact but for :class:`Argmax`, which gives a bound."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.nets.conditional import ConditionalNormal
from flowbnn.nets.mlp import MLP, Length
from flowbnn.numerics import inverse_softplus
from flowbnn.options import Count, checked
from flowbnn.transforms.base import Transform, check_integers, check_vectors
from flowbnn.transforms.surjective import Several, drawn, known, summed


class Argmax(Transform):
    r"""Categories from scores, :math:`x_d = \arg\max_k z_{dk}`; backwards, scores with that maximum are drawn (Hoogeboom et al. 2021).

    Vectors of ``dim`` categories come from vectors of ``dim * categories`` real numbers, which any continuous flow can model:
    :math:`\log P(x) \ge E_q[\log p(z) - \log q(z \mid x)]`. Scores are drawn as :math:`u \sim q(u \mid x)`, and those below the
    maximum :math:`T = u_x` are thresholded, :math:`z_k = T - \mathrm{softplus}(T - u_k)` (https://arxiv.org/abs/2102.05379, section 3).

    Args:
        dim, categories: of the vectors :math:`x`, which have integers from 0 to ``categories - 1``.
        noise: gives the distribution of :math:`u`, of length ``dim * categories``, for the one-hot codes of :math:`x`; by default a
            normal whose mean and scale an MLP computes.
        hidden, context_dim: of that MLP.

    >>> argmax = Argmax(2, categories=3)
    >>> z, contribution = argmax.inverse(torch.tensor([2, 0]))
    >>> argmax(z)[0], z.shape
    (tensor([2, 0]), torch.Size([6]))
    """

    draws = "inverse"
    discrete = True
    _zero: Tensor

    @checked
    def __init__(
        self,
        dim: Count,
        categories: Several,
        noise: nn.Module | None = None,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__()
        self.dim, self.categories = dim, categories
        size = dim * categories
        self.noise = noise or ConditionalNormal(MLP(size + context_dim, 2 * size, hidden))
        self.register_buffer("_zero", torch.zeros(()), persistent=False)

    def ends(self) -> tuple[Any, Any]:
        """Domain and range as torch's constraints."""
        return constraints.real, constraints.integer_interval(0, self.categories - 1)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim * self.categories, self)
        scores = z.unflatten(-1, (self.dim, self.categories))
        x = scores.argmax(-1)
        top = scores.amax(-1, keepdim=True)
        chosen = one_hot(x, self.categories)
        gaps = torch.where(chosen, torch.ones_like(scores), top - scores)
        gaps = gaps.clamp_min(torch.finfo(z.dtype).tiny)
        below = inverse_softplus(gaps)
        u = torch.where(chosen, scores, top - below)
        log_prob = self._given(chosen.to(z.dtype), context).log_prob(u.flatten(-2))
        return x, summed(log_prob, z.shape[:-1]) - self._log_det(below, chosen)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_integers(x, self)
        check_length(x, self.dim, self)
        chosen = one_hot(x, self.categories)
        u, log_prob = drawn(self._given(chosen.to(self._zero.dtype), context), x.shape[:-1])
        u = u.unflatten(-1, (self.dim, self.categories))
        top = (u * chosen).sum(-1, keepdim=True)
        below = top - u
        z = torch.where(chosen, u, top - F.softplus(below))
        return z.flatten(-2), self._log_det(below, chosen) - log_prob

    def _log_det(self, below: Tensor, chosen: Tensor) -> Tensor:
        """Of scores by their draws."""
        return (F.logsigmoid(below) * ~chosen).sum((-2, -1))

    def _given(self, codes: Tensor, context: Tensor | None) -> Any:
        return self.noise(known(codes.flatten(-2), context, 1))

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return torch.Size((*shape[:-1], self.dim))

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return torch.Size((*shape[:-1], self.dim * self.categories))


def one_hot(index: Tensor, categories: int) -> Tensor:
    """Whether each category is the chosen one, on a new last axis."""
    return index.unsqueeze(-1) == torch.arange(categories, device=index.device)


def check_length(value: Tensor, dim: int, owner: object) -> None:
    """Refuse integers of another length on the last axis."""
    if value.ndim == 0 or value.shape[-1] != dim:
        raise FlowBNNError(
            f"{type(owner).__name__} takes vectors of length {dim} on the last axis, not shape {tuple(value.shape)}",
            kind="shape",
        )
