"""Figure 5 of document 000, second half: LeNet on CIFAR-10."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flowbnn.studies.images.published import LENET_CIFAR10
from flowbnn.studies.images.settings import ImageSettings, Training, quick_settings
from flowbnn.studies.images.study import ImageStudy

__all__ = ["LeNetCifar10", "Settings"]

# The batch is the one that fits document 000 on Fashion-MNIST; it does not say its own.
START, DOCUMENT = Training(epochs=20, batch=32, optimizer="sgd", weight_lr=2e-3), Training(batch=32)
BEST = Training(
    epochs=100,
    optimizer="adamw",
    weight_lr=2e-3,
    weight_decay=1e-2,
    schedule="cosine",
    rise=0.05,
    padding=4,
    flip=True,
)
NOISE = replace(BEST, noise_lr=5e-3, warmup=0.3, base_scale=0.2)


@dataclass(frozen=True)
class Settings(ImageSettings):
    """As in :class:`~flowbnn.studies.images.settings.ImageSettings`."""

    start: Training = START
    document: Training = DOCUMENT
    plain: Training = BEST
    dropout: Training = BEST
    gaussian_channel: Training = NOISE
    flow_channel: Training = NOISE
    mixture_channel: Training = NOISE
    gaussian_position: Training = NOISE
    flow_position: Training = NOISE
    mixture_position: Training = NOISE


class LeNetCifar10(ImageStudy):
    """Is flow noise better than Gaussian noise, dropout, or none, in a LeNet on CIFAR-10?"""

    name = "lenet-cifar10"
    title = "LeNet on CIFAR-10"
    description = (
        "LeNet on CIFAR-10: plain, dropout, Gaussian, flow and mixture noise (document 000, figure 5)"
    )
    question = (
        "LeNet learns CIFAR-10. Which kind of noise on the inputs of its layers gives the best probabilities, on the test "
        "set, on corrupted images and on images it has never seen; and is noise from a flow better than Gaussian noise?"
    )
    source = "document 000, figure 5"
    settings = Settings
    architecture = "lenet"
    network_label = "LeNet"
    data = "cifar10"
    novel: ClassVar[dict[str, str]] = {"fashion-mnist": "Fashion-MNIST", "noise": "noise"}
    published = LENET_CIFAR10
    quick: ClassVar[dict[str, Any]] = quick_settings()
