"""Observation models: the distribution of a target given the outputs of a network.

A likelihood gives ``log_prob(outputs, targets)`` for each example and, from samples of outputs ``[S, B, ...]``, the predictive
distribution. To write one, subclass :class:`Likelihood` and define these two; the other methods have defaults.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, nearest, pluralize
from flowbnn.numerics import is_concrete
from flowbnn.options import Count, Positive, all_subclasses, checked
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive
from flowbnn.predictive.base import check_samples

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "learns_noise",
    "log_variance",
    "make_likelihood",
    "with_level",
]


class Likelihood(nn.Module, ABC):
    """``log_prob(outputs, targets)`` for each example, and the predictive distribution made of samples of outputs."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[B]``."""

    @abstractmethod
    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        """From outputs ``[S, B, ...]`` to a :class:`~flowbnn.predictive.Predictive`; each input had ``spent`` of the S samples."""

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        """What is wrong with targets that do not fit the outputs, in one line; empty where they fit."""
        return ""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs and targets that do not fit each other."""
        if problem := self.problem(outputs, targets):
            raise FlowBNNError(problem, kind="targets", argument="targets")

    def start(self, outputs: Tensor, targets: Tensor) -> None:
        """Set initial values from the first batch, before training."""

    def canonical(self, targets: Tensor) -> Tensor:
        """Targets in the form that predictives and metrics take."""
        return targets

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs whose prediction is the mean of the predictions of these, which are of one shape."""
        raise FlowBNNError(
            f"a {type(self).__name__} likelihood cannot average predictions; leave out views", kind="views"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"likelihood": type(self).__name__}


def _integers(targets: Tensor, advice: str) -> Tensor:
    """Class labels as integers; floating-point numbers without fractions are taken."""
    if targets.is_floating_point() and is_concrete(targets) and not bool((targets == targets.round()).all()):
        line = f"class labels must be integers, but these have fractions; {advice}"
        raise FlowBNNError(line, kind="targets", argument="targets")
    return targets.long()


class Categorical(Likelihood):
    r"""Classes: :math:`\log p(y \mid x) = \log \mathrm{softmax}(f(x))_y`, minus the cross entropy.

    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # -log(4)
    -1.3863
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = _single(outputs)
        if targets.is_floating_point():
            targets = self.canonical(targets)
        # torch ignores the label -100 by default; no label is special here
        return -F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=-(2**62))

    def canonical(self, targets: Tensor) -> Tensor:
        return _integers(targets, "of probabilities give argmax(1)")

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        return _stacked(outputs).log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive(outputs, sample_counts)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.ndim != 2:
            advice = ""
            if outputs.ndim > 2:
                advice = "; for labels of pixels or tokens give fb.fit a subclass of fb.likelihoods.Likelihood that sums over them"
            return (
                "a categorical likelihood takes outputs of shape (batch, classes), but the network gives "
                f"{tuple(outputs.shape)}{advice}"
            )
        if targets.is_floating_point() or targets.shape != outputs.shape[:1]:
            advice = "every example has one"
            if targets.is_floating_point():
                advice = "for real-valued targets use likelihood='gaussian'"
            elif targets.shape == (len(outputs), 1):
                advice = "give labels.squeeze(1)"
            elif targets.shape == outputs.shape:
                advice = "of one-hot labels give labels.argmax(1)" if _one_hot(targets) else SEVERAL_LABELS
            return (
                f"class labels are one integer for each of {pluralize(len(outputs), 'row')} of outputs, "
                f"not {targets.dtype} of shape {tuple(targets.shape)}; {advice}"
            )
        classes = outputs.shape[1]
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= classes):
            return (
                f"labels run from {int(targets.min())} to {int(targets.max())}, but the network has {pluralize(classes, 'output')}, "
                f"so labels must lie in 0 to {classes - 1}"
            )
        return ""


class Bernoulli(Likelihood):
    r"""Two classes from one logit: :math:`\log p(y \mid x) = y \log\sigma(f) + (1 - y) \log\sigma(-f)`.

    >>> round(Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # -log(2)
    -0.6931
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = _single(outputs).flatten()
        labels = targets.flatten().to(logits.dtype)
        return -F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def canonical(self, targets: Tensor) -> Tensor:
        return _integers(targets.flatten(), "of probabilities give (targets > 0.5).long()")

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = _stacked(outputs)
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        rows = outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(-1)
        return CategoricalPredictive.from_bernoulli(rows, sample_counts)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.numel() != outputs.shape[0]:
            return f"a Bernoulli likelihood takes one logit per example, but the network gives {tuple(outputs.shape)}"
        if targets.numel() != outputs.shape[0] or not bool(((targets == 0) | (targets == 1)).all()):
            return (
                "the targets of a Bernoulli likelihood are 0 or 1, one for each example; for real-valued targets say "
                "likelihood='gaussian', for more classes give the network an output for each"
            )
        return ""


class Gaussian(Likelihood):
    r"""Real-valued targets: :math:`y \sim \mathcal N(f(x), \sigma^2)`.

    Args:
        noise: where :math:`\sigma` comes from: ``"learned"``, one value per output, fitted with the network from whatever value it has
            (``log_scale.requires_grad_(False)`` keeps that value);
            ``"predicted"``, the network gives twice as many outputs and the second half is the log-variance, so that the
            noise may differ from input to input; a number, known and fixed.
        dim: number of targets, needed for ``"learned"``.

    >>> likelihood = Gaussian(noise=2.0)
    >>> round(likelihood.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2) - log(2 pi) / 2
    -1.6121
    """

    shape: tuple[int, ...] | None = None  # of one target, as the data have it: () for a number

    @checked
    def __init__(self, noise: Literal["learned", "predicted"] | Positive = "learned", dim: Count = 1) -> None:
        super().__init__()
        self.noise, self.dim = noise, dim
        if noise == "learned":
            self.log_scale = nn.Parameter(torch.zeros(dim))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target for each row of outputs ``[..., D]``."""
        outputs = _single(outputs)
        if self.noise == "predicted":
            mean, raw = outputs.chunk(2, -1)
            return mean, raw.clamp(-2.0 * LIMIT, 2.0 * LIMIT).exp()
        if self.noise == "learned":
            return outputs, log_variance(self.log_scale).exp().to(outputs.dtype).expand_as(outputs)
        return outputs, outputs.new_full((), float(self.noise) ** 2).expand_as(outputs)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.moments(outputs)
        error = (targets.to(mean.dtype).reshape(mean.shape) - mean).square() / variance
        return -0.5 * (error + variance.log() + math.log(2.0 * math.pi)).flatten(1).sum(-1)

    @torch.no_grad()
    def start(self, outputs: Tensor, targets: Tensor) -> None:
        """A learned noise that is still at one starts at the size of the residuals: targets come in all units."""
        self.shape = tuple(targets.shape[1:])
        if self.noise == "learned" and not bool(self.log_scale.any()):
            self.settle([(outputs, targets)])

    @torch.no_grad()
    def settle(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The learned noise is the size of the residuals over all ``(outputs, targets)``.

        No smaller than a ten-thousandth of the targets' own spread, which a network that interpolates them would ask for.
        """
        if (seen := compared(pairs)) is not None:
            least = least_variance(seen.center, seen.variance)
            self.log_scale.copy_(torch.maximum(seen.error, least).log() / 2)

    def canonical(self, targets: Tensor) -> Tensor:
        return targets if targets.is_floating_point() else targets.float()

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """Of a predicted noise, the Gaussian with the mean and the variance of the mixture."""
        if self.noise != "predicted":
            return _stacked(outputs).mean(0)
        means, variances = self.moments(_stacked(outputs))
        variance = variances.mean(0) + means.var(0, correction=0)
        return torch.cat([means.mean(0), variance.log()], -1)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> GaussianPredictive:
        outputs, _ = check_samples(outputs, "outputs", "[S, B, D]")
        return GaussianPredictive(*self.moments(outputs), sample_counts, self.shape)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.ndim != 2:
            advice = "; leave out its last squeeze" if outputs.ndim == 1 else "; give outputs.flatten(1)"
            return (
                "a Gaussian likelihood takes outputs of shape (batch, targets), but the network gives "
                f"{tuple(outputs.shape)}{advice}"
            )
        rows, width = outputs.shape
        if self.noise == "predicted" and width % 2:
            given = pluralize(width, "output")
            return f"with noise='predicted' the network gives a mean and a log-variance for each target, but has {given}"
        if self.noise == "learned" and width != self.dim:
            return f"the network gives {width} targets; say Gaussian(dim={width})"
        width = width // 2 if self.noise == "predicted" else width
        if targets.numel() != rows * width or targets.shape[:1] != outputs.shape[:1]:
            labels = (
                "; for class labels give integers (labels.long())" if targets.ndim == 1 and width > 1 else ""
            )
            if 2 * targets.numel() == rows * width:
                labels = "; where the network gives log-variances too, say likelihood=Gaussian('predicted')"
            given = f"{pluralize(rows, 'row')} of {pluralize(width, 'predicted value')}"
            return f"targets of shape {tuple(targets.shape)} do not fit {given}{labels}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "noise": self.noise, "dim": self.dim, "shape": self.shape}


LIMIT = 30.0  # of the logarithm of a standard deviation: from 1e-13 to 1e13, whose squares float32 holds with room to spare


class Compared(NamedTuple):
    """Outputs beside their targets, over all examples: means and variances of both, covariance, mean squared error."""

    examples: int
    center: Tensor
    variance: Tensor
    given_center: Tensor  # of the outputs
    given_variance: Tensor
    covariance: Tensor
    error: Tensor


@torch.no_grad()
def compared(pairs: Iterable[tuple[Tensor, Tensor]]) -> Compared | None:
    """Compare outputs ``[B, D]`` with targets over all pairs, in float64; None where there are none.

    Sums are taken around the means of the first pair, so that targets far from zero keep their digits.

    >>> seen = compared([(torch.zeros(2, 1), torch.tensor([1e6, 1e6 + 2]))])
    >>> seen.center.item(), seen.variance.item()
    (1000001.0, 1.0)
    """
    count, near, sums = 0, None, torch.zeros(6, 1, dtype=torch.float64)
    for outputs, targets in pairs:
        given = outputs.cpu().double()
        truth = targets.cpu().double().reshape(given.shape)
        near = (truth.mean(0), given.mean(0)) if near is None else near
        a, b = truth - near[0], given - near[1]
        sums = sums + torch.stack([a, b, a * a, b * b, a * b, (truth - given).square()]).sum(1)
        count += len(truth)
    if near is None or not count:
        return None
    a, b, aa, bb, ab, error = sums / count
    variances = (aa - a * a).clamp_min(0.0), (bb - b * b).clamp_min(0.0)
    return Compared(count, near[0] + a, variances[0], near[1] + b, variances[1], ab - a * b, error)


def mean_log_prob(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples; log-likelihoods of pixels, say, must be sums over them, to weigh right beside a KL."""
    each = likelihood.log_prob(outputs, targets)
    if each.shape != outputs.shape[:1]:
        one = f"one number for each of {pluralize(len(outputs), 'example')}"
        raise FlowBNNError(
            f"{type(likelihood).__name__}.log_prob must give {one}, not {tuple(each.shape)}; sum over all but the first axis",
            kind="shape",
            argument="likelihood",
        )
    return each.mean()


def least_variance(center: Tensor, variance: Tensor) -> Tensor:
    """The smallest variance that a noise is learned to, from mean and variance of the targets; of constant ones, from their size."""
    size = torch.where(center != 0, center.square(), torch.ones_like(center))
    return 1e-8 * torch.where(varies(center, variance), variance, size)


def varies(center: Tensor, variance: Tensor) -> Tensor:
    """Whether targets of this mean and variance vary by more than rounding."""
    return variance > 1e-26 * center.square()


@checked
def learns_noise(likelihood: Likelihood) -> TypeGuard[Gaussian]:
    """Whether it has a noise level to be learned, which is not frozen (``likelihood.log_scale.requires_grad_(False)``)."""
    return (
        isinstance(likelihood, Gaussian)
        and likelihood.noise == "learned"
        and likelihood.log_scale.requires_grad
    )


def log_variance(log_scale: Tensor) -> Tensor:
    """Of a Gaussian's noise, within what float32 can compute with."""
    return 2.0 * log_scale.clamp(-LIMIT, LIMIT)


def with_level(outputs: Tensor, log_noise: Tensor) -> Tensor:
    """Outputs of a regression with the logarithm of their noise's variance beside them, as ``Gaussian("predicted")`` takes them."""
    return torch.cat([outputs, log_variance(log_noise).to(outputs).expand_as(outputs)], -1)


def _single(outputs: Tensor) -> Tensor:
    """In single precision, where outputs come in half."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _stacked(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([_single(part) for part in outputs])


@checked
def make_likelihood(
    likelihood: Likelihood | str | dict[str, Any],
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
) -> Likelihood:
    """A likelihood from its name; ``"auto"`` looks at the targets: integers are classes, real numbers are regression.

    >>> make_likelihood("auto", torch.zeros(2, 3), torch.tensor([0, 1]))
    Categorical()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    settings: dict[str, Any] = (
        dict(likelihood) if isinstance(likelihood, dict) else {"likelihood": likelihood}
    )
    name = str(settings.pop("likelihood", None)).lower()
    kinds: dict[str, Any] = {kind.__name__.lower(): kind for kind in all_subclasses(Likelihood)}  # type: ignore[type-abstract]
    kinds |= {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}
    problem = ""
    if name == "auto" and targets is None:
        problem = "likelihood='auto' needs targets to look at; say 'categorical', 'bernoulli' or 'gaussian'"
    elif name == "auto" and targets is not None and targets.is_floating_point():
        problem, name = _labels_as_floats(targets, outputs), "gaussian"
    elif name == "auto":
        single = outputs is not None and outputs.numel() == outputs.shape[0]
        name = "bernoulli" if single else "categorical"
    elif name not in kinds:
        problem = f"there is no likelihood '{name}'{nearest(name, ['auto', *kinds])}"
    if problem:
        raise FlowBNNError(problem, kind="targets" if name in kinds else "value", argument="likelihood")
    if name == "gaussian" and outputs is not None and settings.get("noise", "learned") == "learned":
        settings.setdefault("dim", outputs.shape[-1])
    shape = settings.pop("shape", None)  # of a file
    made = kinds[name](**settings)
    if isinstance(made, Gaussian) and shape is not None:
        made.shape = tuple(map(int, shape))
    return made


SEVERAL_LABELS = "several labels of one example are no classes that exclude each other; fit a network with one output for each of them"


def _one_hot(targets: Tensor) -> bool:
    """Whether each row has a single one among zeros."""
    return bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all())


def _labels_as_floats(targets: Tensor, outputs: Tensor | None) -> str:
    """What to say where class labels come as floating point numbers, which would silently be taken for regression.

    A first batch of zeros alone counts as labels, too: positives may be rare.
    """
    if not targets.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return ""
    gaussian = "say likelihood='gaussian' if these are real numbers"
    if targets.ndim == 2 and targets.shape[1] > 1:
        if _one_hot(targets):
            return f"the targets look like one-hot labels; give integers (targets.argmax(1)) for classes, or {gaussian}"
        if bool((targets == 0).any()) and bool((targets == 1).any()):
            return f"the targets are {targets.shape[1]} columns of 0 and 1: {SEVERAL_LABELS}; {gaussian}"
    if targets.numel() != len(targets):
        return ""
    labels = "likelihood='bernoulli' if these are labels (or give them as integers)"
    if outputs is not None and outputs.numel() > len(outputs):
        labels = "likelihood='categorical' if these are labels, and give them as integers (targets.long())"
    return f"the targets are real numbers, and those of the first batch are all 0 or 1; say {labels}, likelihood='gaussian' if not"
