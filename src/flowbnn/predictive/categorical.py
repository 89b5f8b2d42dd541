"""Predicted classes."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.metrics import accuracy, brier_score, calibration_error
from flowbnn.metrics.checks import average, check_classes, check_probabilities
from flowbnn.options import Count, Probability, checked
from flowbnn.predictive.base import Predictive, check_finite, check_samples, quantile_levels

ABSTAIN = -1
"""The label of an input that :meth:`CategoricalPredictive.decide` declines to answer."""


class CategoricalPredictive(Predictive):
    r"""Class probabilities from S samples of the logits.

    Args:
        logits: ``[S, B, C]``, unnormalised; minus infinity rules a class out.
        sample_counts: how many samples each input had, ``[B]``, where they differ: the first ones of the S.

    >>> logits = torch.tensor([[[2.0, 0.0], [3.0, 0.0]], [[2.0, 0.0], [-3.0, 0.0]]])  # 2 samples, 2 inputs, 2 classes
    >>> prediction = CategoricalPredictive(logits)
    >>> prediction
    CategoricalPredictive(samples=2, inputs=2, classes=2; confidence 0.690, entropy 0.529 = aleatoric 0.278 + epistemic 0.251)
    >>> prediction.epistemic  # the samples agree on the first input only
    tensor([0.0000, 0.5023])
    >>> prediction.decide(abstain_above=0.9)
    tensor([ 0, -1])
    """

    uncertainties = ("entropy", "risk", "epistemic", "total_variance", "aleatoric")
    shares = ("entropy", "risk")

    @checked
    def __init__(self, logits: Tensor, sample_counts: Tensor | None = None) -> None:
        logits, self._sample_counts = check_samples(logits, "logits", "[S, B, C]", sample_counts, least=2)
        self._tensors = (logits,)
        self._tensors = (self._present(F.log_softmax(logits, dim=-1), math.nan),)
        check_finite(self._present(self._tensors[0], 0.0).isnan())

    @classmethod
    @checked
    def from_probabilities(cls, probabilities: Tensor) -> Self:
        """From probabilities ``[S, B, C]`` that sum to one over classes.

        >>> CategoricalPredictive.from_probabilities(torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]])).probabilities
        tensor([[0.7500, 0.2500]])
        """
        probabilities, _ = check_samples(probabilities, "probabilities", "[S, B, C]")
        check_finite(~torch.isfinite(probabilities))
        return cls(torch.log(check_probabilities(probabilities, ndim=3)))

    @classmethod
    @checked
    def from_bernoulli(cls, logits: Tensor, sample_counts: Tensor | None = None) -> Self:
        r"""From one logit per input, ``[S, B]`` or ``[S, B, 1]``: class 1 has probability :math:`\sigma(l)`, class 0 the rest.

        >>> CategoricalPredictive.from_bernoulli(torch.zeros(3, 1)).probabilities
        tensor([[0.5000, 0.5000]])
        """
        logits = logits.unsqueeze(-1) if logits.ndim == 2 else logits
        logits, _ = check_samples(logits, "Bernoulli logits", "[S, B] or [S, B, 1]", most=1)
        return cls(torch.cat([torch.zeros_like(logits), logits], dim=-1), sample_counts)

    @property
    def log_samples(self) -> Tensor:
        """Log-probabilities of each sample, ``[S, B, C]``; NaN where an input did not have it."""
        return self._tensors[0]

    @property
    def samples(self) -> Tensor:
        """Probabilities of each sample, ``[S, B, C]``; NaN where an input did not have it."""
        return self.log_samples.exp()

    @cached_property
    def log_probabilities(self) -> Tensor:
        r""":math:`\log \frac1S \sum_s p_s`, ``[B, C]``, exact where the probability itself would underflow."""
        return self._log_mean_exp(self.log_samples)

    @cached_property
    def probabilities(self) -> Tensor:
        """Mean probabilities, ``[B, C]``."""
        return self.log_probabilities.exp()

    @property
    def labels(self) -> Tensor:
        """The most probable class, ``[B]``."""
        return self.probabilities.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class, ``[B]``."""
        return self.probabilities.amax(-1)

    @property
    def confidence_error(self) -> Tensor:
        """Monte Carlo error of the :attr:`confidence`, ``[B]``: to be read beside it where sampling was adaptive."""
        return self.standard_error.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)

    @property
    def risk(self) -> Tensor:
        """Predicted chance that the label is wrong, ``1 - confidence``."""
        return 1.0 - self.confidence

    @cached_property
    def variance(self) -> Tensor:
        r"""Variance of each class's probability over samples, :math:`\frac1S \sum_s (p_{sc} - \bar p_c)^2`, ``[B, C]``."""
        return self._spread(self.samples)

    @property
    def total_variance(self) -> Tensor:
        """Sum of :attr:`variance` over classes, ``[B]``."""
        return self.variance.sum(-1)

    @cached_property
    def entropy(self) -> Tensor:
        r"""Entropy of the mean, :math:`-\sum_c \bar p_c \log \bar p_c`, in nats: all the uncertainty, ``[B]``."""
        return _entropy(self.log_probabilities)

    @cached_property
    def expected_entropy(self) -> Tensor:
        r"""Mean entropy of the samples, :math:`\frac1S \sum_s H[p_s]`: what stays if the network were known, ``[B]``."""
        return self._mean(_entropy(self.log_samples))

    @cached_property
    def mutual_information(self) -> Tensor:
        r"""What the label would tell about the network (Houlsby et al., 2011, "BALD"), in nats, ``[B]``:

        .. math:: I = H[\bar p] - \frac1S \sum_s H[p_s] = \frac1S \sum_s \mathrm{KL}(p_s \,\|\, \bar p) \ge 0 .

        Summed as :math:`p \log(p/q) - p + q`, whose every term is non-negative, since the difference of the two entropies
        drowns in rounding where the samples nearly agree.
        """
        p, q, ratio = self.samples, self.probabilities, self.log_samples - self.log_probabilities
        near = p * (ratio + torch.expm1(-ratio.clamp(min=-1.0)))
        far = torch.where(p > 0, p * ratio, 0.0) - p + q
        return self._mean(torch.where(ratio > -1.0, near, far).clamp(min=0.0).sum(-1))

    @property
    def aleatoric(self) -> Tensor:
        """:attr:`expected_entropy`: the uncertainty of the world, ``[B]``."""
        return self.expected_entropy

    @property
    def epistemic(self) -> Tensor:
        """:attr:`mutual_information`: the uncertainty of the network, ``[B]``."""
        return self.mutual_information

    @property
    def sampling_error(self) -> Tensor:
        """The largest :attr:`standard_error` among the classes' probabilities, ``[B]``."""
        return self.standard_error.amax(-1)

    @cached_property
    def decision_strength(self) -> Tensor:
        r"""How many standard errors the most probable class is ahead of the rival that comes closest to it, ``[B]``:

        .. math:: \min_{c \ne \hat y} \; \bar d_c \sqrt n / \hat\sigma(d_c), \qquad d_{sc} = p_{s \hat y} - p_{sc} .

        The differences are taken within samples (paired), so that what moves both classes alike does not count. Infinite where all
        samples agree to the last digit, zero with one sample.
        """
        samples, top = self.samples, self.labels.unsqueeze(-1)
        lead = samples.gather(-1, top.expand(self.num_samples, -1, -1)) - samples
        mean = self._mean(lead)
        error = (self._spread(lead) / (self._counts(lead) - 1.0).clamp(min=1.0)).sqrt()
        ahead = torch.where(mean > 0, mean / error, 0.0).scatter(-1, top, math.inf).amin(-1)
        return ahead.masked_fill(self.sample_counts == 1, 0.0)

    def uncertainty(self, by: str) -> Tensor:
        r"""An uncertainty by name, ``[B]``, as :meth:`decide` compares it.

        ``"entropy"`` is divided by :math:`\log C`, so that it lies in [0, 1]; ``"risk"`` is 1 - confidence; ``"epistemic"``
        and ``"aleatoric"`` are in nats; ``"total_variance"`` sums the variances of the classes.
        """
        value = super().uncertainty(by)
        return (value / math.log(self.log_samples.shape[-1])).clamp(max=1.0) if by == "entropy" else value

    @checked
    def nll(self, targets: Tensor | None = None) -> Tensor:
        r"""Negative log-likelihood :math:`-\log \bar p_y` of each target ``[B]``; without targets, of the predicted labels."""
        if targets is None:
            return -self.log_probabilities.amax(-1)
        targets = self._targets(targets)
        return -self.log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> Tensor:
        """Labels drawn from the mixture, ``[number, B]``; each draw takes one of the S samples for all inputs."""
        chosen, generator = self._chosen(number, seed)
        classes = self.log_samples.shape[-1]
        taken = self.samples.gather(0, chosen.unsqueeze(-1).expand(-1, -1, classes))
        return torch.multinomial(taken.reshape(-1, classes), 1, generator=generator).reshape(chosen.shape)

    @checked
    def quantiles(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Quantiles over samples of each class's probability, ``[Q, B, C]``, linear between order statistics.

        >>> samples = torch.tensor([[[0.2, 0.8]], [[0.4, 0.6]], [[0.9, 0.1]]])
        >>> CategoricalPredictive.from_probabilities(samples).quantiles([0.0, 0.5])[:, 0, 0]
        tensor([0.2000, 0.4000])
        """
        levels = quantile_levels(q, closed=True)
        # torch.quantile refuses more than 16 million numbers; samples that an input did not have come last
        ordered = self.samples.sort(0).values
        steps = (self.sample_counts - 1).to(ordered.dtype).view(1, -1, 1).expand(1, *ordered.shape[1:])
        quantiles = []
        for level in levels:
            place = level * steps
            low, high = (ordered.gather(0, end.long()) for end in (place.floor(), place.ceil()))
            quantiles.append(torch.lerp(low, high, place - place.floor()))
        return torch.cat(quantiles)

    @checked
    def credible_set(self, mass: Probability = 0.9) -> Tensor:
        """The fewest classes that together have at least this predictive probability, as booleans ``[B, C]``.

        >>> CategoricalPredictive.from_probabilities(torch.tensor([[[0.6, 0.1, 0.3]]])).credible_set(0.9)
        tensor([[ True, False,  True]])
        """
        ordered, order = self.probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        # 0.6 + 0.3 must count as 0.9 whichever way it was rounded
        needed = before < mass - 8 * torch.finfo(ordered.dtype).eps
        return torch.zeros_like(needed).scatter(-1, order, needed)

    def decide(self, abstain_above: float | Tensor, by: str = "entropy") -> Tensor:
        """Labels ``[B]``, with :data:`ABSTAIN` where the :meth:`uncertainty` ``by`` is above the threshold."""
        return self.labels.masked_fill(self._above(abstain_above, by), ABSTAIN)

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Accuracy, mean NLL, Brier score and 15-bin expected calibration error, as :mod:`flowbnn.metrics` defines them."""
        targets = self._targets(targets)
        return {
            "accuracy": accuracy(self.probabilities, targets),
            "nll": average(self.nll(targets)),  # in the log domain: finite where the probability underflows
            "brier": brier_score(self.probabilities, targets),
            "ece": calibration_error(self.probabilities, targets),
        }

    def _targets(self, targets: Tensor) -> Tensor:
        return check_classes(targets, *self.log_samples.shape[1:]).to(self.log_samples.device)

    def __repr__(self) -> str:
        _, inputs, classes = self.log_samples.shape
        text = ""
        if inputs:
            means = [average(x) for x in (self.confidence, self.entropy, self.aleatoric, self.epistemic)]
            text = "; confidence {:.3f}, entropy {:.3f} = aleatoric {:.3f} + epistemic {:.3f}".format(*means)
            if self._sample_counts is not None:
                text = text.replace(",", f" ± {average(self.confidence_error):.3f},", 1)
        return (
            f"CategoricalPredictive(samples={self._samples_text()}, inputs={inputs}, classes={classes}{text})"
        )


def _entropy(log_probabilities: Tensor) -> Tensor:
    p = log_probabilities.exp()
    return -torch.where(p > 0, p * log_probabilities, 0.0).sum(-1)
