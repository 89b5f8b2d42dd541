"""Draws the comparison of flows with other packages, and prints it as a table for docs/speed.md.

    python benchmarks/flows_figure.py [--out docs/images/flows-speed.png]

Reads ``flows.json``, ``flows_compiled.json`` and ``flows_cuda.json`` of this folder, which ``flows.py`` wrote. A point of the figure
is the time of flowbnn divided by that of the fastest other package, for one dimension, batch size and device. Compiled flows are
measured for some families only.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from common import make_parser
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

DEVICES = {
    "CPU": ("flows.json", "#0072B2", -0.22),
    "CPU, compiled": ("flows_compiled.json", "#009E73", 0.0),
    "GPU": ("flows_cuda.json", "#D55E00", 0.22),
}
NAMES = {"maf": "MAF", "iaf": "IAF", "sylvester": "Sylvester"}


def label(row: dict[str, Any]) -> str:
    """Returns the name of the flow and the direction of a row."""
    return f"{NAMES.get(row['kind'], row['kind'].replace('-', ' '))}, {row['direction']}"


def ratios(rows: Sequence[dict[str, Any]], package: str) -> list[float]:
    """Returns the time of a variant of flowbnn over that of the fastest other package, for the rows that have it."""
    return [row[f"ratio of {package}"] for row in rows if f"ratio of {package}" in row]


def interval(values: Sequence[float]) -> str:
    """Returns the smallest and the largest ratio as text."""
    bounds = sorted({f"{min(values):.2f}", f"{max(values):.2f}"}) if values else []
    return " to ".join(bounds)


def draw(rows: dict[str, list[dict[str, Any]]], labels: Sequence[str], path: Path) -> None:
    """Draws all ratios with the networks of the other packages."""
    figure, axes = plt.subplots(figsize=(8.0, 5.6), layout="constrained")
    for device, (_, color, shift) in DEVICES.items():
        points = [(row["ratio of flowbnn"], labels.index(label(row)) + shift) for row in rows[device]]
        axes.scatter(*zip(*points, strict=True), s=22, color=color, alpha=0.75, linewidth=0, label=device)
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.05, 0.1, 0.2, 0.5, 1.0]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("time of flowbnn / time of the fastest other package")
    axes.legend(loc="lower left", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images/flows-speed.png"), help="file of the figure"
    )
    arguments = parser.parse_args()
    folder = Path(__file__).parent
    rows = {name: json.loads((folder / file).read_text())["rows"] for name, (file, *_) in DEVICES.items()}
    labels = list(dict.fromkeys(label(row) for row in rows["CPU"]))
    columns = [title for device in DEVICES for title in (device, f"{device}, default networks")]
    print(f"| flow, direction | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    for name in labels:
        selected = {device: [row for row in rows[device] if label(row) == name] for device in DEVICES}
        cells = [
            interval(ratios(selected[device], package))
            for device in DEVICES
            for package in ("flowbnn", "flowbnn, defaults")
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    for device in DEVICES:
        slower = [row for row in rows[device] if row["ratio of flowbnn"] > 1.02]
        print(f"{device}: {len(slower)} of {len(rows[device])} rows above 1.02")
        for row in slower:
            print(f"  {label(row)}, D={row['dim']}, batch {row['batch']}: {row['ratio of flowbnn']:.2f}")
    draw(rows, labels, arguments.out)


if __name__ == "__main__":
    main()
