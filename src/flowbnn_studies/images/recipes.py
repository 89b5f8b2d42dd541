"""The networks of the studies on images and the noise of each method in them."""

from typing import Any

from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.models import VGG16, LeNet
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn_studies.images.settings import Training
from flowbnn_studies.runner.base import Variant

__all__ = ["FLOWS", "METHODS", "image_variants", "make_network", "rules_for", "split_key"]

METHODS = {"gaussian": "Gaussian noise", "flow": "Flow noise", "mixture": "Mixture noise"}
SITES = ("position", "channel")

# Where document 000 puts its flows (section 4 and its code): the rest of the layers carry a learnable Gaussian.
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def make_network(architecture: str, channels: int, width: float = 1.0) -> nn.Module:
    """The plain network.

    >>> type(make_network("lenet", 1)).__name__
    'LeNet'
    """
    if architecture == "lenet":
        return LeNet(channels)
    return VGG16(channels, hidden=max(8, round(512 * width)), width=width)


def split_key(variant: str) -> tuple[str, str, str]:
    """Recipe, method and site of a variant's key.

    >>> split_key("best-flow-channel"), split_key("document-plain")
    (('best', 'flow', 'channel'), ('document', 'plain', ''))
    """
    recipe, method, *site = variant.split("-")
    return recipe, method, site[0] if site else ""


def rules_for(architecture: str, variant: str, training: Training) -> dict[Any, Recipe | None]:
    """The noise of a variant; empty for the plain network.

    >>> rules = rules_for("lenet", "document-flow-channel", Training())
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
        raise FlowBNNError(f"there is no method '{variant}'; one is 'best-flow-channel'")
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
    """What is trained: document 000's recipe, then the best one, then the measurement of cost.

    Args:
        name: of the plain network, for the labels.
        seeds: how many for each of the two recipes.
    """
    document, best = seeds
    found = [
        Variant("document-plain", f"{name}, plain", cost=0.5, seeds=document),
        Variant("document-longer", f"{name}, plain, trained as long", "document-plain", seeds=document),
        Variant("document-dropout", "Dropout", "document-plain", cost=1.2, seeds=document),
    ]
    found += [
        Variant(
            f"document-{method}-{site}",
            f"{label}, {site}",
            "document-plain",
            cost=_cost(method, site),
            seeds=document,
        )
        for site in SITES
        for method, label in METHODS.items()
    ]
    found += [
        Variant("best-plain", f"Best: {name}, plain", seeds=best),
        Variant("best-dropout", "Best: dropout", cost=1.2, seeds=best),
    ]
    found += [
        Variant(
            f"best-{method}-{site}",
            f"Best: {label[0].lower() + label[1:]}, {site}".replace("gaussian", "Gaussian"),
            cost=_cost(method, site),
            seeds=best,
        )
        for site in SITES
        for method, label in METHODS.items()
    ]
    return (*found, Variant("cost", "Cost", shown=False, seeds=1, alone=True))


def _cost(method: str, site: str) -> float:
    return {"gaussian": 2.0, "flow": 4.0, "mixture": 3.0}[method] * (2.0 if site == "position" else 1.0)
