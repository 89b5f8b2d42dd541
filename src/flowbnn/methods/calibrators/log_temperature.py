r"""Fits of a temperature :math:`T` to sampled outputs, with a Gaussian prior of :math:`\log T`.

.. math:: \hat T = \arg\min_T \; -\sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i) / T) + \frac{(\log T)^2}{2 \tau^2}

The prior keeps the temperature near 1 if the data hardly determine it, as with few examples or with examples that are almost all
classified correctly. A regression has no prior, because the unit of its scale is arbitrary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import RealLikelihood
from flowbnn.metrics.checks import IGNORED
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import CategoricalPredictive

PRIOR_SCALE = 0.5  # standard deviation of log T: 95 % of the prior lie between temperatures of 0.37 and 2.7


class TemperatureFit(NamedTuple):
    """Temperature that is fitted to one set of examples.

    Args:
        temperature: Temperature.
        bound: ``"low"`` or ``"high"`` if the likelihood alone is largest at a bound of the temperature, or an empty string.
    """

    temperature: float
    bound: Literal["", "low", "high"]


def fit_temperatures(
    posterior: Posterior,
    outputs: Tensor,
    targets: Tensor,
    subsets: Sequence[Tensor] | None = None,
    prior_scale: float | None = PRIOR_SCALE,
) -> list[TemperatureFit]:
    r"""Fits one temperature to each subset of the examples.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, N, ...]``, in float64.
        targets: Targets of the examples.
        subsets: Indices of the examples of each subset. The default is one set of all examples.
        prior_scale: Standard deviation :math:`\tau` of the prior of :math:`\log T`, or None for no prior.
    """
    if isinstance(posterior.likelihood, RealLikelihood):
        prior_scale = None
    has_classes = isinstance(posterior._predictive(outputs[:, :1]), CategoricalPredictive)
    problem = (ClassProblem.read if has_classes else PredictiveProblem)(posterior, outputs, targets)
    return problem.fit(subsets, prior_scale)


class TemperatureProblem(ABC):
    """Negative log-likelihood (NLL) of examples as a function of the logarithm of a temperature.

    Subclasses define :meth:`select` and :meth:`nll`.

    Args:
        num_examples: Number of examples.
        outputs_per_example: Number of outputs of an example, over all samples.
    """

    max_outputs: ClassVar[int] = 2**21  # outputs that are computed at once

    def __init__(self, num_examples: int, outputs_per_example: int) -> None:
        self.num_examples = num_examples
        self.num_rows = max(1, self.max_outputs // max(1, outputs_per_example))

    @abstractmethod
    def select(self, rows: Tensor) -> Self:
        """Returns the problem of the examples with these indices."""

    @abstractmethod
    def nll(self, u: float, rows: slice, derivatives: bool) -> tuple[Tensor, float, float]:
        """Returns the NLL of some examples at ``T = exp(u)``, and the first two derivatives of their sum in ``u``.

        Args:
            u: Logarithm of the temperature.
            rows: Examples.
            derivatives: If False, zeros are returned instead of the derivatives.
        """

    def fit(
        self, subsets: Sequence[Tensor] | None = None, prior_scale: float | None = PRIOR_SCALE
    ) -> list[TemperatureFit]:
        r"""Fits one temperature to each subset of the examples.

        The best point of a grid, which all subsets share, is refined by Newton's method, safeguarded by bisection within its cell.

        Args:
            subsets: Indices of the examples of each subset. The default is one set of all examples.
            prior_scale: Standard deviation :math:`\tau` of the prior of :math:`\log T`, or None for no prior.
        """
        prior_scale = math.inf if prior_scale is None else prior_scale
        coldest, hottest = 1e-2, 1e2  # far outside of what calibration needs
        low, high = math.log(coldest), math.log(hottest)
        last = 16  # neighbours are a factor of 1.8 apart
        grid = [low + (high - low) * index / last for index in range(last + 1)]
        table = torch.stack([self._evaluate(u)[0] for u in grid])
        fits = []
        for subset in [torch.arange(self.num_examples)] if subsets is None else subsets:
            subset = subset.to(table.device)
            nll = table[:, subset].sum(1).tolist()
            values = [value + u**2 / (2.0 * prior_scale**2) for value, u in zip(nll, grid, strict=True)]
            bound: Literal["", "low", "high"] = "low" if nll[0] <= min(nll) else ""
            if not bound and nll[-1] <= min(nll):
                bound = "high"
            best = min(range(last + 1), key=lambda index: (values[index], abs(grid[index])))
            if bound and best in (0, last):
                fits.append(TemperatureFit(coldest if best == 0 else hottest, bound))
                continue
            cell = grid[max(0, best - 1)], grid[best], grid[min(last, best + 1)]
            u = self.select(subset)._refine(cell, prior_scale)
            fits.append(TemperatureFit(math.exp(u), bound))
        return fits

    def _refine(self, cell: tuple[float, float, float], prior_scale: float) -> float:
        """Returns the minimum of the penalized NLL over the log-temperature within a cell of the grid."""
        left, u, right = cell
        for _ in range(60):
            _, slope, curvature = self._evaluate(u, derivatives=True)
            slope, curvature = slope + u / prior_scale**2, curvature + prior_scale**-2
            if slope == 0.0:
                break
            left, right = (u, right) if slope < 0 else (left, u)
            newton = u - slope / curvature if curvature > 0 else math.inf
            proposal = newton if left < newton < right else (left + right) / 2
            change, u = abs(proposal - u), proposal
            if change < 1e-7:  # the error after a step of Newton's method is about its square
                break
        return u

    def _evaluate(self, u: float, derivatives: bool = False) -> tuple[Tensor, float, float]:
        """Returns :meth:`nll` of all examples."""
        starts = range(0, self.num_examples, self.num_rows)
        parts = [self.nll(u, slice(low, low + self.num_rows), derivatives) for low in starts]
        values, slopes, curvatures = zip(*parts, strict=True)
        return torch.cat(values), sum(slopes), sum(curvatures)


class ClassProblem(TemperatureProblem):
    r"""Negative log-likelihood of labels under a mixture of classifiers, :math:`\sum_s w_s\, \mathrm{softmax}(f_s e^{-u})`.

    With scaled logits :math:`a = f e^{-u}`, class probabilities :math:`p` and expectations :math:`E` under them, the log-probability
    :math:`l` of the label :math:`y` has the derivatives :math:`l' = E[a] - a_y` and :math:`l'' = -l' - \mathrm{Var}[a]`. With the
    posterior weights :math:`v_s \propto w_s e^{l_s}` of the samples, those of :math:`L = \log \sum_s w_s e^{l_s}` are
    :math:`L' = \sum_s v_s l_s'` and :math:`L'' = \sum_s v_s (l_s'' + l_s'^2) - L'^2`.

    Args:
        logits: Logits :math:`f` of all samples, ``[S, N, ..., C]``, in float64.
        targets: Class labels ``[N, ...]``, or soft labels ``[N, ..., C]``. Positions with the label -100 add nothing.
        log_weights: Logarithms of the weights :math:`w` of the samples, ``[S]``, whose sum is 1.
    """

    def __init__(self, logits: Tensor, targets: Tensor, log_weights: Tensor) -> None:
        super().__init__(logits.shape[1], logits[:, :1].numel())
        # probabilities of zero have derivatives of zero, which those of -inf would not
        self.logits, self.targets, self.log_weights = logits.clamp(min=-1e100), targets, log_weights

    @classmethod
    def read(cls, posterior: Posterior, outputs: Tensor, targets: Tensor) -> Self:
        """Returns the problem of sampled outputs ``[S, N, ...]`` of a posterior, whose samples have equal weights."""
        rows = max(1, cls.max_outputs // max(1, outputs[:, :1].numel()))
        parts = [posterior._predictive(part) for part in outputs.detach().split(rows, 1)]
        labels = [part._check_targets(some) for part, some in zip(parts, targets.split(rows), strict=True)]
        weights = outputs.new_full((len(outputs),), -math.log(len(outputs)))
        return cls(torch.cat([part.log_samples for part in parts], 1), torch.cat(labels), weights)

    def select(self, rows: Tensor) -> Self:
        """Returns the problem of the examples with these indices."""
        return type(self)(self.logits[:, rows], self.targets[rows], self.log_weights)

    def nll(self, u: float, rows: slice, derivatives: bool) -> tuple[Tensor, float, float]:
        """Returns the NLL of some examples, and the derivatives of their sum; see :meth:`TemperatureProblem.nll`."""
        scaled, targets = self.logits[:, rows] * math.exp(-u), self.targets[rows]
        if targets.is_floating_point():
            label_values, label_weights = scaled, targets.to(scaled)
        else:
            index = targets.clamp(min=0)[None, ..., None].expand(len(scaled), *targets.shape, 1)
            label_values, label_weights = scaled.gather(-1, index), (targets != IGNORED)[..., None].to(scaled)
        normalizer = scaled.logsumexp(-1, keepdim=True)
        weights = self.log_weights.view(-1, *(1,) * (scaled.ndim - 1))
        terms = weights + (label_values - normalizer)
        mixture = terms.logsumexp(0)
        # a label that no sample allows has the probability zero at every temperature
        label_weights = label_weights * (mixture > -1e90)
        values = -(label_weights * mixture).flatten(1).sum(1)
        if not derivatives:
            return values, 0.0, 0.0
        probabilities = (scaled - normalizer).exp()
        mean = (probabilities * scaled).sum(-1, keepdim=True)
        variance = (probabilities * (scaled - mean).square()).sum(-1, keepdim=True)
        first = mean - label_values
        second = first.square() - first - variance
        posterior = (terms - mixture).exp()
        slope = (posterior * first).sum(0)
        curvature = (posterior * second).sum(0) - slope.square()
        return values, -float((label_weights * slope).sum()), -float((label_weights * curvature).sum())


class PredictiveProblem(TemperatureProblem):
    """Negative log-likelihood of targets under predictive distributions of any kind, with derivatives by autograd.

    Args:
        posterior: Posterior of the outputs.
        outputs: Sampled outputs ``[S, N, ...]``, in float64.
        targets: Targets of the examples.
    """

    def __init__(self, posterior: Posterior, outputs: Tensor, targets: Tensor) -> None:
        super().__init__(len(targets), outputs[:, :1].numel())
        self.posterior, self.outputs, self.targets = posterior, outputs, targets

    def select(self, rows: Tensor) -> Self:
        """Returns the problem of the examples with these indices."""
        return type(self)(self.posterior, self.outputs[:, rows], self.targets[rows])

    def nll(self, u: float, rows: slice, derivatives: bool) -> tuple[Tensor, float, float]:
        """Returns the NLL of some examples, and the derivatives of their sum; see :meth:`TemperatureProblem.nll`."""
        with torch.set_grad_enabled(derivatives):
            log_t = self.outputs.new_tensor(u).requires_grad_(derivatives)
            predictive = apply_temperature(self.posterior._predictive(self.outputs[:, rows]), log_t.exp())
            nll = predictive.nll(self.targets[rows])
            if not derivatives:
                return nll, 0.0, 0.0
            (first,) = torch.autograd.grad(nll.sum(), log_t, create_graph=True)
            (second,) = torch.autograd.grad(first, log_t)
        return nll.detach(), first.item(), second.item()


def supports_temperature(predictive: Any) -> bool:
    """Returns True if a predictive distribution can be scaled by a temperature."""
    if isinstance(predictive, CategoricalPredictive):
        return True
    return hasattr(predictive, "rescale") and getattr(predictive, "can_rescale", True)


def apply_temperature(predictive: Any, temperature: Any, sample_counts: Tensor | None = None) -> Any:
    """Returns a predictive distribution at a temperature.

    Args:
        predictive: Predictive distribution of classes or of real-valued targets.
        temperature: Temperature, a float or a scalar tensor.
        sample_counts: Number of samples of each row, if it differs between rows.
    """
    if not supports_temperature(predictive):
        text = f"a {type(predictive).__name__} has no temperature; use the candidates 'plain', 'refit' and 'noise' of fb.calibrate"
        raise FlowBNNError(text, kind="unsupported", argument="likelihood")
    sample_counts = None if sample_counts is None else predictive.sample_counts
    if isinstance(predictive, CategoricalPredictive):
        return CategoricalPredictive(predictive.logits / temperature, sample_counts)
    return predictive.rescale(temperature)
