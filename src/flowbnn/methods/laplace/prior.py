r"""The evidence of a Laplace approximation, the prior and the noise at which it is highest, and the mode under them.

.. math:: \log p(D) \approx \log p(D \mid \hat w) + \tfrac12 \sum_g (n_g \log \delta_g - \delta_g \|\hat w_g\|^2)
          - \tfrac12 \log\det (H + \delta)

with one precision :math:`\delta_g` for all layers or for each (MacKay 1992; Daxberger et al. 2021, https://arxiv.org/abs/2106.14806).
The learned noise of a Gaussian likelihood is a factor :math:`s^2` of all its variances: with the curvature :math:`H / s^2` and the
precision :math:`\delta = \delta' / s^2` the mode depends on :math:`\delta'` alone. At the best of both

.. math:: \delta'_g \|\hat w_g\|^2 = s^2 \gamma_g, \qquad \sum_i \|y_i - \hat y_i\|^2 / \sigma^2 = s^2 (N - \textstyle\sum_g \gamma_g),
          \qquad \gamma_g = \sum \lambda / (\lambda + \delta'_g).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Gaussian, log_variance
from flowbnn.methods.laplace.blocks import Block, Full
from flowbnn.methods.laplace.curvature import Curvature, Problem
from flowbnn.training import is_main_process

LEAST, MOST = 1e-10, 1e10  # of a prior precision
QUIETER, LOUDER = 1e-8, 1e4  # of the factor of the noise's variance
ROUNDS = 500  # of MacKay's iteration
CONVERGED = 1e-9  # of the log-density that a step would gain
LEFT = 1.0  # of the log-density, that the last step may leave


def crossing(grows: Callable[[float], bool], low: float, high: float) -> float:
    """Where a function of a positive number stops to grow, by bisection of its logarithm."""
    low, high = math.log(low), math.log(high)
    while high - low > 1e-11:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if grows(math.exp(middle)) else (low, middle)
    return math.exp(0.5 * (low + high))


@dataclass
class Quadratic:
    r"""The log-likelihood as a function of some weights: :math:`g^T (w - w_0) - \tfrac12 (w - w_0)^T H (w - w_0)`.

    Without a slope :math:`g` the weights stay at :math:`w_0`, else they are the mode of the prior that is asked for.

    Args:
        curvature: eigenvalues of :math:`H`, with weights and slope in its eigenbasis, or :math:`H` itself, for several priors.
        sizes: the numbers of weights that have a prior each.
    """

    curvature: Tensor
    weights: Tensor
    slope: Tensor | None
    sizes: list[int]

    def at(self, deltas: list[float]) -> tuple[list[float], list[float], float]:
        r""":math:`\gamma` and :math:`\|w\|^2` for each prior of these precisions, and the change of :math:`-2 \log p(D \mid w)`."""
        prior = torch.cat([self.weights.new_full((n,), d) for n, d in zip(self.sizes, deltas, strict=True)])
        full = self.curvature.ndim == 2
        if full:
            root = torch.linalg.cholesky(self.curvature + prior.diag())
            gains = 1.0 - prior * torch.cholesky_inverse(root).diagonal()
        else:
            gains = self.curvature / (self.curvature + prior)
        weights, change = self.weights, 0.0
        if self.slope is not None:
            uphill = self.slope - prior * weights
            if full:
                step = torch.cholesky_solve(uphill[:, None], root)[:, 0]
                bent = self.curvature @ step
            else:
                step = uphill / (self.curvature + prior)
                bent = self.curvature * step
            weights, change = weights + step, float(step @ (bent - 2.0 * self.slope))
        squares = [float(part.square().sum()) for part in weights.split(self.sizes)]
        return [float(part.sum()) for part in gains.split(self.sizes)], squares, change

    def best(self, noise: float = 1.0, start: list[float] | None = None) -> list[float]:
        r"""The precisions :math:`\delta'` at which the evidence is highest, for this factor of the noise's variance.

        One is found by bisection, several by MacKay's iteration from ``start``.

        >>> one = Quadratic(torch.tensor([3.0]), torch.tensor([0.75]).sqrt(), None, [1])
        >>> round(one.best()[0], 6)  # 3 / (3 + d) = 0.75 d
        1.0
        """
        if len(self.sizes) == 1:

            def grows(delta: float) -> bool:
                (gain,), (square,), _ = self.at([delta])
                return noise * gain > delta * square

            return [crossing(grows, LEAST, MOST)]
        deltas = start or [1.0] * len(self.sizes)
        for _ in range(ROUNDS):
            gains, squares, _ = self.at(deltas)
            last = deltas
            deltas = [
                min(max(noise * gain / max(square, 1e-300), LEAST), MOST)
                for gain, square in zip(gains, squares, strict=True)
            ]
            if max(abs(math.log(new / old)) for new, old in zip(deltas, last, strict=True)) < 1e-8:
                break
        return deltas


@dataclass(frozen=True)
class Prior:
    """How the prior is found: its ``scale``, or None for the best of all layers together or of each (``per_layer``).

    ``learns`` says that the noise of a Gaussian likelihood is found along with it.
    """

    scale: float | None
    per_layer: bool
    learns: bool

    def choose(
        self, problem: Problem, curvature: Curvature, slope: Mapping[str, Tensor] | None = None
    ) -> tuple[list[float], float]:
        r"""The precision :math:`\delta'` of each layer and the factor :math:`s^2` of the noise with the highest evidence.

        At the present weights; or, with the slope of the log-likelihood, at the mode that goes with them.
        """
        layers = len(problem.layers)
        if self.scale is not None and not self.learns:
            return [self.scale**-2] * layers, 1.0
        parts = self._parts(problem, curvature, slope)
        precisions = [[1.0] * len(part.sizes) for part in parts]

        def follow(noise: float) -> None:
            for index, part in enumerate(parts):
                known = None if self.scale is None else [self.scale**-2 * noise]
                precisions[index] = known or part.best(noise, precisions[index])

        def grows(noise: float) -> bool:
            follow(noise)
            gain, error = 0.0, misfit
            for part, deltas in zip(parts, precisions, strict=True):
                gains, _, change = part.at(deltas)
                gain, error = gain + sum(gains), error + change
            return error / noise + gain > count

        noise = 1.0
        if self.learns:
            count, misfit = _misfit(problem, curvature)
            noise = crossing(grows, QUIETER, LOUDER)
        follow(noise)
        deltas = [delta for each in precisions for delta in each]
        return (deltas if len(deltas) == layers else deltas * layers), noise

    def _parts(
        self, problem: Problem, curvature: Curvature, slope: Mapping[str, Tensor] | None
    ) -> list[Quadratic]:
        """One for all layers together; or, with a prior for each, one for each, or one with several priors of a full curvature."""
        blocks, separate = curvature.blocks, self.scale is None and self.per_layer and len(problem.layers) > 1

        def uphill(group: list[Block]) -> Tensor | None:
            if slope is None:
                return None
            return torch.cat([steepness(block, slope) for block in group])

        if separate and curvature.matrix is not None:
            block, steep = blocks[0], uphill(blocks)
            basis = block.tensors["vectors"].double()
            steep = None if steep is None else basis @ steep
            weights = block.pack(problem.weights).detach().double()
            return [Quadratic((basis * block.eigenvalues) @ basis.T, weights, steep, _sizes(problem))]
        parts = []
        for group in [[block] for block in blocks] if separate else [blocks]:
            values = torch.cat([block.eigenvalues.flatten() for block in group])
            weights = torch.cat([inside(block, problem.weights) for block in group])
            parts.append(Quadratic(values, weights, uphill(group), [len(values)]))
        return parts


def inside(block: Block, values: Mapping[str, Tensor]) -> Tensor:
    """Values in the basis in which the block's curvature is diagonal."""
    return block.to_basis(block.pack(values)).detach().double().flatten()


def steepness(block: Block, slope: Mapping[str, Tensor]) -> Tensor:
    """The slope in that basis, where there is curvature: elsewhere it is rounding, which a weak prior would follow without end."""
    values, rounding = block.eigenvalues.flatten(), 10.0 * torch.finfo(next(iter(slope.values())).dtype).eps
    return torch.where(values > rounding * values.max(), inside(block, slope), 0.0)


def _sizes(problem: Problem) -> list[int]:
    """The number of weights of each layer."""
    return [sum(math.prod(shape) for shape in shapes.values()) for shapes in problem.layers.values()]


def _misfit(problem: Problem, curvature: Curvature) -> tuple[float, float]:
    """The number of target values, and the sum of their squared errors over the noise's variance."""
    likelihood = problem.likelihood
    assert isinstance(likelihood, Gaussian)
    rows = curvature.seen if problem.total is None else problem.total
    logs = float(log_variance(likelihood.log_scale.detach().double()).sum())
    constant = rows * (logs + likelihood.dim * math.log(2.0 * math.pi))
    return float(rows * likelihood.dim), max(0.0, -2.0 * curvature.log_likelihood - constant)


def with_prior(problem: Problem, curvature: Curvature, deltas: list[float]) -> tuple[list[Block], float]:
    """The blocks with a prior of these precisions for each layer, and the log evidence."""
    sizes, blocks, matrix = _sizes(problem), curvature.blocks, curvature.matrix
    if matrix is not None and len(set(deltas)) > 1:
        # different precisions are not diagonal in the eigenbasis of the curvature: they become part of the matrix
        prior = torch.cat([matrix.new_full((n,), d) for n, d in zip(sizes, deltas, strict=True)])
        blocks = [
            Full.of(blocks[0].shapes, matrix + prior.diag(), next(iter(problem.weights.values())).dtype)
        ]
        blocks[0].tensors["values"].clamp_(min=min(deltas))  # which rounding must not hide
    else:
        for block, delta in zip(blocks, deltas, strict=False):
            block.prior = delta
    evidence = curvature.log_likelihood - 0.5 * sum(block.log_det() for block in blocks)
    for size, delta, shapes in zip(sizes, deltas, problem.layers.values(), strict=True):
        square = sum(float(problem.weights[name].detach().double().square().sum()) for name in shapes)
        evidence += 0.5 * (size * math.log(delta) - delta * square)
    return blocks, evidence


def newton_step(problem: Problem, curvature: Curvature, prior: Prior) -> tuple[Curvature, list[float], bool]:
    """The best prior and noise at the mode that goes with them, and a step of Newton's method to it, halved until the density grows.

    Returns the curvature there, the precision of each layer, and whether there was anything left to gain.
    """
    weights = problem.weights
    start = {name: value.detach().clone() for name, value in weights.items()}
    slope = problem.gradient(curvature.seen)
    relative, noise = prior.choose(problem, curvature, slope)
    names = {
        name: delta
        for shapes, delta in zip(problem.layers.values(), relative, strict=True)
        for name in shapes
    }
    uphill = {name: slope[name] - names[name] * value for name, value in start.items()}
    blocks = with_prior(problem, curvature, relative)[0]
    step = {name: value for block in blocks for name, value in block.solve(uphill).items()}
    deltas = [delta / noise for delta in relative]
    before = curvature.log_likelihood
    if prior.learns:
        count, misfit = _misfit(problem, curvature)
        before += 0.5 * misfit * (1.0 - 1.0 / noise) - 0.5 * count * math.log(noise)
        make_louder(problem, noise)

    def penalty() -> float:
        squares = (
            names[name] * float(value.detach().double().square().sum()) for name, value in weights.items()
        )
        return 0.5 * sum(squares) / noise

    @torch.no_grad()
    def move_by(share: float) -> None:
        for name, value in start.items():
            weights[name].copy_(value + share * step[name] if share else value)

    before -= penalty()
    gain = 0.5 * sum(float((step[name].double() * uphill[name].double()).sum()) for name in step) / noise
    slack = 1e-9 if next(iter(start.values())).dtype == torch.float64 else 1e-6
    for halvings in range(12):
        move_by(0.5**halvings)
        try:
            after = problem.measure()
        except FlowBNNError:  # too far: the likelihood is not finite there
            continue
        if after.log_likelihood - penalty() >= before - slack * abs(before):
            break
    else:
        move_by(0.0)
        after, gain = problem.measure(), 0.0
    if prior.learns:
        # the noise is at least the size of the residuals, also where these are larger than the step had promised
        count, misfit = _misfit(problem, after)
        if misfit > (1.0 + slack) * count:
            make_louder(problem, misfit / count)
            after = problem.measure()
            deltas = deltas if prior.scale is not None else [delta * count / misfit for delta in deltas]
    return after, deltas, gain > CONVERGED


def warn_of_slope(problem: Problem, curvature: Curvature, blocks: list[Block], deltas: list[float]) -> None:
    """Warn where one more step of Newton's method would raise the log-density much: the weights are not at its mode."""
    slope = problem.gradient(curvature.seen)
    for shapes, delta in zip(problem.layers.values(), deltas, strict=True):
        for name in shapes:
            slope[name] = slope[name] - delta * problem.weights[name].detach()
    left = 0.0
    for block in blocks:
        left += 0.5 * float(
            (steepness(block, slope).square() / (block.eigenvalues.flatten() + block.prior)).sum()
        )
    if left > LEFT and is_main_process():
        warn(
            f"the weights are not at the mode yet: another step of Newton's method would raise the log-density by {left:.3g}, and "
            "the evidence is too low; take more steps (newton=...), or train first (epochs=...)",
            kind="mode",
            left=left,
        )


@torch.no_grad()
def make_louder(problem: Problem, noise: float) -> None:
    """Multiply the variances of the learned noise."""
    problem.likelihood.log_scale.add_(0.5 * math.log(noise))  # type: ignore[operator]
