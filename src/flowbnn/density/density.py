"""A flow fitted to data by maximum likelihood, in the units of the data."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import check_finite, device_of, dtype_of, evaluation_mode, move
from flowbnn.data import TensorLoader
from flowbnn.density.examples import BESIDE, LOADER, ROWS, as_tensor, batches, in_memory, loaded, pair
from flowbnn.distributions.support import has_full_support
from flowbnn.errors import FlowBNNError, pluralize, quote_names, warn
from flowbnn.options import (
    Bounds,
    Count,
    Positive,
    Probability,
    Seed,
    UnitInterval,
    accepts_options_of,
    check,
    checked,
    options,
)
from flowbnn.training import (
    Clock,
    EarlyStop,
    History,
    TrainingOptions,
    check_weights,
    cosine,
    save_tensors,
    train,
)
from flowbnn.training.options import length_of
from flowbnn.training.randomness import sampling_context
from flowbnn.training.storage import TensorFile
from flowbnn.transforms import ActNorm, flow_matching_loss
from flowbnn.transforms.base import check_distribution_module, check_tensor

Data = Any  # a tensor or an array with the examples on its first axis, or a loader
PACE = 5.0  # of the scales of ActNorm
Fraction = Annotated[float, Bounds(ge=0, lt=1)]


@options(kw_only=True, of="fit_density")
class DensityOptions(TrainingOptions):
    """What :func:`fit_density` takes besides the flow and the data: the options of the training run, and these.

    Args:
        context: what the density is conditioned on, a row for each example; a loader gives pairs of data and context instead. A
            flow of your own says in an attribute ``context_dim`` that it takes one.
        validation: the share of the data that is held out to stop early, or data of their own, with their context as a pair or a
            loader of pairs; 0 trains for all epochs. Of a loader no share is held out.
        batch_size: examples in a step, where ``data`` is no loader.
        lr, rise: the rate of Adam, which grows over the first share ``rise`` of the steps, since the first steps of Adam move all of a
            large flow at once, and falls to zero along a cosine. The scales of ActNorm have five times that rate: data may have to be
            stretched a thousandfold.
        weight_decay: of AdamW.
        patience: epochs without a better likelihood of the held-out data before the run stops; the best epoch is kept.
        standardize: fit data of mean 0 and standard deviation 1, and give densities and samples in the data's own units. None: for
            vectors of real numbers and flows that reach all of them, which those of angles or of positive numbers do not.
        objective: ``"likelihood"``, or for continuous-time flows ``"flow-matching"``, which needs no solver in training
            (Lipman et al. 2023, https://arxiv.org/abs/2210.02747).
    """

    epochs: Count = 100
    context: Any = None
    validation: Any = 0.1
    batch_size: Count = 256
    lr: Positive = 2e-3
    rise: UnitInterval = 0.02
    weight_decay: Annotated[float, Bounds(ge=0)] = 0.0
    patience: Count = 20
    standardize: bool | None = None
    objective: Literal["likelihood", "flow-matching"] = "likelihood"
    clip_gradient: Positive | None = 10.0
    description: str = "fitting the density"


class Density(nn.Module):
    r"""A flow in the units of the data, :math:`\log p(x) = \log p_f\big((x - \mu) / \sigma\big) - \sum_i \log \sigma_i`.

    Args:
        flow: a module that, called with a context or None, gives the distribution :math:`p_f`.
        loc, scale: :math:`\mu` and :math:`\sigma`, one for each number of an example, in double precision where the data are, so that
            numbers far from zero keep their digits; None where the flow has the data's units.
        history: the record of its training.
    """

    loc: Tensor | None
    scale: Tensor | None

    @checked
    def __init__(
        self,
        flow: nn.Module,
        loc: Tensor | None = None,
        scale: Tensor | None = None,
        history: History | None = None,
    ) -> None:
        super().__init__()
        self.flow, self.history = flow, history or History()
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)

    @property
    def lower_bound(self) -> bool:
        """Whether ``log_prob`` is a lower bound, of one draw, on the log-density."""
        return _bounded(self.flow)

    def log_prob(self, x: Any, context: Any = None) -> Tensor:
        """The log-density of each example, a tensor or an array, with gradients."""
        log_prob: Tensor = self._given(context).log_prob(self.scaled(x))
        return log_prob if self.scale is None else log_prob - self.scale.log().sum()

    def _given(self, context: Any) -> Any:
        """The flow's distribution for a context, which is brought to its device and precision."""
        check("context", context := as_tensor(context), Tensor | None, "Density")
        return self.flow(None if context is None else move(context, device_of(self), dtype_of(self.flow)))

    def scaled(self, x: Any) -> Tensor:
        """Examples in the units and the precision of the flow."""
        check("x", x := as_tensor(x), Tensor, "Density")
        if self.loc is None or self.scale is None:
            return move(x, device_of(self), dtype_of(self.flow))
        check_tensor(x, self)
        if x.shape[x.ndim - self.loc.ndim :] != self.loc.shape:  # which would broadcast
            raise FlowBNNError(
                f"the density is one of examples of shape {tuple(self.loc.shape)}, not of {tuple(x.shape[1:])}",
                kind="shape",
                argument="x",
            )
        return ((x.to(self.loc.device) - self.loc) / self.scale).to(dtype_of(self.flow))

    @checked
    def sample(self, count: Count, context: Any = None, seed: Seed | None = None) -> Tensor:
        """So many examples; with a context, so many for each of its rows. None draws from torch's own generator."""
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            drawn = self._given(context).sample((count,))
        return drawn if self.loc is None or self.scale is None else self.loc + self.scale * drawn

    @checked
    def score(self, data: Data, context: Any = None, seed: Seed = 0) -> Tensor:
        """The log-densities of a data set, in batches, without gradients; random bounds draw from ``seed``."""
        parts = [torch.zeros(0, dtype=dtype_of(self.flow))]
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            for x, beside in batches(data, context, self.flow):
                parts.append(self.log_prob(x, beside).cpu())
                if parts[-1].shape != x.shape[:1]:
                    raise FlowBNNError(
                        "data have examples on their first axis, each with one log-density; a batch of shape "
                        f"{tuple(x.shape)} has log-densities of shape {tuple(parts[-1].shape)}",
                        kind="shape",
                        argument="data",
                    )
        return torch.cat(parts)

    @checked
    def bits_per_dimension(self, data: Data, context: Any = None, seed: Seed = 0) -> float:
        r"""The mean of :math:`-\log_2 p(x) / D` for examples of :math:`D` numbers.

        Where the flow takes integers, such as images of bytes, and dequantizes them itself, these are the bits that a code takes for
        one of them.
        """
        scores = self.score(data, context, seed)
        if not len(scores):
            raise FlowBNNError("there are no examples to code", kind="data", argument="data")
        size = math.prod(next(batches(data, context, self.flow))[0].shape[1:])
        return -float(scores.double().mean()) / (math.log(2.0) * size)

    @checked
    def novelty(
        self,
        held_out: Data,
        rate: Probability = 0.05,
        by: Literal["density", "typicality"] = "density",
        context: Any = None,
    ) -> "NoveltyDetector":
        r"""A detector of examples that are unlike the data, wrong about so many of the familiar ones.

        Args:
            held_out: familiar examples that the flow was not fitted to, which set the threshold.
            rate: the share of familiar examples that are called novel.
            by: ``"density"`` takes small :math:`\log p(x)` for novel; ``"typicality"`` also large ones, by the distance to its mean
                (Nalisnick et al. 2019, https://arxiv.org/abs/1906.02994). In many dimensions a flow can give images of another kind
                a *higher* density than its own (Nalisnick et al. 2018, https://arxiv.org/abs/1810.09136).
        """
        scores = self.score(held_out, context)
        if not len(scores):
            raise FlowBNNError(
                "a threshold needs held-out examples, and there are none", kind="data", argument="held_out"
            )
        if bool(scores.isnan().any()):
            text = "the log-densities of some held-out examples are not a number; clean them first"
            raise FlowBNNError(text, kind="data", argument="held_out")
        if rate * (1 + len(scores)) < 1:
            least = math.ceil(1 / rate) - 1
            warn(
                f"a rate of {rate:g} takes at least {pluralize(least, 'held-out example')}; with {len(scores)} of them no example is "
                "called novel",
                kind="data",
                argument="held_out",
            )
        return NoveltyDetector(self, rate, by, _ranked(scores).sort().values)

    def save(self, path: str | Path) -> Path:
        """Write the fitted flow to one safetensors file, atomically."""
        return save_tensors(path, self.state_dict(), {"kind": "density", "history": self.history.to_dict()})


@options
class NoveltyDetector:
    r"""Calls an example novel where fewer than ``rate`` of the held-out ones are as strange.

    With :math:`n` held-out examples, of which :math:`m` are at least as strange as :math:`x`, the p-value is :math:`(1 + m) / (1 + n)`:
    a familiar example has one of at most :math:`\alpha` with a probability of at most :math:`\alpha`, whatever the flow is worth
    (Vovk, Gammerman and Shafer 2005; Bates et al. 2023, https://arxiv.org/abs/2104.08279). The mean log-density that typicality
    measures from is that of all :math:`n + 1`, so that this holds for few held-out examples as well.

    Args:
        density, rate, by: as in :meth:`Density.novelty`.
        held_out: the log-densities of the held-out examples, in rising order.
    """

    density: Density = field(repr=False)
    rate: Probability
    by: Literal["density", "typicality"]
    held_out: Tensor = field(repr=False)

    def strangeness(self, data: Any, context: Any = None) -> Tensor:
        """Minus the log-density, or its distance to the mean of the held-out ones: large is novel."""
        scores = _ranked(self.density.score(data, context))
        return -scores if self.by == "density" else (scores - self.held_out.mean()).abs()

    def p_value(self, data: Any, context: Any = None) -> Tensor:
        """The share of familiar examples that are as strange."""
        low = high = _ranked(self.density.score(data, context))
        number, above = len(self.held_out), torch.zeros((), dtype=torch.long)
        if self.by == "typicality":
            opposite = 2.0 * (self.held_out.sum() + low) / (1 + number) - low
            low, high = torch.minimum(low, opposite), torch.maximum(low, opposite)
            above = number - torch.searchsorted(self.held_out, high)
        strange = torch.searchsorted(self.held_out, low, right=True) + above
        return (1.0 + strange.clamp(max=number)) / (1.0 + number)

    def is_novel(self, data: Any, context: Any = None) -> Tensor:
        """True for each example that is called novel."""
        return self.p_value(data, context) <= self.rate


@checked
@accepts_options_of(DensityOptions)
def fit_density(flow: nn.Module, data: Data, **given: Any) -> Density:
    r"""Fit a copy of a flow by maximum likelihood, :math:`\max_\theta \frac1N \sum_i \log p_\theta(x_i)`.

    Args:
        flow: a module that, called with a context or None, gives a distribution, such as ``fb.flows.NSF(2)``. It may have a
            ``training_loss(x, context, clock)`` of its own; with an attribute ``capturable`` that is True its steps on a GPU are
            recorded, as :func:`flowbnn.training.train` says, after ``check(x)``, where it has that, on the batches of the first epoch.
        data: a tensor, an array or a list of rows of numbers, with the examples on its first axis; or a loader, whose batches are
            examples, or tuples that begin with them and, for a conditional flow, go on with the context.
        given: as in :class:`DensityOptions`: ``validation``, ``epochs``, ``lr``, ``seed``, ``checkpoint``, ``resume`` and the rest.
    """
    run = DensityOptions(**given)
    check_distribution_module(flow)
    flow = deepcopy(flow)
    loader, held_out = _loaders(data, run, flow)
    density = Density(flow, *_units(flow, loader, run.standardize))
    validate = None
    if held_out is not None:
        check("validation", held_out, LOADER)
        _first(flow, held_out, "validation")  # before a run rather than after its first epoch
        validate = partial(_validate, density, held_out)
        if run.early_stop is None:
            run = replace(run, early_stop=EarlyStop(monitor="validation_nll", patience=run.patience))
    engine = torch.optim.AdamW(_groups(density, run.lr), weight_decay=run.weight_decay, fused=True)
    length = length_of(loader)
    schedule = cosine(engine, length * run.epochs, run.rise) if length else None
    objective = _Objective(density, run.objective)
    density.history = train(
        objective, engine, loader, run, schedule=schedule, validate=validate, name_prefix="density.flow"
    )
    losses = density.history["loss"]
    rise = losses[-1] - losses[0]
    if held_out is None and rise > 0.1 * (1.0 + abs(losses[0])) and not hasattr(flow, "training_loss"):
        warn(
            f"the training diverged: its mean loss was {losses[0]:.4g} in the first epoch and {losses[-1]:.4g} in the last; take a "
            f"smaller rate (lr={run.lr / 3:.2g}), or hold data out (validation=0.1), which keeps the best epoch",
            kind="fall",
            fall=rise,
        )
    return density.eval()


def _groups(flow: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The weights for an optimizer, the scales of ActNorm apart and at a higher rate."""
    scales = {id(part.raw_log_scale) for part in flow.modules() if isinstance(part, ActNorm)}
    weights = [weight for weight in flow.parameters() if weight.requires_grad]
    slow, fast = (
        [weight for weight in weights if (id(weight) in scales) == apart] for apart in (False, True)
    )
    return [{"params": some, "lr": rate} for some, rate in ((slow, lr), (fast, PACE * lr)) if some]


@checked
def load_density(path: str | Path, flow: nn.Module) -> Density:
    """Read what :meth:`Density.save` wrote into a copy of ``flow``, built as the one that was fitted."""
    file = TensorFile(path, sum(parameter.numel() for parameter in flow.parameters()))
    if file.document.get("kind") != "density":
        raise FlowBNNError(f"'{path}' holds no density", kind="file")
    with file.reading():
        history = History.from_dict(file.document["history"])
        loc, scale = (
            torch.empty_like(file.views[name]) if name in file.views else None for name in ("loc", "scale")
        )
    density = Density(deepcopy(flow), loc, scale, history)
    check_weights(density, file.views, Path(path))
    density.load_state_dict(file.tensors)
    return density.to(device_of(flow)).eval()


class _Objective(nn.Module):
    def __init__(self, density: Density, objective: str) -> None:
        super().__init__()
        self.density, self.objective = density, objective
        self.capturable = objective == "likelihood" and bool(getattr(density.flow, "capturable", False))

    def check_batch(self, batch: Any) -> None:
        """Look at the batches of the first epoch: what the model cannot give is refused."""
        x, context = pair(batch, self.density.flow)
        model: Any = self.density.flow if hasattr(self.density.flow, "check") else self.density.flow(context)
        if hasattr(model, "check"):
            model.check(self.density.scaled(x))

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        if clock.epoch == 0 and not clock.recording:
            self.check_batch(batch)
        x, context = pair(batch, self.density.flow)
        own = getattr(self.density.flow, "training_loss", None)
        if own is not None:
            return own(self.density.scaled(x), context, clock)
        if self.objective == "flow-matching":
            made = self.density.flow(context)
            return flow_matching_loss(made.transform, made.base, self.density.scaled(x), context), {}
        log_prob = self.density.log_prob(x, context).mean()
        return -log_prob, {"log_likelihood": log_prob.detach()}


def _loaders(data: Any, run: DensityOptions, flow: nn.Module) -> tuple[Any, Any]:
    """What is trained on and what is held out, or None."""
    share = run.validation if isinstance(run.validation, float | int) else None
    if not in_memory(data):
        if run.context is not None:
            raise FlowBNNError(BESIDE, argument="context")
        check("data", data, LOADER)
        return data, None if share is not None else run.validation
    tensors = list(loaded(data, run.context, flow).tensors)
    check_finite(tensors[0], "data")
    generator = None if run.seed is None else torch.Generator().manual_seed(run.seed)
    held_out = None if share is not None else run.validation
    if in_memory(held_out):
        held_out = loaded(held_out, None, flow)
        check_finite(held_out.tensors[0], "validation data")
    if share:
        check("validation", share, Fraction)
        if len(tensors[0]) < 2:
            raise FlowBNNError(
                f"{pluralize(len(tensors[0]), 'example')} cannot leave any to hold out; give more, or say validation=0",
                kind="data",
                argument="validation",
            )
        order = torch.randperm(len(tensors[0]), generator=generator).to(tensors[0].device)
        count = max(1, round(share * len(order)))
        held_out = TensorLoader(*(one[order[:count]] for one in tensors), batch_size=ROWS)
        tensors = [one[order[count:]] for one in tensors]
    size = min(run.batch_size, len(tensors[0]))
    loader = TensorLoader(*tensors, batch_size=size, shuffle=True, generator=generator, drop_last=True)
    return loader, held_out


def _first(flow: nn.Module, loader: Any, name: str) -> tuple[Tensor, Any]:
    """The examples of the first batch, and what the flow gives for their context; what does not fit is refused."""
    if isinstance(loader, Iterator):
        text = f"{name} can be gone through once only; give a loader or a list of batches"
        raise FlowBNNError(text, argument=name)
    batch = next(iter(loader), None)
    if batch is None:
        raise FlowBNNError(f"{name} has no batches", argument=name)
    first, context = pair(batch, flow)
    made = flow(context)
    event = tuple(getattr(made, "event_shape", ()))
    axes = first.ndim - len(event)
    if axes < 1 or first.shape[axes:] != event:
        text = f"{type(flow).__name__} is made for examples of shape {event}, and a batch of {name} has shape {tuple(first.shape)}"
        if axes < 1:
            text += "; of a list of rows make a tensor, torch.stack(rows), of numbers a column, x[:, None]"
        raise FlowBNNError(text, kind="shape", argument=name)
    return first, made


def _units(
    flow: nn.Module, loader: Any, standardize: bool | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Mean and standard deviation of the numbers of an example over the data, as far as they are to be taken out."""
    first, made = _first(flow, loader, "data")
    if standardize is None:
        standardize = first.is_floating_point() and first.ndim == 2 and not _bounded(flow)
        periodic = getattr(getattr(made, "base", made), "periodic", False)  # angles have their own units
        standardize = standardize and has_full_support(made) and not periodic
    if not standardize:
        return None, None
    # sums of distances to one example, which leave the variance of numbers far from zero its digits
    count, origin = 0, first[0].double().cpu()
    total, square = torch.zeros_like(origin), torch.zeros_like(origin)
    for batch in loader:
        x = pair(batch, flow)[0].double().cpu() - origin
        count, total, square = count + len(x), total + x.sum(0), square + x.square().sum(0)
    loc = origin + total / count
    scale = (square / count - (total / count).square()).clamp_min(0.0).sqrt()
    exact = torch.float64 if first.dtype == torch.float64 else dtype_of(flow)
    # a column that does not vary, up to rounding, keeps its units, however small they are
    least = torch.finfo(exact or torch.get_default_dtype()).tiny
    varies = scale > (1e-15 * loc.abs()).clamp_min(least)
    if not bool(varies.all()):
        flat = [f"data[:, {', '.join(map(str, place))}]" for place in (~varies).nonzero().tolist()]
        text = f"a column that does not vary has no density: drop {quote_names(flat)}"
        warn(text, kind="data", argument="data")
    scale = torch.where(varies, scale, 1.0)
    return loc.to(device_of(flow), exact), scale.to(device_of(flow), exact)


def _ranked(scores: Tensor) -> Tensor:
    """Log-densities as finite numbers: no number at all counts as the lowest, so that nothing is stranger."""
    return scores.double().nan_to_num(nan=-1e300, neginf=-1e300, posinf=1e300)


def _validate(density: Density, held_out: Any) -> dict[str, float]:
    return {"nll": -float(density.score(held_out).double().mean())}


def _bounded(flow: nn.Module) -> bool:
    return bool(getattr(flow, "lower_bound", getattr(getattr(flow, "transform", None), "lower_bound", False)))
