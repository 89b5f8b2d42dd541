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


def checkerboard_coupling(dim: int) -> Transform:
    """Returns a coupling of the two colours of a checkerboard."""
    net = GatedConvNet(dim, 2 * dim, hidden=4, blocks=1)
    return Compose(Checkerboard(), Coupling(2 * dim, AffineMap(), net=net), Inverse(Checkerboard()))


def image(name: str, covers: type[Transform], build: object, dim: int = 4, **options: object) -> Case:
    return Case(name, covers, build, dim, quadrature=(), no_quadrature=IMAGE, **options)  # type: ignore[arg-type]


CASES: list[Case] = [
    image("reshape", Reshape, lambda dim: Reshape((dim,), (2, 2, dim // 4))),
    image("channels-first", ChannelsFirst, lambda dim: ChannelsFirst()),
    image("squeeze", Squeeze, lambda dim: Squeeze()),
    image("checkerboard", Checkerboard, lambda dim: Checkerboard()),
    image(
        "image-coupling",
        Compose,
        checkerboard_coupling,
        spread=0.2,
        zero_gradient_at_start=("net.first", "net.convolutions", "net.gates"),
    ),
    image(
        "one-scale",
        MultiScale,
        lambda dim: MultiScale((4, dim // 4, 1), 1, 1, lambda channels, index: LULinear(channels)),
        dim=8,
    ),
]
