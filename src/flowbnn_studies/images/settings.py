"""What the studies on images train: settings, networks, variants, and the noise of each variant."""

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from torch import nn

from flowbnn.models import VGG16, LeNet, ResNet18
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn.options import Count, Ge, Interval, NonNegative, Positive, Share, options
from flowbnn_studies.data.corruptions import Kind
from flowbnn_studies.runner.study import Variant

SITES = ("position", "channel")
GROUPS = (
    "plain",
    "dropout",
    *(f"{kind}_{site}" for site in SITES[::-1] for kind in ("gaussian", "flow", "mixture")),
)
RIVALS = ("joint_channel", "output_channel", "swag", "long")  # of ResNet18
Natural = Annotated[int, Ge(0)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]


@options
class Training:
    """How one method is trained.

    Args:
        epochs, batch: passes over the data, images in a step.
        optimizer: ``"sgd"`` with a momentum of 0.9 (Nesterov's where ``nesterov``), ``"adam"`` or ``"adamw"``.
        weight_lr, noise_lr: learning rates of the weights and of the noise.
        weight_decay: of the weights; the noise has its prior.
        schedule: ``"constant"``, ``"cosine"`` or ``"linear"``, the last two down to zero.
        rise: share of the run over which the rate first grows linearly from zero.
        padding, flip, cutout: crop at random after padding by so many pixels; mirror at random; blank a square of that side.
        beta, warmup: weight of the KL, and the share of the run over which it grows.
        prior_scale, base_scale: standard deviations of the prior and of the noise at the start.
        components: of the mixture base.
        positions: site ``"position"``: how many positions the KL counts; 0 is the mean, as in Xiong's report.
        rate, dropped: the dropout's rate and the layers before which it drops, as a glob.
    """

    epochs: Count = 50
    batch: Count = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    weight_lr: NonNegative = 2e-4
    noise_lr: NonNegative = 2e-3
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    rise: BelowOne = 0.0
    padding: Natural = 0
    flip: bool = False
    cutout: Natural = 0
    beta: NonNegative = 1.0
    warmup: Share = 0.0
    prior_scale: Positive = 0.5
    base_scale: Positive = 0.5
    components: Count = 16
    positions: Natural = 0
    rate: BelowOne = 0.2
    dropped: str = "fc*"


@options(kw_only=True)
class PictureData:
    """Where images come from.

    Args:
        source: ``"files"`` reads the data set; ``"generated"`` makes small pictures on the spot, for a trial run.
        generated: how many of those there are to learn from; a quarter as many to test on.
    """

    source: Literal["files", "generated"] = "files"
    generated: Count = 400


@options(kw_only=True)
class ImageSettings(PictureData):
    """What a study on images depends on, besides :class:`PictureData`.

    Args:
        width: multiplies the channels of VGG16 and ResNet18; LeNet has one size.
        validation: images put aside from the training set to choose settings on.
        choose: put those aside and evaluate on them: to choose settings, with the test set closed.
        samples: networks averaged in a prediction.
        shift_samples, shift_images: the same for corrupted and for novel images, and how many of them.
        corruptions: kinds of corruption, as in :func:`~flowbnn_studies.data.corrupt`, each at five strengths.
        curve_samples: networks averaged in the accuracy and ECE after every epoch, which are for display only.
        moved: also evaluate the best recipe's predictions for six views of an image: it and its mirror image, as they are and moved
            by a pixel along either diagonal; with a sixth of the networks. Of trainings that mirror and move their images.
        rounds: rounds of the measurement of time and memory; 0 measures none.
        start, xiong: Xiong's training of the plain network, and of what starts from it.
        plain, dropout, ...: the best training we found for each method, from scratch; ``swag`` is the walk from the plain network, and
            the members of an ensemble are trained as the plain one; ``long`` is a longer training of the plain network and of noise.
    """

    width: Positive = 1.0
    validation: Count = 5000
    choose: bool = False
    samples: Count = 128
    shift_samples: Count = 32
    shift_images: Count = 2000
    corruptions: tuple[Kind, ...] = ("noise", "blur", "brightness", "contrast")
    curve_samples: Natural = 8
    moved: bool = False
    rounds: Natural = 5
    start: Training = Training(epochs=10, optimizer="sgd", weight_lr=2e-3)
    xiong: Training = Training()
    plain: Training = Training()
    dropout: Training = Training()
    gaussian_channel: Training = Training()
    flow_channel: Training = Training()
    mixture_channel: Training = Training()
    gaussian_position: Training = Training()
    flow_position: Training = Training()
    mixture_position: Training = Training()
    joint_channel: Training = Training()
    output_channel: Training = Training()
    swag: Training = Training()
    long: Training = Training()

    @property
    def tested(self) -> int:
        """How many images it is evaluated on: all three data sets have ten thousand to test on."""
        if self.choose:
            return self.validation
        return 10_000 if self.source == "files" else self.generated // 4

    def group(self, variant: str) -> str:
        """The field that holds a variant's training.

        >>> [ImageSettings().group(f"{recipe}-flow-channel") for recipe in ("best", "long", "xiong")]
        ['flow_channel', 'long', 'xiong']
        """
        recipe, _, method = variant.partition("-")
        if recipe == "best":
            return "plain" if method == "ensemble" else method.replace("-", "_")
        return "start" if variant == "xiong-plain" else recipe

    def training(self, variant: str) -> Training:
        """A variant's training."""
        return getattr(self, self.group(variant))

    def relevant(self, variant: str) -> dict[str, Any]:
        """The settings that a variant's result depends on, so that tuning one method leaves the others' results in force."""
        needed = {self.group(variant)} if variant != "cost" else set(GROUPS)
        if variant.startswith("xiong-"):
            needed.add("start")
        if variant == "best-swag":  # which starts from it
            needed.add("plain")
        left = {"start", "xiong", *GROUPS, *RIVALS} - needed
        settings = asdict(self.evaluating(variant))
        return {name: value for name, value in settings.items() if name not in left}

    def evaluating(self, variant: str) -> "ImageSettings":
        """As a variant is evaluated: six views are the best recipe's alone."""
        return self if variant.startswith("best-") else replace(self, moved=False)


_TINY = Training(epochs=2, batch=50, components=2, warmup=0.5)
QUICK: dict[str, Any] = {  # settings of seconds on generated pictures, whose numbers mean nothing
    **{"source": "generated", "generated": 200, "width": 0.0625, "samples": 4, "rounds": 2},
    **{"shift_samples": 2, "shift_images": 20, "curve_samples": 2},
    **{"start": replace(_TINY, optimizer="sgd", weight_lr=2e-3), "xiong": _TINY},
    **dict.fromkeys((*GROUPS, *RIVALS), replace(_TINY, schedule="cosine", padding=2, flip=True)),
}

METHODS = {"gaussian": "Gaussian noise", "flow": "flow noise", "mixture": "mixture noise"}
JOINT = "low-rank"  # full within layers; across layers, what training by SGD can find
NAMES = {
    "plain": "mle",
    "longer": "mle-longer",
    "dropout": "mc-dropout",
    "gaussian": "node-noise-gaussian",
    "flow": "node-noise-planar",
    "mixture": "node-noise-mixture",
    "joint": "node-noise-gaussian-joint",
    "output": "node-noise-gaussian-output",
    "swag": "swag",
    "ensemble": "deep-ensemble",
}

# Where Xiong's report (section 4 and its code) puts its flows; the rest of the layers carry a learnable Gaussian.
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def make_network(architecture: str, channels: int, width: float = 1.0) -> nn.Module:
    """The plain network: ``"lenet"``, ``"vgg16"`` or ``"resnet18"``."""
    if architecture == "lenet":
        return LeNet(channels)
    if architecture == "resnet18":
        return ResNet18(channels, width=width)
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

    >>> rules = rules_for("lenet", "xiong-flow-channel", Training(base_scale=0.1))
    >>> print(*(f"{layer}: {recipe}" for layer, recipe in rules.items()), sep="; ")
    *: NormalAffine(); conv2: NormalInvConv(planar=2, convolutions=3); fc1: NormalPlanar(length=2)
    """
    _, method, site = split_key(variant)
    if method in ("plain", "longer"):
        return {}
    if method == "dropout":
        # whole channels before a convolution, single features before a linear layer, as is usual
        return {training.dropped: Dropout(rate=training.rate, site="channel")}
    common: dict[str, Any] = {
        "site": site,
        "prior_scale": training.prior_scale,
        "base_scale": training.base_scale,
        "positions": training.positions or "mean",
    }
    if method == "mixture":
        return {"*": NormalAffine(components=training.components, **common)}
    own: dict[str, dict[str, Any]] = {"joint": {"joint": JOINT}, "output": {"side": "output"}}
    common |= own.get(method, {})
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
    cost = {"gaussian": 2.0, "flow": 4.0, "mixture": 3.0}
    noisy = [(method, site) for site in SITES for method in METHODS]

    def variant(key: str, label: str, **more: Any) -> Variant:
        recipe, method, site = split_key(key)
        number = seeds[recipe == "best"]
        price = cost.get(method, 1.0) * (2.0 if site == "position" else 1.0)
        return Variant(key, label, NAMES[method], **{"cost": price, "seeds": number, **more})

    start = {"after": "xiong-plain"}
    xiong = [
        variant("xiong-plain", f"{name}, plain", cost=0.5),
        variant("xiong-longer", f"{name}, plain, trained as long", **start),
        variant("xiong-dropout", "Dropout", cost=1.2, **start),
        *(
            variant(f"xiong-{m}-{s}", f"{METHODS[m][0].upper()}{METHODS[m][1:]}, {s}", **start)
            for m, s in noisy
        ),
    ]
    best = [
        variant("best-plain", f"Best: {name}, plain"),
        variant("best-dropout", "Best: dropout", cost=1.2),
        *(variant(f"best-{m}-{s}", f"Best: {METHODS[m]}, {s}") for m, s in noisy),
    ]
    return (*xiong, *best, Variant("cost", "Cost", shown=False, seeds=1, alone=True))
