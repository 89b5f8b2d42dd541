"""Noise of a trained network, fitted on data that its weights have not seen: comparison of structures of the posterior."""

import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from flowbnn import evaluate
from flowbnn.calibrate import calibrate
from flowbnn.compare.results import Metric, SeedResults
from flowbnn.data import TensorLoader
from flowbnn.methods import MLE, Laplace, LastLayerRefit, MatrixScaling, VectorScaling
from flowbnn.methods.calibrators.temperature import Temperature, TemperedPosterior
from flowbnn.models import MLP, LeNet
from flowbnn.noise import NormalCoupling, NormalPlanar
from flowbnn.options import Bounds, Count, Positive, options
from flowbnn.posterior import PointPosterior, Posterior
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.evaluation import evaluate_shift, predict
from flowbnn_studies.images.settings import ImageSettings, ImageSource
from flowbnn_studies.runner.findings import paired_difference, pluralize
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row, time_call

NOISE = "node-noise-gaussian"
CALIBRATE_DEFAULT = "Noise, default of fb.calibrate"
FITS: dict[str, tuple[str, str, dict[str, Any]]] = {  # label, method, and arguments of calibrate
    "factorized": ("Noise, factorized", NOISE, {"structure": "factorized", "prior": "fixed"}),
    "layers": ("Noise, full within layers", NOISE, {"structure": "layers", "prior": "fixed"}),
    "chain": ("Noise, chain of layers", NOISE, {"structure": "chain", "prior": "fixed"}),
    "joint": ("Noise, joint", NOISE, {"structure": "full", "prior": "fixed"}),
    "joint-fitted": ("Noise, joint, fitted prior", NOISE, {"structure": "full", "prior": "fitted"}),
    "own": (CALIBRATE_DEFAULT, NOISE, {"folds": 5}),
    "flow-layers": (
        "Noise, planar flows in each layer",
        "node-noise-planar",
        {"structure": "factorized", "prior": "fixed", "flow": NormalPlanar(12)},
    ),
    "flow-joint": (
        "Noise, joint, coupling flow",
        "node-noise-coupling",
        {"structure": "full", "prior": "fixed", "flow": NormalCoupling()},
    ),
}
ROWS_WITHOUT_NOISE = {
    "plain": ("Deterministic", "mle"),
    "temperature": ("Temperature scaling", "temperature"),
    "svs": ("Structured vector scaling", "temperature"),
    "sms": ("Structured matrix scaling", "temperature"),
    "refit": ("Last layer refitted", "mle"),
    "laplace": ("Last-layer Laplace", "laplace"),
}
ROWS: dict[str, tuple[str, str]] = {
    **ROWS_WITHOUT_NOISE,
    **{key: (label, method) for key, (label, method, _) in FITS.items()},
    "all": ("Deterministic on all data, tempered", "temperature"),
}
COMPARED_METHODS = {  # methods that joint noise is compared with
    "temperature": "temperature scaling",
    "factorized": "factorized noise",
    "all": "a deterministic network on all data",
}
SHIFT = "mean over four kinds of corruption (noise, blur, brightness, contrast) at five strengths."
NUMBERS = {
    "accuracy": ("Accuracy", "higher", ".4f", "Fraction of test images whose most probable class is right."),
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood (NLL) of the true class, in nats."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
    "seconds": ("Seconds", "none", ".1f", "Time of the fit of temperature or noise, without the training of the weights."),
}  # fmt: skip
CORRUPTED = {
    f"shift_{key}": (f"{NUMBERS[key][0]}, corrupted", NUMBERS[key][1], ".3f", f"{NUMBERS[key][0]}, {SHIFT}")
    for key in ("accuracy", "nll", "ece")
}
SHIFTED = {  # metrics of corrupted and of novel images
    "auroc_mnist": ("AUROC MNIST", "higher", ".3f", "Probability that a digit has a higher predictive entropy than a test image."),
    "mi_mnist": ("AUROC MNIST, by MI", "higher", ".3f",
                 "The same by the mutual information of label and network; a single network has none."),
    "energy_mnist": ("AUROC MNIST, by energy", "higher", ".3f",
                     "The same by the energy, minus the logarithm of the sum of the exponentials of the logits."),
    **CORRUPTED,
}  # fmt: skip
TABLE = {
    "nll": (
        "NLL",
        "lower",
        ".4f",
        "Mean negative log-density of the test targets, in the units of the data.",
    ),
    "rmse": ("RMSE", "lower", ".4g", "Root mean squared error, in the units of the data."),
    "seconds": NUMBERS["seconds"],
}


@options(kw_only=True)
class EvaluationSettings(ImageSource):
    """Settings of the evaluation of calibrated networks on images.

    Args:
        samples: Number of networks averaged in a prediction.
        shift_samples, shift_images: Number of networks and of images for corrupted and out-of-distribution images.
    """

    samples: Count = 64
    shift_samples: Count = 16
    shift_images: Count = 500

    def images(self) -> ImageSettings:
        """Returns the settings of the evaluation on out-of-distribution and corrupted images."""
        return ImageSettings(
            **{entry.name: getattr(self, entry.name) for entry in fields(EvaluationSettings)}
        )


@options(kw_only=True)
class Settings(EvaluationSettings):
    """Settings of the study, in addition to :class:`EvaluationSettings`.

    Args:
        data: Name of the image set.
        train: Numbers of images for the training of the weights.
        epochs, batch: Epochs and batch sizes of these trainings, for each number of images.
        held_out: Numbers of held-out images, combined with each entry of ``train``.
        memorized: Entries of ``train`` for which the noise is also fitted to the training images.
        tables: UCI sets, half of whose training rows are held out.
        table_epochs: Epochs of the trainings on tables.
        fits: Keys of the posteriors to fit, out of :data:`FITS`.
        flow_rows: Largest number of examples for flows.
        lr: Learning rate of the weights.
        test: Largest number of test images.
    """

    data: str = "fashion-mnist"
    train: tuple[Count, ...] = (1_000, 5_000, 55_000)
    epochs: tuple[Count, ...] = (60, 30, 10)
    batch: tuple[Count, ...] = (50, 50, 250)
    held_out: tuple[Count, ...] = (100, 1_000, 5_000)
    memorized: tuple[Count, ...] = (1_000,)
    tables: tuple[str, ...] = ("concrete", "energy")
    table_epochs: Count = 200
    fits: tuple[str, ...] = tuple(FITS)
    flow_rows: Annotated[int, Bounds(ge=0)] = 1_000
    lr: Positive = 1e-3
    test: Count = 10_000

    def cases(self) -> dict[str, tuple[str, ...]]:
        """Returns the keys of the image cases of each variant."""
        cases = {str(size): tuple(f"{size}-{number}" for number in self.held_out) for size in self.train}
        return cases | {f"{size}-same": (f"{size}-same",) for size in self.memorized}


def case_label(case: str) -> str:
    """Returns a case in words.

    >>> case_label("1000-100"), case_label("1000-same"), case_label("energy")
    ('1,000 + 100', '1,000, same images', 'energy')
    """
    train, _, held_out = case.partition("-")
    if not held_out:
        return case
    return f"{int(train):,}, same images" if held_out == "same" else f"{int(train):,} + {int(held_out):,}"


class CalibrateStudy(Study):
    name = "calibrate"
    title = "Calibrating a trained network"
    description = "noise of a trained LeNet fitted to held-out and to memorized images, factorized to joint, versus temperature scaling"
    question = (
        "A LeNet is trained on images, and a small network on a table. Then the noise is fitted with fixed weights, to held-out "
        "data or to the training data. Does a richer posterior predict better, and better than temperature scaling?"
    )
    source = "no published counterpart"
    settings = Settings
    seeds = 10
    accelerator = "auto"
    headline = ("nll_1000-1000", "ece_1000-1000", "nll_1000-100", "nll_1000-same")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "generated": 160, "train": (80,), "epochs": (2,), "batch": (40,), "held_out": (60,), "memorized": (80,),
        "tables": (), "fits": ("factorized", "joint"), "samples": 4, "shift_samples": 2, "shift_images": 4,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        """Returns a variant for each network, with all that is fitted to it."""
        images = [
            Variant(key, f"{case_label(key)} images", "mle", cost=3.0 * len(cases))
            for key, cases in settings.cases().items()
        ]
        return *images, *(Variant(name, name, "mle") for name in settings.tables)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        if job.variant in s.tables:
            return {"values": {}, "table": {job.variant: evaluate_table(job)}}
        size = int(job.variant.partition("-")[0])
        images = load_image_data(s.images(), s.data, ["mnist"], job.device)
        order = torch.randperm(images.num_data, generator=torch.Generator().manual_seed(job.seed))
        plain = train_lenet(select_images(images, order[:size]), size, job)
        names = NUMBERS | SHIFTED
        table = {}
        for case in s.cases()[job.variant]:
            number = case.partition("-")[2]
            indices = order[:size] if number == "same" else order[-int(number) :]
            table[case] = {
                key: evaluate_images(posterior, images, s, names, limit=s.test) | {"seconds": seconds}
                for key, posterior, seconds in fit_all(plain, select_images(images, indices), job)
            }
            if number != "same":
                all_data = select_images(images, torch.cat([order[:size], indices]))
                posterior, seconds = time_call(
                    train_on_all_data, lambda data: train_lenet(data, size, job), all_data, job.seed
                )
                scores = evaluate_images(posterior, images, s, names, limit=s.test)
                table[case]["all"] = scores | {"seconds": seconds}
        return {"values": {}, "table": table}

    def story(self, numbers: Numbers) -> Story:
        cases = [key for key in numbers.metrics if key.startswith("nll_") and not key.endswith("-same")]
        verdicts = {case: numbers.better("joint", "temperature", case) for case in cases}
        wins = sum(verdict > 0 for verdict in verdicts.values())
        losses = [case.removeprefix("nll_") for case, verdict in verdicts.items() if verdict < 0]
        beaten = sum(numbers.better("joint", "all", case) > 0 for case in cases)
        where = f", is worse on {len(losses)} with few held-out examples" if losses else ""
        return Story(
            "Does noise that is fitted to held-out data predict better than temperature scaling?",
            f"Often: it is significantly better on {wins} of {len(cases)} settings{where}, and beats a network that is trained on all "
            f"data, held-out data included, on only {beaten}.",
            f"{wins} of {len(cases)}",
            "settings on which joint noise has a significantly lower NLL than temperature scaling",
            ("nll_1000-1000", "ece_1000-1000", "nll_55000-100", "nll_55000-5000"),
            rows=("plain", "temperature", "laplace", "factorized", "joint", "all"),
            charts=("nll_1000-1000", "nll_55000-100", "nll_55000-5000"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        tables = (
            (seed, case, rows)
            for (_, seed), part in parts.content.items()
            for case, rows in part["table"].items()
        )
        by_row = parts_by_row(parts.seeds, tables)
        cases = {case: case_label(case) for group in settings.cases().values() for case in group}
        metrics = make_metrics(NUMBERS | SHIFTED, cases)
        metrics += make_metrics(TABLE, {name: name for name in settings.tables})
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        notes = [
            "Columns: number of training images + number of held-out images to which everything else is fitted. “Same images”: the "
            "noise is fitted to the training images. Tables: half of the training rows each, on the published splits.",
            "The prior of the noise is N(1, 0.5²), or fitted: a mean and a width for every layer by the ELBO. Flows start from the "
            f"fitted Gaussian and are omitted if they do not increase its ELBO. They are fitted to at most {settings.flow_rows:,} "
            "examples.",
            "Last-layer Laplace: Kronecker-factored, with the prior chosen by the marginal likelihood, fitted to the held-out data "
            "with fixed weights.",
            "Deterministic on all data: the same network trained on training and held-out data, with the mean temperature of 5 "
            "networks of a cross-validation. The seconds include all these trainings.",
            "Nothing was chosen on test data.",
        ]
        rows = [row for row in rows if row["values"]]
        return Findings(answer(settings, by_row), metrics, rows, [], notes, comparisons(by_row, metrics))


TensorPair = tuple[Tensor, Tensor]


def select_images(images: ImageData, indices: Tensor) -> TensorPair:
    """Returns normalized images and their labels by index."""
    train = images.train
    indices = indices.to(train.images.device)
    return train.normalizer()(train.images[indices]), train.labels[indices]


def train_lenet(data: TensorPair, size: int, job: Job) -> PointPosterior:
    """Trains a LeNet with the settings for the given number of images."""
    s: Settings = job.settings
    index = s.train.index(size)
    torch.manual_seed(job.seed)
    loader = TensorLoader(*data, batch_size=s.batch[index], shuffle=True)
    method = MLE(epochs=s.epochs[index], lr=s.lr)
    options: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
    return method.fit(LeNet(data[0].shape[1]), loader, **options)


def fit_posteriors(
    plain: PointPosterior, held_out: TensorLoader, job: Job, fits: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Posterior, float]]:
    """Yields key, posterior and seconds: without calibration, scaled, with Laplace, and with noise by each of ``fits``.

    Args:
        plain: Trained network.
        held_out: Held-out data.
        job: Job of the study.
        fits: Arguments of calibrate by key.
    """
    yield "plain", plain, 0.0
    yield "temperature", *time_call(Temperature().fit, plain, held_out, progress=False)
    if not held_out.tensors[1].is_floating_point():
        yield "svs", *time_call(VectorScaling().fit, plain, held_out, progress=False)
        yield "sms", *time_call(MatrixScaling().fit, plain, held_out, progress=False)
    yield "refit", *time_call(LastLayerRefit().fit, plain, held_out, progress=False)
    options: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
    yield "laplace", *time_call(Laplace(layers="last", epochs=0).fit, plain.model, held_out, **options)
    for key, arguments in fits.items():
        yield key, *time_call(calibrate, plain.model, held_out, **{"folds": 0, **arguments}, **options)


def fit_all(plain: PointPosterior, held_out: TensorPair, job: Job) -> Iterator[tuple[str, Posterior, float]]:
    """Yields key, posterior and seconds of everything that is fitted to held-out data."""
    s: Settings = job.settings
    loader = TensorLoader(*held_out, batch_size=1000)
    fits = {key: arguments for key, (_, _, arguments) in FITS.items() if key in s.fits}
    allow_flows = len(held_out[1]) <= s.flow_rows
    yield from fit_posteriors(
        plain,
        loader,
        job,
        {key: arguments for key, arguments in fits.items() if allow_flows or "flow" not in arguments},
    )


def evaluate_images(
    posterior: Posterior,
    data: ImageData,
    settings: EvaluationSettings,
    names: Container[str],
    precision: str = "32-true",
    limit: int | None = None,
) -> dict[str, float]:
    """Computes the metrics ``names`` on test, out-of-distribution and corrupted images.

    Args:
        posterior: Posterior to evaluate.
        data: Images on the device.
        settings: Settings of the evaluation.
        names: Names of the metrics.
        precision: Precision of the predictions.
        limit: Largest number of test images; None for all.
    """
    images, labels = (tensor[:limit] for tensor in data.test)
    scores = predict(posterior, images, settings.samples, precision).evaluate(labels)
    shift_scores, _ = evaluate_shift(posterior, data, settings.images(), precision)
    return {name: value for name, value in (scores | shift_scores).items() if name in names}


def evaluate_table(job: Job) -> dict[str, dict[str, float]]:
    """Returns the rows of one UCI set: weights are trained on one half of the training rows, the rest is fitted to the other half."""
    s: Settings = job.settings
    inputs, targets, *test = load_uci(job.variant, job.seed)
    inputs, test[0] = standardize(inputs, test[0])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(job.seed))
    first, second = order[: len(order) // 2], order[len(order) // 2 :]

    def network(data: TensorPair) -> PointPosterior:
        torch.manual_seed(job.seed)
        loader = TensorLoader(*data, batch_size=32, shuffle=True)
        options: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
        return MLE(epochs=s.table_epochs, lr=1e-2).fit(MLP(inputs.shape[1], (50,), 1), loader, **options)

    plain = network((inputs[first], targets[first]))
    rows = [*fit_all(plain, (inputs[second], targets[second]), job)]
    rows.append(("all", *time_call(train_on_all_data, network, (inputs, targets), job.seed)))
    table = {}
    for key, posterior, seconds in rows:
        numbers = evaluate(posterior, (test[0], test[1]), samples=s.samples, progress=False)
        table[key] = {"nll": numbers["nll"], "rmse": numbers["rmse"], "seconds": seconds}
    return table


def train_on_all_data(
    network: Callable[[TensorPair], PointPosterior], data: TensorPair, seed: int, folds: int = 5
) -> TemperedPosterior:
    """Trains a network on all data, with the mean temperature of a cross-validation.

    Args:
        network: Function that trains a network.
        data: Inputs and targets.
        seed: Seed of the folds.
        folds: Number of folds.
    """
    parts = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed)).chunk(folds)
    log_temperatures = []
    for number, held_out in enumerate(parts):
        train = torch.cat([part for index, part in enumerate(parts) if index != number])
        posterior = network((data[0][train], data[1][train]))
        tempered = Temperature().fit(posterior, [(data[0][held_out], data[1][held_out])], progress=False)
        assert isinstance(tempered, TemperedPosterior)
        log_temperatures.append(math.log(tempered.temperature))
    return TemperedPosterior(network(data), math.exp(sum(log_temperatures) / folds))


def comparisons(parts: SeedResults, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Compares the NLL of joint noise with that of other methods, seed by seed."""
    table = []
    for method, label in COMPARED_METHODS.items():
        for metric in metrics:
            values = parts.common("joint", method, metric.key) if metric.key.startswith("nll_") else ([], [])
            if len(values[0]) > 1:
                difference = asdict(paired_difference(*values))
                table.append({"title": f"joint noise − {label}", "metric": metric.key, **difference})
    return table


def answer(settings: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    cases = [case for group in settings.cases().values() for case in group] + list(settings.tables)
    lines = []
    for method, label in COMPARED_METHODS.items():
        verdicts: dict[str, list[str]] = {}
        for case in cases:
            values = parts.common("joint", method, f"nll_{case}")
            if case.endswith("same") or not values[0]:
                continue
            difference = paired_difference(*values)
            verdict = "better" if difference.mean < 0 else "worse"
            verdict = verdict if difference.significant else difference.inconclusive
            numbers = f"{statistics.fmean(values[0]):.3f} versus {statistics.fmean(values[1]):.3f}"
            verdicts.setdefault(verdict, []).append(f"{case_label(case)} ({numbers})")
        if verdicts:
            text = "; ".join(
                f"{verdict} on {', '.join(where)}" for verdict, where in sorted(verdicts.items())
            )
            lines.append(f"Test NLL of joint noise versus {label}, {pluralize(len(parts.seeds))}: {text}.")
    for case in (case for case in cases if case.endswith("same")):
        joint, factorized = parts.common("joint", "factorized", f"nll_{case}")
        if joint:
            difference = paired_difference(joint, factorized)
            lines.append(
                f"Fitted to memorized images, a joint posterior has a {'lower' if difference.mean < 0 else 'higher'} test NLL than a "
                f"factorized one: {statistics.fmean(joint):.3f} versus {statistics.fmean(factorized):.3f}, difference "
                f"{difference.describe(3)}."
            )
    return "\n".join(lines) or "There are too few results for an answer."
