"""Bayesian linear regression with a known posterior: random-walk Metropolis, HMC and variational inference compared with it."""

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.compare.results import SeedResults, figure
from flowbnn.diagnostics import effective_sample_size
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import HMC, BayesByBackprop, ChainPosterior, GaussianWeightPosterior
from flowbnn.methods.mcmc.hmc import Metropolis
from flowbnn.options import Count, Positive, options
from flowbnn.training import cosine
from flowbnn_studies.runner.findings import kernel_density, line, panel, pluralize, round_values
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics

VARIANTS = (
    Variant("metropolis", "Random-walk Metropolis", "metropolis"),
    Variant("hmc", "HMC", "hmc"),
    Variant("variational", "Variational inference", "bayes-by-backprop"),
    Variant("factorized", "Best factorized Gaussian", "closed-form"),
)
SAMPLERS = ("metropolis", "hmc")
# fmt: off
NUMBERS = {
    "kl": ("KL", "lower", ".4f",
           "KL from the Gaussian with the mean and covariance of the method to the exact posterior, in nats; 0 is exact."),
    "mean": ("Mean", "lower", ".3f",
             "Root mean square distance of the means, after the exact posterior is scaled to a standard normal."),
    "covariance": ("Covariance", "lower", ".3f",
                   "Relative distance of the covariances on that scale, by the Frobenius norm."),
    "efficiency": ("ESS per 1000", "higher", ".1f",
                   "Smallest effective sample size over weights for 1000 evaluations of the log-density (Metropolis) or its "
                   "gradient (HMC), "
                   "without the warm-up."),
    "rhat": ("R-hat", "lower", ".3f", "Largest R-hat over weights; 1 if the chains agree."),
    "evaluations": ("Evaluations", "none", ",.0f",
                    "Evaluations of the log-density or its gradient after the warm-up in all chains, or steps of the variational fit."),
    "seconds": ("Seconds", "none", ".1f", "Time of the fit."),
}
# fmt: on


@options
class Settings:
    """Settings of the study.

    Args:
        inputs: Numbers of inputs, one regression each. There is one more weight, the intercept.
        points: Number of examples for each weight.
        noise: Known standard deviation of the targets.
        prior: Standard deviation of the prior of every weight.
        chains, draws: Number of chains and of draws of the samplers. Draws of both samplers cost about the same number of
            evaluations.
        warmup: Number of draws of the warm-up, in which the samplers are tuned.
        steps: Largest number of leapfrog steps of HMC. Metropolis has half as many transitions for a draw.
        fit_steps: Number of steps of the variational fit. A third as many find the maximum of the posterior, around which chains
            start.
        lr: Learning rate of both, which decays to zero.
    """

    inputs: tuple[int, ...] = (1, 10, 50)
    points: Count = 5
    noise: Positive = 0.5
    prior: Positive = 1.0
    chains: Count = 16
    draws: Count = 80
    warmup: Count = 60
    steps: Count = 9
    fit_steps: Count = 500
    lr: Positive = 0.05


class GaussianMoments(NamedTuple):
    """Mean and covariance of a normal distribution over weights, in the order slopes, intercept."""

    mean: Tensor
    covariance: Tensor


class LinearRegression(Study):
    name = "linear-regression"
    title = "Linear regression: distance to the exact posterior"
    description = "Bayesian linear regression: random-walk Metropolis, HMC and variational inference versus the exact posterior"
    question = (
        "The smallest Bayesian network is a line with uncertain slope and intercept, whose posterior is known exactly. How close "
        "to it are random-walk Metropolis, HMC and variational inference, at what cost, and how does this change with 11 and 51 "
        "weights?"
    )
    source = "Ravenda's report, figure 3 and section 1.3"
    settings = Settings
    partial = False
    seeds = 10
    headline = ("kl_1", "kl_10", "kl_50", "efficiency_1", "efficiency_50")
    quick: ClassVar[dict[str, Any]] = {
        "inputs": (1, 3), "chains": 2, "draws": 40, "steps": 4, "fit_steps": 60,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return VARIANTS

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        content: dict[str, Any] = {"values": {}, "curves": {}}
        for number in s.inputs:
            inputs, targets = make_problem(s, number, job.seed)
            exact = exact_posterior(inputs, targets, s)
            started, extra = time.perf_counter(), dict[str, Any]()
            if job.variant == "factorized":
                variances = torch.linalg.inv(exact.covariance).diagonal().reciprocal()
                moments = GaussianMoments(exact.mean, variances.diag())
            else:
                moments, extra = self.fit(job, inputs, targets)
                extra["seconds"] = time.perf_counter() - started
            chains = extra.pop("chains", None)
            values = {**distances(moments, exact), **extra}
            content["values"] |= {f"{name}_{number}": value for name, value in values.items()}
            if chains is not None:
                content["curves"][str(number)] = kl_by_draws(chains, exact, extra["evaluations"])
            if job.seed == 0 and number == 1:
                content |= density_data(moments, chains, exact, inputs, targets, s)
        return content

    def fit(self, job: Job, inputs: Tensor, targets: Tensor) -> tuple[GaussianMoments, dict[str, Any]]:
        """Fits a method. Returns the moments of its posterior and further numbers."""
        s: Settings = job.settings
        network = nn.Linear(inputs.shape[1], 1).double()
        data = [(inputs, targets)]
        options: dict[str, Any] = {"likelihood": Gaussian(noise=s.noise), "seed": job.seed, "progress": False}
        options |= {"accelerator": job.accelerator}
        if job.variant == "variational":
            method = BayesByBackprop(
                epochs=s.fit_steps, lr=s.lr, noise_lr=s.lr, schedule=cosine, prior_scale=s.prior
            )
            variational: GaussianWeightPosterior = method.fit(network, data, **options)
            std = flatten_weights(variational.std)
            return GaussianMoments(flatten_weights(variational.mean), std.square().diag()), {
                "evaluations": float(s.fit_steps)
            }
        common: dict[str, Any] = {"samples": s.draws, "chains": s.chains, "prior_scale": s.prior}
        common |= {"epochs": max(1, s.fit_steps // 3), "lr": s.lr, "schedule": cosine}
        thin = max(1, (s.steps + 1) // 2) if job.variant == "metropolis" else 1
        posterior: ChainPosterior
        if job.variant == "metropolis":
            posterior = Metropolis(thin=thin, warmup=thin * s.warmup, **common).fit(network, data, **options)
        else:
            posterior = HMC(steps=s.steps, warmup=s.warmup, **common).fit(network, data, **options)
        chains = flatten_weights(posterior.chains, 2)
        evaluations = thin * float(posterior.record["gradients"].sum())
        ess = float(effective_sample_size(chains, "bulk").min())
        flat = chains.flatten(0, 1)
        extra = {
            "evaluations": evaluations,
            "efficiency": 1e3 * ess / evaluations,
            "rhat": posterior.diagnostics().rhat_weights,
        }
        return GaussianMoments(flat.mean(0), flat.T.cov()), {**extra, "chains": chains}

    def story(self, numbers: Numbers) -> Story:
        few, many = (
            {key: numbers.text(key, metric, ".3g") for key in ("hmc", "metropolis", "variational")}
            for metric in ("kl_1", "kl_50")
        )
        return Story(
            "How close do sampling and variational inference come to a posterior that is known exactly?",
            f"With two weights, the samples of HMC miss it by {few['hmc']} nats and a factorized Gaussian by "
            f"{few['variational']}, because "
            "it cannot express the correlation of slope and intercept; with 51 weights and as many steps, HMC misses it by "
            f"{many['hmc']}.",
            f"{few['hmc']} vs {few['variational']}",
            "nats to the exact posterior of two weights: HMC and variational inference",
            ("kl_1", "kl_10", "kl_50"),
            figure="density",
            panels=("Exact posterior", "HMC", "Variational inference"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        metrics = make_metrics(NUMBERS, {number: weights_label(number) for number in settings.inputs})
        notes = [
            f"Every seed has data of its own: {settings.points} points for each weight, inputs with a common factor (uniform "
            f"between 0 and 3 for one input), a line of standard deviation 1 and known noise of {settings.noise:g}. The prior is "
            f"N(0, {settings.prior:g}²).",
            f"{settings.chains} chains of {settings.draws} draws, with up to {settings.steps} leapfrog steps or "
            f"{(settings.steps + 1) // 2} Metropolis transitions for a draw, which are as many evaluations on average. Step sizes "
            "and the scale of every weight are tuned in the warm-up. The remaining distance of the samplers is due to the finite "
            "number of draws.",
            "Variational inference is Bayes by Backprop. The best factorized Gaussian has the exact mean and the variances 1 / Λ "
            "of the diagonal of the exact precision. No factorized Gaussian has a smaller KL.",
            "Ravenda's report has no numbers. It states that Metropolis-Hastings is exact given enough computation and works for "
            "about 10 to 100 variables.",
        ]
        rows = self.rows(settings, parts, metrics)
        all_figures = figures(settings, parts, self.first_seed_parts(settings, parts, "joint"))
        return Findings(answer(settings, parts), metrics, rows, all_figures, notes)


def weights_label(number: int) -> str:
    """Returns the number of weights of a regression in words.

    >>> weights_label(1), weights_label(20)
    ('2 weights', '21 weights')
    """
    return f"{number + 1} weights"


def make_problem(s: Settings, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs ``[N, number]`` and targets ``[N, 1]``."""
    source = torch.Generator().manual_seed(1000 * number + seed)
    count = s.points * (number + 1)
    if number == 1:  # away from zero, so that slope and intercept are correlated
        inputs = 3.0 * torch.rand(count, 1, generator=source, dtype=torch.float64)
    else:
        common = torch.randn(count, 1, generator=source, dtype=torch.float64)
        individual = torch.randn(count, number, generator=source, dtype=torch.float64)
        inputs = (0.5 * common + individual) / math.sqrt(1.25)
    signal = inputs @ torch.randn(number, 1, generator=source, dtype=torch.float64)
    noise = s.noise * torch.randn(count, 1, generator=source, dtype=torch.float64)
    return inputs, (signal - signal.mean()) / signal.std() + noise


def design(inputs: Tensor) -> Tensor:
    """Appends a column of ones to the inputs."""
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)


def exact_posterior(inputs: Tensor, targets: Tensor, s: Settings) -> GaussianMoments:
    r"""Computes the exact posterior: precision :math:`\Lambda = X^\top X / \sigma^2 + I / s^2`, mean :math:`\Lambda^{-1} X^\top y /
    \sigma^2`.
    """
    columns = design(inputs)
    precision = columns.T @ columns / s.noise**2 + torch.eye(columns.shape[1]).double() / s.prior**2
    covariance = torch.linalg.inv(precision)
    return GaussianMoments(covariance @ (columns.T @ targets / s.noise**2)[:, 0], covariance)


def flatten_weights(values: Mapping[str, Tensor], leading: int = 0) -> Tensor:
    """Returns slopes and intercept on the last axis."""
    return torch.cat([values[name].flatten(leading) for name in ("weight", "bias")], -1)


def distances(moments: GaussianMoments, exact: GaussianMoments) -> dict[str, float]:
    r"""Computes the distance of a normal distribution to the exact one, which is scaled to a standard normal.

    .. math:: \mathrm{KL} = \tfrac12 (\mathrm{tr}\, S + m^\top m - d - \log\det S)

    >>> unit, zero = torch.eye(2).double(), torch.zeros(2).double()
    >>> values = distances(GaussianMoments(zero + 1, unit), GaussianMoments(zero, unit))
    >>> {name: round(value, 4) for name, value in values.items()}
    {'kl': 1.0, 'mean': 1.0, 'covariance': 0.0}
    """
    root = torch.linalg.cholesky(exact.covariance)
    mean_difference = torch.linalg.solve_triangular(root, (moments.mean - exact.mean)[:, None], upper=False)
    half_scaled = torch.linalg.solve_triangular(root, moments.covariance, upper=False)
    covariance = torch.linalg.solve_triangular(root, half_scaled.T, upper=False)
    size = len(covariance)
    kl = 0.5 * (covariance.trace() + mean_difference.square().sum() - size - torch.logdet(covariance))
    error = torch.linalg.matrix_norm(covariance - torch.eye(size).to(covariance)) / math.sqrt(size)
    return {
        "kl": float(kl),
        "mean": float(mean_difference.square().mean().sqrt()),
        "covariance": float(error),
    }


def kl_by_draws(chains: Tensor, exact: GaussianMoments, evaluations: float) -> dict[str, list[float]]:
    """Computes the KL after 1/32, 1/16, ... of all draws, against the evaluations that they took, both as log10."""
    draws = chains.shape[1]
    counts = [draws >> halvings for halvings in reversed(range(6))]
    curve: dict[str, list[float]] = {"x": [], "kl": []}
    for count in counts:
        flat = chains[:, :count].flatten(0, 1)
        if len(flat) > 2 * flat.shape[1]:  # otherwise the covariance is nearly singular
            kl = distances(GaussianMoments(flat.mean(0), flat.T.cov()), exact)["kl"]
            curve["x"].append(math.log10(evaluations * count / draws))
            curve["kl"].append(math.log10(kl))
    return curve


def density_data(
    moments: GaussianMoments,
    chains: Tensor | None,
    exact: GaussianMoments,
    inputs: Tensor,
    targets: Tensor,
    s: Settings,
) -> dict[str, Any]:
    """Returns the joint density of slope and intercept, and the predictive band of the line, for one input."""
    deviation = exact.covariance.diagonal().sqrt()
    grids = [torch.linspace(-4, 4, 61).double() * deviation[index] + exact.mean[index] for index in range(2)]
    axis = torch.linspace(-1.0, 4.0, 51).double()
    columns = design(axis[:, None])

    def joint(normal: GaussianMoments) -> Tensor:
        points = torch.cartesian_prod(grids[1], grids[0])[:, [1, 0]]
        density = torch.distributions.MultivariateNormal(*normal).log_prob(points).exp()
        return density.view(len(grids[1]), len(grids[0]))

    def band(normal: GaussianMoments) -> dict[str, Any]:
        variance = ((columns @ normal.covariance) * columns).sum(1)
        total = (variance + s.noise**2).sqrt()
        return {
            "x": round_values(axis),
            "mean": round_values(columns @ normal.mean),
            "epistemic": round_values(variance.sqrt()),
            "total": round_values(total),
        }

    density = joint(moments) if chains is None else kernel_density(*chains.flatten(0, 1).T, *grids)
    return {
        "joint": {"x": round_values(grids[0]), "y": round_values(grids[1]), "density": round_values(density)},
        "band": band(moments),
        "exact": {"joint": round_values(joint(exact)), "band": band(exact)},
        "points": {"x": round_values(inputs[:, 0]), "y": round_values(targets[:, 0])},
    }


def figures(s: Settings, parts: SeedResults, contents: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the figures: posterior of slope and intercept, predicted lines, KL and efficiency."""
    result = [*_line_figures(s, contents), kl_figure(s, parts)] if contents else [kl_figure(s, parts)]
    labels = {variant.key: variant.label for variant in VARIANTS if variant.key in SAMPLERS}
    lines = []
    for key, label in labels.items():
        columns = ([math.log10(v) for v in parts.values(key, f"efficiency_{number}")] for number in s.inputs)
        lines.append(line(label, (math.log10(number + 1) for number in s.inputs), columns))
    title = "Efficiency against the number of weights"
    caption = "Smallest effective sample size over weights for 1000 evaluations, mean over seeds of log10: 1 is 10, 2 is 100."
    panels = [panel("Efficiency", "effective draws per 1000 evaluations, log10", lines)]
    return [*result, figure("curves", title, caption, {"x_label": "weights, log10", "panels": panels})]


def _line_figures(s: Settings, contents: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the joint densities of slope and intercept, and the predicted lines."""
    first = next(iter(contents.values()))
    axes = {"x_label": "slope", "y_label": "intercept"}
    pairs = [{"title": "Exact posterior", **first["joint"], "density": first["exact"]["joint"], **axes}]
    pairs += [{"title": label, **part["joint"], **axes} for label, part in contents.items()]
    densities = figure(
        "density",
        "Posterior of slope and intercept of a line",
        f"Seed 0, {2 * s.points} points, as in figure 3 of Ravenda's report. All panels have the same axes. Slope and intercept are "
        "correlated: a steeper line needs a lower intercept. A factorized Gaussian cannot represent this.",
        {"panels": [], "pairs": pairs},
    )
    bands = [{"title": "Exact posterior", **first["exact"]["band"], "points": first["points"]}]
    bands += [{"title": label, **part["band"], "points": first["points"]} for label, part in contents.items()]
    truth = {"x": bands[0]["x"], "y": bands[0]["mean"]}
    caption = (
        "Seed 0. Dashed line: mean of the exact posterior, in all panels. The factorized Gaussian is overconfident far from the "
        "data and underconfident among them: it has the right mean, and the conditional variance of each weight given the other."
    )
    exact = {"truth": truth, "truth_label": "mean of the exact posterior"}
    data = {"x_label": "x", **exact, "panels": bands}
    return [densities, figure("bands", "Predicted lines", caption, data)]


def kl_figure(s: Settings, parts: SeedResults) -> dict[str, Any]:
    """Returns the figure of the KL to the exact posterior against the number of evaluations."""
    panels = []
    for number in s.inputs:
        lines = []
        for variant in VARIANTS:
            runs = [part["curves"][str(number)] for part in parts.of(variant.key) if part.get("curves")]
            if runs and runs[0]["x"]:
                x = (sum(values) / len(runs) for values in zip(*(run["x"] for run in runs), strict=True))
                lines.append(line(variant.label, x, zip(*(run["kl"] for run in runs), strict=True)))
        log_values = [math.log10(value) for value in parts.values("factorized", f"kl_{number}")]
        levels = [{"label": "Best factorized Gaussian", "value": sum(log_values) / len(log_values)}]
        panels.append(panel(weights_label(number), "KL to the exact posterior, log10", lines, levels=levels))
    return figure(
        "curves",
        "KL to the exact posterior against the number of evaluations",
        "KL from the Gaussian with the mean and covariance of all draws so far to the exact posterior, as log10. Curves begin "
        "where there are enough draws for a covariance. Mean over seeds.",
        {"x_label": "evaluations, log10", "panels": panels},
    )


def answer(s: Settings, parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    small, large = s.inputs[0], s.inputs[-1]

    def ratio(number: int) -> float:
        return parts.mean("hmc", f"efficiency_{number}") / parts.mean("metropolis", f"efficiency_{number}")

    def describe(number: int) -> str:
        return ", ".join(
            f"{variant.label} {parts.mean(variant.key, f'kl_{number}'):.3f}" for variant in VARIANTS
        )

    return (
        f"KL to the exact posterior with {weights_label(small)} ({pluralize(len(parts.seeds))}): {describe(small)} nats. The error "
        "of the samplers is due to the finite number of draws. The factorized Gaussian misses the correlation of slope and "
        f"intercept, however long the fit.\nFor 1000 evaluations, HMC has {ratio(small):.1f} times as many effective draws as "
        f"random-walk Metropolis with {weights_label(small)}, and {ratio(large):.1f} times as many with {weights_label(large)}. "
        f"There the KLs are: {describe(large)}."
    )
