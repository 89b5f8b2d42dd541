r"""Training length and learning rates of a fit.

:class:`PlateauSchedule` keeps the learning rates constant until the ELBO has reached a plateau, or the log-likelihood of held-out data.
It then lowers them to zero along half a cosine. So neither the number of epochs nor the decay has to be chosen in advance.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.options import Count, Positive, options
from flowbnn.training import History, cosine

SchedulerFactory = Callable[[torch.optim.Optimizer, int], Any]
Monitor = Literal["elbo", "log_likelihood", "validation_nll"]


@options
class PlateauSchedule:
    """Schedule that trains until the ELBO stops rising.

    Methods without ELBO follow the log-likelihood of held-out data instead.

    The ELBO has reached a plateau when its mean over the last ``window`` steps exceeds the mean over the ``window`` steps before by at
    most ``tolerance``. Both means are taken over whole epochs, at least two each. The learning rates then decay to zero along half a
    cosine, over half as many epochs as have passed.

    An ELBO that drops by more than ten times ``tolerance`` shows that the rates are too large. One cause is a fixed order of the
    batches. The rates are then divided by 4, and training continues.

    Args:
        max_steps: Largest number of optimizer steps. The number of epochs is always at least 10, and at most 0.12 times this number.
        window: Number of steps over which the ELBO is averaged.
        tolerance: Largest rise of the averaged ELBO on a plateau, in nats per example.

    >>> PlateauSchedule().max_epochs(steps_per_epoch=25), PlateauSchedule(max_steps=3000).max_epochs(steps_per_epoch=25)
    (40, 120)
    """

    max_steps: Count = 1000
    window: Count = 40
    tolerance: Positive = 0.01

    def max_epochs(self, steps_per_epoch: int) -> int:
        """Returns the largest number of epochs for a loader of this length."""
        cap = max(10, round(0.12 * self.max_steps))  # for loaders of a few batches
        return min(cap, max(10, math.ceil(self.max_steps / steps_per_epoch)))

    @property
    def max_drop(self) -> float:
        """Largest drop of the averaged ELBO that does not lower the learning rates."""
        return 10 * self.tolerance


# rules for weights that are trained from their initialization, at learning rates of about 0.001: they need more steps than noise.
# Chosen on held-out training rows of UCI regressions, where 4,000 steps and a window of 100 stopped before the networks had converged.
WEIGHT_SCHEDULE = PlateauSchedule(max_steps=20_000, window=400, tolerance=0.005)


class PlateauRun:
    """State of a :class:`PlateauSchedule` during one training run.

    The state is a function of the recorded history. All processes of a distributed run, and a resumed run, therefore decide in the same
    way.

    Args:
        schedule: Settings of the schedule.
        steps_per_epoch: Number of batches in an epoch.
        max_epochs: Largest number of epochs.
        decay: If True, the learning rates decay after the plateau. Otherwise, the run ends there.
        skip_epochs: Number of first epochs to ignore, while the weight of the KL grows.
        monitor: Name of the recorded value that the schedule follows. Only a drop of the ELBO lowers the rates.

    >>> run = PlateauRun(PlateauSchedule(), steps_per_epoch=25, max_epochs=30)
    >>> records = [{"elbo": -1 / epoch**2} for epoch in range(1, 31)]
    >>> [run.update(History(records[:epochs])) for epochs in (1, 9, 10, 15)]
    [30, 30, 15, 15]
    >>> [round(run.rate(25 * epoch), 2) for epoch in (0, 10, 12.5, 15)]
    [1.0, 1.0, 0.5, 0.0]
    >>> run.update(History([{"elbo": value} for value in (-1.0, -0.5, -0.4, -0.8, -2.0)])), run.rate(25 * 5 - 1), run.rate(25 * 5)
    (30, 1.0, 0.25)
    """

    def __init__(
        self,
        schedule: PlateauSchedule,
        steps_per_epoch: int,
        max_epochs: int,
        decay: bool = True,
        skip_epochs: int = 0,
        monitor: Monitor = "elbo",
    ) -> None:
        self.schedule, self.steps_per_epoch, self.max_epochs = schedule, steps_per_epoch, max_epochs
        self.decay, self.skip_epochs, self.monitor = decay, skip_epochs, monitor
        self.window = max(2, math.ceil(schedule.window / steps_per_epoch))  # in epochs
        self.update(History())

    def update(self, history: History) -> int:
        """Sets the state from the history and returns the number of epochs of the run, as far as the history determines it."""
        sign = -1.0 if self.monitor == "validation_nll" else 1.0
        values = [sign * value for value in history[self.monitor]] if history.epochs else []
        # a third of the epochs is reserved for the decay
        last = self.max_epochs - self.max_epochs // 3 if self.decay else self.max_epochs
        self.plateau_epoch, self.elbo_gain, self.elbo_drop = last, 0.0, 0.0
        self.cut_epochs: list[int] = []
        epoch = min(self.skip_epochs + 2 * self.window, last)
        while 2 * self.window <= epoch <= min(len(values), last):  # two windows may be longer than the run
            self.elbo_gain = elbo_gain(values[:epoch], self.window)
            drop = 0.0
            if self.monitor == "elbo":
                drop = elbo_drop(values[self.skip_epochs : epoch], self.window)
            if drop > self.schedule.max_drop:
                self.cut_epochs.append(epoch)
                self.elbo_drop = max(self.elbo_drop, drop)
                # two windows at the lower rates, but at least one epoch, so that the loop ends
                epoch = max(epoch + 1, min(epoch + 2 * self.window, last))
                continue
            if self.elbo_gain <= self.schedule.tolerance:
                self.plateau_epoch = epoch
                break
            epoch += 1
        return self.plateau_epoch + self.decay_epochs

    @property
    def decay_epochs(self) -> int:
        """Number of epochs over which the learning rates decay."""
        if not self.decay:
            return 0
        return min(self.max_epochs - self.plateau_epoch, max(1, self.plateau_epoch // 2))

    def rate(self, step: int) -> float:
        """Returns the factor of the learning rates at a step."""
        progress = (step / self.steps_per_epoch - self.plateau_epoch) / max(1, self.decay_epochs)
        cuts = sum(step >= self.steps_per_epoch * epoch for epoch in self.cut_epochs)
        return (0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, progress)))) / 4**cuts

    def make_scheduler(self, optimizer: torch.optim.Optimizer, _: int) -> LambdaLR:
        """Returns torch's scheduler for these learning rates."""
        return LambdaLR(optimizer, self.rate)


class TrainingPlan(NamedTuple):
    """Length and learning-rate schedule of a fit.

    Args:
        epochs: Number of epochs, or the largest number.
        scheduler: Function from the optimizer and the number of steps to a learning-rate scheduler, or None for constant rates.
        num_epochs: Function from the history to the number of epochs, or None if the number is fixed.
        plateau: State of the schedule.
    """

    epochs: int
    scheduler: SchedulerFactory | None
    num_epochs: Callable[[History], int] | None
    plateau: PlateauRun


def plan_training(
    epochs: int | None,
    schedule: SchedulerFactory | PlateauSchedule | Literal["cosine"] | None,
    steps_per_epoch: int | None,
    monitor: Monitor = "elbo",
    warmup: float = 0.0,
) -> TrainingPlan:
    """Returns the length and the learning-rate schedule of a fit.

    Args:
        epochs: Number of epochs, or None to train until a plateau.
        schedule: Function that makes a scheduler, rules for the plateau, ``"cosine"``, or None for constant rates.
        steps_per_epoch: Number of batches in an epoch. A loader without a length is assumed to have 25, and its rates are constant.
        monitor: Name of the recorded value that a plateau is found in.
        warmup: Fraction of the run in which the weight of the KL divergence grows.

    >>> plan_training(None, "cosine", 25).epochs, plan_training(7, None, 25).scheduler
    (40, None)
    """
    steps = steps_per_epoch or 25
    settings = schedule if isinstance(schedule, PlateauSchedule) else PlateauSchedule()
    max_epochs = epochs or settings.max_epochs(steps)
    if epochs is None and callable(schedule):  # runs that end at a plateau usually need half of the epochs
        max_epochs //= 2
    decays = steps_per_epoch is not None and schedule is not None
    plateau = PlateauRun(settings, steps, max_epochs, decays, math.ceil(warmup * max_epochs), monitor)
    if callable(schedule):
        return TrainingPlan(max_epochs, schedule, None, plateau)
    if epochs is not None:
        return TrainingPlan(max_epochs, cosine if decays else None, None, plateau)
    return TrainingPlan(max_epochs, plateau.make_scheduler if decays else None, plateau.update, plateau)


def elbo_gain(values: Sequence[float], window: int) -> float:
    """Returns the mean of the last ``window`` values minus the mean of the ``window`` values before them.

    >>> elbo_gain([0.0, 1.0, 3.0, 4.0, 6.0], 2)
    3.0
    """
    return fmean(values[-window:]) - fmean(values[-2 * window : -window])


def elbo_drop(values: Sequence[float], window: int) -> float:
    """Returns the difference between the best earlier mean over ``window`` values and the mean of the last ``window`` values.

    An earlier window counts only if all its values exceed all of the last values, so that fluctuations are not a drop. The window has
    at least a tenth of the values.

    >>> elbo_drop([0.0, 2.0, 3.0, 1.0, 1.5], 2), elbo_drop([0.0, 2.0, 3.0, 1.0, 2.5], 2)
    (1.25, 0.0)
    """
    window = max(window, len(values) // 10)  # the best of many short means is high by chance
    last = values[-window:]
    highest, num_above = max(last, default=math.inf), 0
    means = []  # of the windows whose values all exceed the last ones
    for stop, value in enumerate(values[:-window], 1):
        num_above = num_above + 1 if value > highest else 0
        if num_above >= window:
            means.append(fmean(values[stop - window : stop]))
    return max(means) - fmean(last) if means else 0.0


def default_noise_lr(total_steps: int, plateau: bool, regression: bool) -> float:
    """Returns the learning rate of the noise that lets it converge within a number of steps.

    Under Adam a parameter moves by about its learning rate per step. The logarithm of a standard deviation may have to move by 10 over
    a run. A run that ends at a plateau uses about half of its steps. The rate is therefore 10, or 20 with a plateau, divided by the
    number of steps. It is at least 0.002 and at most 0.05. Precise real-valued targets make the noise far narrower than its start,
    which needs the largest rate.

    Args:
        total_steps: Number of steps, or the largest number if ``plateau``.
        plateau: If True, the run ends at a plateau of the ELBO.
        regression: If True, the likelihood has a learned noise scale.

    >>> default_noise_lr(1000, plateau=True, regression=False), default_noise_lr(1000, plateau=False, regression=True)
    (0.02, 0.05)
    """
    return 0.05 if regression else min(0.05, max(0.002, (20 if plateau else 10) / total_steps))
