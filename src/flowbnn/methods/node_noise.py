r"""Node noise: every layer multiplies its input by noise, whose posterior is fitted by the ELBO.

.. math:: h_{l+1} = f_l(z_l \circ h_l), \qquad z_l \sim q(z_l), \qquad p(z_l) = \mathcal N(1, \sigma^2)

Mixtures of Gaussians follow Trinh, Kaski and Heinonen 2020 (https://arxiv.org/abs/2010.13498). Flows follow Xiong's report
"Normalizing Flows for Implicit Bayesian Neural Networks".
"""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal

from torch import nn

from flowbnn.convert import to_stochastic
from flowbnn.methods.base import FitOptions, misplaced_setting, register_method
from flowbnn.methods.schedule import WEIGHT_SCHEDULE, PlateauSchedule, SchedulerFactory
from flowbnn.methods.variational.base import FLOWS, FlowName, Variational
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_unverified
from flowbnn.noise import NormalAffine, Recipe
from flowbnn.options import Count, NonNegative, Positive, accepts_options_of, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.training.randomness import temporary_seed


@register_method
@options(repr=False)
class NodeNoise(Variational):
    r"""Node noise: every layer multiplies its input by noise whose posterior is fitted by the ELBO.

    Args:
        kind: Noise of all layers, by name: ``"gaussian"``; ``"joint"``, a Gaussian over the noise of all layers with a full covariance;
            ``"mixture"`` (Trinh et al. 2020); or a flow on a Gaussian: ``"planar"``, ``"radial"``, ``"sylvester"``, ``"coupling"``,
            ``"invconv"``, ``"glow"``, ``"nsf"``, ``"iaf"``, ``"realnvp"``, ``"nice"``, ``"naf"``, ``"flowpp"``, ``"householder"`` or
            ``"residualflow"``. A recipe is used for all layers. Rules are passed to :func:`~flowbnn.to_stochastic`.
        components: Number of components of the mixture. This setting and ``site``, ``side``, ``joint``, ``base_scale`` and
            ``prior_scale`` apply to noise by name. A recipe has its own settings.
        site: ``"channel"`` for one noise vector per feature map, ``"position"`` for one at every position.
        side: ``"input"`` or ``"output"`` of the layers. Trinh et al. 2022 (https://arxiv.org/abs/2206.02435) use outputs and ``gamma``
            above 0 against corrupted inputs.
        joint: Structure of one posterior over the noise of all layers, as in :func:`~flowbnn.to_stochastic`. A flow then acts on the
            joint vector. None gives every layer its own posterior.
        base_scale: Initial standard deviation of the noise.
        noise_lr: Learning rate of the noise, as in :func:`~flowbnn.fit`.
        schedule: Learning-rate schedule, as in :func:`~flowbnn.fit`.
        gamma: Weight of the entropy.
        prior_scale: Standard deviation of the prior of the noise, whose mean is one.

    >>> import torch
    >>> loader = [(torch.randn(64, 2), torch.arange(64) % 3)]
    >>> NodeNoise("planar", epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    NoisePosterior(Linear, 1 layer with noise, Categorical(), 2 epochs)
    """

    kind: FlowName | Literal["joint", "mixture"] | Recipe | Mapping[Any, Recipe | None] = "gaussian"
    components: Count = field(default=16, kw_only=True)
    site: Literal["channel", "position"] = field(default="channel", kw_only=True)
    side: Literal["input", "output"] = field(default="input", kw_only=True)
    joint: Literal["full", "chain", "low-rank", "layers"] | None = field(default=None, kw_only=True)
    base_scale: Positive = field(default=0.1, kw_only=True)
    noise_lr: Positive | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    schedule: SchedulerFactory | PlateauSchedule | Literal["cosine"] | None = field(  # type: ignore[assignment]
        default="cosine", kw_only=True
    )
    gamma: NonNegative = field(default=0.0, kw_only=True)
    prior_scale: Positive = field(default=0.5, kw_only=True)

    __hash__ = object.__hash__  # rules may be a dictionary

    def __post_init__(self) -> None:
        settings = (f for f in fields(self) if f.name in (*self._recipe_settings(), "components"))
        changed = next((f.name for f in settings if getattr(self, f.name) != f.default), None)
        if not isinstance(self.kind, str) and changed is not None:
            owner = type(self.kind).__name__ if isinstance(self.kind, Recipe) else "Recipe"
            raise misplaced_setting(changed, owner, getattr(self, changed))

    def _recipe_settings(self) -> dict[str, Any]:
        """Returns the settings that all recipes have."""
        return {name: getattr(self, name) for name in ("site", "side", "prior_scale", "base_scale", "joint")}

    def rules(self) -> Mapping[Any, Recipe | None]:
        """Returns the rules for :func:`~flowbnn.to_stochastic`."""
        if isinstance(self.kind, Mapping):
            return self.kind
        if isinstance(self.kind, Recipe):
            return {"*": self.kind}
        common = self._recipe_settings()
        if self.kind == "joint":
            return {"*": NormalAffine(**{**common, "joint": self.joint or "full"})}
        if self.kind == "mixture":
            return {"*": NormalAffine(components=self.components, **common)}
        return {"*": FLOWS[self.kind](**common)}

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> NoisePosterior:
        """Fits weights and noise together; see :meth:`Method.fit`."""
        model, loader, options = self.setup(network, loader, kwargs)
        with temporary_seed(options.seed):
            noisy = to_stochastic(model, self.rules(), inplace=True)
        names = ("epochs", "noise_lr", "beta", "gamma", "warmup", "repeats", "optimizer", "schedule")
        settings = {name: getattr(self, name) for name in names}
        if self.epochs is None and self.schedule == "cosine":
            settings["schedule"] = WEIGHT_SCHEDULE
        return fit_unverified(noisy, loader, NoiseFitOptions(weight_lr=self.lr, **settings, **kwargs))
