"""Cases: rearrangements of images, and couplings of images by convolutions."""

from case import Case

from flowbnn.nets import GatedConvNet
from flowbnn.transforms import (
    AffineMap,
    ChannelsFirst,
    Checkerboard,
    Compose,
    Coupling,
    Inverse,
    LULinear,
    MultiScale,
    Reshape,
    Squeeze,
    Transform,
)

__all__ = ["CASES"]

IMAGE = "an image has more than two numbers"


def checkered(dim: int) -> Transform:
    """A coupling of the white squares of a checkerboard by the black ones."""
    net = GatedConvNet(dim, 2 * dim, hidden=4, blocks=1)
    return Compose(Checkerboard(), Coupling(2 * dim, AffineMap(), net=net), Inverse(Checkerboard()))


def image(name: str, covers: type[Transform], build: object, dim: int = 4, **given: object) -> Case:
    return Case(name, covers, build, dim, quadrature=(), no_quadrature=IMAGE, **given)  # type: ignore[arg-type]


CASES: list[Case] = [
    image("reshape", Reshape, lambda dim: Reshape((dim,), (2, 2, dim // 4))),
    image("channels-first", ChannelsFirst, lambda dim: ChannelsFirst()),
    image("squeeze", Squeeze, lambda dim: Squeeze()),
    image("checkerboard", Checkerboard, lambda dim: Checkerboard()),
    image(
        "image-coupling",
        Compose,
        checkered,
        spread=0.2,
        wakes_later=("net.first", "net.wide", "net.gates"),
    ),
    image(
        "one-scale",
        MultiScale,
        lambda dim: MultiScale((4, dim // 4, 1), 1, 1, lambda channels, number: LULinear(channels)),
        dim=8,
    ),
]
