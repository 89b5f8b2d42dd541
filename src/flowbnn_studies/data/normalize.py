"""From bytes to what a network takes, on the device that is asked for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["Normalize", "usable_device"]


class Normalize:
    r"""Images in bytes, or in real numbers from 0 to 1, to :math:`(x - \text{mean}) / \text{deviation}` of each channel.

    Bytes are divided by 255 first. The arithmetic is in 32 bits (64 where ``dtype`` asks for it); the memory format of
    the images stays, and after the first call on a device nothing waits for it.

    Args:
        mean, deviation: one number for each channel, in units of [0, 1].
        dtype: of the result.

    >>> Normalize([0.5], [0.25])(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)).flatten()
    tensor([-2., 2.])
    """

    row_wise = True  # an example comes out the same whatever else is in its batch

    def __init__(
        self, mean: Sequence[float], deviation: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> None:
        if len(mean) != len(deviation) or not all(value > 0 for value in deviation):
            raise FlowBNNError("mean and deviation have one number for each channel, deviations above 0")
        if not dtype.is_floating_point:
            raise FlowBNNError(f"normalized images are real numbers, which {dtype} is not")
        self.mean, self.deviation, self.dtype = tuple(mean), tuple(deviation), dtype
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise FlowBNNError(
                f"images have {len(self.mean)} channels on their third axis from the end, not shape {tuple(images.shape)}"
            )
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise FlowBNNError(f"images are bytes (uint8) or real numbers in [0, 1], not {images.dtype}")
        scale, shift = self._on(images.device, images.dtype == torch.uint8)
        return torch.addcmul(shift, images.to(scale.dtype), scale).to(self.dtype)

    def _on(self, device: torch.device, in_bytes: bool) -> tuple[Tensor, Tensor]:
        if (device, in_bytes) not in self._constants:
            mean, deviation = (
                torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.deviation)
            )
            kind = torch.float64 if self.dtype == torch.float64 else torch.float32
            scale = 1 / (deviation * (255 if in_bytes else 1))
            self._constants[device, in_bytes] = scale.to(device, kind), (-mean / deviation).to(device, kind)
        return self._constants[device, in_bytes]

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, deviation={self.deviation}, dtype={self.dtype})"


def usable_device(device: torch.device | str) -> torch.device:
    """The device, or one line saying that it is not there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        place = torch.device(device)
    except RuntimeError:
        raise FlowBNNError(
            f"there is no device called {device!r}; 'cpu' and 'cuda' are the usual ones"
        ) from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"torch sees {count} here" if count else "torch sees none here"
        raise FlowBNNError(
            f"device {str(place)!r} asks for a GPU but {seen}; use 'cpu', or a CUDA build of torch"
        )
    return place
