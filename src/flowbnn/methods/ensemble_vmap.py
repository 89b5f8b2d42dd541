r"""Members of an ensemble trained together: their weights are stacked, and one pass serves all (``torch.func``).

The loss is the sum over members, so that each gets the gradient it would get alone; optimizers that treat every number by itself then
take the steps they would take alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flowbnn.batches import device_of, dtype_of, split_batch
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.fitting import (
    FitOptions,
    Logged,
    Schedule,
    optimizer_for,
    scheduled,
    undisturbed,
    validator,
)
from flowbnn.posterior.batches import apply, call, move, rows
from flowbnn.posterior.forward import evaluating
from flowbnn.posterior.point import PointPosterior
from flowbnn.training import Clock, History, train
from flowbnn.training.randomness import loader_generators

__all__ = ["Aside", "Orders", "Stack", "member_seed", "own_order", "train_together", "why_apart"]


def member_seed(seed: int, member: int) -> int:
    """The seed of one member's initialization and order."""
    return (seed * 1_000_003 + member) % 2**32


@contextmanager
def own_order(loader: Any, seed: int) -> Iterator[None]:
    """Generators that the loader brings are seeded for a member; the orders of its own come back afterwards."""
    generators = loader_generators(loader)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Aside:
    """A loader of held-out data whose passes leave the order of the training data alone."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("loader"), name)  # which is not there yet while this is copied

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with undisturbed(self.loader):
            yield from self.loader


class Orders:
    """A loader that gives each of several members a batch of its own, stacked on the second axis: ``[rows, members, ...]``.

    Each member draws from generators of its own, seeded as a training of this member alone is.

    Args:
        loader: gone through once for each member.
        seeds: one for each member.
    """

    def __init__(self, loader: Any, seeds: list[int]) -> None:
        self.loader, self.seeds = loader, seeds
        self.places = [torch.default_generator, *loader_generators(loader)]
        self.streams = [
            [torch.Generator(place.device).manual_seed(seed) for place in self.places] for seed in seeds
        ]

    @property
    def generators(self) -> list[torch.Generator]:
        """All generators, to be kept in checkpoints."""
        return [generator for stream in self.streams for generator in stream]

    @property
    def sampler(self) -> Any:
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    @contextmanager
    def _drawing(self, member: int) -> Iterator[None]:
        before = [place.get_state() for place in self.places]
        for place, own in zip(self.places, self.streams[member], strict=True):
            place.set_state(own.get_state())
        try:
            yield
        finally:
            for place, own, state in zip(self.places, self.streams[member], before, strict=True):
                own.set_state(place.get_state())
                place.set_state(state)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        passes = []
        for member in range(len(self.seeds)):
            with self._drawing(member):
                passes.append(iter(self.loader))
        while True:
            batches = []
            for member, batch in enumerate(passes):
                with self._drawing(member):
                    batches.append(next(batch, None))
            if all(batch is None for batch in batches):
                return
            parts = None
            if all(batch is not None for batch in batches):
                with suppress(RuntimeError):  # batches of different shapes do not stack
                    parts = tuple(stacked([split_batch(batch)[part] for batch in batches]) for part in (0, 1))
            if parts is None:
                raise FlowBNNError(
                    "this loader gives batches of other shapes, or more of them, in one pass than in another, so members cannot be "
                    "trained together; say together=False"
                )
            yield parts


def stacked(parts: list[Any]) -> Any:
    """Batches of one shape side by side on a second axis."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack(parts, 1)
    if isinstance(first, Mapping):
        return {name: stacked([part[name] for part in parts]) for name in first}
    return tuple(stacked(list(column)) for column in zip(*parts, strict=True))


# optimizers that treat every weight by itself
ELEMENTWISE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop")


class LogLikelihood(nn.Module):
    """The mean log-likelihood of a batch, of one network."""

    def __init__(self, network: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.network, self.likelihood = network, likelihood

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        return self.likelihood.log_prob(call(self.network, inputs), targets).mean()


class Stack(nn.Module):
    """Networks of one architecture with their likelihoods as one module, whose parameters and buffers are ``[members, ...]``."""

    def __init__(self, networks: list[nn.Module], likelihoods: list[Likelihood]) -> None:
        super().__init__()
        self.members = [LogLikelihood(*pair) for pair in zip(networks, likelihoods, strict=True)]
        self.alike = [deepcopy(self.members[0])]  # in a list: its own weights are no part of this module
        parts = [(dict(one.named_parameters()), dict(one.named_buffers())) for one in self.members]
        self.names = {name.replace(".", "/"): name for name in (*parts[0][0], *parts[0][1])}
        for key, name in self.names.items():
            if name in parts[0][0]:
                values = torch.stack([parameters[name].detach() for parameters, _ in parts])
                self.register_parameter(key, nn.Parameter(values, parts[0][0][name].requires_grad))
            else:
                self.register_buffer(key, torch.stack([buffers[name] for _, buffers in parts]))

    def _apply(self, fn: Any, recurse: Any = True) -> "Stack":
        self.alike[0]._apply(fn, recurse)  # constants that are neither parameter nor buffer follow the device
        return super()._apply(fn, recurse)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers by their names in a member."""
        return (
            {self.names[key]: value for key, value in self.named_parameters()},
            {self.names[key]: value for key, value in self.named_buffers()},
        )

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        """The mean log-likelihood of each member on its own batch, ``[members]``; the second axis is the members'."""
        if self.alike[0].training != self.training:  # the flag is set from outside, where alike is not seen
            self.alike[0].train(self.training)

        def one(parameters: Any, buffers: Any, some: Any, truth: Tensor) -> Tensor:
            return functional_call(self.alike[0], (parameters, buffers), (some, truth))

        return vmap(one, in_dims=(0, 0, 1, 1), randomness="different")(*self.state(), inputs, targets)

    @torch.no_grad()
    def unstack(self) -> None:
        """Give the members the weights that they have here."""
        parameters, buffers = self.state()
        values = parameters | buffers
        for index, member in enumerate(self.members):
            for name, own in (*member.named_parameters(), *member.named_buffers()):
                own.data = values[name][index].detach().clone()


class Together(nn.Module):
    """The networks of an ensemble and the sum of their losses."""

    def __init__(self, stack: Stack, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.stack, self.loss = stack, loss

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(self.stack, batch, clock)


def why_apart(
    network: nn.Module,
    likelihood: Likelihood,
    inputs: Any,
    targets: Any,
    loader: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    run: FitOptions,
) -> str | None:
    """Why members cannot be trained together, or None: two of them try one step on this batch."""
    if run.devices not in (1, "1", "auto") or run.num_nodes != 1:
        return "training together is for one device"
    if getattr(loader, "num_workers", 0):
        return "the loader has worker processes, which serve one pass at a time"
    if run.clip_gradient is not None or run.early_stop is not None:
        return "gradients are clipped, or training stops early, for each member alone"
    if optimizer is not None:
        made = optimizer([{"params": [nn.Parameter(torch.zeros(1))], "lr": 1e-3, "weight_decay": 0.0}])
        if not isinstance(made, tuple(getattr(torch.optim, name) for name in ELEMENTWISE)):
            return f"{type(made).__name__} may not treat every weight by itself"
    try:
        stack = Stack([deepcopy(network) for _ in range(2)], [deepcopy(likelihood) for _ in range(2)]).train()
        pairs = [apply(part, lambda tensor: torch.stack([tensor, tensor], 1)) for part in (inputs, targets)]
        with torch.random.fork_rng([device_of(network)] if device_of(network).type == "cuda" else []):
            stack(*pairs).sum().backward()
    except Exception as error:
        return f"this network does not stack ({str(error).strip().splitlines()[0][:150]})"
    return None


def train_together(
    networks: list[nn.Module],
    likelihoods: list[Likelihood],
    loader: Iterable[Any],
    seeds: list[int],
    run: FitOptions,
    first: int = 0,
    *,
    lr: float,
    weight_decay: float,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    schedule: Schedule | None,
) -> History:
    """Train the networks in place, each with its own order of the data; numbers of member ``m`` are recorded as ``name/m``."""
    stack, orders = Stack(networks, likelihoods), Orders(loader, seeds)
    parameters = [(name, p) for name, p in stack.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in parameters if name.startswith(part)], "lr": lr, "weight_decay": decay}
        for part, decay in (("network/", weight_decay), ("likelihood/", 0.0))
    ]
    engine = optimizer_for(groups, optimizer)
    pairs = zip(networks, likelihoods, strict=True)
    validators = [validator(PointPosterior(*pair), run.validation, 1) for pair in pairs]
    shape: list[Any] = []

    def loss(each_of: Callable[[Any, Tensor], Tensor], batch: Any, clock: Clock) -> Logged:
        inputs, targets = batch
        inputs = move(inputs, device_of(stack), dtype_of(stack))
        if clock.epoch == 0 or targets.device.type == "cpu":
            _check(stack, shape, inputs, targets)
        each = each_of(inputs, targets)
        detached = each.detach()
        logs = {"log_likelihood": detached.mean()}
        for member, value in enumerate(detached, first):
            logs |= {f"loss/{member}": -value, f"log_likelihood/{member}": value}
        return -each.sum(), logs

    def validate(_: nn.Module) -> dict[str, float]:
        stack.unstack()
        records: dict[str, float] = {}
        for member, (network, evaluated) in enumerate(zip(networks, validators, strict=True), first):
            for name, value in evaluated(network).items() if evaluated else ():
                records[f"{name}/{member}"] = value
                records[name] = records.get(name, 0.0) + value / len(networks)
        return records

    history = train(
        Together(stack, loss),
        engine,
        orders,
        run,
        schedule=scheduled(schedule, engine, loader, run.epochs),
        validate=validate if all(validators) else None,
        generators=orders.generators,
        names_below="stack",
    )
    stack.unstack()
    for record in history.records:
        record["loss"] /= len(networks)
    return history


def _check(stack: Stack, shape: list[Any], inputs: Any, targets: Tensor) -> None:
    """Do the targets of every member fit what the network gives?"""
    likelihood = stack.members[0].likelihood
    if not shape:
        alike = stack.alike[0].network
        with evaluating(alike):
            shape.append(call(alike, apply(inputs, lambda tensor: tensor[:1, 0])))
    like = shape[0].expand(rows(inputs), *shape[0].shape[1:])
    for member in range(targets.shape[1]):
        likelihood.check(like, targets[:, member])
