"""Settings, networks, variants and noise of the studies on images, and the published numbers."""

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from torch import nn

from flowbnn.models import VGG16, LeNet, ResNet18
from flowbnn.noise import Dropout, NormalAffine, NormalInvConv, NormalPlanar, Recipe
from flowbnn.options import Bounds, Count, Ge, NonNegative, Positive, UnitInterval, options
from flowbnn_studies.data.augment import CorruptionKind
from flowbnn_studies.runner.study import Variant

SITES = ("position", "channel")
GROUPS = (
    "plain",
    "dropout",
    *(f"{kind}_{site}" for site in SITES[::-1] for kind in ("gaussian", "flow", "mixture")),
)
RIVALS = ("repeated_channel", "joint_channel", "output_channel", "swag", "long")  # only in some studies
Natural = Annotated[int, Ge(0)]
BelowOne = Annotated[float, Bounds(ge=0, lt=1)]


@options
class Training:
    """Training of one method.

    Args:
        epochs, batch: Number of epochs, and of images in a step.
        optimizer: ``"sgd"`` with a momentum of 0.9, ``"adam"`` or ``"adamw"``.
        weight_lr, noise_lr: Learning rates of the weights and of the noise.
        nesterov: Use Nesterov momentum.
        weight_decay: Weight decay of the weights. The noise has its prior instead.
        schedule: ``"constant"``, ``"cosine"`` or ``"linear"``; the last two end at zero.
        lr_warmup: Fraction of the run over which the learning rate first grows linearly from zero.
        padding, flip, cutout: Largest random translation in pixels; random mirroring; side length of a blank square.
        beta, warmup: Weight of the KL, and the fraction of the run over which it grows.
        repeats: Number of copies of each image in a step, each with its own noise.
        prior_scale, base_scale: Standard deviation of the prior, and of the noise at the start.
        components: Number of components of the mixture base.
        positions: Number of positions that the KL counts at site ``"position"``; 0 for the mean, as in Xiong's report.
        dropout_rate, dropout_layers: Dropout rate, and a glob of the layers with dropout.
    """

    epochs: Count = 50
    batch: Count = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    weight_lr: NonNegative = 2e-4
    noise_lr: NonNegative = 2e-3
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup: BelowOne = 0.0
    padding: Natural = 0
    flip: bool = False
    cutout: Natural = 0
    beta: NonNegative = 1.0
    warmup: UnitInterval = 0.0
    repeats: Count = 1
    prior_scale: Positive = 0.5
    base_scale: Positive = 0.5
    components: Count = 16
    positions: Natural = 0
    dropout_rate: BelowOne = 0.2
    dropout_layers: str = "fc*"


@options(kw_only=True)
class ImageSource:
    """Origin of the images.

    Args:
        source: ``"files"`` reads the data set; ``"generated"`` generates small images for a trial run.
        generated: Number of generated training images. There are a quarter as many test images.
    """

    source: Literal["files", "generated"] = "files"
    generated: Count = 400


@options(kw_only=True)
class ImageSettings(ImageSource):
    """Settings of a study on images, in addition to :class:`ImageSource`.

    Args:
        width: Factor of the channels of VGG16 and ResNet18. LeNet has one size.
        validation: Number of validation images for the choice of settings.
        choose: Evaluate on the validation images, to choose settings without the test set.
        samples: Number of networks averaged in a prediction.
        shift_samples, shift_images: Number of networks and of images for corrupted and out-of-distribution images.
        corruptions: Kinds of corruption, as in :func:`~flowbnn_studies.data.corrupt`, each at five strengths.
        curve_samples: Number of networks averaged in the accuracy and ECE after every epoch, which are for display only.
        six_views: Also evaluate the best recipe with six views of an image: the image and its mirror image, unchanged and
            translated by a pixel along either diagonal. A sixth of the networks is averaged.
        cost_rounds: Number of rounds of the measurement of time and memory; 0 for none.
        start, xiong: Training of the deterministic network in Xiong's report, and of the variants that start from it.
        plain, dropout, ...: Best training found for each method, from scratch. ``swag`` starts from the deterministic network, and
            ensemble members are trained like it. ``long`` is a longer training of the deterministic network and of noise.
    """

    width: Positive = 1.0
    validation: Count = 5000
    choose: bool = False
    samples: Count = 128
    shift_samples: Count = 32
    shift_images: Count = 2000
    corruptions: tuple[CorruptionKind, ...] = ("noise", "blur", "brightness", "contrast")
    curve_samples: Natural = 8
    six_views: bool = False
    cost_rounds: Natural = 5
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
    repeated_channel: Training = Training()
    joint_channel: Training = Training()
    output_channel: Training = Training()
    swag: Training = Training()
    long: Training = Training()

    @property
    def num_tested(self) -> int:
        """Number of images of the evaluation. All three data sets have 10,000 test images."""
        if self.choose:
            return self.validation
        return 10_000 if self.source == "files" else self.generated // 4

    def group(self, variant: str) -> str:
        """Returns the field that has the training of a variant.

        >>> [ImageSettings().group(f"{recipe}-flow-channel") for recipe in ("best", "long", "xiong")]
        ['flow_channel', 'long', 'xiong']
        """
        recipe, _, method = variant.partition("-")
        if recipe == "best":
            return "plain" if method == "ensemble" else method.replace("-", "_")
        return "start" if variant == "xiong-plain" else recipe

    def training(self, variant: str) -> Training:
        """Returns the training of a variant."""
        return getattr(self, self.group(variant))

    def relevant(self, variant: str) -> dict[str, Any]:
        """Returns the settings that the result of a variant depends on. Tuning one method keeps the results of the others."""
        needed = {self.group(variant)} if variant != "cost" else set(GROUPS)
        if variant.startswith("xiong-"):
            needed.add("start")
        if variant == "best-swag":  # it starts from the deterministic network
            needed.add("plain")
        irrelevant = {"start", "xiong", *GROUPS, *RIVALS} - needed
        settings = asdict(self.evaluating(variant))
        return {name: value for name, value in settings.items() if name not in irrelevant}

    def evaluating(self, variant: str) -> "ImageSettings":
        """Returns the settings of the evaluation of a variant. Only the best recipe has six views."""
        return self if variant.startswith("best-") else replace(self, six_views=False)


_TINY = Training(epochs=2, batch=50, components=2, warmup=0.5)
QUICK: dict[str, Any] = {  # settings of a trial run of seconds on generated images
    **{"source": "generated", "generated": 200, "width": 0.0625, "samples": 4, "cost_rounds": 2},
    **{"shift_samples": 2, "shift_images": 20, "curve_samples": 2},
    **{"start": replace(_TINY, optimizer="sgd", weight_lr=2e-3), "xiong": _TINY},
    **dict.fromkeys((*GROUPS, *RIVALS), replace(_TINY, schedule="cosine", padding=2, flip=True)),
}

METHODS = {"gaussian": "Gaussian noise", "flow": "flow noise", "mixture": "mixture noise"}
JOINT = "low-rank"  # full within layers, low rank across layers, which SGD can fit
NAMES = {
    "plain": "mle", "longer": "mle-longer", "dropout": "mc-dropout", "gaussian": "node-noise-gaussian", "flow": "node-noise-planar",
    "mixture": "node-noise-mixture", "repeated": "node-noise-gaussian-repeated", "joint": "node-noise-gaussian-joint",
    "output": "node-noise-gaussian-output", "swag": "swag", "ensemble": "deep-ensemble",
}  # fmt: skip

# Layers with flows in Xiong's report (section 4 and its code). The other layers have learnable Gaussian noise.
FLOWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lenet": (("conv2",), ("fc1",)),
    "vgg16": (("conv4", "conv8", "conv11"), ("fc2",)),
}


def make_network(architecture: str, channels: int, width: float = 1.0) -> nn.Module:
    """Returns the deterministic network ``"lenet"``, ``"vgg16"`` or ``"resnet18"``."""
    if architecture == "lenet":
        return LeNet(channels)
    if architecture == "resnet18":
        return ResNet18(channels, width=width)
    return VGG16(channels, hidden=max(8, round(512 * width)), width=width)


def split_key(variant: str) -> tuple[str, str, str]:
    """Returns recipe, method and site of the key of a variant.

    >>> split_key("best-flow-channel"), split_key("xiong-plain")
    (('best', 'flow', 'channel'), ('xiong', 'plain', ''))
    """
    recipe, method, *site = variant.split("-")
    return recipe, method, site[0] if site else ""


def rules_for(architecture: str, variant: str, training: Training) -> dict[Any, Recipe | None]:
    """Returns the noise of a variant by layer; empty for the deterministic network.

    >>> rules = rules_for("lenet", "xiong-flow-channel", Training(base_scale=0.1))
    >>> print(*(f"{layer}: {recipe}" for layer, recipe in rules.items()), sep="; ")
    *: NormalAffine(); conv2: NormalInvConv(planar=2, convolutions=3); fc1: NormalPlanar(length=2)
    """
    _, method, site = split_key(variant)
    if method in ("plain", "longer"):
        return {}
    if method == "dropout":
        # as usual: channels before a convolution, single features before a linear layer
        return {training.dropout_layers: Dropout(rate=training.dropout_rate, site="channel")}
    common: dict[str, Any] = {
        "site": site,
        "prior_scale": training.prior_scale,
        "base_scale": training.base_scale,
        "positions": training.positions or "mean",
    }
    if method == "mixture":
        return {"*": NormalAffine(components=training.components, **common)}
    specific: dict[str, dict[str, Any]] = {"joint": {"joint": JOINT}, "output": {"side": "output"}}
    common |= specific.get(method, {})
    rules: dict[Any, Recipe | None] = {"*": NormalAffine(**common)}
    if method == "flow":
        convolutions, linear = FLOWS[architecture]
        rules |= {layer: NormalInvConv(**common) for layer in convolutions}
        rules |= {layer: NormalPlanar(2, **common) for layer in linear}
    return rules


def image_variants(name: str, seeds: tuple[int, int], repeated: bool = False) -> tuple[Variant, ...]:
    """Returns the variants: Xiong's recipe, the best recipe, and the measurement of costs.

    Args:
        name: Name of the network, for the labels.
        seeds: Number of seeds of each of the two recipes.
        repeated: Add a variant with several copies of each image in a step, each with its own noise.
    """
    cost = {"gaussian": 2.0, "flow": 4.0, "mixture": 3.0, "repeated": 8.0}
    noisy = [(method, site) for site in SITES for method in METHODS]

    def variant(key: str, label: str, **options: Any) -> Variant:
        recipe, method, site = split_key(key)
        number = seeds[recipe == "best"]
        price = cost.get(method, 1.0) * (2.0 if site == "position" else 1.0)
        return Variant(key, label, NAMES[method], **{"cost": price, "seeds": number, **options})

    start = {"start_from": "xiong-plain"}
    xiong = [
        variant("xiong-plain", f"{name}, deterministic", cost=0.5),
        variant("xiong-longer", f"{name}, deterministic, same number of epochs", **start),
        variant("xiong-dropout", "Dropout", cost=1.2, **start),
        *(
            variant(f"xiong-{m}-{s}", f"{METHODS[m][0].upper()}{METHODS[m][1:]}, {s}", **start)
            for m, s in noisy
        ),
    ]
    best = [
        variant("best-plain", f"Best: {name}, deterministic"),
        variant("best-dropout", "Best: dropout", cost=1.2),
        *(variant(f"best-{m}-{s}", f"Best: {METHODS[m]}, {s}") for m, s in noisy),
    ]
    if repeated:
        best.append(variant("best-repeated-channel", "Best: Gaussian noise, channel, repeated images"))
    return (*xiong, *best, Variant("cost", "Cost", in_table=False, seeds=1, exclusive=True))


# -------------------- published numbers

Curves = dict[str, tuple[float, ...]]

# Epochs at which the curves of figures 5 and 6 of Xiong's report were read off, to the precision of their pixels.
EPOCHS = (1, 6, 11, 16, 21, 26, 31, 36, 41, 46, 50)

LEVELS = {"plain": "Xiong: baseline", "dropout": "Xiong: dropout"}


@dataclass(frozen=True)
class Published:
    """Published numbers.

    Args:
        target: Target values of this study.
        rows: Final values of Xiong's report by variant.
        gaussian, flow: Curves of Xiong's report by panel, for Gaussian noise ("no flow") and flow noise.
        cited: Rows of other sources: label, method, and values by metric.
    """

    target: dict[str, float]
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    gaussian: Curves = field(default_factory=dict)
    flow: Curves = field(default_factory=dict)
    cited: tuple[tuple[str, str, dict[str, float]], ...] = ()

    def levels(self, panel: str) -> dict[str, float]:
        """Returns the horizontal lines of Xiong's report in a panel, by name: values that it reports only at the end."""
        values = {label: self.rows.get(f"xiong-{key}", {}).get(panel) for key, label in LEVELS.items()}
        return {label: value for label, value in values.items() if value is not None}


def _curves(**panels: str) -> Curves:
    return {name: tuple(map(float, values.split())) for name, values in panels.items()}


FASHION = Published(
    rows={
        "xiong-plain": {"accuracy": 0.887, "ece": 0.015},
        "xiong-dropout": {"ece": 0.039},
        "xiong-gaussian-position": {"accuracy": 0.893, "ece": 0.045},
        "xiong-flow-position": {"accuracy": 0.902, "ece": 0.044},
    },
    gaussian=_curves(
        negative_elbo="0.795 0.431 0.353 0.306 0.268 0.242 0.216 0.190 0.170 0.151 0.137",
        log_likelihood="-0.795 -0.416 -0.336 -0.283 -0.250 -0.226 -0.194 -0.169 -0.152 -0.128 -0.117",
        kl="0.0004 0.0028 0.0043 0.0053 0.0060 0.0069 0.0078 0.0087 0.0097 0.0107 0.0114",
        accuracy="0.810 0.864 0.879 0.886 0.893 0.897 0.899 0.901 0.900 0.899 0.893",
        ece="0.089 0.043 0.021 0.008 0.008 0.007 0.013 0.021 0.024 0.036 0.045",
    ),
    flow=_curves(
        negative_elbo="0.765 0.394 0.324 0.277 0.240 0.216 0.188 0.166 0.148 0.131 0.113",
        log_likelihood="-0.765 -0.381 -0.306 -0.262 -0.228 -0.198 -0.175 -0.146 -0.127 -0.111 -0.093",
        kl="0.0008 0.0047 0.0067 0.0078 0.0087 0.0094 0.0104 0.0115 0.0124 0.0135 0.0142",
        accuracy="0.817 0.869 0.886 0.895 0.897 0.900 0.902 0.899 0.901 0.903 0.902",
        ece="0.072 0.036 0.009 0.014 0.011 0.009 0.019 0.026 0.031 0.038 0.044",
    ),
    target={"accuracy": 0.915, "ece": 0.008},
)

LENET_CIFAR10 = Published(
    rows={
        "xiong-plain": {"accuracy": 0.647, "ece": 0.015},
        "xiong-dropout": {"ece": 0.039},
        "xiong-gaussian-position": {"accuracy": 0.687, "ece": 0.015},
        "xiong-flow-position": {"accuracy": 0.7, "ece": 0.013},
    },
    gaussian=_curves(
        negative_elbo="1.720 1.372 1.256 1.179 1.120 1.078 1.038 1.020 0.996 0.967 0.958",
        log_likelihood="-1.720 -1.364 -1.250 -1.169 -1.117 -1.075 -1.033 -1.007 -0.975 -0.957 -0.947",
        kl="0.0002 0.0014 0.0027 0.0040 0.0052 0.0062 0.0073 0.0082 0.0092 0.0101 0.0107",
        accuracy="0.555 0.599 0.623 0.643 0.655 0.658 0.672 0.672 0.680 0.688 0.687",
        ece="0.166 0.111 0.074 0.066 0.047 0.036 0.028 0.018 0.019 0.014 0.015",
    ),
    flow=_curves(
        negative_elbo="1.720 1.313 1.204 1.127 1.082 1.045 1.010 0.991 0.967 0.943 0.935",
        log_likelihood="-1.720 -1.305 -1.191 -1.119 -1.060 -1.031 -0.992 -0.966 -0.948 -0.923 -0.914",
        kl="0.0005 0.0035 0.0063 0.0081 0.0093 0.0103 0.0111 0.0118 0.0124 0.0131 0.0135",
        accuracy="0.551 0.609 0.634 0.650 0.663 0.677 0.683 0.691 0.697 0.699 0.700",
        ece="0.122 0.103 0.055 0.033 0.036 0.040 0.022 0.033 0.019 0.012 0.013",
    ),
    target={"accuracy": 0.75, "ece": 0.01},
)

VGG16_CIFAR10 = Published(
    rows={
        "xiong-plain": {"accuracy": 0.87, "ece": 0.07},
        "xiong-gaussian-position": {"accuracy": 0.9, "ece": 0.034},
        "xiong-flow-position": {"accuracy": 0.905, "ece": 0.028},
    },
    gaussian=_curves(
        negative_elbo="1.270 0.682 0.528 0.431 0.358 0.305 0.261 0.218 0.190 0.161 0.152",
        log_likelihood="-1.270 -0.668 -0.515 -0.415 -0.340 -0.287 -0.243 -0.201 -0.175 -0.149 -0.136",
        kl="0.0011 0.0040 0.0061 0.0075 0.0087 0.0097 0.0103 0.0111 0.0117 0.0125 0.0130",
        accuracy="0.638 0.818 0.826 0.853 0.871 0.882 0.887 0.887 0.899 0.894 0.898",
        ece="0.016 0.027 0.011 0.010 0.012 0.013 0.016 0.022 0.021 0.031 0.034",
    ),
    flow=_curves(
        negative_elbo="1.505 0.742 0.590 0.489 0.410 0.352 0.307 0.270 0.235 0.212 0.185",
        log_likelihood="-1.430 -0.689 -0.538 -0.438 -0.364 -0.306 -0.262 -0.222 -0.187 -0.165 -0.150",
        kl="0.0750 0.0409 0.0434 0.0429 0.0408 0.0390 0.0380 0.0375 0.0365 0.0361 0.0356",
        accuracy="0.658 0.807 0.821 0.849 0.861 0.859 0.890 0.896 0.891 0.898 0.903",
        ece="0.076 0.052 0.012 0.019 0.012 0.019 0.010 0.017 0.018 0.018 0.028",
    ),
    target={"accuracy": 0.945, "nll": 0.175, "ece": 0.008},
    # Trinh, Kaski and Heinonen (2020, https://arxiv.org/abs/2010.13498), tables 3 to 7: 5 seeds, 300 epochs
    cited=(
        ("Trinh et al.: SGD", "mle", {"accuracy": 0.9328, "nll": 0.3255, "ece": 0.0476}),
        ("Trinh et al.: MC dropout", "mc-dropout", {"accuracy": 0.9329, "nll": 0.2887, "ece": 0.0421}),
        (
            "Trinh et al.: iBNN, 16 components",
            "node-noise-mixture",
            {"accuracy": 0.9381, "nll": 0.1983, "ece": 0.0149},
        ),
    ),
)

RESNET18_CIFAR10 = Published(
    target={"nll": 0.120, "ece": 0.006},
    # Trinh et al. (2024, FoRDE, https://arxiv.org/abs/2306.02775), table 2, which has node-BNN (https://arxiv.org/abs/2206.02435)
    cited=(
        ("Published: node-BNN", "node-noise-gaussian", {"accuracy": 0.959, "nll": 0.127, "ece": 0.006}),
        ("Published: SWAG", "swag", {"accuracy": 0.969, "nll": 0.124, "ece": 0.005}),
        ("Published: deep ensemble", "deep-ensemble", {"accuracy": 0.963, "nll": 0.117, "ece": 0.005}),
    ),
)
