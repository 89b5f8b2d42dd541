"""Densities of real targets given inputs: spline and mixture heads compared with Gaussians, quantiles and boosted trees."""

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Flow, Gaussian, Likelihood, Mixture
from flowbnn.methods import MLE, DeepEnsemble, Laplace, NodeNoise, Posterior
from flowbnn.models import MLP
from flowbnn.options import Count, Positive, options
from flowbnn.training import EarlyStop, cosine
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.runner.findings import paired_difference, pluralize
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics

VARIANTS = (
    Variant("gaussian", "Gaussian, one noise level", "mle"),
    Variant("predicted", "Gaussian, predicted noise level", "mle"),
    Variant("mixture", "Mixture density network", "mle"),
    Variant("flow", "Spline", "mle"),
    Variant("flow-ensemble", "Spline, deep ensemble", "deep-ensemble", cost=5.0),
    Variant("flow-noise", "Spline, node noise", "node-noise-gaussian", cost=2.0),
    Variant("flow-laplace", "Spline, last-layer Laplace", "laplace", cost=2.0),
    Variant("quantiles", "Quantile regression network", "quantiles"),
    Variant("boosting", "Gradient boosting of quantiles", "boosting", cost=3.0),
)
NETWORKS = ("gaussian", "predicted", "mixture", "flow", "flow-ensemble", "flow-noise", "flow-laplace")
# fmt: off
NUMBERS = {
    "log_likelihood": ("Log-likelihood", "higher", ".3f", "Mean log-density of the held-out targets of {}, in nats."),
    "crps": ("CRPS", "lower", ".4f",
             "Continuous ranked probability score on {}, in standard deviations of the targets; 0 is perfect."),
    "coverage_90": ("Coverage", "none", ".3f", "Fraction of held-out targets of {} inside their central 90 % interval."),
}
# fmt: on
SETS = {"branches": "two branches", "skewed": "skewed noise", "protein": "protein"}


@options
class Settings:
    """Settings of the study.

    Args:
        sets: Names of the data sets. ``"protein"`` is omitted if its files are missing.
        train, test: Number of training and test rows of the generated sets.
        rows: Largest number of training rows of protein.
        hidden: Widths of the hidden layers.
        epochs: Largest number of epochs. Training stops when the likelihood of held-out rows has not improved for 20 epochs.
        batch: Number of rows in a batch.
        lr: Learning rate of Adam.
        bins: Number of bins of the spline.
        components: Number of Gaussians of the mixture.
        members: Number of networks of the ensemble.
        samples: Number of sampled networks in a prediction.
        levels: Number of quantiles of the quantile methods.
        trees: Largest number of trees for each quantile.
    """

    sets: tuple[str, ...] = tuple(SETS)
    train: Count = 2000
    test: Count = 2000
    rows: Count = 20_000
    hidden: tuple[int, ...] = (64, 64)
    epochs: Count = 100
    batch: Count = 256
    lr: Positive = 2e-3
    bins: Count = 8
    components: Count = 5
    members: Count = 5
    samples: Count = 32
    levels: Count = 20
    trees: Count = 100


class ConditionalDensityStudy(Study):
    name = "conditional-density"
    title = "Densities of targets: splines, mixtures, Gaussians and quantiles"
    description = (
        "flow-shaped and mixture observation noise versus Gaussians, quantile regression and boosted trees"
    )
    question = (
        "How much likelihood does a network gain by predicting a spline instead of a Gaussian, "
        "if the noise is skewed or has two peaks?"
    )
    source = "Bishop 1994 (mixture density networks); Durkan et al. 2019 (rational-quadratic splines)"
    settings = Settings
    seeds = 5
    headline = tuple(f"log_likelihood_{name}" for name in SETS)
    quick: ClassVar[dict[str, Any]] = {
        "sets": ("branches",), "train": 80, "test": 40, "hidden": (8,), "epochs": 2, "members": 2, "samples": 4, "levels": 3,
        "trees": 2, "batch": 40, "bins": 4, "components": 2,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        if find_spec("sklearn") is not None:
            return VARIANTS
        return tuple(variant for variant in VARIANTS if variant.key != "boosting")

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        values: dict[str, float] = {}
        for name in s.sets:
            data = load_data(name, s, job.seed)
            if data is None:
                continue
            if job.variant in NETWORKS:
                numbers = _evaluate_network(job, data)
            else:
                quantiles = _boosted_quantiles if job.variant == "boosting" else _network_quantiles
                levels = (torch.arange(s.levels, dtype=torch.float64) + 0.5) / s.levels
                numbers = evaluate_quantiles(levels, quantiles(job, data, levels), data.test[1])
            values |= {f"{key}_{name}": numbers[key] for key in NUMBERS}
        return {"values": values}

    def story(self, numbers: Numbers) -> Story:
        keys = [key for key in self.headline if key in numbers.metrics]
        gains = []
        for key in keys:
            gaussian = numbers.ranked(key, ("gaussian", "predicted"))[0]
            gains.append(
                f"{numbers.difference('flow', gaussian, key).mean:.2f} nats on {numbers.metrics[key]['label']}"
            )
        mixture = max(abs(numbers.difference("flow", "mixture", key).mean) for key in keys)
        best = numbers.ranked(keys[0])[0]
        return Story(
            self.question,
            f"Compared with the better Gaussian it gains {', '.join(gains)}, but a mixture density network is within "
            f"{mixture:.2f} nats of it, and the best method on {numbers.metrics[keys[0]]['label']} is {numbers.name(best)}.",
            gains[0].partition(" ")[0],
            f"nats gained by a spline on {numbers.metrics[keys[0]]['label']}",
            tuple(keys),
            charts=tuple(keys),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        notes = [
            f"The generated sets have {settings.train:,} training rows, of which a tenth stops the training. Inputs and targets are "
            "standardized, so that log-likelihood and CRPS are in standard deviations of the targets.",
            f"All networks have the hidden layers {settings.hidden}, Adam with a learning rate that decays from {settings.lr:g} along "
            f"a cosine, and at most {settings.epochs} epochs. Only the last layer and the likelihood differ.",
            f"Quantile methods predict {settings.levels} quantiles. Their density is constant between quantiles and exponential beyond "
            "the outermost, and their CRPS is twice the mean pinball loss. Boosting is HistGradientBoostingRegressor of scikit-learn.",
        ]
        cases = {name: SETS[name] for name in settings.sets}
        metrics = make_metrics(NUMBERS, cases, "{1}")
        rows = self.rows(settings, parts, metrics)
        return Findings(answer(settings, parts), metrics, rows, [], notes)


# -------------------- data


class Split:
    """Standardized rows for training, early stopping and test.

    Args:
        train: Inputs and targets for training.
        test: Inputs and targets for the test.
    """

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        inputs, targets = standardize(train[0], test[0]), standardize(train[1], test[1])
        held_out = len(inputs[0]) // 10
        self.validation = inputs[0][:held_out], targets[0][:held_out]
        self.train = inputs[0][held_out:], targets[0][held_out:]
        self.test = inputs[1], targets[1]


def branches(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns targets on one of two branches, whose distance grows with the second of three inputs."""
    inputs = 2.0 * torch.rand(rows, 3, generator=generator) - 1.0
    side = torch.randint(2, (rows,), generator=generator) * 2.0 - 1.0
    noise = 0.1 * torch.randn(rows, generator=generator)
    return inputs, ((3.0 * inputs[:, 0]).sin() + 0.75 * side * (1.0 + inputs[:, 1]) + noise).unsqueeze(1)


def skewed(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns targets with exponential noise, whose scale grows with the size of the second of three inputs."""
    inputs = 2.0 * torch.rand(rows, 3, generator=generator) - 1.0
    noise = -torch.rand(rows, generator=generator).clamp_min(1e-7).log()
    return inputs, ((3.0 * inputs[:, 0]).sin() + (0.2 + inputs[:, 1].abs()) * noise).unsqueeze(1)


GENERATED: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {"branches": branches, "skewed": skewed}


def load_data(name: str, s: Settings, seed: int) -> Split | None:
    """Returns one split of a set, or None if its files are missing.

    Args:
        name: Name of the set.
        s: Settings of the study.
        seed: Seed of generated data, or number of the split.
    """
    if name in GENERATED:
        generator = torch.Generator().manual_seed(1000 + seed)
        return Split(GENERATED[name](s.train, generator), GENERATED[name](s.test, generator))
    try:
        inputs, targets, *test = load_uci(name, seed % 5)
    except FlowBNNError:
        return None
    return Split((inputs[: s.rows], targets[: s.rows]), (test[0], test[1]))


# -------------------- networks


def _evaluate_network(job: Job, data: Split) -> dict[str, float]:
    """Fits a network with the likelihood of the variant and evaluates it."""
    s: Settings = job.settings
    density = Mixture(s.components) if job.variant == "mixture" else Flow("nsf", bins=s.bins)
    likelihood: Likelihood = density
    width = density.num_outputs
    if job.variant in ("gaussian", "predicted"):
        likelihood = Gaussian("predicted" if job.variant == "predicted" else "learned")
        width = 2 if job.variant == "predicted" else 1
    torch.manual_seed(job.seed)
    network = MLP(data.train[0].shape[1], s.hidden, width)
    posterior = _fit(job, network, data, likelihood)
    numbers = predict(posterior, data.test[0], s.samples).evaluate(data.test[1])
    return {**numbers, "log_likelihood": -numbers["nll"]}


def _fit(job: Job, network: nn.Module, data: Split, likelihood: Likelihood) -> Posterior:
    """Fits the posterior of a variant."""
    s: Settings = job.settings
    loader = shuffled_loader(data.train, s.batch, job.seed)
    common: dict[str, Any] = {"epochs": s.epochs, "lr": s.lr, "schedule": cosine}
    method: Any = MLE(**common)
    if job.variant == "flow-ensemble":
        method = DeepEnsemble(s.members, **common)
    elif job.variant == "flow-noise":
        method = NodeNoise(**common)
    elif job.variant == "flow-laplace":
        method = Laplace(**common)
    options = job.short_options(
        validation=TensorLoader(*data.validation, batch_size=4096),
        likelihood=likelihood,
        early_stop=EarlyStop("validation_nll", patience=20),
    )
    return method.fit(network, loader, **options)


# -------------------- quantiles


def _network_quantiles(job: Job, data: Split, levels: Tensor) -> Tensor:
    """Returns the quantiles ``[B, Q]`` of a network that minimizes the pinball loss, the best of all epochs on held-out rows."""
    s: Settings = job.settings
    torch.manual_seed(job.seed)
    network = MLP(data.train[0].shape[1], s.hidden, len(levels))
    optimizer = torch.optim.Adam(network.parameters(), lr=s.lr)
    loader = shuffled_loader(data.train, s.batch, job.seed)
    schedule = cosine(optimizer, s.epochs * len(loader))
    level, best, state = levels.float(), math.inf, network.state_dict()
    for _ in range(s.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            pinball_loss(level, network(inputs), targets).mean().backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            score = float(pinball_loss(level, network(data.validation[0]), data.validation[1]).mean())
        if score < best:
            best, state = score, {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(state)
    with torch.no_grad():
        return network(data.test[0])


def _boosted_quantiles(job: Job, data: Split, levels: Tensor) -> Tensor:
    """Returns the quantiles ``[B, Q]`` of one gradient-boosted model of scikit-learn for each level."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    s: Settings = job.settings
    inputs, targets = (torch.cat(pair).numpy() for pair in zip(data.train, data.validation, strict=True))
    columns = []
    for level in levels.tolist():
        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=s.trees, early_stopping=True, random_state=job.seed
        )
        model.fit(inputs, targets[:, 0])
        columns.append(torch.from_numpy(model.predict(data.test[0].numpy())))
    return torch.stack(columns, 1).float()


def pinball_loss(levels: Tensor, quantiles: Tensor, targets: Tensor) -> Tensor:
    """Returns the pinball loss of quantiles ``[B, Q]`` for targets ``[B, 1]``.

    >>> pinball_loss(torch.tensor([0.9]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([[1.8000]])
    """
    error = targets - quantiles
    return torch.maximum(levels * error, (levels - 1.0) * error)


def evaluate_quantiles(levels: Tensor, quantiles: Tensor, targets: Tensor) -> dict[str, float]:
    """Returns log-likelihood, CRPS and coverage of predicted quantiles.

    The density is constant between adjacent quantiles and exponential beyond the outermost ones, with the density there.

    Args:
        levels: Levels ``[Q]``, the middles of Q equal parts of [0, 1].
        quantiles: Quantiles ``[B, Q]``. Crossing quantiles are sorted.
        targets: Targets ``[B, 1]``.
    """
    quantiles, targets = quantiles.double().sort(1).values, targets.double()
    crps = 2.0 * pinball_loss(levels, quantiles, targets).mean()
    widths = quantiles.diff(dim=1).clamp_min(1e-3)  # equal quantiles would have an infinite density
    densities = levels.diff() / widths
    index = (torch.searchsorted(quantiles, targets) - 1).clamp(0, widths.shape[1] - 1)
    log_density = densities.log().gather(1, index)
    for end, tail, sign in ((0, levels[0], -1.0), (-1, 1.0 - levels[-1], 1.0)):
        distance = sign * (targets - quantiles[:, end].unsqueeze(1))
        rate = densities[:, end].unsqueeze(1) / tail
        log_density = torch.where(distance > 0, (tail * rate).log() - rate * distance, log_density)
    cdf = _cdf(levels, quantiles, targets)
    return {
        "log_likelihood": float(log_density.mean()),
        "crps": float(crps),
        "coverage_90": float(((cdf - 0.5).abs() <= 0.45).double().mean()),
    }


def _cdf(levels: Tensor, quantiles: Tensor, targets: Tensor) -> Tensor:
    """Returns the linearly interpolated distribution function at the targets, ``[B, 1]``."""
    index = (torch.searchsorted(quantiles, targets) - 1).clamp(0, len(levels) - 2)
    low, high = quantiles.gather(1, index), quantiles.gather(1, index + 1)
    fraction = (targets - low) / (high - low).clamp_min(1e-12)
    inside = levels[index] + fraction.clamp(0.0, 1.0) * (levels[index + 1] - levels[index])
    inside = torch.where(targets < quantiles[:, :1], 0.5 * levels[0], inside)
    return torch.where(targets > quantiles[:, -1:], 1.0 - 0.5 * levels[0], inside)


def answer(settings: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers: the spline against the better Gaussian and against the mixture, by seed."""
    lines = []
    for name in settings.sets:
        key = f"log_likelihood_{name}"
        means = {
            variant: parts.mean(variant, key)
            for variant in ("gaussian", "predicted")
            if parts.values(variant, key)
        }
        if not means or not parts.values("flow", key):
            continue
        best = max(means, key=lambda variant: means[variant])
        texts = []
        for rival, label in ((best, "the better Gaussian"), ("mixture", "the mixture")):
            values = parts.values(rival, key)
            if len(values) == len(parts.values("flow", key)):
                difference = paired_difference(parts.values("flow", key), values)
                texts.append(
                    f"{difference.mean:+.3f} [{difference.low:.3f}, {difference.high:.3f}] nats versus {label}"
                )
        lines.append(f"{SETS[name]}: {', '.join(texts)}")
    if not lines:
        return "No results yet."
    return f"Log-likelihood of the spline, paired over {pluralize(len(parts.seeds))}: {'; '.join(lines)}."
