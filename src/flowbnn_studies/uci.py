"""Regression on the UCI sets of Hernández-Lobato and Adams 2015 (https://arxiv.org/abs/1502.05336), with their splits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flowbnn.compare.candidates import CANDIDATES, Candidate
from flowbnn.compare.results import SeedResults, best_first, format_means
from flowbnn.data import TensorLoader
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import HMC, NUTS
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn.training import cosine
from flowbnn_studies.data.tables import UCI_FOLDERS, load_uci, standardize
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, make_metrics

SPLITS = {name: 5 if name == "protein" else 20 for name in UCI_FOLDERS}

# Lakshminarayanan et al. 2017 (https://arxiv.org/abs/1612.01474), table 1: log-likelihood and RMSE, each with its standard
# deviation over splits. The column of dropout is that of Gal and Ghahramani 2016, who report the same means with standard errors,
# which are smaller by the square root of the number of splits (boston -2.46 +- 0.06).
PUBLISHED: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "mc-dropout": {
        "boston": (-2.46, 0.25, 2.97, 0.85),
        "concrete": (-3.04, 0.09, 5.23, 0.53),
        "energy": (-1.99, 0.09, 1.66, 0.19),
        "kin8nm": (0.95, 0.03, 0.10, 0.00),
        "naval": (3.80, 0.05, 0.01, 0.00),
        "protein": (-2.89, 0.01, 4.36, 0.04),
        "yacht": (-1.55, 0.12, 1.11, 0.38),
    },
    "deep-ensemble": {
        "boston": (-2.41, 0.25, 3.28, 1.00),
        "concrete": (-3.06, 0.18, 6.03, 0.58),
        "energy": (-1.38, 0.22, 2.09, 0.29),
        "kin8nm": (1.20, 0.02, 0.09, 0.00),
        "naval": (5.63, 0.05, 0.00, 0.00),
        "protein": (-2.83, 0.02, 4.71, 0.06),
        "yacht": (-1.18, 0.21, 1.58, 0.48),
    },
}
# methods that are also run with a noise level predicted from the inputs, as in the published deep ensembles
PREDICTED = ("mc-dropout", "deep-ensemble", "node-noise-gaussian", "node-noise-planar")
SUFFIX = "-predicted"
LIKELIHOOD, ERROR, INTERVALS = "Log-likelihood", "RMSE", "Coverage of the 90 % interval"
NUMBERS = {
    "log_likelihood": (LIKELIHOOD, "higher", ".3f", "Mean log-density of the test targets of {}, in the units of the data."),
    "rmse": (ERROR, "lower", ".4g", "Root mean squared error on {}, in the units of the data."),
    "coverage_90": (INTERVALS, "none", ".3f", "Fraction of the test targets of {} inside their 90 % interval; ideally 0.9."),
}  # fmt: skip


@options
class Settings(MethodSettings):
    """Settings of the study, in addition to :class:`MethodSettings`.

    Args:
        sets: Names of the data sets.
        hidden: Width of the hidden layer, doubled for protein, as in the papers.
        large_batch, large_epochs: Batch size and epochs on sets of more than 5,000 training rows. The learning rate grows with the
            square root of the batch size.
        chain_rows: Largest number of training rows for HMC and NUTS, which use all rows in every step.
    """

    sets: tuple[str, ...] = tuple(UCI_FOLDERS)
    hidden: Count = 50
    batch: Count = 32
    large_batch: Count = 256
    large_epochs: Count = 100
    chain_rows: Count = 1500
    epochs: Count = 40
    lr: Positive = 1e-2
    samples: Count = 128


class Uci(MethodStudy):
    name = "uci"
    title = "Regression on UCI tables"
    description = (
        "all methods with their defaults on seven UCI sets: log-likelihood and error, with published values"
    )
    question = (
        "A small network is trained on 90 % of the rows of each of seven tables. How large is the log-likelihood of the other "
        "rows, and do the predictive intervals have the right coverage?"
    )
    source = "Hernández-Lobato and Adams 2015; Gal and Ghahramani 2016; Lakshminarayanan et al. 2017, table 1"
    settings = Settings
    seeds = 20
    headline = tuple(f"log_likelihood_{name}" for name in UCI_FOLDERS)
    common: ClassVar[dict[str, Any]] = {"schedule": cosine}
    specific: ClassVar[dict[str, dict[str, Any]]] = {
        "hmc": {"samples": 100, "warmup": 100, "chains": 2, "steps": 32},
        "nuts": {"samples": 60, "warmup": 60, "chains": 1, "max_depth": 6},
    }
    quick: ClassVar[dict[str, Any]] = {
        "sets": ("yacht",), "methods": ("mle", "node-noise-gaussian"), "epochs": 2, "samples": 8, "hidden": 8,
    }  # fmt: skip

    def candidates(self, settings: Settings) -> list[Candidate]:
        """Returns the methods of this run, some of them twice, the second time with a predicted noise level."""
        candidates = super().candidates(settings)
        predicted = [
            replace(candidate, key=candidate.key + SUFFIX, label=f"{candidate.label}, predicted noise level")
            for candidate in candidates
            if candidate.key in PREDICTED
        ]
        return [*candidates, *predicted]

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        predicted = candidate.key.endswith(SUFFIX)
        values: dict[str, float] = {}
        for name in s.sets:
            if job.seed >= SPLITS.get(name, 20):
                continue
            inputs, targets, *test = load_uci(name, job.seed)
            if candidate.method in (HMC, NUTS) and len(inputs) > s.chain_rows:
                continue
            inputs, test[0] = standardize(inputs, test[0])
            held_out = max(1, len(inputs) // 10) if candidate.needs_held_out else 0
            large = len(inputs) > 5000
            batch, epochs = (s.large_batch, s.large_epochs) if large else (s.batch, s.epochs)
            loader = shuffled_loader((inputs[held_out:], targets[held_out:]), batch, job.seed)
            validation = (
                TensorLoader(inputs[:held_out], targets[:held_out], batch_size=1024) if held_out else None
            )
            torch.manual_seed(job.seed)
            width = s.hidden * (2 if name == "protein" else 1)
            network = MLP(inputs.shape[1], (width,), 2 if predicted else 1)
            likelihood = Gaussian("predicted") if predicted else "auto"
            training_settings = replace(s, epochs=epochs, lr=s.lr * (batch / s.batch) ** 0.5)
            method, _ = self.make_method(replace(job, settings=training_settings), candidate, len(loader))
            options = job.short_options(validation=validation, likelihood=likelihood)
            posterior = method.fit(network, loader, **options)
            numbers = predict(posterior, test[0], s.samples).evaluate(test[1])
            values[f"log_likelihood_{name}"] = -numbers["nll"]
            values[f"rmse_{name}"] = numbers["rmse"]
            values[f"coverage_90_{name}"] = numbers["coverage_90"]
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        tables = [key for key in numbers.metrics if key.startswith("log_likelihood_")]
        best = {table: numbers.ranked(table)[0] for table in tables}
        noise = "node-noise-gaussian-predicted"
        won = [table.removeprefix("log_likelihood_") for table, key in best.items() if key == noise]
        behind = {table: numbers.mean(best[table], table) - numbers.mean(noise, table) for table in tables}
        worst = max(behind, key=lambda table: behind[table])
        metrics = tuple(dict.fromkeys([*(table for table in tables if best[table] == noise), worst, *tables]))
        return Story(
            "Which methods predict the targets of tables best?",
            f"It depends on the table: {len(set(best.values()))} different methods win {len(tables)} tables, and node noise with a "
            f"predicted noise level wins {len(won)} ({' and '.join(won) or 'none'}) but fails on "
            f"{worst.removeprefix('log_likelihood_')}, {behind[worst]:.1f} nats behind the best.",
            f"{len(won)} of {len(tables)}",
            "tables on which node noise with a predicted noise level is best",
            metrics[:4],
            rows=numbers.main_rows(noise),
            charts=metrics[:3],
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        notes = [
            f"One hidden layer of {settings.hidden} ({2 * settings.hidden} for protein) and the published splits (20, of protein "
            "5). Inputs are standardized, targets are in the units of the data. Every method has its defaults and the same "
            f"training: Adam with a learning rate that decays from {settings.lr:g} to zero along a cosine, {settings.epochs} "
            f"epochs, batches of {settings.batch}. Sets of more than 5,000 rows have {settings.large_epochs} epochs, batches of "
            f"{settings.large_batch} and a rate that grows with the square root of the batch size. This was chosen on rows of the "
            "training splits.",
            "The published deep ensembles predict the noise level from the inputs; published dropout has one level for a set. All "
            "methods here have one level for a set, except rows with a predicted noise level, whose networks output its logarithm.",
        ]
        candidates = self.candidates(settings)
        if any(candidate.method in (HMC, NUTS) for candidate in candidates):
            notes.append(
                f"HMC and NUTS use all rows in every step and are not run on sets of more than {settings.chain_rows:,} rows."
            )
        if missing := [candidate.label for candidate in CANDIDATES if candidate not in candidates]:
            notes.append(f"Not run: {'; '.join(missing)}.")
        metrics = make_metrics(NUMBERS, {name: name for name in UCI_FOLDERS if name in settings.sets}, "{1}")
        evaluated = self.evaluated_candidates(settings, parts)
        rows = []
        for candidate in evaluated:
            values: dict[str, float] = {}
            published = PUBLISHED.get(candidate.key.removesuffix(SUFFIX), {})
            for name, (likelihood, _, error, _) in published.items():
                values |= {f"log_likelihood_{name}": likelihood, f"rmse_{name}": error}
            rows.append(parts.row(candidate.key, candidate.label, metrics, values, candidate.method_name))
        return Findings(answer(settings, parts, evaluated), metrics, rows, [], notes)


def answer(settings: Settings, parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    lines = []
    for name in settings.sets:
        best = best_first(parts, candidates, f"log_likelihood_{name}", higher=True)
        if best:
            lines.append(f"{name} ({format_means(parts, best[:2], f'log_likelihood_{name}', '.2f')})")
    text = f"Largest log-likelihoods: {', '.join(lines)}." if lines else "No method has results yet."
    for candidate in candidates:
        names = [name for name in settings.sets if parts.values(candidate.key, f"log_likelihood_{name}")]
        if candidate.key.startswith("node-noise") and names:
            reached = [name for name in settings.sets if _reaches(parts, candidate.key, name)]
            text += (
                f"\n{candidate.label} reaches both published dropout and deep ensembles, within one standard error, on "
                f"{len(reached)} of {len(settings.sets)} sets{' (' + ', '.join(reached) + ')' if reached else ''}."
            )
    return text


def _reaches(parts: SeedResults, key: str, name: str) -> bool:
    """Returns True if the mean of a method is at least both published means, within one standard error of theirs.

    The spread of the method itself does not count, because it would favour a method that fails on some splits.
    """
    values = [value for value in parts.values(key, f"log_likelihood_{name}") if value is not None]
    if len(values) < 2 or name not in UCI_FOLDERS:
        return False
    mean = sum(values) / len(values)
    return all(mean >= table[name][0] - table[name][1] / SPLITS[name] ** 0.5 for table in PUBLISHED.values())
