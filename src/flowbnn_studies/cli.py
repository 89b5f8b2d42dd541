"""Command line: ``flowbnn list``, ``run``, ``compare``, ``demo``, ``report`` and ``playground``."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from flowbnn.errors import pluralize

try:
    import typer
except ImportError:
    sys.exit("flowbnn: typer is not installed; run pip install flowbnn[studies]")

app = typer.Typer(
    help="Turns trained PyTorch networks into Bayesian ones by noise from normalizing flows.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
OPTIONS = {  # command-line names of arguments that differ from Python
    "accelerator": "--device",
    "num_nodes": "--nodes",
}

EXTRAS = {  # optional packages and the extras that install them
    "matplotlib": "studies",
    "jinja2": "studies",
    "sklearn": "studies",
    "starlette": "playground",
    "uvicorn": "playground",
}


def _path(text: str | Path) -> Path:
    """Returns a path. An empty one, which would be the current folder, is refused."""
    if not str(text).strip():
        raise typer.BadParameter("a path must not be empty; use . for the current folder")
    return Path(text)


PATH: dict[str, Any] = {"parser": _path, "metavar": "PATH"}  # options of every path
Out = Annotated[Path, typer.Option("--out", help="Folder of the results.", **PATH)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run; finished trainings are reused.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Number of processes that train in parallel.",
        show_default="cores, at most 4; one on a GPU",
    ),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Print no progress lines.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Trial run of minutes with tiny settings; its numbers are not meaningful."),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds", help="Number of seeds, or a list such as 3,4.", show_default="chosen by the study"
    ),
]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="Epochs of each variant.", show_default="chosen by the study")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, for example --set noise_lr=0.05; may be repeated."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", "--accelerator", help="auto, cpu, cuda or mps; auto takes what suits the study."
    ),
]
Precision = Annotated[
    str, typer.Option("--precision", help="32-true, bf16-mixed, ...; auto takes what suits the study.")
]
Devices = Annotated[
    int, typer.Option("--devices", help="Number of GPUs or CPU processes that train each variant together.")
]
Nodes = Annotated[int, typer.Option("--nodes", help="Number of machines; see docs/devices.md.")]
Acceleration = Annotated[
    str, typer.Option("--acceleration", help="Execution of steps on a GPU: auto, off, graph or compile.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="Train only these variants, for example --only 'best-*'; may be repeated."),
]
Collect = Annotated[
    bool, typer.Option("--collect", help="Train nothing; write the results of the stored parts.")
]


def main() -> None:
    """Entry point of the command line."""
    app()


@contextmanager
def _one_line_errors(resume_command: str = "") -> Iterator[None]:
    """Context manager that prints errors, missing packages and Ctrl-C as one line on standard error.

    Args:
        resume_command: Command that continues the run, printed after Ctrl-C.
    """
    from flowbnn.errors import FlowBNNError

    try:
        yield
    except FlowBNNError as error:
        argument = error.fields.get("argument")
        typer.echo(f"flowbnn: {f'{OPTIONS[argument]}: ' if argument in OPTIONS else ''}{error}", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        text = f"flowbnn: {package} is not installed; run pip install flowbnn[{EXTRAS[package]}]"
        typer.echo(text, err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        from flowbnn.training import is_main_process

        advice = f"; continue with: {resume_command} --resume" if resume_command else ""
        if is_main_process():
            typer.echo(f"flowbnn: interrupted{advice}", err=True)
        raise typer.Exit(130) from None


def _version(requested: bool) -> None:
    if requested:
        from flowbnn.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_studies() -> None:
    """List all studies."""
    with _one_line_errors():
        from flowbnn_studies import studies

        width = max(len(study.name) for study in studies())
        for study in studies():
            typer.echo(f"{study.name:<{width}}  {study.description}; {pluralize(study.seeds, 'seed')}")


@app.command()
def run(
    context: typer.Context,
    study: Annotated[str, typer.Argument(help="Name of the study; flowbnn list shows all.")],
    out: Out = Path("results"),
    seeds: Seeds = None,
    epochs: Epochs = None,
    change: Set = None,
    resume: Resume = False,
    quick: Quick = False,
    accelerator: Device = "auto",
    precision: Precision = "auto",
    devices: Devices = 1,
    nodes: Nodes = 1,
    acceleration: Acceleration = "auto",
    only: Only = None,
    collect: Collect = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Run one study and write OUT/STUDY/results.json."""
    with _one_line_errors(_command(context)):
        from flowbnn.training import is_main_process, is_torchrun_worker
        from flowbnn_studies import get_study
        from flowbnn_studies.runner.launch import launch
        from flowbnn_studies.runner.run import resolve_device

        selected = get_study(study)
        changes = dict(map(_setting, change or []))
        if epochs is not None:
            changes["epochs" if hasattr(selected.make_settings(), "epochs") else "*.epochs"] = epochs
        settings = selected.make_settings(quick=quick, **changes)
        device, _ = resolve_device(selected, accelerator)
        has_several_processes = devices * nodes > 1 or is_torchrun_worker()
        if has_several_processes and not is_torchrun_worker() and (jobs or 1) == 1:
            raise typer.Exit(launch(device, devices, nodes, sys.argv[1:]))
        with _study_runner(context, _jobs(jobs, "several" if has_several_processes else device)) as run_one:
            results = run_one(
                selected,
                settings=settings,
                seeds=_seeds(seeds),
                accelerator=accelerator,
                precision=precision,
                devices=devices,
                num_nodes=nodes,
                acceleration=acceleration,
                only=only,
                collect=collect,
                trial=quick or getattr(settings, "source", "") == "generated",
            )
        if is_main_process():
            _show(results, _folder(out, quick))


@app.command()
def compare(
    context: typer.Context,
    network: Annotated[
        str, typer.Option("--network", help="mlp, small-conv, lenet, vgg16 or resnet18.")
    ] = "lenet",
    data: Annotated[
        str, typer.Option("--data", help="digits, clusters, mnist, fashion-mnist or cifar10.")
    ] = "digits",
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="Comma-separated names or globs, for example map,laplace*.", show_default="all"
        ),
    ] = None,
    epochs: Epochs = None,
    seeds: Seeds = None,
    change: Set = None,
    out: Out = Path("results"),
    resume: Resume = False,
    quick: Quick = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Compare all methods on a network and a data set, and write OUT/compare-NETWORK-DATA/results.json."""
    with _one_line_errors(_command(context)):
        from flowbnn_studies import get_study

        study = get_study("compare")
        changes: dict[str, Any] = {"network": network, "data": data, **dict(map(_setting, change or []))}
        if epochs is not None:
            changes["epochs"] = epochs
        if methods is not None:
            changes["methods"] = tuple(name.strip() for name in methods.split(",") if name.strip())
        settings = study.make_settings(quick=quick, **changes)
        with _study_runner(context, _jobs(jobs)) as run_one:
            results = run_one(study, settings=settings, seeds=_seeds(seeds))
        _show(results, _folder(out, quick), all_metrics=True)


@app.command()
def demo(
    context: typer.Context,
    out: Out = Path("results"),
    resume: Resume = False,
    quick: Quick = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Run two-clusters and digits and write the report; takes one to two minutes on two cores."""
    with _one_line_errors(_command(context)):
        from flowbnn.training import check_writable
        from flowbnn_studies import get_study
        from flowbnn_studies.report import write_report

        folder = _folder(out, quick)
        check_writable(folder / "report.html")
        names = ("two-clusters", "digits")
        with _study_runner(context, _jobs(jobs)) as run_one:
            for study in map(get_study, names):
                command = f"flowbnn run {study.name}{' --quick' if quick else ''}"
                _show(run_one(study, settings=study.make_settings(quick=quick), command=command))
        page = write_report([folder / name / "results.json" for name in names], folder / "report.html")
        typer.echo(f"\nReport: {page}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the results.", **PATH)] = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file to write.", show_default="FOLDER/report.html", **PATH),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also write the tables to this Markdown file.", **PATH)
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="Also write every figure as a PNG into this folder.", **PATH),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", help="Number of processes that draw figures.", show_default="cores, at most 4"
        ),
    ] = None,
    no_progress: NoProgress = False,
) -> None:
    """Write the report from stored results; nothing is trained."""
    with _one_line_errors():
        from flowbnn_studies import studies
        from flowbnn_studies.report import find_results, save_figures, write_markdown, write_report

        order = [study.name for study in studies()]
        paths = find_results(folder)
        paths.sort(
            key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order)
        )
        page = write_report(paths, out or folder / "report.html", jobs=_jobs(jobs), progress=not no_progress)
        typer.echo(f"Report: {page}")
        if markdown is not None:
            typer.echo(f"Tables: {write_markdown(paths, markdown)}")
        if figures is not None:
            typer.echo(f"Figures: {len(save_figures(paths, figures))} in {figures}")


@app.command()
def playground(
    port: Annotated[
        int, typer.Option("--port", help="Port of the loopback address; 0 chooses a free one.")
    ] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open no browser.")
    ] = False,
) -> None:
    """Open an interactive page: draw points, fit a method and see where it is certain."""
    with _one_line_errors():
        from flowbnn_studies.playground.server import serve

        serve(port, browser=not no_browser, announce=typer.echo)


@contextmanager
def _study_runner(context: typer.Context, jobs: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """Context manager that provides ``run_study`` with the options that all commands share, and with open workers."""
    from flowbnn_studies import open_workers, run_study

    parameters = context.params
    with open_workers(jobs) as workers:
        yield partial(
            run_study,
            out=_folder(parameters["out"], parameters["quick"]),
            resume=parameters["resume"],
            progress=not parameters["no_progress"],
            workers=workers,
            command=_command(context, local=False),
            trial=parameters["quick"],
        )


def _command(context: typer.Context, local: bool = True) -> str:
    """Returns the command with the options that differ from their defaults.

    Args:
        context: Context of the command.
        local: Include options that do not affect the numbers, such as the output folder.
    """
    words = ["flowbnn", str(context.info_name)]
    local_options = {"out", "jobs", "no_progress", "only"}
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in ("resume", "collect") or (name in local_options and not local):
            continue
        if name == "out":
            value = _folder(context.params["out"], context.params.get("quick", False))
        elif value is None or value == parameter.get_default(context) or value == [] or value == ():
            continue
        if parameter.param_type_name == "argument":
            words.append(quote(str(value)))
        elif value is True:
            words.append(parameter.opts[0])
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"{parameter.opts[0]} {quote(str(entry))}" for entry in values]
    return " ".join(words)


def _folder(out: Path, quick: bool) -> Path:
    """Returns the output folder. Trial runs have a folder of their own by default, so that they replace no real results."""
    return Path("results-quick") if quick and out == Path("results") else out


def _setting(pair: str) -> tuple[str, Any]:
    """Parses ``name=value``. The value is written as in Python: 0.05, or 0,6,12, or true; words need no quotes.

    >>> _setting("data=cifar10"), _setting("methods=mnf-kl0.1,map"), _setting("problems=conv,")
    (('data', 'cifar10'), ('methods', ('mnf-kl0.1', 'map')), ('problems', ('conv',)))
    """
    from ast import literal_eval

    from flowbnn.errors import FlowBNNError

    name, _, text = (text.strip() for text in pair.partition("="))
    if text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    if text and text[0].isalpha() and all(char.isalnum() or char in "_-*.," for char in text):
        return name, tuple(word for word in text.split(",") if word) if "," in text else text
    try:
        return name, literal_eval(text)
    except (ValueError, SyntaxError):
        raise FlowBNNError(
            f"--set expects name=value, for example --set noise_lr=0.05, got '{pair}'", argument="set"
        ) from None


def _seeds(text: str | None) -> int | list[int] | None:
    """Parses a number of seeds or a list of seeds.

    >>> _seeds("5"), _seeds("3,4"), _seeds("4,"), _seeds(None)
    (5, [3, 4], [4], None)
    """
    from flowbnn.errors import FlowBNNError

    try:
        if text is None or "," not in text:
            return None if text is None else int(text)
        return [int(seed) for seed in text.split(",") if seed.strip()]
    except ValueError:
        raise FlowBNNError(
            f"--seeds expects a number or a list such as 3,4, got '{text}'",
            argument="seeds",
        ) from None


def _jobs(number: int | None, accelerator: str = "cpu") -> int:
    """Returns the number of processes."""
    from flowbnn_studies.runner.run import available_cores

    if number is not None:
        return number
    return min(4, available_cores()) if accelerator == "cpu" else 1


def _show(results: dict[str, Any], folder: Path | None = None, all_metrics: bool = False) -> None:
    """Prints the main table of a study: mean and standard deviation over seeds, and published values."""
    from flowbnn_studies.report import console_lines

    for line in console_lines(results, all_metrics):
        typer.echo(line)
    if folder is not None:
        typer.echo(
            f"\nResults: {folder / results['study'] / 'results.json'}. Create the report with: flowbnn report {folder}"
        )


if __name__ == "__main__":
    main()
