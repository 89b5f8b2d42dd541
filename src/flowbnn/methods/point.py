r"""Maximum likelihood and maximum a posteriori: point estimates with the interface of the other methods.

.. math:: \hat w_{MLE} = \arg\max_w \sum_i \log p(y_i \mid x_i, w), \qquad
          \hat w_{MAP} = \arg\max_w \sum_i \log p(y_i \mid x_i, w) - \frac{\|w\|^2}{2 \sigma^2}

For classes the first minimizes the cross entropy, the second the cross entropy with weight decay.
"""

from typing import ClassVar

from flowbnn.methods.base import PointMethod, register_method
from flowbnn.options import options


@register_method
@options(kw_only=True, repr=False)
class MLE(PointMethod):
    """Maximum likelihood. ``prior_scale`` is not used.

    >>> import torch
    >>> from torch import nn
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> MLE(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    PointPosterior(Linear, Categorical(), 2 epochs)
    """

    has_prior: ClassVar[bool] = False


@register_method
@options(kw_only=True, repr=False)
class MAP(PointMethod):
    r"""Maximum a posteriori under the prior :math:`w \sim \mathcal N(0, \sigma^2)`, where :math:`\sigma` is ``prior_scale``.

    The prior adds :math:`\|w\|^2 / 2\sigma^2 N` per example to the loss, which is a weight decay of :math:`1/\sigma^2 N`.

    >>> import torch
    >>> from torch import nn
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> MAP(epochs=2, prior_scale=0.5).fit(nn.Linear(2, 3), loader, progress=False)
    PointPosterior(Linear, Categorical(), 2 epochs)
    """
