"""The networks of the studies on images, their variants, and the noise of each variant."""

from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.models import VGG16, LeNet
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn_studies.images.settings import SITES, Training
from flowbnn_studies.runner.study import Variant

__all__ = ["FLOWS", "METHODS", "image_variants", "make_network", "rules_for", "split_key"]

METHODS = {"gaussian": "Gaussian noise", "flow": "Flow noise", "mixture": "Mixture noise"}

# Where Xiong's report (section 4 and its code) puts its flows; the rest of the layers carry a learnable Gaussian.
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def make_network(architecture: str, channels: int, width: float = 1.0) -> nn.Module:
    """The plain network: ``"lenet"`` or ``"vgg16"``."""
    if architecture == "lenet":
        return LeNet(channels)
    return VGG16(channels, hidden=max(8, round(512 * width)), width=width)


def split_key(variant: str) -> tuple[str, str, str]:
    """Recipe, method and site of a variant's key.

    >>> split_key("best-flow-channel"), split_key("xiong-plain")
    (('best', 'flow', 'channel'), ('xiong', 'plain', ''))
    """
    recipe, method, *site = variant.split("-")
    return recipe, method, site[0] if site else ""


def rules_for(architecture: str, variant: str, training: Training) -> dict[Any, Recipe | None]:
    """The noise of a variant; empty for the plain network.

    >>> rules = rules_for("lenet", "xiong-flow-channel", Training())
    >>> print(*(f"{layer}: {recipe}" for layer, recipe in rules.items()), sep="; ")
    *: NormalAffine(); conv2: NormalInvConv(planar=2, convolutions=3); fc1: NormalPlanar(length=2)
    """
    _, method, site = split_key(variant)
    if method in ("plain", "longer"):
        return {}
    if method == "dropout":
        # whole channels before a convolution, single features before a linear layer, as is usual
        return {training.dropped: Dropout(rate=training.rate, site="channel")}
    if method not in METHODS or site not in SITES:
        raise FlowBNNError(f"there is no method '{variant}'; one is 'best-flow-channel'", argument="variant")
    common: dict[str, Any] = {
        "site": site,
        "prior_scale": training.prior_scale,
        "base_scale": training.base_scale,
        "positions": training.positions or "mean",
    }
    if method == "mixture":
        return {"*": NormalAffine(components=training.components, **common)}
    rules: dict[Any, Recipe | None] = {"*": NormalAffine(**common)}
    if method == "flow":
        convolutions, linear = FLOWS[architecture]
        rules |= {layer: NormalInvConv(**common) for layer in convolutions}
        rules |= {layer: NormalPlanar(2, **common) for layer in linear}
    return rules


def image_variants(name: str, seeds: tuple[int, int]) -> tuple[Variant, ...]:
    """What is trained: Xiong's recipe, then the best one, then the measurement of cost.

    Args:
        name: of the plain network, for the labels.
        seeds: how many for each of the two recipes.
    """
    cost = {
        (method, site): value * (2.0 if site == "position" else 1.0)
        for site in SITES
        for method, value in (("gaussian", 2.0), ("flow", 4.0), ("mixture", 3.0))
    }
    xiong, best = seeds
    start: dict[str, Any] = {"after": "xiong-plain", "seeds": xiong}
    variants = [
        Variant("xiong-plain", f"{name}, plain", cost=0.5, seeds=xiong),
        Variant("xiong-longer", f"{name}, plain, trained as long", **start),
        Variant("xiong-dropout", "Dropout", cost=1.2, **start),
        *(
            Variant(f"xiong-{m}-{s}", f"{METHODS[m]}, {s}", cost=value, **start)
            for (m, s), value in cost.items()
        ),
        Variant("best-plain", f"Best: {name}, plain", seeds=best),
        Variant("best-dropout", "Best: dropout", cost=1.2, seeds=best),
    ]
    words = {"gaussian": "Gaussian noise", "flow": "flow noise", "mixture": "mixture noise"}
    for (method, site), value in cost.items():
        label = f"Best: {words[method]}, {site}"
        variants.append(Variant(f"best-{method}-{site}", label, cost=value, seeds=best))
    return (*variants, Variant("cost", "Cost", shown=False, seeds=1, alone=True))
