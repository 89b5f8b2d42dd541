r"""SWAG (Maddox et al. 2019, https://arxiv.org/abs/1902.02476): a Gaussian fitted to the weights that SGD walks through.

Training goes on at a constant learning rate; the running mean of the weights, their variance :math:`v` and the last K deviations
:math:`D` from the running mean give :math:`\mathcal N(\bar w, \tfrac12 (\mathrm{diag}(v) + \tfrac{1}{K-1} D D^\top))`.
"""

import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import Logged, Objective, Outputs, negative_log_likelihood, prepare, validator
from flowbnn.methods.layers import normalizers, refresh, trained_parameters
from flowbnn.options import Count, Ge, Interval, Positive, options, takes
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import WeightPosterior, check_all_given, check_members, generator_of
from flowbnn.training import Clock, History, track, train

__all__ = ["SWAG", "SWAGPosterior"]


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

    rank: Annotated[int, Ge(0)] = 20
    epochs: Count = field(default=20, kw_only=True)
    begin: Annotated[float, Interval(ge=0, lt=1)] = field(default=0.5, kw_only=True)
    swag_lr: Positive = field(default=1e-2, kw_only=True)
    momentum: Annotated[float, Interval(ge=0, lt=1)] = field(default=0.9, kw_only=True)
    per_epoch: Count = field(default=1, kw_only=True)
    scale: Positive = field(default=0.5, kw_only=True)
    batch_norm_samples: Count = field(default=30, kw_only=True)

    def __post_init__(self) -> None:
        left, reason = self.epochs - self.first, None
        if self.rank == 1:
            reason = "a rank of 1 has no covariance to divide by K - 1: take rank=0 (diagonal) or at least 2"
        elif left * self.per_epoch < 2:
            reason = (
                f"{left} epochs of {self.epochs} are left to collect weights, which gives one set of them; take more epochs, a "
                "smaller begin, or a larger per_epoch"
            )
        if reason is not None:
            raise FlowBNNError(reason, argument="rank" if self.rank == 1 else "epochs")

    @property
    def first(self) -> int:
        """Epochs of ordinary training."""
        return round(self.begin * self.epochs)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "SWAGPosterior":
        """As :meth:`Method.fit`. ``checkpoint`` names a folder: training and walk have a file each."""
        model, run = self.setup(network, loader, given)
        if isinstance(loader, Sized) and len(loader) * (self.epochs - self.first) < 2:
            raise FlowBNNError(
                "the walk has one step, which gives one set of weights and no variance; take more epochs or smaller batches"
            )
        decay = 1.0 / (self.prior_scale**2 * run.count(loader))
        if self.first:
            point = self.start(model, loader, _part(run, "training", self.first), decay)
        else:
            point = PointPosterior(model, prepare(model, loader, run.likelihood, run.seed)[0])
        walk = Walk(point, self.rank)
        history = self._walk(walk, point, loader, decay, _part(run, "walk", self.epochs - self.first))
        before, mean, variance, deviations = point.history, *walk.moments()
        joined = History(
            before.records + history.records, before.steps + history.steps, before.seconds + history.seconds
        )
        seed = run.seed if run.seed is not None else int(torch.randint(2**31 - 1, ()))
        moments = mean, variance, deviations
        posterior = SWAGPosterior(point.model, point.likelihood, *moments, self.scale, joined, None, seed)
        with torch.no_grad():
            for name, value in posterior.cut(mean).items():
                posterior.parameters[name].copy_(value)
        if normalizers(point.model):
            posterior.fix(statistics_of(posterior, self.batch_norm_samples, loader, run.progress))
        return posterior

    def _walk(
        self, walk: "Walk", point: PointPosterior, loader: Iterable[Any], decay: float, run: FitOptions
    ) -> History:
        """SGD at a constant rate, which collects on its way."""
        likelihood = point.likelihood
        weights, rate = (
            list(trained_parameters(point.model).values()),
            self.swag_lr * noise_variance(likelihood),
        )
        groups: list[dict[str, Any]] = [{"params": weights, "lr": rate, "weight_decay": decay}]
        if learned := [parameter for parameter in likelihood.parameters() if parameter.requires_grad]:
            groups.append({"params": learned, "lr": self.swag_lr, "weight_decay": 0.0})
        engine = torch.optim.SGD(groups, lr=self.swag_lr, momentum=self.momentum)

        def loss(outputs_of: Outputs, batch: Any, clock: Clock) -> Logged:
            if self._due(clock, walk):
                walk.collect()
            return negative_log_likelihood(likelihood, outputs_of, batch, clock)

        walk.loss = loss
        point.model.train()
        validate = validator(point, run.validation, 1)
        history = train(walk, engine, loader, run, validate=validate, names_below="network")
        walk.collect()
        point.model.eval()
        return history

    def _due(self, clock: Clock, walk: "Walk") -> bool:
        """Whether the weights that the last step left are to be collected."""
        if clock.steps_per_epoch is None:
            return clock.epoch > int(walk.count)
        if clock.step == 0:
            return False
        done = [step * self.per_epoch // clock.steps_per_epoch for step in (clock.step - 1, clock.step)]
        return done[1] > done[0]


class Walk(Objective):
    """A network, its likelihood, and the moments of the weights it went through, all in its checkpoint."""

    mean: Tensor
    square: Tensor
    deviations: Tensor
    count: Tensor

    def __init__(self, point: PointPosterior, rank: int) -> None:
        super().__init__(point.model, point.likelihood, loss=None)  # type: ignore[arg-type]
        flat = self.flat()
        self.register_buffer("mean", torch.zeros_like(flat))
        self.register_buffer("square", torch.zeros_like(flat))
        self.register_buffer("deviations", flat.new_zeros(rank, len(flat)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def flat(self) -> Tensor:
        """All learned weights as one vector."""
        return torch.cat([value.detach().flatten() for value in trained_parameters(self.network).values()])

    @torch.no_grad()
    def collect(self) -> None:
        """Take the present weights into the moments (Welford's sums, which lose no digits)."""
        weights = self.flat()
        before = weights - self.mean
        self.count += 1
        self.mean += before / self.count
        after = weights - self.mean
        self.square += before * after
        if len(self.deviations):
            self.deviations[(int(self.count) - 1) % len(self.deviations)] = after

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and the deviations that are there."""
        number = int(self.count)
        kept = self.deviations[: min(number, len(self.deviations))]
        return self.mean.clone(), (self.square / number).clamp_min(1e-12), kept.clone()


def noise_variance(likelihood: Any) -> float:
    """By how much the gradient of a Gaussian's log-likelihood is smaller than that of half the squared error; 1 for classes."""
    if getattr(likelihood, "noise", None) == "learned":
        return float((2.0 * likelihood.log_scale.detach()).exp().mean())
    noise = getattr(likelihood, "noise", 1.0)
    return float(noise) ** 2 if isinstance(noise, int | float) else 1.0


def statistics_of(
    posterior: "SWAGPosterior", samples: int, loader: Iterable[Any], progress: bool
) -> dict[str, Tensor]:
    """Buffers ``{name: [samples, ...]}`` of draws after a pass over the data; the mean network gets its own too."""
    states = []
    for index in track(range(samples), "BatchNorm statistics", progress):
        network = posterior.network_of(posterior.weights(index, posterior.fixed_seed))
        refresh(network, loader, posterior.fixed_seed)
        states.append({name: value.clone() for name, value in network.named_buffers()})
    refresh(posterior.model, loader, posterior.fixed_seed)
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _part(run: FitOptions, name: str, epochs: int) -> FitOptions:
    """The options of a part of the run, with a file of its own in the folder."""
    folder = run.checkpoint
    file = None if folder is None else Path(folder).with_suffix("") / f"{name}.safetensors"
    return replace(run, epochs=epochs, description=name, checkpoint=file)


WITNESSES = 4  # numbers of every fixed draw that are kept, to know it again


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

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat weights by their names."""
        sizes = [value.numel() for value in self.parameters.values()]
        parts = flat.split(sizes)
        return {k: part.view(v.shape) for (k, v), part in zip(self.parameters.items(), parts, strict=True)}

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        if not self.size:
            return self.cut(self.flat_draw(index, seed))
        index %= self.size
        weights = self.cut(self.flat_draw(index, self.fixed_seed))
        return weights | {name: value[index] for name, value in self.statistics.items()}

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        check_all_given(self.parameters, values)
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
        if self.size:
            draws = [self.flat_draw(index, self.fixed_seed)[:WITNESSES] for index in range(self.size)]
            state["witnesses"] = torch.stack(draws)
        return state | {f"statistics.{name}": value for name, value in self.statistics.items()}

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "fixed_seed": self.fixed_seed}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        statistics = {
            k.removeprefix("statistics."): v for k, v in state.items() if k.startswith("statistics.")
        }
        number = sum(value.numel() for value in trained_parameters(point.model).values())
        moments = state["mean"], state["variance"], state["deviations"]
        check_members(point.model, statistics)
        scale, seed = float(settings["scale"]), int(settings["fixed_seed"])
        made = cls(point.model, point.likelihood, *moments, scale, point.history, statistics, seed)
        reason = None
        if any(moment.shape[-1:] != (number,) for moment in moments):
            reason = f"its moments are not those of the {number} weights that this network learns"
        elif made.size and not torch.allclose(made.state()["witnesses"], state["witnesses"]):
            reason = (
                "this version of torch draws other random numbers than the one that wrote it, so its BatchNorm statistics do not "
                "belong to these draws; fit it anew"
            )
        if reason is not None:
            raise ValueError(reason)
        return made
