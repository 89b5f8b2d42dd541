r"""Deep ensembles (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474).

Several networks are trained, each from an initialization of its own and in its own order of the data.

Each member is a maximum a posteriori fit; the predictive is their mixture, :math:`\frac1M \sum_m p(y \mid x, \hat w_m)`.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import quote_names, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.options import Count, accepts_options_of, options
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import MemberPosterior, state_of
from flowbnn.regression import SCALE, set_output_scale
from flowbnn.training import History
from flowbnn.training.randomness import loader_generators, preserve_rng_state, temporary_seed


@register_method
@options(repr=False)
class DeepEnsemble(Method):
    """Several networks of one architecture, each with its own initialization and order of the data.

    Args:
        members: how many.
        initialize: gives a copy of the network its start, in place, with torch's generator temporary_seed for the member; unless given,
            ``reset_parameters`` of all its layers, what is frozen (``requires_grad=False``) excepted. ``lambda network: None`` lets
            all start from the given weights.
        prior_scale: of each member's Gaussian prior, as in :class:`~flowbnn.MAP`.
        epochs: of each member, at least 1.

    ``checkpoint`` names a folder, in which each member has a file; with ``resume=True`` members that are done are not trained again,
    and one that was interrupted goes on. A larger ensemble may be resumed from a smaller one.

    The history has means over members by name, and those of member ``m`` as ``name/m``.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = DeepEnsemble(3, epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior, posterior.predict(torch.zeros(1, 2)).num_samples
    (EnsemblePosterior(3 networks of Linear, Categorical()), 3)
    """

    members: Count = 5
    epochs: Count = field(default=20, kw_only=True)
    initialize: Callable[[nn.Module], Any] | None = field(default=None, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "EnsemblePosterior":
        """As :meth:`Method.fit`."""
        plain, run = self.setup(network, loader, given)
        seed = run.resolve_seed()
        points: list[PointPosterior] = []
        for index in range(self.members):
            own = (seed * 1_000_003 + index) % 2**32
            member = self._started(plain, own, tell=not points)
            part = run.for_stage(f"member-{index}", f"member {index + 1} of {self.members}", seed=own)
            with preserve_rng_state(loader):
                for generator in loader_generators(loader):
                    generator.manual_seed(own)
                points.append(self.start(member, loader, part))
        return EnsemblePosterior.from_points(points, _joined([point.history for point in points]))

    def _started(self, plain: nn.Module, seed: int, tell: bool) -> nn.Module:
        """A copy of the network at a start of its own; torch's generator is left as it was."""
        network = deepcopy(plain)
        with temporary_seed(seed):
            if self.initialize is not None:
                self.initialize(network)
                return network
            left = initialize_anew(network)
        if left and tell:
            warn(
                f"no reset_parameters() gives {quote_names(left, 3)} a new start, so all members begin with the given values there; "
                "say initialize= to start them yourself",
                kind="start",
                layers=left,
            )
        return network


def initialize_anew(network: nn.Module) -> list[str]:
    """Call ``reset_parameters`` of every layer that has it; returns the weights that are still what they were, constant ones aside.

    What is frozen (``requires_grad=False``) stays as it is, with the buffers of layers of which all is frozen.

    >>> initialize_anew(nn.Linear(2, 2))
    []
    """
    learned = {name: value for name, value in network.named_parameters() if value.requires_grad}
    given = {name: value.detach().clone() for name, value in learned.items()}
    frozen: list[Tensor] = [value for value in network.parameters() if not value.requires_grad]
    for module in network.modules():
        own = list(module.parameters())
        if own and not any(value.requires_grad for value in own):
            frozen += module.buffers()
    kept = [(value, value.detach().clone()) for value in frozen]
    with torch.no_grad():
        for value in learned.values():
            value.add_(0.125)  # what still has this afterwards was not given a start
        marked = {name: value.clone() for name, value in learned.items()}
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        left = [name for name, value in learned.items() if torch.equal(value, marked[name])]
        for name in left:
            learned[name].copy_(given[name])
        for tensor, former in kept:
            tensor.copy_(former)
    return [name for name in left if bool((given[name] != given[name].flatten()[0]).any())]


def _joined(histories: list[History]) -> History:
    """Epoch by epoch: means over the members, and the numbers of each."""
    records = []
    for epoch in range(max(history.epochs for history in histories)):
        there = {m: history.records[epoch] for m, history in enumerate(histories) if epoch < history.epochs}
        record = dict(next(iter(there.values())))
        for name in [name for name in record if name != "learning_rate"]:
            record[name] = sum(one[name] for one in there.values()) / len(there)
            record |= {f"{name}/{member}": one[name] for member, one in there.items()}
        records.append(record)
    steps, seconds = sum(one.steps for one in histories), sum(one.seconds for one in histories)
    return History(records, steps, seconds, any(one.stopped_early for one in histories))


class EnsemblePosterior(MemberPosterior):
    """Networks that were trained apart and count alike."""

    kind: ClassVar[str] = "ensemble"

    @classmethod
    def from_points(
        cls, points: Sequence[PointPosterior], history: History | None = None
    ) -> "EnsemblePosterior":
        """From one trained network for each member; where one has a scale of the targets (:mod:`flowbnn.regression`), all have."""
        known = [point.model.get_buffer(SCALE) for point in points if SCALE in point.model._buffers]
        for point in points if known else ():
            if SCALE not in point.model._buffers:
                set_output_scale(point.model, torch.zeros_like(known[0]), torch.ones_like(known[0]))
        states = [state_of(point.model) for point in points]
        levels = [point.likelihood.log_scale.detach() for point in points if learns_noise(point.likelihood)]
        return cls.from_states(
            deepcopy(points[0].model).eval(),
            deepcopy(points[0].likelihood),
            states,
            history,
            log_noise=torch.stack(levels) if levels else None,
        )
