"""The command line: ``flowbnn list``, ``run``, ``compare``, ``demo``, ``report``. Thin: words to objects, errors to a line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    help="Trained networks made Bayesian by noise from normalizing flows.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder of the results.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run was cut; nothing finished is done again.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", help="Processes that train side by side.", show_default="cores, at most 4"),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No bar and no lines.")]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="A trial with tiny settings, of a few minutes at most; its numbers mean nothing.",
    ),
]


def main() -> None:
    """The entry point."""
    app()


@contextmanager
def _told(again: str = "") -> Iterator[None]:
    """Errors that users can mend, and Ctrl-C, as one line on standard error."""
    from flowbnn.errors import FlowBNNError

    try:
        yield
    except FlowBNNError as error:
        typer.echo(f"flowbnn: {_as_options(str(error))}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        from flowbnn.training import is_main_process

        advice = f"; what is finished is kept, go on with: {again} --resume" if again else ""
        if is_main_process():
            typer.echo(f"flowbnn: interrupted{advice}", err=True)
        raise typer.Exit(130) from None


def _as_options(line: str) -> str:
    """Arguments of Python in a message by the names that they have on the command line.

    >>> _as_options("accelerator='cuda' asks for a GPU: use accelerator='cpu'")
    '--device cuda asks for a GPU: use --device cpu'
    """
    import re

    names = {
        "accelerator": "--device",
        "num_nodes": "--nodes",
        "devices": "--devices",
        "strategy": "--strategy",
        "precision": "--precision",
    }
    found = "|".join(names)
    return re.sub(rf"\b({found})=(?!None)'?([\w:.-]+)'?", lambda match: f"{names[match[1]]} {match[2]}", line)


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
    from flowbnn_studies import studies

    found = studies()
    width = max(len(study.name) for study in found)
    for study in found:
        typer.echo(f"{study.name:<{width}}  {study.description}; {study.seeds} seeds")


@app.command()
def run(
    study: Annotated[str, typer.Argument(help="Name of the study, as in: flowbnn list.")],
    out: Out = Path("results"),
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="How many seeds: 0, 1, ...", show_default="the study's own")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Epochs of each variant.", show_default="the study's own")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the study, as in: --set noise_lr=0.05; may be repeated."),
    ] = None,
    resume: Resume = False,
    quick: Quick = False,
    accelerator: Annotated[
        str,
        typer.Option("--accelerator", "--device", help="auto, cpu, cuda, mps; auto is what suits the study."),
    ] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            "--precision", help="As in Lightning: 32-true, bf16-mixed, ...; auto is what suits the study."
        ),
    ] = "auto",
    devices: Annotated[
        int, typer.Option("--devices", help="GPUs, or CPU processes, that train each variant together.")
    ] = 1,
    nodes: Annotated[int, typer.Option("--nodes", help="Machines; see docs/devices.md.")] = 1,
    strategy: Annotated[str, typer.Option("--strategy", help="auto or ddp, which are the same.")] = "auto",
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
    words = ["flowbnn run", study]
    options = {"--seeds": seeds, "--epochs": epochs, "--accelerator": accelerator, "--precision": precision}
    options |= {
        "--devices": devices,
        "--nodes": nodes,
        "--strategy": strategy,
        "--acceleration": acceleration,
    }
    usual = {
        "--accelerator": "auto",
        "--precision": "auto",
        "--devices": 1,
        "--nodes": 1,
        "--strategy": "auto",
        "--acceleration": "auto",
    }
    words += [
        f"{name} {quote(str(value))}"
        for name, value in options.items()
        if value is not None and value != usual.get(name)
    ]
    words += [f"--set {quote(pair)}" for pair in change or []]
    command = " ".join([*words, *(["--quick"] if quick else [])])
    out = _folder(out, quick)
    here = [f"--out {quote(str(out))}", *(f"--only {quote(glob)}" for glob in only or [])]
    here += [] if jobs is None else [f"--jobs {jobs}"]
    with _told(" ".join([command, *here])):
        from flowbnn.training import is_main_process, launched
        from flowbnn_studies import get_study, open_workers, run_study

        chosen = get_study(study)
        changes = dict(_setting(pair) for pair in change or [])
        if epochs is not None:
            whole = "epochs" in chosen.settings.__dataclass_fields__
            changes["epochs" if whole else "*.epochs"] = _positive("--epochs", epochs)
        settings = chosen.make_settings(quick=quick, **changes)
        number = None if seeds is None else _positive("--seeds", seeds)
        _positive("--devices", devices), _positive("--nodes", nodes)
        alone = devices * nodes == 1 and not launched()
        with open_workers(_jobs(jobs, accelerator) if alone else jobs or 1) as workers:
            results = run_study(
                chosen,
                settings=settings,
                seeds=number,
                out=out,
                resume=resume,
                progress=not no_progress,
                accelerator=accelerator,
                precision=precision,
                devices=devices,
                num_nodes=nodes,
                strategy=strategy,
                acceleration=acceleration,
                only=only,
                collect=collect,
                workers=workers,
                command=command,
                smoke=quick or getattr(settings, "source", "") == "generated",
            )
        if is_main_process():
            _show(results)
            typer.echo(
                f"\n{out / chosen.folder(settings) / 'results.json'}; a page of it: flowbnn report {out}"
            )


@app.command()
def compare(
    network: Annotated[str, typer.Option("--network", help="mlp, small-conv, lenet or vgg16.")] = "lenet",
    data: Annotated[
        str, typer.Option("--data", help="digits, clusters, mnist, fashion-mnist or cifar10.")
    ] = "digits",
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="Names or globs with commas between, as in: map,laplace*.", show_default="all"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Epochs of training.", show_default="30")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="How many seeds: 0, 1, ...")] = 1,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, as in: --set samples=32; may be repeated."),
    ] = None,
    out: Out = Path("results"),
    resume: Resume = False,
    quick: Quick = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Which method to use on a network and data, and what each costs; writes OUT/compare-NETWORK-DATA/results.json."""
    words = ["flowbnn compare", f"--network {quote(network)}", f"--data {quote(data)}"]
    words += [f"--methods {quote(methods)}"] if methods is not None else []
    words += [f"--epochs {epochs}"] if epochs is not None else []
    words += [f"--seeds {seeds}"] if seeds != 1 else []
    words += [f"--set {quote(pair)}" for pair in change or []]
    command = " ".join([*words, *(["--quick"] if quick else [])])
    out = _folder(out, quick)
    with _told(f"{command} --out {quote(str(out))}{'' if jobs is None else f' --jobs {jobs}'}"):
        from flowbnn_studies import get_study, open_workers, run_study
        from flowbnn_studies.comparing.registry import check_names

        study = get_study("compare")
        check_names(network, data)
        changes: dict[str, Any] = {"network": network, "data": data, **dict(map(_setting, change or []))}
        if epochs is not None:
            changes["epochs"] = _positive("--epochs", epochs)
        if methods is not None:
            changes["methods"] = tuple(name.strip() for name in methods.split(",") if name.strip())
        settings = study.make_settings(quick=quick, **changes)
        with open_workers(_jobs(jobs, "auto")) as workers:
            results = run_study(
                study,
                settings=settings,
                seeds=_positive("--seeds", seeds),
                out=out,
                resume=resume,
                progress=not no_progress,
                workers=workers,
                command=command,
                smoke=quick,
            )
        _show(results, every=True)
        typer.echo(f"\n{out / study.folder(settings) / 'results.json'}; a page of it: flowbnn report {out}")


@app.command()
def demo(
    out: Out = Path("results"),
    resume: Resume = False,
    quick: Quick = False,
    jobs: Jobs = None,
    no_progress: NoProgress = False,
) -> None:
    """Run two-clusters and digits and write the report: about a minute on two cores."""
    out = _folder(out, quick)
    with _told(f"flowbnn demo --out {out}{' --quick' if quick else ''}"):
        from flowbnn.training import check_writable
        from flowbnn_studies import get_study, open_workers, run_study
        from flowbnn_studies.report import write_report

        check_writable(out / "report.html")
        names = ("two-clusters", "digits")
        with open_workers(_jobs(jobs, "auto")) as workers:
            for name in names:
                study = get_study(name)
                results = run_study(
                    study,
                    settings=study.make_settings(quick=quick),
                    out=out,
                    resume=resume,
                    progress=not no_progress,
                    workers=workers,
                    command=f"flowbnn run {name}{' --quick' if quick else ''}",
                    smoke=quick,
                )
                _show(results)
        page = write_report([out / name / "results.json" for name in names], out / "report.html")
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
    with _told():
        from flowbnn_studies import studies
        from flowbnn_studies.report import find_results, save_figures, write_markdown, write_report

        order = [study.name for study in studies()]
        found = find_results(folder)
        found.sort(
            key=lambda path: order.index(path.parent.name) if path.parent.name in order else len(order)
        )
        typer.echo(f"The report: {write_report(found, out or folder / 'report.html')}")
        if markdown is not None:
            typer.echo(f"The tables: {write_markdown(found, markdown)}")
        if figures is not None:
            typer.echo(f"The figures: {len(save_figures(found, figures))} in {figures}")


def _folder(out: Path, quick: bool) -> Path:
    """A smoke run does not replace real results unless it is sent there."""
    return Path("results-quick") if quick and out == Path("results") else out


def _positive(option: str, value: int) -> int:
    from flowbnn.errors import FlowBNNError

    if value < 1:
        raise FlowBNNError(f"{option} is at least 1, not {value}")
    return value


def _setting(pair: str) -> tuple[str, Any]:
    """The name and the value of ``name=value``, whose value is written as in Python: 0.05, or 0,6,12, or true, or a bare word."""
    import re
    from ast import literal_eval

    from flowbnn.errors import FlowBNNError

    name, _, text = pair.partition("=")
    if text.strip().lower() in ("true", "false"):
        return name.strip(), text.strip().lower() == "true"
    if re.fullmatch(r"\s*[a-z][\w*-]*\s*", text):
        return name.strip(), text.strip()
    try:
        return name.strip(), literal_eval(text.strip())
    except (ValueError, SyntaxError):
        raise FlowBNNError(f"--set takes name=value, as in --set noise_lr=0.05, not '{pair}'") from None


def _jobs(asked: int | None, accelerator: str) -> int:
    from flowbnn_studies.runner.workers import processors

    if asked is not None:
        return _positive("--jobs", asked)
    return min(4, processors()) if accelerator in ("auto", "cpu") else 1


def _show(results: dict[str, Any], every: bool = False) -> None:
    """The headline table: a study's rows, mean and spread over seeds, the published value where there is one."""
    from flowbnn_studies.report.console import console_lines

    for line in console_lines(results, every):
        typer.echo(line)


if __name__ == "__main__":
    main()
