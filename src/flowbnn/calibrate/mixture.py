"""Mixture of the candidates of a calibration: stacked weights under a prior, and a temperature.

With few examples the candidate with the lowest NLL in a cross-validation is often not the best one. A mixture whose weights have a
prior of equal weights depends less on chance. Several calibrated networks that disagree are underconfident on average, which its
temperature corrects. The members are almost calibrated, so the prior of this temperature is narrow.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flowbnn.calibrate.cross_validation import Folds, Predictions, gather
from flowbnn.methods.calibrators.log_temperature import ClassProblem
from flowbnn.methods.calibrators.temperature import TemperedPosterior
from flowbnn.metrics.checks import IGNORED, expected_value
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.mixture import MixturePosterior, assign_samples
from flowbnn.predictive import CategoricalPredictive

PRIOR_SCALE = 0.1  # standard deviation of log T: 95 % of the prior lie between temperatures of 0.82 and 1.22


def stacking_weights(log_likelihood: Tensor, iterations: int = 300, prior: float = 0.0) -> Tensor:
    r"""Returns the weights of a mixture that maximize the log-likelihood of predictions under a prior of equal weights.

    .. math:: \max_w \sum_i \log \sum_k w_k\, p_k(y_i) + a \sum_k \log w_k, \qquad w_k \ge 0, \quad \sum_k w_k = 1

    This is stacking of predictive distributions (Yao et al. 2018, https://arxiv.org/abs/1704.02030). The problem is concave, and
    expectation maximization increases the objective in every iteration.

    Args:
        log_likelihood: Log-likelihoods ``[N, K]`` of N examples under K predictive distributions that were not fitted to them.
        iterations: Number of iterations.
        prior: Strength :math:`a` of the prior, as a number of examples that each distribution alone explains.

    >>> good, bad = torch.full((50, 1), -0.1), torch.full((50, 1), -2.0)
    >>> stacking_weights(torch.cat([good, bad], 1)).round(decimals=3).tolist()
    [1.0, 0.0]
    """
    log_likelihood = log_likelihood.double()
    weights = log_likelihood.new_full((log_likelihood.shape[1],), 1.0 / log_likelihood.shape[1])
    for _ in range(iterations):
        counts = (log_likelihood + weights.log()).softmax(1).sum(0) + prior
        weights = counts / counts.sum()
    return weights


class TemperedMixture(NamedTuple):
    """Weights of the candidates in a mixture, and its temperature.

    Args:
        weights: Weights ``[K]``.
        temperature: Temperature of each sample.
    """

    weights: Tensor
    temperature: float


class MixtureProblem:
    """Fits mixtures of candidates to some examples, by their predictions for folds that they were not fitted to.

    A mixture of calibrated members is underconfident, so that its temperature is fitted as well.

    Args:
        candidates: Predictions of the candidates, with class probabilities.
        targets: Targets of all examples, on the CPU.
    """

    num_samples: ClassVar[int] = 64  # the default of a mixture with unequal weights

    def __init__(self, candidates: Sequence[Predictions], targets: Tensor) -> None:
        self.targets, self.num_candidates = targets, len(candidates)
        probabilities = [each.probabilities for each in candidates if each.probabilities is not None]
        self.log_samples = [
            values.log()[None] if each.log_samples is None else each.log_samples
            for each, values in zip(candidates, probabilities, strict=True)
        ]
        self.log_likelihood = -torch.stack([each.nll for each in candidates], 1)
        self.examples = torch.arange(len(targets))
        if probabilities[0].ndim > 2:  # pixels or tokens are mixed one at a time
            self.log_likelihood, self.examples = position_log_likelihood(torch.stack(probabilities), targets)

    def fit(
        self, rows: Tensor, selection: Sequence[int] | None = None, max_numbers: int = 2**22
    ) -> TemperedMixture:
        """Returns the weights and the temperature for some examples.

        Args:
            rows: Indices of the examples.
            selection: Indices of the candidates to mix. The default is all.
            max_numbers: Number of log-probabilities that the temperature is fitted to. Of more examples a part suffices.
        """
        selection = range(self.num_candidates) if selection is None else selection
        log_likelihood = self.log_likelihood[torch.isin(self.examples, rows)][:, list(selection)]
        fitted = stacking_weights(log_likelihood, prior=1.0)
        weights = fitted.new_zeros(self.num_candidates).index_copy(0, torch.tensor(list(selection)), fitted)
        size = self.num_samples * self.log_samples[0][0, 0].numel()
        rows = rows[:: max(1, len(rows) * size // max_numbers)]
        log_samples, log_weights = self.samples(weights, rows)
        problem = ClassProblem(log_samples.double(), self.targets[rows], log_weights)
        (fit,) = problem.fit(prior_scale=PRIOR_SCALE)
        return TemperedMixture(weights, fit.temperature)

    def samples(self, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities ``[S, B, ..., C]`` of samples of a mixture for some examples, and their log-weights ``[S]``.

        A member with one sample, such as a scaled network, has the weight of all samples that the mixture assigns to it.
        """
        schedule = assign_samples(weights.tolist(), self.num_samples)
        counts = Counter((index, number % len(self.log_samples[index])) for index, number in schedule)
        values = torch.stack([self.log_samples[index][number, rows] for index, number in counts])
        return values, torch.tensor(list(counts.values()), dtype=torch.float64).div(self.num_samples).log()

    def predict(self, mixture: TemperedMixture, rows: Tensor) -> CategoricalPredictive:
        """Returns the mean prediction of a mixture for some examples."""
        means = []
        for chunk in rows.split(256):
            log_samples, log_weights = self.samples(mixture.weights, chunk)
            tempered = torch.log_softmax(log_samples / mixture.temperature, -1)
            log_weights = log_weights.to(tempered).view(-1, *(1,) * (tempered.ndim - 1))
            means.append((tempered + log_weights).logsumexp(0))
        return CategoricalPredictive(torch.cat(means)[None])


def predict_mixture(folds: Folds, candidates: Mapping[str, Predictions]) -> Predictions:
    """Predicts classes by a mixture of all candidates at a temperature, which are fitted to the predictions of the other folds.

    Args:
        folds: Folds of the data.
        candidates: Predictions of the candidates, with class probabilities.
    """
    members, all_rows = list(candidates.values()), torch.arange(len(folds.data))
    problem = MixtureProblem(members, folds.data.targets.cpu())
    predictives = [
        problem.predict(problem.fit(training.sort().values), group)
        for training, group in zip(folds.training_rows, folds.groups, strict=True)
    ]

    def finish() -> Posterior:
        weights = problem.fit(all_rows).weights.tolist()
        # members with less weight cost time and hardly change the prediction
        selection = [index for index, weight in enumerate(weights) if weight >= 0.02]
        mixture = problem.fit(all_rows, selection)
        posteriors = [members[index].finish() for index in selection]
        posterior = MixturePosterior(posteriors, mixture.weights[selection].tolist())
        return TemperedPosterior(posterior, mixture.temperature)

    return gather(folds, predictives, finish)


def position_log_likelihood(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-likelihoods ``[M, K]`` of all positions with a target, and the example of each, ``[M]``.

    Args:
        probabilities: Class probabilities of K candidates, ``[K, N, *positions, C]``.
        targets: Class labels ``[N, *positions]``, or soft labels ``[N, *positions, C]``.
    """
    examples = torch.arange(len(targets)).view(-1, *(1,) * (probabilities.ndim - 3))
    examples = examples.expand(probabilities.shape[1:-1])
    if targets.is_floating_point():
        values = torch.stack([expected_value(member.log(), targets) for member in probabilities], -1)
        return values.flatten(0, -2), examples.flatten()
    valid = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(-1)
    columns = [member.gather(-1, index).squeeze(-1)[valid].log() for member in probabilities]
    return torch.stack(columns, -1), examples[valid]
