r"""Node noise: every layer multiplies its input by noise, whose posterior is fitted by the ELBO.

.. math:: h_{l+1} = f_l(z_l \circ h_l), \qquad z_l \sim q(z_l), \qquad p(z_l) = \mathcal N(1, \sigma^2)

Mixtures of Gaussians are those of Trinh, Kaski and Heinonen 2020 (https://arxiv.org/abs/2010.13498), flows those of Xiong's report
"Normalizing Flows for Implicit Bayesian Neural Networks".
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from typing import Any, Literal

from torch import nn

from flowbnn.convert import to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import SchedulerFactory
from flowbnn.methods.variational.base import FLOWS, FlowName, Variational
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_noise
from flowbnn.noise import NormalAffine, Recipe
from flowbnn.options import Count, NonNegative, Positive, accepts_options_of, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.training.randomness import temporary_seed

SHARED = ("site", "side", "prior_scale", "base_scale", "joint")  # settings of every recipe


@register_method
@options(repr=False)
class NodeNoise(Variational):
    r"""Every layer multiplies its input by noise whose posterior is fitted by the ELBO: this library's own method.

    Args:
        kind: ``"gaussian"``, ``"joint"`` (a Gaussian over all layers' noise with a full covariance), ``"mixture"`` (Trinh et al. 2020),
            or a flow after a Gaussian: ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"coupling"``, ``"invconv"``, ``"glow"``; a flow of :mod:`flowbnn.flows` that draws cheaply, ``"nsf"``,
            ``"iaf"``, ``"realnvp"``, ``"nice"``, ``"naf"``, ``"flowpp"``, ``"householder"``, ``"residualflow"``; or a recipe, for all
            layers; or rules as :func:`~flowbnn.to_stochastic` takes them.
        components: of the mixture. This, and ``site``, ``side``, ``joint``, ``base_scale`` and ``prior_scale``, are for noise by its
            name; a recipe has them itself.
        site: ``"channel"`` or ``"position"``.
        side: ``"input"``, or ``"output"``: the noise multiplies what linear layers and convolutions give (Trinh et al. 2022,
            https://arxiv.org/abs/2206.02435, use it against corrupted inputs, with ``gamma`` above 0).
        joint: one posterior over the noise of all layers, as in :func:`~flowbnn.to_stochastic`; a flow then acts on all of it.
        base_scale: standard deviation of the noise at the start.
        noise_lr, schedule, beta, gamma, warmup, samples: as in :func:`~flowbnn.fit`.
        prior_scale: standard deviation of the prior of the noise, which is around one.
    """

    kind: FlowName | Literal["joint", "mixture"] | Recipe | Mapping[Any, Recipe | None] = "gaussian"
    components: Count = field(default=16, kw_only=True)
    site: Literal["channel", "position"] = field(default="channel", kw_only=True)
    side: Literal["input", "output"] = field(default="input", kw_only=True)
    joint: Literal["full", "chain", "low-rank", "layers"] | None = field(default=None, kw_only=True)
    base_scale: Positive = field(default=0.1, kw_only=True)
    noise_lr: Positive | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    schedule: SchedulerFactory | Literal["cosine"] | None = field(default="cosine", kw_only=True)  # type: ignore[assignment]
    gamma: NonNegative = field(default=0.0, kw_only=True)
    prior_scale: Positive = field(default=0.5, kw_only=True)

    __hash__ = object.__hash__  # rules may be a dictionary

    def __post_init__(self) -> None:
        own = (f for f in fields(self) if f.name in (*SHARED, "components"))
        changed = next((f.name for f in own if getattr(self, f.name) != f.default), None)
        if not isinstance(self.kind, str) and changed is not None:
            raise FlowBNNError(f"give {changed} to the recipe, which has a setting for it", argument=changed)

    def rules(self) -> Mapping[Any, Recipe | None]:
        """What :func:`~flowbnn.to_stochastic` is given."""
        if isinstance(self.kind, Mapping):
            return self.kind
        if isinstance(self.kind, Recipe):
            return {"*": self.kind}
        common = {name: getattr(self, name) for name in SHARED}
        if self.kind == "joint":
            return {"*": NormalAffine(**{**common, "joint": self.joint or "full"})}
        if self.kind == "mixture":
            return {"*": NormalAffine(components=self.components, **common)}
        return {"*": FLOWS[self.kind](**common)}

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "NoisePosterior":
        """As :meth:`Method.fit`; weights and noise are trained together."""
        model, run = self.setup(network, loader, given)
        with temporary_seed(run.seed):
            noisy = to_stochastic(model, self.rules(), inplace=True)
        same = ("epochs", "noise_lr", "beta", "gamma", "warmup", "samples", "optimizer", "schedule")
        settings = {name: getattr(self, name) for name in same}
        return fit_noise(noisy, loader, NoiseFitOptions(weight_lr=self.lr, **settings, **given))
