"""Conditional distributions: modules that return a distribution for what they are given."""

from torch import Tensor, nn
from torch.distributions import Normal

from flowbnn.numerics import soft_clamp
from flowbnn.options import Positive, checked


class ConditionalNormal(nn.Module):
    r"""Independent normals :math:`\mathcal N(m, e^{2s})` whose :math:`m` and :math:`s` a net computes from what is given.

    Args:
        net: gives all means and then all log-scales on the last axis.
        bound: largest size of the log-scales, which are bounded softly.

    >>> import torch
    >>> ConditionalNormal(nn.Linear(3, 4))(torch.ones(5, 3)).rsample().shape
    torch.Size([5, 2])
    """

    @checked
    def __init__(self, net: nn.Module, bound: Positive = 4.0) -> None:
        super().__init__()
        self.net, self.bound = net, bound
        self.event_dim = int(getattr(net, "event_dim", 1))

    def forward(self, given: Tensor) -> Normal:
        loc, raw = self.net(given).chunk(2, dim=-1)
        return Normal(loc, soft_clamp(raw, self.bound).exp(), validate_args=False)
