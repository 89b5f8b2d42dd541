"""Fitting distributions by the ELBO: of the noise on a network's layers, and of its weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from flowbnn.batches import repeat, split_batch, unwrap_compiled
from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError, quote_names, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.base import FitOptions, Method
from flowbnn.methods.fitting import (
    NOISE_RATE,
    Forward,
    LossAndLogs,
    SchedulerFactory,
    make_optimizer,
    prepare,
    settle_units,
    should_check_targets,
    train_posterior,
    validator,
)
from flowbnn.methods.variational.gain import (
    bound_gain,
    bound_of_given,
    elbos,
    gain,
    plain_log_likelihoods,
    warn_of_memory,
)
from flowbnn.noise import (
    NormalAffine,
    NormalCoupling,
    NormalFlow,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
    noise_layers,
    noise_mode,
    parameter_groups,
)
from flowbnn.noise.batched import Divergences
from flowbnn.noise.collapse import health_warnings, posterior_health
from flowbnn.noise.modes import align_batch_axes
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, Positive, UnitInterval, accepts_options_of, checked, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.weights import WeightPosterior
from flowbnn.regression import check_noise_scale, draw_variance_term, fit_noise_scale, fit_residual_scale
from flowbnn.training import Clock, History, cosine, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.progress import terminal
from flowbnn.training.randomness import preserve_rng_state

VALIDATION_SAMPLES = 8
FASTEST = 0.05  # rate of the noise by default
BUDGET = 1000  # steps of a run by default, at most
WINDOW = 40  # steps over which the ELBO is averaged
SETTLED = 0.01  # nats per example by which it may still rise
FALL = 0.1  # nats per example, by which it falls only where the rates are too large
CUT = 4  # the rates are then divided by it
FlowName = Literal[
    "gaussian", "planar", "radial", "sylvester", "coupling", "invconv", "glow",
    "nice", "realnvp", "iaf", "nsf", "naf", "flowpp", "householder", "residualflow",
]  # fmt: skip
FLOWS: dict[str, Callable[..., Recipe]] = {  # noise by its name; "gaussian" has no flow
    "gaussian": NormalAffine,
    "planar": NormalPlanar,
    "radial": NormalRadial,
    "sylvester": NormalSylvester,
    "coupling": NormalCoupling,
    "invconv": NormalInvConv,
    "glow": NormalGlow,
}
FLOWS |= {name: partial(NormalFlow, name) for name in get_args(FlowName) if name not in FLOWS}


@options(kw_only=True, repr=False)
class Variational(Method):
    """The settings of every method that maximises an ELBO.

    Args:
        epochs: at least 1.
        base_scale: standard deviations at the start; of weights as a share of the size (root mean square) of each weight tensor.
        lr, noise_lr: learning rates of the weights or their means, and of all else.
        beta, warmup: weight of the KL, and the first share of the run over which it grows from 0.
        samples: draws per step.
    """

    epochs: Count = 20
    base_scale: Positive = 0.1
    noise_lr: Positive = 5e-3
    beta: NonNegative = 1.0
    warmup: UnitInterval = 0.0
    samples: Count = 1


def fit_elbo(
    posterior: WeightPosterior,
    around: nn.Module,
    divergence: Callable[[], Divergence],
    groups: list[dict[str, Any]],
    method: Variational,
    loader: Iterable[Any],
    check: Callable[[Any], None],
    run: FitOptions,
) -> None:
    r"""Maximise :math:`E_q \log p(y \mid x, w) - \frac{\beta}{N} \mathrm{KL}` over the parameters in ``groups``.

    The rest of the network's weights, and the likelihood's, are trained too. ``around`` draws weights in every pass.
    """
    likelihood, samples = posterior.likelihood, method.samples
    varied = set(posterior.names)
    points = [p for name, p in posterior.model.named_parameters() if name not in varied and p.requires_grad]
    extra = [p for p in likelihood.parameters() if p.requires_grad]
    level = likelihood.log_scale if learns_noise(likelihood) else None
    groups = [*groups, {"name": "points", "params": points, "lr": method.lr}]
    groups.append({"name": "likelihood", "params": extra, "lr": max(method.noise_lr, method.noise_rate)})
    engine = make_optimizer(groups, method.optimizer)
    number = run.num_examples(loader)
    objective = ELBO(likelihood, number, method.beta)

    def loss(forward: Forward, batch: Any, clock: Clock) -> LossAndLogs:
        inputs, targets = split_batch(batch)
        outputs = forward(inputs)
        if should_check_targets(targets, clock):
            likelihood.check(outputs, targets)
        correction: Tensor | float = 0.0
        if level is not None:
            with torch.no_grad():
                other = forward(inputs)
            correction = draw_variance_term(level, outputs, other)
        if samples > 1:  # each with weights of its own, which all examples share
            outputs = torch.cat([outputs, *(forward(inputs) for _ in range(samples - 1))])
            targets = repeat(targets, samples)
        known = Divergences({}, divergence())
        terms = objective.terms(outputs, targets, known, warm_up(clock.progress, method.warmup))
        logs = terms.logs()
        return terms.loss + correction, {name: logs[name] for name in ("elbo", "log_likelihood", "kl")}

    settings = {"beta": method.beta, "warmup": method.warmup, "samples": samples, "num_data": number}
    posterior.history = train_posterior(
        posterior,
        loss,
        engine,
        loader,
        run,
        method.schedule,
        VALIDATION_SAMPLES,
        module=around,
        settings=settings,
        check_batch=check,
    )
    if fit_noise_scale(posterior, loader, run.seed) is None:
        check_noise_scale(posterior, loader, run.seed)


@checked
@accepts_options_of(FitOptions)
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: Count | None = None,
    weight_lr: NonNegative = 2e-4,
    noise_lr: NonNegative | None = None,
    weight_decay: NonNegative = 0.0,
    beta: NonNegative = 1.0,
    warmup: UnitInterval = 0.0,
    gamma: NonNegative = 0.0,
    samples: Count = 1,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: SchedulerFactory | Literal["cosine"] | None = "cosine",
    validation_samples: Count = 8,
    **given: Any,
) -> NoisePosterior:
    r"""Fit the noise (and the weights) of a stochastic network by the ELBO.

    .. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

    Args:
        model: from :func:`~flowbnn.to_stochastic`; it is trained in place.
        loader: batches of ``(inputs, targets)``.
        epochs: passes over the loader. By default the fit goes on until the ELBO has settled: until it rises by at most 0.01 nats
            per example from 40 steps to the next 40, by the means of whole epochs, at least two each. The rates then fall to zero
            within half as many epochs again. An ELBO that falls by 0.1 divides the rates by 4. The budget for all of it is 1,000
            steps, at least 10 epochs and at most 120. With a ``schedule`` of your own, which is planned ahead, half of it is spent.
        weight_lr, noise_lr: learning rates of the weights and of the noise; ``freeze(model, "weights")`` fits the noise alone. The
            noise's is by default 10 over the number of steps, or 20 over that of the budget, within 0.002 and 0.05: enough for the
            noise to settle, whatever the number of steps. For real-valued targets it is 0.05, since precise ones leave the noise far
            narrower than it begins.
        weight_decay: of the weights, by the optimizer.
        beta, warmup, gamma: weights of KL and entropy; the KL's weight grows from 0 over the first ``warmup`` share of the run, or
            of the budget.
        samples: draws per example and step.
        optimizer: a function from parameter groups to an optimizer; Adam unless given.
        schedule: ``"cosine"``, from the full rates to zero, at once where ``epochs`` is given and else when the ELBO has settled; None,
            constant rates; or a function from ``(optimizer, total steps)`` to a
            learning-rate schedule, stepped at every batch.
        validation_samples: draws for the negative log-likelihood of the validation data, recorded as ``validation_nll``.
        given: as in :class:`~flowbnn.methods.FitOptions`: ``likelihood``, ``num_data``, ``validation``, ``checkpoint``, ``resume``,
            ``early_stop``, ``seed``, ``precision``, ``devices``, ``progress``, ``tensorboard`` and the rest.

    Returns:
        A posterior that predicts. Its ``history`` has ELBO, log-likelihood, KL and entropy of every epoch in nats, those of
        each layer as ``kl/name`` and ``entropy/name``. A layer whose posterior has collapsed to a point or fallen back onto
        its prior is warned of by name, all of one kind in one warning. Its ``bound`` compares the ELBO on ten batches of the loader
        with that of the network that was given, its noise as it began, with the same draws; with ``validation``, its ``gain``
        compares the held-out log-likelihood. A loss, and weights that have memorised the loader, are warned of.
        So is an ELBO that has not settled within the budget, or that fell, as it does where a loader is in order.
    """
    model, automatic, length, pace = unwrap_compiled(model), noise_lr is None, length_of(loader), None
    steps = length or 25
    if epochs is None:
        epochs = min(120, max(10, math.ceil(BUDGET / steps)))
        if callable(schedule):  # which plans its steps ahead
            epochs //= 2
        else:
            falls = schedule is not None and length is not None
            pace = Pace(steps, epochs, falls, math.ceil(warmup * epochs))
            schedule = pace.schedule if falls else None
    elif schedule == "cosine":
        schedule = cosine if length else None
    if noise_lr is None:
        # under Adam a parameter moves by about its rate in a step: so far may the logarithm of a standard deviation have to go
        noise_lr = min(FASTEST, max(0.002, (10 if pace is None else 20) / (steps * epochs)))
    run = FitOptions(**{"epochs": epochs, "description": "fitting the noise", **given})
    reason = None
    if not noise_layers(model):
        reason = "this network has no noise; convert it first with to_stochastic(network, rules)"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "nothing is left to train: both the weights and the noise are frozen"
    if reason is not None:
        raise FlowBNNError(reason, kind="network", argument="model")
    if run.precision in ("bf16-true", "16-true"):
        warn(
            f"precision={run.precision!r} keeps the noise itself in half precision, which is too coarse for flows; "
            "'bf16-mixed' keeps noise and flows in float32",
            kind="precision",
        )
    chosen, inputs, check_batch = prepare(model, loader, run.likelihood, run.seed, trains=None)
    idle = align_batch_axes(model, inputs)
    if idle:
        subject, them, their = ("layer", "it", "its") if len(idle) == 1 else ("layers", "them", "their")
        warn(
            f"{subject} {quote_names(idle)} {'carries' if len(idle) == 1 else 'carry'} noise but the network never calls {them} "
            f"({their} weights are read by another module), so {their} noise has no effect; leave {them} plain with None in "
            "the rules",
            kind="idle",
            layers=idle,
        )
    with preserve_rng_state(loader, run.seed or 0):
        fit_residual_scale(model, chosen, loader)
    objective = ELBO(chosen, run.num_examples(loader), beta, gamma)
    posterior, before = NoisePosterior(model, chosen), None
    if validator(posterior, run.validation, validation_samples) is not None:  # which tries the first batch
        before = plain_log_likelihoods(posterior, run.validation)  # type: ignore[arg-type]
        warn_of_memory(posterior, loader, before, run.seed)
    bound = bound_of_given(model, objective, loader, run.seed)
    if settle_units(model, chosen, loader, run.seed, weight_lr > 0):
        with preserve_rng_state(loader, run.seed or 0):
            fit_residual_scale(model, chosen, loader)
    level = chosen.log_scale if learns_noise(chosen) else None
    ceiling = torch.tensor(0.0) if level is None else level.detach().clone()
    if level is not None and automatic:
        noise_lr = FASTEST
    groups = parameter_groups(model, chosen, weight_lr, noise_lr, weight_decay)
    for group in groups if level is not None and optimizer is None else []:
        # gradients fall by orders of magnitude as the noise narrows, which Adam must not remember
        group["betas"] = (0.9, 0.99)
        if group["name"] == "likelihood":
            group["lr"] = max(group["lr"], NOISE_RATE)
    engine = make_optimizer(groups, optimizer)

    def loss(forward: Forward, batch: Any, clock: Clock) -> LossAndLogs:
        nonlocal ceiling
        some, targets = split_batch(batch)
        if level is not None:
            ceiling = ceiling.to(level.device)  # training has moved the likelihood to its device
            # what the noise's first, wide draws add to the residuals is not the targets' noise
            with torch.no_grad():
                level.clamp_(max=ceiling)
        scale = warm_up(clock.progress, warmup)
        terms = objective(model, some, targets, scale, samples, forward, should_check_targets(targets, clock))
        return terms.loss, terms.logs()

    settings = {"beta": beta, "gamma": gamma, "warmup": warmup, "samples": samples}
    settings["num_data"] = objective.num_data
    with noise_mode(model, "sample"):
        posterior.history = train_posterior(
            posterior,
            loss,
            engine,
            loader,
            run,
            schedule,
            validation_samples,
            settings=settings,
            check_batch=check_batch,
            num_epochs=pace,
        )
    for layer in noise_layers(model).values():
        layer.fitted = True
    lines = []
    reached = [] if bound is None else [elbos(model, objective, bound[0])]
    if fit_noise_scale(posterior, loader, run.seed) is None:
        check_noise_scale(posterior, loader, run.seed)
    if bound is not None:
        # by the better level: that of the ELBO follows the last batches, that of predictions leaves out their spread
        reached.append(elbos(model, objective, bound[0]))
        posterior.bound = bound_gain(bound[1], max(reached, key=Tensor.mean))
        lines.append(str(posterior.bound))
    if is_main_process():
        called = [health for health in posterior_health(model) if health.layer not in idle]
        for ailment in health_warnings(called):
            warn(str(ailment), **ailment.fields)
    if not posterior.history.stopped_early and is_main_process():
        warn_of_unrest(posterior.history, pace or Pace(steps, epochs, first=math.ceil(warmup * epochs)))
    if before is not None:
        posterior.gain = gain(before, posterior, run.validation)  # type: ignore[arg-type]
        lines.append(str(posterior.gain))
    if run.progress and is_main_process() and (console := terminal()) is not None:
        console.print("\n".join(lines), highlight=False)
    return posterior


class Pace:
    """The length of a run and its rates, where they are not given: constant until the ELBO has settled, then falling to zero.

    The ELBO has settled when its mean over the last epochs, as many as make 40 steps, exceeds that over as many before by no more
    than 0.01 nats per example. The rates then fall along half a cosine, for half as many epochs again. One that has instead fallen,
    by 0.1 below its best epochs, shows that the rates are too large, as for batches that come in an order: they are cut to a quarter,
    and the run goes on. All of it follows from the record of the run, so that every process, and a resumed run, decides alike.

    Args:
        steps: batches of an epoch.
        budget: the most epochs there are.
        falls: whether the rates fall; else the run ends as soon as the ELBO has settled.
        first: epochs that are not looked at, while the weight of the KL grows.

    >>> from flowbnn.training import History
    >>> pace, record = Pace(steps=25, budget=30), [{"elbo": -1 / epoch**2} for epoch in range(1, 31)]
    >>> [pace(History(record[:epochs])) for epochs in (1, 9, 10, 15)]
    [30, 30, 15, 15]
    >>> [round(pace.rate(25 * epoch), 2) for epoch in (0, 10, 12.5, 15)]
    [1.0, 1.0, 0.5, 0.0]
    >>> pace(History([{"elbo": value} for value in (-1.0, -0.5, -0.4, -0.8, -2.0)])), pace.rate(25 * 5 - 1), pace.rate(25 * 5)
    (30, 1.0, 0.25)
    """

    def __init__(self, steps: int, budget: int, falls: bool = True, first: int = 0) -> None:
        self.steps, self.budget, self.falls, self.first = steps, budget, falls, first
        self.window = max(2, math.ceil(WINDOW / steps))
        self.latest = budget - budget // 3 if falls else budget
        self(History())

    def __call__(self, history: History) -> int:
        """The number of epochs, as far as it is known."""
        values = history["elbo"] if history.epochs else []
        # the epoch from which the rates fall, and the ELBO's rise there
        self.turn, self.rise = self.latest, 0.0
        self.cuts: list[int] = []  # epochs before which they were too large
        self.fall = 0.0  # by so much at most
        soonest = self.first + 2 * self.window
        for epoch in range(min(soonest, self.latest), min(len(values), self.latest) + 1):
            if epoch < min(soonest, self.latest):
                continue
            self.rise = late_rise(values[:epoch], self.window)
            fall = fallen(values[self.first : epoch], self.window)
            if fall > FALL:
                self.cuts, self.fall = [*self.cuts, epoch], max(self.fall, fall)
                soonest = epoch + 2 * self.window
            elif self.rise <= SETTLED:
                self.turn = epoch
                break
        return self.turn + self.tail

    @property
    def tail(self) -> int:
        """Epochs over which the rates fall."""
        return min(self.budget - self.turn, max(1, self.turn // 2)) if self.falls else 0

    def rate(self, step: int) -> float:
        """The share of the full rates."""
        done = (step / self.steps - self.turn) / max(1, self.tail)
        cuts = sum(step >= self.steps * epoch for epoch in self.cuts)
        return (0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, done)))) / CUT**cuts

    def schedule(self, optimizer: torch.optim.Optimizer, _: int) -> torch.optim.lr_scheduler.LRScheduler:
        """The rates of all groups."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)


def late_rise(values: Sequence[float], window: int) -> float:
    """By how much the mean of the last values exceeds that of as many before them.

    >>> late_rise([0.0, 1.0, 3.0, 4.0, 6.0], 2)
    3.0
    """
    return fmean(values[-window:]) - fmean(values[-2 * window : -window])


def fallen(values: Sequence[float], window: int) -> float:
    """By how much the mean of the last values is below the best mean of as many in a row, of which every one is above all of them.

    A tenth of the values is looked at where that is more than the window.

    >>> fallen([0.0, 2.0, 3.0, 1.0, 1.5], 2), fallen([0.0, 2.0, 3.0, 1.0, 2.5], 2)
    (1.25, 0.0)
    """
    window = max(window, len(values) // 10)  # of many means the best is high by chance
    last = values[-window:]
    rows = (values[start : start + window] for start in range(len(values) - 2 * window + 1))
    return max((fmean(row) - fmean(last) for row in rows if min(row) > max(last)), default=0.0)


def warn_of_unrest(history: History, pace: Pace) -> None:
    """Warn of an ELBO that fell, or that has not settled within the budget."""
    fall = max(pace.fall, fallen(history["elbo"][pace.first :], pace.window))
    if fall > FALL:
        cut = f" (they were cut to 1/{CUT ** len(pace.cuts)})" if pace.cuts and pace.falls else ""
        warn(
            f"the ELBO fell by {fall:.3g} per example in the course of the fit: the rates are too large for these batches{cut}, often "
            "because the loader gives its data in an order; let it shuffle (shuffle=True), or take smaller rates (weight_lr=..., "
            "noise_lr=...; lr=... of a method)",
            kind="fall",
            fall=fall,
        )
    elif pace.rise > SETTLED:
        warn(
            f"the ELBO has not settled within {pace.budget} epochs: it rose by {pace.rise:.3f} per example in {pace.window} of them; "
            f"fit longer (epochs={2 * pace.budget})",
            kind="settled",
            rise=pace.rise,
        )
