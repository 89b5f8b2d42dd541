r"""Regression: the units of the targets and the standard deviation of the observation noise.

.. math:: y \sim \mathcal N(\hat y, \sigma^2), \qquad \hat y = m + s \circ f(x)

*Units.* Fresh weights give outputs of about zero mean and unit size, but targets may have any unit. The mean :math:`m` and the standard
deviation :math:`s` of the training targets are two buffers of the network, which a forward hook applies. The weights are trained as if
the targets had been standardized, and the outputs of the network are in the units of the targets.

*Noise.* A learned :math:`\sigma` starts at the size of the residuals (:func:`set_noise_scale`). After training it is fitted once more:
for a single network to its residuals (:func:`fit_residual_scale`), for a posterior to the likelihood of its predictions
(:func:`fit_noise_scale`). Residuals of training data are too small. With held-out data, the noise is therefore the larger of the
values for both (:func:`widen_noise_scale`). A fixed :math:`\sigma` is compared with the residuals (:func:`check_noise_scale`).
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    check_finite_batch,
    device_of,
    dtype_of,
    move,
    output_tensor,
    split_weighted_batch,
)
from flowbnn.errors import warn
from flowbnn.likelihoods import (
    ConditionalDensity,
    Gaussian,
    Likelihood,
    RealLikelihood,
    learns_noise,
    log_variance,
)
from flowbnn.networks import evaluation_mode
from flowbnn.noise import noise_layers, noise_mode
from flowbnn.predictive.gaussian import GaussianPredictive
from flowbnn.training import is_main_process
from flowbnn.training.randomness import preserve_rng_state

LOC, SCALE = "flowbnn_loc", "flowbnn_scale"  # names of the two buffers
MAX_RATIO = 1.5  # largest ratio of predicted and actual errors without a warning; short fits reach 1.3


# -------------------- statistics of the targets


class TargetStatistics:
    """Count, mean and variance of targets, accumulated batch by batch in float64.

    >>> statistics = TargetStatistics()
    >>> for targets in torch.tensor([1e6, 1e6 + 2, 1e6, 1e6 + 2]).split(3):
    ...     statistics.add(targets)
    >>> statistics.count, statistics.mean.item(), round(statistics.variance.item(), 6)
    (4, 1000001.0, 1.0)
    """

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())
        self._first_targets: list[Tensor] = []

    def add(self, targets: Tensor) -> None:
        """Adds a batch ``[B, ...]``. A batch whose width differs from the first is skipped. Training raises an error for it."""
        values = targets.detach().cpu().double().reshape(len(targets), -1)
        if not len(values) or (self.count and values.shape[1:] != self.mean.shape):
            return
        if not self.count:
            self.mean, self._squares = torch.zeros_like(values[0]), torch.zeros_like(values[0])
        fraction, difference = len(values) / (self.count + len(values)), values.mean(0) - self.mean
        # Chan, Golub and LeVeque 1979: stable for targets far from zero
        self._squares += (values - values.mean(0)).square().sum(
            0
        ) + difference.square() * fraction * self.count
        self.mean = self.mean + difference * fraction
        max_rows = 2**16  # for the search of repeated values
        if self.count < max_rows:
            self._first_targets.append(values[: max_rows - self.count])
        self.count += len(values)

    @property
    def variance(self) -> Tensor:
        """Variance ``[D]`` of each target."""
        return self._squares / self.count

    def repeated_share(self) -> Tensor:
        """Returns the share ``[D]`` of repeated targets.

        A value counts as repeated if it occurs in at least 0.5 % of the first targets, and at least three times.
        """
        values, shares = torch.cat(self._first_targets), []
        for column in values.unbind(1):
            counts = column.unique(return_counts=True)[1]
            frequent = counts[(counts >= 3) & (counts >= 0.005 * len(column))]
            shares.append(float(frequent.sum()) / len(column))
        return torch.tensor(shares)


def is_varying(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns True for each target that varies by more than rounding errors."""
    return variance > 1e-26 * mean.square()


def min_noise_variance(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns the lower bound of a learned noise variance, 1e-8 of the variance of the targets.

    Without it, the variance would become zero if a network interpolates its targets. For constant targets the bound is relative to
    their square.

    Args:
        mean: Mean of each target.
        variance: Variance of each target.
    """
    size = torch.where(mean != 0, mean.square(), torch.ones_like(mean))
    return 1e-8 * torch.where(is_varying(mean, variance), variance, size)


def warn_repeated_targets(likelihood: ConditionalDensity, statistics: TargetStatistics) -> None:
    """Warns if many targets share a few values, at which a density of any shape can become arbitrarily large.

    Args:
        likelihood: Likelihood, which stores the share of repeated targets. An equal share is not reported again.
        statistics: Statistics of the targets.
    """
    shares = statistics.repeated_share()
    share, worst = shares.max(0)
    previous, likelihood.repeated_share = likelihood.repeated_share, float(share)
    # a few zeros hardly change a density
    if share >= 0.02 and float(share) != previous and is_main_process():
        target = f" of target {int(worst)}" if len(shares) > 1 else ""
        problem = f"{share:.0%} of the values{target} are repeated, where a density can be a spike"
        text = f"{problem}; use likelihood='gaussian', or add noise to rounded targets"
        warn(text, kind="repeated", argument="targets", share=float(share), target=int(worst))


# -------------------- units of the targets


def rescale_outputs(network: nn.Module, args: Any, outputs: Any) -> Tensor:
    """Forward hook that converts the outputs of a network to the units of the targets."""
    return output_tensor(outputs) * network.get_buffer(SCALE) + network.get_buffer(LOC)


def set_output_scale(network: nn.Module, loc: Tensor, scale: Tensor) -> None:
    """Sets a network to return ``loc + scale * outputs``. An earlier scale is replaced.

    >>> network = nn.Identity()
    >>> set_output_scale(network, torch.tensor([5.0]), torch.tensor([2.0]))
    >>> network(torch.ones(1, 1))
    tensor([[7.]])
    """
    if SCALE not in network._buffers:
        network.register_forward_hook(rescale_outputs)
    network.register_buffer(LOC, loc)
    network.register_buffer(SCALE, scale)


def output_scale(network: nn.Module, width: int) -> tuple[Tensor, Tensor]:
    """Returns location and scale of the first ``width`` outputs, or 0 and 1 if the network has not been scaled."""
    if SCALE not in network._buffers:
        return torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    loc, scale = (network.get_buffer(name).cpu().double()[:width] for name in (LOC, SCALE))
    return loc, scale


def scale_dtype(network: nn.Module, statistics: TargetStatistics) -> torch.dtype | None:
    """Returns the dtype of location and scale: that of the network, or float64 if targets are far from zero.

    The targets are far from zero if rounding their mean to the precision of the network changes it by more than a thousandth of
    their standard deviation. The outputs of the network are then in float64, which holds such targets.

    Args:
        network: Network to scale.
        statistics: Statistics of all targets.

    >>> statistics = TargetStatistics()
    >>> statistics.add(torch.tensor([1e8 - 1, 1e8 + 1], dtype=torch.float64))
    >>> scale_dtype(nn.Linear(2, 1), statistics)
    torch.float64
    """
    dtype = dtype_of(network)
    if dtype is None:
        return None
    error = torch.finfo(dtype).eps * statistics.mean.abs()
    varies = is_varying(statistics.mean, statistics.variance)
    is_far = varies & (error > 1e-3 * statistics.variance.sqrt())
    return torch.float64 if dtype == torch.float32 and bool(is_far.any()) else dtype


def needs_standardization(
    network: nn.Module, outputs: Tensor, targets: Tensor, statistics: TargetStatistics
) -> Tensor:
    """Returns True for each target whose mean or standard deviation a fresh network does not reach.

    A network that already predicts in the units of the targets needs no standardization. The mean of its outputs is near the mean of
    the targets. In addition, the ratio of spreads is 0.1 to 4, the regression slope is 0.5 to 2, or, for small units, the error is
    small. A network with outputs far above 1 is not freshly initialized.

    Args:
        network: Network whose outputs are compared, with its current output scale.
        outputs: Mean predictions ``[B, D]`` for some examples.
        targets: Targets ``[B, D]`` of these examples.
        statistics: Statistics of all targets.
    """
    loc, scale = output_scale(network, outputs.shape[1])
    mean, std = (statistics.mean - loc) / scale, statistics.variance.sqrt() / scale
    outputs, targets = (outputs - loc) / scale, (targets - loc) / scale
    output_mean, output_std = outputs.mean(0), outputs.var(0, correction=0).sqrt()
    slope = ((outputs - output_mean) * (targets - targets.mean(0))).mean(0) / output_std.square()
    is_off_scale = (mean.abs() > 2.0) | (
        is_varying(statistics.mean, statistics.variance) & ((std > 3.0) | (std < 1.0 / 3.0))
    )
    is_fresh = output_mean.square() + output_std.square() < 9.0
    error = (targets - outputs).square().mean(0).sqrt()
    is_similar = (
        ((output_std >= 0.1 * std) & (output_std <= 4.0 * std))
        | ((slope > 0.5) & (slope < 2.0))
        | ((std < 1.0 / 3.0) & (error <= 0.5 * std))
    )
    return is_off_scale & is_fresh & ~(is_similar & ((targets.mean(0) - output_mean).abs() <= std))


@torch.no_grad()
def standardize_targets(
    network: nn.Module,
    likelihood: RealLikelihood,
    outputs: Tensor,
    targets: Tensor,
    statistics: TargetStatistics,
    trained: bool,
) -> Tensor:
    """Rescales the outputs of a fresh network to the mean and the standard deviation of the targets, if they are far from 0 and 1.

    A warning is raised if the outputs remain more than 5 standard deviations away from the targets (3 if the weights are not trained).

    Args:
        network: Network to change in place.
        likelihood: Likelihood of the targets.
        outputs: Outputs of the network for some examples.
        targets: Targets of these examples.
        statistics: Statistics of all targets.
        trained: If True, the weights will be trained. Otherwise, the network is not changed.

    Returns:
        Outputs of the changed network for the same examples.
    """
    predictions = likelihood.mean(outputs).cpu().double()
    targets = targets.cpu().double().reshape(predictions.shape)
    is_off_scale = needs_standardization(network, predictions, targets, statistics) & trained
    loc, scale = output_scale(network, len(is_off_scale))
    is_varying_target, std = is_varying(statistics.mean, statistics.variance), statistics.variance.sqrt()
    if bool(is_off_scale.any()):
        loc = torch.where(is_off_scale, statistics.mean, loc)
        scale = torch.where(is_off_scale & is_varying_target, std, scale)
        loc, scale = likelihood.output_units(loc, scale)
        device, dtype = device_of(network), scale_dtype(network, statistics)
        if SCALE in network._buffers:
            outputs = (outputs - network.get_buffer(LOC)) / network.get_buffer(SCALE)
        set_output_scale(network, loc.to(device, dtype), scale.to(device, dtype))
        outputs = rescale_outputs(network, (), outputs)
    error = (targets - predictions).square().mean(0).sqrt()
    mismatch = ~is_off_scale & (error > (5.0 if trained else 3.0) * std) & is_varying_target
    if len(targets) >= 8 and bool(mismatch.any()):
        worst = int((error / std.clamp_min(1e-300) * mismatch).argmax())
        moments = f"mean {statistics.mean[worst]:.3g} and standard deviation {std[worst]:.3g}"
        text = f"outputs are about {error[worst]:.3g} away from targets of {moments}; check their units, or train the network first"
        warn(text, kind="units", output=worst)
    return outputs


# -------------------- standard deviation of the observation noise


def noise_at_mean(model: nn.Module) -> AbstractContextManager[Any]:
    """Context manager that fixes fitted noise of a network at its mean, and unfitted noise at one."""
    layers = noise_layers(model).values()
    if not layers:
        return nullcontext()
    return noise_mode(model, "mean" if any(layer.fitted for layer in layers) else "off")


@torch.no_grad()
def set_noise_scale(likelihood: Gaussian, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Sets the noise of a Gaussian likelihood to the root mean square of the residuals.

    Args:
        likelihood: Likelihood with learned noise, which is changed in place.
        pairs: Outputs ``[B, D]`` of a network and their targets, batch by batch.
    """
    statistics, squares = TargetStatistics(), torch.zeros(())
    for outputs, targets in pairs:
        outputs = outputs.cpu().double()
        targets = targets.cpu().double().reshape(outputs.shape)
        squares = squares + (targets - outputs).square().sum(0)
        statistics.add(targets)
    if statistics.count:
        smallest = min_noise_variance(statistics.mean, statistics.variance)
        variance = torch.maximum(squares / statistics.count, smallest)
        likelihood.log_scale.copy_(variance.log() / 2)


@torch.no_grad()
def fit_residual_scale(
    model: nn.Module, likelihood: Likelihood, loader: Iterable[Any], held_out: Iterable[Any] | None = None
) -> bool:
    """Sets a learned noise to its maximum-likelihood value for one network. Returns False if no noise is learned.

    Residuals of data that a network was trained on are too small. With held-out data, the noise is therefore the larger of the two
    values, for each target.

    Args:
        model: Network. Noise of its layers is fixed at the mean.
        likelihood: Likelihood, which is changed in place.
        loader: Batches of ``(inputs, targets)``.
        held_out: Batches that the network was not trained on, or None.
    """
    if not learns_noise(likelihood):
        return False
    with evaluation_mode(model), noise_at_mean(model):
        set_noise_scale(likelihood, outputs_and_targets(model, loader))
        if held_out is not None:
            log_scale = likelihood.log_scale.detach().clone()
            set_noise_scale(likelihood, outputs_and_targets(model, held_out))
            likelihood.log_scale.copy_(torch.maximum(likelihood.log_scale, log_scale))
    return True


def outputs_and_targets(model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the outputs of the network and the targets of every batch."""
    device, dtype = device_of(model), dtype_of(model)
    for number, batch in enumerate(loader):
        check_finite_batch(batch, None, number)
        inputs, targets, _ = split_weighted_batch(batch)  # the noise scale is that of all examples
        yield call(model, move(inputs, device, dtype)), targets


class NoiseScale(NamedTuple):
    """Observation noise of a fit, for the target where it disagrees most with the data.

    Args:
        noise: Standard deviation of the observation noise.
        predicted: Predictive standard deviation from :func:`fit_noise_scale`, or the noise again from :func:`check_noise_scale`.
        residual: Root mean square of the residuals on the training data.
    """

    noise: float
    predicted: float
    residual: float


@torch.no_grad()
def fit_noise_scale(
    posterior: Any, loader: Iterable[Any], seed: int | None, min_ratio: float = 0.0, samples: int = 32
) -> NoiseScale | None:
    r"""Sets a learned noise to the maximum of the predictive likelihood, or checks a fixed one (:func:`check_noise_scale`).

    .. math:: \max_\sigma \sum_i \log \frac1S \sum_s \mathcal N(y_i \mid f_s(x_i), \sigma^2)

    The ELBO fits :math:`\sigma` to the residuals of single draws. These contain the spread of the draws, which the prediction adds
    again. If every sampled network has its own noise scale (``log_noise``), all are multiplied by one factor. A warning is raised
    if the predictive standard deviation exceeds 1.5 times the residual standard deviation.

    Args:
        posterior: Posterior whose likelihood is changed in place.
        loader: Batches of training data.
        seed: Seed for the order of a shuffled loader.
        min_ratio: Ratio of predictive to residual standard deviation up to which the noise is left unchanged.
        samples: Number :math:`S` of networks.
    """
    likelihood = posterior.likelihood
    if not learns_noise(likelihood):
        return check_noise_scale(posterior, loader, seed)
    with preserve_rng_state(loader, seed or 0):
        predictive, targets = posterior.predict_with_targets(
            loader, samples, seed=0, progress=False, keep_samples=True
        )
    targets = torch.as_tensor(targets)
    outputs, variances = predictive.samples.cpu(), predictive.sample_variances.cpu()
    targets = targets.to(outputs).reshape(outputs.shape[1:])
    error = (targets - outputs.mean(0)).square().mean(0).double()
    noise, spread = variances.double().mean((0, 1)), outputs.double().var(0, correction=0).mean(0)
    if bool((noise + spread > min_ratio**2 * error).any()):
        noise, before = fitted_noise_variance(predictive, targets), noise
        for log_scale in (likelihood.log_scale, getattr(posterior, "log_noise", None)):
            if log_scale is not None:
                log_scale += ((noise / before).log() / 2.0).to(log_scale)
    width, error = (noise + spread).sqrt(), error.sqrt()
    worst = int((width / error.clamp_min(1e-300)).argmax())
    scale = NoiseScale(float(noise[worst].sqrt()), float(width[worst]), float(error[worst]))
    if width[worst] > MAX_RATIO * error[worst] and (spread > noise)[worst] and is_main_process():
        widths = f"the predictive standard deviation {width[worst]:.3g} exceeds residuals {error[worst]:.3g}"
        text = f"{widths}; fit longer, decrease dropout or prior_scale, or use fb.Temperature"
        warn(text, kind="width", width=scale.predicted, residuals=scale.residual)
    return scale


@torch.no_grad()
def widen_noise_scale(posterior: Any, held_out: Iterable[Any] | None, samples: int = 32) -> None:
    """Increases a learned noise to its maximum-likelihood value for held-out data, for each target where this is larger.

    Residuals of data that a posterior was fitted to are too small.

    Args:
        posterior: Posterior whose likelihood is changed in place.
        held_out: Batches that the posterior was not fitted to, or None to change nothing.
        samples: Number of networks.
    """
    likelihood = posterior.likelihood
    if held_out is None or not learns_noise(likelihood):
        return
    predictive, targets = posterior.predict_with_targets(
        held_out, samples, seed=0, progress=False, keep_samples=True
    )
    log_scale = fitted_noise_variance(predictive, torch.as_tensor(targets)).log() / 2.0
    likelihood.log_scale.copy_(torch.maximum(likelihood.log_scale, log_scale.to(likelihood.log_scale)))


def fitted_noise_variance(predictive: GaussianPredictive, targets: Tensor) -> Tensor:
    """Returns the mean noise variance ``[D]``, after the noise of all samples was multiplied by the factor of maximum likelihood.

    Args:
        predictive: Predictive distribution.
        targets: Targets of its inputs.

    >>> predictive = GaussianPredictive(torch.zeros(1, 2, 1), 1.0)
    >>> fitted_noise_variance(predictive, torch.tensor([[3.0], [-3.0]]))  # for one network, the mean squared residual
    tensor([9.], dtype=torch.float64)
    """
    outputs, variances = predictive.samples.cpu(), predictive.sample_variances.cpu()
    targets = targets.to(outputs).reshape(outputs.shape[1:])
    factor = mixture_variance_factor((targets - outputs).square(), variances)
    smallest = min_noise_variance(targets.double().mean(0), targets.double().var(0, correction=0))
    return torch.maximum(factor * variances.double().mean((0, 1)), smallest)


def with_fitted_noise(predictive: GaussianPredictive, targets: Tensor) -> GaussianPredictive:
    """Returns the predictive distribution with the noise that maximizes the likelihood of the targets.

    Args:
        predictive: Predictive distribution.
        targets: Targets of its inputs.

    >>> with_fitted_noise(GaussianPredictive(torch.zeros(1, 2, 1), 1.0), torch.tensor([[3.0], [-3.0]])).variance
    tensor([[9.],
            [9.]])
    """
    variances = predictive.sample_variances
    factor = fitted_noise_variance(predictive, targets) / variances.double().cpu().mean((0, 1))
    return GaussianPredictive(predictive.samples, variances * factor.to(variances), shape=predictive.shape)


def mixture_variance_factor(squares: Tensor, variances: Tensor, max_steps: int = 200) -> Tensor:
    """Returns the factor ``[D]`` of the variances that maximizes the likelihood of residuals under a mixture of Gaussians.

    The algorithm is expectation maximization, which increases the likelihood at every step.

    Args:
        squares: Squared residuals ``[S, B, D]`` of S networks.
        variances: Variances ``[S, B, D]`` of the S Gaussians.
        max_steps: Largest number of steps.

    >>> mixture_variance_factor(torch.full((1, 4, 1), 9.0), torch.ones(1, 4, 1))  # for one network, the mean square
    tensor([9.], dtype=torch.float64)
    """
    scaled, factor = squares / variances, torch.ones(squares.shape[-1], dtype=torch.float64)
    for _ in range(max_steps):
        previous = factor
        density = -0.5 * (scaled / factor.to(scaled) + variances.log()).sum(-1)
        factor = (torch.softmax(density, 0).unsqueeze(-1) * scaled).sum(0, dtype=torch.float64).mean(0)
        factor = factor.clamp_min(1e-30)
        if bool(((factor / previous).log().abs() < 1e-4).all()):
            break
    return factor


def draw_variance_term(log_scale: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns a loss term of value zero, whose gradient fits the noise to the residuals of the mean of the draws.

    On average, the squared residual of one draw exceeds the squared residual of the mean by the variance of the draws. The variance is
    half the mean squared difference of two draws.

    Args:
        log_scale: Logarithm of the standard deviation of the noise.
        first: Outputs of one draw.
        second: Outputs of another draw for the same inputs.
    """
    variance = 0.5 * (first.detach() - second.detach()).square().mean(0)
    term = -0.5 * (variance * (-log_variance(log_scale)).exp().to(variance)).sum()
    return term - term.detach()


@torch.no_grad()
def check_noise_scale(
    posterior: Any, loader: Iterable[Any], seed: int | None, max_rows: int = 4096, samples: int = 8
) -> NoiseScale | None:
    """Compares the observation noise with the residuals of single draws. Returns None if there is no single noise scale.

    A warning is raised if the noise and the residuals differ by more than a factor of 1.5.

    Args:
        posterior: Posterior with a Gaussian likelihood. Noise that is predicted from the inputs is not checked.
        loader: Batches of training data.
        seed: Seed for the order of a shuffled loader.
        max_rows: Number of examples to read.
        samples: Number of networks, at most the default of the posterior.
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise == "predicted":
        return None
    batches: list[Any] = []
    rows = 0
    with preserve_rng_state(loader, seed or 0):
        for batch in loader:
            batches.append(batch)
            rows += len(split_weighted_batch(batch).targets)
            if rows >= max_rows:
                break
    samples = min(samples, posterior.default_samples)
    predictive, targets = posterior.predict_with_targets(
        batches, samples, seed=0, progress=False, keep_samples=True
    )
    outputs, variances = predictive.samples.double(), predictive.sample_variances.double()
    targets = torch.as_tensor(targets).to(outputs).reshape(outputs.shape[1:])
    residuals, scales = (value.mean((0, 1)).sqrt() for value in ((targets - outputs).square(), variances))
    smallest = min_noise_variance(targets.mean(0), targets.var(0, correction=0))
    residuals = torch.maximum(residuals, smallest.sqrt())
    worst = int((residuals / scales).log().abs().argmax())
    residual, scale = float(residuals[worst]), float(scales[worst])
    agrees = scale <= MAX_RATIO * residual and residual <= MAX_RATIO * scale
    if not agrees and residual and is_main_process():
        target = f" of target {worst}" if len(residuals) > 1 else ""
        side = "narrow" if residual > scale else "wide"
        text = f"the noise scale{target}, {scale:.3g}, is too {side} for residuals of {residual:.3g}; set likelihood='gaussian'"
        warn(text, kind="noise_level", target=worst, level=scale, residuals=residual)
    return NoiseScale(scale, scale, residual)
