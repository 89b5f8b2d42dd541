"""Corruptions of test images, after Hendrycks and Dietterich (2019, https://arxiv.org/abs/1903.12261), made here."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.options import Interval, check

Kind = Literal[
    "noise", "blur", "brightness", "contrast", "shot", "impulse", "speckle", "defocus", "motion", "zoom", "fog", "elastic",
    "pixelate", "jpeg",
]  # fmt: skip
Random = torch.Generator | None


def corrupt(images: Tensor, kind: str, strength: int, generator: Random = None) -> Tensor:
    r"""Images in [0, 1], corrupted by one of fourteen kinds; the amounts c of the five strengths are :data:`CORRUPTIONS`.

    ================  ==========================================================================================================
    ``"noise"``       :math:`x + c\,\epsilon`, normal :math:`\epsilon` for every number
    ``"shot"``        Poisson counts of mean :math:`c\,x`, divided by c
    ``"impulse"``     a share c of all numbers becomes 0 or 1
    ``"speckle"``     :math:`x + c\,x\,\epsilon`
    ``"blur"``        Gaussian filter of deviation c pixels
    ``"defocus"``     mean over a disk of radius c pixels
    ``"motion"``      mean along a line of c pixels, in a direction of its own for each image
    ``"zoom"``        mean of enlargements from 1 to c, in steps of .01
    ``"brightness"``  the largest of a pixel's channels + c, its hue and saturation kept
    ``"contrast"``    :math:`c\,(x - m) + m`, m the mean of each channel of each image
    ``"fog"``         :math:`(x + c\,f)\, \max x / (\max x + c)`, f clouds in [0, 1]: noise of all scales, in proportion to the scale
    ``"elastic"``     each pixel read from a place c pixels away (root mean square), in a smooth field of displacements
    ``"pixelate"``    scaled down to a share c of its sides and back, by areas
    ``"jpeg"``        cosine coefficients of 8 x 8 blocks rounded as JPEG does at quality c, every channel as luminance
    ================  ==========================================================================================================

    Beyond the border an image goes on with its last pixels. All results are cut off at 0 and 1. Images that a network takes are
    corrupted first and normalized then.

    Args:
        images: ``[..., C, H, W]``, real numbers in [0, 1]: :meth:`ImageSet.to_unit`.
        kind: one of them.
        strength: 1 (weakest) to 5.
        generator: of what is random.

    >>> grey = torch.tensor([0.2, 0.6]).view(1, 1, 1, 2)
    >>> corrupt(grey, "contrast", 2).flatten()
    tensor([0.3000, 0.5000])
    >>> corrupt(grey, "brightness", 5).flatten()
    tensor([0.5000, 0.9000])
    """
    check("kind", kind, Kind)
    check("strength", strength, Annotated[int, Interval(ge=1, le=5)])
    unit = images.ndim >= 3 and images.is_floating_point()
    if not unit or not bool(((images >= 0) & (images <= 1)).all()):
        raise FlowBNNError(
            f"corrupt takes real images [..., C, H, W] in [0, 1], as ImageSet.to_unit gives them, not {images.dtype} of shape "
            f"{tuple(images.shape)}: corrupt first and normalize then"
        )
    if not images.numel():
        return images.clone()

    flat = images.flatten(0, -4) if images.ndim > 3 else images.unsqueeze(0)
    changed = _MAKERS[kind](flat, CORRUPTIONS[kind][int(strength) - 1], generator)
    return changed.clamp(0, 1).reshape(images.shape)


def _draw(of: Callable[..., Tensor], images: Tensor, generator: Random, *shape: int) -> Tensor:
    """Numbers of the images' type where they are, drawn where the generator is."""
    source = images.device if generator is None else generator.device
    return of(*shape, generator=generator, device=source, dtype=images.dtype).to(images.device)


def _noise(images: Tensor, amount: float, generator: Random) -> Tensor:
    return images + amount * _draw(torch.randn, images, generator, *images.shape)


def _shot(images: Tensor, amount: float, generator: Random) -> Tensor:
    mean = (amount * images).to(images.device if generator is None else generator.device)
    return torch.poisson(mean, generator=generator).to(images) / amount


def _impulse(images: Tensor, amount: float, generator: Random) -> Tensor:
    drawn = _draw(torch.rand, images, generator, *images.shape)
    return torch.where(drawn < amount / 2, 0.0, torch.where(drawn >= 1 - amount / 2, 1.0, images))


def _speckle(images: Tensor, amount: float, generator: Random) -> Tensor:
    return images + amount * images * _draw(torch.randn, images, generator, *images.shape)


def _blur(images: Tensor, amount: float, generator: Random) -> Tensor:
    # along columns and rows, one matrix product for each, which holds the repeated borders too
    down, across = (_filter(side, amount).to(images) for side in images.shape[-2:])
    return down @ images @ across.mT


def _filter(length: int, deviation: float) -> Tensor:
    """The matrix ``[length, length]`` of a Gaussian filter, cut off at four deviations."""
    radius = int(4 * deviation + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.softmax(-0.5 * (offsets.double() / deviation) ** 2, 0)
    places = (torch.arange(length).unsqueeze(1) + offsets).clamp(0, length - 1)
    return torch.zeros(length, length, dtype=torch.float64).scatter_add_(1, places, weights.expand_as(places))


def _defocus(images: Tensor, amount: float, generator: Random) -> Tensor:
    fine = (torch.arange(320, dtype=torch.float64) + 0.5) / 64 - 2.5  # 64 points to a pixel, 5 pixels
    disk = (fine.square().unsqueeze(1) + fine.square() <= amount**2).double()
    kernel = F.avg_pool2d(disk.view(1, 1, 320, 320), 64)
    kernel = (kernel / kernel.sum()).to(images).expand(images.shape[1], 1, 5, 5)
    return F.conv2d(F.pad(images, (2, 2, 2, 2), "replicate"), kernel, groups=images.shape[1])


def _motion(images: Tensor, amount: float, generator: Random) -> Tensor:
    angle = math.pi * _draw(torch.rand, images, generator, len(images), 1, 1)
    steps = torch.linspace(-0.5, 0.5, 9).tolist()
    read = [_moved(images, amount * t * angle.sin(), amount * t * angle.cos()) for t in steps]
    return torch.stack(read).mean(0)


def _zoom(images: Tensor, amount: float, generator: Random) -> Tensor:
    rows, columns = (torch.arange(side).to(images) - (side - 1) / 2 for side in images.shape[-2:])
    factors = [1 + 0.01 * step for step in range(round(100 * (amount - 1)) + 1)]
    read = [
        _moved(images, (rows * (1 / factor - 1)).unsqueeze(1), columns * (1 / factor - 1))
        for factor in factors
    ]
    return torch.stack(read).mean(0)


def _brightness(images: Tensor, amount: float, generator: Random) -> Tensor:
    """The value of hue, saturation and value raised: all channels scaled alike; black, which has no hue, becomes grey."""
    value = images.amax(-3, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, images * (raised / value.clamp(min=torch.finfo(images.dtype).tiny)), raised)


def _contrast(images: Tensor, amount: float, generator: Random) -> Tensor:
    mean = images.mean((-2, -1), keepdim=True)
    return amount * (images - mean) + mean


def _fog(images: Tensor, amount: float, generator: Random) -> Tensor:
    number, _, height, width = images.shape
    clouds, size = torch.zeros_like(images[:, :1]), 2
    while size <= max(height, width):  # coarse noise counts more than fine noise
        coarse = _draw(torch.rand, images, generator, number, 1, size, size)
        clouds = clouds + F.interpolate(coarse, (height, width), mode="bilinear", align_corners=True) / size
        size *= 2
    low, high = clouds.amin((-2, -1), keepdim=True), clouds.amax((-2, -1), keepdim=True)
    clouds = (clouds - low) / (high - low).clamp(min=1e-6)
    most = images.amax((-3, -2, -1), keepdim=True)
    return (images + amount * clouds) * most / (most + amount)


def _elastic(images: Tensor, amount: float, generator: Random) -> Tensor:
    number, _, height, width = images.shape
    field = _blur(_draw(torch.randn, images, generator, number, 2, height, width), 2.0, generator)
    field = amount * field / field.square().sum(1, keepdim=True).mean((-2, -1), keepdim=True).sqrt()
    return _moved(images, field[:, 0], field[:, 1])


def _pixelate(images: Tensor, amount: float, generator: Random) -> Tensor:
    sides = images.shape[-2:]
    small = F.interpolate(images, [max(1, int(side * amount)) for side in sides], mode="area")
    return F.interpolate(small, sides, mode="area")


# table K.1 of the standard, ITU-T T.81: steps of luminance at quality 50
STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def _jpeg(images: Tensor, amount: float, generator: Random) -> Tensor:
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, -width % 8, 0, -height % 8), "replicate")
    place = torch.arange(8, dtype=torch.float64)
    cosines = torch.cos((2 * place + 1) * place.unsqueeze(1) * math.pi / 16) / 2
    cosines[0] /= math.sqrt(2)
    cosines = cosines.to(images)
    steps = torch.tensor(STEPS).to(images)
    scale = 50 / amount if amount < 50 else 2 - amount / 50
    steps = (steps * scale + 0.5).floor().clamp(1, 255)
    blocks = (255 * padded - 128).unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).movedim(-3, -2)
    rounded = (cosines @ blocks @ cosines.mT / steps).round() * steps
    back = (cosines.mT @ rounded @ cosines).movedim(-2, -3).flatten(-4, -3).flatten(-2)
    return ((back + 128).round() / 255)[..., :height, :width]


def _moved(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Each pixel read, between its neighbours, from the place that is so far down and right of it."""
    height, width = images.shape[-2:]
    rows, columns = (
        torch.arange(height).to(images).unsqueeze(1) + down,
        torch.arange(width).to(images) + right,
    )
    grid = torch.stack(
        [
            (2 * part + 1) / side - 1
            for part, side in zip(torch.broadcast_tensors(columns, rows), (width, height), strict=True)
        ],
        -1,
    )
    grid = grid.expand(len(images), height, width, 2)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


_MAKERS: dict[str, Callable[[Tensor, float, Random], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "shot": _shot,
    "impulse": _impulse,
    "speckle": _speckle,
    "defocus": _defocus,
    "motion": _motion,
    "zoom": _zoom,
    "fog": _fog,
    "elastic": _elastic,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
}
CORRUPTIONS: dict[str, tuple[float, ...]] = {  # amounts of the five strengths
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "brightness": (0.05, 0.10, 0.15, 0.20, 0.30),
    "contrast": (0.75, 0.50, 0.40, 0.30, 0.15),
    "shot": (500, 250, 100, 75, 50),
    "impulse": (0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle": (0.06, 0.10, 0.12, 0.16, 0.20),
    "defocus": (0.6, 0.8, 1.0, 1.3, 1.6),
    "motion": (1.5, 2.0, 3.0, 4.0, 5.0),
    "zoom": (1.06, 1.11, 1.16, 1.21, 1.26),
    "fog": (0.2, 0.5, 0.75, 1.0, 1.5),
    "elastic": (0.4, 0.6, 0.8, 1.0, 1.2),
    "pixelate": (0.95, 0.90, 0.85, 0.75, 0.65),
    "jpeg": (80, 65, 58, 50, 40),
}
