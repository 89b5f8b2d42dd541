r"""Flows of categories and of integers: no volume changes, and probabilities are exact but for :class:`Argmax`, which gives a bound."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.nets.mlp import MLP, ConditionalNormal, Length
from flowbnn.numerics import inverse_softplus
from flowbnn.options import Count, Positive, checked, options
from flowbnn.transforms.base import check_events, check_tensor, check_vectors
from flowbnn.transforms.surjective import AtLeastTwo, IntegerTransform
from flowbnn.transforms.univariate import ShiftMap, Univariate


class _CategoricalTransform(IntegerTransform):
    """Vectors of ``dim`` categories from ``categories`` numbers for each, one after the other."""

    @checked
    def __init__(self, dim: Count, categories: AtLeastTwo) -> None:
        super().__init__()
        self.dim, self.categories, self.lengths = dim, categories, (dim * categories, dim)

    def ends(self) -> tuple[Any, Any]:
        return constraints.real, constraints.integer_interval(0, self.categories - 1)

    def _scores(self, z: Tensor) -> Tensor:
        """The numbers of each variable on an axis of their own."""
        check_vectors(z, self.dim * self.categories, self)
        return z.unflatten(-1, (self.dim, self.categories))

    def _codes(self, x: Tensor) -> Tensor:
        """Whether each category is the one of ``x``, on a new last axis."""
        self._check_integers(x, 0, 0, self.categories - 1)
        check_events(x, (self.dim,), self)
        return one_hot(x, self.categories)


class Argmax(_CategoricalTransform):
    r"""Categories from scores, :math:`x_d = \arg\max_k z_{dk}`; backwards, scores with that maximum are drawn (Hoogeboom et al. 2021).

    Vectors of ``dim`` categories come from vectors of ``dim * categories`` real numbers, which any continuous flow can model:
    :math:`\log P(x) \ge E_q[\log p(z) - \log q(z \mid x)]`. Scores are drawn as :math:`u \sim q(u \mid x)`, and those below the
    maximum :math:`T = u_x` are thresholded, :math:`z_k = T - \mathrm{softplus}(T - u_k)` (https://arxiv.org/abs/2102.05379, section 3).

    Args:
        dim, categories: of the vectors :math:`x`, which have integers from 0 to ``categories - 1``.
        noise: gives the distribution of :math:`u`, of length ``dim * categories``, for the one-hot codes of :math:`x`; by default a
            normal whose mean and scale an MLP with layers of the widths ``hidden`` computes.
        context_dim: length of the context that the noise reads.

    >>> argmax = Argmax(2, categories=3)
    >>> z, contribution = argmax.inverse(torch.tensor([2, 0]))
    >>> argmax(z)[0], z.shape
    (tensor([2, 0]), torch.Size([6]))
    """

    draws = "inverse"

    @checked
    def __init__(
        self,
        dim: Count,
        categories: AtLeastTwo,
        noise: nn.Module | None = None,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__(dim, categories)
        self.context_dim = context_dim
        size = dim * categories
        self.noise = noise or ConditionalNormal(MLP(size + context_dim, 2 * size, hidden))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = self._scores(z)
        x = scores.argmax(-1)
        top = scores.amax(-1, keepdim=True)
        chosen = one_hot(x, self.categories)
        gaps = torch.where(chosen, torch.ones_like(scores), top - scores)
        below = inverse_softplus(gaps.clamp_min(torch.finfo(z.dtype).tiny))
        u = torch.where(chosen, scores, top - below)
        log_prob = self._log_prob(self.noise, u.flatten(-2), chosen.flatten(-2).to(z.dtype), context)
        return x, log_prob - self._log_det(below, chosen)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chosen = self._codes(x)
        known, size = chosen.flatten(-2).to(self._zero.dtype), self.dim * self.categories
        u, log_prob = self._draw(self.noise, size, known, context)
        u = u.unflatten(-1, (self.dim, self.categories))
        top = (u * chosen).sum(-1, keepdim=True)
        below = top - u
        z = torch.where(chosen, u, top - F.softplus(below))
        return z.flatten(-2), self._log_det(below, chosen) - log_prob

    def _log_det(self, below: Tensor, chosen: Tensor) -> Tensor:
        """Of scores by their draws."""
        return (F.logsigmoid(below) * ~chosen).sum((-2, -1))


def one_hot(index: Tensor, categories: int) -> Tensor:
    """Whether each category is the chosen one, on a new last axis."""
    return index.unsqueeze(-1) == torch.arange(categories, device=index.device)


class Integers(IntegerTransform):
    """The door of a flow of integers: inside they are held in floats, which gradients pass, outside they have an integer type.

    Integers that a float does not hold exactly, above 16777216 in single precision, are refused.

    >>> Integers().inverse(torch.tensor([3, 1]))[0], Integers()(torch.tensor([3.0, 1.0]))[0]
    (tensor([3., 1.]), tensor([3, 1]))
    """

    event_dim = 0

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        return z.round().long(), torch.zeros_like(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_integers(x, 1)  # which leaves room for shifts
        z = x.to(self._zero.dtype)
        return z, torch.zeros_like(z)


class OneHot(_CategoricalTransform):
    """The door of a flow of categories: inside they are one-hot codes of floats, one after the other, outside integers.

    Args:
        dim, categories: of the vectors, which have integers from 0 to ``categories - 1``.

    >>> OneHot(2, categories=3).inverse(torch.tensor([2, 0]))[0]
    tensor([0., 0., 1., 1., 0., 0.])
    """

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._scores(z).argmax(-1), z.new_zeros(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._codes(x).to(self._zero.dtype).flatten(-2), self._zero.expand(x.shape[:-1])


@options
class IntegerShiftMap(ShiftMap):
    r"""Integers moved by integers, :math:`x = z + \mathrm{round}(r t)` (Hoogeboom et al. 2019, https://arxiv.org/abs/1905.07376).

    Rounding passes gradients straight through. Networks read :math:`z / r`.

    Args:
        reach: :math:`r`, about the size of the integers.

    >>> IntegerShiftMap(reach=10.0).forward(torch.tensor([3.0]), torch.tensor([0.24]))[0]
    tensor([5.])
    """

    reach: Positive = 256.0

    def read(self, value: Tensor) -> Tensor:
        return value / self.reach

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        # rounded once more, since a straight-through shift is an integer but for a rounding error
        return _whole(value + _whole(self.reach * parameters)), torch.zeros_like(value)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _whole(value - _whole(self.reach * parameters)), torch.zeros_like(value)


def _whole(value: Tensor) -> Tensor:
    return value + (value.round() - value).detach()


@options
class ModularMap(Univariate):
    r"""Categories moved around a circle, :math:`x = (\mu + \sigma z) \bmod K` (Tran et al. 2019, https://arxiv.org/abs/1905.10347).

    Values are one-hot codes, ``categories`` numbers side by side for each variable: couplings of so many variables have vectors of
    ``dim * categories`` numbers. :math:`\mu`, and :math:`\sigma` among the numbers without a
    common divisor with :math:`K`, are the largest of their logits; gradients pass straight through to a softmax. With all logits equal
    the map is the identity.

    Args:
        categories: :math:`K`.
        learn_scale: learn :math:`\sigma`, or else it is one.
        temperature: of the softmax.

    >>> z, logits = torch.eye(3)[1], torch.tensor([0.0, 0.0, 5.0])
    >>> ModularMap(3).forward(z, logits)[0]
    tensor([1., 0., 0.])
    """

    categories: AtLeastTwo = 2
    learn_scale: bool = False
    temperature: Positive = 1.0
    interleaved = True

    @property
    def params_per_entry(self) -> int:
        return 2 if self.learn_scale else 1

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.categories

    features = width

    def read(self, value: Tensor) -> Tensor:
        return value

    def _matrix(self, parameters: Tensor) -> Tensor:
        """Which category each one becomes, ``(..., variables, categories, categories)``."""
        k = self.categories
        parts = parameters.unflatten(-1, (-1, self.params_per_entry, k)).unbind(-2)
        index = torch.arange(k, device=parameters.device)
        matrix = self._chosen(parts[0])[..., (index - index.unsqueeze(-1)) % k]
        if not self.learn_scale:
            return matrix
        units = [number for number in range(1, k) if math.gcd(number, k) == 1]
        factors = torch.tensor(units, device=parameters.device)
        times = (factors[:, None, None] * index[:, None] % k == index).to(parameters.dtype)
        return torch.einsum("...s,sjk->...jk", self._chosen(parts[1][..., factors]), times) @ matrix

    def _chosen(self, logits: Tensor) -> Tensor:
        soft = torch.softmax(logits / self.temperature, -1)
        return soft + (one_hot(logits.argmax(-1), logits.shape[-1]).to(soft.dtype) - soft).detach()

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return self._moved(value, self._matrix(parameters))

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return self._moved(value, self._matrix(parameters).mT)

    def _moved(self, value: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        codes = value.unflatten(-1, (-1, self.categories)).unsqueeze(-2)
        return _whole((codes @ matrix).squeeze(-2).flatten(-2)), torch.zeros_like(value)
