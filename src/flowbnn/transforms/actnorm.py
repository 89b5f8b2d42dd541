"""Activation normalisation."""

from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.transforms.affine import Affine
from flowbnn.transforms.checks import check_dim, check_width

__all__ = ["ActNorm"]


class ActNorm(Affine):
    r"""Elementwise affine map, :math:`x = e^{s} \odot z + t`, that starts by normalising its data.

    In training mode the first batch sets :math:`s, t` so that what comes out has mean zero and variance one, in the
    direction it was called: ``forward`` or ``inverse`` (Kingma & Dhariwal 2018, section 3.1). From then on
    they are ordinary parameters. A column that does not vary is only centred, its scale stays one. Fewer
    than two rows say nothing about a variance: they pass through unchanged, and the start waits for a real batch.

    ``initialized`` is in the ``state_dict``, so that a loaded map does not start again. With several processes, make the
    first call before the parameters are shared out, else each starts from its own batch.

    Args:
        dim: length of the vectors.
        bound: largest size of the log-scale; the start stays within 0.95 of it, where gradients still pass.
        data_start: start from the first batch; if not, at the identity, and this is :class:`Affine`.

    >>> norm = ActNorm(2)
    >>> x, log_det = norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> x.detach()
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """

    initialized: Tensor

    def __init__(self, dim: int, bound: float = 8.0, data_start: bool = True) -> None:
        super().__init__(check_dim(dim, self), bound)
        self.dim = dim
        self.register_buffer("initialized", torch.tensor(not data_start))
        # the same fact for Python, because a compiled graph must not branch on a tensor
        self.started = not data_start
        self.register_load_state_dict_post_hook(_read_started)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_width(z, self.dim, self)
        if self.training and not self.started:
            self._start(z, backwards=False)
        return super().forward(z, context)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_width(x, self.dim, self)
        if self.training and not self.started:
            self._start(x, backwards=True)
        return super().inverse(x, context)

    @torch.no_grad()
    def _start(self, value: Tensor, backwards: bool) -> None:
        if value.shape[:-1].numel() < 2:
            return
        rows = value.detach().reshape(-1, self.dim)
        mean = rows.mean(0)
        deviation = (rows - mean).square().mean(0).sqrt()
        # a constant column has a deviation of rounding errors only
        varies = deviation > 8.0 * torch.finfo(rows.dtype).eps * mean.abs()
        mean = torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))
        deviation = torch.where(varies & torch.isfinite(deviation), deviation, torch.ones_like(deviation))
        log_scale = (deviation.log() / self.bound).clamp(-0.95, 0.95) * self.bound
        log_scale = log_scale if backwards else -log_scale
        self.raw_log_scale.copy_(self.bound * torch.atanh(log_scale / self.bound))
        self.shift.copy_(mean if backwards else -mean * log_scale.exp())
        self.initialized.fill_(True)
        self.started = True


def _read_started(module: nn.Module, incompatible: Any) -> None:
    module.started = bool(module.initialized)  # type: ignore[assignment]
