"""Detection of novel inputs by a density gate, beside entropy, mutual information, energy, Mahalanobis distance and neighbours."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.compare.results import SeedResults, figure
from flowbnn.data import TensorLoader, clusters, load_digits, ring
from flowbnn.errors import FlowBNNError
from flowbnn.methods import MLE, DeepEnsemble, Method, NodeNoise, Posterior
from flowbnn.metrics import novelty_auroc
from flowbnn.models import MLP, LeNet, SmallConv
from flowbnn.options import Count, Positive, Probability, options
from flowbnn.posterior import gated, novelty_scores
from flowbnn.training import cosine
from flowbnn_studies.data.load import load_images
from flowbnn_studies.runner.findings import pluralize
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics

VARIANTS = (
    Variant("plain", "Deterministic", "mle"),
    Variant("ensemble", "Deep ensemble", "deep-ensemble", cost=5.0),
    Variant("noise", "Joint node noise", "node-noise-joint", cost=2.0),
)
SETS = {
    "ring": "ring",
    "hole": "hole between clusters",
    "digits": "unseen digit",
    "fashion": "MNIST after Fashion-MNIST",
}
# fmt: off
NUMBERS = {
    "entropy": ("Entropy", "higher", ".3f", "AUROC of the predictive entropy on {}; 0.5 is chance."),
    "mutual_information": ("Mutual information", "higher", ".3f",
                           "AUROC of the mutual information of label and network on {}; a single network has none."),
    "energy": ("Energy", "higher", ".3f", "AUROC of minus the logarithm of the sum of the exponentials of the logits on {}."),
    "density": ("Density", "higher", ".3f", "AUROC of minus the log-density by a neural spline flow on {}."),
    "gated_entropy": ("Entropy with gate", "higher", ".3f", "AUROC of the predictive entropy with the density gate on {}."),
    "mahalanobis": ("Mahalanobis", "higher", ".3f",
                    "AUROC of the distance to the mean of the data in units of their covariance on {}."),
    "neighbour": ("Nearest neighbours", "higher", ".3f", "AUROC of the distance to the tenth nearest training input on {}."),
    "nll": ("NLL", "lower", ".4f", "Negative log-likelihood (NLL) of test labels without the gate, {}."),
    "gated_nll": ("NLL with gate", "lower", ".4f", "NLL of test labels with the gate, {}."),
    "alarms": ("False alarms", "none", ".3f", "Fraction of test inputs that the gate calls unfamiliar, {}."),
}
# fmt: on


@options
class Settings:
    """Settings of the study.

    Args:
        sets: Names of the problems. ``"fashion"`` is omitted if its files are missing.
        train, test: Number of training and test points of the plane, and of images of Fashion-MNIST.
        spread: Standard deviation of the clusters of the plane.
        radius: Radius of the ring.
        epochs: Number of epochs of the networks.
        batch: Number of rows in a batch.
        lr: Learning rate of Adam.
        members: Number of networks of the ensemble.
        samples: Number of sampled networks in a prediction.
        false_alarm: Rate of false alarms of the gate.
        flow_epochs: Largest number of epochs of the flow.
        novel_digit: Digit that is left out.
    """

    sets: tuple[str, ...] = tuple(SETS)
    train: Count = 1000
    test: Count = 1000
    spread: Positive = 0.6
    radius: Positive = 15.0
    epochs: Count = 40
    batch: Count = 64
    lr: Positive = 5e-3
    members: Count = 5
    samples: Count = 64
    false_alarm: Probability = 0.05
    flow_epochs: Count = 100
    novel_digit: int = 8


class Problem(NamedTuple):
    """Data of one problem, and its network.

    Args:
        train: Training inputs and targets.
        test: Test inputs and targets.
        novel: Novel inputs.
        network: Untrained network.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    novel: Tensor
    network: nn.Module


class DensityGateStudy(Study):
    name = "density-gate"
    title = "Detection of novel inputs by a density gate"
    description = "entropy, mutual information, energy, density, Mahalanobis distance and neighbours on near and far novel inputs"
    question = "Which score detects inputs far from the data, in holes between them, and of unseen classes?"
    source = "Liu et al. 2020 (energy); Sun et al. 2022 (nearest neighbours); Lee et al. 2018 (Mahalanobis distance)"
    settings = Settings
    seeds = 5
    headline = ("density_ring", "density_hole", "density_digits", "density_fashion")
    quick: ClassVar[dict[str, Any]] = {
        "sets": ("ring", "hole"), "train": 120, "test": 60, "epochs": 2, "members": 2, "samples": 4, "flow_epochs": 2,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return VARIANTS

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        values: dict[str, float] = {}
        for name in s.sets:
            problem = make_problem(name, s, job.seed)
            if problem is None:
                continue
            common: dict[str, Any] = {"epochs": s.epochs, "lr": s.lr, "schedule": cosine}
            methods: dict[str, Method] = {
                "plain": MLE(**common),
                "ensemble": DeepEnsemble(s.members, **common),
                "noise": NodeNoise("joint", **common),
            }
            loader = shuffled_loader(problem.train, s.batch, job.seed)
            posterior = methods[job.variant].fit(problem.network, loader, **job.short_options())
            numbers = evaluate_gate(posterior, problem, s, job.seed)
            values |= {f"{key}_{name}": value for key, value in numbers.items()}
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        keys = ("entropy_ring", "density_ring", "density_hole", "energy_digits", "density_digits")
        far, near, hole, energy, density = (numbers.text("plain", key) for key in keys)
        cost = max(
            numbers.mean("plain", f"gated_nll_{name}") - numbers.mean("plain", f"nll_{name}")
            for name in ("ring", "hole", "digits")
        )
        return Story(
            self.question,
            f"The density by a flow detects a ring around the data (AUROC {near}, entropy {far}) and the hole between clusters "
            f"({hole}, Mahalanobis distance {numbers.text('plain', 'mahalanobis_hole')}), but the energy detects an unseen digit "
            f"better ({energy} vs {density}), and the gate costs up to {cost:.2f} nats of NLL.",
            f"{near} vs {far}",
            "AUROC on the ring: density, entropy",
            keys,
            figure="bars",
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        notes = [
            f"Four clusters of standard deviation {settings.spread:g} on a plane, with a ring of radius {settings.radius:g} or the "
            "space between the clusters as novel inputs; 8x8 digits with one digit left out; Fashion-MNIST with MNIST as novel images.",
            "The flow is fitted to the inputs, or to 16 principal components of images and the distance to their plane. Mahalanobis "
            "distance and neighbours use the same features, standardized. No score sees a novel input.",
            f"The gate has a rate of false alarms of {settings.false_alarm:g}, measured on a fifth of the training inputs.",
        ]
        metrics = make_metrics(NUMBERS, {name: SETS[name] for name in settings.sets}, "{1}")
        rows = self.rows(settings, parts, metrics)
        return Findings(answer(settings, parts), metrics, rows, [score_figure(settings, parts)], notes)


def make_problem(name: str, s: Settings, seed: int) -> Problem | None:
    """Returns the data and the network of a problem, or None if its files are missing.

    Args:
        name: Name of the problem.
        s: Settings of the study.
        seed: Seed of the data and of the network.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    if name in ("ring", "hole"):
        train, test = clusters(s.train, s.spread, generator), clusters(s.test, s.spread, generator)
        novel = ring(s.test, s.radius, generator)
        if name == "hole":
            novel = s.spread * torch.randn(s.test, 2, generator=generator)
        return Problem(train, test, novel, MLP(2, (64, 64), 2))
    if name == "digits":
        digits = load_digits(s.novel_digit, seed)
        return Problem(digits.train, digits.test, digits.novel[0], SmallConv(classes=len(digits.known)))
    try:
        familiar = [load_images("fashion-mnist", split, download=False) for split in ("train", "test")]
        other = load_images("mnist", "test", download=False)
    except FlowBNNError:
        return None
    train, test = (
        (images.images[: s.train].float() / 255.0, images.labels[: s.train].long()) for images in familiar
    )
    return Problem(train, test, other.images[: s.test].float() / 255.0, LeNet())


def evaluate_gate(posterior: Posterior, problem: Problem, s: Settings, seed: int) -> dict[str, float]:
    """Returns the AUROC of all scores, and the NLL with and without a gate.

    Args:
        posterior: Fitted posterior.
        problem: Data.
        s: Settings of the study.
        seed: Seed of the gate.
    """
    loader = TensorLoader(*problem.train, batch_size=1024)
    safe = gated(posterior, loader, false_alarm=s.false_alarm, epochs=s.flow_epochs, seed=seed)
    known, novel = (predict(posterior, inputs, s.samples) for inputs in (problem.test[0], problem.novel))
    safe_known, safe_novel = (predict(safe, inputs, s.samples) for inputs in (problem.test[0], problem.novel))
    novel_scores = novelty_scores(novel)
    values = {
        name: novelty_auroc(scores, novel_scores[name]) for name, scores in novelty_scores(known).items()
    }
    values["density"] = novelty_auroc(-safe_known.log_density, -safe_novel.log_density)
    values["gated_entropy"] = novelty_auroc(safe_known.entropy, safe_novel.entropy)
    features = [safe.gate.features(inputs) for inputs in (problem.train[0], problem.test[0], problem.novel)]
    values["mahalanobis"] = novelty_auroc(*mahalanobis(*features))
    values["neighbour"] = novelty_auroc(*neighbour_distances(*features))
    targets = problem.test[1]
    values["nll"], values["gated_nll"] = (float(p.nll(targets).mean()) for p in (known, safe_known))
    values["alarms"] = float(safe.is_unfamiliar(problem.test[0]).double().mean())
    return values


def mahalanobis(train: Tensor, *tables: Tensor) -> list[Tensor]:
    """Returns the squared Mahalanobis distance of the rows of tables to the mean of the training rows.

    Args:
        train: Training rows ``[N, F]``.
        tables: Tables of rows ``[B, F]``.

    >>> train = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    >>> mahalanobis(train, torch.tensor([[1.0, 0.0], [0.0, 2.0]]))[0]
    tensor([1.5000, 1.5000])
    """
    center = train.mean(0)
    precision = torch.linalg.pinv(train.T.cov())
    return [((table - center) @ precision * (table - center)).sum(1) for table in tables]


def neighbour_distances(train: Tensor, *tables: Tensor, number: int = 10) -> list[Tensor]:
    """Returns the distance of the rows of tables to their tenth nearest training row, in standardized features.

    Args:
        train: Training rows ``[N, F]``.
        tables: Tables of rows ``[B, F]``.
        number: Rank of the neighbour.
    """
    scale = train.std(0).clamp_min(1e-12)
    number = min(number, len(train))
    return [torch.cdist(table / scale, train / scale).kthvalue(number, 1).values for table in tables]


def score_figure(settings: Settings, parts: SeedResults) -> dict[str, Any]:
    """Returns the figure of the AUROC of every score on every problem."""
    scores = {
        "Entropy": ("plain", "entropy"),
        "Energy": ("plain", "energy"),
        "Mutual information": ("noise", "mutual_information"),
        "Mahalanobis distance": ("plain", "mahalanobis"),
        "Nearest neighbours": ("plain", "neighbour"),
        "Density": ("plain", "density"),
    }
    panels = []
    for name in settings.sets:
        values = [(label, parts.values(key, f"{score}_{name}")) for label, (key, score) in scores.items()]
        bars = [{"label": label, "value": round(fmean(found), 3)} for label, found in values if found]
        panels += (
            [{"title": SETS[name][0].upper() + SETS[name][1:], "x_label": "AUROC", "bars": bars}]
            if bars
            else []
        )
    caption = (
        f"Mean of {pluralize(len(parts.seeds))}. Entropy and energy are those of the deterministic network, mutual information that "
        "of joint node noise. Chance is 0.5."
    )
    return figure("bars", "Detection of novel inputs", caption, {"panels": panels})


def answer(settings: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers of the deterministic network."""
    lines = []
    scores: Sequence[str] = ("entropy", "energy", "density", "gated_entropy", "mahalanobis", "neighbour")
    for name in settings.sets:
        means = [(score, parts.values("plain", f"{score}_{name}")) for score in scores]
        texts = [f"{score.replace('_', ' ')} {sum(v) / len(v):.3f}" for score, v in means if v]
        if texts:
            lines.append(f"{SETS[name]}: {', '.join(texts)}")
    if not lines:
        return "No results yet."
    return f"AUROC of the deterministic network, mean of {pluralize(len(parts.seeds))}. {'; '.join(lines)}."
