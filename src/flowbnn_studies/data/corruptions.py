"""Images made worse on purpose, to see whether a network's confidence follows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_whole, nearest
from flowbnn_studies.data.normalize import usable_device

__all__ = ["CORRUPTIONS", "corrupt", "novel_noise"]

CORRUPTIONS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "brightness": (0.05, 0.10, 0.15, 0.20, 0.30),
    "contrast": (0.75, 0.50, 0.40, 0.30, 0.15),
}


def corrupt(images: Tensor, kind: str, strength: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Images in [0, 1], corrupted as Hendrycks and Dietterich (2019, arXiv:1903.12261) corrupt CIFAR-10, and made here.

    ================  =====================================================================  ==========================
    ``"noise"``       :math:`x + c\,\epsilon`, normal :math:`\epsilon` for every pixel         c = .04, .06, .08, .09, .10
    ``"blur"``        Gaussian filter of deviation c pixels, borders repeated                c = .4, .6, .7, .8, 1
    ``"brightness"``  the largest of a pixel's channels + c, its hue and saturation kept     c = .05, .1, .15, .2, .3
    ``"contrast"``    :math:`c\,(x - m) + m`, m the mean of each channel of each image          c = .75, .5, .4, .3, .15
    ================  =====================================================================  ==========================

    All are cut off at 0 and 1. Images that a network takes are corrupted first and normalized then.

    Args:
        images: ``[..., C, H, W]``, real numbers in [0, 1]: :meth:`ImageSet.to_unit`.
        kind: one of the four.
        strength: 1 (weakest) to 5.
        generator: of the noise.

    >>> grey = torch.tensor([0.2, 0.6]).view(1, 1, 1, 2)
    >>> corrupt(grey, "contrast", 2).flatten()
    tensor([0.3000, 0.5000])
    >>> corrupt(grey, "brightness", 5).flatten()
    tensor([0.5000, 0.9000])
    """
    if kind not in CORRUPTIONS:
        raise FlowBNNError(f"there is no corruption {kind!r}{nearest(str(kind), CORRUPTIONS)}")
    if strength not in range(1, 6):
        raise FlowBNNError(f"the strength of a corruption is 1, 2, 3, 4 or 5, not {strength!r}")
    if images.ndim < 3 or not images.is_floating_point():
        raise FlowBNNError(
            f"corrupt takes real images [..., C, H, W] in [0, 1], not {images.dtype} of shape {tuple(images.shape)}; "
            "ImageSet.to_unit gives them"
        )
    if images.numel() == 0:
        return images.clone()
    low, high = (float(value) for value in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise FlowBNNError(
            f"corrupt takes images in [0, 1], these go from {low:.3g} to {high:.3g}: corrupt first and normalize then"
        )
    amount = CORRUPTIONS[kind][int(strength) - 1]
    if kind == "noise":
        source = images.device if generator is None else generator.device
        noise = torch.randn(images.shape, generator=generator, device=source, dtype=images.dtype)
        changed = images + amount * noise.to(images.device)
    elif kind == "blur":
        changed = _blur(images, amount)
    elif kind == "brightness":
        changed = _brighten(images, amount)
    else:
        mean = images.mean((-2, -1), keepdim=True)
        changed = amount * (images - mean) + mean
    return changed.clamp(0, 1)


def _blur(images: Tensor, deviation: float) -> Tensor:
    """A Gaussian filter along columns and rows: one matrix product for each, which holds the repeated borders too."""
    height, width = images.shape[-2:]
    return _filter(height, deviation).to(images) @ images @ _filter(width, deviation).to(images).mT


def _filter(length: int, deviation: float) -> Tensor:
    """The matrix ``[length, length]`` of a Gaussian filter, cut off at four deviations."""
    radius = int(4 * deviation + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.softmax(-0.5 * (offsets.double() / deviation) ** 2, 0)
    places = (torch.arange(length).unsqueeze(1) + offsets).clamp(0, length - 1)
    return torch.zeros(length, length, dtype=torch.float64).scatter_add_(1, places, weights.expand_as(places))


def _brighten(images: Tensor, amount: float) -> Tensor:
    """The value of hue, saturation and value raised: all channels scaled alike; black, which has no hue, becomes grey."""
    value = images.amax(-3, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, images * (raised / value.clamp(min=torch.finfo(images.dtype).tiny)), raised)


def novel_noise(
    number: int,
    shape: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Images that show nothing, ``[number, *shape]``: every pixel uniform in [0, 1], as a novelty no network should trust.

    >>> novel_noise(2, (3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    check_whole("number", number)
    if not all(length > 0 for length in shape):
        raise FlowBNNError(f"novel_noise makes images of some size, not of {tuple(shape)}")
    place = usable_device("cpu" if device is None else device)
    noise = torch.rand(number, *shape, generator=generator, device=generator.device if generator else place)
    return noise if device is None else noise.to(place)
