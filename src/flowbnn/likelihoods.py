"""Likelihoods: how the outputs of a network speak of its targets."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "make_likelihood"]


class Likelihood(nn.Module):
    """``log_prob(outputs, targets)`` per example, and the predictive made of samples of outputs."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define log_prob(outputs, targets)")

    def predictive(self, outputs: Tensor, spent: Tensor | None = None) -> Any:
        """From outputs ``[S, B, ...]`` to a :class:`~flowbnn.predictive.Predictive`; ``spent`` of the S are each input's own."""
        raise NotImplementedError(f"{type(self).__name__} must define predictive(outputs)")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that do not fit the outputs, in one line."""

    def start(self, outputs: Tensor, targets: Tensor) -> None:
        """Begin near the data: called with the first batch before training."""

    def canonical(self, targets: Tensor) -> Tensor:
        """Targets in the form that predictives and metrics take."""
        return targets

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs whose prediction is the mean of the predictions of these, which are of one shape."""
        raise FlowBNNError(f"a {type(self).__name__} likelihood cannot average predictions; leave out views")

    def to_dict(self) -> dict[str, Any]:
        return {"likelihood": type(self).__name__}


class Categorical(Likelihood):
    r"""Classes: :math:`\log p(y \mid x) = \log \mathrm{softmax}(f(x))_y`, minus the cross entropy.

    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # -log(4)
    -1.3863
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.float() if outputs.dtype in _HALF else outputs
        # torch leaves -100 out without a word; no label of ours is special
        return -F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=-(2**62))

    def canonical(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() and not bool((targets == targets.round()).all()):
            raise FlowBNNError(
                "class labels are whole numbers, but these have fractions; give integers, or probabilities' argmax(1)"
            )
        return targets.long()

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        return _stacked(outputs).log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def predictive(self, outputs: Tensor, spent: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive(outputs.float() if outputs.dtype in _HALF else outputs, spent)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.ndim != 2:
            raise FlowBNNError(
                f"a categorical likelihood takes outputs of shape (batch, classes), but the network gives {tuple(outputs.shape)}"
            )
        if targets.is_floating_point() or targets.shape != outputs.shape[:1]:
            advice = "for real-valued targets use likelihood='gaussian'"
            if not targets.is_floating_point() and targets.shape == (len(outputs), 1):
                advice = "give labels.squeeze(1)"
            elif not targets.is_floating_point() and targets.shape == outputs.shape:
                advice = "of one-hot labels give labels.argmax(1)" if _one_hot(targets) else SEVERAL_LABELS
            raise FlowBNNError(
                f"{len(outputs)} rows of outputs need a vector of {len(outputs)} integers as class labels, "
                f"not {targets.dtype} of shape {tuple(targets.shape)}; {advice}"
            )
        classes = outputs.shape[1]
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= classes):
            raise FlowBNNError(
                f"labels run from {int(targets.min())} to {int(targets.max())}, but the network has {classes} outputs, "
                f"so labels must lie in 0 to {classes - 1}"
            )


class Bernoulli(Likelihood):
    r"""Two classes from one logit: :math:`\log p(y \mid x) = y \log\sigma(f) + (1 - y) \log\sigma(-f)`.

    >>> round(Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # -log(2)
    -0.6931
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.float().flatten() if outputs.dtype in _HALF else outputs.flatten()
        return -F.binary_cross_entropy_with_logits(
            logits, targets.flatten().to(logits.dtype), reduction="none"
        )

    def canonical(self, targets: Tensor) -> Tensor:
        return targets.flatten().long()

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = _stacked(outputs)
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def predictive(self, outputs: Tensor, spent: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive.from_bernoulli(outputs.reshape(outputs.shape[0], -1), spent)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.numel() != outputs.shape[0]:
            raise FlowBNNError(
                f"a Bernoulli likelihood takes one logit per example, but the network gives {tuple(outputs.shape)}"
            )
        if targets.numel() != outputs.shape[0] or not bool(((targets == 0) | (targets == 1)).all()):
            raise FlowBNNError(
                "the targets of a Bernoulli likelihood are 0 or 1, one for each example; for numbers to be predicted say "
                "likelihood='gaussian', for more classes give the network an output for each"
            )


class Gaussian(Likelihood):
    r"""Real-valued targets: :math:`y \sim \mathcal N(f(x), \sigma^2)`.

    Args:
        noise: where :math:`\sigma` comes from: ``"learned"``, one value per output, trained with the network;
            ``"predicted"``, the network gives twice as many outputs and the second half is the log-variance, so that the
            noise may differ from input to input; a number, known and fixed.
        dim: number of targets, needed for ``"learned"``.

    >>> likelihood = Gaussian(noise=2.0)
    >>> round(likelihood.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2) - log(2 pi) / 2
    -1.6121
    """

    def __init__(self, noise: Literal["learned", "predicted"] | float = "learned", dim: int = 1) -> None:
        super().__init__()
        if isinstance(noise, str) and noise not in ("learned", "predicted"):
            raise FlowBNNError(
                f"the noise of a Gaussian is 'learned', 'predicted' or a number, not {noise!r}"
            )
        if not isinstance(noise, str) and not noise > 0:
            raise FlowBNNError(f"the noise of a Gaussian is above 0, not {noise}")
        self.noise, self.dim = noise, dim
        if noise == "learned":
            self.log_scale = nn.Parameter(torch.zeros(dim))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target for each row of outputs ``[..., D]``."""
        outputs = outputs.float() if outputs.dtype in _HALF else outputs
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
        if self.noise == "learned" and not bool(self.log_scale.any()):
            self.settle([(outputs, targets)])

    @torch.no_grad()
    def settle(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The learned noise is the size of the residuals over all ``(outputs, targets)``.

        No smaller than a ten-thousandth of the targets' own spread, which a network that interpolates them would ask for.
        """
        count, square, first, second = 0, *torch.zeros(3, self.dim, dtype=torch.float64)
        for outputs, targets in pairs:
            truth = targets.cpu().double().reshape(outputs.shape)
            square = square + (truth - outputs.cpu().double()).square().sum(0)
            first, second = first + truth.sum(0), second + truth.square().sum(0)
            count += len(truth)
        if not count:
            return
        size = second / count
        spread = (size - (first / count).square()).clamp_min(0.0)
        unit = torch.where(spread > 1e-12 * size, spread, torch.where(size > 0, size, torch.ones_like(size)))
        self.log_scale.copy_(torch.maximum(square / count, 1e-8 * unit).log() / 2)

    def canonical(self, targets: Tensor) -> Tensor:
        return targets if targets.is_floating_point() else targets.float()

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """Of a predicted noise, the Gaussian with the mean and the variance of the mixture."""
        if self.noise != "predicted":
            return _stacked(outputs).mean(0)
        means, variances = self.moments(_stacked(outputs))
        variance = variances.mean(0) + means.var(0, correction=0)
        return torch.cat([means.mean(0), variance.log()], -1)

    def predictive(self, outputs: Tensor, spent: Tensor | None = None) -> GaussianPredictive:
        return GaussianPredictive(*self.moments(outputs), spent)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.ndim != 2:
            advice = "; leave out its last squeeze" if outputs.ndim == 1 else ""
            raise FlowBNNError(
                "a Gaussian likelihood takes outputs of shape (batch, targets), but the network gives "
                f"{tuple(outputs.shape)}{advice}"
            )
        width = outputs.shape[1]
        if self.noise == "predicted":
            if width % 2:
                raise FlowBNNError(
                    f"with noise='predicted' the network gives a mean and a log-variance for each target, but has {width} output"
                )
            width //= 2
        if self.noise == "learned" and width != self.dim:
            raise FlowBNNError(f"the network gives {width} targets; say Gaussian(dim={width})")
        if targets.numel() != outputs.shape[0] * width or targets.shape[:1] != outputs.shape[:1]:
            raise FlowBNNError(
                f"targets of shape {tuple(targets.shape)} do not fit {outputs.shape[0]} rows of {width} predicted values"
                + (
                    "; for class labels give integers (labels.long())"
                    if targets.ndim == 1 and width > 1
                    else ""
                )
            )

    def to_dict(self) -> dict[str, Any]:
        return {"likelihood": "Gaussian", "noise": self.noise, "dim": self.dim}


_HALF = (torch.float16, torch.bfloat16)
LIMIT = 30.0  # of the logarithm of a standard deviation: from 1e-13 to 1e13, whose squares float32 holds with room to spare


def log_variance(log_scale: Tensor) -> Tensor:
    """Of a Gaussian's noise, within what float32 can compute with."""
    return 2.0 * log_scale.clamp(-LIMIT, LIMIT)


def _stacked(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.float() if part.dtype in _HALF else part for part in outputs])


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
    settings = {}
    if isinstance(likelihood, dict):
        settings = dict(likelihood)
        likelihood = str(settings.pop("likelihood")).lower()
    if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
        raise FlowBNNError(
            f"likelihood is the class {likelihood.__name__}; give an instance: {likelihood.__name__}()"
        )
    if not isinstance(likelihood, str):
        raise FlowBNNError(
            f"likelihood is a name such as 'gaussian', or an instance such as Gaussian(), not a {type(likelihood).__name__}"
        )
    if likelihood == "auto":
        if targets is None:
            raise FlowBNNError(
                "likelihood='auto' needs targets to look at; say 'categorical', 'bernoulli' or 'gaussian'"
            )
        if targets.is_floating_point():
            _refuse_labels(targets, outputs)
        likelihood = "gaussian" if targets.is_floating_point() else "categorical"
        if likelihood == "categorical" and outputs is not None and outputs.numel() == outputs.shape[0]:
            likelihood = "bernoulli"
    if likelihood == "gaussian":
        if "dim" not in settings and outputs is not None and settings.get("noise", "learned") == "learned":
            settings["dim"] = outputs.shape[-1]
        return Gaussian(**settings)
    kinds = {"categorical": Categorical, "bernoulli": Bernoulli}
    if likelihood not in kinds:
        raise FlowBNNError(
            f"there is no likelihood {likelihood!r}{nearest(likelihood, ['auto', 'gaussian', *kinds])}"
        )
    return kinds[likelihood](**settings)


SEVERAL_LABELS = "several labels of one example are no classes that exclude each other; fit a network with one output for each of them"


def _one_hot(targets: Tensor) -> bool:
    """Whether each row has a single one among noughts."""
    return bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all())


def _refuse_labels(targets: Tensor, outputs: Tensor | None) -> None:
    """Class labels in the form of real numbers would be taken for regression without a word.

    A first batch of noughts alone is refused too: of rare positives it says nothing.
    """
    if not targets.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return
    if targets.ndim == 2 and targets.shape[1] > 1:
        if _one_hot(targets):
            raise FlowBNNError(
                "the targets look like one-hot labels; give integers (targets.argmax(1)) for classes, or say "
                "likelihood='gaussian' if these are real numbers"
            )
        if bool((targets == 0).any()) and bool((targets == 1).any()):
            raise FlowBNNError(
                f"the targets are {targets.shape[1]} columns of 0 and 1: {SEVERAL_LABELS}; say likelihood='gaussian' if these are "
                "real numbers"
            )
    if targets.numel() == len(targets):
        labels = "likelihood='bernoulli' if these are labels (or give them as integers)"
        if outputs is not None and outputs.numel() > len(outputs):
            labels = (
                "likelihood='categorical' if these are labels, and give them as integers (targets.long())"
            )
        raise FlowBNNError(
            "the targets are real numbers, and those of the first batch are all 0 or 1; say "
            f"{labels}, likelihood='gaussian' if not"
        )
