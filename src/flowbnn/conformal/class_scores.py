r"""Scores of class labels for prediction sets. A set has every class whose score is at most a threshold.

Classes are ordered by their predictive probability :math:`p_{(1)} \ge p_{(2)} \ge \dots`, and :math:`r` is the rank of a class.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from flowbnn.conformal.thresholds import exact
from flowbnn.options import Count, NonNegative, Probability, options


class ClassScore(ABC):
    """Base class for scores of class labels. A subclass defines :meth:`scores`."""

    @abstractmethod
    def scores(self, log_probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Returns the score of every class, ``[..., C]``. Larger scores mean less plausible classes.

        Args:
            log_probabilities: Logarithms of the predictive probabilities, ``[..., C]``, in double precision.
            uniform: Uniform random numbers ``[..., 1]``, which randomized scores use.
        """

    @property
    def needs_tuning(self) -> bool:
        """True if settings are chosen on a part of the held-out data."""
        return False

    @property
    def is_randomized(self) -> bool:
        """True if the scores depend on random numbers."""
        return False

    def tuned(self, log_probabilities: Tensor, targets: Tensor, uniform: Tensor, coverage: float) -> Self:
        """Returns the score with settings that make sets small on some examples.

        Args:
            log_probabilities: Logarithms of the predictive probabilities, ``[N, C]``.
            targets: Class labels ``[N]``.
            uniform: Uniform random numbers ``[N, 1]``.
            coverage: Coverage of the sets.
        """
        return self


@options
class NLL(ClassScore):
    r"""Score :math:`s(x, y) = -\log p(y \mid x)` of the predictive distribution, for conformalized Bayesian prediction.

    Its sets are the smallest on average ([Sadinle 2019](https://arxiv.org/abs/1609.00451)). They are those of the score
    :math:`1 - p(y \mid x)`, which is called LAC or THR.

    >>> probabilities = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    >>> NLL().scores(probabilities.log(), torch.ones(1, 1))
    tensor([[0.3567, 1.6094, 2.3026]], dtype=torch.float64)
    """

    def scores(self, log_probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Returns minus the log-probabilities."""
        return -log_probabilities


@options
class APS(ClassScore):
    r"""Adaptive prediction sets (APS, [Romano 2020](https://arxiv.org/abs/2006.02544)), larger for more uncertain inputs.

    .. math:: s(x, y) = \sum_{j < r} p_{(j)} + u \, p_{(r)}

    Args:
        randomized: If True, :math:`u` is uniform in [0, 1] for each input. The coverage is then exact up to :math:`1 / (n + 1)`, but
            sets differ from call to call, and some are empty. If False, :math:`u = 0`. Sets are then deterministic and never empty.
            They cover more than asked if the most probable class alone is right often enough.

    >>> probabilities = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    >>> APS().scores(probabilities.log(), torch.ones(1, 1))
    tensor([[0.0000, 0.7000, 0.9000]], dtype=torch.float64)
    """

    randomized: bool = False

    @property
    def is_randomized(self) -> bool:
        """True if the scores depend on random numbers."""
        return self.randomized

    def scores(self, log_probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Returns the probability of all more probable classes, and a share of the class itself."""
        probabilities = log_probabilities.exp()
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        values = (before + uniform * ordered if self.randomized else before) + self._penalties(ordered)
        return torch.empty_like(values).scatter(-1, order, values)

    def _penalties(self, ordered: Tensor) -> Tensor:
        """Returns what is added to the scores ``[..., C]`` of classes in the order of their ranks."""
        return torch.zeros_like(ordered)


@options
class RAPS(APS):
    r"""Regularized adaptive prediction sets (RAPS, [Angelopoulos 2021](https://arxiv.org/abs/2009.14193)).

    .. math:: s(x, y) = \sum_{j < r} p_{(j)} + u \, p_{(r)} + \lambda \max(0, r - k)

    The penalty avoids large sets of many improbable classes.

    Args:
        randomized: If True, :math:`u` is uniform in [0, 1] for each input, otherwise it is 0, as in :class:`APS`.
        penalty: Penalty :math:`\lambda`. ``"auto"`` chooses the one with the smallest sets on a part of the held-out data, among 0,
            0.001, 0.01, 0.1, 0.2 and 0.5.
        rank: Rank :math:`k` up to which classes have no penalty. ``"auto"`` chooses it together with the penalty, among the ranks up
            to the one that covers the labels of that part.
        tuning_fraction: Fraction of the held-out data for the choice of penalty and rank. They are not used for the threshold.

    >>> probabilities = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    >>> RAPS(penalty=0.1, rank=1).scores(probabilities.log(), torch.ones(1, 1))
    tensor([[0.0000, 0.8000, 1.1000]], dtype=torch.float64)
    """

    penalty: NonNegative | Literal["auto"] = "auto"
    rank: Count | Literal["auto"] = "auto"
    tuning_fraction: Probability = 0.2

    @property
    def needs_tuning(self) -> bool:
        """True if penalty or rank are chosen on a part of the held-out data."""
        return self.penalty == "auto" or self.rank == "auto"

    def _penalties(self, ordered: Tensor) -> Tensor:
        assert self.penalty != "auto"
        assert self.rank != "auto"
        ranks = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)
        return (self.penalty * (ranks - self.rank).clamp(min=0.0)).expand_as(ordered)

    def tuned(self, log_probabilities: Tensor, targets: Tensor, uniform: Tensor, coverage: float) -> Self:
        """Returns the score with the penalty and the rank of the smallest sets on some examples."""
        labels, last = targets.unsqueeze(-1), self.rank
        if last == "auto":
            label_values = log_probabilities.gather(-1, labels)
            last = int(_upper_quantile((log_probabilities >= label_values).sum(-1), coverage))
        ranks = range(1, last + 1) if self.rank == "auto" else (last,)
        # the penalties of the paper, and no penalty
        penalties = (0.0, 0.001, 0.01, 0.1, 0.2, 0.5) if self.penalty == "auto" else (self.penalty,)
        best, smallest = self, float("inf")
        for penalty in penalties:
            for rank in ranks if penalty else ranks[-1:]:
                candidate = replace(self, penalty=penalty, rank=rank)
                scores = candidate.scores(log_probabilities, uniform)
                threshold = _upper_quantile(scores.gather(-1, labels).squeeze(-1), coverage)
                size = float((scores <= threshold).double().sum(-1).mean())
                if size < smallest:
                    best, smallest = candidate, size
        return best


def _upper_quantile(values: Tensor, coverage: float) -> Tensor:
    """Returns the value of rank ``ceil((n + 1) coverage)``, or the largest one."""
    rank = -(-(len(values) + 1) * exact(coverage) // 1)
    return values.sort().values[min(int(rank), len(values)) - 1]


CLASS_SCORES: dict[str, ClassScore] = {"nll": NLL(), "aps": APS(), "raps": RAPS()}
