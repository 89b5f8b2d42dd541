r"""SWAG (Maddox et al. 2019, https://arxiv.org/abs/1902.02476): a Gaussian fitted to the weights that SGD walks through.

Training goes on at a constant learning rate; the running mean of the weights, their variance :math:`v` and the last K deviations
:math:`D` from the running mean give :math:`\mathcal N(\bar w, \tfrac12 (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.
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
from flowbnn.methods.fitting import Forward, LossAndLogs, negative_log_likelihood, prepare, train_posterior
from flowbnn.methods.layer_modes import normalizers, refresh, statistics, trained_parameters
from flowbnn.options import Bounds, Count, Ge, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import WeightPosterior, check_members, generator_of, named_parts
from flowbnn.regression import output_scale
from flowbnn.training import Clock, History
from flowbnn.training.options import length_of


@register_method
@options(repr=False)
class SWAG(Method):
    """A Gaussian around the mean of the weights that SGD walks through.

    Args:
        rank: of the covariance's low-rank part, the number of deviations kept; 0 keeps the diagonal alone, 1 is not possible.
        begin: the share of ``epochs`` that is ordinary training, before SGD with momentum walks at a constant rate and weights
            are collected; 0 walks from the given network at once.
        swag_lr: the learning rate of the walk, for regression on the squared error: it is multiplied by the variance of the noise, by
            which the gradient of the likelihood is divided.
        momentum: of the walk.
        per_epoch: how often the weights are collected in an epoch, at even distances.
        scale: of the covariance; 0.5 is the paper's.
        batch_norm_samples: draws whose BatchNorm statistics are computed, where the network has BatchNorm: so many passes over the
            data, after which the posterior is these networks.
        epochs: of training and walk together, at least 1.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)] * 2
    >>> posterior = SWAG(epochs=8).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.rank, posterior.draws(5)["weight"].shape
    (4, torch.Size([5, 3, 2]))
    """

    rank: Literal[0] | Annotated[int, Ge(2)] = 20
    epochs: Count = field(default=20, kw_only=True)
    begin: Annotated[float, Bounds(ge=0, lt=1)] = field(default=0.5, kw_only=True)
    swag_lr: Positive = field(default=1e-2, kw_only=True)
    momentum: Annotated[float, Bounds(ge=0, lt=1)] = field(default=0.9, kw_only=True)
    per_epoch: Count = field(default=1, kw_only=True)
    scale: Positive = field(default=0.5, kw_only=True)
    batch_norm_samples: Count = field(default=30, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "SWAGPosterior":
        """As :meth:`Method.fit`. ``checkpoint`` names a folder: training and walk have a file each."""
        model, run = self.setup(network, loader, given)
        first = round(self.begin * self.epochs)
        left = self.epochs - first
        if left * min(self.per_epoch, length_of(loader) or 1) < 2:
            raise FlowBNNError(
                f"{left} of {self.epochs} epochs are left for the walk, which gives one set of weights and no variance; take more "
                "epochs, a smaller begin, a larger per_epoch or smaller batches",
                argument="epochs",
            )
        if first:
            point = self.start(model, loader, run.for_stage("training", "training", epochs=first))
        else:
            point = PointPosterior(model, prepare(model, loader, run.likelihood, run.seed)[0])
        before = point.history
        moments = Moments(model, self.rank)
        history = self._walk(moments, point, loader, run.for_stage("walk", "walk", epochs=left))
        joined = History(
            before.records + history.records, before.steps + history.steps, before.seconds + history.seconds
        )
        seed = run.resolve_seed()
        posterior = SWAGPosterior(model, point.likelihood, *moments.result(), self.scale, joined, None, seed)
        with torch.no_grad():
            for name, value in named_parts(posterior.mean, posterior.shapes).items():
                posterior.parameters[name].copy_(value)
        if normalizers(model):
            posterior.fix(
                statistics(
                    lambda index: posterior.network_of(posterior.weights(index, seed)),
                    self.batch_norm_samples,
                    loader,
                    seed,
                    run.progress,
                )
            )
            refresh(model, loader, seed)
        return posterior

    def _walk(
        self, moments: "Moments", point: PointPosterior, loader: Iterable[Any], run: FitOptions
    ) -> History:
        """SGD at a constant rate, which collects on its way."""
        model, likelihood = point.model, point.likelihood
        weights: dict[str, Any] = {
            "params": list(trained_parameters(model).values()),
            "lr": self.swag_lr * noise_variance(model, likelihood),
            "weight_decay": 1.0 / (self.prior_scale**2 * run.num_examples(loader)),
        }
        learned = [parameter for parameter in likelihood.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [weights, {"params": learned}] if learned else [weights]
        engine = torch.optim.SGD(groups, lr=self.swag_lr, momentum=self.momentum)

        def loss(forward: Forward, batch: Any, clock: Clock) -> LossAndLogs:
            if self._due(clock, int(moments.count)):
                moments.collect(model)
            return negative_log_likelihood(likelihood, forward, batch, clock)

        history = train_posterior(point, loss, engine, loader, run, extra_state=moments)
        moments.collect(model)
        return history

    def _due(self, clock: Clock, collected: int) -> bool:
        """Whether the weights that the last step left are to be collected."""
        if clock.steps_per_epoch is None:
            return clock.epoch > collected
        if clock.step == 0:
            return False
        done = [step * self.per_epoch // clock.steps_per_epoch for step in (clock.step - 1, clock.step)]
        return done[1] > done[0]


class Moments(nn.Module):
    """Moments of the weights that a network went through, as buffers, so that a checkpoint has them."""

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
        """Take the present weights into the moments (Welford's sums, which lose no digits)."""
        weights = flat_weights(model)
        before = weights - self.mean
        self.count += 1
        self.mean += before / self.count
        after = weights - self.mean
        self.square += before * after
        if len(self.deviations):
            self.deviations[(int(self.count) - 1) % len(self.deviations)] = after

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and the deviations that are there."""
        number = int(self.count)
        return self.mean, (self.square / number).clamp_min(1e-12), self.deviations[:number].clone()


def flat_weights(model: nn.Module) -> Tensor:
    """All learned weights as one vector."""
    return torch.cat([value.detach().flatten() for value in trained_parameters(model).values()])


def noise_variance(model: nn.Module, likelihood: Likelihood) -> float:
    """By how much the gradient of a Gaussian's log-likelihood is smaller than that of half the squared error; 1 for classes."""
    if not isinstance(likelihood, Gaussian) or likelihood.noise == "predicted":
        return 1.0
    variance = likelihood.moments(torch.zeros(1, likelihood.dim))[1].detach()[0]
    scale = output_scale(model, likelihood.dim)[1]  # of the targets in the unit of the weights' outputs
    return float((variance.cpu() / scale.square()).mean())


class SWAGPosterior(WeightPosterior):
    r"""Weights :math:`w \sim \mathcal N(\bar w, s (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.

    Where the network has BatchNorm, whose statistics belong to the weights, the draws are a fixed list, each with the statistics of the
    training data under it; ``seed`` then changes nothing, and more samples than the list has begin anew.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`; the learned weights are at the mean.
        mean, variance: of the weights, flat.
        deviations: the last K deviations from the running mean ``[K, P]``; K may be 0.
        scale: :math:`s`; 0.5 is the paper's.
        statistics: buffers of the fixed draws ``{name: [S, ...]}``.
        fixed_seed: of the fixed draws.
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
        self.fixed_seed, self.parameters = fixed_seed, trained_parameters(model)
        self.shapes = {name: value.shape for name, value in self.parameters.items()}
        self.fix(statistics or {})

    def fix(self, statistics: Mapping[str, Tensor]) -> None:
        """From now on the posterior is a list of draws, each with its own buffers; an empty list is the whole Gaussian."""
        self.statistics = dict(statistics)
        self.size = len(next(iter(statistics.values()))) if statistics else 0
        if self.size:
            self.default_samples = self.size

    @property
    def rank(self) -> int:
        return len(self.deviations)

    @property
    def names(self) -> list[str]:
        return [*self.parameters, *self.statistics]

    def flat_draw(self, index: int, seed: int) -> Tensor:
        """One draw of all learned weights, flat."""
        generator = generator_of(seed, index)

        def normal(count: int) -> Tensor:
            return torch.randn(count, generator=generator).to(self.mean)

        spread = self.variance.sqrt() * normal(len(self.mean))
        if self.rank:
            spread += normal(self.rank) / math.sqrt(self.rank - 1) @ self.deviations
        return self.mean + math.sqrt(self.scale) * spread

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
        return {"scale": self.scale, "fixed_seed": self.fixed_seed, "learned": list(self.parameters)}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        for name, value in point.model.named_parameters():  # frozen as it was when the moments were taken
            value.requires_grad_(name in settings["learned"])
        moments = state.pop("mean"), state.pop("variance"), state.pop("deviations")
        statistics = {name.removeprefix("statistics."): value for name, value in state.items()}
        check_members(point.model, statistics)
        scale, seed = float(settings["scale"]), int(settings["fixed_seed"])
        made = cls(point.model, point.likelihood, *moments, scale, point.history, statistics, seed)
        made.weights(0, seed)  # fails unless the moments are of these weights
        return made
