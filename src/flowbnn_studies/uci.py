"""Regression on the UCI sets of Hernández-Lobato and Adams 2015 (https://arxiv.org/abs/1502.05336), with their splits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flowbnn.compare.candidates import CANDIDATES, Candidate
from flowbnn.compare.results import Parts, best_first, format_means
from flowbnn.data import TensorLoader
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import HMC, NUTS
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn.training import cosine
from flowbnn_studies.data.tables import UCI_FOLDERS, load_uci, standardize
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, predict, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job, make_metrics

SPLITS = {name: 5 if name == "protein" else 20 for name in UCI_FOLDERS}

# Lakshminarayanan et al. 2017 (https://arxiv.org/abs/1612.01474), table 1: log-likelihood and RMSE, each with its standard deviation
# over splits. Its column for dropout is that of Gal and Ghahramani 2016, who give the same means with standard errors, smaller by the
# root of the number of splits (boston -2.46 +- 0.06).
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
# The methods that also predict the noise level from the inputs, as the published deep ensembles do
PREDICTED = ("mc-dropout", "deep-ensemble", "node-noise-gaussian", "node-noise-planar")
SUFFIX = "-predicted"
LIKELIHOOD, ERROR, INTERVALS = "Log-likelihood", "RMSE", "Share inside the 90 % interval"
NUMBERS = {
    "log_likelihood": (LIKELIHOOD, "higher", ".3f", "Mean log-density of the test targets of {}, in its own units."),
    "rmse": (ERROR, "lower", ".4g", "Root mean squared error on {}, in its own units."),
    "coverage_90": (INTERVALS, "none", ".3f", "Share of the test targets of {} inside their 90 % interval; 0.9 is right."),
}  # fmt: skip


@options
class Settings(MethodSettings):
    """What the study depends on, besides :class:`MethodSettings`.

    Args:
        sets: which data sets.
        hidden: width of the one hidden layer; twice as wide for protein, as in the papers.
        large_batch, large_epochs: examples in a step and epochs on sets of more than 5,000 training rows; the rate grows with the root
            of the batch.
        chain_rows: HMC and NUTS, of which every step goes through all rows, leave out sets with more training rows.
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
    description = "all methods with their defaults on seven UCI sets: log-likelihood and error beside the published ones"
    question = (
        "A small network learns each of seven tables from 90 % of its rows. How large is the log-density of the rest, and do the "
        "intervals hold what they promise?"
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
        """The methods of this run, some of them once more with a predicted noise level."""
        once = super().candidates(settings)
        more = [
            replace(one, key=one.key + SUFFIX, label=f"{one.label}, predicted level")
            for one in once
            if one.key in PREDICTED
        ]
        return [*once, *more]

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
            held_out = max(1, len(inputs) // 10) if candidate.held_out else 0
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
            own = replace(s, epochs=epochs, lr=s.lr * (batch / s.batch) ** 0.5)
            method, _ = self.make_method(replace(job, settings=own), candidate, len(loader))
            given = job.short_options(validation=validation, likelihood=likelihood)
            posterior = method.fit(network, loader, **given)
            numbers = predict(posterior, test[0], s.samples).evaluate(test[1])
            values[f"log_likelihood_{name}"] = -numbers["nll"]
            values[f"rmse_{name}"] = numbers["rmse"]
            values[f"coverage_90_{name}"] = numbers["coverage_90"]
        return {"values": values}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        notes = [
            f"One hidden layer of {settings.hidden} ({2 * settings.hidden} for protein), the published splits (20, of protein 5); "
            "inputs are standardised, targets are given in their own units. Every method has its defaults, and one training for "
            f"all: Adam from a rate of {settings.lr:g} to zero along a cosine, {settings.epochs} epochs in batches of "
            f"{settings.batch}; above 5,000 rows {settings.large_epochs} epochs in batches of {settings.large_batch}, with a rate "
            "that grows by the root of the batch. This was chosen on rows of the training splits.",
            "The published deep ensembles predict the noise level from the inputs, published dropout has one level for a set; so have "
            "all methods here but the rows that say otherwise, whose networks have the level's logarithm as a second output.",
        ]
        run = self.candidates(settings)
        if any(one.method in (HMC, NUTS) for one in run):
            notes.append(
                f"HMC and NUTS go through all rows in every step, and leave out sets of more than {settings.chain_rows:,}."
            )
        if others := [one.label for one in CANDIDATES if one not in run]:
            notes.append(f"Not run: {'; '.join(others)}.")
        metrics = make_metrics(NUMBERS, {name: name for name in UCI_FOLDERS if name in settings.sets}, "{1}")
        rows = []
        for candidate in self.evaluated_candidates(settings, parts):
            known: dict[str, float] = {}
            published = PUBLISHED.get(candidate.key.removesuffix(SUFFIX), {})
            for name, (likelihood, _, error, _) in published.items():
                known |= {f"log_likelihood_{name}": likelihood, f"rmse_{name}": error}
            rows.append(parts.row(candidate.key, candidate.label, metrics, known, candidate.method_name))
        return Findings(
            answer(settings, parts, self.evaluated_candidates(settings, parts)), metrics, rows, [], notes
        )


def answer(settings: Settings, parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    lines = []
    for name in settings.sets:
        best = best_first(parts, chosen, f"log_likelihood_{name}", higher=True)
        if best:
            lines.append(f"{name} ({format_means(parts, best[:2], f'log_likelihood_{name}', '.2f')})")
    noise = [one for one in chosen if one.key.startswith("node-noise")]
    text = f"The largest log-likelihoods: {', '.join(lines)}." if lines else "No method has numbers yet."
    for one in noise:
        reached = [name for name in settings.sets if _reaches(parts, one.key, name)]
        if any(parts.values(one.key, f"log_likelihood_{name}") for name in settings.sets):
            text += (
                f"\n{one.label} is within a standard error of the published dropout and deep ensembles, or above both, on "
                f"{len(reached)} of {len(settings.sets)} sets{' (' + ', '.join(reached) + ')' if reached else ''}."
            )
    return text


def _reaches(parts: Parts, key: str, name: str) -> bool:
    """Whether a method's mean is no worse than both published ones, within one standard error of theirs.

    Its own spread does not count: it would excuse a method that fails on some splits.
    """
    values = [value for value in parts.values(key, f"log_likelihood_{name}") if value is not None]
    if len(values) < 2 or name not in UCI_FOLDERS:
        return False
    mean = sum(values) / len(values)
    return all(mean >= table[name][0] - table[name][1] / SPLITS[name] ** 0.5 for table in PUBLISHED.values())
