"""Couplings and autoregressive transforms: a network computes the parameters of some entries from other entries."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import ConditionerMLP, Length, MaskedMLP
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Dim, Ge, Positive, checked
from flowbnn.transforms.base import transform_error
from flowbnn.transforms.compose import Compose
from flowbnn.transforms.elementwise import ActNorm
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.univariate import AffineMap, ConditionedTransform, ShiftMap, Univariate

Mask = Literal["half", "alternating"] | Sequence[bool] | Tensor
CouplingDim = Annotated[int, Ge(2)]


class Coupling(ConditionedTransform):
    r"""Coupling :math:`x_A = z_A,\; x_B = g(z_B;\, \mathrm{net}(q(z_A), c))` with :math:`g` increasing in each entry.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, which is close to :math:`z` for typical noise and flat far out. A number of size
    :math:`r` carries a rounding error of size :math:`r\epsilon`. A net without this compression multiplies the error from layer to
    layer. A deep trained stack then cannot be inverted at distant points in any precision.

    Each direction calls the net once. Stack couplings with alternating ``flip``, or with permutations between them.

    Args:
        dim: Length of the vectors, at least 2. For one dimension use :class:`~flowbnn.transforms.Affine`.
        univariate: Map :math:`g` of single numbers.
        mask: Entries :math:`A`, which stay unchanged: ``"half"`` (the first half), ``"alternating"`` (entries 0, 2, 4, ...) or one
            boolean for each entry.
        flip: If True, exchanges :math:`A` and :math:`B`.
        hidden: Widths of the hidden layers of the default net, a :class:`~flowbnn.nets.ConditionerMLP`.
        activation: Function that makes an activation of the default net.
        context_dim: Length of the context vectors of the default net.
        net: Module that is called as ``net(q(z_A), context)`` and returns ``univariate.params_per_entry`` numbers for each entry of
            :math:`B`. With a convolution, such as :class:`~flowbnn.nets.GatedConvNet`, events are images with channels last.
        compress: If True, the net reads :math:`q(z_A)`. If False, it reads :math:`z_A` itself, as in the papers.

    >>> from flowbnn.transforms import SplineMap
    >>> spline = Coupling(4, SplineMap(bins=4), hidden=(8,))
    >>> spline(torch.ones(2, 4))[1].detach().abs().max() < 1e-6
    tensor(True)
    """

    mask: Tensor
    order: Tensor
    restore: Tensor

    @checked
    def __init__(
        self,
        dim: CouplingDim,
        univariate: Univariate,
        mask: Mask = "half",
        flip: bool = False,
        hidden: Sequence[Dim] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        net: nn.Module | None = None,
        compress: bool = True,
    ) -> None:
        condition = _make_mask(mask, dim, univariate.width)
        condition = ~condition if flip else condition
        size = int(condition.sum())
        if net is None:
            dim_in = size // univariate.width * univariate.features if compress else size
            net = ConditionerMLP(
                dim_in, univariate.params_per_entry * (dim - size), hidden, activation, context_dim
            )
        super().__init__(dim, univariate, net, compress)
        self.register_buffer("mask", condition)
        for name in ("order", "restore"):
            self.register_buffer(name, torch.empty(0, dtype=torch.long), persistent=False)
        self._read_mask()
        self.register_load_state_dict_post_hook(Coupling._read_mask)

    def _read_mask(self, incompatible_keys: Any = None) -> None:
        """Derives the order of the entries from the mask.

        Entries are permuted only if the mask is scattered, because a split is cheaper than indices.

        Args:
            incompatible_keys: Argument of torch's hook, which is not used.
        """
        mask = self.mask.long()
        self._scattered = int(mask.diff().abs().sum()) > 1
        # 1 if the half that conditions comes first, otherwise -1.
        self._direction = 1 if self._scattered or mask[0] else -1
        self._sizes = [int(mask.sum()), int((1 - mask).sum())][:: self._direction]
        self.order = torch.argsort(1 - mask, stable=True)
        self.restore = torch.argsort(self.order)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        self._check(value)
        value = value.index_select(-1, self.order) if self._scattered else value
        halves = value.split_with_sizes(self._sizes, -1)
        condition, target = halves[:: self._direction]
        parameters = self._entry_parameters(condition, context, target.shape[-1])
        univariate = self.univariate.inverse if inverse else self.univariate.forward
        target, log_slope = univariate(target, parameters)
        value = torch.cat((condition, target)[:: self._direction], dim=-1)
        value = value.index_select(-1, self.restore) if self._scattered else value
        return value, sum_rightmost(log_slope, self.event_dim)


class AdditiveCoupling(Coupling):
    r"""Additive coupling of NICE: :math:`x_A = z_A,\; x_B = z_B + t(z_A)` with :math:`\log|\det| = 0` (Dinh, Krueger & Bengio 2015).

    It starts at the identity.

    Args:
        dim: Length of the vectors, at least 2.
        mask: Entries that stay unchanged, as in :class:`Coupling`.
        flip: If True, exchanges the entries that stay and those that move.
        options: Further arguments of :class:`Coupling`.

    >>> x, log_det = AdditiveCoupling(3)(torch.ones(2, 3))
    >>> x.detach().sum(), log_det
    (tensor(6.), tensor([0., 0.]))
    """

    @checked
    def __init__(self, dim: CouplingDim, mask: Mask = "half", flip: bool = False, **options: Any) -> None:
        super().__init__(dim, ShiftMap(), mask, flip, **options)


class AffineCoupling(Coupling):
    r"""Affine coupling of RealNVP: :math:`x_A = z_A,\; x_B = e^{s(z_A)} \odot z_B + t(z_A)` with
    :math:`\log|\det| = \sum_i s_i(z_A)`.

    Dinh, Sohl-Dickstein & Bengio 2017. It starts at the identity. The net returns all log-scales, then all shifts.

    Args:
        dim: Length of the vectors, at least 2.
        mask: Entries that stay unchanged, as in :class:`Coupling`.
        flip: If True, exchanges the entries that stay and those that move.
        bound: Largest absolute value of the log-scale.
        positive_log_scale: If True, all log-scales are positive, as in :class:`~flowbnn.transforms.AffineMap`.
        options: Further arguments of :class:`Coupling`.

    >>> x, log_det = AffineCoupling(4, mask="alternating", hidden=(8,))(torch.ones(2, 4))
    >>> x.shape, log_det.detach()
    (torch.Size([2, 4]), tensor([0., 0.]))
    """

    @checked
    def __init__(
        self,
        dim: CouplingDim,
        mask: Mask = "half",
        flip: bool = False,
        *,
        bound: Positive = 2.0,
        positive_log_scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, AffineMap(bound, positive_log_scale), mask, flip, **options)


def _make_mask(mask: Mask, dim: int, width: int) -> Tensor:
    """Returns a boolean for each number, true for those that condition the others.

    Args:
        mask: Mask as in :class:`Coupling`.
        dim: Length of the vectors.
        width: Number of adjacent numbers that form one entry.
    """
    if isinstance(mask, str):
        entry = torch.arange(dim) // width
        return entry < dim // width // 2 if mask == "half" else entry % 2 == 0
    condition = torch.as_tensor(mask)
    if condition.dtype != torch.bool or condition.shape != (dim,) or condition.all() or not condition.any():
        raise FlowBNNError(f"mask needs {dim} booleans, some true, some false", argument="mask")
    return condition.clone()


class GlowStep(Compose):
    """Step of Glow: ActNorm, an invertible linear map, and an affine coupling (Kingma & Dhariwal 2018, figure 2).

    On the last axis of ``(B, H, W, C)`` the linear map is the invertible 1x1 convolution. All scales are bounded softly and the step
    starts near the identity, so that neither direction diverges during long training.

    Args:
        dim: Length of the vectors, at least 2.
        permute: If True, draws a random permutation for the linear map, which mixes the halves of stacked steps sooner.
        data_init: If True, normalizes the first training batch, as Glow does for densities of data. The coupling then has positive
            log-scales. If False, ActNorm starts at the identity, because noise of a trained network must keep its mean of one.
        generator: Generator of the linear map; torch's global one by default.
        coupling: Arguments of :class:`~flowbnn.transforms.AffineCoupling`, such as ``hidden``, ``flip`` and ``net``. With a
            :class:`~flowbnn.nets.GatedConvNet` it is a step of images with channels last.

    >>> step = GlowStep(4, hidden=(16,))
    >>> z = torch.ones(2, 4)
    >>> x, log_det = step(z)
    >>> torch.allclose(step.inverse(x)[0], z, atol=1e-5), log_det.shape
    (True, torch.Size([2]))
    """

    @checked
    def __init__(
        self,
        dim: CouplingDim,
        permute: bool = False,
        data_init: bool = False,
        generator: torch.Generator | None = None,
        **coupling: Any,
    ) -> None:
        super().__init__(
            ActNorm(dim, data_init=data_init),
            LULinear(dim, permute=permute, generator=generator),
            AffineCoupling(dim, positive_log_scale=data_init, **coupling),
        )


class Autoregressive(ConditionedTransform):
    r"""Autoregressive transform: the map of each entry has parameters that depend on the entries before it.

    .. math:: x_i = g(z_i;\, \mathrm{net}_i(q(x_{<i}), c)) \quad\text{(cheap inverse)}, \qquad
              x_i = g(z_i;\, \mathrm{net}_i(q(z_{<i}), c)) \quad\text{(cheap forward)}

    In one direction the inputs of the net are known, and it costs one pass. In the other direction they are computed entry by entry,
    which costs ``net.passes(event_shape)`` passes, one for each entry. ``cheap`` selects the direction that costs one pass:

    - ``"inverse"``: Densities cost one pass, draws D passes: the masked autoregressive flow (Papamakarios, Pavlakou & Murray 2017).
    - ``"forward"``: Draws and their own densities cost one pass, densities of other points D passes: the inverse autoregressive flow
      (Kingma et al. 2016). Use it for noise and posteriors.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, as in :class:`~flowbnn.transforms.Coupling`. The transform starts at the identity
    or near it.

    Args:
        dim: Length of the vectors.
        univariate: Map :math:`g` of single numbers.
        cheap: Direction that costs one pass.
        hidden: Widths of the hidden layers of the default net, a :class:`~flowbnn.nets.MaskedMLP`.
        order: Order of the entries in the default net.
        activation: Function that makes an activation of the default net.
        context_dim: Length of the context vectors of the default net.
        net: Module that is called as ``net(q(value), context)`` and returns ``univariate.params_per_entry`` numbers for each entry.
            Its attribute ``interleaved`` gives their layout, by default that of the univariate map. Its method
            ``passes(event_shape)`` returns the length of the longest chain of dependent entries. Its ``event_dim`` is the number of
            axes of an event, by default one. For sequences use :class:`~flowbnn.nets.WaveNet`, for images
            :class:`~flowbnn.nets.PixelCNN`, features last.
        compress: If True, the net reads :math:`q`. If False, it reads the values themselves, as in the papers.

    >>> flow = Autoregressive(3, cheap="forward", hidden=(16,))
    >>> x, log_det = flow(torch.ones(2, 3))
    >>> x.shape, log_det.detach()
    (torch.Size([2, 3]), tensor([0., 0.]))
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        univariate: Univariate = AffineMap(),  # noqa: B008
        cheap: Literal["forward", "inverse"] = "inverse",
        hidden: Sequence[Dim] = (64, 64),
        order: Sequence[int] | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        net: nn.Module | None = None,
        compress: bool = True,
    ) -> None:
        if net is None:
            width = univariate.width
            layout = univariate.interleaved, univariate.features if compress else width
            sizes = dim // width, univariate.params_per_entry * width
            net = MaskedMLP(*sizes, hidden, order, activation, context_dim, *layout)
        super().__init__(dim, univariate, net, compress)
        if not callable(getattr(self.net, "passes", None)):
            text = f"needs net.passes(event_shape), {type(net).__name__} has none; use MaskedMLP"
            raise transform_error(self, text, argument="net")
        self._one_pass = cheap  # direction whose input the net reads
        self.cheap = cheap if self.event_dim > 1 or self.net.passes(torch.Size([dim])) > 1 else "both"

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        self._check(value)
        univariate = self.univariate.inverse if inverse else self.univariate.forward
        one_pass = self._one_pass == ("inverse" if inverse else "forward")
        result = value if one_pass else torch.zeros_like(value)
        # After pass k the first k entries of the order are correct. Later passes change neither them nor their gradients.
        for _ in range(1 if one_pass else self.net.passes(value.shape[value.ndim - self.event_dim :])):
            result, log_slope = univariate(value, self._entry_parameters(result, context, self.dim))
        return result, sum_rightmost(log_slope, self.event_dim)
