r"""SWAG (Maddox et al. 2019, https://arxiv.org/abs/1902.02476): a Gaussian fitted to the iterates of SGD.

SGD runs at a constant learning rate. The running mean of the weights, their variance :math:`v` and the last K deviations :math:`D` from
the running mean give :math:`\mathcal N(\bar w, \tfrac12 (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Gaussian, Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import (
    LossAndLogs,
    NetworkFunction,
    Objective,
    make_training_run,
    negative_log_likelihood,
)
from flowbnn.methods.network_layers import (
    batch_norm_layers,
    batch_norm_statistics,
    recompute_batch_norm,
    trainable_parameters,
)
from flowbnn.methods.preparation import prepare
from flowbnn.options import Bounds, Count, Ge, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.files import check_shapes
from flowbnn.posterior.weights import (
    PointPosterior,
    WeightPosterior,
    check_members,
    generator_of,
    named_parts,
)
from flowbnn.regression import output_scale
from flowbnn.training import Clock, History
from flowbnn.training.options import length_of


@register_method
@options(repr=False)
class SWAG(Method):
    """Gaussian with the mean and covariance of the iterates of SGD.

    Args:
        rank: Rank of the low-rank part of the covariance, the number of stored deviations. 0 gives a diagonal covariance. A rank of 1
            is not possible.
        begin: Fraction of ``epochs`` of ordinary training. SGD with momentum follows at a constant rate and takes snapshots. 0 starts
            SGD from the network as it is.
        swag_lr: Learning rate of SGD. For regression it applies to the squared error: it is multiplied by the variance of the noise.
        momentum: Momentum of SGD.
        snapshots_per_epoch: Number of evenly spaced snapshots of the weights in an epoch.
        scale: Factor of the covariance; the paper uses 0.5.
        batch_norm_samples: Number of draws with their own BatchNorm statistics, if the network has BatchNorm. Each takes one pass
            over the data. The posterior is then this list of networks.
        epochs: Number of epochs of training and SGD together, at least 1. By default, training ends at a plateau of the log-likelihood
            of held-out data. SGD then runs for as many epochs, at least 20.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)] * 2
    >>> posterior = SWAG(epochs=8).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.rank, posterior.draws(5)["weight"].shape
    (4, torch.Size([5, 3, 2]))
    """

    rank: Literal[0] | Annotated[int, Ge(2)] = 20
    epochs: Count | None = field(default=None, kw_only=True)
    begin: Annotated[float, Bounds(ge=0, lt=1)] = field(default=0.5, kw_only=True)
    swag_lr: Positive = field(default=1e-2, kw_only=True)
    momentum: Annotated[float, Bounds(ge=0, lt=1)] = field(default=0.9, kw_only=True)
    snapshots_per_epoch: Count = field(default=1, kw_only=True)
    scale: Positive = field(default=0.5, kw_only=True)
    batch_norm_samples: Count = field(default=30, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "SWAGPosterior":
        """Fits the posterior; see :meth:`Method.fit`. ``checkpoint`` is a folder with one file for training and one for SGD."""
        model, loader, options = self.setup(network, loader, kwargs)
        trainable_parameters(model)  # raises an error before the training if some are complex
        training_epochs = round(self.begin * self.epochs) if self.epochs else None
        sgd_epochs = self.epochs - (training_epochs or 0) if self.epochs else 20
        num_snapshots = sgd_epochs * min(self.snapshots_per_epoch, length_of(loader) or 1)
        if num_snapshots < 2:
            settings = f"epochs={self.epochs}, begin={self.begin}"
            text = f"SWAG needs at least 2 snapshots, got {num_snapshots} ({settings}); increase epochs or decrease begin"
            raise FlowBNNError(text, argument="epochs")
        if self.begin > 0 and training_epochs != 0:
            stage = options.for_stage("training", "training", epochs=training_epochs or 1)
            point = self.fit_point(model, loader, stage)
            if training_epochs is None:
                sgd_epochs = max(sgd_epochs, point.history.epochs)
        else:
            point = PointPosterior(model, prepare(model, loader, options).likelihood)
        training_history = point.history
        moments = Moments(model, self.rank)
        sgd_history = self._run_sgd(
            moments, point, loader, options.for_stage("sgd", "SGD", epochs=sgd_epochs)
        )
        history = History(
            training_history.records + sgd_history.records,
            training_history.steps + sgd_history.steps,
            training_history.seconds + sgd_history.seconds,
        )
        seed = options.resolve_seed()
        posterior = SWAGPosterior(model, point.likelihood, *moments.result(), self.scale, history, None, seed)
        with torch.no_grad():
            for name, value in named_parts(posterior.mean, posterior.shapes).items():
                posterior.parameters[name].copy_(value)
        if batch_norm_layers(model):
            statistics = batch_norm_statistics(
                lambda index: posterior.network_of(posterior.weights(index, seed)),
                self.batch_norm_samples,
                loader,
                seed,
                options.progress,
            )
            posterior.set_statistics(statistics)
            recompute_batch_norm(model, loader, seed)
        return posterior

    def _run_sgd(
        self, moments: "Moments", point: PointPosterior, loader: Iterable[Any], options: FitOptions
    ) -> History:
        """Runs SGD at a constant rate and collects the moments of its iterates."""
        model, likelihood = point.model, point.likelihood
        weights: dict[str, Any] = {
            "params": list(trainable_parameters(model).values()),
            "lr": self.swag_lr * noise_variance(model, likelihood),
            "weight_decay": 1.0 / (self.prior_scale**2 * options.num_examples(loader)),
        }
        noise = [parameter for parameter in likelihood.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [weights, {"params": noise}] if noise else [weights]
        optimizer = torch.optim.SGD(groups, lr=self.swag_lr, momentum=self.momentum, fused=True)

        def loss(forward: NetworkFunction, batch: Any, clock: Clock) -> LossAndLogs:
            if self._is_snapshot_due(clock, int(moments.count)):
                moments.collect(model)
            return negative_log_likelihood(likelihood, forward, batch, clock)

        objective = Objective(model, likelihood, loss, extra_state=moments)
        history = make_training_run(point, objective, optimizer, loader, options).train()
        moments.collect(model)
        if moments.count < 2:
            text = f"SWAG needs at least 2 snapshots, but was stopped after {history.epochs} epochs of SGD; stop it later"
            raise FlowBNNError(
                text, kind="stopped", argument="early_stop" if options.early_stop else "callbacks"
            )
        return history

    def _is_snapshot_due(self, clock: Clock, count: int) -> bool:
        """Returns True if the weights after the last step are a snapshot. ``count`` snapshots exist already."""
        if clock.steps_per_epoch is None:
            return clock.epoch > count
        if clock.step == 0:
            return False
        previous, current = (
            step * self.snapshots_per_epoch // clock.steps_per_epoch for step in (clock.step - 1, clock.step)
        )
        return current > previous


class Moments(nn.Module):
    """Running moments of the weights of a network, stored as buffers so that checkpoints include them.

    Args:
        model: Network.
        rank: Number of stored deviations.
    """

    mean: Tensor
    square: Tensor
    deviations: Tensor
    count: Tensor

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        flat = flat_weights(model)
        self.register_buffer("mean", torch.zeros_like(flat))
        self.register_buffer("square", torch.zeros_like(flat))
        self.register_buffer("deviations", flat.new_zeros(rank, len(flat)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Adds the current weights to the moments, by the numerically stable sums of Welford."""
        weights = flat_weights(model)
        old_deviation = weights - self.mean
        self.count += 1
        self.mean += old_deviation / self.count
        deviation = weights - self.mean
        self.square += old_deviation * deviation
        if len(self.deviations):
            self.deviations[(int(self.count) - 1) % len(self.deviations)] = deviation

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean, variance and the stored deviations."""
        count = int(self.count)
        return self.mean, (self.square / count).clamp_min(1e-12), self.deviations[:count].clone()


def flat_weights(model: nn.Module) -> Tensor:
    """Returns all trainable weights as one vector."""
    return torch.cat([value.detach().flatten() for value in trainable_parameters(model).values()])


def noise_variance(model: nn.Module, likelihood: Likelihood) -> float:
    """Returns the mean noise variance in units of the raw outputs, which converts rates for the squared error to rates for the NLL.

    It is 1 for classification."""
    if not isinstance(likelihood, Gaussian) or likelihood.noise == "predicted":
        return 1.0
    variance = likelihood.moments(torch.zeros(1, likelihood.dim))[1].detach()[0]
    scale = output_scale(model, likelihood.dim)[1]  # scale of the targets in units of the raw outputs
    return float((variance.cpu() / scale.square()).mean())


class SWAGPosterior(WeightPosterior):
    r"""Gaussian posterior :math:`w \sim \mathcal N(\bar w, s (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.

    For networks with BatchNorm the posterior is a fixed list of draws, each with the BatchNorm statistics of the training data under
    its weights. Predictions then ignore ``seed``, and more samples than draws repeat the list.

    Args:
        model: Network with the trainable weights at the mean.
        likelihood: Observation model of the targets.
        mean: Mean of the weights, ``[P]``.
        variance: Variance of the weights, ``[P]``.
        deviations: Last K deviations from the running mean ``[K, P]``; K may be 0.
        scale: Factor :math:`s` of the covariance; the paper uses 0.5.
        history: Training record.
        statistics: Buffers of the fixed draws ``{name: [S, ...]}``.
        fixed_seed: Seed of the fixed draws.

    >>> import flowbnn as fb
    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> layer, likelihood = nn.Linear(2, 1, bias=False), fb.likelihoods.Gaussian(1.0)
    >>> posterior = SWAGPosterior(layer, likelihood, zero, one, torch.eye(2), scale=0.5)
    >>> posterior.rank, posterior.draws(3, seed=0)["weight"].shape
    (2, torch.Size([3, 1, 2]))
    """

    kind: ClassVar[str] = "swag"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        mean: Tensor,
        variance: Tensor,
        deviations: Tensor,
        scale: float,
        history: History | None = None,
        statistics: Mapping[str, Tensor] | None = None,
        fixed_seed: int = 0,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.mean, self.variance, self.deviations, self.scale = mean, variance, deviations, scale
        self.fixed_seed, self.parameters = fixed_seed, trainable_parameters(model)
        self.shapes = {name: value.shape for name, value in self.parameters.items()}
        self.set_statistics(statistics or {})

    def set_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Restricts the posterior to a list of draws with these buffers. With an empty mapping it is the full Gaussian."""
        self.statistics = dict(statistics)
        self.size = len(next(iter(statistics.values()))) if statistics else 0
        if self.size:
            self.default_samples = self.size

    @property
    def rank(self) -> int:
        """Rank of the low-rank part of the covariance."""
        return len(self.deviations)

    @property
    def names(self) -> list[str]:
        return [*self.parameters, *self.statistics]

    def flat_draw(self, index: int, seed: int) -> Tensor:
        """Draws all trainable weights as one vector."""
        generator = generator_of(seed, index)

        def normal(count: int) -> Tensor:
            return torch.randn(count, generator=generator).to(self.mean)

        size = math.sqrt(self.scale)
        draw = torch.addcmul(self.mean, self.variance.sqrt(), normal(len(self.mean)), value=size)
        if self.rank:
            factor = size / math.sqrt(self.rank - 1)
            draw = torch.addmv(draw, self.deviations.T, normal(self.rank), alpha=factor)
        return draw

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        if not self.size:
            return named_parts(self.flat_draw(index, seed), self.shapes)
        index %= self.size
        weights = named_parts(self.flat_draw(index, self.fixed_seed), self.shapes)
        return weights | {name: value[index] for name, value in self.statistics.items()}

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        flat = torch.cat([values[name].reshape(-1) for name in self.parameters])
        return self._gaussian.log_prob(flat.to(self.mean.device, torch.float64))

    @cached_property
    def _gaussian(self) -> LowRankMultivariateNormal:
        mean = self.mean.double()
        rows = self.deviations.double() if self.rank else mean.new_zeros(1, len(mean))
        factor = rows.T * math.sqrt(self.scale / max(1, self.rank - 1))
        return LowRankMultivariateNormal(
            mean, factor, self.scale * self.variance.double(), validate_args=False
        )

    def state(self) -> dict[str, Tensor]:
        state = {"mean": self.mean, "variance": self.variance, "deviations": self.deviations}
        return state | {f"statistics.{name}": value for name, value in self.statistics.items()}

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "fixed_seed": self.fixed_seed, "trainable": list(self.parameters)}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        for name, value in point.model.named_parameters():
            value.requires_grad_(name in settings["trainable"])
        moments = state.pop("mean"), state.pop("variance"), state.pop("deviations")
        statistics = {name.removeprefix("statistics."): value for name, value in state.items()}
        check_members(point.model, statistics)
        mean, _, deviations = moments
        numbers = sum(value.numel() for value in trainable_parameters(point.model).values())
        shapes = {"mean": (numbers,), "variance": (numbers,), "deviations": (len(deviations), numbers)}
        check_shapes(dict(zip(shapes, moments, strict=True)), shapes, mean.dtype)
        scale, seed = float(settings["scale"]), int(settings["fixed_seed"])
        posterior = cls(point.model, point.likelihood, *moments, scale, point.history, statistics, seed)
        posterior.weights(0, seed)  # fails if the moments do not match the weights
        return posterior
