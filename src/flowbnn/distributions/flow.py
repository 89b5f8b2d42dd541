r"""A base pushed through a transform, as a ``torch.distributions`` citizen."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import sum_rightmost
from flowbnn.transforms.base import Transform

__all__ = ["Flow"]


class Flow(Distribution):
    r"""The distribution of :math:`x = f(z)`, :math:`z \sim p_0`.

    .. math:: \log p(x) = \log p_0(f^{-1}(x)) + \log\left|\det \frac{\partial f^{-1}}{\partial x}\right|

    Args:
        base: any ``torch.distributions`` distribution with a reparameterized sampler.
        transform: a :class:`~flowbnn.transforms.Transform`; ``torch.distributions`` (and zuko) transforms enter through
            :func:`~flowbnn.distributions.from_torch`.
        context: handed to the transform's conditioners.

    >>> from flowbnn.transforms import Affine
    >>> flow = Flow(torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1), Affine(2))
    >>> x, log_prob = flow.rsample_and_log_prob((5,))
    >>> torch.allclose(log_prob, flow.log_prob(x))
    True
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        base: Distribution,
        transform: Transform,
        context: Tensor | None = None,
        validate_args: bool | None = False,
    ) -> None:
        self.base, self.transform, self.context = base, transform, context
        shape = base.batch_shape + base.event_shape
        if len(shape) < transform.event_dim:
            raise FlowBNNError(
                f"{type(transform).__name__} works on events of {transform.event_dim} axes, but the base draws have shape "
                f"{tuple(shape)}; give the base a vector of parameters"
            )
        event_dim = max(len(base.event_shape), transform.event_dim)
        cut = len(shape) - event_dim
        super().__init__(shape[:cut], shape[cut:], validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def _base_log_prob(self, z: Tensor) -> Tensor:
        return sum_rightmost(self.base.log_prob(z), len(self.event_shape) - len(self.base.event_shape))

    def _batch_log_det(self, log_det: Tensor) -> Tensor:
        return sum_rightmost(log_det, len(self.event_shape) - self.transform.event_dim)

    def _draw(self, sample_shape: Any, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return self.base.rsample(torch.Size(sample_shape))
        try:
            return self.base.rsample(torch.Size(sample_shape), generator=generator)  # type: ignore[call-arg]
        except TypeError as error:
            raise FlowBNNError(
                f"{type(self.base).__name__} takes no generator; use flowbnn's DiagonalNormal or NormalMixture as the base"
            ) from error

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        """Reparameterized draws of shape ``sample_shape + batch_shape + event_shape``."""
        return self.transform(self._draw(sample_shape, generator), self.context)[0]

    def sample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density anywhere, by the transform's inverse (numerical where it has no formula)."""
        if self.transform.inverse_kind == "none":
            raise FlowBNNError(
                f"{type(self.transform).__name__} has no inverse, so its density is known only at its own draws: "
                "use rsample_and_log_prob"
            )
        z, log_det = self.transform.inverse(value, self.context)
        return self._base_log_prob(z) + self._batch_log_det(log_det)

    def rsample_and_log_prob(
        self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws and their log-density in one forward pass, with no inverse."""
        z = self._draw(sample_shape, generator)
        x, log_det = self.transform(z, self.context)
        return x, self._base_log_prob(z) - self._batch_log_det(log_det)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Flow":
        extra = len(self.event_shape) - len(self.base.event_shape)
        inner = torch.Size(batch_shape) + self.event_shape[:extra]
        return Flow(self.base.expand(inner), self.transform, self.context)
