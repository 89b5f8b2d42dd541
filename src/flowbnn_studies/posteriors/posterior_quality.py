"""Quality of posteriors of the noise, from factorized to a flow over all layers, compared with long Markov chains."""

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
from flowbnn.compare.results import Metric, SeedResults
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
from flowbnn_studies.runner.story import Numbers, Story
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
EXACT = "exact"  # key of the row of the chains


@dataclass(frozen=True)
class ProblemSize:
    """Name of a problem, and its numbers of examples.

    Args:
        label: Name in the table.
        weights: Number of examples for the training of the weights.
        examples: Number of examples for the fit of the noise.
        test: Number of test examples.
    """

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
LARGE, LARGE_SEEDS = ("conv", "lenet"), 3  # problems that need a GPU, and their number of seeds
# added to the seed of draws that choose a posterior, which differ from those that measure it
CHOICE_SEED = 500_000
COLUMNS = {
    "gap": ("Gap", "lower", ".2f", "Log-evidence minus ELBO in nats: the KL divergence to the exact posterior."),
    "per_example": ("Gap per example", "lower", ".4f", "Gap divided by the number of examples."),
    "k": ("k-hat", "lower", ".2f", "Pareto k-hat of the importance weights; below 0.7 importance sampling is reliable."),
    "variation": ("TV", "lower", ".4f", "Total variation distance to the predictions of the chains on test inputs; for the "
                                        "chains, between their halves."),
    "agreement": ("Agreement", "higher", ".4f", "Fraction of test inputs with the same predicted class as the chains; for the "
                                                "chains, between their halves."),
    "excess": ("NLL - HMC", "none", "+.4f", "Test NLL minus that of the chains."),
    "rhat": ("R-hat", "none", ".3f", "R-hat of the chains of the comparison; above 1.01 they are not used."),
    "modes": ("Modes", "none", ".1f", "Number of distinct modes of the exact density found from draws of the prior."),
    "seconds": ("Seconds", "none", ".1f", "Time of the fit or of the chains."),
}  # fmt: skip


@options
class Settings:
    """Settings of the study.

    Args:
        problems: Names of the problems; ``conv`` and ``lenet`` need a GPU.
        posteriors: Keys of the posteriors that are fitted with frozen weights.
        joint_training: Keys of the posteriors that are also fitted together with the weights.
        epochs, batch, lr: Epochs, batch size and learning rate of the training of the weights.
        steps, draws: Number of steps of fits by stochastic gradients, and of draws for every example. All examples are used in each
            step.
        weight_lr, noise_lr, fine_lr: Learning rates of the weights, of noise, and of noise that starts from a Gaussian.
        chains, samples, warmup: Number of chains, draws and warm-up draws of the exact posterior. There are up to four times as
            many draws if the chains have not converged.
        predictions: Number of draws of a prediction and of k-hat.
        mode_starts: Number of draws of the prior from which modes are searched.
    """

    problems: tuple[ProblemName, ...] = ("blobs", "boston", "digits")
    posteriors: tuple[PosteriorName, ...] = get_args(PosteriorName)
    joint_training: tuple[PosteriorName, ...] = ("factorized", "layers", "full")
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
    mode_starts: Count = 16

    def relevant(self, variant: str) -> dict[str, Any]:
        """Returns the settings that the result of a variant depends on."""
        return {name: value for name, value in asdict(self).items() if name != "problems"}


@dataclass(frozen=True)
class Case:
    """A trained network, the data of its noise, and test data.

    Args:
        network: Trained network.
        likelihood: Likelihood of the outputs.
        data: Data of the noise.
        test: Test data.
    """

    network: nn.Module
    likelihood: Likelihood
    data: TensorPair
    test: TensorPair

    @property
    def loader(self) -> list[TensorPair]:
        """Loader of the data of the noise."""
        return [self.data]


def load_problem(name: str, seed: int, number: int) -> tuple[TensorPair, TensorPair | None, nn.Module]:
    """Returns examples in random order, test examples if they are separate, and an untrained network."""
    source = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    if name == "blobs":
        return clusters(number, 1.95, source), None, MLP(2, (32,), 2)
    if name == "boston":
        inputs, targets, *test = load_uci("boston", seed)
        mean, std, targets = targets.mean(), targets.std(), torch.cat([targets, test[1]])
        inputs = torch.cat(standardize(inputs, test[0]))
        return (inputs, (targets - mean) / std), None, MLP(13, (50,), 1)
    if name == "lenet":
        train_set, test_set = load_images("fashion-mnist"), load_images("fashion-mnist", "test")
        order = torch.randperm(len(train_set.labels), generator=source)[:number]
        data = train_set.normalized()[order], train_set.labels[order]
        return data, (test_set.normalized(), test_set.labels), LeNet(1)
    digits = load_digits(seed=seed)
    parts = digits.train, digits.validation, digits.test
    images, labels = torch.cat([pair[0] for pair in parts]), torch.cat([pair[1] for pair in parts])
    order = torch.randperm(len(labels), generator=source)
    network = MLP(64, (64,), 9) if name == "digits" else SmallConv(classes=9, width=12)
    return (images[order], labels[order]), None, network


def make_case(
    name: str, s: Settings, seed: int, device: Mapping[str, Any], examples: int | None = None
) -> Case:
    """Returns a problem with one seed: weights are trained on some examples, and the noise is fitted to others."""
    problem = PROBLEMS[name]
    first, second = problem.weights, problem.weights + (examples or problem.examples)
    data, test, network = load_problem(name, seed, second + problem.test)
    weight_data, noise_data, other_data = (
        tuple(tensor[rows] for tensor in data)
        for rows in (slice(first), slice(first, second), slice(second, None))
    )
    test = tuple(tensor[: problem.test] for tensor in test or other_data)  # type: ignore[assignment]
    batches = [
        tuple(tensor[low : low + s.batch] for tensor in weight_data) for low in range(0, first, s.batch)
    ]
    likelihood: Likelihood = Gaussian() if name == "boston" else Categorical()
    with ignore_warnings():
        point = MLE(epochs=s.epochs, lr=s.lr, schedule=cosine).fit(
            network, batches, likelihood=likelihood, seed=seed, progress=False, **device
        )
    if name == "boston":
        # all posteriors share one noise level, that of the residuals, so that their target density is the same
        residuals = point.predict(noise_data[0], progress=False).mean.cpu() - noise_data[1]
        likelihood = Gaussian(float(residuals.square().mean().sqrt()))
    return Case(point.model, likelihood, noise_data, test)  # type: ignore[arg-type]


# context manager that ignores warnings of the library, which the numbers of the row reflect
ignore_warnings = partial(warnings.catch_warnings, action="ignore", category=FlowBNNWarning)


def fit_posterior(
    recipe: Recipe,
    case: Case,
    s: Settings,
    seed: int,
    device: Mapping[str, Any],
    start: NoisePosterior | None = None,
) -> NoisePosterior:
    """Fits a posterior of the noise by stochastic gradients.

    Args:
        recipe: Recipe of the noise.
        case: Problem.
        s: Settings of the study.
        seed: Seed of the fit.
        device: Options of the device.
        start: Gaussian posterior from which joint noise starts, with frozen weights; None trains the weights as well.
    """
    model = to_stochastic(case.network, {"*": recipe})
    rate = s.noise_lr
    if start is not None:
        freeze(model, "weights")
        if recipe.joint:
            initialize_joint_noise(model, start.model)
            rate = s.fine_lr
    with ignore_warnings():
        options: dict[str, Any] = {
            "repeats": s.draws,
            "weight_lr": s.weight_lr,
            "noise_lr": rate,
            "epochs": s.steps,
            "validation": None,  # the study measures the fit itself
        }
        options |= {"likelihood": deepcopy(case.likelihood), "seed": seed, "progress": False, **device}
        posterior = fit(model, case.loader, **options)
        if start is None or recipe.joint != "full":
            return posterior
        # the start is a special case of the recipe, so the better one of the two is returned
        estimate = partial(
            diagnostics.pareto_k, loader=case.loader, samples=s.predictions, seed=seed + CHOICE_SEED
        )
        return max(start, posterior, key=lambda candidate: estimate(candidate).elbo)


def fit_by_calibrate(
    case: Case, seed: int, device: Mapping[str, Any], structure: Any = "full"
) -> NoisePosterior:
    """Fits the Gaussian of :func:`~flowbnn.calibrate`."""
    options: dict[str, Any] = {
        "structure": structure,
        "prior": "fixed",
        "folds": 0,
        "likelihood": case.likelihood,
    }
    with ignore_warnings():
        posterior = calibrate(case.network, case.loader, **options, seed=seed, progress=False, **device)
    assert isinstance(posterior, NoisePosterior)
    return posterior


@torch.no_grad()
def initialize_joint_noise(model: nn.Module, gaussian: nn.Module) -> None:
    """Sets the mean and covariance of joint noise to those of a Gaussian, before any flow is trained."""
    ((vector, _),), ((gaussian_vector, _),) = independent_vectors(model), independent_vectors(gaussian)
    unit = torch.eye(gaussian_vector.layout.dim, device=next(gaussian_vector.parameters()).device)
    mean = gaussian_vector.transform(torch.zeros_like(unit[0]))[0]
    root = (gaussian_vector.transform(unit)[0] - mean).double()
    map_ = next(module for module in vector.transform.modules() if isinstance(module, BlockTriangular))
    match_gaussian(map_, mean, root.mT @ root)


@torch.no_grad()
def match_gaussian(map_: BlockTriangular, mean: Tensor, covariance: Tensor) -> None:
    """Sets a map such that standard normal inputs have a given Gaussian distribution, or the closest one of its structure."""
    covariance = covariance.double()
    factor = torch.linalg.cholesky(covariance)
    spans = [slice(*ends) for ends in pairwise(accumulate(map_.sizes, initial=0))]
    roots, links = [factor[block, block] for block in spans], []
    if map_.coupling == "none" and len(spans) > 1:
        # the independent blocks that maximize the ELBO have the diagonal blocks of the precision
        precision = torch.cholesky_inverse(factor)
        factors = [torch.linalg.cholesky(precision[block, block]) for block in spans]
        roots = [
            torch.linalg.cholesky(torch.cholesky_inverse(precision_factor)) for precision_factor in factors
        ]
    elif map_.coupling == "chain":
        for number, (previous, block) in enumerate(pairwise(spans), start=1):
            links.append(torch.linalg.solve(covariance[previous, previous], covariance[previous, block]).mT)
            roots[number] = torch.linalg.cholesky(
                covariance[block, block] - links[-1] @ covariance[previous, block]
            )
    map_.assign(mean, roots, links)
    if map_.coupling == "low-rank" and len(spans) > 1:
        # leading singular vectors of the part below the diagonal blocks
        left, size, right = torch.linalg.svd(factor - torch.block_diag(*roots), full_matrices=False)
        rank = min(map_.projections[0].shape[1], len(size))
        scale = size[:rank].sqrt()
        for link, reader, previous, block in zip(
            map_.links, map_.projections, spans, spans[1:], strict=False
        ):
            link.zero_()[:, :rank] = left[block, :rank] * scale
            reader.zero_()[:, :rank] = right[:rank, previous].mT * scale


def sample_chains(posterior: NoisePosterior, case: Case, s: Settings, seed: int) -> NoiseChains:
    """Samples the exact posterior by Markov chains, whose R-hat shows their convergence."""
    with ignore_warnings():
        return diagnostics.noise_chains(
            posterior, case.loader, samples=s.samples, warmup=s.warmup, chains=s.chains, seed=seed
        )


def measure_posterior(
    posterior: NoisePosterior, chains: NoiseChains, case: Case, s: Settings, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Compares a posterior with the chains.

    Returns:
        Numbers of the posterior, and those of one half of the chains compared with the other.
    """
    with ignore_warnings():
        k = diagnostics.pareto_k(posterior, case.loader, s.predictions, seed)
        gap = diagnostics.elbo_gap(posterior, case.loader, chains, s.predictions, seed)
        agreement = diagnostics.agreement(posterior, case.loader, chains, [case.test], s.predictions, seed)
    values = {
        "gap": gap.nats,
        "per_example": gap.per_example,
        "k": k.k,
        "variation": agreement.variation,
        "agreement": agreement.agreement,
        "excess": agreement.excess,
        "rhat": chains.rhat,
    }
    chain_values = {
        "variation": agreement.variation_floor,
        "agreement": agreement.agreement_floor,
        "rhat": chains.rhat,
    }
    return values, chain_values


class PosteriorQuality(Study):
    name = "posterior-quality"
    title = "Quality of posteriors of the noise"
    description = "nine posteriors of the noise versus long chains: gap to the evidence, k-hat, total variation, agreement"
    question = (
        "The noise of a trained network is fitted to a few examples by posteriors from factorized to a flow over all layers. How "
        "far is each from the exact posterior, in nats and in predictions?"
    )
    source = "no published counterpart"
    settings = Settings
    seeds = 10
    headline = ("gap_blobs", "gap_boston", "gap_digits", "variation_digits", "agreement_digits")
    quick: ClassVar[dict[str, Any]] = {
        "problems": ("blobs",), "posteriors": ("factorized", "natural", "full", "flow"), "joint_training": ("factorized",), "epochs": 5,
        "steps": 3, "chains": 2, "samples": 4, "warmup": 4, "predictions": 30, "mode_starts": 1,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        seeds = dict.fromkeys(LARGE, LARGE_SEEDS)
        frozen = [
            Variant(name, PROBLEMS[name].label, cost=2, seeds=seeds.get(name)) for name in settings.problems
        ]
        trained = [
            Variant(
                f"{name}-along", f"{PROBLEMS[name].label}, weights trained", cost=3, seeds=seeds.get(name)
            )
            for name in settings.problems
        ]
        return (*frozen, *(trained if settings.joint_training else ()))

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        name, _, joint = job.variant.partition("-")
        device = {"accelerator": job.accelerator}
        case = make_case(name, s, job.seed, device)
        table: dict[str, dict[str, float]] = {}
        if joint:  # trained weights have an exact posterior of their own
            for key in s.joint_training:
                posterior, seconds = time_call(fit_posterior, RECIPES[key][1], case, s, job.seed, device)
                chains = sample_chains(posterior, case, s, job.seed)
                values, _ = measure_posterior(posterior, chains, case, s, job.seed)
                table[f"{key}-along"] = values | {"seconds": seconds}
            return {"values": {}, "table": table}
        start, seconds = time_call(fit_by_calibrate, case, job.seed, device)
        chains, chain_seconds = time_call(sample_chains, start, case, s, job.seed)
        values, chain_values = measure_posterior(start, chains, case, s, job.seed)
        modes = diagnostics.modes(start, case.loader, starts=s.mode_starts, seed=job.seed)
        table[EXACT] = chain_values | {"modes": len(modes), "seconds": chain_seconds}
        table[NATURAL] = values | {"seconds": seconds}
        num_layers = sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in case.network.modules())
        # a chain of two layers is a full covariance
        done = {NATURAL, "chain"} if num_layers == 2 else {NATURAL}
        keys = [key for key in s.posteriors if key not in done]
        for key in sorted(keys, key=lambda key: key != "full"):  # the flow starts from the full covariance
            posterior, seconds = time_call(fit_posterior, RECIPES[key][1], case, s, job.seed, device, start)
            start = posterior if key == "full" else start
            values, _ = measure_posterior(posterior, chains, case, s, job.seed)
            table[key] = values | {"seconds": seconds}
        return {"values": {}, "table": table}

    def story(self, numbers: Numbers) -> Story:
        problems = [key.removeprefix("gap_") for key in numbers.metrics if key.startswith("gap_")]
        joint, factorized = (
            [numbers.mean(row, f"gap_{problem}") for problem in problems] for row in ("full", "factorized")
        )
        gains = sum(numbers.better("full", "factorized", f"excess_{problem}") > 0 for problem in problems)
        charts = tuple(f"gap_{problem}" for problem in problems[:3])
        return Story(
            "How close do fitted posteriors of the noise come to the exact one?",
            f"A joint Gaussian comes within {min(joint):.1f} to {max(joint):.1f} nats, a factorized one within "
            f"{min(factorized):.1f} to "
            f"{max(factorized):.1f}, but its test NLL is significantly lower on {gains} of {len(problems)} problems.",
            f"{numbers.text('full', 'gap_blobs', '.1f')} vs {numbers.text('factorized', 'gap_blobs', '.1f')}",
            "nats from the exact posterior: joint and factorized Gaussian, blobs",
            (*charts, "excess_blobs"),
            rows=("factorized", "planar", "coupling", "layers", "low-rank", "full", "flow"),
            charts=charts,
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        by_row = problem_parts_by_row(parts)
        metrics = [
            Metric(f"{key}_{name}", label, better, format_, definition, PROBLEMS[name].label)
            for name in settings.problems
            for key, (label, better, format_, definition) in COLUMNS.items()
        ]
        labels = {EXACT: "HMC, between halves of the chains"}
        labels |= {key: label for key, (label, _) in RECIPES.items() if key in settings.posteriors}
        labels |= {f"{key}-along": f"{RECIPES[key][0]}, weights trained" for key in settings.joint_training}
        flows = {"planar": "planar", "coupling": "coupling", "flow": "coupling"}
        methods = {key: f"node-noise-{flows.get(key.removesuffix('-along'), 'gaussian')}" for key in labels}
        methods[EXACT] = "hmc"
        rows = [by_row.row(key, label, metrics, None, methods[key]) for key, label in labels.items()]
        notes = [
            "Weights are trained on other examples than those of the noise and then frozen, or trained together with the noise on "
            "its examples. The prior of the noise is N(1, 0.5²).",
            "Posteriors are fitted by stochastic gradients until the learning rate is zero. Joint ones start from the fit of "
            "fb.calibrate by natural gradients. The full covariance, and the flow after it, is replaced by its start if that has "
            "the higher ELBO, on other draws than those of the table. A chain of two layers is a full covariance and has no row.",
            describe_convergence(
                (f"{variant} seed {seed}, {row}", numbers["rhat"])
                for (variant, seed), part in sorted(parts.content.items())
                for row, numbers in part["table"].items()
                if row == EXACT or row.endswith("-along")
            ),
        ]
        return Findings(answer(settings, by_row), metrics, [row for row in rows if row["values"]], [], notes)


def problem_parts_by_row(parts: SeedResults) -> SeedResults:
    """Returns parts by the rows of the table instead of by problem."""
    tables = (
        (
            seed,
            variant.partition("-")[0],
            {row: drop_unconverged(values) for row, values in part["table"].items()},
        )
        for (variant, seed), part in parts.content.items()
    )
    return parts_by_row(parts.seeds, tables)


def answer(settings: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    return "\n".join(_describe_problem(name, parts) for name in settings.problems)


def _describe_problem(name: str, parts: SeedResults) -> str:
    """Compares the joint Gaussian with the factorized one and with the chains, for one problem."""

    def mean(row: str, key: str) -> float:
        return parts.mean(row, f"{key}_{name}")

    label = PROBLEMS[name].label
    ks, number = parts.values("full", f"k_{name}"), len(parts.values("full", f"gap_{name}"))
    if not number:
        return f"{label}: no chains have converged, so posteriors cannot be compared."
    difference = paired_difference(*parts.common("full", "factorized", f"excess_{name}"))
    text = (
        f"{label}, {pluralize(number)}: the gap to the exact posterior is {mean('full', 'gap'):.2f} nats for the joint Gaussian and "
        f"{mean('factorized', 'gap'):.2f} for the factorized one. k-hat is {mean('full', 'k'):.2f}, below 0.7 in "
        f"{sum(k is not None and k < 0.7 for k in ks)} of {len(ks)} seeds. The total variation is {mean('full', 'variation'):.4f} "
        f"versus {mean('factorized', 'variation'):.4f} ({mean(EXACT, 'variation'):.4f} between halves of the chains), the agreement "
        f"{mean('full', 'agreement'):.1%} ({mean(EXACT, 'agreement'):.1%} between halves). Difference of the test NLL to the "
        f"factorized one: {difference.describe()}."
    )
    if parts.values("flow", f"gap_{name}"):
        gain = paired_difference(*parts.common("flow", "full", f"gap_{name}"))
        text += f" A flow changes the gap by {gain.describe(2)} nats."
    return text
