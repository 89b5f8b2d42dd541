"""What the studies on images depend on: one :class:`Training` for each group of methods, and what is common to all."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from flowbnn.errors import FlowBNNError

__all__ = ["GROUPS", "ImageSettings", "Training", "quick_settings"]

GROUPS = (
    "plain",
    "dropout",
    "gaussian_channel",
    "flow_channel",
    "mixture_channel",
    "gaussian_position",
    "flow_position",
    "mixture_position",
)


@dataclass(frozen=True)
class Training:
    """How one method is trained.

    Args:
        epochs, batch: passes over the data, images in a step.
        optimizer: ``"sgd"`` (with Nesterov's momentum where ``nesterov``), ``"adam"`` or ``"adamw"``.
        weight_lr, noise_lr: learning rates of the weights and of the noise.
        momentum: of SGD.
        weight_decay: of the weights; the noise has its prior.
        clip: largest norm of the gradient; 0 leaves it alone.
        schedule: ``"constant"``, ``"cosine"`` or ``"linear"``, the last two down to nought.
        rise: share of the run over which the rate first grows linearly from nought.
        padding, flip, cutout: crop at random after padding by so many pixels; mirror at random; blank a square of that side.
        average: decay of a running average of weights and noise, which is what is judged; 0 has none.
        beta, gamma, warmup: weights of KL and entropy, and the share of the run over which the KL's grows.
        samples: draws of the noise per image and step.
        prior_scale, base_scale: standard deviations of the prior and of the noise at the start.
        components: of the mixture base.
        positions: site ``"position"``: how many positions the KL counts; 0 is the mean, as in document 000.
        rate, dropped: the dropout's rate and the layers before which it drops, as a glob.
    """

    epochs: int = 50
    batch: int = 128
    optimizer: str = "adam"
    weight_lr: float = 2e-4
    noise_lr: float = 2e-3
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0
    schedule: str = "constant"
    rise: float = 0.0
    padding: int = 0
    flip: bool = False
    cutout: int = 0
    average: float = 0.0
    beta: float = 1.0
    gamma: float = 0.0
    warmup: float = 0.0
    samples: int = 1
    prior_scale: float = 0.5
    base_scale: float = 0.5
    components: int = 16
    positions: int = 0
    rate: float = 0.2
    dropped: str = "fc*"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "samples", "components"):
            if getattr(self, name) < 1:
                raise FlowBNNError(f"{name} is at least 1, not {getattr(self, name)}")
        least = (
            "weight_lr",
            "noise_lr",
            "weight_decay",
            "clip",
            "beta",
            "gamma",
            "padding",
            "cutout",
            "positions",
        )
        for name in least:
            if not getattr(self, name) >= 0:
                raise FlowBNNError(f"{name} is at least 0, not {getattr(self, name)}")
        for name in ("prior_scale", "base_scale"):
            if not getattr(self, name) > 0:
                raise FlowBNNError(f"{name} is above 0, not {getattr(self, name)}")
        if not 0 <= self.rate < 1:
            raise FlowBNNError(f"rate is at least 0 and below 1, not {self.rate}")


@dataclass(frozen=True)
class ImageSettings:
    """What a study on images depends on.

    Args:
        source: ``"files"`` reads the data set; ``"generated"`` makes small pictures, for a smoke run.
        generated: how many of those there are to learn from; a quarter as many to test on.
        width: multiplies the channels of VGG16; LeNet has one size.
        validation: images put aside from the training set to choose settings on.
        withhold: whether the final runs leave those out as well.
        samples: networks averaged in a prediction.
        shift_samples, shift_images: the same for corrupted and for novel images, and how many of them.
        curve_samples: networks averaged in the accuracy and ECE after every epoch, which are for display only.
        curves: whether the best recipe has these curves too.
        moved: also judge the best recipe's predictions for six views of an image: it and its mirror image, as they are and moved
            by a pixel along either diagonal; with a sixth of the networks. Of trainings that mirror and move their images.
        rounds: rounds of the measurement of time and memory; 0 measures none.
        start, document: document 000's training of the plain network, and of what starts from it.
        plain, dropout, ...: the best training we found for each method, from scratch.
    """

    source: str = "files"
    generated: int = 400
    width: float = 1.0
    validation: int = 5000
    withhold: bool = False
    samples: int = 128
    shift_samples: int = 32
    shift_images: int = 2000
    curve_samples: int = 8
    curves: bool = False
    moved: bool = False
    rounds: int = 5
    start: Training = Training(epochs=10, optimizer="sgd", weight_lr=2e-3)
    document: Training = Training()
    plain: Training = Training()
    dropout: Training = Training()
    gaussian_channel: Training = Training()
    flow_channel: Training = Training()
    mixture_channel: Training = Training()
    gaussian_position: Training = Training()
    flow_position: Training = Training()
    mixture_position: Training = Training()

    def __post_init__(self) -> None:
        for name in ("samples", "shift_samples", "shift_images"):
            if getattr(self, name) < 1:
                raise FlowBNNError(f"{name} is at least 1, not {getattr(self, name)}")

    @property
    def tested(self) -> int:
        """How many test images there are: all three data sets have ten thousand."""
        return 10_000 if self.source == "files" else self.generated // 4

    def group(self, variant: str) -> str:
        """The field that holds a variant's training.

        >>> ImageSettings().group("best-flow-channel"), ImageSettings().group("document-flow-channel")
        ('flow_channel', 'document')
        """
        recipe, _, method = variant.partition("-")
        if recipe == "best":
            return method.replace("-", "_")
        return "start" if variant == "document-plain" else "document"

    def training(self, variant: str) -> Training:
        """A variant's training."""
        return getattr(self, self.group(variant))

    def relevant(self, variant: str) -> dict[str, Any]:
        """The settings that a variant's result depends on, so that tuning one method leaves the others' results in force."""
        needed = {self.group(variant)} if variant != "cost" else set(GROUPS)
        if variant.startswith("document-"):
            needed.add("start")
        left = {"start", "document", *GROUPS} - needed
        return {name: value for name, value in asdict(self.judging(variant)).items() if name not in left}

    def judging(self, variant: str) -> "ImageSettings":
        """As a variant is judged: six views are the best recipe's alone."""
        return self if variant.startswith("best-") else replace(self, moved=False)


def quick_settings(**changes: Any) -> dict[str, Any]:
    """Settings of seconds on generated pictures, whose numbers mean nothing."""
    tiny = Training(epochs=2, batch=50, components=2, warmup=0.5)
    return {
        "source": "generated",
        "generated": 200,
        "samples": 4,
        "shift_samples": 2,
        "shift_images": 20,
        "curve_samples": 2,
        "rounds": 2,
        "start": replace(tiny, optimizer="sgd", weight_lr=2e-3),
        "document": tiny,
        **dict.fromkeys(GROUPS, replace(tiny, schedule="cosine", padding=2, flip=True)),
        **changes,
    }
