r"""Maximum-likelihood fits of flows, :math:`\max_\theta \frac1N \sum_i \log p_\theta(x_i)`."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import check_finite, check_repeatable, device_of, dtype_of
from flowbnn.data import TensorLoader
from flowbnn.data.formats import as_loader
from flowbnn.density.density import Data, Density, gives_lower_bound
from flowbnn.density.examples import (
    Loader,
    check_loader,
    is_in_memory,
    iterate_batches,
    make_loader,
    split_batch,
)
from flowbnn.distributions.support import has_full_support
from flowbnn.errors import FlowBNNError, check_shape, pluralize, quote_names, warn
from flowbnn.networks import evaluation_mode
from flowbnn.options import Bounds, Count, Positive, UnitInterval, accepts_options_of, check, checked, options
from flowbnn.training import Clock, EarlyStop, TrainingOptions, cosine, train
from flowbnn.training.options import length_of
from flowbnn.training.randomness import sampling_context
from flowbnn.transforms import ActNorm, flow_matching_loss
from flowbnn.transforms.base import check_distribution_module

Fraction = Annotated[float, Bounds(ge=0, lt=1)]


@options(kw_only=True, owner="fit_density")
class DensityOptions(TrainingOptions):
    """Options of :func:`fit_density`: those of :class:`~flowbnn.training.TrainingOptions`, and these.

    Args:
        context: Contexts that the density is conditioned on, one row for each example. A loader yields pairs of examples and contexts
            instead. A user-defined flow declares that it takes a context by an attribute ``context_dim``.
        validation: Share of the data that is held out for early stopping, or separate validation data. These may be examples, a pair of
            examples and contexts, or a loader. 0 trains for all epochs. A loader passed as ``data`` is never split.
        batch_size: Number of examples in a training step, if ``data`` is no loader.
        lr: Learning rate of AdamW. It decays to zero along a cosine. The scales of ActNorm have five times this rate, because data may
            have to be stretched a thousandfold.
        warmup_fraction: Share of the steps over which the learning rate first grows linearly from zero. Otherwise the first steps of
            Adam would move all weights of a large flow at once.
        weight_decay: Weight decay of AdamW.
        patience: Number of epochs without a better validation likelihood before the training stops. The best epoch is restored. A
            flow with its own ``training_loss`` stops by that loss on the validation data.
        standardize: Fits data of mean 0 and standard deviation 1 and returns densities and samples in the units of the data. None
            standardizes vectors of real numbers for flows whose support is all real numbers.
        objective: ``"likelihood"``, or for continuous-time flows ``"flow-matching"``, which needs no ODE solver in training
            (Lipman et al. 2023, https://arxiv.org/abs/2210.02747).
    """

    epochs: Count = 100
    context: Any = None
    validation: Any = 0.1
    batch_size: Count = 256
    lr: Positive = 2e-3
    warmup_fraction: UnitInterval = 0.02
    weight_decay: Annotated[float, Bounds(ge=0)] = 0.0
    patience: Count = 20
    standardize: bool | None = None
    objective: Literal["likelihood", "flow-matching"] = "likelihood"
    clip_gradient: Positive | None = 10.0
    description: str = "fitting the density"


@checked
@accepts_options_of(DensityOptions)
def fit_density(flow: nn.Module, data: Data, **kwargs: Any) -> Density:
    r"""Fits a copy of a flow by maximum likelihood, :math:`\max_\theta \frac1N \sum_i \log p_\theta(x_i)`.

    Args:
        flow: Module that returns a distribution when it is called with a context or None, such as ``fb.flows.NSF(2)``. A user-defined
            flow may have its own ``training_loss(x, context, clock)``. If its attribute ``capturable`` is True, its steps on a GPU are
            recorded as a CUDA graph (:func:`flowbnn.training.train`). A method ``check(x)`` sees the batches of the first epoch.
        data: Tensor, array (numpy, pandas) or list of rows, with the examples on the first axis. Or a loader or ``Dataset``, whose
            batches are examples, or tuples of examples and, for a conditional flow, contexts.
        kwargs: Options of :class:`DensityOptions`, such as ``validation``, ``epochs``, ``lr``, ``seed``, ``checkpoint`` and ``resume``.

    Returns:
        The fitted density, in the units of the data.

    >>> import flowbnn as fb
    >>> density = fb.fit_density(fb.flows.RealNVP(2), torch.randn(100, 2), epochs=1, progress=False)
    >>> density.score(torch.zeros(3, 2)).shape
    torch.Size([3])
    """
    options = DensityOptions(**kwargs)
    check_distribution_module(flow)
    flow = deepcopy(flow)
    loader, held_out = _make_loaders(data, options, flow)
    density = Density(flow, *_mean_and_scale(flow, loader, options.standardize))
    validate = None
    if held_out is not None:
        check("validation", held_out, Loader)
        # raises before the training rather than after its first epoch
        _first_batch(flow, held_out, "validation")
        validate = partial(_validation_scores, density, held_out)
        if options.early_stop is None:
            monitor = "validation_loss" if hasattr(flow, "training_loss") else "validation_nll"
            early_stop = EarlyStop(monitor=monitor, patience=options.patience)
            options = replace(options, early_stop=early_stop)
    groups = _parameter_groups(density, options.lr)
    optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay, fused=True)
    length = length_of(loader)
    schedule = cosine(optimizer, length * options.epochs, options.warmup_fraction) if length else None
    objective = DensityObjective(density, options.objective)
    density.history = train(
        objective,
        optimizer,
        loader,
        options,
        schedule=schedule,
        validate=validate,
        name_prefix="density.flow",
    )
    if held_out is None and not hasattr(flow, "training_loss"):
        _warn_if_diverged(density.history["loss"], options.lr)
    return density.eval()


def _validation_scores(density: Density, held_out: Any) -> dict[str, float]:
    """Returns the negative log-likelihood (NLL) of the validation data, and the mean of a flow's own ``training_loss``.

    The loss is that of the end of the run, where annealed weights have their final values. The seed is the same in every epoch.
    """
    scores = {"nll": -float(density.score(held_out).double().mean())}
    training_loss = getattr(density.flow, "training_loss", None)
    if training_loss is not None:
        total, count, end = 0.0, 0, Clock(1, 1, 1, 1, progress=1.0)
        with evaluation_mode(density), sampling_context(device_of(density), 0):
            for x, context in iterate_batches(held_out, None, density.flow):
                total += len(x) * float(training_loss(density.standardize(x), context, end)[0])
                count += len(x)
        scores["loss"] = total / count
    return scores


class DensityObjective(nn.Module):
    """Training loss of a density.

    Args:
        density: Density to fit.
        objective: ``"likelihood"`` or ``"flow-matching"``. A flow with its own ``training_loss`` uses that.
    """

    def __init__(self, density: Density, objective: str) -> None:
        super().__init__()
        self.density, self.objective = density, objective
        self.capturable = objective == "likelihood" and bool(getattr(density.flow, "capturable", False))

    def check_batch(self, batch: Any) -> None:
        """Raises FlowBNNError if a batch of the first epoch lies outside the support of the model."""
        x, context = split_batch(batch, self.density.flow)
        model: Any = self.density.flow if hasattr(self.density.flow, "check") else self.density.flow(context)
        if hasattr(model, "check"):
            model.check(self.density.standardize(x))

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch and the values to log."""
        if clock.epoch == 0 and not clock.recording:
            self.check_batch(batch)
        x, context = split_batch(batch, self.density.flow)
        training_loss = getattr(self.density.flow, "training_loss", None)
        if training_loss is not None:
            return training_loss(self.density.standardize(x), context, clock)
        if self.objective == "flow-matching":
            flow = self.density.flow(context)
            return flow_matching_loss(flow.transform, flow.base, self.density.standardize(x), context), {}
        log_prob = self.density.log_prob(x, context).mean()
        return -log_prob, {"log_likelihood": log_prob.detach()}


def _parameter_groups(flow: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Returns the parameter groups of an optimizer. The scales of ActNorm form a group with five times the learning rate."""
    scales = {id(module.raw_log_scale) for module in flow.modules() if isinstance(module, ActNorm)}
    parameters = [parameter for parameter in flow.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if (id(parameter) in scales) == fast], "lr": rate}
        for fast, rate in ((False, lr), (True, 5.0 * lr))
    ]
    return [group for group in groups if group["params"]]


def _make_loaders(data: Any, options: DensityOptions, flow: nn.Module) -> tuple[Any, Any]:
    """Returns the loader of the training data and that of the validation data, or None without validation."""
    share = options.validation if isinstance(options.validation, float | int) else None
    held_out = None if share is not None else options.validation
    if is_in_memory(held_out):
        held_out = make_loader(held_out, None, flow)
        check_finite(held_out.tensors[0], "validation data")
    elif held_out is not None:
        held_out = as_loader(held_out, stage="validation", argument="validation")
    if not is_in_memory(data):
        data = as_loader(data, batch_size=options.batch_size, shuffle=True, stage="train", argument="data")
        check_loader(data, options.context)
        return data, held_out
    tensors = list(make_loader(data, options.context, flow).tensors)
    check_finite(tensors[0], "data")
    generator = None if options.seed is None else torch.Generator().manual_seed(options.seed)
    if share:
        check("validation", share, Fraction)
        if len(tensors[0]) < 2:
            text = f"{pluralize(len(tensors[0]), 'example')} cannot be split; set validation=0"
            raise FlowBNNError(text, kind="data", argument="validation")
        order = torch.randperm(len(tensors[0]), generator=generator).to(tensors[0].device)
        count = max(1, round(share * len(order)))
        held_out = make_loader(tuple(tensor[order[:count]] for tensor in tensors), None, flow)
        tensors = [tensor[order[count:]] for tensor in tensors]
    size = min(options.batch_size, len(tensors[0]))
    loader = TensorLoader(*tensors, batch_size=size, shuffle=True, generator=generator, drop_last=True)
    return loader, held_out


def _first_batch(flow: nn.Module, loader: Any, name: str) -> tuple[Tensor, Any]:
    """Returns the examples of the first batch and the distribution of the flow for their context.

    Args:
        flow: Flow to fit.
        loader: Loader to read.
        name: Name of the argument that holds the loader, for error messages.

    Raises:
        FlowBNNError: If the loader can be read only once or is empty, or if the examples do not have the shape of the flow.
    """
    check_repeatable(loader, name)
    batch = next(iter(loader), None)
    if batch is None:
        raise FlowBNNError(f"{name} has no batches", kind="data", argument=name)
    x, context = split_batch(batch, flow)
    distribution = flow(context)
    event = tuple(getattr(distribution, "event_shape", ()))
    hint = "use torch.stack(rows) for rows, x[:, None] for numbers" if x.ndim <= len(event) else ""
    check_shape(name, x, ("batch", "...", *event), hint, owner=type(flow).__name__)
    return x, distribution


def _mean_and_scale(
    flow: nn.Module, loader: Any, standardize: bool | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the mean and the standard deviation of the data, or None and None if they are not standardized."""
    first, distribution = _first_batch(flow, loader, "data")
    if standardize is None:
        standardize = first.is_floating_point() and first.ndim == 2 and not gives_lower_bound(flow)
        # angles have units of their own
        periodic = getattr(getattr(distribution, "base", distribution), "periodic", False)
        standardize = standardize and has_full_support(distribution) and not periodic
    if not standardize:
        return None, None
    # distances to one example keep the digits of the variance of numbers far from zero
    count, origin = 0, first[0].double().cpu()
    total, square = torch.zeros_like(origin), torch.zeros_like(origin)
    for batch in loader:
        x = split_batch(batch, flow)[0].double().cpu()
        check_shape(
            "data", x, ("batch", *origin.shape), "use a tuple (data, context) instead of a list of them"
        )
        x = x - origin
        count, total, square = count + len(x), total + x.sum(0), square + x.square().sum(0)
    loc = origin + total / count
    scale = (square / count - (total / count).square()).clamp_min(0.0).sqrt()
    dtype = torch.float64 if first.dtype == torch.float64 else dtype_of(flow)
    # a column that is constant up to rounding keeps its units
    smallest = torch.finfo(dtype or torch.get_default_dtype()).tiny
    varies = scale > (1e-15 * loc.abs()).clamp_min(smallest)
    if not bool(varies.all()):
        columns = [f"data[:, {', '.join(map(str, place))}]" for place in (~varies).nonzero().tolist()]
        text = f"drop constant columns {quote_names(columns)}"
        warn(text, kind="constant", argument="data", columns=columns)
    scale = torch.where(varies, scale, 1.0)
    return loc.to(device_of(flow), dtype), scale.to(device_of(flow), dtype)


def _warn_if_diverged(losses: list[float], lr: float) -> None:
    """Warns if the mean loss of the last epoch is clearly larger than that of the first."""
    increase = losses[-1] - losses[0]
    if increase > 0.1 * (1.0 + abs(losses[0])):
        text = f"the mean loss rose from {losses[0]:.4g} to {losses[-1]:.4g}; set lr={lr / 3:.2g}, or validation=0.1"
        warn(text, kind="divergence", increase=increase)
