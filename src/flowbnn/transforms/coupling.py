"""Coupling and autoregressive maps: entries are transformed by parameters that a network computes from other entries."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import MLP, Length, MaskedMLP
from flowbnn.numerics import sum_rightmost
from flowbnn.options import Count, Ge, Hint, Positive, checked
from flowbnn.transforms.compose import Compose
from flowbnn.transforms.elementwise import ActNorm
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.univariate import AffineMap, ConditionedTransform, ShiftMap, Univariate

Mask = Literal["half", "alternating"] | Sequence[bool] | Tensor
CouplingDim = Annotated[int, Ge(2), Hint("for one dimension use Affine")]


class Coupling(ConditionedTransform):
    r"""The mechanism: :math:`x_A = z_A,\; x_B = g(z_B;\, \mathrm{net}(q(z_A), c))` with :math:`g` increasing in each entry.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, nearly :math:`z` where noise lives and flat far out. A number of size
    :math:`r` carries a rounding error of size :math:`r\epsilon`, which a net that goes on growing hands to the next layer
    multiplied; a deep trained stack then cannot be inverted at far points in any precision.

    Each direction calls the net once. Stack couplings with ``flip`` alternating, or with permutations between.

    Args:
        dim: length of the vectors, at least 2.
        univariate: the map :math:`g` of single numbers.
        mask: what is kept, :math:`A`: ``"half"`` (the first half), ``"alternating"`` (entries 0, 2, 4, ...) or one
            boolean per entry.
        flip: exchange what is kept and what is moved.
        hidden, activation, context_dim: of the :class:`~flowbnn.nets.MLP` that is made when no net is given.
        net: a module called as ``net(q(kept), context)`` that gives ``univariate.params_per_entry`` numbers for each moved entry.
            With a convolution, such as :class:`~flowbnn.nets.GatedConvNet`, events are images, channels last.
        compress: whether the net reads :math:`q(z_A)`, or else :math:`z_A` itself, as the papers have it.

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
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Length = 0,
        net: nn.Module | None = None,
        compress: bool = True,
    ) -> None:
        keep = _read_mask(mask, dim, univariate.width)
        keep = ~keep if flip else keep
        kept = int(keep.sum())
        if net is None:
            size_in = kept // univariate.width * univariate.features if compress else kept
            net = MLP(size_in, univariate.params_per_entry * (dim - kept), hidden, activation, context_dim)
        super().__init__(dim, univariate, net, compress)
        self.register_buffer("mask", keep)
        for name in ("order", "restore"):
            self.register_buffer(name, torch.empty(0, dtype=torch.long), persistent=False)
        self._arrange()
        self.register_load_state_dict_post_hook(Coupling._arrange)

    def _arrange(self, loaded: Any = None) -> None:
        """Read the mask, once: a split is cheaper than indices, so entries are moved only where those kept are scattered."""
        keep = self.mask.long()
        self._scattered = int(keep.diff().abs().sum()) > 1
        # which half comes first: the one that is kept, or the other
        self._turn = 1 if self._scattered or keep[0] else -1
        self._sizes = [int(keep.sum()), int((1 - keep).sum())][:: self._turn]
        self.order = torch.argsort(1 - keep, stable=True)
        self.restore = torch.argsort(self.order)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        self._check(value)
        value = value.index_select(-1, self.order) if self._scattered else value
        halves = value.split_with_sizes(self._sizes, -1)
        kept, moved = halves[:: self._turn]
        parameters = self._parameters_for(kept, context, moved.shape[-1])
        move = self.univariate.inverse if inverse else self.univariate.forward
        moved, log_slope = move(moved, parameters)
        value = torch.cat((kept, moved)[:: self._turn], dim=-1)
        value = value.index_select(-1, self.restore) if self._scattered else value
        return value, sum_rightmost(log_slope, self.event_dim)


class AdditiveCoupling(Coupling):
    r"""NICE: :math:`x_A = z_A,\; x_B = z_B + t(z_A)` with :math:`\log|\det| = 0` (Dinh, Krueger & Bengio 2015).

    Starts at the identity. Arguments as in :class:`Coupling`.

    >>> x, log_det = AdditiveCoupling(3)(torch.ones(2, 3))
    >>> x.detach().sum(), log_det
    (tensor(6.), tensor([0., 0.]))
    """

    @checked
    def __init__(self, dim: CouplingDim, mask: Mask = "half", flip: bool = False, **settings: Any) -> None:
        super().__init__(dim, ShiftMap(), mask, flip, **settings)


class AffineCoupling(Coupling):
    r"""RealNVP: :math:`x_A = z_A,\; x_B = e^{s(z_A)} \odot z_B + t(z_A)` with :math:`\log|\det| = \sum_i s_i(z_A)`.

    Dinh, Sohl-Dickstein & Bengio 2017. Starts at the identity. Arguments as in :class:`Coupling`, and ``bound`` and ``widening`` as
    in :class:`~flowbnn.transforms.AffineMap`; the net gives all log-scales, then all shifts.

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
        **settings: Any,
    ) -> None:
        super().__init__(dim, AffineMap(bound, positive_log_scale), mask, flip, **settings)


def _read_mask(mask: Mask, dim: int, width: int) -> Tensor:
    if isinstance(mask, str):
        entry = torch.arange(dim) // width
        return entry < dim // width // 2 if mask == "half" else entry % 2 == 0
    keep = torch.as_tensor(mask)
    if keep.dtype != torch.bool or keep.shape != (dim,) or keep.all() or not keep.any():
        text = f"the mask of a coupling has one boolean for each of its {dim} dimensions"
        raise FlowBNNError(f"{text}, at least one true and one false", argument="mask")
    return keep.clone()


class GlowStep(Compose):
    r"""ActNorm, then an invertible linear map, then an affine coupling (Kingma & Dhariwal 2018, figure 2).

    On the last axis of ``(B, H, W, C)`` the linear map is the invertible 1x1 convolution. Every scale in it is bounded
    softly and it starts next to the identity, so that neither direction blows up however long it trains.

    Args:
        dim: length of the vectors, at least 2.
        permute: draw a random permutation for the linear map, which mixes the halves of stacked steps sooner.
        data_init: normalise the first training batch as Glow does when it learns the density of data. By default
            ActNorm starts at the identity, because noise that multiplies a trained network must keep its mean of one. The
            coupling is then ``widening``, as in :class:`~flowbnn.transforms.AffineMap`.
        generator: where the draws of the linear map come from; torch's own by default.
        coupling: ``hidden``, ``flip``, ``net`` and so on, as in :class:`~flowbnn.transforms.AffineCoupling`; with a
            :class:`~flowbnn.nets.GatedConvNet` it is a step of images, channels last.

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
    r"""Each entry moved by an increasing map whose parameters depend on the entries before it.

    .. math:: x_i = g(z_i;\, \mathrm{net}_i(q(x_{<i}), c)) \quad\text{(cheap inverse)}, \qquad
              x_i = g(z_i;\, \mathrm{net}_i(q(z_{<i}), c)) \quad\text{(cheap forward)}

    What the net reads is known at once in one direction, which costs one pass, and has to be found entry by entry in the
    other, which costs ``net.passes(event_shape)`` of them, one for each entry. ``cheap`` says which:

    - ``"inverse"``: densities in one pass, draws in D: the masked autoregressive flow (Papamakarios, Pavlakou & Murray 2017);
    - ``"forward"``: draws, and their own densities, in one pass, densities of other points in D: the inverse autoregressive flow
      (Kingma et al. 2016), which is what noise and posteriors want.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, as in :class:`~flowbnn.transforms.Coupling`. Starts at the identity, or next to it.

    Args:
        dim: length of the vectors.
        univariate: the map :math:`g` of single numbers.
        cheap: the direction that costs one pass.
        hidden, order, activation, context_dim: of the :class:`~flowbnn.nets.MaskedMLP` that is made when no net is given.
        net: a module called as ``net(q(value), context)`` that gives ``univariate.params_per_entry`` numbers for each entry, laid out
            as its ``interleaved`` says, or ``univariate.interleaved`` if it has none; its ``passes(event_shape)`` is the longest chain
            of entries that depend on each other, its ``event_dim`` the number of axes of an event, one if it has none. Sequences
            have :class:`~flowbnn.nets.WaveNet`, images :class:`~flowbnn.nets.PixelCNN`, features last.
        compress: whether the net reads :math:`q`, or else the values themselves, as the papers have it.

    >>> flow = Autoregressive(3, cheap="forward", hidden=(16,))
    >>> x, log_det = flow(torch.ones(2, 3))
    >>> x.shape, log_det.detach()
    (torch.Size([2, 3]), tensor([0., 0.]))
    """

    @checked
    def __init__(
        self,
        dim: Count,
        univariate: Univariate = AffineMap(),  # noqa: B008
        cheap: Literal["forward", "inverse"] = "inverse",
        hidden: Sequence[Count] = (64, 64),
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
            text = f"the net of an autoregressive map says its passes(event_shape), which {type(net).__name__} does not"
            raise FlowBNNError(text, argument="net")
        self.reads = cheap  # the input of which direction the net reads
        self.cheap = cheap if self.event_dim > 1 or self.net.passes(torch.Size([dim])) > 1 else "both"

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        self._check(value)
        move = self.univariate.inverse if inverse else self.univariate.forward
        at_once = self.reads == ("inverse" if inverse else "forward")
        result = value if at_once else torch.zeros_like(value)
        # after pass k the first k entries of the order are right, and no later pass changes them or the path of their gradients
        for _ in range(1 if at_once else self.net.passes(value.shape[value.ndim - self.event_dim :])):
            result, log_slope = move(value, self._parameters_for(result, context, self.dim))
        return result, sum_rightmost(log_slope, self.event_dim)
