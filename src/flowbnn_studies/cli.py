"""The command line: ``flowbnn list``, ``run``, ``compare``, ``demo``, ``report``. Thin: words to objects, errors to a line."""

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
    sys.exit("flowbnn: the command line needs typer: pip install flowbnn[studies]")

app = typer.Typer(
    help="Trained networks made Bayesian by noise from normalizing flows.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
OPTIONS = {  # the options of arguments that have another name in Python
    "accelerator": "--device",
    "num_nodes": "--nodes",
}

Out = Annotated[Path, typer.Option("--out", help="Folder of the results.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run was interrupted; nothing finished is done again.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", help="Processes that train side by side.", show_default="cores, at most 4; one on a GPU"
    ),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No lines for finished trainings.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="A trial with tiny settings, of minutes at most; its numbers mean nothing."),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds", help="How many seeds: 0, 1, ...; or which, as in: 3,4.", show_default="the study's own"
    ),
]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="Epochs of each variant.", show_default="the study's own")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, as in: --set noise_lr=0.05; may be repeated.")
]


def main() -> None:
    """The entry point."""
    app()


@contextmanager
def _one_line(again: str = "") -> Iterator[None]:
    """Errors that users can mend, missing packages and Ctrl-C, as one line on standard error."""
    from flowbnn.errors import FlowBNNError

    try:
        yield
    except FlowBNNError as error:
        argument = error.fields.get("argument")
        typer.echo(f"flowbnn: {f'{OPTIONS[argument]}: ' if argument in OPTIONS else ''}{error}", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2", "sklearn"):
            raise
        typer.echo(f"flowbnn: this needs {error.name}: pip install flowbnn[studies]", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        from flowbnn.training import is_main_process

        advice = f"; what is finished is kept, go on with: {again} --resume" if again else ""
        if is_main_process():
            typer.echo(f"flowbnn: interrupted{advice}", err=True)
        raise typer.Exit(130) from None


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("flowbnn"))
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
    """The studies there are."""
    with _one_line():
        from flowbnn_studies import studies

        width = max(len(study.name) for study in studies())
        for study in studies():
            typer.echo(f"{study.name:<{width}}  {study.description}; {pluralize(study.seeds, 'seed')}")


@app.command()
def run(
    context: typer.Context,
    study: Annotated[str, typer.Argument(help="Name of the study, as in: flowbnn list.")],
    out: Out = Path("results"),
    seeds: Seeds = None,
    epochs: Epochs = None,
    change: Set = None,
    resume: Resume = False,
    quick: Quick = False,
    accelerator: Annotated[
        str,
        typer.Option("--device", "--accelerator", help="auto, cpu, cuda, mps; auto is what suits the study."),
    ] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="32-true, bf16-mixed, ...; auto is what suits the study.")
    ] = "auto",
    devices: Annotated[
        int, typer.Option("--devices", help="GPUs, or CPU processes, that train each variant together.")
    ] = 1,
    nodes: Annotated[int, typer.Option("--nodes", help="Machines; see docs/devices.md.")] = 1,
    acceleration: Annotated[
        str, typer.Option("--acceleration", help="Steps on a GPU: auto, off, graph or compile.")
    ] = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Train these variants alone, as in: --only 'best-*'; may be repeated."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing: results of the parts that are there.")
    ] = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Run one study and write OUT/STUDY/results.json."""
    with _one_line(_command(context)):
        from flowbnn.training import is_main_process, is_torchrun_worker
        from flowbnn_studies import get_study
        from flowbnn_studies.runner.run import resolve_device

        chosen = get_study(study)
        changes = dict(map(_setting, change or []))
        if epochs is not None:
            changes["epochs" if hasattr(chosen.make_settings(), "epochs") else "*.epochs"] = epochs
        settings = chosen.make_settings(quick=quick, **changes)
        alone = devices * nodes == 1 and not is_torchrun_worker()
        with _study_runner(
            context, _jobs(jobs, resolve_device(chosen, accelerator)[0] if alone else "several")
        ) as run_one:
            results = run_one(
                chosen,
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
            "--methods", help="Names or globs with commas between, as in: map,laplace*.", show_default="all"
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
    """Which method to use on a network and data, and what each costs; writes OUT/compare-NETWORK-DATA/results.json."""
    with _one_line(_command(context)):
        from flowbnn_studies import get_study

        study = get_study("compare")
        changes: dict[str, Any] = dict(map(_setting, change or []))
        if epochs is not None:
            changes["epochs"] = epochs
        if methods is not None:
            changes["methods"] = tuple(name.strip() for name in methods.split(",") if name.strip())
        settings = study.make_settings(quick=quick, network=network, data=data, **changes)
        with _study_runner(context, _jobs(jobs)) as run_one:
            results = run_one(study, settings=settings, seeds=_seeds(seeds))
        _show(results, _folder(out, quick), every=True)


@app.command()
def demo(
    context: typer.Context,
    out: Out = Path("results"),
    resume: Resume = False,
    quick: Quick = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Run two-clusters and digits and write the report: one to two minutes on two cores."""
    with _one_line(_command(context)):
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
        typer.echo(f"\nThe report: {page}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that studies wrote to.")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option("--out", help="The page.", show_default="FOLDER/report.html")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also write the tables as Markdown, to this file.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write every figure as a PNG, into this folder.")
    ] = None,
) -> None:
    """Write the page again from stored results; nothing is trained."""
    with _one_line():
        from flowbnn_studies import studies
        from flowbnn_studies.report import find_results, save_figures, write_markdown, write_report

        order = [study.name for study in studies()]
        paths = find_results(folder)
        paths.sort(
            key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order)
        )
        typer.echo(f"The report: {write_report(paths, out or folder / 'report.html')}")
        if markdown is not None:
            typer.echo(f"The tables: {write_markdown(paths, markdown)}")
        if figures is not None:
            typer.echo(f"The figures: {len(save_figures(paths, figures))} in {figures}")


@contextmanager
def _study_runner(context: typer.Context, jobs: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """``run_study`` with the options that all commands share, and open workers."""
    from flowbnn_studies import open_workers, run_study

    given = context.params
    with open_workers(jobs) as workers:
        yield partial(
            run_study,
            out=_folder(given["out"], given["quick"]),
            resume=given["resume"],
            progress=not given["no_progress"],
            workers=workers,
            command=_command(context, here=False),
            trial=given["quick"],
        )


def _command(context: typer.Context, here: bool = True) -> str:
    """The command with the options that differ from their defaults; ``here``: also those that change no number."""
    words = ["flowbnn", str(context.info_name)]
    machine = {"out", "jobs", "no_progress", "only"}
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in ("resume", "collect") or (name in machine and not here):
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
            many = value if isinstance(value, list | tuple) else [value]
            words += [f"{parameter.opts[0]} {quote(str(one))}" for one in many]
    return " ".join(words)


def _folder(out: Path, quick: bool) -> Path:
    """A trial run does not replace real results unless it is sent there."""
    return Path("results-quick") if quick and out == Path("results") else out


def _setting(pair: str) -> tuple[str, Any]:
    """The name and the value of ``name=value``, whose value is written as in Python: 0.05, or 0,6,12, or true; words need no quotes.

    >>> _setting("data=cifar10"), _setting("methods=mnf-kl0.1,map"), _setting("problems=conv,")
    (('data', 'cifar10'), ('methods', ('mnf-kl0.1', 'map')), ('problems', ('conv',)))
    """
    from ast import literal_eval

    from flowbnn.errors import FlowBNNError

    name, _, text = (part.strip() for part in pair.partition("="))
    if text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    if text and text[0].isalpha() and all(one.isalnum() or one in "_-*.," for one in text):
        return name, tuple(word for word in text.split(",") if word) if "," in text else text
    try:
        return name, literal_eval(text)
    except (ValueError, SyntaxError):
        raise FlowBNNError(
            f"--set takes name=value, as in --set noise_lr=0.05, not '{pair}'", argument="set"
        ) from None


def _seeds(asked: str | None) -> int | list[int] | None:
    """How many seeds, or which.

    >>> _seeds("5"), _seeds("3,4"), _seeds("4,"), _seeds(None)
    (5, [3, 4], [4], None)
    """
    from flowbnn.errors import FlowBNNError

    try:
        if asked is None or "," not in asked:
            return None if asked is None else int(asked)
        return [int(seed) for seed in asked.split(",") if seed.strip()]
    except ValueError:
        raise FlowBNNError(
            f"--seeds takes a number, as in --seeds 5, or seeds with commas between, as in --seeds 3,4, not '{asked}'",
            argument="seeds",
        ) from None


def _jobs(asked: int | None, accelerator: str = "cpu") -> int:
    from flowbnn_studies.runner.run import available_cores

    if asked is not None:
        return asked
    return min(4, available_cores()) if accelerator == "cpu" else 1


def _show(results: dict[str, Any], folder: Path | None = None, every: bool = False) -> None:
    """The main table: a study's rows, mean and spread over seeds, the published value where there is one."""
    from flowbnn_studies.report import console_lines

    for line in console_lines(results, every):
        typer.echo(line)
    if folder is not None:
        typer.echo(f"\n{folder / results['study'] / 'results.json'}; a page of it: flowbnn report {folder}")


if __name__ == "__main__":
    main()
