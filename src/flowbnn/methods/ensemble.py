r"""Deep ensembles (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474).

Several networks are trained, each from an initialization of its own and in its own order of the data.

Each member is a maximum a posteriori fit; the predictive is their mixture, :math:`\frac1M \sum_m p(y \mid x, \hat w_m)`.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Gaussian, Likelihood, log_variance
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.ensemble_vmap import Aside, member_seed, own_order, train_together, why_apart
from flowbnn.methods.fitting import first_batch, fit_point, prepare
from flowbnn.options import Count, options, takes
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.batches import move
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import MemberPosterior, check_members
from flowbnn.training import History

__all__ = ["DeepEnsemble", "EnsemblePosterior", "initialize_anew"]


@register_method
@options(repr=False)
class DeepEnsemble(Method):
    """Several networks of one architecture, each with its own initialization and order of the data.

    Args:
        members: how many.
        together: ``True`` stacks the weights of all members and trains them in one pass (``torch.func``), ``False`` trains one
            after the other, ``"auto"`` stacks where the network, the loader, the optimizer and the options of the run allow it.
            Both give the same members but for rounding; with dropout, other draws of it.
        initialize: gives a copy of the network its start, in place, with torch's generator seeded for the member; unless given,
            ``reset_parameters`` of all its layers, what is frozen (``requires_grad=False``) excepted. ``lambda network: None`` lets
            all start from the given weights.
        prior_scale: of each member's Gaussian prior, as in :class:`~flowbnn.MAP`.
        epochs: of each member, at least 1.

    ``checkpoint`` names a folder, in which each member (or those that are trained together) has a file; with ``resume=True`` members
    that are done are not trained again, and one that was interrupted goes on. A larger ensemble may be resumed from a smaller one.

    The history has means over members by name, and those of member ``m`` as ``name/m``.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = DeepEnsemble(3, epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior, posterior.predict(torch.zeros(1, 2)).num_samples
    (EnsemblePosterior(3 networks of Linear, Categorical()), 3)
    """

    members: Count = 5
    epochs: Count = field(default=20, kw_only=True)
    together: bool | Literal["auto"] = field(default="auto", kw_only=True)
    initialize: Callable[[nn.Module], Any] | None = field(default=None, kw_only=True)

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "EnsemblePosterior":
        """As :meth:`Method.fit`."""
        plain, run = self.setup(network, loader, given)
        seed = int(torch.randint(2**31 - 1, ())) if run.seed is None else run.seed
        likelihood, _, _ = prepare(plain, loader, run.likelihood, seed)
        folder = None if run.checkpoint is None else Path(run.checkpoint)
        if hasattr(run.validation, "__iter__") and run.devices in (1, "1"):
            run = replace(run, validation=Aside(run.validation))
        settings: dict[str, Any] = {
            "lr": self.lr,
            "weight_decay": 1.0 / (self.prior_scale**2 * run.count(loader)),
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        apart = None
        if self.together is not False:
            inputs, targets = first_batch(loader, seed)
            device = device_of(plain)
            batch = (move(inputs, device, dtype_of(plain)), targets.to(device))
            apart = why_apart(plain, likelihood, *batch, loader, self.optimizer, run)
        reason, single = None, folder is not None and folder.suffix == ".safetensors"
        if single:
            reason = f"the checkpoint of an ensemble is a folder, with a file for each member, not '{folder}'"
        elif self.together is True and apart is not None:
            reason = f"members cannot be trained together: {apart}; say together=False"
        if reason is not None:
            raise FlowBNNError(reason, argument="checkpoint" if single else "together")
        stack = self.together is not False and apart is None
        points: list[PointPosterior] = []
        histories: list[History] = []
        for start, stop in _groups(self.members, stack, folder if run.resume else None):
            seeds = [member_seed(seed, member) for member in range(start, stop)]
            networks = [self._started(plain, one, warn=not points and one == seeds[0]) for one in seeds]
            group = _options_of(run, folder, start, stop, self.members, seeds[0])
            if stop == start + 1:
                with own_order(loader, seeds[0]):
                    point = fit_point(networks[0], loader, group, **settings)
                points.append(point)
                histories.append(_numbered(point.history, start))
                continue
            likelihoods = []
            for member, one in zip(networks, seeds, strict=True):
                with own_order(loader, one):
                    likelihoods.append(prepare(member, loader, run.likelihood, one)[0])
            histories.append(train_together(networks, likelihoods, loader, seeds, group, start, **settings))
            points += [PointPosterior(*pair) for pair in zip(networks, likelihoods, strict=True)]
        return EnsemblePosterior.from_points(points, _joined(histories, self.members))

    def _started(self, plain: nn.Module, seed: int, warn: bool) -> nn.Module:
        """A copy of the network at a start of its own; torch's generator is left as it was."""
        network = deepcopy(plain)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            if self.initialize is not None:
                self.initialize(network)
                return network
            left = initialize_anew(network)
        if left and warn:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            warnings.warn(
                f"no reset_parameters() gives {', '.join(repr(name) for name in left[:3])}{more} a new start, so all members begin "
                "with the given values there; say initialize= to start them yourself",
                FlowBNNWarning,
                stacklevel=4,
            )
        return network


def initialize_anew(network: nn.Module) -> list[str]:
    """Call ``reset_parameters`` of every layer that has it; returns the weights that are still what they were, constant ones aside.

    What is frozen (``requires_grad=False``) stays as it is, with the buffers of layers of which all is frozen.

    >>> initialize_anew(nn.Linear(2, 2))
    []
    """
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    with torch.no_grad():
        for value in network.parameters():
            value.add_(0.125)  # what still has this afterwards was not given a start
    marked = {name: value.detach().clone() for name, value in network.named_parameters()}
    held = [
        (buffer, buffer.clone())
        for module in network.modules()
        if (own := list(module.parameters())) and not any(value.requires_grad for value in own)
        for buffer in module.buffers()
    ]
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
    left = [name for name, value in network.named_parameters() if torch.equal(value, marked[name])]
    frozen = {name for name, value in network.named_parameters() if not value.requires_grad}
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name in left or name in frozen:
                value.copy_(before[name])
        for buffer, kept in held:
            buffer.copy_(kept)
    return [
        name
        for name in left
        if name not in frozen and bool((before[name] != before[name].flatten()[0]).any())
    ]


def _options_of(
    run: FitOptions, folder: Path | None, start: int, stop: int, members: int, seed: int
) -> FitOptions:
    """The options of the run of these members, with files of their own."""
    name = f"member-{start}" if stop == start + 1 else f"members-{start}-{stop - 1}"
    return replace(
        run,
        seed=seed,
        description=f"member {start + 1}" + (f" to {stop}" if stop > start + 1 else "") + f" of {members}",
        checkpoint=None if folder is None else folder / f"{name}.safetensors",
        tensorboard=None if run.tensorboard is None else Path(run.tensorboard) / name,
    )


def _groups(members: int, stack: bool, folder: Path | None) -> list[tuple[int, int]]:
    """Which members are trained together, as ``(first, last + 1)``; those that a folder holds stay as they are."""
    groups: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    for path in [] if folder is None else folder.glob("member*-*.safetensors"):
        match = re.fullmatch(r"members?-(\d+)(?:-(\d+))?", path.stem)
        if match:
            held[int(match[1])] = max(held.get(int(match[1]), 0), int(match[2] or match[1]) + 1)
    done = 0
    while done in held and done < members:
        if held[done] > members:
            raise FlowBNNError(
                f"'{folder}' holds {held[done] - done} members that are trained together, and {members - done} are asked for: "
                f"ask for {held[done]}, or begin anew with resume=False"
            )
        groups.append((done, held[done]))
        done = held[done]
    if stack and done < members:
        return [*groups, (done, members)]
    return groups + [(member, member + 1) for member in range(done, members)]


def _numbered(history: History, member: int) -> History:
    """The record of one member, with its numbers by its own name too."""
    records = [
        record | {f"{name}/{member}": value for name, value in record.items() if name != "learning_rate"}
        for record in history.records
    ]
    return History(records, history.steps, history.seconds, history.stopped_early)


def _joined(histories: list[History], members: int) -> History:
    """Epoch by epoch: means over the members, and the numbers of each."""
    if len(histories) == 1 and members == 1:
        return histories[0]
    records: list[dict[str, float]] = []
    for epoch in range(max(history.epochs for history in histories)):
        each = {k: v for h in histories if epoch < h.epochs for k, v in h.records[epoch].items() if "/" in k}
        means: dict[str, list[float]] = {}
        for name, value in each.items():
            means.setdefault(name.rpartition("/")[0], []).append(value)
        rate = next(h.records[epoch]["learning_rate"] for h in histories if epoch < h.epochs)
        mean = {name: sum(values) / len(values) for name, values in means.items()}
        records.append({**mean, "learning_rate": rate, **each})
    return History(
        records,
        sum(history.steps for history in histories),
        sum(history.seconds for history in histories),
        any(history.stopped_early for history in histories),
    )


NOISE = "noise of the members"  # no weight has spaces in its name


class EnsemblePosterior(MemberPosterior):
    r"""Networks that were trained apart and count alike.

    Where each member has learned its own noise :math:`\sigma_m`, the predictive is the mixture
    :math:`\frac1M \sum_m \mathcal N(f_m(x), \sigma_m^2)`; ``likelihood`` then holds the noise of the mean
    variance, and :meth:`likelihood_of` that of a member.

    Args:
        model, likelihood, members, history: as in :class:`MemberPosterior`.
        log_scales: logarithms of the members' own noise ``[M, D]``, where it is learned.
    """

    kind: ClassVar[str] = "ensemble"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        log_scales: Tensor | None = None,
    ) -> None:
        super().__init__(model, likelihood, members, history)
        self.log_scales = log_scales

    @classmethod
    def from_points(
        cls, points: Sequence[PointPosterior], history: History | None = None
    ) -> "EnsemblePosterior":
        """From one trained network for each member."""
        states = [dict(one.model.named_parameters()) | dict(one.model.named_buffers()) for one in points]
        members = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
        likelihood, log_scales = deepcopy(points[0].likelihood), None
        if isinstance(likelihood, Gaussian) and likelihood.noise == "learned":
            own = [dict(one.likelihood.named_parameters())["log_scale"] for one in points]
            log_scales = torch.stack([scale.detach() for scale in own])
            with torch.no_grad():
                likelihood.log_scale.copy_((2.0 * log_scales).exp().mean(0).log() / 2.0)
        model = deepcopy(points[0].model).eval()
        return cls(model, likelihood, members, history, log_scales)

    def likelihood_of(self, index: int) -> Likelihood:
        """The likelihood of the member of this number."""
        likelihood = deepcopy(self.likelihood)
        if self.log_scales is not None and isinstance(likelihood, Gaussian):
            likelihood.log_scale.data = self.log_scales[index].clone()
        return likelihood

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs of one member after the other, with the log-variance of each one's noise beside them where it has its own."""
        means = super().outputs(inputs, samples, prediction)
        if self.log_scales is None:
            return means
        taken = torch.tensor([self.chosen(index, prediction.samples) for index in samples])
        noise = log_variance(self.log_scales[taken.to(self.log_scales.device)])
        return torch.cat([means, noise.to(means).unsqueeze(1).expand_as(means)], -1)

    def _predictive(self, outputs: Tensor, spent: Tensor | None = None) -> Any:
        if self.log_scales is None:
            return super()._predictive(outputs, spent)
        known = Gaussian("predicted")  # the noise comes with the outputs
        if spent is None:
            return known.predictive(outputs)
        return known.predictive(outputs[: int(spent.max())], spent.to(outputs.device))

    def state(self) -> dict[str, Tensor]:
        return self.members if self.log_scales is None else {**self.members, NOISE: self.log_scales}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        state = dict(state)
        log_scales = state.pop(NOISE, None)
        check_members(point.model, state)
        return cls(point.model, point.likelihood, state, point.history, log_scales)
