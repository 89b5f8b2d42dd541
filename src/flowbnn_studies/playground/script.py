"""Python that repeats a fit of the page: the same data, method, settings and predictions."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from textwrap import wrap
from typing import Any

from flowbnn.methods import Method
from flowbnn.noise import Recipe
from flowbnn_studies.playground.methods import FitSettings
from flowbnn_studies.playground.points import RANGE, Points

BATCH_SIZE = 256  # most data sets of the page are one batch


def expression_of(value: Any) -> str:
    """Returns the Python expression of a method or recipe with the settings that differ from the defaults.

    >>> import flowbnn as fb
    >>> expression_of(fb.NodeNoise(fb.noise.NormalPlanar(length=3), epochs=20))
    'fb.NodeNoise(epochs=20, kind=fb.noise.NormalPlanar(length=3))'
    """
    if not is_dataclass(value):
        return repr(value)
    module = "fb.noise." if isinstance(value, Recipe) else "fb." if isinstance(value, Method) else ""
    arguments = []
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        current = getattr(value, each.name)
        if each.init and current != default:
            arguments.append(f"{each.name}={expression_of(current)}")
    return f"{module}{type(value).__name__}({', '.join(arguments)})"


def make_script(points: Points, settings: FitSettings, samples: int, temperature: float) -> str:
    """Returns Python that fits the method to the points and predicts as the page does.

    Args:
        points: Training and held-out points.
        settings: Method and settings.
        samples: Number of sampled networks of a prediction.
        temperature: Temperature of the predictions; 1 leaves them as they are.
    """
    network = f"MLP({points.num_inputs}, {settings.hidden!r}, {points.num_outputs})"
    seed, classes = settings.values["seed"], points.task == "classes"
    tempered = [
        "",
        "# the temperature of the slider",
        f"posterior = fb.methods.TemperedPosterior(posterior, {temperature!r})",
    ]
    lines = [
        '"""Fit of the playground of flowbnn."""',
        "",
        "import torch",
        "",
        "import flowbnn as fb",
        "from flowbnn.models import MLP",
        "",
        *_tensors("train", points.train, points),
        *(_tensors("held_out", points.held_out, points) if points.held_out else []),
        "",
        f"torch.manual_seed({seed})",
        f"network = {network}",
        f"method = {expression_of(settings.method())}",
        f"posterior = method.fit(network, (train_x, train_y), batch_size={BATCH_SIZE}, seed={seed})",
        *(tempered if temperature != 1.0 else []),
        "",
    ]
    if points.held_out:
        lines += [
            f"held_out = posterior.predict(held_out_x, {samples}, seed={seed})",
            "print(held_out.evaluate(held_out_y))",
            "",
        ]
    lines += [
        f"axis = torch.linspace({-RANGE}, {RANGE}, {CLASS_GRID if classes else CURVE_GRID})",
        f"grid = {'torch.cartesian_prod(axis, axis)' if classes else 'axis[:, None]'}",
        f"prediction = posterior.predict(grid, {samples}, seed={seed})",
        "print(prediction)",
        "",
        "# figures, with pip install flowbnn[plots]:",
    ]
    if classes:
        lines.append("# posterior.plot_class_map(train_x, targets=train_y)")
    else:
        lines.append("# prediction.plot_intervals(grid, data=(train_x, train_y))")
    return "\n".join(lines) + "\n"


CLASS_GRID, CURVE_GRID = 61, 161  # points along an axis


def _tensors(name: str, rows: Sequence[Sequence[float]], points: Points) -> list[str]:
    """Returns the lines that define inputs and targets."""
    inputs = [list(row[: points.num_inputs]) for row in rows]
    targets = [row[2] for row in rows] if points.task == "classes" else [[row[1]] for row in rows]
    return [*_assignment(f"{name}_x", inputs), *_assignment(f"{name}_y", targets)]


def _assignment(name: str, values: list[Any]) -> list[str]:
    """Returns the lines that define one tensor, folded at 100 characters."""
    text = ", ".join(repr(value) for value in values)
    body = wrap(text, 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return [f"{name} = torch.tensor([", *body, "])"]
