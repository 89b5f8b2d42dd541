"""Bayesian linear regression, whose posterior is known: random-walk Metropolis, HMC and variational inference measured by it."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Parts, figure
from flowbnn.diagnostics import effective_sample_size
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import HMC, BayesByBackprop, ChainPosterior
from flowbnn.methods.mcmc.hmc import Metropolis
from flowbnn.methods.variational.bayes_by_backprop import GaussianWeightPosterior
from flowbnn.options import Count, Positive, options
from flowbnn.training import cosine
from flowbnn_studies.runner.findings import kernel_density, line, panel, pluralize, round_values
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics

VARIANTS = (
    Variant("metropolis", "Random-walk Metropolis", "metropolis"),
    Variant("hmc", "HMC", "hmc"),
    Variant("variational", "Variational inference", "bayes-by-backprop"),
    Variant("factorized", "Best factorized Gaussian", "closed-form"),
)
SAMPLED, PREFIXES = ("metropolis", "hmc"), 6
# fmt: off
NUMBERS = {
    "kl": ("KL", "lower", ".4f", "KL from the Gaussian of the method's mean and covariance to the exact posterior, in nats; 0: exact."),
    "mean": ("Mean", "lower", ".3f",
             "Distance of the means: root mean square over weights after the exact posterior is scaled to a standard normal one."),
    "covariance": ("Covariance", "lower", ".3f",
                   "Distance of the covariances on that scale, by the Frobenius norm, as a share of the exact one's."),
    "efficiency": ("ESS per 1000", "higher", ".1f",
                   "Effective draws of the worst weight for a thousand evaluations of the log-density (Metropolis) or of its gradient "
                   "(HMC), without the warm-up."),
    "rhat": ("R-hat", "lower", ".3f", "The worst over weights; chains that agree have 1."),
    "evaluations": ("Evaluations", "none", ",.0f",
                    "Of the log-density or its gradient: after the warm-up in all chains, or steps of the variational fit."),
    "seconds": ("Seconds", "none", ".1f", "Of the whole fit."),
}
# fmt: on


@options
class Settings:
    """What the study depends on.

    Args:
        inputs: numbers of inputs, each a regression of its own; there is one weight more, the intercept.
        points: examples for each weight.
        noise: standard deviation of the targets, which is known.
        prior: standard deviation of the prior of every weight.
        chains, draws: of the samplers; each draw costs about the same number of evaluations.
        warmup: draws before, in which the samplers tune themselves.
        steps: leapfrog steps of HMC at most; Metropolis takes half as many transitions for a draw.
        fit_steps: of the variational fit; a third as many before lead to the maximum of the posterior, around which chains begin.
        lr: of both, which falls to zero.
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
    """A normal distribution over weights, in the order slopes, intercept."""

    mean: Tensor
    covariance: Tensor


class LinearRegression(Study):
    name = "linear-regression"
    title = "Linear regression: how near to the exact posterior?"
    description = "Bayesian linear regression by random-walk Metropolis, HMC and variational inference beside the exact posterior"
    question = (
        "The smallest Bayesian network is a line whose slope and intercept are uncertain, and its posterior is known exactly. How near "
        "do random-walk Metropolis, HMC and variational inference come, at which cost, and what changes with 11 and with 51 weights?"
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
            started, more = time.perf_counter(), dict[str, Any]()
            if job.variant == "factorized":
                best = GaussianMoments(
                    exact.mean, torch.linalg.inv(exact.covariance).diagonal().reciprocal().diag()
                )
                found = best
            else:
                found, more = self.fitted(job, inputs, targets)
                more["seconds"] = time.perf_counter() - started
            chains = more.pop("chains", None)
            values = {**distances(found, exact), **more}
            content["values"] |= {f"{name}_{number}": value for name, value in values.items()}
            if chains is not None:
                content["curves"][str(number)] = kl_by_draws(chains, exact, more["evaluations"])
            if job.seed == 0 and number == 1:
                content |= pictures(found, chains, exact, inputs, targets, s)
        return content

    def fitted(self, job: Job, inputs: Tensor, targets: Tensor) -> tuple[GaussianMoments, dict[str, Any]]:
        """What a method makes of the data."""
        s: Settings = job.settings
        network = nn.Linear(inputs.shape[1], 1).double()
        data = [(inputs, targets)]
        given: dict[str, Any] = {"likelihood": Gaussian(noise=s.noise), "seed": job.seed, "progress": False}
        given |= {"accelerator": job.accelerator}
        if job.variant == "variational":
            method = BayesByBackprop(
                epochs=s.fit_steps, lr=s.lr, noise_lr=s.lr, schedule=cosine, prior_scale=s.prior
            )
            fit: GaussianWeightPosterior = method.fit(network, data, **given)
            std = flatten_weights(fit.std)
            return GaussianMoments(flatten_weights(fit.mean), std.square().diag()), {
                "evaluations": float(s.fit_steps)
            }
        common: dict[str, Any] = {"samples": s.draws, "chains": s.chains, "prior_scale": s.prior}
        common |= {"epochs": max(1, s.fit_steps // 3), "lr": s.lr, "schedule": cosine}
        thin = max(1, (s.steps + 1) // 2) if job.variant == "metropolis" else 1
        posterior: ChainPosterior
        if job.variant == "metropolis":
            posterior = Metropolis(thin=thin, warmup=thin * s.warmup, **common).fit(network, data, **given)
        else:
            posterior = HMC(steps=s.steps, warmup=s.warmup, **common).fit(network, data, **given)
        chains = flatten_weights(posterior.chains, 2)
        evaluations = thin * float(posterior.record["gradients"].sum())
        told = posterior.diagnostics()
        least = float(effective_sample_size(chains, "bulk").min())
        flat = chains.flatten(0, 1)
        more = {
            "evaluations": evaluations,
            "efficiency": 1e3 * least / evaluations,
            "rhat": told.rhat_weights,
        }
        return GaussianMoments(flat.mean(0), flat.T.cov()), {**more, "chains": chains}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        metrics = make_metrics(NUMBERS, {number: weights_label(number) for number in settings.inputs})
        notes = [
            f"Every seed has data of its own: {settings.points} points for each weight, inputs that share a common factor (with one "
            f"input: even between 0 and 3), a line of spread 1 and noise of {settings.noise:g}, which all methods know, a prior "
            f"N(0, {settings.prior:g}²).",
            f"{settings.chains} chains of {settings.draws} draws, with up to {settings.steps} leapfrog steps a draw, or "
            f"{(settings.steps + 1) // 2} Metropolis transitions: as many evaluations on average. Step sizes and the scale of every "
            "weight are tuned in the warm-up. Draws have no bias left to show, so their distance is that of a finite number of them.",
            "Variational inference is Bayes by Backprop; the best factorized Gaussian has the exact mean and the variances "
            "1 / Λ of the exact precision's diagonal. No fit of its kind can be nearer by this KL.",
            "Ravenda's report prints no numbers; it says of Metropolis-Hastings that it is exact given enough computation and works "
            "for some 10 to 100 variables.",
        ]
        rows = self.rows(settings, parts, metrics)
        drawn = figures(settings, parts, self.first_seed_parts(settings, parts, "joint"))
        return Findings(answer(settings, parts), metrics, rows, drawn, notes)


def weights_label(number: int) -> str:
    """A regression in words.

    >>> weights_label(1), weights_label(20)
    ('2 weights', '21 weights')
    """
    return f"{number + 1} weights"


def make_problem(s: Settings, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[N, number]`` and targets ``[N, 1]``."""
    source = torch.Generator().manual_seed(1000 * number + seed)
    count = s.points * (number + 1)
    if number == 1:  # away from zero, so that slope and intercept are correlated
        inputs = 3.0 * torch.rand(count, 1, generator=source, dtype=torch.float64)
    else:
        common = torch.randn(count, 1, generator=source, dtype=torch.float64)
        own = torch.randn(count, number, generator=source, dtype=torch.float64)
        inputs = (0.5 * common + own) / math.sqrt(1.25)
    line = inputs @ torch.randn(number, 1, generator=source, dtype=torch.float64)
    noise = s.noise * torch.randn(count, 1, generator=source, dtype=torch.float64)
    return inputs, (line - line.mean()) / line.std() + noise


def design(inputs: Tensor) -> Tensor:
    """A column of ones after the inputs."""
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)


def exact_posterior(inputs: Tensor, targets: Tensor, s: Settings) -> GaussianMoments:
    r"""The exact one: precision :math:`\Lambda = X^\top X / \sigma^2 + I / s^2`, mean :math:`\Lambda^{-1} X^\top y / \sigma^2`."""
    columns = design(inputs)
    precision = columns.T @ columns / s.noise**2 + torch.eye(columns.shape[1]).double() / s.prior**2
    covariance = torch.linalg.inv(precision)
    return GaussianMoments(covariance @ (columns.T @ targets / s.noise**2)[:, 0], covariance)


def flatten_weights(values: Mapping[str, Tensor], leading: int = 0) -> Tensor:
    """Slopes and intercept on the last axis."""
    return torch.cat([values[name].flatten(leading) for name in ("weight", "bias")], -1)


def distances(found: GaussianMoments, exact: GaussianMoments) -> dict[str, float]:
    r"""How far a normal distribution is from the exact one, where that is scaled to a standard normal.

    .. math:: \mathrm{KL} = \tfrac12 (\mathrm{tr}\, S + m^\top m - d - \log\det S)

    >>> unit, zero = torch.eye(2).double(), torch.zeros(2).double()
    >>> values = distances(GaussianMoments(zero + 1, unit), GaussianMoments(zero, unit))
    >>> {name: round(value, 4) for name, value in values.items()}
    {'kl': 1.0, 'mean': 1.0, 'covariance': 0.0}
    """
    root = torch.linalg.cholesky(exact.covariance)
    away = torch.linalg.solve_triangular(root, (found.mean - exact.mean)[:, None], upper=False)
    half = torch.linalg.solve_triangular(root, found.covariance, upper=False)
    spread = torch.linalg.solve_triangular(root, half.T, upper=False)
    size = len(spread)
    kl = 0.5 * (spread.trace() + away.square().sum() - size - torch.logdet(spread))
    error = torch.linalg.matrix_norm(spread - torch.eye(size).to(spread)) / math.sqrt(size)
    return {"kl": float(kl), "mean": float(away.square().mean().sqrt()), "covariance": float(error)}


def kl_by_draws(chains: Tensor, exact: GaussianMoments, evaluations: float) -> dict[str, list[float]]:
    """The KL after a half, a quarter and so on of all draws, against the thousands of evaluations that they took."""
    draws = chains.shape[1]
    counts = [draws >> halvings for halvings in reversed(range(PREFIXES))]
    made: dict[str, list[float]] = {"x": [], "kl": []}
    for count in counts:
        flat = chains[:, :count].flatten(0, 1)
        if len(flat) > 2 * flat.shape[1]:  # else its covariance is nearly singular
            kl = distances(GaussianMoments(flat.mean(0), flat.T.cov()), exact)["kl"]
            made["x"].append(math.log10(evaluations * count / draws))
            made["kl"].append(math.log10(kl))
    return made


def pictures(
    found: GaussianMoments,
    chains: Tensor | None,
    exact: GaussianMoments,
    inputs: Tensor,
    targets: Tensor,
    s: Settings,
) -> dict[str, Any]:
    """The line of one input: joint and marginal densities, and the band of the line."""
    deviation = exact.covariance.diagonal().sqrt()
    grids = [torch.linspace(-4, 4, 61).double() * deviation[place] + exact.mean[place] for place in range(2)]
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

    density = joint(found) if chains is None else kernel_density(*chains.flatten(0, 1).T, *grids)
    return {
        "joint": {"x": round_values(grids[0]), "y": round_values(grids[1]), "density": round_values(density)},
        "band": band(found),
        "exact": {"joint": round_values(joint(exact)), "band": band(exact)},
        "points": {"x": round_values(inputs[:, 0]), "y": round_values(targets[:, 0])},
    }


def figures(s: Settings, parts: Parts, drawn: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The posterior of slope and intercept, the line, and how the distance falls with the work."""
    made = []
    if drawn:
        first = next(iter(drawn.values()))
        axes = {"x_label": "slope", "y_label": "intercept"}
        pairs = [{"title": "Exact posterior", **first["joint"], "density": first["exact"]["joint"], **axes}]
        pairs += [{"title": label, **part["joint"], **axes} for label, part in drawn.items()]
        made.append(
            figure(
                "density",
                "The posterior of a line's slope and intercept",
                f"Seed 0, {2 * s.points} points: in place of the two numbers of a line there is a distribution, as in figure 3 of "
                "Ravenda's report. All panels have the same axes. A steeper line needs a lower intercept; a factorized Gaussian "
                "cannot say so.",
                {"panels": [], "pairs": pairs},
            )
        )
        bands = [{"title": "Exact posterior", **first["exact"]["band"], "points": first["points"]}]
        bands += [
            {"title": label, **part["band"], "points": first["points"]} for label, part in drawn.items()
        ]
        truth = {"x": bands[0]["x"], "y": bands[0]["mean"]}
        caption = (
            "Seed 0. Dashed: the exact posterior's mean, in all panels. The factorized Gaussian's line is too certain far "
            "from the data and too uncertain among them: it has the right mean, and each weight's spread given the other."
        )
        exact = {"truth": truth, "truth_label": "mean of the exact posterior"}
        made.append(
            figure("bands", "The line that they predict", caption, {"x_label": "x", **exact, "panels": bands})
        )
    made.append(kl_figure(s, parts))
    labels = {one.key: one.label for one in VARIANTS if one.key in SAMPLED}
    lines = []
    for key, label in labels.items():
        columns = ([math.log10(v) for v in parts.values(key, f"efficiency_{number}")] for number in s.inputs)
        lines.append(line(label, (math.log10(number + 1) for number in s.inputs), columns))
    title = "What an evaluation is worth, against the number of weights"
    caption = "Effective draws of the worst weight for a thousand evaluations, mean over seeds of log10: 1 is 10, 2 is 100."
    panels = [panel("Efficiency", "effective draws per 1000 evaluations, log10", lines)]
    return [*made, figure("curves", title, caption, {"x_label": "weights, log10", "panels": panels})]


def kl_figure(s: Settings, parts: Parts) -> dict[str, Any]:
    """The distance to the exact posterior as chains grow."""
    panels = []
    for number in s.inputs:
        lines = []
        for one in VARIANTS:
            runs = [part["curves"][str(number)] for part in parts.of(one.key) if part.get("curves")]
            if runs and runs[0]["x"]:
                places = (sum(values) / len(runs) for values in zip(*(run["x"] for run in runs), strict=True))
                lines.append(line(one.label, places, zip(*(run["kl"] for run in runs), strict=True)))
        known = [math.log10(value) for value in parts.values("factorized", f"kl_{number}")]
        levels = [{"label": "Best factorized Gaussian", "value": sum(known) / len(known)}]
        panels.append(panel(weights_label(number), "KL to the exact posterior, log10", lines, levels=levels))
    return figure(
        "curves",
        "Chains come nearer as they grow, a factorized Gaussian does not",
        "KL from the Gaussian with the mean and covariance of all draws so far to the exact posterior, as log10: one step down "
        "is a tenth. Chains begin where they have enough draws for a covariance. Mean over seeds.",
        {"x_label": "evaluations, log10", "panels": panels},
    )


def answer(s: Settings, parts: Parts) -> str:
    """The answer, put together from the numbers."""
    few, many = s.inputs[0], s.inputs[-1]

    def ratio(number: int) -> float:
        return parts.mean("hmc", f"efficiency_{number}") / parts.mean("metropolis", f"efficiency_{number}")

    def told(keys: Sequence[str], number: int) -> str:
        labels = {one.key: one.label for one in VARIANTS}
        return ", ".join(f"{labels[key]} {parts.mean(key, f'kl_{number}'):.3f}" for key in keys)

    keys = [one.key for one in VARIANTS]
    lines = [
        f"Of a line ({pluralize(len(parts.seeds))}) the KL to the exact posterior is: {told(keys, few)} nats. The samplers are exact "
        "up to the number of their draws; the factorized Gaussian misses the correlation of slope and intercept, and no longer fit "
        "helps.",
        f"For a thousand evaluations HMC has {ratio(few):.1f} times as many effective draws as random-walk Metropolis with "
        f"{weights_label(few)} and {ratio(many):.1f} times as many with {weights_label(many)}, where the KLs are: {told(keys, many)}.",
    ]
    return "\n".join(lines)
