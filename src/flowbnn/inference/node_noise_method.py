r"""Node noise as a method: every layer multiplies its input by noise, fitted by the ELBO.

Document 000, and Trinh et al. (2010.13498): ``q(z)`` is a Gaussian, a mixture of them, or a flow.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.convert import to_stochastic
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.inference.method import LikelihoodName, check_whole, register_method
from flowbnn.inference.node_noise import NoisePosterior, fit
from flowbnn.inference.variational import Variational
from flowbnn.layers import (
    NormalAffine,
    NormalCoupling,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
)

__all__ = ["NodeNoise"]

KINDS: dict[str, Callable[..., Recipe]] = {
    "gaussian": NormalAffine,
    "mixture": NormalAffine,
    "planar": NormalPlanar,
    "radial": NormalRadial,
    "sylvester": NormalSylvester,
    "coupling": NormalCoupling,
    "invconv": NormalInvConv,
    "glow": NormalGlow,
}


@register_method
@dataclass(frozen=True, repr=False)
class NodeNoise(Variational):
    r"""Every layer multiplies its input by noise whose posterior is fitted by the ELBO: this library's own method.

    Args:
        kind: ``"gaussian"``, ``"mixture"`` (Trinh et al. 2020), or a flow after a Gaussian: ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"coupling"``, ``"invconv"``, ``"glow"``; or a recipe, for all layers; or rules as
            :func:`~flowbnn.to_stochastic` takes them.
        components: of the mixture.
        site: ``"channel"`` or ``"position"``.
        base_scale: standard deviation of the noise at the start.
        noise_lr: learning rate of the noise.
        beta, gamma, warmup, samples: as in :func:`~flowbnn.fit`.
        prior_scale: standard deviation of the prior of the noise, which is around one.
    """

    name: ClassVar[str] = "node-noise"
    label: ClassVar[str] = "Node noise"

    kind: str | Recipe | Mapping[Any, Recipe | None] = "gaussian"
    components: int = field(default=16, kw_only=True)
    site: str = field(default="channel", kw_only=True)
    base_scale: float = field(default=0.5, kw_only=True)
    gamma: float = field(default=0.0, kw_only=True)
    prior_scale: float = field(default=0.5, kw_only=True)

    __hash__ = object.__hash__  # rules may be a dictionary

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("components", self.components)
        if isinstance(self.kind, str) and self.kind not in KINDS:
            raise FlowBNNError(f"there is no noise '{self.kind}'{nearest(self.kind, KINDS)}")
        if not isinstance(self.kind, str | Recipe | Mapping):
            raise FlowBNNError(
                f"kind is the name of a noise, a recipe such as fb.NormalPlanar(), or rules, not a {type(self.kind).__name__}"
            )

    def rules(self) -> Mapping[Any, Recipe | None]:
        """What :func:`~flowbnn.to_stochastic` is given."""
        if isinstance(self.kind, Mapping):
            return self.kind
        if isinstance(self.kind, Recipe):
            return {"*": self.kind}
        common: dict[str, Any] = {
            "site": self.site,
            "prior_scale": self.prior_scale,
            "base_scale": self.base_scale,
        }
        if self.kind == "mixture":
            common["components"] = self.components
        return {"*": KINDS[self.kind](**common)}

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> NoisePosterior:
        """As :meth:`Method.fit`; weights and noise are trained together."""
        seed = options.get("seed")
        with torch.random.fork_rng([], enabled=isinstance(seed, int)):
            if isinstance(seed, int):
                torch.default_generator.manual_seed(seed)
            noisy = to_stochastic(self.copied(network), self.rules(), inplace=True)
        return fit(
            noisy,
            loader,
            epochs=self.epochs,
            likelihood=likelihood,
            weight_lr=self.lr,
            noise_lr=self.noise_lr,
            beta=self.beta,
            gamma=self.gamma,
            warmup=self.warmup,
            samples=self.samples,
            num_data=self.count(loader, num_data),
            optimizer=self.optimizer,
            schedule=self.schedule,
            validation=validation,
            **options,
        )
