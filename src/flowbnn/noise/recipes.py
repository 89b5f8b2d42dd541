"""Recipes: named kinds of noise, each a base, a list of transforms and a prior.

A recipe holds plain values only, so that it can be printed, compared and saved. :meth:`Recipe.build` makes the module for one layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, fields
from typing import Annotated, Any, Literal

from flowbnn.distributions import Base, MixtureBase, NormalBase, StudentBase
from flowbnn.distributions.vectors import DegreesOfFreedom
from flowbnn.errors import FlowBNNError, describe_value, nearest
from flowbnn.flows import make_posterior_transform, named_flows
from flowbnn.noise.base import DropoutNoise, Noise, Site
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import check_size, join
from flowbnn.noise.layout import Layout
from flowbnn.options import Bounds, Count, Hint, Positive, all_subclasses, check, options
from flowbnn.transforms import (
    AffineCoupling,
    BlockTriangular,
    Compose,
    GlowStep,
    PlanarLU,
    Radial,
    Reverse,
    Sylvester,
    Transform,
)
from flowbnn.transforms.base import warn_slow_sampling
from flowbnn.transforms.elementwise import Affine

Size = Annotated[int, Bounds(ge=1, le=10_000)]
Length = Annotated[int, Bounds(ge=0, le=10_000)]


@options(kw_only=True)
class Recipe:
    """Base class for recipes of noise.

    Args:
        site: ``"channel"`` for one vector per feature map, ``"position"`` for one vector at every position (Xiong's report).
        side: ``"input"``, or ``"output"`` to multiply the output of a linear layer or a convolution, bias included.
        prior_loc: Location of the prior of the transformed noise, 1 in Xiong's report.
        prior_scale: Scale of the prior, 0.5 in Xiong's report.
        base_loc: Location of the base before the transforms.
        base_scale: Scale of the base. It is smaller than that of the prior, so that a trained network starts close to its weights.
        prior_df: Degrees of freedom, above 2, of a Student-t prior instead of a normal one. The KL is then estimated from
            ``kl_samples`` draws. The standard deviation of a Student-t exceeds its scale.
        base_df: Degrees of freedom, above 2, of a Student-t base instead of a normal one.
        components: Number of components of the base. More than 1 make it an equal mixture of learned normals, with many modes.
        positions: Number of positions whose KL is counted at site ``"position"``. It is exact for the size of the feature map.
            ``"mean"`` counts one position, as Xiong's report does, which tempers the KL.
        kl_samples: Number of draws for each estimate of a KL without closed form.
        batch_axis: Axis of the examples in the layer's input, or ``"none"`` if it has none. None chooses axis 0, or 1 inside torch's
            sequence-first layers, and lets ``fit`` correct it from the first batch.
        joint: Structure of the covariance of one noise vector that all layers with this recipe share. ``"full"`` is a full covariance.
            The others are full within a layer, and between layers a ``"chain"``, ``"low-rank"``, or independent (``"layers"``). A flow
            of the recipe acts on the whole vector, before the covariance. None gives every layer its own, factorized noise.
        rank: Rank of ``joint="low-rank"``.

    >>> print(Recipe(prior_scale=0.3, joint="full"))
    Recipe(prior_scale=0.3, joint='full')
    """

    site: Annotated[Site, Hint("side='output' for outputs")] = "channel"
    side: Literal["input", "output"] = "input"
    prior_loc: float = 1.0
    prior_scale: Positive = 0.5
    base_loc: float = 1.0
    base_scale: Positive = 0.1
    prior_df: DegreesOfFreedom | None = None
    base_df: DegreesOfFreedom | None = None
    components: Size = 1
    positions: Count | Literal["mean"] = "mean"
    kl_samples: Count = 16
    batch_axis: int | Literal["none"] | None = None
    joint: Literal["full", "chain", "low-rank", "layers"] | None = None
    rank: Count = 16

    def transforms(self, dim: int) -> Sequence[Transform]:
        """Returns the transforms for vectors of length ``dim``, after the learnable Gaussian that every recipe begins with."""
        return ()

    def build(self, layout: Layout) -> Noise:
        """Returns the noise module for one layer."""
        affine = Affine(layout.dim, center=self.base_loc)
        return self._noise(
            layout, Compose(affine, *self.transforms(layout.dim)), self.base_loc, self.base_scale
        )

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        """Returns the noise modules of layers that share one vector."""
        if self.site == "position":
            text = f"joint={self.joint!r} does not support site='position'"
            raise FlowBNNError(text, kind="site", argument="joint")
        sizes = tuple(layout.dim for layout in layouts)
        check_size(self.joint or "layers", sizes)
        dim = sum(sizes)
        blocks, across = (sizes, self.joint or "layers") if self.joint != "full" else ((dim,), "layers")
        covariance = BlockTriangular(
            blocks, "none" if across == "layers" else across, self.rank, self.base_loc, self.base_scale
        )
        flow = self.transforms(dim)
        transform = Compose(*flow, covariance) if flow else covariance
        return join(self._noise(Layout(dim), transform, 0.0, 1.0), layouts)

    def _noise(self, layout: Layout, transform: Transform, loc: float, scale: float) -> InputNoise:
        """Returns noise with a transform, a normal base with this mean and standard deviation, and the prior of the recipe."""
        if self.rank != Recipe.rank and self.joint != "low-rank":
            raise FlowBNNError(f"rank={self.rank} requires joint='low-rank'", argument="rank")
        if self.components != 1 and self.base_df is not None:
            text = "components and base_df cannot be combined: a mixture has normal components"
            raise FlowBNNError(text, argument="base_df")
        if transform.discrete or transform.stochastic:
            raise FlowBNNError(f"noise needs a bijection of real vectors, got {self}", kind="unsupported")
        warn_slow_sampling(transform, self)
        base = _make_base(layout.dim, loc, scale, self.base_df)
        if self.components != 1:
            base = MixtureBase(layout.dim, self.components, loc, scale)
        prior = _make_base(layout.dim, self.prior_loc, self.prior_scale, self.prior_df)
        return InputNoise(
            base, transform, prior, layout, self.site, self.positions, self.kl_samples, str(self)
        )

    def __str__(self) -> str:
        common = {f.name for f in fields(Recipe)}
        changed = [f for f in fields(self) if f.name not in common or getattr(self, f.name) != f.default]
        changed.sort(key=lambda f: f.name in common)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": type(self).__name__, **asdict(self)}


def _make_base(dim: int, loc: float, scale: float, df: float | None) -> Base:
    return NormalBase(dim, loc, scale) if df is None else StudentBase(dim, loc, scale, df)


@options
class NormalAffine(Recipe):
    """Learnable Gaussian of the implicit Bayesian network (Trinh et al., 2020), called "no flow" in Xiong's report.

    >>> print(NormalAffine(prior_scale=0.3))
    NormalAffine(prior_scale=0.3)
    """


@options
class NormalPlanar(Recipe):
    """Planar flows after the learnable Gaussian.

    Args:
        length: Number of planar flows, 2 in Xiong's report.

    >>> NormalPlanar(length=3).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [PlanarLU(dim, [("planar", self.length)])]


@options
class NormalRadial(Recipe):
    """Radial flows after the learnable Gaussian.

    Args:
        length: Number of radial flows.

    >>> NormalRadial().build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [Radial(dim) for _ in range(self.length)]


@options
class NormalSylvester(Recipe):
    """Householder Sylvester flows after the learnable Gaussian (van den Berg et al., 2018).

    Args:
        length: Number of flows.
        reflections: Number of Householder reflections of each flow.

    >>> NormalSylvester(reflections=2).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2
    reflections: Size = 4

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [Sylvester(dim, "householder", min(self.reflections, dim)) for _ in range(self.length)]


@options
class NormalInvConv(Recipe):
    """Block of Xiong's report for convolutions: planar flows, invertible 1x1 convolutions, planar flows.

    The features are on the last axis, where an LU map is the invertible 1x1 convolution. The recipe therefore also suits linear layers.

    Args:
        planar: Number of planar flows before and after the convolutions.
        convolutions: Number of invertible 1x1 convolutions.

    >>> NormalInvConv(convolutions=1).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    planar: Length = 2
    convolutions: Length = 3

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [PlanarLU(dim, [("planar", self.planar), ("lu", self.convolutions), ("planar", self.planar)])]


@options
class NormalCoupling(Recipe):
    """Affine couplings (RealNVP) with a reversal after each. One-dimensional noise stays Gaussian.

    Args:
        length: Number of couplings.
        hidden: Width of the hidden layer of their networks.

    >>> NormalCoupling(hidden=16).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2
    hidden: Size = 32

    def transforms(self, dim: int) -> Sequence[Transform]:
        if dim < 2:
            return ()
        steps = [(AffineCoupling(dim, hidden=(self.hidden,)), Reverse(dim)) for _ in range(self.length)]
        return [transform for step in steps for transform in step]


@options
class NormalGlow(Recipe):
    """Glow steps with bounded couplings. The block of Xiong's report, whose couplings are unbounded, diverged.

    Args:
        length: Number of steps.
        hidden: Width of the hidden layer of the couplings.

    >>> NormalGlow(length=1).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2
    hidden: Size = 32

    def transforms(self, dim: int) -> Sequence[Transform]:
        if dim < 2:
            return ()
        return [GlowStep(dim, hidden=(self.hidden,), flip=bool(i % 2)) for i in range(self.length)]


@options
class NormalFlow(Recipe):
    """Flow of :mod:`flowbnn.flows` by its name, between a standard normal base and a learnable scale and location.

    If one direction of the flow is cheap (``cheap=``), it is used for draws.

    Args:
        flow: Name of the flow in lower case, such as ``"nsf"``, ``"iaf"`` or ``"realnvp"``.
        length: Number of steps.
        settings: Other settings of the flow.

    >>> noise = NormalFlow("iaf", settings={"hidden": (16,)}).build(Layout(8))
    >>> noise.draw((2,)).shape
    torch.Size([2, 8])
    """

    flow: str = "nsf"
    length: Size = 2
    settings: Mapping[str, Any] = field(default_factory=dict)

    __hash__ = Recipe.__hash__  # settings are a dictionary

    def __post_init__(self) -> None:
        flows = named_flows()
        if self.flow not in flows:
            text = f"unknown flow {self.flow!r}{nearest(self.flow, flows)}"
            raise FlowBNNError(text, argument="flow")

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [make_posterior_transform(self.flow, dim, length=self.length, **self.settings)]

    def build(self, layout: Layout) -> Noise:
        affine = Affine(layout.dim)
        affine.set_loc_and_scale(self.base_loc, self.base_scale)
        return self._noise(layout, Compose(*self.transforms(layout.dim), affine), 0.0, 1.0)


@options
class FlowNoise(Recipe):
    """Noise from any transform.

    Args:
        factory: Function from the dimension to a :class:`~flowbnn.transforms.Transform`.

    >>> noise = FlowNoise(lambda dim: Compose(Radial(dim), Radial(dim))).build(Layout(8))
    >>> noise.draw((2,)).shape
    torch.Size([2, 8])
    """

    factory: Callable[[int], Transform] | None = None

    def transforms(self, dim: int) -> Sequence[Transform]:
        usable = callable(self.factory) and not isinstance(self.factory, Transform)
        transform = self.factory(dim) if usable else None  # type: ignore[misc]
        if not isinstance(transform, Transform):
            value = describe_value(transform if usable else self.factory)
            text = f"FlowNoise needs a function from the dimension to a transform, such as lambda dim: Planar(dim), got {value}"
            raise FlowBNNError(text, argument="factory")
        return [transform]

    def __str__(self) -> str:
        return f"FlowNoise({getattr(self.factory, '__name__', type(self.factory).__name__)})"

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": "FlowNoise"}


@options
class Dropout(Recipe):
    """Dropout on the layer's input that is active at prediction (MC dropout). It has no KL and no parameters.

    Args:
        rate: Probability that a value is dropped.
        site: ``"position"`` to drop single values, ``"channel"`` to drop whole channels.

    >>> print(Dropout(0.2))
    Dropout(rate=0.2)
    """

    rate: Annotated[float, Bounds(ge=0, lt=1)] = 0.1
    site: Site = field(default="position", kw_only=True)

    def build(self, layout: Layout) -> Noise:
        return DropoutNoise(layout, self.rate, self.site)

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        text = f"Dropout does not support joint={self.joint!r}; set joint in the other recipes only"
        raise FlowBNNError(text, kind="unsupported", argument="joint")


def recipe_from_dict(document: dict[str, Any]) -> Recipe:
    """Returns the recipe that :meth:`Recipe.to_dict` wrote.

    >>> recipe_from_dict(NormalPlanar(3).to_dict()) == NormalPlanar(3)
    True
    """
    check("recipe", document, dict)
    settings = dict(document)
    name = settings.pop("recipe", "")
    recipes = {kind.__name__: kind for kind in all_subclasses(Recipe)}
    if name not in recipes:
        raise FlowBNNError(f"unknown recipe {name!r}{nearest(str(name), recipes)}")
    if name == "FlowNoise":
        text = "a FlowNoise cannot be saved; load into a network converted with the same rules"
        raise FlowBNNError(text, kind="unsupported")
    return recipes[name](**settings)
