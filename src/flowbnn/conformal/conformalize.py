r"""Prediction sets and intervals with a guaranteed coverage, for any posterior.

A score :math:`s(x, y)` says how badly a target fits the prediction. Held-out data give a threshold :math:`\hat\lambda`
(:mod:`flowbnn.conformal.thresholds`). The set :math:`\{y : s(x, y) \le \hat\lambda\}` then has the target of a new input with a
probability of at least the coverage. This holds for any network if the held-out data and the new data are exchangeable.

An image or a text has many positions. Its loss is the fraction of positions whose label is not in the set, and the threshold controls
the mean loss of images.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.batches import require_targets
from flowbnn.conformal.class_scores import CLASS_SCORES, RAPS, ClassScore
from flowbnn.conformal.interval_scores import INTERVAL_SCORES, IntervalScore
from flowbnn.conformal.thresholds import exact, least_examples, loss_threshold, too_few_examples
from flowbnn.data.formats import as_loader
from flowbnn.errors import (
    FlowBNNError,
    describe_value,
    nearest,
    pluralize,
    quote_names,
    requirement_error,
    warn,
)
from flowbnn.likelihoods import Bernoulli, Categorical
from flowbnn.metrics.checks import IGNORED, check_any_target, check_hard_labels
from flowbnn.options import Probability, checked
from flowbnn.posterior import Posterior
from flowbnn.posterior.prediction import new_seed
from flowbnn.predictive import ContinuousPredictive, Interval, SurvivalPredictive

ScoreName = Literal["nll", "aps", "raps", "cqr", "absolute", "normalized"]


@dataclass(frozen=True)
class ConformalClassifier:
    """Prediction sets of class labels, made by :func:`conformalize`.

    Args:
        posterior: Posterior of any method.
        score: Score of class labels.
        thresholds: Threshold of each class, ``[C]``, equal for all classes unless sets are class-conditional.
        coverage: Coverage of the sets.
        allow_empty: If False, every set has at least the most probable class.
        options: Options of ``posterior.predict``, with the seed of the sampled networks.
    """

    posterior: Posterior
    score: ClassScore
    thresholds: Tensor
    coverage: float
    allow_empty: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, inputs: Any) -> Any:
        """Returns the predictive distribution of the posterior.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        return self.posterior.predict(inputs, **self.options)

    @checked
    def predict_set(self, inputs: Any, *, seed: int | None = None) -> Tensor:
        """Returns prediction sets as booleans ``[B, C]``, or ``[B, *positions, C]``.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
            seed: Seed of randomized scores. None uses torch's global generator. Inputs of different calls need different seeds.
        """
        return self._sets(self.predict(inputs).log_probabilities, seed)

    def _sets(self, log_probabilities: Tensor, seed: int | None) -> Tensor:
        """Returns the sets for log-probabilities ``[..., C]``."""
        log_probabilities = log_probabilities.double()
        uniform = draw_uniform(log_probabilities, self.score, seed)
        sets = self.score.scores(log_probabilities, uniform) <= self.thresholds.to(log_probabilities)
        if not self.allow_empty:
            sets = sets.scatter(-1, log_probabilities.argmax(-1, keepdim=True), True)
        return sets

    @checked
    def evaluate(self, data: Any, *, seed: int | None = 0) -> dict[str, float]:
        """Returns coverage and size of the sets on labelled data.

        Args:
            data: Loader, ``Dataset`` or pair of inputs and targets.
            seed: Seed of randomized scores.

        Returns:
            ``coverage`` is the fraction of labels in their sets, ``size`` the mean number of classes, ``empty`` the fraction of empty
            sets, and ``class_coverage`` the smallest coverage of a class. Images count equally, whatever their number of labels.
        """
        predictive, targets = predict_data(self.posterior, data, self.options)
        targets = class_labels(targets)
        sets = self._sets(predictive.log_probabilities, seed)
        labels = targets.to(sets.device)
        valid = labels != IGNORED
        covered = sets.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).double()
        weights, number = example_weights(valid)
        sizes = sets.sum(-1).double()
        classes = [covered[labels == label].mean() for label in labels[valid].unique()]
        return {
            "coverage": float((covered[valid] * weights).sum() / number),
            "size": float((sizes[valid] * weights).sum() / number),
            "empty": float(((sizes == 0).double()[valid] * weights).sum() / number),
            "class_coverage": float(torch.stack(classes).min()),
        }


@dataclass(frozen=True)
class ConformalRegressor:
    """Prediction intervals of real-valued targets, made by :func:`conformalize`. Each target of an input has its own coverage.

    Args:
        posterior: Posterior of any method.
        score: Score of real-valued targets.
        thresholds: Threshold of each target, ``[D]``.
        coverage: Coverage of the intervals.
        options: Options of ``posterior.predict``, with the seed of the sampled networks.
    """

    posterior: Posterior
    score: IntervalScore
    thresholds: Tensor
    coverage: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, inputs: Any) -> Any:
        """Returns the predictive distribution of the posterior.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        return self.posterior.predict(inputs, **self.options)

    def predict_interval(self, inputs: Any) -> Interval:
        """Returns prediction intervals with ends in the shape of the targets.

        With the score ``"nll"`` it is the smallest interval that has the whole region of :meth:`predict_region`.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        low, high = self.predict_region(inputs)
        return Interval(low[0], high.nan_to_num(-math.inf).amax(0))

    def predict_region(self, inputs: Any) -> Interval:
        """Returns prediction regions as unions of R intervals, with ends ``[R, B, ...]``, NaN if there are fewer than R.

        Regions of the score ``"nll"`` may have several intervals. Those of other scores have one.

        Args:
            inputs: Inputs, as in ``posterior.predict``.
        """
        predictive = self.predict(inputs)
        region = self.score.region(predictive, self.thresholds, self.coverage)
        return Interval(*(end.reshape(len(end), *predictive.mean.shape) for end in region))

    def evaluate(self, data: Any) -> dict[str, float]:
        """Returns coverage and mean width of the regions on data with targets.

        Args:
            data: Loader, ``Dataset`` or pair of inputs and targets.
        """
        predictive, targets = predict_data(self.posterior, data, self.options)
        scores = interval_scores(self.score, predictive, targets, self.coverage)
        low, high = self.score.region(predictive, self.thresholds, self.coverage)
        widths = (high - low).nan_to_num(0.0).sum(0)
        return {
            "coverage": float((scores <= self.thresholds.to(scores)).double().mean()),
            "width": float(widths.double().mean()),
        }


@checked
def conformalize(
    posterior: Posterior,
    held_out: Any,
    coverage: Probability = 0.9,
    score: ScoreName | ClassScore | IntervalScore = "nll",
    *,
    class_conditional: bool = False,
    allow_empty: bool = True,
    seed: int = 0,
    **options: Any,
) -> Any:
    r"""Returns prediction sets or intervals that have the target with a guaranteed probability.

    The coverage is guaranteed on average over held-out data and new data that are exchangeable. For fixed held-out data of n examples
    it varies by about :math:`\sqrt{c (1 - c) / n}`.

    Args:
        posterior: Posterior of any method.
        held_out: Data that neither the network nor its calibration has seen: a loader, ``Dataset`` or pair of inputs and targets.
        coverage: Coverage c, the least probability that a set has the target.
        score: Score of targets. For classes ``"nll"`` (smallest sets), ``"aps"`` or ``"raps"`` (larger sets for more uncertain inputs).
            For real values ``"nll"`` (regions of highest density), ``"cqr"``, ``"absolute"`` or ``"normalized"``. Objects such as
            ``fb.conformal.APS(randomized=True)`` have settings.
        class_conditional: If True, every class has the coverage, with its own threshold (Mondrian conformal prediction).
        allow_empty: If False, every set has at least the most probable class. Sets may then cover more than needed.
        seed: Seed of the sampled networks, of randomized scores and of the choice of tuning data.
        options: Other options of ``posterior.predict``, which predictions of the result use too.

    Returns:
        A :class:`ConformalClassifier` with ``predict_set``, or a :class:`ConformalRegressor` with ``predict_interval``.

    Raises:
        FlowBNNError: If there are fewer than :math:`1 / (1 - c) - 1` held-out examples, or if the score does not fit the targets.

    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.posterior import PointPosterior
    >>> generator = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(99, 2, generator=generator)
    >>> posterior = PointPosterior(torch.nn.Identity(), Categorical())
    >>> sets = conformalize(posterior, (inputs, inputs.argmax(1)), coverage=0.9)
    >>> sets.predict_set(torch.tensor([[5.0, 0.0], [0.0, 5.0]]))
    tensor([[ True, False],
            [False,  True]])
    """
    options = {"keep_samples": keep_samples(posterior), "seed": seed, **options}
    predictive, targets = predict_data(posterior, held_out, options)
    if hasattr(predictive, "log_probabilities"):
        chosen = _select_score(score, CLASS_SCORES, ClassScore, "classes")
        problem = _Labels(predictive.log_probabilities.double(), class_labels(targets), chosen, seed)
        tuned, thresholds = problem.thresholds(coverage, class_conditional)
        return ConformalClassifier(posterior, tuned, thresholds, coverage, allow_empty, options)
    if not isinstance(predictive, ContinuousPredictive) or isinstance(predictive, SurvivalPredictive):
        raise requirement_error(
            "conformalize", "classes, or uncensored numbers", describe_value(predictive), argument="posterior"
        )
    if class_conditional:
        raise requirement_error(
            "class_conditional=True", "classes", "real values", argument="class_conditional"
        )
    interval_score = _select_score(score, INTERVAL_SCORES, IntervalScore, "real values")
    scores = interval_scores(interval_score, predictive, targets, coverage)
    level, number = 1 - exact(coverage), len(scores)
    if number < least_examples(level):
        raise too_few_examples("coverage", coverage, number, level)
    values = [loss_threshold(column, torch.ones_like(column), number, level) for column in scores.unbind(1)]
    return ConformalRegressor(
        posterior, interval_score, torch.tensor(values, dtype=torch.float64), coverage, options
    )


@dataclass(frozen=True)
class _Labels:
    """Held-out predictions and labels, from which thresholds are computed.

    Args:
        log_probabilities: Logarithms of the predictive probabilities, ``[N, *positions, C]``.
        targets: Labels ``[N, *positions]``, -100 if unknown.
        score: Score of class labels.
        seed: Seed of randomized scores and of the choice of tuning data.
    """

    log_probabilities: Tensor
    targets: Tensor
    score: ClassScore
    seed: int

    def thresholds(self, coverage: float, class_conditional: bool) -> tuple[ClassScore, Tensor]:
        """Returns the score with its settings, and the threshold of each class.

        Args:
            coverage: Coverage of the sets.
            class_conditional: If True, every class has its own threshold.
        """
        uniform = draw_uniform(self.log_probabilities, self.score, self.seed)
        score, rows, note = self._tune(uniform, coverage)
        log_probabilities, targets = self.log_probabilities[rows], self.targets[rows]
        values = score.scores(log_probabilities, uniform[rows])
        scores = values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        level, classes = 1 - exact(coverage), values.shape[-1]
        if class_conditional:
            return score, self._by_class(scores, targets, classes, level)
        weights, number = example_weights(targets != IGNORED)
        if number < least_examples(level):
            raise too_few_examples("coverage", coverage, number, level, note)
        threshold = loss_threshold(scores[targets != IGNORED], weights, number, level)
        return score, values.new_full((classes,), threshold)

    def _tune(self, uniform: Tensor, coverage: float) -> tuple[ClassScore, Tensor, str]:
        """Returns the score with its settings, the rows that are left for the threshold, and words about the others."""
        number = len(self.targets)
        rows = torch.arange(number)
        if not self.score.needs_tuning:
            return self.score, rows, ""
        fraction = self.score.tuning_fraction if isinstance(self.score, RAPS) else RAPS.tuning_fraction
        count = max(1, int(fraction * number))
        rows = torch.randperm(number, generator=torch.Generator().manual_seed(self.seed))
        tuning = rows[:count]
        valid = self.targets[tuning] != IGNORED
        log_probabilities, targets = self.log_probabilities[tuning][valid], self.targets[tuning][valid]
        note = f" beside {pluralize(count, 'example')} for tuning"
        tuned = self.score.tuned(log_probabilities, targets, uniform[tuning][valid], coverage)
        return tuned, rows[count:], note

    @staticmethod
    def _by_class(scores: Tensor, targets: Tensor, classes: int, level: Fraction) -> Tensor:
        """Returns one threshold for each class, infinite for classes with too few examples."""
        thresholds, scarce = scores.new_full((classes,), math.inf), []
        for label in range(classes):
            members = targets == label
            weights, number = example_weights(members)
            thresholds[label] = loss_threshold(scores[members], weights, number, level)
            if number < least_examples(level):
                scarce.append(f"{label} ({number})")
        if scarce:
            least = least_examples(level)
            need = f"at least {least} examples per class"
            fields: dict[str, Any] = {"kind": "examples", "argument": "held_out", "least": least}
            error = requirement_error(
                "class_conditional=True", need, f"fewer of {quote_names(scarce)}", **fields
            )
            if len(scarce) == classes:
                raise error
            warn(f"{error}; every set has these classes", **fields)
        return thresholds


def keep_samples(posterior: Posterior) -> bool | Literal["auto"]:
    """Returns True unless sets need mean probabilities only."""
    return "auto" if isinstance(posterior.likelihood, Categorical | Bernoulli) else True


def predict_data(posterior: Posterior, data: Any, options: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """Returns the predictive distribution and the targets of data.

    Raises:
        FlowBNNError: If the data have no targets.
    """
    predictive, targets = posterior.predict_with_targets(
        as_loader(data, argument="held_out", columns=posterior.columns), **options
    )
    targets = require_targets(targets, "held_out")
    if isinstance(posterior.likelihood, Categorical | Bernoulli) and not targets.is_floating_point():
        check_any_target(targets != IGNORED)
    return predictive, targets


def class_labels(targets: Tensor) -> Tensor:
    """Returns class labels. Raises FlowBNNError for soft labels, of which sets have no coverage."""
    check_hard_labels(targets, "a prediction set", "held_out")
    return targets


def draw_uniform(log_probabilities: Tensor, score: ClassScore, seed: int | None) -> Tensor:
    """Returns uniform random numbers ``[..., 1]`` for randomized scores, and ones for others."""
    shape = (*log_probabilities.shape[:-1], 1)
    if not score.is_randomized:
        return torch.ones(shape, device=log_probabilities.device, dtype=log_probabilities.dtype)
    generator = torch.Generator().manual_seed(new_seed() if seed is None else seed)
    return torch.rand(shape, generator=generator, dtype=log_probabilities.dtype).to(log_probabilities.device)


def example_weights(members: Tensor) -> tuple[Tensor, int]:
    """Returns the weights of members, which sum to one for each example, and the number of examples that have members.

    Args:
        members: Booleans ``[N, *positions]``.
    """
    counts = members.reshape(len(members), -1).sum(-1)
    weights = (1.0 / counts.clamp(min=1).double()).view(-1, *(1,) * (members.ndim - 1)).expand(members.shape)
    return weights[members], int((counts > 0).sum())


def interval_scores(score: IntervalScore, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
    """Returns the scores of targets, ``[B, D]``."""
    targets = predictive._check_targets(targets)
    return score.scores(predictive, targets.to(predictive.samples), coverage).double()


def _select_score(score: Any, names: Mapping[str, Any], cls: type, kind: str) -> Any:
    """Returns the score of a name. Raises FlowBNNError if it is a score of other targets."""
    if isinstance(score, cls):
        return score
    if score in names:
        return names[score]
    text = f"score={describe_value(score)} does not serve {kind}{nearest(str(score), names)}"
    raise FlowBNNError(text, kind="unsupported", argument="score")
