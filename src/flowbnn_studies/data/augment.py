"""Changes of images: random crops, flips and cutout for training, views for prediction, noise and corruptions for tests."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.options import Bounds, Count, Ge, check, checked, options


@options
class CropAndFlip:
    r"""Randomly translates every image of a batch, mirrors half of them and cuts out a square.

    The augmentation equals padding by reflection and random cropping, with cutout as in DeVries and Taylor (2017,
    arXiv:1708.04552). Each output pixel is read from its place in the input, :math:`y_{ij} = x_{i + d_y,\; \pm j + d_x}`, by one
    gather for the whole batch, without loops or synchronization on a GPU. The center of the square is any pixel, so part of it may
    lie outside. Its pixels are zero.

    Args:
        padding: Largest translation in both directions, in pixels. All translations are equally likely.
        flip: Mirror left and right with probability one half.
        cutout: Side length of the square; 0 for none.

    >>> images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    >>> draws = torch.tensor([[0.9], [0.5], [0.9], [0.0], [0.0]])  # one row down, no column, no flip
    >>> CropAndFlip(padding=1).apply(images, draws)[0, 0]
    tensor([[ 4,  5,  6,  7],
            [ 8,  9, 10, 11],
            [12, 13, 14, 15],
            [ 8,  9, 10, 11]], dtype=torch.uint8)
    >>> CropAndFlip()(torch.rand(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    row_wise: ClassVar[bool] = True  # the result of an example does not depend on the rest of the batch

    padding: Annotated[int, Ge(0)] = 4
    flip: bool = True
    cutout: Annotated[int, Ge(0)] = 0

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the images ``[B, C, H, W]``, each with draws of its own. Type, device and memory format are kept."""
        return self.apply(images, self.draw(len(images), images.device, generator))

    def draw(self, number: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """Returns the uniform random numbers ``[5, number]`` that :meth:`apply` needs.

        The rows are: vertical translation, horizontal translation, flip (below one half), row and column of the center of the
        square. They are drawn on the device of the generator. Inside a CUDA graph that must be the device of the images.
        """
        source = device if generator is None else generator.device
        return torch.rand(5, number, generator=generator, device=source).to(device, non_blocking=True)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Returns the images transformed by the given draws."""
        if images.ndim != 4 or self.padding >= min(images.shape[2:]):
            raise FlowBNNError(
                f"CropAndFlip(padding={self.padding}) needs images [B, C, H, W] larger than the padding, got {tuple(images.shape)}",
                kind="shape",
                argument="images",
            )
        number, _, height, width = images.shape
        down, right, flips, hole_row, hole_column = draws.unsqueeze(-1)
        rows = torch.arange(height, device=images.device).expand(number, height)
        columns = torch.arange(width, device=images.device).expand(number, width)
        moves = 2 * self.padding + 1
        from_rows = _reflected(rows + (down * moves).long() - self.padding, height)
        from_columns = _reflected(columns + (right * moves).long() - self.padding, width)
        if self.flip:
            from_columns = torch.where(flips < 0.5, width - 1 - from_columns, from_columns)
        translated = _gather(images, from_rows.unsqueeze(2) * width + from_columns.unsqueeze(1))
        if not self.cutout:
            return translated
        down_hole, across_hole = (
            _cutout_mask(rows, hole_row, self.cutout),
            _cutout_mask(columns, hole_column, self.cutout),
        )
        return translated.masked_fill_((down_hole.unsqueeze(2) & across_hole.unsqueeze(1)).unsqueeze(1), 0)


def _reflected(indices: Tensor, length: int) -> Tensor:
    """Reflects indices beyond either end of an axis back onto it."""
    return length - 1 - (length - 1 - indices.abs()).abs()


def _cutout_mask(indices: Tensor, center: Tensor, side: int) -> Tensor:
    """Returns a mask of the ``side`` indices around a center."""
    start = (center * indices.shape[1]).long() - side // 2
    return (indices >= start) & (indices < start + side)


def _gather(images: Tensor, source: Tensor) -> Tensor:
    """Reads each pixel from its source ``[B, H, W]``, a flat index. The memory format is kept."""
    number, channels, height, width = images.shape
    pixels = height * width
    index = source.reshape(number, pixels)
    if channels > 1 and images.is_contiguous(memory_format=torch.channels_last):
        flat = images.permute(0, 2, 3, 1).reshape(number, pixels, channels)
        gathered = flat.gather(1, index.unsqueeze(2).expand(-1, -1, channels))
        return gathered.view(number, height, width, channels).permute(0, 3, 1, 2)
    flat = images.reshape(number, channels, pixels)
    return flat.gather(2, index.unsqueeze(1).expand(-1, channels, -1)).view(images.shape)


def mirror(images: Tensor) -> Tensor:
    """Returns images ``[..., H, W]`` with left and right exchanged: a view for ``posterior.predict(images, views=[mirror])``.

    >>> mirror(torch.tensor([[1, 2, 3]]))
    tensor([[3, 2, 1]])
    """
    return images.flip(-1)


@options
class Translate:
    """View that translates images ``[..., C, H, W]``, with reflection beyond the border, as :class:`CropAndFlip` does in training.

    Use it as ``posterior.predict(images, views=[mirror, Translate(1, 1), Translate(-1, -1)])``.

    Args:
        down: Vertical translation, in pixels.
        right: Horizontal translation, in pixels.

    >>> Translate(0, 1)(torch.tensor([[[1, 2, 3]]]))
    tensor([[[2, 1, 2]]])
    >>> Translate(-1, 0)(torch.tensor([[[1, 2], [3, 4], [5, 6]]]))
    tensor([[[3, 4],
             [5, 6],
             [3, 4]]])
    """

    down: int
    right: int

    def __call__(self, images: Tensor) -> Tensor:
        fits = images.ndim >= 3 and abs(self.down) < images.shape[-2] and abs(self.right) < images.shape[-1]
        if not fits:
            raise FlowBNNError(
                f"images of shape {tuple(images.shape)} cannot be translated by {self.down}, {self.right}",
                kind="shape",
                argument="images",
            )
        for axis, shift in ((-2, self.down), (-1, self.right)):
            if shift:
                length = images.shape[axis]
                indices = torch.arange(length, device=images.device) - shift
                images = images.index_select(axis, _reflected(indices, length))
        return images


@checked
def novel_noise(number: Count, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Returns images ``[number, *shape]`` of uniform noise in [0, 1], as out-of-distribution inputs.

    >>> novel_noise(2, (3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    return torch.rand(number, *shape, generator=generator, device=generator.device if generator else None)


# -------------------- corruptions after Hendrycks and Dietterich (2019, https://arxiv.org/abs/1903.12261)

CorruptionKind = Literal[
    "noise", "blur", "brightness", "contrast", "shot", "impulse", "speckle", "defocus", "motion", "zoom", "fog", "elastic",
    "pixelate", "jpeg",
]  # fmt: skip
Random = torch.Generator | None


def corrupt(images: Tensor, kind: str, strength: int, generator: Random = None) -> Tensor:
    r"""Corrupts images in [0, 1] by one of fourteen kinds. The amounts c of the five strengths are :data:`CORRUPTIONS`.

    ================  ==========================================================================================================
    ``"noise"``       :math:`x + c\,\epsilon`, normal :math:`\epsilon` for every value
    ``"shot"``        Poisson counts of mean :math:`c\,x`, divided by c
    ``"impulse"``     a fraction c of all values becomes 0 or 1
    ``"speckle"``     :math:`x + c\,x\,\epsilon`
    ``"blur"``        Gaussian filter of standard deviation c pixels
    ``"defocus"``     mean over a disk of radius c pixels
    ``"motion"``      mean along a line of c pixels, in a random direction for each image
    ``"zoom"``        mean of enlargements from 1 to c, in steps of 0.01
    ``"brightness"``  value (the largest channel) + c, with hue and saturation kept
    ``"contrast"``    :math:`c\,(x - m) + m`, m the mean of each channel of each image
    ``"fog"``         :math:`(x + c\,f)\, \max x / (\max x + c)`, f clouds in [0, 1]: noise of all scales
    ``"elastic"``     each pixel read from a place c pixels away (root mean square), in a smooth field of displacements
    ``"pixelate"``    scaled down to a fraction c of its sides and back, by areas
    ``"jpeg"``        cosine coefficients of 8 x 8 blocks rounded as JPEG does at quality c, every channel as luminance
    ================  ==========================================================================================================

    Beyond the border the last pixels are repeated. All results are clipped to [0, 1]. Corrupt images before they are normalized.

    Args:
        images: Images ``[..., C, H, W]``, real numbers in [0, 1], from :meth:`ImageSet.to_unit`.
        kind: Kind of corruption.
        strength: Strength from 1 (weakest) to 5.
        generator: Generator of the random kinds.

    >>> grey = torch.tensor([0.2, 0.6]).view(1, 1, 1, 2)
    >>> corrupt(grey, "contrast", 2).flatten()
    tensor([0.3000, 0.5000])
    >>> corrupt(grey, "brightness", 5).flatten()
    tensor([0.5000, 0.9000])
    """
    check("kind", kind, CorruptionKind)
    check("strength", strength, Annotated[int, Bounds(ge=1, le=5)])
    is_real = images.ndim >= 3 and images.is_floating_point()
    if not is_real or not bool(((images >= 0) & (images <= 1)).all()):
        raise FlowBNNError(
            f"corrupt needs real images [..., C, H, W] in [0, 1], got {images.dtype} of shape {tuple(images.shape)}; use "
            "ImageSet.to_unit and normalize afterwards",
            kind="images",
            argument="images",
        )
    if not images.numel():
        return images.clone()

    flat = images.flatten(0, -4) if images.ndim > 3 else images.unsqueeze(0)
    corrupted = _MAKERS[kind](flat, CORRUPTIONS[kind][int(strength) - 1], generator)
    return corrupted.clamp(0, 1).reshape(images.shape)


def _draw(sampler: Callable[..., Tensor], images: Tensor, generator: Random, *shape: int) -> Tensor:
    """Draws random numbers of the type of the images on the generator's device, and moves them to the images."""
    source = images.device if generator is None else generator.device
    return sampler(*shape, generator=generator, device=source, dtype=images.dtype).to(images.device)


def _noise(images: Tensor, amount: float, generator: Random) -> Tensor:
    return images + amount * _draw(torch.randn, images, generator, *images.shape)


def _shot(images: Tensor, amount: float, generator: Random) -> Tensor:
    mean = (amount * images).to(images.device if generator is None else generator.device)
    return torch.poisson(mean, generator=generator).to(images) / amount


def _impulse(images: Tensor, amount: float, generator: Random) -> Tensor:
    uniform = _draw(torch.rand, images, generator, *images.shape)
    return torch.where(uniform < amount / 2, 0.0, torch.where(uniform >= 1 - amount / 2, 1.0, images))


def _speckle(images: Tensor, amount: float, generator: Random) -> Tensor:
    return images + amount * images * _draw(torch.randn, images, generator, *images.shape)


def _blur(images: Tensor, amount: float, generator: Random) -> Tensor:
    # one matrix product for columns and one for rows, which include the repeated borders
    down, across = (_filter(side, amount).to(images) for side in images.shape[-2:])
    return down @ images @ across.mT


def _filter(length: int, std: float) -> Tensor:
    """Returns the matrix ``[length, length]`` of a Gaussian filter, truncated at four standard deviations."""
    radius = int(4 * std + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.softmax(-0.5 * (offsets.double() / std) ** 2, 0)
    indices = (torch.arange(length).unsqueeze(1) + offsets).clamp(0, length - 1)
    return torch.zeros(length, length, dtype=torch.float64).scatter_add_(
        1, indices, weights.expand_as(indices)
    )


def _defocus(images: Tensor, amount: float, generator: Random) -> Tensor:
    fine = (torch.arange(320, dtype=torch.float64) + 0.5) / 64 - 2.5  # 64 points for each of 5 pixels
    disk = (fine.square().unsqueeze(1) + fine.square() <= amount**2).double()
    kernel = F.avg_pool2d(disk.view(1, 1, 320, 320), 64)
    kernel = (kernel / kernel.sum()).to(images).expand(images.shape[1], 1, 5, 5)
    return F.conv2d(F.pad(images, (2, 2, 2, 2), "replicate"), kernel, groups=images.shape[1])


def _motion(images: Tensor, amount: float, generator: Random) -> Tensor:
    angle = math.pi * _draw(torch.rand, images, generator, len(images), 1, 1)
    steps = torch.linspace(-0.5, 0.5, 9).tolist()
    shifted = [_shift_pixels(images, amount * t * angle.sin(), amount * t * angle.cos()) for t in steps]
    return torch.stack(shifted).mean(0)


def _zoom(images: Tensor, amount: float, generator: Random) -> Tensor:
    rows, columns = (torch.arange(side).to(images) - (side - 1) / 2 for side in images.shape[-2:])
    factors = [1 + 0.01 * step for step in range(round(100 * (amount - 1)) + 1)]
    scaled = [
        _shift_pixels(images, (rows * (1 / factor - 1)).unsqueeze(1), columns * (1 / factor - 1))
        for factor in factors
    ]
    return torch.stack(scaled).mean(0)


def _brightness(images: Tensor, amount: float, generator: Random) -> Tensor:
    """Raises the value of hue, saturation and value. All channels are scaled alike; black becomes grey."""
    value = images.amax(-3, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, images * (raised / value.clamp(min=torch.finfo(images.dtype).tiny)), raised)


def _contrast(images: Tensor, amount: float, generator: Random) -> Tensor:
    mean = images.mean((-2, -1), keepdim=True)
    return amount * (images - mean) + mean


def _fog(images: Tensor, amount: float, generator: Random) -> Tensor:
    number, _, height, width = images.shape
    clouds, size = torch.zeros_like(images[:, :1]), 2
    while size <= max(height, width):  # coarse noise has more weight than fine noise
        coarse = _draw(torch.rand, images, generator, number, 1, size, size)
        clouds = clouds + F.interpolate(coarse, (height, width), mode="bilinear", align_corners=True) / size
        size *= 2
    low, high = clouds.amin((-2, -1), keepdim=True), clouds.amax((-2, -1), keepdim=True)
    clouds = (clouds - low) / (high - low).clamp(min=1e-6)
    maximum = images.amax((-3, -2, -1), keepdim=True)
    return (images + amount * clouds) * maximum / (maximum + amount)


def _elastic(images: Tensor, amount: float, generator: Random) -> Tensor:
    number, _, height, width = images.shape
    field = _blur(_draw(torch.randn, images, generator, number, 2, height, width), 2.0, generator)
    field = amount * field / field.square().sum(1, keepdim=True).mean((-2, -1), keepdim=True).sqrt()
    return _shift_pixels(images, field[:, 0], field[:, 1])


def _pixelate(images: Tensor, amount: float, generator: Random) -> Tensor:
    sides = images.shape[-2:]
    small = F.interpolate(images, [max(1, int(side * amount)) for side in sides], mode="area")
    return F.interpolate(small, sides, mode="area")


# quantization steps of luminance at quality 50: table K.1 of the standard, ITU-T T.81
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
    """Compresses images as JPEG does, by quantized cosine transforms of blocks of 8 x 8 pixels."""
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


def _shift_pixels(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Reads each pixel by bilinear interpolation from the place that is ``down`` and ``right`` of it."""
    height, width = images.shape[-2:]
    rows, columns = (
        torch.arange(height).to(images).unsqueeze(1) + down,
        torch.arange(width).to(images) + right,
    )
    grid = torch.stack(
        [
            (2 * coordinates + 1) / side - 1
            for coordinates, side in zip(torch.broadcast_tensors(columns, rows), (width, height), strict=True)
        ],
        -1,
    )
    grid = grid.expand(len(images), height, width, 2)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


_MAKERS: dict[str, Callable[[Tensor, float, Random], Tensor]] = {
    "noise": _noise, "blur": _blur, "brightness": _brightness, "contrast": _contrast, "shot": _shot, "impulse": _impulse,
    "speckle": _speckle, "defocus": _defocus, "motion": _motion, "zoom": _zoom, "fog": _fog, "elastic": _elastic,
    "pixelate": _pixelate, "jpeg": _jpeg,
}  # fmt: skip
CORRUPTIONS: dict[str, tuple[float, ...]] = {  # amounts of the five strengths, chosen for images of 32x32
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
