r"""Maximum likelihood and maximum a posteriori: the plain network, behind the same interface.

.. math:: \hat w_{MLE} = \arg\max_w \sum_i \log p(y_i \mid x_i, w), \qquad
          \hat w_{MAP} = \arg\max_w \sum_i \log p(y_i \mid x_i, w) - \frac{\|w\|^2}{2 \sigma^2}

With classes the first is cross entropy, the second cross entropy with an L2 term (document 001).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from flowbnn.methods.base import LikelihoodName, Method, register_method
from flowbnn.posterior.base import Posterior

__all__ = ["MAP", "MLE"]


@register_method
@dataclass(frozen=True, kw_only=True, repr=False)
class MLE(Method):
    """Maximum likelihood: the network as everyone trains it. ``prior_scale`` has no part in it."""

    name: ClassVar[str] = "mle"
    label: ClassVar[str] = "Maximum likelihood"

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> Posterior:
        return self.start(network, loader, likelihood, 1, validation, options, penalty=False)


@register_method
@dataclass(frozen=True, kw_only=True, repr=False)
class MAP(Method):
    r"""Maximum a posteriori under the prior :math:`w \sim \mathcal N(0, \sigma^2)`, ``prior_scale`` being :math:`\sigma`.

    Per example, the prior adds :math:`\|w\|^2 / 2\sigma^2 N` to the loss: a weight decay of :math:`1/\sigma^2 N`.
    """

    name: ClassVar[str] = "map"
    label: ClassVar[str] = "MAP"

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> Posterior:
        return self.start(network, loader, likelihood, self.count(loader, num_data), validation, options)
