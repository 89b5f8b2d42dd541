"""Transforms of categories and integers. No volume changes, and probabilities are exact, except for :class:`Argmax`, which gives a
bound.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.nets.mlp import ConditionalNormal, ConditionerMLP, Length
from flowbnn.numerics import inverse_softplus
from flowbnn.options import Dim, Positive, checked, options
from flowbnn.transforms.base import check_events, check_tensor, check_vectors
from flowbnn.transforms.surjective import AtLeastTwo, IntegerTransform
from flowbnn.transforms.univariate import ShiftMap, Univariate


class _CategoricalTransform(IntegerTransform):
    """Base class for maps from ``categories`` adjacent numbers for each of ``dim`` variables to vectors of categories."""

    @checked
    def __init__(self, dim: Dim, categories: AtLeastTwo) -> None:
        super().__init__()
        self.dim, self.categories, self.lengths = dim, categories, (dim * categories, dim)
        self.codomain = constraints.integer_interval(0, categories - 1)

    def _scores(self, z: Tensor) -> Tensor:
        """Returns the numbers of each variable on an axis of their own."""
        check_vectors(z, self.dim * self.categories, self)
        return z.unflatten(-1, (self.dim, self.categories))

    def _codes(self, x: Tensor) -> Tensor:
        """Returns boolean one-hot codes of the categories on a new last axis."""
        self._check_integers(x, 0, 0, self.categories - 1)
        check_events(x, (self.dim,), self)
        return one_hot(x, self.categories)


class Argmax(_CategoricalTransform):
    r"""Categories with the largest score, :math:`x_d = \arg\max_k z_{dk}`. The inverse draws scores with that maximum (Hoogeboom et
    al. 2021).

    Vectors of ``dim`` categories come from vectors of ``dim * categories`` real numbers, which any continuous flow can model:
    :math:`\log P(x) \ge E_q[\log p(z) - \log q(z \mid x)]`. The inverse draws :math:`u \sim q(u \mid x)` and thresholds the scores
    below the maximum :math:`T = u_x`, :math:`z_k = T - \mathrm{softplus}(T - u_k)` (https://arxiv.org/abs/2102.05379, section 3).

    Args:
        dim: Number of variables.
        categories: Number of categories. The vectors :math:`x` have integers from 0 to ``categories - 1``.
        noise: Module that returns the distribution of :math:`u`, of length ``dim * categories``, given the one-hot codes of
            :math:`x`. By default a normal whose mean and scale an MLP computes.
        hidden: Widths of the hidden layers of the default noise.
        context_dim: Length of the context vectors that the noise reads.

    >>> argmax = Argmax(2, categories=3)
    >>> z, contribution = argmax.inverse(torch.tensor([2, 0]))
    >>> argmax(z)[0], z.shape
    (tensor([2, 0]), torch.Size([6]))
    """

    draws = "inverse"

    @checked
    def __init__(
        self,
        dim: Dim,
        categories: AtLeastTwo,
        noise: nn.Module | None = None,
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
    ) -> None:
        super().__init__(dim, categories)
        self.context_dim = context_dim
        size = dim * categories
        self.noise = noise or ConditionalNormal(ConditionerMLP(size + context_dim, 2 * size, hidden))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = self._scores(z)
        x = scores.argmax(-1)
        top = scores.amax(-1, keepdim=True)
        chosen = one_hot(x, self.categories)
        gaps = torch.where(chosen, torch.ones_like(scores), top - scores)
        gap = inverse_softplus(gaps.clamp_min(torch.finfo(z.dtype).tiny))
        u = torch.where(chosen, scores, top - gap)
        log_prob = self._log_prob(self.noise, u.flatten(-2), chosen.flatten(-2).to(z.dtype), context)
        return x, log_prob - self._log_det(gap, chosen)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chosen = self._codes(x)
        codes, size = chosen.flatten(-2).to(self._zero.dtype), self.dim * self.categories
        u, log_prob = self._draw(self.noise, size, codes, context)
        u = u.unflatten(-1, (self.dim, self.categories))
        top = (u * chosen).sum(-1, keepdim=True)
        gap = top - u
        z = torch.where(chosen, u, top - F.softplus(gap))
        return z.flatten(-2), self._log_det(gap, chosen) - log_prob

    def _log_det(self, gap: Tensor, chosen: Tensor) -> Tensor:
        """Returns the log-determinant of the scores as functions of the draws."""
        return (F.logsigmoid(gap) * ~chosen).sum((-2, -1))


def one_hot(index: Tensor, categories: int) -> Tensor:
    """Returns boolean one-hot codes on a new last axis."""
    return index.unsqueeze(-1) == torch.arange(categories, device=index.device)


class Integers(IntegerTransform):
    """Converts floats to integers at the end of a flow of integers. Inside the flow integers are floats, so that gradients can pass.

    Integers that a float cannot hold exactly raise an error. In single precision these are integers above 16777216.

    >>> Integers().inverse(torch.tensor([3, 1]))[0], Integers()(torch.tensor([3.0, 1.0]))[0]
    (tensor([3., 1.]), tensor([3, 1]))
    """

    event_dim = 0

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        return z.round().long(), torch.zeros_like(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_integers(x, 1)  # one bit is left for shifts
        z = x.to(self._zero.dtype)
        return z, torch.zeros_like(z)


class OneHot(_CategoricalTransform):
    """Converts one-hot codes to categories at the end of a flow of categories. Inside the flow the codes are adjacent floats.

    Args:
        dim: Number of variables.
        categories: Number of categories. The vectors have integers from 0 to ``categories - 1``.

    >>> OneHot(2, categories=3).inverse(torch.tensor([2, 0]))[0]
    tensor([0., 0., 1., 1., 0., 0.])
    """

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._scores(z).argmax(-1), z.new_zeros(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._codes(x).to(self._zero.dtype).flatten(-2), self._zero.expand(x.shape[:-1])


@options
class IntegerShiftMap(ShiftMap):
    r"""Shift of integers by integers, :math:`x = z + \mathrm{round}(r t)` (Hoogeboom et al. 2019, https://arxiv.org/abs/1905.07376).

    Gradients pass straight through the rounding. Networks read :math:`z / r`.

    Args:
        reach: Scale :math:`r`, about the size of the integers.

    >>> IntegerShiftMap(reach=10.0).forward(torch.tensor([3.0]), torch.tensor([0.24]))[0]
    tensor([5.])
    """

    reach: Positive = 256.0

    def read(self, value: Tensor) -> Tensor:
        return value / self.reach

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        # Rounded again, because a straight-through shift is an integer up to a rounding error.
        return _round_straight_through(
            value + _round_straight_through(self.reach * parameters)
        ), torch.zeros_like(value)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _round_straight_through(
            value - _round_straight_through(self.reach * parameters)
        ), torch.zeros_like(value)


def _round_straight_through(value: Tensor) -> Tensor:
    """Rounds numbers, with the gradient of the identity."""
    return value + (value.round() - value).detach()


@options
class ModularMap(Univariate):
    r"""Shift and scale of categories modulo their number, :math:`x = (\mu + \sigma z) \bmod K` (Tran et al. 2019,
    https://arxiv.org/abs/1905.10347).

    Values are one-hot codes, ``categories`` adjacent numbers for each variable, so that a coupling has ``dim * categories`` numbers.
    :math:`\mu`, and :math:`\sigma` among the numbers without a common divisor with :math:`K`, are those with the largest logit.
    Gradients pass straight through to a softmax. With equal logits the map is the identity.

    Args:
        categories: Number :math:`K` of categories.
        learn_scale: If True, :math:`\sigma` is learned. Otherwise it is one.
        temperature: Temperature of the softmax.

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
        """Returns permutation matrices ``(..., variables, categories, categories)`` that map each category to its image."""
        k = self.categories
        shift_logits, *scale_logits = parameters.unflatten(-1, (-1, self.params_per_entry, k)).unbind(-2)
        index = torch.arange(k, device=parameters.device)
        matrix = self._one_hot_argmax(shift_logits)[..., (index - index.unsqueeze(-1)) % k]
        if not self.learn_scale:
            return matrix
        units = [number for number in range(1, k) if math.gcd(number, k) == 1]
        factors = torch.tensor(units, device=parameters.device)
        times = (factors[:, None, None] * index[:, None] % k == index).to(parameters.dtype)
        return (
            torch.einsum("...s,sjk->...jk", self._one_hot_argmax(scale_logits[0][..., factors]), times)
            @ matrix
        )

    def _one_hot_argmax(self, logits: Tensor) -> Tensor:
        """Returns the one-hot code of the largest logit, with the gradient of the softmax."""
        soft = torch.softmax(logits / self.temperature, -1)
        return soft + (one_hot(logits.argmax(-1), logits.shape[-1]).to(soft.dtype) - soft).detach()

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return self._apply_matrix(value, self._matrix(parameters))

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return self._apply_matrix(value, self._matrix(parameters).mT)

    def _apply_matrix(self, value: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images of one-hot codes, and zeros for the logarithms of the slopes."""
        codes = value.unflatten(-1, (-1, self.categories)).unsqueeze(-2)
        return _round_straight_through((codes @ matrix).squeeze(-2).flatten(-2)), torch.zeros_like(value)
