"""Densities of tables: neural spline flows, masked autoregressive flows and a Gaussian."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from flowbnn.compare.results import Metric, SeedResults
from flowbnn.density import fit_density
from flowbnn.flows import MAF, NSF
from flowbnn.options import Count, NonNegative, Positive, options
from flowbnn_studies.data.tables import TABLE_FILES, UCI_FOLDERS, load_table, load_uci
from flowbnn_studies.runner.findings import pluralize
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

LABELS = {"gaussian": "Gaussian, full covariance", "maf": "MAF", "nsf": "NSF"}
# Papamakarios et al. 2017 (MAF of 10 layers) and Durkan et al. 2019 (RQ-NSF with couplings), as in table 3 of Kobyzev et al. 2020,
# https://arxiv.org/abs/1908.09257
PUBLISHED: dict[str, dict[str, float]] = {
    "maf": {"power": 0.24, "gas": 10.08, "hepmass": -17.73, "miniboone": -12.24},
    "nsf": {"power": 0.64, "gas": 13.09, "hepmass": -14.75, "miniboone": -9.67},
}


@options(kw_only=True)
class Settings:
    """Settings of the study.

    Args:
        source: ``"files"``, or ``"generated"`` for generated rows in trial runs.
        sets: UCI sets, or ``"power"``, ``"gas"``, ``"hepmass"`` and ``"miniboone"`` if their files are present.
        length, width, bins: Length, width and number of bins of the flows.
        epochs, patience, lr, weight_decay: Options of the trainings. A tenth of the training rows chooses the epoch.
        batch: Largest batch size; at most a sixteenth of the rows and at least 32.
    """

    source: Literal["files", "generated"] = "files"
    sets: tuple[str, ...] = tuple(UCI_FOLDERS)
    length: Count = 5
    width: Count = 64
    bins: Count = 8
    epochs: Count = 200
    patience: Count = 40
    lr: Positive = 2e-3
    weight_decay: NonNegative = 1e-3
    batch: Count = 512


class TabularDensities(Study):
    name = "tabular-densities"
    title = "Densities of tables"
    description = (
        "test log-likelihood of NSF, MAF and a full-covariance Gaussian on seven UCI tables, five splits"
    )
    question = (
        "The rows of a table, including the target, are samples of a density. How much higher is the test log-likelihood of flows "
        "than that of a Gaussian, and are splines worth their cost?"
    )
    source = (
        "UCI splits of Hernández-Lobato and Adams 2015; Papamakarios et al. 2017 for the four large tables"
    )
    settings = Settings
    seeds = 5
    accelerator = "auto"
    headline = tuple(UCI_FOLDERS)
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "sets": ("yacht",), "length": 1, "width": 8, "epochs": 2,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return tuple(
            Variant(key, label, cost=0.1 if key == "gaussian" else 1.0) for key, label in LABELS.items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        values = {}
        for name in s.sets:
            train, validation, test = (rows.to(job.device) for rows in load_rows(name, job.seed, s.source))
            if job.variant == "gaussian":
                values[name] = gaussian(torch.cat([train, validation]), test)
                continue
            torch.manual_seed(job.seed)
            flow_options: dict[str, Any] = {"length": s.length, "hidden": (s.width, s.width)}
            dim = train.shape[1]
            flow = MAF(dim, **flow_options) if job.variant == "maf" else NSF(dim, bins=s.bins, **flow_options)
            fit_options = {name: getattr(s, name) for name in ("epochs", "patience", "lr", "weight_decay")}
            fit_options["batch_size"] = max(32, min(s.batch, len(train) // 16))
            options = job.short_options(precision="32-true", validation=validation, **fit_options)
            density = fit_density(flow.to(job.device), train, **options)
            values[name] = float(density.score(test).double().mean())
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        tables = list(numbers.metrics)
        first = sum(numbers.ranked(table)[0] == "nsf" for table in tables)
        clear = sum(numbers.better("nsf", "maf", table) > 0 for table in tables)
        charts = tuple(table for table in ("concrete", "kin8nm", "protein") if table in tables) or tuple(
            tables[:1]
        )
        return Story(
            "How good are spline flows as densities of tables?",
            f"Neural spline flows (NSF) have the highest held-out log-likelihood on {first} of {len(tables)} tables and are "
            "significantly "
            f"better than the other flow, MAF, on {clear}, but the times of their trainings were not compared.",
            f"{first} of {len(tables)}",
            "tables on which spline flows have the highest held-out log-likelihood",
            tuple(tables[:4]),
            charts=charts,
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        definition = "Mean log-density of the test rows of {}, standardized, in nats."
        metrics = tuple(
            Metric(name, name, "higher", ".2f", definition.format(name)) for name in settings.sets
        )
        notes = [
            "A sample is a row with its target. Columns that are constant, or correlated above 0.98 with an earlier one, are "
            "dropped. A column with fewer distinct values than half of the rows gets uniform noise of the width of its smallest "
            "step, once, so that no density is infinite. Then all columns are standardized. All of this is decided on the training "
            "rows alone.",
            f"Flows of {settings.length} steps with networks of two hidden layers of {settings.width} units, at most "
            f"{settings.epochs} epochs of AdamW. A tenth of the training rows chooses the epoch. A seed is one of the published "
            f"splits of a table: {pluralize(len(parts.seeds), 'split')} here.",
        ]
        rows = self.rows(settings, parts, metrics, PUBLISHED)
        return Findings(answer(settings, parts), metrics, rows, [], notes)


def load_rows(name: str, split: int, source: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns training, validation and test rows."""
    if source == "generated":
        rows = torch.randn(120, 3, generator=torch.Generator().manual_seed(split))
        rows[:, 2] = (rows[:, 2] + rows[:, 0]).round()
        train, test = rows[:90], rows[90:]
    elif name in TABLE_FILES:
        return load_table(name)
    else:
        inputs, targets, *test_parts = load_uci(name, split)
        train, test = torch.cat([inputs, targets], 1), torch.cat(test_parts, 1)
    train, test = prepare_rows(train, test, torch.Generator().manual_seed(split))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(split))
    count = max(1, len(order) // 10)
    return train[order[count:]], train[order[:count]], test


def prepare_rows(train: Tensor, test: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drops redundant columns, adds noise to discrete ones, and standardizes.

    The choice of columns, their steps, means and standard deviations use the training rows alone.

    >>> steps = torch.tensor([[0.0, 0.0, 3.0], [1.0, 2.0, 3.0], [0.0, 0.1, 3.0], [1.0, 2.1, 3.0]]).repeat(3, 1)
    >>> train, test = prepare_rows(steps, steps, torch.Generator().manual_seed(0))
    >>> train.shape, len(train.unique())  # the first of two correlated columns is kept, the constant one is dropped
    (torch.Size([12, 1]), 12)
    >>> torch.equal(train, prepare_rows(steps, steps.square() - 7.3, torch.Generator().manual_seed(0))[0])
    True
    """
    train, test = train.double(), test.double()
    columns: list[int] = []
    for column in range(train.shape[1]):
        if float(train[:, column].std()) <= 1e-9 * (1.0 + float(train[:, column].abs().max())):
            continue
        correlations = [torch.corrcoef(train[:, [column, earlier]].T)[0, 1].abs() for earlier in columns]
        if all(float(correlation) <= 0.98 for correlation in correlations):
            columns.append(column)
    train, test = train[:, columns], test[:, columns]
    distinct = [train[:, column].unique() for column in range(len(columns))]
    steps = torch.stack(
        [values.diff().min() if 2 * len(values) < len(train) else values.new_zeros(()) for values in distinct]
    )
    train, test = (
        rows + steps * torch.rand(rows.shape, generator=generator, dtype=rows.dtype) for rows in (train, test)
    )
    mean, std = train.mean(0), train.std(0)
    return ((train - mean) / std).float(), ((test - mean) / std).float()


def gaussian(train: Tensor, test: Tensor) -> float:
    """Computes the mean log-density of test rows under the Gaussian of maximum likelihood.

    >>> rows = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(gaussian(rows, rows), 2)  # the negative entropy, -log(2 pi e)
    -2.84
    """
    train = train.double()
    covariance = torch.cov(train.T, correction=0).reshape(train.shape[1], train.shape[1])
    covariance = covariance + 1e-6 * torch.eye(len(covariance), dtype=covariance.dtype, device=train.device)
    return float(MultivariateNormal(train.mean(0), covariance).log_prob(test.double()).mean())


def answer(s: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    names = [name for name in s.sets if not any(math.isnan(parts.mean(key, name)) for key in LABELS)]
    if not names:
        return "Some densities have no results yet."
    best = [name for name in names if max(LABELS, key=lambda key: parts.mean(key, name)) == "nsf"]
    values = "; ".join(
        f"{name} " + ", ".join(f"{parts.mean(key, name):.2f}" for key in LABELS) for name in names
    )
    return (
        f"NSF has the highest test log-likelihood on {len(best)} of {len(names)} tables "
        f"({pluralize(len(parts.seeds), 'split')}).\nGaussian, MAF and NSF: {values}."
    )
