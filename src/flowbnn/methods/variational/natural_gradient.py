r"""Gaussian posterior over the noise of a network with fixed weights, fitted by natural gradients.

With a diagonal prior :math:`\mathcal N(\mu, V)` of the noise and the generalized Gauss-Newton matrix :math:`G` of the negative
log-likelihood, a step of size :math:`\rho` is

.. math::
    \Lambda &\leftarrow (1 - \rho) \Lambda + \rho \left(E_q[G(z)] + V^{-1}\right) \\
    m &\leftarrow m + \rho \Lambda^{-1} \left(E_q[\nabla \log p(D \mid z)] - V^{-1} (m - \mu)\right)

(Khan et al. 2018, https://arxiv.org/abs/1806.04854). Every example has its own draw, or several if there are few examples, so that one
pass over the data estimates both expectations. Ten to thirty passes suffice, without a learning rate: a step that lowers the ELBO by
more than its standard error is undone and halved. The fit starts at a narrow Gaussian around one. For classes, the mean of the last
layer is divided by the temperature of the network if this increases the ELBO. The precision is then replaced by the Gauss-Newton matrix
plus the precision of the prior, if this increases it as well.

The Gauss-Newton matrix leaves out the curvature of the network, so that the Gaussian is too narrow. If it has few dimensions, the fit
ends with steps by the exact Hessian (:mod:`~flowbnn.methods.variational.hessian_refinement`).
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import halve_rows_on_oom, repeat, take
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.fitting import likelihood_not_finite
from flowbnn.methods.variational.block_gaussian import BlockGaussian, average, factorize_or
from flowbnn.methods.variational.hessian_refinement import HessianRefinement
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.networks import evaluation_mode
from flowbnn.regression import min_noise_variance

Structure = Literal["full", "chain", "layers", "factorized"]


@dataclass
class GaussianEstimate:
    """Estimate of the ELBO and its derivatives from one pass over the data.

    Args:
        log_likelihoods: Expected log-likelihood of each example, ``[N]``.
        kl: KL divergence from the prior.
        gradient: Expected gradient of the log-likelihood of all data, ``[D]``.
        blocks: Blocks on the diagonal of the Gauss-Newton matrix.
        links: Blocks of neighboring layers of the Gauss-Newton matrix, for a chain.
        squared_residuals: Mean squared residual of each target of a regression.
        roots: Rows of a root of the Gauss-Newton matrix, for a factorized Gaussian.
    """

    log_likelihoods: Tensor
    kl: float
    gradient: Tensor
    blocks: list[Tensor]
    links: list[Tensor]
    squared_residuals: Tensor
    roots: list[Tensor]

    @property
    def elbo(self) -> float:
        """Estimate of the ELBO in nats."""
        return float(self.log_likelihoods.sum()) - self.kl

    @property
    def is_finite(self) -> bool:
        """True if all numbers are finite."""
        tensors = (self.log_likelihoods, self.gradient, *self.blocks, *self.links)
        return math.isfinite(self.elbo) and all(bool(tensor.isfinite().all()) for tensor in tensors)


@dataclass(frozen=True)
class NaturalFit:
    """Result of :func:`fit_gaussian`.

    Args:
        gaussian: Gaussian over the noise of all layers, in the order of the network.
        elbo: Mean ELBO of the last passes in nats.
        error: Standard error of ``elbo``.
        trace: ELBO of every accepted pass.
        converged: True if the ELBO converged within the maximum number of passes.
        likelihood: Likelihood with the fitted noise of a regression.
    """

    gaussian: BlockGaussian
    elbo: float
    error: float
    trace: tuple[float, ...]
    converged: bool
    likelihood: Likelihood


class _GaussianProblem:
    """Data, network and structure of a Gaussian that is fitted."""

    min_draws = 512  # per pass; below, the estimate of the curvature is too noisy

    def __init__(
        self, network: NoisyNetwork, inputs: Any, targets: Tensor, structure: Structure, seed: int
    ) -> None:
        self.network, self.structure = network, structure
        self.num_examples = len(targets)
        self.draws_per_example = max(1, self.min_draws // len(targets))
        if self.draws_per_example > 1:
            inputs, targets = repeat((inputs, targets), self.draws_per_example)
        self.inputs, self.targets = inputs, targets
        self.device, self.seed, self.num_passes = targets.device, seed, 0
        self.rows = 1024 if self.device.type == "cuda" else 256  # of one pass, halved if memory runs out
        self.generator = torch.Generator(self.device)
        self.label_generator = torch.Generator().manual_seed(seed)
        sizes = network.sizes
        self.sizes = [sum(sizes)] if structure in ("full", "factorized") else sizes

    def initial_gaussian(
        self, loc: Tensor, scale: Tensor, temperature: float, std: float = 0.1
    ) -> BlockGaussian:
        """Returns a narrow Gaussian around one, under the prior of mean ``loc`` and standard deviation ``scale``.

        Args:
            loc: Mean of the prior.
            scale: Standard deviation of the prior.
            temperature: Divisor of the mean of the last layer with noise.
            std: Standard deviation of the Gaussian.
        """
        ones = torch.ones(sum(self.sizes), dtype=torch.float64, device=self.device)
        mean = ones.clone()
        mean[-self.network.sizes[-1] :] /= temperature
        blocks = list((ones / std**2).split(self.sizes))
        if self.structure != "factorized":
            blocks = [diagonal.diag() for diagonal in blocks]
        links = []
        if self.structure == "chain":
            links = [ones.new_zeros(after, before) for before, after in pairwise(self.sizes)]
        return BlockGaussian(mean, blocks, links, loc, scale.square()).factorize()

    def estimate(self, q: BlockGaussian, labels: int) -> GaussianEstimate:
        """Estimates the ELBO and its derivatives by one pass over the data, with this many drawn labels per example."""
        estimate = halve_rows_on_oom(self, lambda: self._estimate(q, labels))
        self.num_passes += 1
        return estimate

    def _estimate(self, q: BlockGaussian, labels: int) -> GaussianEstimate:
        """Returns :meth:`estimate`, with ``rows`` examples in a forward pass."""
        blocks, links = ([torch.zeros_like(tensor) for tensor in group] for group in (q.blocks, q.links))
        stored_roots: list[Tensor] = []
        gradient, log_likelihoods = torch.zeros_like(q.mean), []
        squares = torch.zeros((), device=self.device)
        # every second pass mirrors the draws of the previous one, so that linear terms cancel
        self.generator.manual_seed(self.seed + 7919 * (self.num_passes // 2))
        sign = 1.0 - 2.0 * (self.num_passes % 2)
        backward_maps = q.backward_maps() if links else []
        draws = q.with_draw_dtype(self.network.dtype)
        for low in range(0, len(self.targets), self.rows):
            inputs, targets = take((self.inputs, self.targets), low, low + self.rows)
            shape = len(targets), len(q.mean)
            normal = torch.randn(
                shape, generator=self.generator, device=self.device, dtype=self.network.dtype
            )
            vectors = draws.mean + draws.deviations(sign * normal)
            result = self.network.derivatives(inputs, targets, vectors, self.label_generator, labels=labels)
            log_likelihoods.append(result.log_likelihood.double())
            gradient += result.gradient.double()
            if self.structure == "factorized":
                stored_roots.append(self._thinned(result.roots, len(targets)))
            self._add_curvature(blocks, result.roots)
            if links:
                _add_chain(blocks, links, result.roots.split(self.sizes, -1), q.maps, backward_maps)
            if learns_noise(self.network.likelihood):
                residuals = result.outputs - targets.reshape(result.outputs.shape)
                squares = squares + residuals.square().sum(0)
        for total in (gradient, *blocks, *links):
            total /= self.draws_per_example
        means = torch.cat(log_likelihoods).reshape(self.draws_per_example, -1).mean(0)
        squares = squares / len(self.targets)
        return GaussianEstimate(means, q.kl(), gradient, blocks, links, squares, stored_roots)

    def _thinned(self, roots: Tensor, num_rows: int, max_elements: int = 2**26) -> Tensor:
        """Returns every k-th root, so that all roots of a pass have at most ``max_elements`` elements."""
        total = roots.shape[0] / num_rows * len(self.targets) * roots.shape[1]
        return roots[:: math.ceil(total / max_elements)]

    def _add_curvature(self, blocks: list[Tensor], roots: Tensor) -> None:
        """Adds the Gauss-Newton matrix of some examples to the diagonal blocks."""
        for block, root in zip(blocks, roots.split(self.sizes, -1), strict=True):
            if self.structure == "factorized":
                block += root.square().sum(0, dtype=torch.float64)
            else:
                block += (root.mT @ root).double()

    def step(self, q: BlockGaussian, estimate: GaussianEstimate, size: float) -> BlockGaussian:
        """Takes a natural-gradient step, halved if the precision of a chain would not be positive definite."""
        blocks = [torch.lerp(old, new, size) for old, new in zip(q.blocks, estimate.blocks, strict=True)]
        links = [torch.lerp(old, new, size) for old, new in zip(q.links, estimate.links, strict=True)]
        proposal = factorize_or(replace(q, blocks=blocks, links=links), q)
        if proposal is q:
            return self.step(q, estimate, 0.5 * size)
        gradient = estimate.gradient - (q.mean - q.prior_mean) / q.prior_variance
        if estimate.roots:
            # with its own diagonal precision the mean of a factorized Gaussian would converge slowly
            direction = _newton_direction(estimate, 1.0 / q.prior_variance, gradient)
        else:
            direction = proposal.multiply_covariance(gradient)
        proposal.mean = q.mean + size * direction
        return proposal


def _add_chain(
    blocks: Sequence[Tensor],
    links: Sequence[Tensor],
    roots: Sequence[Tensor],
    maps: Sequence[Tensor],
    backward_maps: Sequence[Tensor],
) -> None:
    r"""Adds to blocks and links the derivatives of a chain, for roots :math:`R` of the Gauss-Newton matrix.

    Layers that are not neighbors are correlated through the layers between them. :math:`T_l = R_l + T_{l+1} A_{l+1}` and
    :math:`S_l = R_l + S_{l-1} B_l` are the roots at deviations of layer :math:`l` that later or earlier layers follow by the maps. The
    gradient of :math:`\frac12 \mathrm{tr}(R^\top R\, C)` in the covariances of neighbors is :math:`T_l^\top S_{l-1}`. In the
    covariance of one layer it is half of :math:`R_l^\top R_l - X_l - X_l^\top` with :math:`X_l = (T_l - R_l)^\top (S_l - R_l)`.
    """
    later, earlier = list(roots), list(roots)
    for number, forward_map in reversed(list(enumerate(maps))):
        later[number] = roots[number] + later[number + 1] @ forward_map.to(roots[0])
    for number, backward_map in enumerate(backward_maps):
        earlier[number + 1] = roots[number + 1] + earlier[number] @ backward_map.to(roots[0])
        links[number].add_(later[number + 1].mT @ earlier[number])
    for block, root, after, before in zip(blocks, roots, later, earlier, strict=True):
        product = (after - root).mT @ (before - root)
        block.sub_(product + product.mT)


def _newton_direction(
    estimate: GaussianEstimate, prior_precision: Tensor, gradient: Tensor, max_dense_dim: int = 512
) -> Tensor:
    r"""Returns :math:`(G + \mathrm{diag}(a))^{-1}` times the gradient, for the Gauss-Newton matrix :math:`G` of the stored roots.

    Args:
        estimate: Estimate with the diagonal of :math:`G` and some of its roots, which are scaled to represent all.
        prior_precision: Diagonal :math:`a`.
        gradient: Gradient of the ELBO.
        max_dense_dim: Largest dimension for which the matrix is formed. Above it, conjugate gradients are used.
    """
    diagonal = estimate.blocks[0]
    stored = float(sum(root.square().sum(dtype=torch.float64) for root in estimate.roots))
    factor = float(diagonal.sum()) / stored if stored else 0.0
    if len(gradient) <= max_dense_dim:
        matrix = sum(((root.mT @ root).double() for root in estimate.roots), gradient.new_zeros(()))
        return torch.linalg.solve(factor * matrix + prior_precision.diag(), gradient)
    roots, preconditioner = torch.cat(estimate.roots), prior_precision + diagonal
    solution, residual = torch.zeros_like(gradient), gradient
    direction = residual / preconditioner
    norm = initial_norm = float(residual @ direction)
    for _ in range(100):  # steps of conjugate gradients
        if not norm > 1e-10 * initial_norm:
            break
        product = factor * ((roots @ direction.to(roots)) @ roots).double() + prior_precision * direction
        length = norm / float(direction @ product)
        solution, residual = solution + length * direction, residual - length * product
        previous, norm = norm, float(residual @ (residual / preconditioner))
        direction = residual / preconditioner + norm / previous * direction
    return solution


def fit_prior(
    q: BlockGaussian, sizes: Sequence[int], loc: Tensor, scale: Tensor, weight: float = 1.0
) -> BlockGaussian:
    r"""Returns the Gaussian under the prior of each layer that maximizes the ELBO, shrunk towards the initial prior.

    .. math:: \mu_l = \frac{\sum_i m_i + \mu_0}{d_l + 1}, \qquad
              \sigma_l^2 = \frac{\sum_i (C_{ii} + (m_i - \mu_l)^2) + (\mu_l - \mu_0)^2 + \sigma_0^2}{d_l + 1}

    Args:
        q: Gaussian over the noise.
        sizes: Number of dimensions of each layer.
        loc: Mean :math:`\mu_0` of the initial prior, ``[D]``.
        scale: Standard deviation :math:`\sigma_0` of the initial prior, ``[D]``.
        weight: Weight of the initial prior, in dimensions.
    """
    locs, variances = [], []
    layers = zip(*(value.split(list(sizes)) for value in (q.mean, q.variances(), loc, scale)), strict=True)
    for layer_mean, variance, initial_loc, initial_scale in layers:
        count = len(layer_mean) + weight
        center = (layer_mean.sum() + weight * initial_loc[0]) / count
        shrinkage = (center - initial_loc[0]).square() + initial_scale[0].square()
        total = (variance + (layer_mean - center).square()).sum() + weight * shrinkage
        locs.append(center.expand_as(layer_mean))
        variances.append((total / count).expand_as(layer_mean))
    return factorize_or(replace(q, prior_mean=torch.cat(locs), prior_variance=torch.cat(variances)), q)


def fit_gaussian(
    model: nn.Module,
    likelihood: Likelihood,
    inputs: Any,
    targets: Tensor,
    structure: Structure = "full",
    *,
    prior: Literal["fitted", "fixed"] = "fitted",
    loc: float | Tensor = 1.0,
    scale: float | Tensor = 0.5,
    start: BlockGaussian | None = None,
    temperature: float = 1.0,
    precise: bool = True,
    seed: int = 0,
    callback: Callable[[int, float], None] | None = None,
) -> NaturalFit:
    """Fits a Gaussian over the noise of a stochastic network to data that its weights have not seen.

    Args:
        model: Stochastic network; its noise posteriors are neither used nor changed.
        likelihood: Observation model of the targets; a copy with fitted noise is returned.
        inputs: Inputs of all examples, on the device of the network.
        targets: Targets of all examples.
        structure: Structure of the covariance: ``"full"``, ``"chain"`` (of layers), ``"layers"`` (independent) or ``"factorized"``.
        prior: ``"fitted"`` to fit mean and standard deviation of each layer by the ELBO, ``"fixed"`` to keep ``loc`` and ``scale``.
        loc: Mean of the prior, a float or ``[D]``.
        scale: Standard deviation of the prior, a float or ``[D]``.
        start: Initial Gaussian. By default, a narrow one around one, see ``temperature``.
        temperature: Temperature of the network without noise, for classes. If it is above 1 and ``start`` is None, the initial mean of
            the noise of the last layer is divided by it if this increases the ELBO.
        precise: If True, the Gaussians of several steps after convergence are averaged, and a Gaussian of few dimensions is refined by
            the exact Hessian (:mod:`~flowbnn.methods.variational.hessian_refinement`). If False, the fit takes half of the time.
        seed: Seed of the draws.
        callback: Function that is called after every pass with the number of passes and the ELBO per example.
    """
    likelihood = deepcopy(likelihood)
    network = NoisyNetwork(model, likelihood)
    with evaluation_mode(model), torch.no_grad():
        problem = _GaussianProblem(network, inputs, targets, structure, seed)
        loc, scale = (
            torch.as_tensor(value).to(targets.device, torch.float64).expand(sum(network.sizes))
            for value in (loc, scale)
        )
        if start is None:  # the last layer with noise need not be the one that computes the outputs
            divisors = [1.0, temperature] if temperature > 1.0 else [1.0]
            starts = [problem.initial_gaussian(loc, scale, divisor) for divisor in divisors]
        else:
            starts = [start]
        num_averaged = 8 if precise else 3
        gaussian, trace, converged = _optimize(
            problem,
            starts,
            loc,
            scale,
            prior == "fitted",
            tries_curvature=start is None,
            num_averaged=num_averaged,
            callback=callback,
        )
        if precise and converged and HessianRefinement.suits(gaussian):
            refinement = HessianRefinement(network, inputs, targets, gaussian, seed)

            def update_prior(q: BlockGaussian) -> BlockGaussian:
                return fit_prior(q, network.sizes, loc, scale) if prior == "fitted" else q

            gaussian = refinement.run(gaussian, update_prior)
            trace += [problem.estimate(gaussian, 1).elbo for _ in range(num_averaged)]
    elbos = trace[-(num_averaged if converged else 2) :]  # of Gaussians that differ only by noise
    error = stdev(elbos) / len(elbos) ** 0.5 if len(elbos) > 1 else float("inf")
    return NaturalFit(gaussian, mean(elbos), error, tuple(trace), converged, likelihood)


def _optimize(
    problem: _GaussianProblem,
    starts: Sequence[BlockGaussian],
    loc: Tensor,
    scale: Tensor,
    fits_prior: bool,
    *,
    tries_curvature: bool,
    num_averaged: int,
    max_passes: int = 60,
    callback: Callable[[int, float], None] | None = None,
) -> tuple[BlockGaussian, list[float], bool]:
    """Takes natural-gradient steps until convergence, or for ``max_passes`` passes.

    Args:
        problem: Network and data.
        starts: Gaussians, of which the one with the largest ELBO is the initial one.
        loc: Mean of the fixed prior.
        scale: Standard deviation of the fixed prior.
        fits_prior: If True, the prior is fitted.
        tries_curvature: If True, the precision of the initial Gaussian is replaced by the Gauss-Newton matrix there plus the precision
            of the prior, if this increases the ELBO.
        num_averaged: Number of Gaussians that are averaged at the end. More than three are those of the steps after convergence.
        max_passes: Largest number of steps.
        callback: Function that is called after every pass with the number of passes and the ELBO per example.

    Returns:
        The average of the last Gaussians after convergence, or the last Gaussian; the ELBO of every accepted step; True after
        convergence.
    """
    network, likelihood = problem.network, problem.network.likelihood
    labels, min_variance = 1, problem.targets.new_zeros(())
    if learns_noise(likelihood):
        targets = problem.targets[: problem.num_examples].reshape(problem.num_examples, -1)
        min_variance = min_noise_variance(*torch.var_mean(targets, 0, correction=0)[::-1])
    estimates = [(problem.estimate(q, labels), q) for q in starts]
    estimate, q = max(estimates, key=lambda pair: pair[0].elbo if pair[0].is_finite else -math.inf)
    if not estimate.is_finite:
        advice = "under narrow noise; exclude layers before log, sqrt or division"
        raise likelihood_not_finite(advice)
    trace, last_gaussians, converged = [estimate.elbo], list[BlockGaussian](), False
    if tries_curvature:
        curved = factorize_or(replace(q, blocks=estimate.blocks, links=estimate.links), q)
        proposed = problem.estimate(curved, labels)
        if proposed.is_finite and proposed.elbo > estimate.elbo:
            q, estimate = curved, proposed
            trace.append(estimate.elbo)
    size, min_size, max_size = 0.3, 0.01, 0.5
    for number in range(max_passes):
        proposal = problem.step(q, estimate, size)
        if fits_prior and number > 1:
            proposal = fit_prior(proposal, network.sizes, loc, scale)
        if learns_noise(likelihood):
            variance = torch.maximum(estimate.squared_residuals, min_variance)
            likelihood.log_scale.copy_(0.5 * variance.log())
        proposed = problem.estimate(proposal, labels)
        if callback is not None:
            callback(number + 1, estimate.elbo / problem.num_examples)
        error = _elbo_error(estimate, proposed, problem.num_examples)
        if not (proposed.is_finite and proposed.elbo - estimate.elbo > -2.0 * error):
            if size <= min_size and (repeated := problem.estimate(q, labels)).is_finite:
                estimate = repeated  # the estimate may have been too large by chance
            size = max(min_size, 0.5 * size)
            continue
        q, estimate, size = proposal, proposed, min(max_size, 1.3 * size)
        trace.append(estimate.elbo)
        last_gaussians = [*last_gaussians, q][-num_averaged:]
        if not converged and has_converged(trace, error):
            converged = True
            if num_averaged > 3:  # before convergence one drawn label per example is accurate enough
                last_gaussians, labels = [], 3
        if converged and len(last_gaussians) == num_averaged:
            break
    return (average(last_gaussians) if converged and last_gaussians else q), trace, converged


def _elbo_error(estimate: GaussianEstimate, proposed: GaussianEstimate, num_examples: int) -> float:
    """Returns the standard error of the difference of two ELBOs.

    It is bounded by the standard deviation of the current estimate, because outlying examples of a bad proposal inflate its own.
    """
    difference = (proposed.log_likelihoods - estimate.log_likelihoods).std(correction=0)
    current = estimate.log_likelihoods.std(correction=0)
    return min(float(difference), 2.0**0.5 * float(current)) * num_examples**0.5


def has_converged(trace: Sequence[float], error: float) -> bool:
    """Returns True if the mean of the last four ELBOs exceeds that of the four before by less than half of the standard error.

    Four ELBOs have two pairs of mirrored draws, so that both means have the same number of either.

    >>> has_converged([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 1.0), has_converged([3.0] * 8, 0.1)
    (False, True)
    """
    return len(trace) >= 8 and (sum(trace[-4:]) - sum(trace[-8:-4])) / 4 < 0.5 * error
