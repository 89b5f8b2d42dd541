"""Fixed reorderings of a vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, checked
from flowbnn.transforms.base import Transform, check_vectors


class Permutation(Transform):
    r"""A fixed reordering, :math:`x_i = z_{\mathrm{order}(i)}`, with :math:`\log|\det| = 0`.

    The order is kept in the ``state_dict``, so that a shuffle survives saving and loading.

    Args:
        order: every number from 0 to ``dim - 1``, once.

    >>> Permutation([2, 0, 1])(torch.tensor([10.0, 11.0, 12.0]))
    (tensor([12., 10., 11.]), tensor(0.))
    """

    linearity = "affine"
    order: Tensor
    restore: Tensor

    @checked
    def __init__(self, order: Sequence[int] | Tensor) -> None:
        super().__init__()
        index = torch.as_tensor(order)
        if index.ndim != 1 or index.numel() == 0 or sorted(index.tolist()) != list(range(index.numel())):
            raise FlowBNNError(
                "a permutation names every position from 0 to dim - 1 exactly once", argument="order"
            )
        index = index.to(torch.long)
        self.register_buffer("order", index.clone())
        self.register_buffer("restore", torch.argsort(index))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._pick(z, self.order)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._pick(x, self.restore)

    def _pick(self, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.order.numel(), self)
        return value.index_select(-1, index), value.new_zeros(value.shape[:-1])


class Reverse(Permutation):
    r"""The vector read backwards, :math:`x_i = z_{D - 1 - i}`: between couplings, it swaps the halves.

    Args:
        dim: length of the vectors.

    >>> Reverse(3)(torch.tensor([1.0, 2.0, 3.0]))[0]
    tensor([3., 2., 1.])
    """

    @checked
    def __init__(self, dim: Count) -> None:
        super().__init__(range(dim - 1, -1, -1))


class Shuffle(Permutation):
    """A permutation drawn once, when it is made.

    Args:
        dim: length of the vectors.
        generator: where the draw comes from; torch's own by default.

    >>> x, _ = Shuffle(4, torch.Generator().manual_seed(0))(torch.arange(4.0))
    >>> x.sort().values
    tensor([0., 1., 2., 3.])
    """

    @checked
    def __init__(self, dim: Count, generator: torch.Generator | None = None) -> None:
        super().__init__(torch.randperm(dim, generator=generator))
