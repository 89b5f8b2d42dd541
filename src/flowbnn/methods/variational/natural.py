r"""A Gaussian over the noise of a network whose weights stay as they are, fitted by natural gradients.

With a diagonal prior :math:`\mathcal N(\mu, V)` of the noise and :math:`G` the generalized Gauss-Newton matrix of the negative
log-likelihood, a step of size :math:`\rho` is

.. math::
    \Lambda &\leftarrow (1 - \rho) \Lambda + \rho \left(E_q[G(z)] + V^{-1}\right) \\
    m &\leftarrow m + \rho \Lambda^{-1} \left(E_q[\nabla \log p(D \mid z)] - V^{-1} (m - \mu)\right)

(Khan et al. 2018, https://arxiv.org/abs/1806.04854). Every example has a draw of its own, several where there are few, so that one pass
over the data estimates both expectations. Some twenty passes suffice, and no rate is to be chosen: a step that lowers the ELBO by more
than its own error is taken back and halved.
"""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import call, dtype_of, evaluation_mode, halve_rows_on_oom, repeat, take
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.laplace.derivatives import output_hessian
from flowbnn.methods.variational.block_gaussian import BlockGaussian, average, factorized
from flowbnn.noise.base import Noise, make_noise_modes, noise_layers
from flowbnn.noise.contexts import NoiseContext, PreparedDraws
from flowbnn.regression import min_noise_variance

Structure = Literal["full", "chain", "layers", "factorized"]

START = 0.1  # standard deviation of the noise at the start
MOST, LEAST = 0.5, 0.01  # sizes of a step
DRAWS = 512  # in a pass at least: where there are fewer examples, each has several
ROWS = {"cpu": 256, "cuda": 1024}  # examples at once, fewer where memory runs out
EXACT = 3  # outputs up to which the Gauss-Newton matrix is exact; beyond, as many labels are drawn for each example in a pass
PASSES = 60  # over the data at most
LATE = 8  # passes after the ELBO has settled
# the mean of a factorized Gaussian moves by the whole curvature, since by its diagonal it creeps
KEPT = 2**26  # numbers of the roots of that curvature
SOLVED = 512  # dimensions up to which it is a matrix
STEPS = 100  # of conjugate gradients, beyond
WEIGHT = 1.0  # of the prior of the prior's width, in dimensions


class NoisyNetwork:
    """A stochastic network as a function of one noise vector for each example, and its log-likelihood's derivatives in it."""

    def __init__(self, model: nn.Module, likelihood: Likelihood) -> None:
        self.model, self.likelihood = model.eval(), likelihood
        self.layers: dict[str, Noise] = noise_layers(model)
        wrong = next((name for name, noise in self.layers.items() if noise.site != "channel"), None)
        if wrong is not None:
            raise FlowBNNError(
                f"the noise of layer '{wrong}' is drawn anew at every position; this takes one vector a layer, site='channel'",
                kind="site",
                layer=wrong,
            )
        self.sizes = [noise.layout.dim for noise in self.layers.values()]
        self.dtype = dtype_of(model) or torch.get_default_dtype()

    def outputs(self, inputs: Any, vectors: Tensor) -> Tensor:
        """The network's outputs ``[B, ...]``, at least a matrix, where example ``i`` has the noise ``vectors[i]``, ``[B, D]``."""
        by_layer = zip(self.layers.values(), vectors.split(self.sizes, -1), strict=True)
        draws = {noise.key: values for noise, values in by_layer}
        prepared = PreparedDraws(draws, torch.is_grad_enabled(), required=True)
        with NoiseContext(make_noise_modes(self.model, "sample"), prepared=prepared, sharded=False):
            outputs = call(self.model, inputs)
        return outputs if outputs.ndim > 1 else outputs.unsqueeze(1)  # of one logit, squeezed

    def passes(
        self, vectors: Tensor, inputs: Any, targets: Tensor, rows: int
    ) -> Iterator[tuple[slice, Any, Tensor, Tensor]]:
        """All the data with each of the vectors ``[S, D]``: which vectors, and inputs, targets and noise of at most ``rows`` rows."""
        at_once = max(1, rows // len(targets))
        for first in range(0, len(vectors), at_once):
            part = vectors[first : first + at_once].to(self.dtype)
            for low in range(0, len(targets), rows):
                few, truth = take((inputs, targets), low, low + rows)
                noise = part.repeat_interleave(len(truth), 0)
                yield slice(first, first + len(part)), repeat(few, len(part)), repeat(truth, len(part)), noise

    def gradients(self, vectors: Tensor, inputs: Any, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``[S]`` of all the data given vectors ``[S, D]``, and their gradients ``[S, D]``, in float64."""
        slopes = torch.zeros(vectors.shape, dtype=torch.float64, device=vectors.device)
        values = slopes.new_zeros(len(vectors))
        for some, few, truth, noise in self.passes(vectors.detach(), inputs, targets, rows):
            with torch.enable_grad():
                fitted = self.likelihood.log_prob(self.outputs(few, noise.requires_grad_()), truth)
                (slope,) = torch.autograd.grad(fitted.sum(), noise)
            shape = (some.stop - some.start, -1)
            values[some] += fitted.detach().reshape(shape).sum(1, dtype=torch.float64)
            slopes[some] += slope.reshape(*shape, vectors.shape[-1]).sum(1, dtype=torch.float64)
        return values, slopes

    def derivatives(
        self,
        inputs: Any,
        targets: Tensor,
        vectors: Tensor,
        generator: torch.Generator,
        exact: int = EXACT,
        labels: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Outputs, log-likelihoods ``[B]``, the sum of their gradients ``[D]``, and ``[B K, D]`` roots of the Gauss-Newton matrix.

        Beyond ``exact`` outputs these roots are of as many ``labels``, unless told otherwise, drawn for each example.
        """
        labels = exact if labels is None else labels
        leaf = vectors.requires_grad_()
        with torch.enable_grad():
            outputs = self.outputs(inputs, leaf)
            fitted = self.likelihood.log_prob(outputs, targets)
            (gradient,) = torch.autograd.grad(fitted.sum(), leaf, retain_graph=True)
            flat, plain = outputs.flatten(1), outputs.detach().flatten(1)
            columns = []
            if plain.shape[1] <= exact:
                hessian = output_hessian(self.likelihood, plain, targets, "ggn", generator)
                columns = list(hessian.columns(0, hessian.count).unbind(1))
            else:
                for _ in range(labels):
                    drawn = output_hessian(self.likelihood, plain, targets, "sampled", generator)
                    columns.append(drawn.columns(0, 1)[:, 0] / labels**0.5)
            roots = [
                torch.autograd.grad(flat, leaf, column.to(flat), retain_graph=number + 1 < len(columns))[0]
                for number, column in enumerate(columns)
            ]
        return outputs.detach(), fitted.detach(), gradient.sum(0), torch.cat(roots)


@dataclass
class Estimate:
    """What one pass over the data tells of a Gaussian: log-likelihoods of the examples, gradient, Gauss-Newton blocks."""

    fitted: Tensor
    kl: float
    gradient: Tensor
    blocks: list[Tensor]
    links: list[Tensor]
    square: Tensor  # mean squared residuals of a regression
    roots: list[Tensor]  # of the whole Gauss-Newton matrix, for the mean of a factorized Gaussian

    @property
    def elbo(self) -> float:
        return float(self.fitted.sum()) - self.kl

    @property
    def finite(self) -> bool:
        numbers = (self.fitted, self.gradient, *self.blocks, *self.links)
        return math.isfinite(self.elbo) and all(bool(one.isfinite().all()) for one in numbers)


@dataclass(frozen=True)
class NaturalFit:
    """What :func:`fit_gaussian` gives.

    Args:
        gaussian: over the noise of all layers, in the network's order.
        elbo, error: in nats, the mean of the last passes, and its standard error.
        trace: the ELBO of every pass.
        settled: whether the ELBO rose no more at the end; if not, the passes were too few.
        likelihood: with the noise level of a regression, where it is learned.
    """

    gaussian: BlockGaussian
    elbo: float
    error: float
    trace: tuple[float, ...]
    settled: bool
    likelihood: Likelihood


class _Problem:
    """The data, the network and the structure of the Gaussian."""

    def __init__(
        self, network: NoisyNetwork, inputs: Any, targets: Tensor, structure: Structure, seed: int
    ) -> None:
        self.network, self.structure = network, structure
        self.times = max(1, DRAWS // len(targets))
        if self.times > 1:
            inputs, targets = repeat((inputs, targets), self.times)
        self.inputs, self.targets = inputs, targets
        self.device, self.seed, self.passes = targets.device, seed, 0
        self.rows = ROWS.get(self.device.type, ROWS["cpu"])
        self.generator = torch.Generator(self.device)
        self.labels = torch.Generator().manual_seed(seed)
        sizes = network.sizes
        self.sizes = [sum(sizes)] if structure in ("full", "factorized") else sizes

    def start(self, loc: Tensor, scale: Tensor) -> BlockGaussian:
        dim = sum(self.sizes)
        ones = torch.ones(dim, dtype=torch.float64, device=self.device)
        blocks = list((ones / START**2).split(self.sizes))
        if self.structure != "factorized":
            blocks = [part.diag() for part in blocks]
        links = []
        if self.structure == "chain":
            links = [ones.new_zeros(after, before) for before, after in pairwise(self.sizes)]
        return BlockGaussian(ones, blocks, links, loc, scale.square()).factorize()

    def estimate(self, q: BlockGaussian, labels: int = EXACT) -> Estimate:
        """One pass over the data."""
        estimate = halve_rows_on_oom(self, lambda: self._estimate(q, labels))
        self.passes += 1
        return estimate

    def _estimate(self, q: BlockGaussian, labels: int) -> Estimate:
        blocks, links = ([torch.zeros_like(one) for one in some] for some in (q.blocks, q.links))
        kept: list[Tensor] = []
        gradient, fitted, square = torch.zeros_like(q.mean), [], torch.zeros((), device=self.device)
        # every second pass has the draws of the one before, mirrored: what is linear in them cancels
        self.generator.manual_seed(self.seed + 7919 * (self.passes // 2))
        sign = 1.0 - 2.0 * (self.passes % 2)
        back = q.backward_maps() if links else []
        for low in range(0, len(self.targets), self.rows):
            inputs, targets = take((self.inputs, self.targets), low, low + self.rows)
            normal = torch.randn(
                len(targets), len(q.mean), generator=self.generator, device=self.device, dtype=torch.float64
            )
            vectors = (q.mean + q.deviations(sign * normal)).to(self.network.dtype)
            outputs, some, slope, roots = self.network.derivatives(
                inputs, targets, vectors, self.labels, labels=labels
            )
            fitted.append(some.double())
            gradient += slope.double()
            if self.structure == "factorized":
                thinned = math.ceil(roots.shape[0] / len(targets) * len(self.targets) * len(q.mean) / KEPT)
                kept.append(roots[::thinned])
            parts = roots.split(self.sizes, -1)
            for block, part in zip(blocks, parts, strict=True):
                if self.structure == "factorized":
                    block += part.square().sum(0, dtype=torch.float64)
                else:
                    block += (part.mT @ part).double()
            if links:
                _add_chain(blocks, links, parts, q.maps, back)
            if learns_noise(self.network.likelihood):
                square = square + (outputs - targets.reshape(outputs.shape)).square().sum(0)
        for total in (gradient, *blocks, *links):
            total /= self.times
        each = torch.cat(fitted).reshape(self.times, -1).mean(0)
        return Estimate(each, q.kl(), gradient, blocks, links, square / len(self.targets), kept)

    def step(self, q: BlockGaussian, estimate: Estimate, size: float) -> BlockGaussian:
        """From a Gaussian by this size, or by less where the precision would not be positive definite, as that of a chain may."""
        blocks = [torch.lerp(old, new, size) for old, new in zip(q.blocks, estimate.blocks, strict=True)]
        links = [torch.lerp(old, new, size) for old, new in zip(q.links, estimate.links, strict=True)]
        moved = factorized(replace(q, blocks=blocks, links=links), q)
        if moved is q:
            return self.step(q, estimate, 0.5 * size)
        slope = estimate.gradient - (q.mean - q.loc) / q.variance
        way = _newton(estimate, 1.0 / q.variance, slope) if estimate.roots else moved.covariance_times(slope)
        moved.mean = q.mean + size * way
        return moved


def _add_chain(
    blocks: Sequence[Tensor],
    links: Sequence[Tensor],
    parts: Sequence[Tensor],
    maps: Sequence[Tensor],
    back: Sequence[Tensor],
) -> None:
    r"""Add to the blocks :math:`R_l^\top R_l` and to the links what the roots :math:`R` of the Gauss-Newton matrix ask of a chain.

    Layers that are not neighbours are correlated through those between them: :math:`T_l = R_l + T_{l+1} A_{l+1}` and
    :math:`S_l = R_l + S_{l-1} B_l` are the roots at deviations of layer :math:`l` that the layers after it, or before it, follow by the
    maps. The gradient of :math:`\frac12 \mathrm{tr}(R^\top R\, C)` in the covariances that a chain has is
    :math:`T_l^\top S_{l-1}` for neighbours; in those of a layer, with :math:`X_l = (T_l - R_l)^\top (S_l - R_l)`, half of
    :math:`R_l^\top R_l - X_l - X_l^\top`.
    """
    ahead, behind = list(parts), list(parts)
    for number, way in reversed(list(enumerate(maps))):
        ahead[number] = parts[number] + ahead[number + 1] @ way.to(parts[0])
    for number, way in enumerate(back):
        behind[number + 1] = parts[number + 1] + behind[number] @ way.to(parts[0])
        links[number].add_(ahead[number + 1].mT @ behind[number])
    for block, part, after, before in zip(blocks, parts, ahead, behind, strict=True):
        both = (after - part).mT @ (before - part)
        block.sub_(both + both.mT)


def _newton(estimate: Estimate, added: Tensor, slope: Tensor) -> Tensor:
    r""":math:`(G + \mathrm{diag}(a))^{-1}` times the slope, from the roots of the Gauss-Newton matrix :math:`G` that were kept."""
    diagonal = estimate.blocks[0]
    kept = float(sum(root.square().sum(dtype=torch.float64) for root in estimate.roots))
    share = float(diagonal.sum()) / kept if kept else 0.0
    if len(slope) <= SOLVED:
        whole = sum(((root.mT @ root).double() for root in estimate.roots), slope.new_zeros(()))
        return torch.linalg.solve(share * whole + added.diag(), slope)
    roots, scale = torch.cat(estimate.roots), added + diagonal
    way, rest = torch.zeros_like(slope), slope
    along = rest / scale
    size = begun = float(rest @ along)
    for _ in range(STEPS):  # of conjugate gradients, scaled by the diagonal
        if not size > 1e-10 * begun:
            break
        bent = share * ((roots @ along.to(roots)) @ roots).double() + added * along
        length = size / float(along @ bent)
        way, rest = way + length * along, rest - length * bent
        before, size = size, float(rest @ (rest / scale))
        along = rest / scale + size / before * along
    return way


def fit_prior(q: BlockGaussian, sizes: Sequence[int], loc: Tensor, scale: Tensor) -> BlockGaussian:
    r"""The prior with the mean and width of each layer that maximise the ELBO, drawn a little to its given ones.

    .. math:: \mu_l = \frac{\sum_i m_i + \mu_0}{d_l + 1}, \qquad
              \sigma_l^2 = \frac{\sum_i (C_{ii} + (m_i - \mu_l)^2) + (\mu_l - \mu_0)^2 + \sigma_0^2}{d_l + 1}
    """
    locs, variances = [], []
    layers = zip(*(value.split(list(sizes)) for value in (q.mean, q.variances(), loc, scale)), strict=True)
    for own, spread, given, width in layers:
        count = len(own) + WEIGHT
        center = (own.sum() + WEIGHT * given[0]) / count
        away = (center - given[0]).square() + width[0].square()
        total = (spread + (own - center).square()).sum() + WEIGHT * away
        locs.append(center.expand_as(own))
        variances.append((total / count).expand_as(own))
    return factorized(replace(q, loc=torch.cat(locs), variance=torch.cat(variances)), q)


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
    seed: int = 0,
) -> NaturalFit:
    """Fit a Gaussian over the noise of a stochastic network to data that its weights have not seen.

    Args:
        model: stochastic; its noise posteriors are not read and not changed.
        likelihood: of which a copy is taken, whose learned noise level is fitted along.
        inputs, targets: all the data, on the network's device.
        structure: of the covariance: ``"full"``, a ``"chain"`` of layers, ``"layers"`` (independent), ``"factorized"``.
        prior: ``"fitted"``: mean and width of each layer by the ELBO; ``"fixed"``: those given.
        loc, scale: of the prior, numbers or ``[D]``.
        start: where to begin.
    """
    likelihood = deepcopy(likelihood)
    network = NoisyNetwork(model, likelihood)
    with evaluation_mode(model), torch.no_grad():
        problem = _Problem(network, inputs, targets, structure, seed)
        loc, scale = (
            torch.as_tensor(value).to(targets.device, torch.float64).expand(sum(network.sizes))
            for value in (loc, scale)
        )
        current = problem.start(loc, scale) if start is None else start
        labels, least = 1, targets.new_zeros(())
        if learns_noise(likelihood):
            least = min_noise_variance(
                *torch.var_mean(targets.reshape(len(targets), -1), 0, correction=0)[::-1]
            )
        estimate = problem.estimate(current, labels)
        if not estimate.finite:
            raise FlowBNNError(
                "the log-likelihood of the data, or its gradient, is not finite under narrow noise: look for a logarithm, a root or a "
                "division in the network, and leave the layers before it without noise by the rules",
                kind="not finite",
            )
        size, trace = 0.3, [estimate.elbo]
        late: list[BlockGaussian] = []  # the last ones, whose mean has less noise than each
        for number in range(PASSES):
            proposal = problem.step(current, estimate, size)
            if prior == "fitted" and number > 1:
                proposal = fit_prior(proposal, network.sizes, loc, scale)
            if learns_noise(likelihood):
                likelihood.log_scale.copy_(0.5 * torch.maximum(estimate.square, least).log())
            proposed = problem.estimate(proposal, labels)
            gain = proposed.elbo - estimate.elbo
            # a proposal with a few hopeless examples has a spread of its own making, so the present one's counts
            apart = (proposed.fitted - estimate.fitted).std(correction=0)
            own = estimate.fitted.std(correction=0)
            spread = min(float(apart), 2.0**0.5 * float(own))
            error = spread * len(targets) ** 0.5
            if not (proposed.finite and gain > -2.0 * error):  # or a loss beyond chance
                if size <= LEAST and (again := problem.estimate(current, labels)).finite:
                    estimate = again  # which was lucky, perhaps
                size = max(LEAST, 0.5 * size)
                continue
            current, estimate = proposal, proposed
            trace.append(estimate.elbo)
            if late or (number > 8 and settled_by(trace, error)):
                late.append(current)
                size, labels = max(0.1, 0.8 * size), EXACT
            else:
                size = min(MOST, 1.3 * size)
            if len(late) == LATE:
                break
        if late:
            current = average(late)
    elbos = trace[-max(2, len(late)) :]  # of Gaussians that differ by noise alone
    error = stdev(elbos) / len(elbos) ** 0.5 if len(elbos) > 1 else float("inf")
    return NaturalFit(current, mean(elbos), error, tuple(trace), bool(late), likelihood)


def settled_by(trace: Sequence[float], error: float) -> bool:
    """Whether the ELBO's last four values are no higher than the four before by more than chance."""
    return len(trace) >= 8 and (sum(trace[-4:]) - sum(trace[-8:-4])) / 4 < error
