"""Named kinds of noise. Each is a few lines over one mechanism: a base, a list of transforms, a prior.

A recipe holds plain values only, so that it prints, compares and saves; :meth:`Recipe.build` makes the module for one layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, fields
from typing import Annotated, Any, Literal

from flowbnn.distributions import Base, MixtureBase, NormalBase, StudentBase
from flowbnn.distributions.bases import DegreesOfFreedom
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
    """What noise a layer gets.

    Args:
        site: ``"channel"``, one vector for the whole feature map, or ``"position"``, one at every position (Xiong's report).
        side: ``"input"``, or ``"output"``: the noise multiplies what a linear layer or a convolution gives, bias included.
        prior_loc, prior_scale: the prior on the transformed noise, :math:`N(1, 0.5^2)` as in Xiong's report.
        base_loc, base_scale: the base before the transforms. It is narrower than the prior, so that a trained network begins about
            where it was and the noise widens to what the data allow.
        prior_df, base_df: degrees of freedom, above 2, of a Student-t in place of the normal prior or base, which then has heavy tails;
            the KL is estimated from ``kl_samples`` draws. A Student-t has a larger standard deviation than its scale.
        components: above 1, the base is an equal mixture of that many learned normals, which gives many modes.
        positions: with site ``"position"``: ``"mean"`` counts the KL of one position, as Xiong's report does, which tempers
            it; a number counts that many positions, exact when it is the size of the feature map.
        kl_samples: fresh draws for each estimate of a KL that has no closed form.
        batch_axis: the axis of the examples in the layer's input, or ``"none"`` where it has none; None finds it (axis 0, or 1
            inside torch's sequence-first layers) and lets ``fit`` correct it from the first batch.
        joint: all layers that have this same recipe share one vector, whose Gaussian has a ``"full"`` covariance; or one that is full
            within a layer, and across layers a ``"chain"``, ``"low-rank"``, or nothing (``"layers"``). The recipe's flow, if it has
            one, acts on the whole vector, before the covariance. None: every layer has noise of its own, which begins factorized.
        rank: of ``joint="low-rank"``.

    >>> print(Recipe(prior_scale=0.3, joint="full"))
    Recipe(prior_scale=0.3, joint='full')
    """

    site: Annotated[Site, Hint("for noise on outputs say side='output'")] = "channel"
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
        """The flow for vectors of length ``dim``, after the learnable Gaussian that every recipe begins with."""
        return ()

    def build(self, layout: Layout) -> Noise:
        """The noise module for one layer."""
        affine = Affine(layout.dim, center=self.base_loc)
        return self._noise(
            layout, Compose(affine, *self.transforms(layout.dim)), self.base_loc, self.base_scale
        )

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        """The noise modules of layers that share one vector."""
        if self.site == "position":
            raise FlowBNNError(
                f"joint={self.joint!r} is for one vector a layer; leave out site='position'",
                kind="site",
                argument="joint",
            )
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
        if self.rank != Recipe.rank and self.joint != "low-rank":
            raise FlowBNNError(
                f"rank={self.rank} is of joint='low-rank' alone; say so or leave it out", argument="rank"
            )
        if self.components != 1 and self.base_df is not None:
            raise FlowBNNError(
                "a mixture has normal components; leave out base_df or components", argument="base_df"
            )
        if transform.discrete or transform.stochastic:
            raise FlowBNNError(
                f"{self} is no bijection of real vectors, which noise needs", kind="unsupported"
            )
        warn_slow_sampling(transform, self)
        base = _of_kind(layout.dim, loc, scale, self.base_df)
        if self.components != 1:
            base = MixtureBase(layout.dim, self.components, loc, scale)
        prior = _of_kind(layout.dim, self.prior_loc, self.prior_scale, self.prior_df)
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


def _of_kind(dim: int, loc: float, scale: float, df: float | None) -> Base:
    return NormalBase(dim, loc, scale) if df is None else StudentBase(dim, loc, scale, df)


@options
class NormalAffine(Recipe):
    """The learnable Gaussian of the implicit Bayesian network (Trinh et al., 2020); Xiong's report has it as "no flow".

    >>> print(NormalAffine(prior_scale=0.3))
    NormalAffine(prior_scale=0.3)
    """


@options
class NormalPlanar(Recipe):
    """``length`` planar flows after the learnable Gaussian; Xiong's report has two.

    >>> NormalPlanar(length=3).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [PlanarLU(dim, [("planar", self.length)])]


@options
class NormalRadial(Recipe):
    """``length`` radial flows after the learnable Gaussian.

    >>> NormalRadial().build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [Radial(dim) for _ in range(self.length)]


@options
class NormalSylvester(Recipe):
    """``length`` Householder Sylvester flows after the learnable Gaussian (van den Berg et al., 2018).

    >>> NormalSylvester(reflections=2).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2
    reflections: Size = 4

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [Sylvester(dim, "householder", min(self.reflections, dim)) for _ in range(self.length)]


@options
class NormalInvConv(Recipe):
    """The block for convolutions of Xiong's report: planar flows, invertible 1x1 convolutions, planar flows.

    The features lie on the last axis, where the LU map *is* the invertible 1x1 convolution, so that this recipe serves a
    linear layer just as well.

    >>> NormalInvConv(convolutions=1).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    planar: Length = 2
    convolutions: Length = 3

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [PlanarLU(dim, [("planar", self.planar), ("lu", self.convolutions), ("planar", self.planar)])]


@options
class NormalCoupling(Recipe):
    """``length`` affine couplings (RealNVP) with a reversal between them; one-dimensional noise stays Gaussian.

    >>> NormalCoupling(hidden=16).build(Layout(8)).draw((2,)).shape
    torch.Size([2, 8])
    """

    length: Length = 2
    hidden: Size = 32

    def transforms(self, dim: int) -> Sequence[Transform]:
        if dim < 2:
            return ()
        steps = [(AffineCoupling(dim, hidden=(self.hidden,)), Reverse(dim)) for _ in range(self.length)]
        return [part for step in steps for part in step]


@options
class NormalGlow(Recipe):
    """``length`` Glow steps: the block that diverged in Xiong's report, with bounded couplings.

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
    """A flow of :mod:`flowbnn.flows` by its name, between a standard normal base and the learnable scale and location of the noise.

    Names are those of the recipes in small letters. Where a recipe has a direction that is cheap (``cheap=``), draws are.

    Args:
        flow: ``"nsf"``, ``"iaf"``, ``"realnvp"``, ...
        length: number of its steps.
        settings: other settings of that recipe.

    >>> noise = NormalFlow("iaf", settings={"hidden": (16,)}).build(Layout(8))
    >>> noise.draw((2,)).shape
    torch.Size([2, 8])
    """

    flow: str = "nsf"
    length: Size = 2
    settings: Mapping[str, Any] = field(default_factory=dict)

    __hash__ = Recipe.__hash__  # settings are a dictionary

    def __post_init__(self) -> None:
        known = named_flows()
        if self.flow not in known:
            raise FlowBNNError(
                f"NormalFlow has no flow {self.flow!r}{nearest(self.flow, known)}", argument="flow"
            )

    def transforms(self, dim: int) -> Sequence[Transform]:
        return [make_posterior_transform(self.flow, dim, length=self.length, **self.settings)]

    def build(self, layout: Layout) -> Noise:
        affine = Affine(layout.dim)
        affine.set_loc_and_scale(self.base_loc, self.base_scale)
        return self._noise(layout, Compose(*self.transforms(layout.dim), affine), 0.0, 1.0)


@options
class FlowNoise(Recipe):
    """Any flow: ``factory(dim)`` gives a transform, of ours or of your own.

    >>> noise = FlowNoise(lambda dim: Compose(Radial(dim), Radial(dim))).build(Layout(8))
    >>> noise.draw((2,)).shape
    torch.Size([2, 8])
    """

    factory: Callable[[int], Transform] | None = None

    def transforms(self, dim: int) -> Sequence[Transform]:
        usable = callable(self.factory) and not isinstance(self.factory, Transform)
        made = self.factory(dim) if usable else None  # type: ignore[misc]
        if not isinstance(made, Transform):
            raise FlowBNNError(
                "FlowNoise needs a function of the dimension that gives a flowbnn transform, such as "
                f"FlowNoise(lambda dim: Planar(dim)), not {describe_value(made if usable else self.factory)}"
            )
        return [made]

    def __str__(self) -> str:
        return f"FlowNoise({getattr(self.factory, '__name__', type(self.factory).__name__)})"

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": "FlowNoise"}


@options
class Dropout(Recipe):
    """Dropout on the layer's input, kept on at prediction (MC dropout); no KL, nothing to train.

    It drops single values; ``site="channel"`` drops whole channels.

    >>> print(Dropout(0.2))
    Dropout(rate=0.2)
    """

    rate: Annotated[float, Bounds(ge=0, lt=1)] = 0.1
    site: Site = field(default="position", kw_only=True)

    def build(self, layout: Layout) -> Noise:
        return DropoutNoise(layout, self.rate, self.site)

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        raise FlowBNNError(
            f"dropout has no posterior that layers could share; leave out joint={self.joint!r}, or give it to the other recipes alone",
            kind="unsupported",
            argument="joint",
        )


def recipe_from_dict(document: dict[str, Any]) -> Recipe:
    """The recipe that :meth:`Recipe.to_dict` wrote.

    >>> recipe_from_dict(NormalPlanar(3).to_dict()) == NormalPlanar(3)
    True
    """
    check("recipe", document, dict)
    settings = dict(document)
    name = settings.pop("recipe", "")
    known = {kind.__name__: kind for kind in all_subclasses(Recipe)}
    if name not in known:
        raise FlowBNNError(f"there is no recipe {name!r}{nearest(str(name), known)}")
    if name == "FlowNoise":
        raise FlowBNNError(
            "a FlowNoise is code and cannot be stored; convert the network with the same rules, then load into it",
            kind="unsupported",
        )
    return known[name](**settings)
