r"""Evidence of a Laplace approximation, the prior and the noise that maximize it, and the mode under them.

.. math:: \log p(D) \approx \log p(D \mid \hat w) + \tfrac12 \sum_g (n_g \log \delta_g - \delta_g \|\hat w_g\|^2)
          - \tfrac12 \log\det (H + \delta)

with one precision :math:`\delta_g` for all layers or for each (MacKay 1992; Daxberger et al. 2021, https://arxiv.org/abs/2106.14806).
The learned noise of a Gaussian likelihood is a factor :math:`s^2` of all its variances. With the curvature :math:`H / s^2` and the
precision :math:`\delta = \delta' / s^2` the mode depends on :math:`\delta'` alone. At the maximum over both

.. math:: \delta'_g \|\hat w_g\|^2 = s^2 \gamma_g, \qquad \sum_i \|y_i - \hat y_i\|^2 / \sigma^2 = s^2 (N - \textstyle\sum_g \gamma_g),
          \qquad \gamma_g = \sum \lambda / (\lambda + \delta'_g).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Gaussian, log_variance
from flowbnn.methods.laplace.blocks import CurvatureBlock, FullBlock
from flowbnn.methods.laplace.curvature import Curvature, CurvatureFit
from flowbnn.training import is_main_process

# beyond these precisions the prior has no effect, or the weights are zero, in float32
PRECISION_BOUNDS = (1e-10, 1e10)


def bisect_log(increases: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the positive number at which a function stops increasing, by bisection of its logarithm.

    >>> round(bisect_log(lambda x: x < 2.0, 0.1, 10.0), 6)
    2.0
    """
    low, high = math.log(low), math.log(high)
    while high - low > 1e-11:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if increases(math.exp(middle)) else (low, middle)
    return math.exp(0.5 * (low + high))


@dataclass
class QuadraticModel:
    r"""Quadratic log-likelihood of some weights, :math:`g^T (w - w_0) - \tfrac12 (w - w_0)^T H (w - w_0)`.

    Without a gradient :math:`g` the weights stay at :math:`w_0`. With one they are at the mode under the prior.

    Args:
        curvature: Eigenvalues of :math:`H`, with weights and gradient in its eigenbasis; or the matrix :math:`H` for several priors.
        weights: Weights :math:`w_0`.
        gradient: Gradient :math:`g`, or None.
        sizes: Number of weights under each prior.
    """

    curvature: Tensor
    weights: Tensor
    gradient: Tensor | None
    sizes: list[int]

    def evaluate(self, deltas: list[float]) -> tuple[list[float], list[float], float]:
        r"""Returns :math:`\gamma` and :math:`\|w\|^2` for each prior precision, and the change of :math:`-2 \log p(D \mid w)`."""
        prior = torch.cat([self.weights.new_full((n,), d) for n, d in zip(self.sizes, deltas, strict=True)])
        is_matrix = self.curvature.ndim == 2
        if is_matrix:
            root = torch.linalg.cholesky(self.curvature + prior.diag())
            gamma = 1.0 - prior * torch.cholesky_inverse(root).diagonal()
        else:
            gamma = self.curvature / (self.curvature + prior)
        weights, change = self.weights, 0.0
        if self.gradient is not None:
            ascent = self.gradient - prior * weights
            if is_matrix:
                step = torch.cholesky_solve(ascent[:, None], root)[:, 0]
                curved_step = self.curvature @ step
            else:
                step = ascent / (self.curvature + prior)
                curved_step = self.curvature * step
            weights, change = weights + step, float(step @ (curved_step - 2.0 * self.gradient))
        squares = [float(group.square().sum()) for group in weights.split(self.sizes)]
        return [float(group.sum()) for group in gamma.split(self.sizes)], squares, change

    def best_precisions(
        self,
        noise: float = 1.0,
        start: list[float] | None = None,
        max_iterations: int = 500,
        bounds: tuple[float, float] = PRECISION_BOUNDS,
    ) -> list[float]:
        r"""Returns the precisions :math:`\delta'` that maximize the evidence.

        One precision is found by bisection, several by MacKay's fixed-point iteration.

        Args:
            noise: Factor :math:`s^2` of the variance of the noise.
            start: Initial precisions of the iteration.
            max_iterations: Maximum number of iterations.
            bounds: Smallest and largest precision.

        >>> model = QuadraticModel(torch.tensor([3.0]), torch.tensor([0.75]).sqrt(), None, [1])
        >>> round(model.best_precisions()[0], 6)  # solves 3 / (3 + d) = 0.75 d
        1.0
        """
        low, high = bounds
        if len(self.sizes) == 1:

            def increases(delta: float) -> bool:
                (gamma,), (square,), _ = self.evaluate([delta])
                return noise * gamma > delta * square

            return [bisect_log(increases, low, high)]
        deltas = start or [1.0] * len(self.sizes)
        for _ in range(max_iterations):
            gammas, squares, _ = self.evaluate(deltas)
            previous = deltas
            deltas = [
                min(max(noise * gamma / max(square, 1e-300), low), high)
                for gamma, square in zip(gammas, squares, strict=True)
            ]
            if max(abs(math.log(new / old)) for new, old in zip(deltas, previous, strict=True)) < 1e-8:
                break
        return deltas


@dataclass(frozen=True)
class PriorSearch:
    """Search of the prior precision, and of the learned noise of a Gaussian likelihood, by the evidence.

    Args:
        scale: Standard deviation of the prior; None to maximize the evidence.
        per_layer: If True, every layer has its own prior.
        learns_noise: If True, the noise of a Gaussian likelihood is learned with the prior.
    """

    scale: float | None
    per_layer: bool
    learns_noise: bool

    def maximize_evidence(
        self, fit: CurvatureFit, curvature: Curvature, gradient: Mapping[str, Tensor] | None = None
    ) -> tuple[list[float], float]:
        r"""Returns the precision :math:`\delta'` of each layer and the factor :math:`s^2` of the noise with the highest evidence.

        Args:
            fit: Network, data and layers.
            curvature: Curvature at the current weights.
            gradient: Gradient of the log-likelihood; if given, the evidence is that at the mode under each prior.
        """
        num_layers = len(fit.layers)
        if self.scale is not None and not self.learns_noise:
            return [self.scale**-2] * num_layers, 1.0
        models = self._quadratic_models(fit, curvature, gradient)
        precisions = [[1.0] * len(model.sizes) for model in models]

        def update_precisions(noise: float) -> None:
            for index, model in enumerate(models):
                fixed = None if self.scale is None else [self.scale**-2 * noise]
                precisions[index] = fixed or model.best_precisions(noise, precisions[index])

        def increases(noise: float) -> bool:
            update_precisions(noise)
            total_gamma, error = 0.0, squared_error
            for model, deltas in zip(models, precisions, strict=True):
                gammas, _, change = model.evaluate(deltas)
                total_gamma, error = total_gamma + sum(gammas), error + change
            return error / noise + total_gamma > num_targets

        noise = 1.0
        if self.learns_noise:
            num_targets, squared_error = _squared_error(fit, curvature)
            # the variance starts at the mean squared residual, from which it falls by overfitting and rises by underfitting
            noise = bisect_log(increases, 1e-8, 1e4)
        update_precisions(noise)
        deltas = [delta for group in precisions for delta in group]
        return (deltas if len(deltas) == num_layers else deltas * num_layers), noise

    def _quadratic_models(
        self, fit: CurvatureFit, curvature: Curvature, gradient: Mapping[str, Tensor] | None
    ) -> list[QuadraticModel]:
        """Returns one model for all layers, one for each layer, or one with several priors for a full curvature matrix."""
        blocks, separate = curvature.blocks, self.scale is None and self.per_layer and len(fit.layers) > 1

        def group_gradient(group: list[CurvatureBlock]) -> Tensor | None:
            if gradient is None:
                return None
            return torch.cat([eigenbasis_gradient(block, gradient) for block in group])

        if separate and curvature.matrix is not None:
            block, slope = blocks[0], group_gradient(blocks)
            basis = block.tensors["vectors"].double()
            slope = None if slope is None else basis @ slope
            weights = block.pack(fit.weights).detach().double()
            return [QuadraticModel((basis * block.eigenvalues) @ basis.T, weights, slope, _layer_sizes(fit))]
        models = []
        for group in [[block] for block in blocks] if separate else [blocks]:
            values = torch.cat([block.eigenvalues.flatten() for block in group])
            weights = torch.cat([eigenbasis_coordinates(block, fit.weights) for block in group])
            models.append(QuadraticModel(values, weights, group_gradient(group), [len(values)]))
        return models


def eigenbasis_coordinates(block: CurvatureBlock, values: Mapping[str, Tensor]) -> Tensor:
    """Returns weights in the eigenbasis of the block."""
    return block.to_basis(block.pack(values)).detach().double().flatten()


def eigenbasis_gradient(block: CurvatureBlock, gradient: Mapping[str, Tensor]) -> Tensor:
    """Returns the gradient in the eigenbasis of the block, set to zero where the curvature is zero up to rounding.

    The gradient is rounding error there, and a weak prior would follow it without bound.
    """
    values = block.eigenvalues.flatten()
    rounding = 10.0 * torch.finfo(next(iter(gradient.values())).dtype).eps
    return torch.where(values > rounding * values.max(), eigenbasis_coordinates(block, gradient), 0.0)


def _layer_sizes(fit: CurvatureFit) -> list[int]:
    """Returns the number of weights of each layer."""
    return [sum(math.prod(shape) for shape in shapes.values()) for shapes in fit.layers.values()]


def _squared_error(fit: CurvatureFit, curvature: Curvature) -> tuple[float, float]:
    """Returns the number of target values, and the sum of their squared errors over the variance of the noise."""
    likelihood = fit.likelihood
    assert isinstance(likelihood, Gaussian)
    num_rows = curvature.num_examples if fit.num_data is None else fit.num_data
    log_variances = float(log_variance(likelihood.log_scale.detach().double()).sum())
    constant = num_rows * (log_variances + likelihood.dim * math.log(2.0 * math.pi))
    return float(num_rows * likelihood.dim), max(0.0, -2.0 * curvature.log_likelihood - constant)


def add_prior(
    fit: CurvatureFit, curvature: Curvature, deltas: list[float]
) -> tuple[list[CurvatureBlock], float]:
    """Returns the blocks with a prior of these precisions for each layer, and the log evidence."""
    sizes, blocks, matrix = _layer_sizes(fit), curvature.blocks, curvature.matrix
    if matrix is not None and len(set(deltas)) > 1:
        # different precisions are not diagonal in the eigenbasis of the curvature, so they are added to the matrix
        prior = torch.cat([matrix.new_full((n,), d) for n, d in zip(sizes, deltas, strict=True)])
        dtype = next(iter(fit.weights.values())).dtype
        blocks = [FullBlock.from_matrix(blocks[0].shapes, matrix + prior.diag(), dtype)]
        blocks[0].tensors["values"].clamp_(min=min(deltas))  # rounding may lower eigenvalues below the prior
    else:
        for block, delta in zip(blocks, deltas, strict=False):
            block.prior = delta
    evidence = curvature.log_likelihood - 0.5 * sum(block.log_det() for block in blocks)
    for size, delta, shapes in zip(sizes, deltas, fit.layers.values(), strict=True):
        square = sum(float(fit.weights[name].detach().double().square().sum()) for name in shapes)
        evidence += 0.5 * (size * math.log(delta) - delta * square)
    return blocks, evidence


def fit_prior(fit: CurvatureFit, curvature: Curvature, prior: PriorSearch) -> tuple[Curvature, list[float]]:
    """Finds the best prior and noise at the current weights.

    Returns:
        The curvature under this noise, and the prior precision of each layer.
    """
    relative, noise = prior.maximize_evidence(fit, curvature)
    if prior.learns_noise:
        scale_noise(fit, noise)
        curvature = fit.measure()
    return curvature, [delta / noise for delta in relative]


class NewtonStep(NamedTuple):
    """Result of :func:`newton_step`.

    Args:
        curvature: Curvature at the new weights.
        precisions: Prior precision of each layer.
        gained: True if the step gained log-density.
        at_bound: True if the best prior is the narrowest one. Its mode is the zero network.
    """

    curvature: Curvature
    precisions: list[float]
    gained: bool
    at_bound: bool


def newton_step(fit: CurvatureFit, curvature: Curvature, prior: PriorSearch) -> NewtonStep:
    """Takes a Newton step to the mode under the best prior and noise, halved until the log-density increases."""
    weights = fit.weights
    start = {name: value.detach().clone() for name, value in weights.items()}
    gradient = fit.gradient(curvature.num_examples)
    relative, noise = prior.maximize_evidence(fit, curvature, gradient)
    at_bound = prior.scale is None and max(relative) > 0.99 * PRECISION_BOUNDS[1]
    delta_by_name = {
        name: delta for shapes, delta in zip(fit.layers.values(), relative, strict=True) for name in shapes
    }
    ascent = {name: gradient[name] - delta_by_name[name] * value for name, value in start.items()}
    blocks = add_prior(fit, curvature, relative)[0]
    step = {name: value for block in blocks for name, value in block.solve(ascent).items()}
    deltas = [delta / noise for delta in relative]
    log_likelihood = curvature.log_likelihood
    if prior.learns_noise:
        count, error = _squared_error(fit, curvature)
        log_likelihood += 0.5 * error * (1.0 - 1.0 / noise) - 0.5 * count * math.log(noise)
        scale_noise(fit, noise)

    def penalty() -> float:
        squares = (
            delta_by_name[name] * float(value.detach().double().square().sum())
            for name, value in weights.items()
        )
        return 0.5 * sum(squares) / noise

    gain = 0.5 * sum(float((step[name].double() * ascent[name].double()).sum()) for name in step) / noise
    tolerance = 1e-9 if next(iter(start.values())).dtype == torch.float64 else 1e-6
    log_density = log_likelihood - penalty()
    after = _line_search(fit, start, step, penalty, log_density - tolerance * abs(log_density))
    if after is None:
        after, gain = fit.measure(), 0.0
    if prior.learns_noise:
        # the noise is at least the size of the residuals, also if these are larger than the quadratic model predicts
        count, error = _squared_error(fit, after)
        if error > (1.0 + tolerance) * count:
            scale_noise(fit, error / count)
            after = fit.measure()
            deltas = deltas if prior.scale is not None else [delta * count / error for delta in deltas]
    return NewtonStep(after, deltas, gain > 1e-9, at_bound)  # in nats


@torch.no_grad()
def _line_search(
    fit: CurvatureFit,
    start: Mapping[str, Tensor],
    step: Mapping[str, Tensor],
    penalty: Callable[[], float],
    threshold: float,
) -> Curvature | None:
    """Halves a step until the log-density exceeds the threshold; returns None, at the start, if it does not in 12 halvings."""
    weights = fit.weights
    for halvings in range(12):
        for name, value in start.items():
            weights[name].copy_(value + 0.5**halvings * step[name])
        try:
            curvature = fit.measure()
        except FlowBNNError:  # the step is too long: the likelihood is not finite
            continue
        if curvature.log_likelihood - penalty() >= threshold:
            return curvature
    for name, value in start.items():
        weights[name].copy_(value)
    return None


def newton_gain(
    fit: CurvatureFit, curvature: Curvature, blocks: list[CurvatureBlock], deltas: list[float]
) -> float:
    """Returns the increase of the log-density by another Newton step, in nats, under a quadratic approximation.

    Args:
        fit: Data and network of the fit.
        curvature: Curvature at the current weights.
        blocks: Blocks of the posterior precision.
        deltas: Prior precisions of the layers.
    """
    gradient = fit.gradient(curvature.num_examples)
    for shapes, delta in zip(fit.layers.values(), deltas, strict=True):
        for name in shapes:
            gradient[name] = gradient[name] - delta * fit.weights[name].detach()
    gain = 0.0
    for block in blocks:
        squares = eigenbasis_gradient(block, gradient).square()
        gain += 0.5 * float((squares / (block.eigenvalues.flatten() + block.prior)).sum())
    return gain


def warn_no_best_prior() -> None:
    """Warns that Newton steps were undone, because they ended at the largest prior precision, in the zero network."""
    if is_main_process():
        warn(
            "Newton steps are undone, as the best prior sets all weights to zero; use structure='kron', prior_scale= or newton_steps=0",
            kind="prior",
        )


def warn_not_at_mode(gain: float, tolerance: float = 1.0) -> None:
    """Warns if another Newton step would increase the log-density by more than the tolerance, in nats."""
    if gain > tolerance and is_main_process():
        text = f"the weights are not at the mode (a Newton step gains {gain:.3g} nats); increase newton_steps, or train with epochs"
        warn(text, kind="mode", gain=gain)


@torch.no_grad()
def scale_noise(fit: CurvatureFit, factor: float) -> None:
    """Multiplies the variances of the learned noise by a factor."""
    fit.likelihood.log_scale.add_(0.5 * math.log(factor))  # type: ignore[operator]
