"""A batch shared out among several processes: the noise of the whole batch, of which each takes its own rows."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["Share"]


class Share(NamedTuple):
    """The rows ``[start, stop)`` of a global batch of ``total`` rows: what one process holds of it.

    Every process draws for the whole batch, from generators in the same state, and keeps its own rows. So the draws
    differ between processes, do not depend on how many there are, and leave all generators in the same state.

    >>> import torch
    >>> def draw(rows):
    ...     return torch.arange(rows)
    >>> Share(2, 4, 5).of(2, draw), Share(2, 4, 5).of(6, draw)
    (tensor([2, 3]), tensor([ 6,  7,  8,  9, 10, 11]))
    """

    start: int
    stop: int
    total: int

    def of(self, rows: int, draw: Callable[[int], Tensor]) -> Tensor:
        """This share's rows of ``draw(number of rows of the whole batch)``.

        Args:
            rows: how many this process needs: as many as its examples, or a multiple of that (several samples or positions
                of each example, one example after the other).
            draw: from a number of rows to as many draws.
        """
        return self.take(draw(self.whole(rows)), rows)

    def whole(self, rows: int) -> int:
        """Rows of the whole batch, where this process has ``rows``."""
        times, rest = divmod(rows, self.stop - self.start)
        if not rest:
            return self.total * times
        if rows == 1:
            return 1  # an input without examples: one draw, the same on every process
        raise FlowBNNError(
            f"a layer with noise sees {rows} rows where this process has {self.stop - self.start} examples, so its noise "
            "cannot be shared out over devices; train it on one, or use site='channel'"
        )

    def take(self, draws: Tensor, rows: int) -> Tensor:
        """This process's ``rows`` of draws for the whole batch."""
        times, rest = divmod(rows, self.stop - self.start)
        return draws if rest else draws[self.start * times : self.stop * times]
