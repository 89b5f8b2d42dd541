r"""Choose settings of the image studies on validation images: the test set is not opened.

    python benchmarks/tune_images.py --study lenet-fashion --method best-flow-channel --seeds 100,101 \
        --set noise_lr=0.01 --grid 'base_scale=0.1|0.2|0.5' --grid 'weight_lr=0.001|0.003' --jobs 8

Runs the study with ``choose``: it trains on the training set less 5,000 images and evaluates on those, with six views of an image where
``--set settings.moved=true`` asks for them. A bare name in ``--set`` and ``--grid`` is a setting of the method's own training;
``group.name`` one of another group, ``settings.name`` one of the study. ``--grid`` takes alternatives, all combinations of which are
tried. Every combination has a folder in ``--out``, and a run that is repeated goes on. The data folder is ``FLOWBNN_DATA``.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn_studies import get_study, open_workers, run_study
from flowbnn_studies.cli import _setting as parse_setting


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", required=True)
    parser.add_argument("--method", required=True, help="a variant's key")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A|B|C")
    parser.add_argument("--seeds", default="100", help="as in 100,101; not those of the study")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--acceleration", default="auto")
    parser.add_argument("--quick", action="store_true", help="generated images and tiny trainings")
    parser.add_argument("--out", type=Path, default=Path("results-tuning"))
    return parser.parse_args()


def trials(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of every combination, by its name."""
    study = get_study(given.study)
    group = study.make_settings().group(given.method)

    def full(pair: str) -> tuple[str, Any]:
        name, value = parse_setting(pair)
        return (name if "." in name else f"{group}.{name}").removeprefix("settings."), value

    fixed = dict(map(full, given.changes))
    grid = [[full(f"{name}={value}") for value in values.split("|")]
            for name, _, values in (pair.partition("=") for pair in given.grid)]  # fmt: skip
    return {
        " ".join(f"{name}={value}" for name, value in chosen) or "as given": study.make_settings(
            quick=given.quick, **{"choose": True, **fixed, **dict(chosen)}
        )
        for chosen in itertools.product(*grid)
    }


def main() -> None:
    given = arguments()
    means: dict[str, dict[str, float]] = {}
    try:
        every = trials(given)  # a wrong name is told before the first training
        with open_workers(given.jobs) as workers:
            for name, settings in every.items():
                results = run_study(
                    get_study(given.study),
                    settings=settings,
                    seeds=[int(seed) for seed in given.seeds.split(",")],
                    out=given.out / name.replace(" ", ","),
                    only=[given.method],
                    resume=True,
                    accelerator=given.accelerator,
                    precision=given.precision,
                    acceleration=given.acceleration,
                    workers=workers,
                )
                (row,) = [row for row in results["rows"] if row["key"] == given.method]
                means[name] = {key: cell["mean"] for key, cell in row["values"].items()}
    except FlowBNNError as error:
        raise SystemExit(f"{error}") from None
    print(f"{given.study}, {given.method}, validation images, mean over seeds, best NLL first")
    for name in sorted(means, key=lambda name: means[name]["nll"]):
        print(f"  {name}: " + "  ".join(f"{key} {value:.4f}" for key, value in means[name].items()))


if __name__ == "__main__":
    main()
