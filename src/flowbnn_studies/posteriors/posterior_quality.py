"""How good are posteriors of the noise, from factorized to a flow over all layers, with long chains as the truth?"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from flowbnn import diagnostics, fit
from flowbnn.calibrate import calibrate
from flowbnn.compare.results import Metric, Parts
from flowbnn.convert import to_stochastic
from flowbnn.data import clusters, load_digits
from flowbnn.diagnostics.noise_chains import NoiseChains
from flowbnn.errors import FlowBNNWarning
from flowbnn.likelihoods import Categorical, Gaussian, Likelihood
from flowbnn.methods import MLE
from flowbnn.models import MLP, LeNet, SmallConv
from flowbnn.noise import NormalAffine, NormalCoupling, NormalPlanar, Recipe, freeze
from flowbnn.noise.joint import independent_vectors
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import NoisePosterior
from flowbnn.training import cosine
from flowbnn.transforms import BlockTriangular
from flowbnn_studies.data import load_images
from flowbnn_studies.data.tables import load_uci, standardize
from flowbnn_studies.runner.findings import (
    describe_convergence,
    drop_unconverged,
    paired_difference,
    pluralize,
)
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, parts_by_row, time_call

TensorPair = tuple[Tensor, Tensor]
ProblemName = Literal["blobs", "boston", "digits", "conv", "lenet"]
PosteriorName = Literal[
    "factorized", "planar", "coupling", "layers", "low-rank", "chain", "natural", "full", "flow"
]
NATURAL = "natural"
RECIPES: dict[str, tuple[str, Recipe]] = {
    "factorized": ("Factorized Gaussian", NormalAffine()),
    "planar": ("12 planar flows per layer", NormalPlanar(12)),
    "coupling": ("4 couplings per layer", NormalCoupling(4)),
    "layers": ("Full covariance per layer", NormalAffine(joint="layers")),
    "low-rank": ("Joint, rank 16 across layers", NormalAffine(joint="low-rank", rank=16)),
    "chain": ("Joint, chain of layers", NormalAffine(joint="chain")),
    NATURAL: ("Joint, full covariance, by fb.calibrate", NormalAffine(joint="full")),
    "full": ("Joint, full covariance", NormalAffine(joint="full")),
    "flow": ("Joint, full covariance after 4 couplings", NormalCoupling(4, joint="full", kl_samples=256)),
}
EXACT = "exact"


@dataclass(frozen=True)
class ProblemSize:
    """A network, and how many examples its weights, its noise and the predictions get."""

    label: str
    weights: int
    examples: int
    test: int


PROBLEMS = {
    "blobs": ProblemSize("Blobs, D = 34, N = 100", 100, 100, 2000),
    "boston": ProblemSize("Boston, D = 63, N = 100", 100, 100, 300),
    "digits": ProblemSize("Few-shot digits, D = 128, N = 50", 50, 50, 1000),
    "conv": ProblemSize("Digits, small conv net, D = 173, N = 1,000", 300, 1000, 323),
    "lenet": ProblemSize("Fashion-MNIST, LeNet, D = 467, N = 1,000", 1000, 1000, 1000),
}
LARGE, LARGE_SEEDS = ("conv", "lenet"), 3
CHOICE = 500_000  # added to the seed of draws that choose: those that measure are others
COLUMNS = {
    "gap": ("Gap", "lower", ".2f", "Log-evidence less ELBO in nats: the KL divergence to the exact posterior."),
    "per_example": ("Gap per example", "lower", ".4f", "The gap over the number of examples."),
    "k": ("k-hat", "lower", ".2f", "Shape of the tail of the importance weights; below 0.7 draws can stand for the exact ones."),
    "variation": ("TV", "lower", ".4f", "Total variation to the chains' predictions of test inputs; of the chains, of their halves."),
    "agreement": ("Agreement", "higher", ".4f", "Share of test inputs with the chains' decision; of the chains, between their halves."),
    "excess": ("NLL - HMC's", "none", "+.4f", "Test NLL less that of the chains' predictions."),
    "rhat": ("R-hat", "none", ".3f", "Of the chains that the row is measured against; above 1.01 they are not taken for the truth."),
    "modes": ("Modes", "none", ".1f", "Distinct maxima of the exact density that climbs from prior draws end at."),
    "seconds": ("Seconds", "none", ".1f", "Of the fit, or of the chains."),
}  # fmt: skip


@options
class Settings:
    """What the study depends on.

    Args:
        problems: which; ``conv`` and ``lenet`` are for a GPU.
        posteriors: which, the weights frozen.
        along: those that are fitted with the weights trained along, too.
        epochs: of the weights' own training, in batches of ``batch``.
        steps: of posteriors that are fitted by stochastic gradients, all examples in each, with ``draws`` for every example.
        weight_lr, noise_lr, fine_lr: their rates: of weights that are trained along, of noise, and of noise that starts at a Gaussian.
        chains, samples, warmup: of the exact posterior; up to four times as many draws where they have not mixed.
        predictions: draws of a prediction, and of k-hat.
        climbs: from draws of the prior, for modes.
    """

    problems: tuple[ProblemName, ...] = ("blobs", "boston", "digits")
    posteriors: tuple[PosteriorName, ...] = get_args(PosteriorName)
    along: tuple[PosteriorName, ...] = ("factorized", "layers", "full")
    epochs: Count = 200
    batch: Count = 50
    lr: Positive = 1e-2
    steps: Count = 500
    draws: Count = 8
    weight_lr: Positive = 1e-3
    noise_lr: Positive = 0.02
    fine_lr: Positive = 0.005
    chains: Count = 8
    samples: Count = 250
    warmup: Count = 100
    predictions: Count = 1000
    climbs: Count = 16

    def relevant(self, variant: str) -> dict[str, Any]:
        """The settings that a variant's result depends on, whichever others are run."""
        return {name: value for name, value in asdict(self).items() if name not in ("problems", "sizes")}


@dataclass(frozen=True)
class Case:
    """A trained network, the data of its noise, and test data."""

    network: nn.Module
    likelihood: Likelihood
    data: TensorPair
    test: TensorPair

    @property
    def loader(self) -> list[TensorPair]:
        return [self.data]


def load_problem(name: str, seed: int, number: int) -> tuple[TensorPair, TensorPair | None, nn.Module]:
    """Examples in random order, test examples where these are apart, and an untrained network."""
    source = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    if name == "blobs":
        return clusters(number, 1.95, source), None, MLP(2, (32,), 2)
    if name == "boston":
        inputs, targets, *test = load_uci("boston", seed)
        middle, width, targets = targets.mean(), targets.std(), torch.cat([targets, test[1]])
        inputs = torch.cat(standardize(inputs, test[0]))
        return (inputs, (targets - middle) / width), None, MLP(13, (50,), 1)
    if name == "lenet":
        known, test_set = load_images("fashion-mnist"), load_images("fashion-mnist", "test")
        order = torch.randperm(len(known.labels), generator=source)[:number]
        data = known.normalized()[order], known.labels[order]
        return data, (test_set.normalized(), test_set.labels), LeNet(1)
    digits = load_digits(seed=seed)
    parts = digits.train, digits.validation, digits.test
    images, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    order = torch.randperm(len(labels), generator=source)
    network = MLP(64, (64,), 9) if name == "digits" else SmallConv(classes=9, width=12)
    return (images[order], labels[order]), None, network


def make_case(
    name: str, s: Settings, seed: int, device: Mapping[str, Any], examples: int | None = None
) -> Case:
    """A problem with one seed: weights are trained on some examples, and their noise is fitted to others."""
    problem = PROBLEMS[name]
    first, second = problem.weights, problem.weights + (examples or problem.examples)
    data, test, network = load_problem(name, seed, second + problem.test)
    seen, fresh, rest = (
        tuple(part[some] for part in data)
        for some in (slice(first), slice(first, second), slice(second, None))
    )
    test = tuple(part[: problem.test] for part in test or rest)  # type: ignore[assignment]
    batches = [tuple(part[low : low + s.batch] for part in seen) for low in range(0, first, s.batch)]
    kind: Likelihood = Gaussian() if name == "boston" else Categorical()
    with quiet():
        plain = MLE(epochs=s.epochs, lr=s.lr, schedule=cosine).fit(
            network, batches, likelihood=kind, seed=seed, progress=False, **device
        )
    if name == "boston":  # one level for all posteriors, so that they have one density: that of the residuals
        residuals = plain.predict(fresh[0], progress=False).mean.cpu() - fresh[1]
        kind = Gaussian(float(residuals.square().mean().sqrt()))
    return Case(plain.model, kind, fresh, test)  # type: ignore[arg-type]


# without the library's own warnings: what they say of a posterior is in its row
quiet = partial(warnings.catch_warnings, action="ignore", category=FlowBNNWarning)


def fit_posterior(
    recipe: Recipe,
    case: Case,
    s: Settings,
    seed: int,
    device: Mapping[str, Any],
    start: NoisePosterior | None = None,
) -> NoisePosterior:
    """A posterior of the noise, joint ones from a Gaussian to ``start`` at, the weights frozen; without one they are trained along."""
    model = to_stochastic(case.network, {"*": recipe})
    rate = s.noise_lr
    if start is not None:
        freeze(model, "weights")
        if recipe.joint:
            initialize_joint_noise(model, start.model)
            rate = s.fine_lr
    with quiet():
        how: dict[str, Any] = {
            "samples": s.draws,
            "weight_lr": s.weight_lr,
            "noise_lr": rate,
            "epochs": s.steps,
        }
        how |= {"likelihood": deepcopy(case.likelihood), "seed": seed, "progress": False, **device}
        posterior = fit(model, case.loader, **how)
        if start is None or recipe.joint != "full":
            return posterior
        # what it starts at is a special case of it
        choice = partial(diagnostics.pareto_k, loader=case.loader, samples=s.predictions, seed=seed + CHOICE)
        return max(start, posterior, key=lambda one: choice(one).elbo)


def fit_by_calibrate(
    case: Case, seed: int, device: Mapping[str, Any], structure: Any = "full"
) -> NoisePosterior:
    """The Gaussian that :func:`~flowbnn.calibrate` gives."""
    how: dict[str, Any] = {
        "structure": structure,
        "prior": "fixed",
        "folds": 0,
        "likelihood": case.likelihood,
    }
    with quiet():
        return calibrate(case.network, case.loader, **how, seed=seed, progress=False, **device)


@torch.no_grad()
def initialize_joint_noise(model: nn.Module, gaussian: nn.Module) -> None:
    """Give joint noise the covariance of a Gaussian, before any flow has learned."""
    ((vector, _),), ((known, _),) = independent_vectors(model), independent_vectors(gaussian)
    unit = torch.eye(known.layout.dim, device=next(known.parameters()).device)
    mean = known.transform(torch.zeros_like(unit[0]))[0]
    root = (known.transform(unit)[0] - mean).double()
    map_ = next(part for part in vector.transform.modules() if isinstance(part, BlockTriangular))
    match_gaussian(map_, mean, root.mT @ root)


@torch.no_grad()
def match_gaussian(map_: BlockTriangular, mean: Tensor, covariance: Tensor) -> None:
    """Let a map make a Gaussian of standard normal numbers, or one as near to it as its structure allows."""
    covariance = covariance.double()
    factor = torch.linalg.cholesky(covariance)
    spans = [slice(*ends) for ends in pairwise(accumulate(map_.sizes, initial=0))]
    roots, links = [factor[own, own] for own in spans], []
    if map_.across == "none" and len(spans) > 1:
        # the Gaussian nearest to the whole as an ELBO measures it has the blocks of the precision
        precision = torch.cholesky_inverse(factor)
        factors = [torch.linalg.cholesky(precision[own, own]) for own in spans]
        roots = [torch.linalg.cholesky(torch.cholesky_inverse(one)) for one in factors]
    elif map_.across == "chain":
        for number, (last, own) in enumerate(pairwise(spans), start=1):
            links.append(torch.linalg.solve(covariance[last, last], covariance[last, own]).mT)
            roots[number] = torch.linalg.cholesky(covariance[own, own] - links[-1] @ covariance[last, own])
    map_.assign(mean, roots, links)
    if map_.across == "low-rank" and len(spans) > 1:
        # the leading directions of what lies below the blocks
        left, size, right = torch.linalg.svd(factor - torch.block_diag(*roots), full_matrices=False)
        keep = min(map_.readers[0].shape[1], len(size))
        width = size[:keep].sqrt()
        for link, reader, last, own in zip(map_.links, map_.readers, spans, spans[1:], strict=False):
            link.zero_()[:, :keep] = left[own, :keep] * width
            reader.zero_()[:, :keep] = right[:keep, last].mT * width


def sample_chains(posterior: NoisePosterior, case: Case, s: Settings, seed: int) -> NoiseChains:
    """The exact posterior; whether it may be taken for that is in its R-hat."""
    with quiet():
        return diagnostics.noise_chains(
            posterior, case.loader, samples=s.samples, warmup=s.warmup, chains=s.chains, seed=seed
        )


def measure_posterior(
    posterior: NoisePosterior, chains: NoiseChains, case: Case, s: Settings, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The numbers of a posterior, and those that the chains have against themselves."""
    with quiet():
        k = diagnostics.pareto_k(posterior, case.loader, s.predictions, seed)
        gap = diagnostics.elbo_gap(posterior, case.loader, chains, s.predictions, seed)
        near = diagnostics.agreement(posterior, case.loader, chains, [case.test], s.predictions, seed)
    own = {
        "gap": gap.nats,
        "per_example": gap.per_example,
        "k": k.k,
        "variation": near.variation,
        "agreement": near.agreement,
        "excess": near.excess,
        "rhat": chains.rhat,
    }
    floor = {"variation": near.variation_floor, "agreement": near.agreement_floor, "rhat": chains.rhat}
    return own, floor


class PosteriorQuality(Study):
    name = "posterior-quality"
    title = "How good are posteriors of noise?"
    description = "eight posteriors of the noise beside long chains: gap to the evidence, k-hat, total variation, agreement"
    question = (
        "The noise of a trained network is fitted to a few examples by posteriors from factorized to a flow over all layers. How far "
        "is each from the exact posterior, in nats and in predictions?"
    )
    source = "flowbnn's own"
    settings = Settings
    seeds = 10
    headline = ("gap_blobs", "gap_boston", "gap_digits", "variation_digits", "agreement_digits")
    quick: ClassVar[dict[str, Any]] = {
        "problems": ("blobs",), "posteriors": ("factorized", "natural", "full", "flow"), "along": ("factorized",), "epochs": 5,
        "steps": 3, "chains": 2, "samples": 4, "warmup": 4, "predictions": 30, "climbs": 1,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        few = dict.fromkeys(LARGE, LARGE_SEEDS)
        one = [Variant(name, PROBLEMS[name].label, cost=2, seeds=few.get(name)) for name in settings.problems]
        more = [
            Variant(f"{name}-along", f"{PROBLEMS[name].label}, weights trained", cost=3, seeds=few.get(name))
            for name in settings.problems
        ]
        return (*one, *(more if settings.along else ()))

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        name, _, along = job.variant.partition("-")
        device = {"accelerator": job.accelerator}
        case = make_case(name, s, job.seed, device)
        table: dict[str, dict[str, float]] = {}
        if along:  # weights that are trained have a density of their own
            for key in s.along:
                posterior, seconds = time_call(fit_posterior, RECIPES[key][1], case, s, job.seed, device)
                own, _ = measure_posterior(
                    posterior, sample_chains(posterior, case, s, job.seed), case, s, job.seed
                )
                table[f"{key}-along"] = own | {"seconds": seconds}
            return {"values": {}, "table": table}
        start, seconds = time_call(fit_by_calibrate, case, job.seed, device)
        chains, long = time_call(sample_chains, start, case, s, job.seed)
        own, floor = measure_posterior(start, chains, case, s, job.seed)
        modes = diagnostics.modes(start, case.loader, starts=s.climbs, seed=job.seed)
        table[EXACT] = floor | {"modes": len(modes), "seconds": long}
        table[NATURAL] = own | {"seconds": seconds}
        layers = sum(isinstance(part, nn.Linear | nn.Conv2d) for part in case.network.modules())
        done = {NATURAL, "chain"} if layers == 2 else {NATURAL}  # a chain of two is a full covariance
        for key in sorted((one for one in s.posteriors if one not in done), key=lambda key: key != "full"):
            posterior, seconds = time_call(fit_posterior, RECIPES[key][1], case, s, job.seed, device, start)
            start = posterior if key == "full" else start
            table[key] = measure_posterior(posterior, chains, case, s, job.seed)[0] | {"seconds": seconds}
        return {"values": {}, "table": table}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        by_row = problem_parts_by_row(parts)
        metrics = [
            Metric(f"{key}_{name}", label, better, form, meaning, PROBLEMS[name].label)
            for name in settings.problems
            for key, (label, better, form, meaning) in COLUMNS.items()
        ]
        labels = {EXACT: "HMC, between its halves"}
        labels |= {key: label for key, (label, _) in RECIPES.items() if key in settings.posteriors}
        labels |= {f"{key}-along": f"{RECIPES[key][0]}, weights trained along" for key in settings.along}
        flows = {"planar": "planar", "coupling": "coupling", "flow": "coupling"}
        methods = {key: f"node-noise-{flows.get(key.removesuffix('-along'), 'gaussian')}" for key in labels}
        methods[EXACT] = "hmc"
        rows = [by_row.row(key, label, metrics, None, methods[key]) for key, label in labels.items()]
        notes = [
            "Weights are trained on other examples than those that the noise is fitted to, and then frozen; or trained along with the "
            "noise, on its examples. The prior of the noise is N(1, 0.5²).",
            "Posteriors are fitted by stochastic gradients until the rate is zero, joint ones from what fb.calibrate finds by natural "
            "gradients; the full covariance, and the flow after it, is what it starts from where that has the higher ELBO, on "
            "other draws than those of the table. A chain of two layers is a full covariance, and has no row.",
            describe_convergence(
                (f"{variant} seed {seed}, {row}", numbers["rhat"])
                for (variant, seed), part in sorted(parts.content.items())
                for row, numbers in part["table"].items()
                if row == EXACT or row.endswith("-along")
            ),
        ]
        return Findings(answer(settings, by_row), metrics, [row for row in rows if row["values"]], [], notes)


def problem_parts_by_row(parts: Parts) -> Parts:
    """Parts by the rows of the table, instead of by the problems that were run."""
    tables = (
        (seed, variant.partition("-")[0], {row: drop_unconverged(own) for row, own in part["table"].items()})
        for (variant, seed), part in parts.content.items()
    )
    return parts_by_row(parts.seeds, tables)


def answer(settings: Settings, parts: Parts) -> str:
    """The answer, put together from the numbers."""
    lines = []
    for name in settings.problems:

        def mean(row: str, key: str, name: str = name) -> float:
            return parts.mean(row, f"{key}_{name}")

        ks, number = parts.values("full", f"k_{name}"), len(parts.values("full", f"gap_{name}"))
        if not number:
            lines.append(
                f"{PROBLEMS[name].label}: no chains have mixed that a posterior could be compared with."
            )
            continue
        text = (
            f"{PROBLEMS[name].label}, {pluralize(number)}: the joint Gaussian is {mean('full', 'gap'):.2f} nats from the exact "
            f"posterior, the factorized {mean('factorized', 'gap'):.2f}; k-hat {mean('full', 'k'):.2f}, below 0.7 in "
            f"{sum(k is not None and k < 0.7 for k in ks)} of {len(ks)}; total variation {mean('full', 'variation'):.4f} against "
            f"{mean('factorized', 'variation'):.4f} ({mean(EXACT, 'variation'):.4f} between halves of the chains), agreement "
            f"{mean('full', 'agreement'):.1%} ({mean(EXACT, 'agreement'):.1%}); test NLL "
            f"{paired_difference(*parts.common('full', 'factorized', f'excess_{name}')).describe()} from factorized."
        )
        if parts.values("flow", f"gap_{name}"):
            gain = paired_difference(*parts.common("flow", "full", f"gap_{name}"))
            text += f" A flow on it changes the gap by {gain.describe(2)} nats."
        lines.append(text)
    return "\n".join(lines)
