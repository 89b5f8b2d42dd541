r"""Deep ensembles (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474).

Several networks are trained, each from its own initialization and with its own order of the data. Each member is a maximum a
posteriori fit. The predictive is their mixture, :math:`\frac1M \sum_m p(y \mid x, \hat w_m)`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.errors import quote_names, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.network_layers import reset_parameters
from flowbnn.networks import deepcopy_network
from flowbnn.options import Count, SampleCount, accepts_options_of, options
from flowbnn.posterior.weights import MemberPosterior, PointPosterior, state_of
from flowbnn.regression import SCALE, set_output_scale
from flowbnn.training import History, is_main_process, track
from flowbnn.training.randomness import loader_generators, preserve_rng_state, temporary_seed


@register_method
@options(repr=False)
class DeepEnsemble(Method):
    """Several networks of one architecture, each with its own initialization and order of the data.

    ``checkpoint`` is a folder with one file per member. With ``resume=True`` finished members are not trained again, and an interrupted
    one continues. A larger ensemble may be resumed from a smaller one.

    The history has means over members by name, and the values of member ``m`` as ``name/m``.

    Args:
        members: Number of networks.
        initialize: Function that initializes a copy of the network in place, with torch's generator seeded for the member. By
            default ``reset_parameters`` of all layers, except frozen ones (``requires_grad=False``). ``lambda network: None`` starts
            all members from the weights of the network.
        prior_scale: Standard deviation of the Gaussian prior of each member, as in :class:`~flowbnn.MAP`.
        epochs: Number of epochs of each member, at least 1. By default, each member ends at a plateau on its own held-out tenth of the
            data, so that all data are used.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = DeepEnsemble(3, epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior, posterior.predict(torch.zeros(1, 2)).num_samples
    (EnsemblePosterior(3 networks of Linear, Categorical()), 3)
    """

    members: SampleCount = 5
    epochs: Count | None = field(default=None, kw_only=True)
    initialize: Callable[[nn.Module], Any] | None = field(default=None, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "EnsemblePosterior":
        """Fits all members, one after the other; see :meth:`Method.fit`."""
        model, loader, options = self.setup(network, loader, kwargs)
        seed = options.resolve_seed()
        points: list[PointPosterior] = []
        visible = options.progress and is_main_process()
        for index in track(range(self.members), "ensemble", visible, "member", keep=True):
            member_seed = (seed * 1_000_003 + index) % 2**32
            member = self._initialized_copy(model, member_seed, warns=index == 0)
            description = f"member {index + 1}/{self.members}"
            member_options = options.for_stage(f"member-{index}", description, seed=member_seed)
            with preserve_rng_state(loader):
                for generator in loader_generators(loader):
                    generator.manual_seed(member_seed)
                points.append(self.fit_point(member, loader, member_options, fold=index % 5))
        return EnsemblePosterior.from_points(points, _merge_histories([point.history for point in points]))

    def _initialized_copy(self, model: nn.Module, seed: int, warns: bool) -> nn.Module:
        """Returns a copy of the network with a new initialization; the state of torch's generator is preserved."""
        network = deepcopy_network(model)
        with temporary_seed(seed):
            if self.initialize is not None:
                self.initialize(network)
                return network
            unchanged = reset_parameters(network)
        if unchanged and warns:
            text = f"reset_parameters() leaves {quote_names(unchanged, 3)} unchanged, so all members start alike there; set initialize="
            warn(text, kind="start", layers=unchanged)
        return network


def _merge_histories(histories: list[History]) -> History:
    """Returns the means over members and the values of each member, for every epoch."""
    records = []
    for epoch in range(max(history.epochs for history in histories)):
        members = {m: history.records[epoch] for m, history in enumerate(histories) if epoch < history.epochs}
        record = dict(next(iter(members.values())))
        for name in [name for name in record if name != "learning_rate"]:
            record[name] = sum(values[name] for values in members.values()) / len(members)
            record |= {f"{name}/{member}": values[name] for member, values in members.items()}
        records.append(record)
    steps, seconds = sum(h.steps for h in histories), sum(h.seconds for h in histories)
    return History(records, steps, seconds, any(h.stopped_early for h in histories))


class EnsemblePosterior(MemberPosterior):
    """Equally weighted mixture of networks that were trained independently."""

    kind: ClassVar[str] = "ensemble"

    @classmethod
    def from_points(
        cls, points: Sequence[PointPosterior], history: History | None = None
    ) -> "EnsemblePosterior":
        """Builds an ensemble from trained networks.

        If one network has a scale of its targets (:mod:`flowbnn.regression`), the others get a scale of one.

        >>> import flowbnn as fb
        >>> points = [PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical()) for _ in range(2)]
        >>> EnsemblePosterior.from_points(points)
        EnsemblePosterior(2 networks of Linear, Categorical())
        """
        scales = [point.model.get_buffer(SCALE) for point in points if SCALE in point.model._buffers]
        for point in points if scales else ():
            if SCALE not in point.model._buffers:
                set_output_scale(point.model, torch.zeros_like(scales[0]), torch.ones_like(scales[0]))
        states = [state_of(point.model) for point in points]
        log_noise = [
            point.likelihood.log_scale.detach() for point in points if learns_noise(point.likelihood)
        ]
        likelihood = deepcopy(points[0].likelihood)
        # other parameters of a likelihood, such as the noise scales of its heads, are averaged
        with torch.no_grad():
            for parameter, *values in zip(
                likelihood.parameters(), *(point.likelihood.parameters() for point in points), strict=True
            ):
                parameter.copy_(torch.stack(values).mean(0))
        return cls.from_states(
            deepcopy_network(points[0].model).eval(),
            likelihood,
            states,
            history,
            log_noise=torch.stack(log_noise) if log_noise else None,
        )
