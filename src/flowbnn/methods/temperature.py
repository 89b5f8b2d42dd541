r"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599): one number, fitted on held-out data, that calibrates.

.. math:: \hat T = \arg\min_T \; -\sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i) / T)

The calibration to try first, on top of any method: it changes no weight and, of one network, no decision.
"""

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from flowbnn.batches import as_loader, call, rows, split_batch, take
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Gaussian
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import first_batch
from flowbnn.options import Count, Positive, Probability, Seed, accepts_options_of, checked, options
from flowbnn.posterior.base import Posterior, Prediction, PredictOptions, load_posterior, opened, reading
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive
from flowbnn.training.storage import TensorFile


@register_method
@options(repr=False)
class Temperature(Method):
    """Temperature scaling on top of a method.

    Args:
        method: the one within, with its own settings; unless given, the network is trained as by :class:`~flowbnn.MAP`.
        share: of the training data, held out where ``fit`` is given no validation data.
        samples: of the prediction whose temperature is fitted; the posterior's own number unless given.
        epochs, lr, optimizer, schedule, prior_scale: of that training; a method that is given brings its own.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> loader = [(inputs, (inputs[:, 0] + inputs[:, 1].sin() * inputs[:, 1] > 0).long())]
    >>> Temperature(fb.MAP(epochs=100, lr=0.1)).fit(nn.Linear(2, 2), loader, progress=False).kind
    'tempered'
    """

    method: Method | None = None
    share: Probability = field(default=0.1, kw_only=True)
    samples: Count | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        changed = next((f.name for f in fields(Method) if getattr(self, f.name) != f.default), None)
        if self.method is not None and changed is not None:
            raise FlowBNNError(
                f"give {changed} to the method within: Temperature({type(self.method).__name__}({changed}=...))",
                argument=changed,
            )

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "TemperedPosterior":
        """As :meth:`Method.fit`; ``validation`` is what the temperature is fitted to, a held-out share of the loader unless given."""
        model, run = (self.method or self).setup(network, loader, given)
        if run.validation is None:
            loader, validation = held_out(loader, self.share, run.seed or 0)
            number = None if run.num_data is None else max(1, round(run.num_data * (1.0 - self.share)))
            run = replace(run, validation=validation, num_data=number)
        posterior: Posterior
        if self.method is None:
            posterior = self.start(model, loader, run)
        else:
            given = {**given, "validation": run.validation, "num_data": run.num_data}
            posterior = self.method.fit(network, loader, **given)
        assert run.validation is not None
        return temper(
            posterior, run.validation, samples=self.samples, seed=run.seed or 0, progress=run.progress
        )


def held_out(loader: Any, share: float, seed: int) -> tuple[Any, Any]:
    """A loader like this one without a random ``share`` of its data, and a loader of that share.

    >>> data = [(torch.randn(2), 1.0)] * 50
    >>> train, validation = held_out(DataLoader(data, batch_size=8, shuffle=True), 0.2, seed=0)
    >>> len(train.dataset), len(validation.dataset), train.batch_size
    (40, 10, 8)
    """
    source = torch.Generator().manual_seed(seed)
    if isinstance(loader, list | tuple):
        return _split_batches(list(loader), share, source)
    if hasattr(loader, "tensors") and hasattr(loader, "num_data"):  # flowbnn.data.TensorLoader
        kept, out = _split(len(loader.tensors[0]), share, source)
        rest, part = copy(loader), copy(loader)
        for made, index in ((rest, kept), (part, out)):
            made.tensors = tuple(tensor[index.to(tensor.device)] for tensor in loader.tensors)
            made.num_data = len(index)
        if loader.drop_last:
            rest.num_data = len(kept) // loader.batch_size * loader.batch_size
        part.shuffle, part.augment, part.drop_last = False, None, False
        return rest, part
    plain = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    known = plain and type(loader.sampler) in (RandomSampler, SequentialSampler)
    kept, out = _split(len(loader.dataset) if known else 0, share, source)

    def like(index: Tensor, *names: str, **more: Any) -> DataLoader[Any]:
        more |= {name: getattr(loader, name) for name in ("batch_size", "collate_fn", "num_workers", *names)}
        return DataLoader(Subset(loader.dataset, index.tolist()), **more)

    shuffle = isinstance(loader.sampler, RandomSampler)
    train = like(kept, "generator", "drop_last", "pin_memory", "worker_init_fn", shuffle=shuffle)
    return train, like(out)


def _split(number: int, share: float, source: torch.Generator) -> tuple[Tensor, Tensor]:
    if number < 2:
        line = "temperature scaling needs data that the network was not trained on, and this loader cannot be split; give validation="
        raise FlowBNNError(line, argument="validation")
    order = torch.randperm(number, generator=source)
    out = min(number - 1, max(1, round(share * number)))
    return order[out:].sort().values, order[:out].sort().values


def _split_batches(batches: list[Any], share: float, source: torch.Generator) -> tuple[Any, Any]:
    """Whole batches where there are enough of them, else the last rows of the last."""
    if round(share * len(batches)):
        kept, left = _split(len(batches), share, source)
        return [batches[i] for i in kept.tolist()], [batches[i] for i in left.tolist()]
    total = sum(rows(split_batch(batch)[0]) for batch in batches)
    inputs, targets = split_batch(batches[-1])
    count = rows(inputs)
    cut = count - min(count - 1, max(1, round(share * total)))
    if targets is None or cut == count:
        return _split(0, share, source)  # refuses
    kept_part, part = ((take(inputs, *ends), take(targets, *ends)) for ends in ((0, cut), (cut, count)))
    return [*batches[:-1], kept_part], [part]


RANGE = (1e-2, 1e2)
AT_ONCE = 2**21  # numbers of outputs that are differentiated at once


@checked
def temper(
    posterior: Posterior,
    validation: Iterable[Any],
    *,
    samples: Count | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> "TemperedPosterior":
    """The posterior with the temperature that gives held-out data the largest likelihood.

    Args:
        posterior: of any method; one that is tempered already is tempered anew.
        validation: batches of ``(inputs, targets)`` that the posterior was not fitted to.
        samples, seed, progress: of the prediction, as in :meth:`Posterior.predict`.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> loader = [(inputs, (inputs[:, 0] + inputs[:, 1].sin() * inputs[:, 1] > 0).long())]
    >>> posterior = fb.MLE(epochs=300, lr=0.1).fit(nn.Linear(2, 2), loader, progress=False)
    >>> round(temper(posterior, loader).temperature, 2)  # the data it was fitted to find it as sure as it should be
    1.0
    """
    if isinstance(posterior, TemperedPosterior):
        posterior = posterior.posterior
    validation = as_loader(validation)
    first_batch(validation, use="temperature scaling")
    outputs, _, targets = posterior.collect(validation, PredictOptions(samples, seed=seed, progress=progress))
    assert targets is not None
    targets = posterior.likelihood.canonical(targets).to(outputs.device)
    return TemperedPosterior(posterior, best_temperature(posterior, outputs.double(), targets))


def best_temperature(posterior: Posterior, outputs: Tensor, targets: Tensor) -> float:
    r"""The minimum of the negative log-likelihood over :math:`u = \log T`: the best of a grid, then Newton's method within its cell."""
    low, high = (math.log(end) for end in RANGE)
    count = 17
    grid = [low + (high - low) * place / (count - 1) for place in range(count)]
    values = [_loss_at(posterior, outputs, targets, u, derivatives=False)[0] for u in grid]
    best = min(range(count), key=lambda place: (values[place], abs(grid[place])))
    sharp = values[0] <= values[best]
    if sharp or best == count - 1:
        end = RANGE[0] if sharp else RANGE[1]
        reason = f"ask for a temperature of {end:g} or beyond, which is taken; are they of another kind than the training data?"
        if sharp and not isinstance(posterior.likelihood, Gaussian):
            reason = (
                "are all predicted right, which determines no temperature: it stays at 1; give more of them"
            )
            end = 1.0
        warn(f"the validation data {reason}", kind="validation")
        return end
    left, right, u = grid[best - 1], grid[best + 1], grid[best]
    for _ in range(60):
        _, slope, bend = _loss_at(posterior, outputs, targets, u)
        left, right = (u, right) if slope < 0 else (left, u)
        step = u - slope / bend if bend > 0 else math.inf
        move = step if left < step < right else (left + right) / 2
        if abs(move - u) < 1e-12 or slope == 0.0:
            break
        u = move
    return math.exp(u)


def _loss_at(
    posterior: Posterior, outputs: Tensor, targets: Tensor, u: float, derivatives: bool = True
) -> tuple[float, float, float]:
    """Mean negative log-likelihood at ``T = exp(u)`` and its first two derivatives by ``u``."""
    size = max(1, AT_ONCE // max(1, outputs[:, :1].numel()))
    total = [0.0, 0.0, 0.0]
    with torch.set_grad_enabled(derivatives):
        for start in range(0, len(targets), size):
            place = torch.tensor(u, dtype=outputs.dtype, device=outputs.device, requires_grad=derivatives)
            some, truth = outputs[:, start : start + size], targets[start : start + size]
            loss = tempered(posterior._predictive(some), place.exp()).nll(truth).sum()
            total[0] += loss.item()
            if derivatives:
                (slope,) = torch.autograd.grad(loss, place, create_graph=True)
                (bend,) = torch.autograd.grad(slope, place)
                total[1], total[2] = total[1] + slope.item(), total[2] + bend.item()
    return total[0] / len(targets), total[1] / len(targets), total[2] / len(targets)


class TemperedPosterior(Posterior):
    r"""A posterior whose predictions are tempered by :math:`T`.

    Classes: the logits of every sample are divided by :math:`T`. Regression: the predictive is scaled about its mean, so that its
    standard deviation is :math:`T` times what it was; ``sample`` and ``draws`` then give networks of the posterior within, which are
    not spread by :math:`T`: the mean that they would be moved from is one of many networks. Above 1 the posterior was too sure.

    Args:
        posterior: the one within, of any method.
        temperature: :math:`T`.
    """

    kind: ClassVar[str] = "tempered"

    @checked
    def __init__(self, posterior: Posterior, temperature: Positive) -> None:
        super().__init__(posterior.model, posterior.likelihood, posterior.history)
        self.posterior, self.temperature = posterior, float(temperature)
        self.default_samples, self.cache = posterior.default_samples, posterior.cache
        self.compiles, self.only_shared = posterior.compiles, posterior.only_shared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.posterior!r}, temperature={self.temperature:.4g})"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs of the posterior within."""
        return self.posterior.outputs(inputs, samples, prediction)

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        return tempered(self.posterior._predictive(outputs, sample_counts), self.temperature, sample_counts)

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior within; of classes, its logits are divided by the temperature."""
        network = self.posterior.sample(seed)
        return network if isinstance(self.likelihood, Gaussian) else Divided(network, self.temperature).eval()

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Of the posterior within."""
        return self.posterior.draws(samples, seed)

    def log_prob(self, values: Any) -> Tensor:
        """Of the posterior within: the temperature changes predictions, not weights."""
        return self.posterior.log_prob(values)

    def document(self) -> dict[str, Any]:
        return {**super().document(), "temperature": self.temperature, "within": self.posterior.document()}

    def tensors(self) -> dict[str, Tensor]:
        return self.posterior.tensors()

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> "Posterior":
        """Read a saved posterior into ``network``, which stays untouched if it does not fit."""
        file = opened(path, network, [cls.kind])
        with reading(file):
            temperature, inner = file.document["temperature"], file.holding(dict(file.document["within"]))
        within = load_posterior(inner, network)
        with reading(file):
            return cls(within, temperature)


class Divided(nn.Module):
    """A network whose outputs are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return call(self.network, named or inputs) / self.temperature


def tempered(plain: Any, temperature: Any, sample_counts: Tensor | None = None) -> Any:
    """A predictive at a temperature, a number or a tensor of one."""
    sample_counts = None if sample_counts is None else plain.sample_counts
    if isinstance(plain, CategoricalPredictive):  # log-probabilities are logits
        return CategoricalPredictive(plain.log_samples / temperature, sample_counts)
    center = plain.mean.reshape(plain.samples.shape[1:])
    means = center + temperature * (plain.samples - center)
    return GaussianPredictive(means, temperature**2 * plain.sample_variances, sample_counts, plain.shape)
