"""Coupling layers: one part of the vector is transformed by parameters that a network computes from the other part."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Ge, Hint, Positive, checked, made_by
from flowbnn.transforms.base import Transform, check_vectors

Mask = Literal["half", "alternating"] | Sequence[bool] | Tensor
AtLeastTwo = Annotated[int, Ge(2), Hint("for one dimension use Affine")]


class Coupling(Transform, ABC):
    r"""The mechanism: :math:`x_A = z_A,\; x_B = g(z_B;\, \mathrm{net}(q(z_A), c))` with :math:`g` monotone in each entry.

    The net reads :math:`q(z) = z / (1 + |z| / 5)`, nearly :math:`z` where noise lives and flat far out. A number of size
    :math:`r` carries a rounding error of size :math:`r\epsilon`, which a net that goes on growing hands to the next layer
    multiplied; a deep trained stack then cannot be inverted at far points in any precision.

    A subclass says how many parameters an entry takes (``per_entry``) and writes :meth:`move` and :meth:`move_back`;
    each direction calls the net once. Stack couplings with ``flip`` alternating, or with permutations between.

    Args:
        dim: length of the vectors, at least 2.
        mask: what is kept, :math:`A`: ``"half"`` (the first half), ``"alternating"`` (entries 0, 2, 4, ...) or one
            boolean per entry.
        flip: exchange what is kept and what is moved.
        hidden, activation, context_dim: of the :class:`MLP` that is made when no net is given.
        net: a module called as ``net(q(kept), context)`` that gives ``per_entry`` numbers for each moved entry.
        compress: whether the net reads :math:`q(z_A)`, or else :math:`z_A` itself, as the papers have it.
    """

    per_entry: int = 0
    mask: Tensor
    kept_index: Tensor
    moved_index: Tensor
    restore: Tensor

    @checked
    def __init__(
        self,
        dim: AtLeastTwo,
        mask: Mask = "half",
        flip: bool = False,
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Annotated[int, Ge(0)] = 0,
        net: nn.Module | None = None,
        compress: bool = True,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.compress = compress
        keep = _read_mask(mask, dim)
        self.register_buffer("mask", ~keep if flip else keep)
        for name in ("kept_index", "moved_index", "restore"):
            self.register_buffer(name, torch.empty(0, dtype=torch.long), persistent=False)
        self._arrange()
        self.register_load_state_dict_post_hook(_arrange_after_load)
        kept = self.kept_index.numel()
        self.net = net or MLP(kept, self.per_entry * (dim - kept), hidden, activation, context_dim)

    @abstractmethod
    def move(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The moved entries and the log-det, given ``parameters`` of ``per_entry`` numbers for each entry."""

    @abstractmethod
    def move_back(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :meth:`move` for the same parameters."""

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, moved = self._split(z)
        moved, log_det = self.move(moved, self._condition(kept, moved, context))
        return self._join(kept, moved), log_det

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, moved = self._split(x)
        moved, log_det = self.move_back(moved, self._condition(kept, moved, context))
        return self._join(kept, moved), log_det

    def _condition(self, kept: Tensor, moved: Tensor, context: Tensor | None) -> Tensor:
        parameters = self.net(kept / (1.0 + 0.2 * kept.abs()) if self.compress else kept, context)
        wanted = (*moved.shape[:-1], self.per_entry * moved.shape[-1])
        if parameters.shape != wanted:
            raise FlowBNNError(
                f"the net of a coupling must give {wanted} here, not {tuple(parameters.shape)}", kind="shape"
            )
        return parameters

    def _arrange(self) -> None:
        keep = self.mask.tolist()
        kept = [i for i, here in enumerate(keep) if here]
        moved = [i for i, here in enumerate(keep) if not here]
        device = self.mask.device
        self.kept_index = torch.tensor(kept, device=device)
        self.moved_index = torch.tensor(moved, device=device)
        self.restore = torch.argsort(torch.tensor(kept + moved, device=device))
        # slices are cheaper than indices, so the usual halves are recognised here, once
        self._kept_count = len(kept)
        self._layout = "first" if kept[-1] < moved[0] else "last" if moved[-1] < kept[0] else "scattered"

    def _split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, next(self.net.parameters(), None))
        if self._layout == "first":
            return value[..., : self._kept_count], value[..., self._kept_count :]
        if self._layout == "last":
            return value[..., -self._kept_count :], value[..., : -self._kept_count]
        return value.index_select(-1, self.kept_index), value.index_select(-1, self.moved_index)

    def _join(self, kept: Tensor, moved: Tensor) -> Tensor:
        if self._layout == "first":
            return torch.cat([kept, moved], dim=-1)
        if self._layout == "last":
            return torch.cat([moved, kept], dim=-1)
        return torch.cat([kept, moved], dim=-1).index_select(-1, self.restore)


class AdditiveCoupling(Coupling):
    r"""NICE: :math:`x_A = z_A,\; x_B = z_B + t(z_A)` with :math:`\log|\det| = 0` (Dinh, Krueger & Bengio 2015).

    Starts at the identity. Arguments as in :class:`Coupling`.

    >>> x, log_det = AdditiveCoupling(3)(torch.ones(2, 3))
    >>> x.detach().sum(), log_det
    (tensor(6.), tensor([0., 0.]))
    """

    per_entry = 1

    def move(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value + parameters, value.new_zeros(value.shape[:-1])

    def move_back(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value - parameters, value.new_zeros(value.shape[:-1])


class AffineCoupling(Coupling):
    r"""RealNVP: :math:`x_A = z_A,\; x_B = e^{s(z_A)} \odot z_B + t(z_A)` with :math:`\log|\det| = \sum_i s_i(z_A)`.

    Dinh, Sohl-Dickstein & Bengio 2017. The log-scale is bounded softly, :math:`s = b \tanh(a / b)`: an unbounded
    one multiplies along a stack until it overflows, in float64 as well. Starts at the identity.

    Args:
        bound: largest size :math:`b` of the log-scale.
        dim, mask, flip, hidden, activation, context_dim, net, compress: as in :class:`Coupling`; the net gives all
            log-scales :math:`a`, then all shifts :math:`t`.

    >>> x, log_det = AffineCoupling(4, mask="alternating", hidden=(8,))(torch.ones(2, 4))
    >>> x.shape, log_det.detach()
    (torch.Size([2, 4]), tensor([0., 0.]))
    """

    per_entry = 2

    @checked
    def __init__(
        self,
        dim: AtLeastTwo,
        mask: Mask = "half",
        flip: bool = False,
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Annotated[int, Ge(0)] = 0,
        net: nn.Module | None = None,
        compress: bool = True,
        bound: Positive = 2.0,
    ) -> None:
        super().__init__(dim, mask, flip, hidden, activation, context_dim, net, compress)
        self.bound = bound

    def move(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = parameters.chunk(2, dim=-1)
        log_scale = soft_clamp(raw, self.bound)
        return value * log_scale.exp() + shift, log_scale.sum(-1)

    def move_back(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = parameters.chunk(2, dim=-1)
        log_scale = soft_clamp(raw, self.bound)
        return (value - shift) * (-log_scale).exp(), -log_scale.sum(-1)


def _read_mask(mask: Mask, dim: int) -> Tensor:
    if isinstance(mask, str):
        return torch.arange(dim) < dim // 2 if mask == "half" else torch.arange(dim) % 2 == 0
    keep = torch.as_tensor(mask)
    if keep.dtype != torch.bool or keep.shape != (dim,) or keep.all() or not keep.any():
        raise FlowBNNError(
            f"the mask of a coupling has one boolean for each of its {dim} dimensions, at least one true and one false",
            argument="mask",
        )
    return keep.clone()


def _arrange_after_load(module: nn.Module, incompatible: Any) -> None:
    module._arrange()  # type: ignore[operator]


class MLP(nn.Module):
    r"""Fully connected network on the last axis, :math:`y = W_n\,\sigma(\dots\sigma(W_1 [x, c] + b_1)\dots) + b_n`.

    The last layer starts at zero, so that the network gives zeros for every input and what it conditions starts at
    the identity (Kingma & Dhariwal 2018, section 3.3). The hidden layers receive gradients from the second step on.

    Args:
        dim_in: length of the input vectors.
        dim_out: length of the output vectors.
        hidden: width of each hidden layer; ``()`` makes a linear map.
        activation: makes the nonlinearity between layers, for instance ``nn.ReLU`` or ``nn.Tanh``.
        context_dim: length of the context vectors that are concatenated to the input; 0 ignores any context.

    >>> net = MLP(3, 2, hidden=(16,), context_dim=4)
    >>> net(torch.ones(5, 3), torch.ones(4)).shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        dim_in: Count,
        dim_out: Count,
        hidden: Sequence[Count] = (64, 64),
        activation: Callable[[], nn.Module] = nn.ReLU,
        context_dim: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__()
        widths = [dim_in + context_dim, *hidden, dim_out]
        self.context_dim = context_dim
        layers: list[nn.Module] = []
        for before, after in pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), made_by(activation, name="activation", kind=nn.Module)]
        last = nn.Linear(widths[-2], dim_out)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """``value`` is ``(..., dim_in)``; ``context`` is ``(..., context_dim)`` and broadcasts to its batch axes."""
        if self.context_dim == 0:
            return self.layers(value)
        if context is None or context.shape[-1:] != (self.context_dim,):
            raise FlowBNNError(
                f"this network needs a context of length {self.context_dim}, not "
                f"{None if context is None else tuple(context.shape)}: pass context=",
                kind="shape",
                argument="context",
            )
        context = context.expand(*value.shape[:-1], self.context_dim)
        return self.layers(torch.cat([value, context], dim=-1))
