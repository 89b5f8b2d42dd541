"""One page for each family of flows: formula, members, cost, and the transforms that it is made of."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from flowbnn_site.api import Name, gallery_picture, write

# scripts of the gallery that draw the families, in the order of FAMILIES, and the number of their pictures
PICTURES = {"plot_16_flow_families": 5, "plot_22_flows_of_other_data": 4}


@dataclass(frozen=True)
class FlowFamily:
    """A family of flows.

    Args:
        title: Name of the family.
        formula: One step from base to sample, in TeX.
        explanation: Symbols and properties of the formula.
        density: Cost of a density.
        draw: Cost of a draw.
        use: Cases in which to use the family.
        flows: Named flows of :mod:`flowbnn.flows`.
        transforms: Members of :mod:`flowbnn.transforms`.
    """

    title: str
    formula: str
    explanation: str
    density: str
    draw: str
    use: str
    flows: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()


FAMILIES = {
    "couplings": FlowFamily(
        "Coupling flows",
        r"x_a = z_a, \qquad x_b = g\left(z_b;\, \theta(z_a)\right), \qquad \log|\det| = \sum_i \log g'(z_{b,i})",
        r"Half of the entries, $z_a$, stays and determines the parameters $\theta$ of an increasing map $g$ of the other half.",
        "1 pass",
        "1 pass",
        "First choice in most cases: both directions cost one pass. `NSF` is the most accurate for tables.",
        ("NICE", "RealNVP", "Glow", "NSF", "FlowPP"),
        ("Coupling", "AdditiveCoupling", "AffineCoupling", "GlowStep", "ShiftMap", "AffineMap", "SplineMap", "CircularSplineMap", "LogisticMixtureMap"),
    ),
    "autoregressive": FlowFamily(
        "Autoregressive flows",
        r"x_i = g\left(z_i;\, \theta_i(x_{<i})\right), \qquad \log|\det| = \sum_i \log g'(z_i)",
        r"Each entry is mapped with parameters from all previous entries. `MAF` reads previous samples, `IAF` previous base points.",
        "1 pass (`MAF`, `NAF`), as many as entries (`IAF`)",
        "as many passes as entries (`MAF`, `NAF`), 1 pass (`IAF`)",
        "`MAF` or `NAF` for densities, `IAF` for noise and for posteriors.",
        ("MAF", "IAF", "NAF"),
        ("Autoregressive", "SigmoidalMap"),
    ),
    "planar": FlowFamily(
        "Planar, radial, Sylvester and Householder flows",
        r"x = z + u \tanh(w^\top z + b), \qquad \log|\det| = \log\left|1 + \tanh'(w^\top z + b)\, w^\top u\right|",
        r"A planar step moves points along one direction $u$. A radial step moves them around a centre, a Sylvester step along all directions.",
        "root search for each step",
        "1 pass, very cheap",
        "Noise of a network and posteriors of autoencoders, where only draws and their own densities are needed.",
        ("Planar", "Radial", "Sylvester", "Householder"),
        ("Planar", "PlanarLU", "Radial", "Sylvester", "Householder", "BlockTriangular"),
    ),
    "residual": FlowFamily(
        "Residual flows",
        r"z = x + g(x), \quad \mathrm{Lip}(g) < 1, \qquad \log|\det| = \sum_{k=1}^\infty \frac{(-1)^{k+1}}{k} \mathrm{tr}\, J_g^k",
        r"$g$ is a contraction, so that the step has an inverse. The series of traces is computed exactly, truncated, or estimated without bias.",
        "1 pass and a log-determinant",
        "fixed-point iteration",
        "All entries should move at once, without a split or an order.",
        ("ResidualFlow",),
        ("Residual",),
    ),
    "continuous": FlowFamily(
        "Continuous-time flows",
        r"\frac{dz}{dt} = f(t, z), \qquad \log p\left(z(1)\right) = \log p\left(z(0)\right) - \int_0^1 \mathrm{tr}\, \frac{\partial f}{\partial z}\, dt",
        r"A network $f$ is the velocity of the points. Flow matching trains it without a solver.",
        "numerical solution, tens of evaluations",
        "numerical solution, tens of evaluations",
        "Smooth densities without a chosen architecture, or training by flow matching.",
        ("FFJORD",),
        ("NeuralODE", "flow_matching_loss"),
    ),
    "images": FlowFamily(
        "Flows of images",
        r"x = f_1 \circ \dots \circ f_L(z), \qquad z = (z_1, \dots, z_L)",
        r"Each level squeezes squares of pixels to channels, applies couplings and 1x1 convolutions, and splits off half of the channels.",
        "1 pass",
        "1 pass",
        "Bits per dimension of images, samples, and novelty by the density of features.",
        ("Glow", "FlowPP", "ResidualFlow", "IDF"),
        ("MultiScale", "Squeeze", "Checkerboard", "ChannelsFirst", "ActNorm", "LULinear", "GlowStep"),
    ),
    "surjective": FlowFamily(
        "Surjective and stochastic transforms",
        r"\log p(x) = \log p(z) + V(x, z), \qquad z \sim q(z \mid x)",
        r"The contribution $V$ replaces the log-determinant. It is exact if the forward direction draws, and a bound if the inverse draws.",
        "1 pass; a bound for some",
        "1 pass",
        "Integers, symmetric data, more or fewer dimensions than the base.",
        (),
        ("Dequantization", "Augment", "Slice", "AbsoluteValue", "MaxPool", "Argmax", "VAELayer"),
    ),
    "discrete": FlowFamily(
        "Discrete flows",
        r"x_b = z_b + \left\lfloor t(z_a) \right\rceil, \qquad P(x) = P(z)",
        r"Integers are shifted by rounded numbers, categories modulo their number. There is no volume term.",
        "1 pass, exact probabilities",
        "1 pass",
        "Integers and categories whose exact probabilities matter, such as compression.",
        ("IDF", "DiscreteFlow"),
        ("IntegerShiftMap", "ModularMap", "Integers", "OneHot"),
    ),
    "elementwise": FlowFamily(
        "Elementwise and linear transforms",
        r"x = A z + b, \qquad \log|\det| = \log|\det A|",
        r"Building blocks between other steps: scales, permutations, triangular matrices, and fixed functions of each entry.",
        "1 pass",
        "1 pass",
        "You build a flow of your own with `fb.transforms.Compose`.",
        (),
        ("Affine", "LULinear", "Permutation", "Reverse", "Shuffle", "ActNorm", "BatchNorm", "Exp", "Sigmoid", "Logit", "Softplus", "Tanh", "Reshape", "Compose", "Inverse"),
    ),
}  # fmt: skip


def _page(script: str, number: int, family: FlowFamily) -> str:
    def listing(module: str, names: tuple[str, ...]) -> list[str]:
        package = import_module(f"flowbnn.{module}")
        lines = ["```{eval-rst}", ".. list-table::", "   :widths: 30 70", ""]
        for name in names:
            summary = Name(f"flowbnn.{module}", name, getattr(package, name)).summary
            lines += [f"   * - :py:obj:`~flowbnn.{module}.{name}`", f"     - {summary}"]
        return [*lines, "```", ""]

    lines = [f"# {family.title}", "", f"$$\n{family.formula}\n$$", "", family.explanation, ""]
    lines += [
        f"- **Use when:** {family.use}",
        f"- **Density:** {family.density}",
        f"- **Draw:** {family.draw}",
        "",
    ]
    lines += gallery_picture(script, number, f"A density learned by {family.title.lower()}")
    if family.flows:
        lines += ["## Flows", "", *listing("flows", family.flows)]
    lines += ["## Transforms", "", *listing("transforms", family.transforms)]
    lines += ["All flows have one interface: [flows](../../flows.md).", ""]
    return "\n".join(lines)


def write_pages(folder: Path) -> None:
    """Writes a page for each family and their index."""
    rows = ["| family | density | draw | use when |", "|---|---|---|---|"]
    pictures = [(script, number + 1) for script, count in PICTURES.items() for number in range(count)]
    for (key, family), (script, number) in zip(FAMILIES.items(), pictures, strict=True):
        write(folder / f"{key}.md", _page(script, number, family))
        rows.append(f"| [{family.title}]({key}.md) | {family.density} | {family.draw} | {family.use} |")
    toctree = ["```{toctree}", ":hidden:", "", *FAMILIES, "```"]
    intro = "A flow is a base distribution and a chain of transforms ([how to use them](../../flows.md)). Costs are passes through the networks."
    write(folder / "index.md", "\n".join(["# Families of flows", "", intro, "", *rows, "", *toctree, ""]))
