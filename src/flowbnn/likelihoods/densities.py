r"""Conditional densities of real-valued targets: the outputs of the network are the parameters of a density of any shape.

Two heads are here, a monotone spline of a normal variable (:class:`Flow`) and a mixture of Gaussians (:class:`Mixture`). Several
targets are independent given the outputs. The last layer has ``num_outputs`` outputs:

>>> import torch, flowbnn as fb
>>> likelihood = fb.likelihoods.Flow("nsf", bins=8)
>>> network = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, likelihood.num_outputs))
>>> posterior = fb.MLE(epochs=1).fit(network, [(torch.randn(32, 3), torch.randn(32))], likelihood=likelihood, progress=False)
>>> posterior.predict(torch.zeros(2, 3)).interval(0.9).low.shape
torch.Size([2])
"""

from abc import abstractmethod
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowbnn.errors import check_shape
from flowbnn.likelihoods.base import misfit_error
from flowbnn.likelihoods.regression import MAX_LOG_SCALE, RealLikelihood
from flowbnn.numerics import at_least_single
from flowbnn.options import Count, Ge, checked
from flowbnn.predictive import FlowPredictive, MixturePredictive
from flowbnn.predictive.base import check_samples
from flowbnn.predictive.continuous import ContinuousPredictive, gauss_legendre
from flowbnn.transforms.splines import SplineMap, spline_forward


class ConditionalDensity(RealLikelihood):
    """Base class for densities of real-valued targets whose parameters are the outputs of a network.

    A subclass defines :meth:`predictive`, :meth:`nodes`, :meth:`output_units` and :attr:`num_outputs`.
    """

    dim: int  # number of targets
    repeated_share: float = 0.0  # share of repeated values among the targets of the last fit

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Number of outputs of the network, for all targets."""

    @abstractmethod
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> ContinuousPredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, num_outputs]``."""

    @abstractmethod
    def nodes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns points and weights of a quadrature rule for expectations under the density, both ``[M, B, D]``.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
        """

    def log_densities(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Returns the log-density of each target, ``[B, D]``, with gradients.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            values: Targets ``[B, D]``.
        """
        return self._make(outputs.unsqueeze(0))._log_densities(values.unsqueeze(-1))[0].squeeze(-1)

    @abstractmethod
    def _make(self, outputs: Tensor) -> ContinuousPredictive:
        """Returns the predictive of outputs ``[S, B, num_outputs]`` without checks, which a compiled graph cannot run."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-density of the targets of each example, ``[B]``.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            targets: Targets ``[B, D]``, or ``[B]`` if D is 1.
        """
        outputs = at_least_single(outputs)
        values = targets.to(outputs.dtype).reshape(len(outputs), self.dim)
        return self.log_densities(outputs, values).sum(-1)

    @checked
    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of the targets, ``[B, D]``."""
        return self._make(at_least_single(outputs).unsqueeze(0)).samples[0]

    def _checked_outputs(self, outputs: Tensor) -> Tensor:
        outputs, _ = check_samples(outputs, "outputs")
        check_shape("outputs", outputs, ("S", "B", self.num_outputs), owner=type(self).__name__)
        return outputs

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if the network has another number of outputs, or the data another number of targets.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            targets: Targets ``[B, D]``, or ``[B]`` if D is 1.
        """
        hint, fields = "use nn.Linear(..., likelihood.num_outputs)", {"num_outputs": self.num_outputs}
        check_shape("outputs", outputs, ("batch", self.num_outputs), hint, "outputs", repr(self), **fields)
        if targets.shape[:1] != outputs.shape[:1] or targets.numel() != len(outputs) * self.dim:
            number = targets.numel() // max(1, len(targets))
            hint = f"set dim={number}" if targets.shape[:1] == outputs.shape[:1] else ""
            raise misfit_error(outputs, targets, hint, "targets")


class Flow(ConditionalDensity):
    r"""Flow-shaped observation noise: the density of :math:`y = \mu + e^s \, T(z)` with :math:`z \sim \mathcal N(0, 1)`.

    :math:`T` is a monotone rational-quadratic spline on [-3, 3], the identity outside (neural spline flow, Durkan et al. 2019,
    https://arxiv.org/abs/1906.04032). Its knots, :math:`\mu` and :math:`s` are outputs of the network, so the noise may be skewed or
    have several peaks, and its shape may depend on the input. With zero outputs it is a standard normal.

    A density can be arbitrarily large at a value that many targets share. A warning gives the share of repeated targets.

    Args:
        flow: Kind of the flow, ``"nsf"``.
        bins: Number of bins of the spline.
        dim: Number of targets, which are independent given the outputs.

    >>> likelihood = Flow("nsf", bins=8)
    >>> likelihood.num_outputs  # mu, s, 8 widths, 8 heights and 7 slopes
    25
    >>> round(likelihood.log_prob(torch.zeros(1, 25), torch.zeros(1)).item(), 4)  # -log(2 pi) / 2
    -0.9189
    """

    @checked
    def __init__(self, flow: Literal["nsf"] = "nsf", bins: Annotated[int, Ge(2)] = 8, dim: Count = 1) -> None:
        super().__init__()
        self.flow, self.bins, self.dim = flow, bins, dim
        # bins of at least 1 % of the interval and slopes of at most 100 limit the height of a peak
        self.spline = SplineMap(bins=bins, bound=3.0, min_size=min(0.01, 0.5 / bins))

    def extra_repr(self) -> str:
        return f"'{self.flow}', bins={self.bins}" + (f", dim={self.dim}" if self.dim > 1 else "")

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network, ``(3 bins + 1) dim``."""
        return (2 + self.spline.params_per_entry) * self.dim

    def _make(self, outputs: Tensor) -> FlowPredictive:
        loc, log_scale, parameters = outputs.split([self.dim, self.dim, self.num_outputs - 2 * self.dim], -1)
        scale = log_scale.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()
        return FlowPredictive._from_tensors(
            loc, scale, self.spline.knots(parameters, self.dim), shape=self.shape
        )

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> FlowPredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, num_outputs]``."""
        density = self._make(self._checked_outputs(outputs))
        return FlowPredictive(density.loc, density.scale, density.knots, sample_counts, self.shape)

    def nodes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns points and weights of a quadrature rule, by a Gauss-Legendre rule for the normal variable in each bin.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
        """
        density = self._make(outputs.unsqueeze(0))
        edges = density.knots[0, ..., 0, :]
        edges = torch.cat([2.0 * edges[..., :1], edges, 2.0 * edges[..., -1:]], -1)  # two tails
        fractions, weights = gauss_legendre(8, outputs)
        widths = edges.diff(dim=-1).unsqueeze(-1)
        z = (edges[..., :-1, None] + widths * fractions).flatten(-2).movedim(-1, 0)
        mass = (widths * weights).flatten(-2).movedim(-1, 0) * torch.exp(-0.5 * z.square())
        points = density.loc + density.scale * spline_forward(z, density.knots)[0]
        return points, mass / mass.sum(0)

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of all outputs: those of the targets for locations, and a shift of the log-scales."""
        zeros = torch.zeros(self.num_outputs - 2 * self.dim, dtype=loc.dtype)
        ones = torch.ones(self.num_outputs - self.dim, dtype=scale.dtype)
        return torch.cat([loc, scale.log(), zeros]), torch.cat([scale, ones])

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "flow": self.flow, "bins": self.bins, "dim": self.dim}


class Mixture(ConditionalDensity):
    r"""Mixture of Gaussians as observation noise, :math:`p(y \mid x) = \sum_k w_k(x) \, \mathcal N(y; \mu_k(x), \sigma_k(x)^2)`.

    A network with this likelihood is a mixture density network (Bishop 1994). Its outputs are the means, the logarithms of the standard
    deviations and the logits of the weights, in this order. For several targets, the components of all targets are adjacent.

    A density can be arbitrarily large at a value that many targets share. A warning gives the share of repeated targets.

    Args:
        components: Number :math:`K` of Gaussians.
        dim: Number of targets, which are independent given the outputs.

    >>> likelihood = Mixture(5)
    >>> likelihood.num_outputs  # 5 means, 5 log-scales and 5 logits
    15
    >>> round(likelihood.log_prob(torch.zeros(1, 15), torch.zeros(1)).item(), 4)  # -log(2 pi) / 2
    -0.9189
    """

    @checked
    def __init__(self, components: Count = 5, dim: Count = 1) -> None:
        super().__init__()
        self.components, self.dim = components, dim

    def extra_repr(self) -> str:
        return f"{self.components}" + (f", dim={self.dim}" if self.dim > 1 else "")

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network, ``3 components dim``."""
        return 3 * self.components * self.dim

    def _make(self, outputs: Tensor) -> MixturePredictive:
        means, log_stds, logits = outputs.unflatten(-1, (3, self.components, self.dim)).unbind(-3)
        stds = log_stds.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()
        return MixturePredictive._from_tensors(means.mT, stds.mT, logits.mT.log_softmax(-1), shape=self.shape)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> MixturePredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, num_outputs]``."""
        means, stds, log_weights = self._make(self._checked_outputs(outputs))._tensors
        return MixturePredictive(means, stds, log_weights, sample_counts, self.shape)

    def nodes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns points and weights of a quadrature rule, by a Gauss-Legendre rule between quantiles of the components.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
        """
        density = self._make(outputs.unsqueeze(0))
        edges = density._grid(32)
        fractions, weights = gauss_legendre(4, outputs)
        widths = edges.diff(dim=-1).unsqueeze(-1)
        points = (edges[..., :-1, None] + widths * fractions).flatten(-2)
        mass = (widths * weights).flatten(-2) * density._log_densities(points)[0].exp()
        return points.movedim(-1, 0), (mass / mass.sum(-1, keepdim=True)).movedim(-1, 0)

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of all outputs: those of the targets for means, and a shift of the log-scales."""
        number = self.components
        zeros, ones = torch.zeros_like(loc).repeat(number), torch.ones_like(scale).repeat(2 * number)
        return torch.cat([loc.repeat(number), scale.log().repeat(number), zeros]), torch.cat(
            [scale.repeat(number), ones]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "components": self.components, "dim": self.dim}
