r"""Structured vector and matrix scaling (SVS and SMS; Berta et al. 2025, https://arxiv.org/abs/2511.03685).

The log-probabilities :math:`z = \log \mathrm{softmax}(f(x) / T)` of a network at its temperature are mapped to

.. math:: \mathrm{softmax}\big((I + \mathrm{diag}(v) + M)\, z + b\big)

with a matrix :math:`M` without diagonal (zero for vector scaling). With :math:`C` classes and :math:`N` held-out examples, the fit
minimizes the mean negative log-likelihood plus

.. math:: \frac{\lambda C}{N} \left(\|v\|^2 + \|b\|^2\right) + \frac{\lambda C (C - 1)}{N} \|M\|^2 ,

so that the more parameters a term has, the more it is shrunk towards temperature scaling. The problem is convex for a single network.
If a posterior has several samples, each is mapped, and the likelihood of their mixture is maximized.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import call
from flowbnn.likelihoods import Bernoulli
from flowbnn.methods.calibrators.base import (
    CalibratedPosterior,
    OutputCalibrator,
    class_log_samples,
)
from flowbnn.methods.calibrators.lbfgs import minimize_batch
from flowbnn.methods.calibrators.log_temperature import fit_temperatures
from flowbnn.metrics.checks import IGNORED, is_soft
from flowbnn.options import Positive, checked, options
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import CategoricalPredictive


@options(repr=False)
class _Scaling(OutputCalibrator):
    """Base class for vector and matrix scaling."""

    matrix: ClassVar[bool]
    checks_labels: ClassVar[bool] = True

    penalty: Positive = field(default=1.0, kw_only=True)

    def identity_calibration(self, posterior: Posterior, outputs: Tensor) -> "ScaledPosterior":
        """Returns a posterior with the same predictions; see :meth:`OutputCalibrator.identity_calibration`."""
        classes = class_log_samples(posterior, outputs, type(self).__name__).shape[-1]
        return ScaledPosterior(posterior, 1.0, torch.eye(classes), torch.zeros(classes))

    def calibrate_outputs(self, posterior: Posterior, outputs: Tensor, targets: Tensor) -> "ScaledPosterior":
        """Returns the scaled posterior; see :meth:`OutputCalibrator.calibrate_outputs`."""
        (result,) = self.fit_subsets(posterior, outputs, targets, [torch.arange(len(targets))])
        return result

    def fit_subsets(
        self, posterior: Posterior, outputs: Tensor, targets: Tensor, subsets: Sequence[Tensor]
    ) -> list["ScaledPosterior"]:
        """Returns one scaled posterior for each subset of the examples. All are fitted at once.

        Args:
            posterior: Posterior of any method.
            outputs: Sampled outputs ``[S, N, ...]`` in float64.
            targets: Class labels ``[N]``, or soft labels ``[N, C]``, both with axes of positions after the first.
            subsets: Indices of the examples of each subset.
        """
        log_samples = class_log_samples(posterior, outputs, type(self).__name__)
        subsets = [subset.to(targets.device) for subset in subsets]
        fits = fit_temperatures(posterior, outputs, targets, subsets)
        temperatures = [fit.temperature for fit in fits]
        if log_samples.ndim > 3:
            log_samples, targets, subsets = flatten_positions(log_samples, targets, subsets)
        group = max(1, 2**24 // log_samples.numel())  # problems fitted at once: 128 MiB in float64
        results = []
        for start in range(0, len(subsets), group):
            part = slice(start, start + group)
            weights, biases = fit_scaling(
                log_samples,
                label_weights(targets, log_samples),
                subsets[part],
                temperatures[part],
                self.matrix,
                self.penalty,
            )
            arguments = zip(temperatures[part], weights, biases, strict=True)
            results += [ScaledPosterior(posterior, *values) for values in arguments]
        return results


@options(repr=False)
class VectorScaling(_Scaling):
    r"""Structured vector scaling (SVS): a factor and an offset for the log-probability of each class.

    It is fitted with a penalty towards temperature scaling (Berta et al. 2025, https://arxiv.org/abs/2511.03685). It changes no
    weights.

    Args:
        method: Method that is fitted first. None scales the network as it is, and trains nothing.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the held-out data. None for the default of the posterior.
        penalty: Factor :math:`\lambda` of the penalty.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(60, 3, generator=generator)
    >>> labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    >>> VectorScaling().fit(nn.Identity(), (logits, labels), progress=False).kind
    'scaled'
    """

    matrix: ClassVar[bool] = False


@options(repr=False)
class MatrixScaling(_Scaling):
    r"""Structured matrix scaling (SMS): an affine map of the log-probabilities of all classes.

    It is fitted with a penalty towards temperature scaling (Berta et al. 2025, https://arxiv.org/abs/2511.03685). Entries outside the
    diagonal have a larger penalty. It changes no weights.

    Args:
        method: Method that is fitted first. None scales the network as it is, and trains nothing.
        validation_fraction: Fraction of the training data that is held out if ``method`` is set and ``fit`` gets no validation data.
        samples: Number of samples of the predictions on the held-out data. None for the default of the posterior.
        penalty: Factor :math:`\lambda` of the penalty.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(60, 3, generator=generator)
    >>> labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    >>> MatrixScaling().fit(nn.Identity(), (logits, labels), progress=False).weight.shape
    torch.Size([3, 3])
    """

    matrix: ClassVar[bool] = True


def flatten_positions(
    log_samples: Tensor, targets: Tensor, subsets: Sequence[Tensor], max_numbers: int = 2**23
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns positions with a target as rows, a random part of them if there are many, and subsets of the rows.

    Args:
        log_samples: Log-probabilities ``[S, N, *positions, C]``.
        targets: Class labels ``[N, *positions]``, or soft labels ``[N, *positions, C]``.
        subsets: Indices of the examples of each subset.
        max_numbers: Largest number of log-probabilities that are kept, 64 MiB in float64.
    """
    shape = log_samples.shape[1:-1]
    examples = (
        torch.arange(len(targets), device=targets.device).view(-1, *(1,) * (len(shape) - 1)).expand(shape)
    )
    soft = targets.is_floating_point()
    valid = torch.ones(shape, dtype=torch.bool, device=targets.device) if soft else targets != IGNORED
    rows = valid.flatten().nonzero()[:, 0]
    max_rows = max(len(targets), max_numbers // (len(log_samples) * log_samples.shape[-1]))
    if len(rows) > max_rows:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        rows = rows[order[:max_rows].sort().values.to(rows.device)]
    owners = examples.reshape(-1)[rows]
    flat = targets.flatten(0, -2) if soft else targets.flatten()
    row_subsets = [torch.isin(owners, subset).nonzero()[:, 0] for subset in subsets]
    return log_samples.flatten(1, -2)[:, rows.to(log_samples.device)], flat[rows], row_subsets


def label_weights(targets: Tensor, log_samples: Tensor) -> Tensor:
    """Returns the weight of each class in the target of an example, ``[N, C]``: one-hot rows, or soft labels as they are.

    Args:
        targets: Class labels ``[N]``, or soft labels ``[N, C]``.
        log_samples: Log-probabilities ``[S, N, C]``.
    """
    if is_soft(targets):
        return targets.to(log_samples)
    return F.one_hot(targets.flatten().long(), log_samples.shape[-1]).to(log_samples)


def fit_scaling(
    log_samples: Tensor,
    labels: Tensor,
    subsets: Sequence[Tensor],
    temperatures: Sequence[float],
    matrix: bool,
    penalty: float,
) -> tuple[Tensor, Tensor]:
    """Fits affine maps of log-probabilities to subsets of examples, all at once.

    Args:
        log_samples: Log-probabilities of the samples, ``[S, N, C]``, in float64.
        labels: Weight of each class in the target of an example, ``[N, C]``.
        subsets: Indices of the examples of each of the P subsets.
        temperatures: Temperature of each subset.
        matrix: True for a matrix, False for a diagonal.
        penalty: Factor of the penalty.

    Returns:
        Matrices ``[P, C, C]`` and offsets ``[P, C]``.
    """
    count, (_, num_rows, classes) = len(subsets), log_samples.shape
    mask = log_samples.new_zeros(count, num_rows)
    for row, subset in zip(mask, subsets, strict=True):
        row[subset] = 1.0
    sizes = mask.sum(1)
    inverse = 1.0 / log_samples.new_tensor(list(temperatures))
    logits = F.log_softmax(log_samples * inverse[:, None, None, None], -1)
    size = classes**2 if matrix else classes
    diagonal = torch.eye(classes, dtype=torch.bool, device=log_samples.device)
    shrinkage = torch.where(diagonal, classes, classes * (classes - 1)) * penalty

    def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
        change = x[:, :size]
        return change.reshape(-1, classes, classes) if matrix else change, x[:, size:]

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        (change, bias), inner = unpack(x), logits[rows]
        moved = inner @ change.mT[:, None] if matrix else inner * change[:, None, None]
        mapped = F.log_softmax(inner + moved + bias[:, None, None], -1)
        nll = -(labels * mapped.logsumexp(1)).sum(-1)  # up to a constant, the number of samples
        squares = change.square() * shrinkage if matrix else change.square() * (penalty * classes)
        penalties = squares.flatten(1).sum(1) + penalty * classes * bias.square().sum(1)
        return ((nll * mask[rows]).sum(1) + penalties) / sizes[rows]

    change, bias = unpack(
        minimize_batch(objective, log_samples.new_zeros(count, size + classes), tolerance=1e-6)
    )
    change = change if matrix else torch.diag_embed(change)
    return change + torch.eye(classes, dtype=change.dtype, device=change.device), bias


class ScaledPosterior(CalibratedPosterior):
    """Posterior whose log-probabilities are divided by a temperature, normalized, and mapped by a matrix and an offset.

    Args:
        posterior: Inner posterior, of any method for classes.
        temperature: Temperature.
        weight: Matrix ``[C, C]``.
        bias: Offset ``[C]``.

    >>> import flowbnn as fb
    >>> inner = fb.methods.PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical())
    >>> ScaledPosterior(inner, 2.0, torch.eye(3), torch.zeros(3)).predict(torch.ones(4, 2)).probabilities.shape
    torch.Size([4, 3])
    """

    kind: ClassVar[str] = "scaled"

    @checked
    def __init__(self, posterior: Posterior, temperature: Positive, weight: Tensor, bias: Tensor) -> None:
        super().__init__(posterior)
        fits = weight.dtype == bias.dtype and bias.is_floating_point() and bias.ndim == 1
        if not fits or weight.shape != (len(bias), len(bias)):
            raise ValueError(
                f"shapes {tuple(weight.shape)} and {tuple(bias.shape)} do not fit, or their dtypes"
            )
        self.temperature, self.weight, self.bias = float(temperature), weight, bias

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.posterior!r}, {len(self.bias)} classes)"

    def transform(self, predictive: Any, sample_counts: Tensor | None) -> CategoricalPredictive:
        """Returns the predictive distribution of the mapped log-probabilities."""
        sample_counts = None if sample_counts is None else predictive.sample_counts
        logits = scale_logits(predictive.logits, self.temperature, self.weight, self.bias)
        return CategoricalPredictive(logits, sample_counts)

    def networks(self, samples: int, seed: int | None = None) -> list[nn.Module]:
        """Returns networks of the inner posterior, whose outputs are mapped."""
        binary, axis = isinstance(self.likelihood, Bernoulli), getattr(self.likelihood, "class_axis", None)
        return [
            ScaledOutputs(network, self.temperature, self.weight, self.bias, binary, axis or -1).eval()
            for network in self.posterior.networks(samples, seed)
        ]

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "bias": self.bias}


def scale_logits(logits: Tensor, temperature: float, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns mapped logits.

    They are shifted so that their energy, minus the logarithm of the sum of their exponentials, is that of the logits at the
    temperature. The probabilities do not depend on the shift.

    Args:
        logits: Logits ``[..., C]``.
        temperature: Temperature of the logits before they are mapped.
        weight: Matrix ``[C, C]``.
        bias: Offset ``[C]``.
    """
    values = logits / temperature
    log_norm = values.logsumexp(-1, keepdim=True)
    mapped = (values - log_norm) @ weight.to(values).mT + bias.to(values)
    return F.log_softmax(mapped, -1) + log_norm


class ScaledOutputs(nn.Module):
    """Network whose logits are mapped by :func:`scale_logits`.

    Args:
        network: Network.
        temperature: Temperature.
        weight: Matrix ``[C, C]``.
        bias: Offset ``[C]``.
        binary: True if the network has one logit for two classes.
        class_axis: Axis of the classes in the outputs of the network.
    """

    def __init__(
        self,
        network: nn.Module,
        temperature: float,
        weight: Tensor,
        bias: Tensor,
        binary: bool,
        class_axis: int = -1,
    ) -> None:
        super().__init__()
        self.network, self.temperature, self.binary = network, temperature, binary
        self.class_axis = class_axis
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        outputs = call(self.network, named_inputs or inputs)
        weight, bias = self.get_buffer("weight"), self.get_buffer("bias")
        if not self.binary:
            logits = outputs.movedim(self.class_axis, -1)
            return scale_logits(logits, self.temperature, weight, bias).movedim(-1, self.class_axis)
        pair = torch.stack([torch.zeros_like(outputs), outputs], -1)
        scaled = scale_logits(pair, self.temperature, weight, bias)
        return scaled[..., 1] - scaled[..., 0]
