r"""Choose settings of the image studies on validation images: the test set is not opened.

    python benchmarks/tune_images.py --study lenet-fashion --method best-flow-channel --seeds 100,101 \
        --set noise_lr=0.01 --grid 'base_scale=0.1|0.2|0.5' --grid 'weight_lr=0.001|0.003' --jobs 8

Trains on the training set less 5,000 images and prints accuracy, NLL and ECE on those; also of an image and its mirror image
together where training mirrors, and of six views with ``--set settings.moved=true``. A bare name in ``--set`` and ``--grid`` is a
setting of the method's own training; ``group.name`` one of another group, ``settings.name`` one of the study. ``--grid`` takes
alternatives, all combinations of which are tried, in processes side by side. The data folder is ``FLOWBNN_DATA``.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn_studies import get_study
from flowbnn_studies.cli import _setting as parse_setting
from flowbnn_studies.runner.run import best_place

SHOWN = (
    *("accuracy", "nll", "ece", "brier"),
    *(f"{views}_{name}" for views in ("mirror", "moved") for name in ("accuracy", "nll", "ece")),
    *("log_likelihood", "kl", "seconds"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", required=True)
    parser.add_argument("--method", required=True, action="append", help="a variant's key; may be repeated")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A|B|C")
    parser.add_argument("--seeds", default="100", help="as in 100,101; not those of the study")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--option", action="append", default=[], help="of the run, as in acceleration=auto")
    parser.add_argument(
        "--curves", type=int, default=0, metavar="SAMPLES", help="also judge after every epoch"
    )
    parser.add_argument("--quick", action="store_true", help="generated images and tiny trainings")
    parser.add_argument("--out", type=Path, help="a file that gets one line of JSON for each trial")
    return parser.parse_args()


def dotted(study: Any, method: str, name: str) -> str:
    """A setting's full name: bare names are those of the method's own training."""
    group, _, rest = name.partition(".")
    if group == "settings" and rest:
        return rest
    return name if rest else f"{study.make_settings().group(method)}.{name}"


def settings_of(study: Any, method: str, changes: Any, quick: bool) -> Any:
    """The study's settings with a trial's changes, which are pairs of a name and a value."""
    return study.make_settings(quick=quick, **{dotted(study, method, name): value for name, value in changes})


def trial(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    study = get_study(task["study"])
    settings = settings_of(study, task["method"], task["changes"], task["quick"])
    options = dict(parse_setting(pair) for pair in task["options"])
    started = time.monotonic()
    warnings.simplefilter("ignore", FlowBNNWarning)
    try:
        report = study.tune(
            settings,
            task["method"],
            task["seed"],
            task["accelerator"],
            task["precision"],
            options,
            task["curves"],
        )
    except Exception as error:  # one setting that blows up does not end the search
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}"}
    return {**task, "report": {**report, "wall": time.monotonic() - started}}


def tasks_of(given: argparse.Namespace) -> list[dict[str, Any]]:
    study = get_study(given.study)
    known = [variant.key for variant in study.variants(study.make_settings()) if variant.key != "cost"]
    for method in given.method:
        if method not in known:
            raise SystemExit(f"there is no method '{method}'; there are: {', '.join(known)}")
    accelerator, precision = best_place(study, given.accelerator, given.precision)
    if given.jobs < 1:
        raise SystemExit(f"--jobs is at least 1, not {given.jobs}")
    fixed = [parse_setting(pair) for pair in given.changes]
    choices = []
    for pair in given.grid:
        name, _, values = pair.partition("=")
        choices.append([parse_setting(f"{name}={value}") for value in values.split("|")])
    try:
        seeds = [int(seed) for seed in given.seeds.split(",")]
    except ValueError:
        raise SystemExit(
            f"--seeds are whole numbers with commas between them, as in 100,101, not {given.seeds}"
        ) from None
    for method in given.method:  # a wrong name is told before the first training
        for combination in itertools.product(*choices):
            settings_of(study, method, [*fixed, *combination], given.quick)
    return [
        {
            "study": given.study,
            "method": method,
            "seed": seed,
            "changes": [*fixed, *combination],
            "accelerator": accelerator,
            "precision": precision,
            "options": given.option,
            "quick": given.quick,
            "curves": given.curves,
        }
        for method in given.method
        for combination in itertools.product(*choices)
        for seed in seeds
    ]


def line(name: str, report: dict[str, Any]) -> str:
    if "error" in report:
        return f"{name}: {report['error'][:200]}"
    return f"{name}: " + "  ".join(f"{key} {report[key]:.4f}" for key in SHOWN if key in report)


def main() -> None:
    given = arguments()
    try:
        tasks = tasks_of(given)
    except FlowBNNError as error:
        raise SystemExit(f"{error}") from None
    found: dict[str, list[dict[str, Any]]] = {}

    def take(result: dict[str, Any]) -> None:
        changes = " ".join(f"{name}={value}" for name, value in result["changes"])
        name = f"{result['method']} {changes}".strip()
        found.setdefault(name, []).append(result["report"])
        print(line(f"{name} seed {result['seed']}", result["report"]), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(result) + "\n")

    if given.jobs > 1:
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            for future in as_completed([pool.submit(trial, task) for task in tasks]):
                take(future.result())
    else:
        for task in tasks:
            take(trial(task))
    print(f"\n{given.study}, validation images, mean over seeds, best NLL first")
    whole = {name: [r for r in reports if "error" not in r] for name, reports in found.items()}
    means = {
        name: {key: sum(r[key] for r in reports) / len(reports) for key in SHOWN if key in reports[0]}
        for name, reports in whole.items()
        if reports
    }
    for name in sorted(means, key=lambda name: means[name]["nll"]):
        print("  " + line(name, means[name]))
    sys.exit(0 if means else 1)


if __name__ == "__main__":
    main()
