"""Noise of a trained network, fitted on data that its weights have not seen: what each structure of the posterior is worth."""

import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn import evaluate
from flowbnn.calibrate import calibrate
from flowbnn.compare.results import Metric, Parts
from flowbnn.data import TensorLoader
from flowbnn.methods import MLE, Laplace
from flowbnn.methods.temperature import TemperedPosterior, temper
from flowbnn.models import MLP, LeNet
from flowbnn.noise import NormalCoupling, NormalPlanar
from flowbnn.options import Bounds, Count, Positive, options
from flowbnn.posterior import PointPosterior, Posterior
from flowbnn.posterior.base import PredictOptions
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.evaluation import evaluate_shift, predict
from flowbnn_studies.images.settings import ImageSettings, ImageSource
from flowbnn_studies.runner.findings import paired_difference, pluralize
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row, time_call

NOISE = "node-noise-gaussian"
FOLDS = 5  # for the temperature of a network on all data
CALIBRATE_DEFAULT = "Noise, as fb.calibrate chooses"  # its structure, and its prior by the first of its folds
FITS: dict[str, tuple[str, str, dict[str, Any]]] = {  # label, method, and what calibrate is given
    "factorized": ("Noise, factorized", NOISE, {"structure": "factorized", "prior": "fixed"}),
    "layers": ("Noise, full within layers", NOISE, {"structure": "layers", "prior": "fixed"}),
    "chain": ("Noise, chain of layers", NOISE, {"structure": "chain", "prior": "fixed"}),
    "joint": ("Noise, joint", NOISE, {"structure": "full", "prior": "fixed"}),
    "joint-fitted": ("Noise, joint, fitted prior", NOISE, {"structure": "full", "prior": "fitted"}),
    "own": (CALIBRATE_DEFAULT, NOISE, {"folds": 5}),
    "flow-layers": (
        "Noise, planar flows within layers",
        "node-noise-planar",
        {"structure": "factorized", "prior": "fixed", "flow": NormalPlanar(12)},
    ),
    "flow-joint": (
        "Noise, joint, couplings",
        "node-noise-coupling",
        {"structure": "full", "prior": "fixed", "flow": NormalCoupling()},
    ),
}
FIRST = {  # rows without noise
    "plain": ("Plain", "mle"),
    "temperature": ("Temperature scaling", "temperature"),
    "vector": ("Vector scaling", "temperature"),
    "laplace": ("Last-layer Laplace", "laplace"),
}
ROWS: dict[str, tuple[str, str]] = {
    **FIRST,
    **{key: (label, method) for key, (label, method, _) in FITS.items()},
    "all": ("Plain on all data, tempered", "temperature"),
}
RIVALS = {  # of joint noise
    "temperature": "temperature scaling",
    "factorized": "factorized noise",
    "all": "a plain network on all data",
}
SHIFT = "mean over four kinds of corruption (noise, blur, brightness, contrast) at five strengths."
NUMBERS = {
    "accuracy": ("Accuracy", "higher", ".4f", "Share of test images whose most probable class is right."),
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood of the right class, in nats."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
    "seconds": ("Seconds", "none", ".1f", "Of the fit of temperature or noise, without the training of the weights."),
}  # fmt: skip
CORRUPTED = {
    f"shift_{key}": (f"{NUMBERS[key][0]}, corrupted", NUMBERS[key][1], ".3f", f"{NUMBERS[key][0]}, {SHIFT}")
    for key in ("accuracy", "nll", "ece")
}
BEYOND = {
    "auroc_mnist": ("AUROC MNIST", "higher", ".3f", "Chance that a digit has a higher predictive entropy than a test image."),
    **CORRUPTED,
}  # fmt: skip
TABLE = {
    "nll": ("NLL", "lower", ".4f", "Mean negative log-density of the test targets, in their own units."),
    "rmse": ("RMSE", "lower", ".4g", "Root mean squared error, in the targets' own units."),
    "seconds": NUMBERS["seconds"],
}


@options(kw_only=True)
class EvaluationSettings(ImageSource):
    """How calibrated networks are evaluated on images.

    Args:
        samples: networks averaged in a prediction.
        shift_samples, shift_images: the same for corrupted and for novel images, and how many of them.
    """

    samples: Count = 64
    shift_samples: Count = 16
    shift_images: Count = 500

    def images(self) -> ImageSettings:
        """What the evaluation on novel and corrupted images depends on."""
        return ImageSettings(**{one.name: getattr(self, one.name) for one in fields(EvaluationSettings)})


@options(kw_only=True)
class Settings(EvaluationSettings):
    """What the study depends on, besides :class:`Evaluated`.

    Args:
        data: of images.
        train: numbers of images that weights are trained on.
        epochs, batch: of these trainings, for each number of images.
        held_out: numbers of fresh images, each with every one of ``train``.
        same: of ``train``, that noise is fitted to as well.
        tables: UCI sets, half of whose training rows are held out.
        table_epochs: of the trainings on them.
        fits: keys of the posteriors that are fitted, out of :data:`FITS`.
        flow_rows: flows are fitted to at most so many examples.
        test: images, at most.
    """

    data: str = "fashion-mnist"
    train: tuple[Count, ...] = (1_000, 5_000, 55_000)
    epochs: tuple[Count, ...] = (60, 30, 10)
    batch: tuple[Count, ...] = (50, 50, 250)
    held_out: tuple[Count, ...] = (100, 1_000, 5_000)
    same: tuple[Count, ...] = (1_000,)
    tables: tuple[str, ...] = ("concrete", "energy")
    table_epochs: Count = 200
    fits: tuple[str, ...] = tuple(FITS)
    flow_rows: Annotated[int, Bounds(ge=0)] = 1_000
    lr: Positive = 1e-3
    test: Count = 10_000

    def cases(self) -> dict[str, tuple[str, ...]]:
        """The cases of images that each variant has, by their keys."""
        cases = {str(size): tuple(f"{size}-{out}" for out in self.held_out) for size in self.train}
        return cases | {f"{size}-same": (f"{size}-same",) for size in self.same}


def case_label(case: str) -> str:
    """A case in words.

    >>> case_label("1000-100"), case_label("1000-same"), case_label("energy")
    ('1,000 + 100', '1,000, the same', 'energy')
    """
    train, _, out = case.partition("-")
    if not out:
        return case
    return f"{int(train):,}, the same" if out == "same" else f"{int(train):,} + {int(out):,}"


class CalibrateStudy(Study):
    name = "calibrate"
    title = "Calibrating a trained network"
    description = "noise of a trained LeNet on fresh and on memorised images, from factorized to joint, beside temperature scaling"
    question = (
        "A LeNet is trained on images, a small network on a table. The weights stay, and the noise is fitted to fresh data, or to "
        "those that the weights have seen. Does a richer posterior predict better, and better than temperature scaling?"
    )
    source = "flowbnn's own"
    settings = Settings
    seeds = 10
    accelerator = "auto"
    headline = ("nll_1000-1000", "ece_1000-1000", "nll_1000-100", "nll_1000-same")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "generated": 160, "train": (80,), "epochs": (2,), "batch": (40,), "held_out": (60,), "same": (80,),
        "tables": (), "fits": ("factorized", "joint"), "samples": 4, "shift_samples": 2, "shift_images": 4,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        """One network each, with all that is fitted on top of it."""
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
        pictures = load_image_data(s.images(), s.data, ["mnist"], job.device)
        order = torch.randperm(pictures.num_data, generator=torch.Generator().manual_seed(job.seed))
        plain = train_lenet(select_images(pictures, order[:size]), size, job)
        table = {}
        for case in s.cases()[job.variant]:
            fresh = case.partition("-")[2]
            index = order[:size] if fresh == "same" else order[-int(fresh) :]
            held_out = select_images(pictures, index)
            names = NUMBERS | BEYOND
            table[case] = {
                key: evaluate_images(one, pictures, s, names, most=s.test) | {"seconds": seconds}
                for key, one, seconds in fit_all(plain, held_out, job)
            }
            if fresh != "same":
                both = select_images(pictures, torch.cat([order[:size], index]))
                whole, seconds = time_call(
                    train_on_all_data, lambda data: train_lenet(data, size, job), both, job.seed
                )
                table[case]["all"] = evaluate_images(whole, pictures, s, names, most=s.test) | {
                    "seconds": seconds
                }
        return {"values": {}, "table": table}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        tables = ((seed, part["table"]) for (_, seed), part in parts.content.items())
        each = ((seed, case, rows) for seed, table in tables for case, rows in table.items())
        by_row = parts_by_row(parts.seeds, each)
        cases = {case: case_label(case) for some in settings.cases().values() for case in some}
        metrics = make_metrics(NUMBERS | BEYOND, cases)
        metrics += make_metrics(TABLE, {name: name for name in settings.tables})
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        notes = [
            "Columns: images that the weights are trained on + fresh images that all else is fitted to. “The same”: "
            "noise is fitted to the images of the weights. Tables: half of the training rows each, on the published splits.",
            "The prior of the noise is N(1, 0.5²), or fitted: a mean and a width for every layer by the ELBO. Flows begin at the "
            f"fitted Gaussian and are left out where they do not raise its ELBO; up to {settings.flow_rows:,} examples.",
            "Last-layer Laplace: Kronecker-factored, its prior by the marginal likelihood, all on the fresh data, weights as they are.",
            f"Plain on all data: the same network trained on both kinds, with the mean temperature of {FOLDS} networks, each on what "
            "was left out of its training; the seconds are of all these trainings.",
            "Nothing was chosen on test data.",
        ]
        shown = [row for row in rows if row["values"]]
        return Findings(answer(settings, by_row), metrics, shown, [], notes, comparisons(by_row, metrics))


TensorPair = tuple[Tensor, Tensor]


def select_images(pictures: ImageData, index: Tensor) -> TensorPair:
    """These images as the network takes them, and their labels."""
    learned = pictures.train
    index = index.to(learned.images.device)
    return learned.normalizer()(learned.images[index]), learned.labels[index]


def train_lenet(data: TensorPair, size: int, job: Job) -> PointPosterior:
    """A LeNet trained on these images, as for so many."""
    s: Settings = job.settings
    number = s.train.index(size)
    torch.manual_seed(job.seed)
    loader = TensorLoader(*data, batch_size=s.batch[number], shuffle=True)
    method = MLE(epochs=s.epochs[number], lr=s.lr)
    given: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
    return method.fit(LeNet(data[0].shape[1]), loader, **given)


def fit_posteriors(
    plain: PointPosterior, held_out: TensorLoader, job: Job, fits: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Posterior, float]]:
    """A network as it is, scaled and by Laplace on held-out data, and with noise by each of ``fits``, which calibrate is given.

    Each comes with its seconds.
    """
    yield "plain", plain, 0.0
    yield "temperature", *time_call(temper, plain, held_out, progress=False)
    if not held_out.tensors[1].is_floating_point():
        yield "vector", *time_call(fit_vector_scaling, plain, held_out)
    given: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
    yield "laplace", *time_call(Laplace(layers="last", epochs=0).fit, plain.model, held_out, **given)
    for key, how in fits.items():
        yield key, *time_call(calibrate, plain.model, held_out, **{"folds": 0, **how}, **given)


def fit_all(plain: PointPosterior, held_out: TensorPair, job: Job) -> Iterator[tuple[str, Posterior, float]]:
    """All that is fitted to held-out data on top of a network, each with its seconds."""
    s: Settings = job.settings
    loader = TensorLoader(*held_out, batch_size=1000)
    chosen = {key: how for key, (_, _, how) in FITS.items() if key in s.fits}
    few = len(held_out[1]) <= s.flow_rows
    yield from fit_posteriors(
        plain, loader, job, {key: how for key, how in chosen.items() if few or "flow" not in how}
    )


def evaluate_images(
    posterior: Posterior,
    pictures: ImageData,
    settings: EvaluationSettings,
    names: Container[str],
    precision: str = "32-true",
    most: int | None = None,
) -> dict[str, float]:
    """Those of the metrics on test images, at most so many, and on novel and corrupted ones that are called by these names."""
    images, labels = (part[:most] for part in pictures.test)
    known = predict(posterior, images, settings.samples, precision).evaluate(labels)
    beyond, _ = evaluate_shift(posterior, pictures, settings.images(), precision)
    return {name: value for name, value in (known | beyond).items() if name in names}


def evaluate_table(job: Job) -> dict[str, dict[str, float]]:
    """The rows of one UCI set: weights on one half of the training rows, all else on the other."""
    s: Settings = job.settings
    inputs, targets, *test = load_uci(job.variant, job.seed)
    inputs, test[0] = standardize(inputs, test[0])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(job.seed))
    first, second = order[: len(order) // 2], order[len(order) // 2 :]

    def network(data: TensorPair) -> PointPosterior:
        torch.manual_seed(job.seed)
        loader = TensorLoader(*data, batch_size=32, shuffle=True)
        given: dict[str, Any] = {"seed": job.seed, "progress": False, "accelerator": job.accelerator}
        return MLE(epochs=s.table_epochs, lr=1e-2).fit(MLP(inputs.shape[1], (50,), 1), loader, **given)

    plain = network((inputs[first], targets[first]))
    rows = [*fit_all(plain, (inputs[second], targets[second]), job)]
    rows.append(("all", *time_call(train_on_all_data, network, (inputs, targets), job.seed)))
    table = {}
    for key, posterior, seconds in rows:
        numbers = evaluate(posterior, (test[0], test[1]), samples=s.samples, progress=False)
        table[key] = {"nll": numbers["nll"], "rmse": numbers["rmse"], "seconds": seconds}
    return table


def train_on_all_data(
    network: Callable[[TensorPair], PointPosterior], data: TensorPair, seed: int
) -> TemperedPosterior:
    """A network on all data with the temperature of networks on the data that each has not seen."""
    parts = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed)).chunk(FOLDS)
    logs = []
    for number, out in enumerate(parts):
        kept = torch.cat([part for other, part in enumerate(parts) if other != number])
        one = network((data[0][kept], data[1][kept]))
        logs.append(math.log(temper(one, [(data[0][out], data[1][out])], progress=False).temperature))
    return TemperedPosterior(network(data), math.exp(sum(logs) / FOLDS))


class VectorScaledNetwork(nn.Module):
    """A network whose logits are multiplied by, and added to, a number for each class."""

    def __init__(self, network: nn.Module, factor: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.network = network
        self.factor, self.offset = nn.Parameter(factor), nn.Parameter(offset)

    def forward(self, inputs: Any) -> Tensor:
        return self.network(inputs) * self.factor + self.offset


def fit_vector_scaling(plain: PointPosterior, held_out: TensorLoader) -> PointPosterior:
    r"""Vector scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599): :math:`a \circ f(x) + b` with the largest likelihood."""
    outputs, _, targets = plain.collect(held_out, PredictOptions(1, progress=False))
    assert targets is not None
    logits, targets = outputs[0].double(), targets.to(outputs.device)
    factor, offset = logits.new_ones(logits.shape[1]), logits.new_zeros(logits.shape[1])
    free = [factor.requires_grad_(), offset.requires_grad_()]
    engine = torch.optim.LBFGS(free, max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        engine.zero_grad()
        value = nn.functional.cross_entropy(logits * factor + offset, targets)
        value.backward()
        return value

    engine.step(loss)
    scaled = VectorScaledNetwork(plain.model, factor.detach().float(), offset.detach().float())
    return PointPosterior(scaled.eval(), plain.likelihood)


def comparisons(parts: Parts, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Joint noise against each rival in NLL, seed by seed."""
    table = []
    for rival, label in RIVALS.items():
        for metric in metrics:
            values = parts.common("joint", rival, metric.key) if metric.key.startswith("nll_") else ([], [])
            if len(values[0]) > 1:
                difference = asdict(paired_difference(*values))
                table.append({"title": f"joint noise − {label}", "metric": metric.key, **difference})
    return table


def answer(settings: Settings, parts: Parts) -> str:
    """The answer, put together from the numbers."""
    cases = [case for some in settings.cases().values() for case in some] + list(settings.tables)
    lines = []
    for rival, label in RIVALS.items():
        verdicts: dict[str, list[str]] = {}
        for case in cases:
            values = parts.common("joint", rival, f"nll_{case}")
            if case.endswith("same") or not values[0]:
                continue
            found = paired_difference(*values)
            verdict = ("better" if found.mean < 0 else "worse") if found.significant else found.inconclusive
            numbers = f"{statistics.fmean(values[0]):.3f} against {statistics.fmean(values[1]):.3f}"
            verdicts.setdefault(verdict, []).append(f"{case_label(case)} ({numbers})")
        if verdicts:
            told = "; ".join(
                f"{verdict} on {', '.join(where)}" for verdict, where in sorted(verdicts.items())
            )
            lines.append(f"Test NLL of joint noise against {label}, {pluralize(len(parts.seeds))}: {told}.")
    for case in (case for case in cases if case.endswith("same")):
        joint, factorized = parts.common("joint", "factorized", f"nll_{case}")
        if joint:
            against = paired_difference(joint, factorized)
            lines.append(
                f"On images that the weights have memorised a joint posterior is {'better' if against.mean < 0 else 'worse'} than a "
                f"factorized one: {statistics.fmean(joint):.3f} against {statistics.fmean(factorized):.3f}, {against.describe(3)}."
            )
    return "\n".join(lines) or "Too little has been trained for an answer."
