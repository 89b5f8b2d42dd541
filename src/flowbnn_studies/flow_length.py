"""Figure 4 of Xiong's report: the length of a planar flow."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, figure
from flowbnn.models import MLP
from flowbnn.noise import NormalPlanar, noise_layers
from flowbnn.options import Count, NonNegative, options
from flowbnn.posterior import NoisePosterior
from flowbnn_studies.runner.findings import curve, paired_difference, panel, pluralize
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant
from flowbnn_studies.two_clusters import ClusterSettings, sample_points

# fmt: off
METRICS = (
    Metric("negative_elbo", "Negative ELBO", "lower", ".4f",
           "KL / N minus the mean log-likelihood of a training point, in nats, for the final network with many draws."),
    Metric("log_likelihood", "Log-likelihood", "higher", ".4f", "Expected log-likelihood of a training point, in nats."),
    Metric("kl", "KL / N", "none", ".5f", "KL of the noise of all layers to its prior, divided by the number of points, in nats."),
    *(metric for metric in CLASSIFICATION if metric.key in ("nll", "ece")),
)
# fmt: on


@options
class Settings(ClusterSettings):
    """Settings of the study, with the epochs and learning rates of the report.

    Args:
        lengths: Numbers of planar flows at each layer; 0 is the learnable Gaussian alone.
        draws: Number of noise draws for the final ELBO, for each point.
        kl_draws: Number of draws for the final KL.
    """

    lengths: tuple[int, ...] = (0, 3, 6, 9, 12, 15)
    epochs: Count = 50
    weight_lr: NonNegative = 2e-4
    noise_lr: NonNegative = 2e-3
    draws: Count = 64
    kl_draws: Count = 8192


class FlowLength(Study):
    name = "flow-length"
    title = "How long should the flow be?"
    description = "planar flows of length 0 to 15 on the blobs of two-clusters: ELBO, likelihood, KL (Xiong's report, figure 4)"
    question = (
        "The stochastic MLP of two-clusters is trained with planar flows of different lengths at both layers. Which length has the "
        "best ELBO, and is a Gaussian without a flow the worst?"
    )
    source = "Xiong's report, figure 4"
    settings = Settings
    partial = False
    keep_networks = True
    # fmt: off
    quick: ClassVar[dict[str, Any]] = {
        "lengths": (0, 3), "train": 800, "test": 1000, "epochs": 2, "short_epochs": 1, "draws": 4, "kl_draws": 64, "samples": 8,
    }
    # fmt: on

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        lengths = [
            Variant(f"length-{n}", f"Length {n}", "node-noise-planar", "plain", cost=1 + n)
            for n in settings.lengths
        ]
        return (Variant("plain", "Deterministic MLP", "mle", in_table=False), *lengths)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        train, test = sample_points(s, job.seed)
        loader = shuffled_loader(train, s.batch, job.seed)
        network = MLP(2, (s.hidden,), 2)
        if job.variant == "plain":
            job.fit(network, loader, epochs=s.short_epochs, weight_lr=s.short_lr)
            return {"values": {}}
        rules = {"*": NormalPlanar(int(job.variant.removeprefix("length-")), base_scale=0.5)}
        posterior = job.fit(job.load_start_network(network), loader, rules)
        return {
            "values": {
                **final_bound(posterior, train, s.draws, s.kl_draws),
                **predict(posterior, test[0], s.samples).evaluate(test[1]),
            },
            "history": {name: posterior.history[name] for name in ("elbo", "log_likelihood", "kl")},
        }

    def story(self, numbers: Numbers) -> Story:
        first, second, *_, last = numbers.ranked("negative_elbo")
        gain = numbers.mean(last, "negative_elbo") - numbers.mean(first, "negative_elbo")
        verdict = numbers.verdict(first, second, "negative_elbo")
        return Story(
            "How many planar flows does the noise of a small network need?",
            f"{numbers.name(first)} has the best bound (negative ELBO {numbers.text(first, 'negative_elbo')}) and "
            f"{numbers.name(last)} the worst ({numbers.text(last, 'negative_elbo')}), but it is {verdict} than "
            f"{numbers.name(second)}, and the calibration error differs by less than a thousandth."
            if abs(numbers.mean(first, "ece") - numbers.mean(last, "ece")) < 1e-3
            else f"{numbers.name(first)} has the best bound and {numbers.name(last)} the worst, but it is {verdict} "
            f"than {numbers.name(second)}.",
            f"{gain:.4f} nats",
            f"gained for each point by {numbers.name(first)} over {numbers.name(last)}",
            ("negative_elbo", "nll", "ece"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        labels = self.row_labels(settings)

        def lines(name: str, scale: float = 1.0) -> list[dict[str, Any]]:
            return [
                curve(label, [part["history"][name] for part in parts.of(key)], scale)
                for key, label in labels.items()
            ]

        panels = [
            panel("Negative ELBO", "nats per example", lines("elbo", -1.0)),
            panel("Log-likelihood", "nats per example", lines("log_likelihood")),
            panel("KL", "nats per example", lines("kl", 1.0 / settings.train)),
        ]
        caption = (
            "As in figure 4 of Xiong's report: mean over seeds at each epoch during training, with one draw for each point and a "
            "band of one standard deviation."
        )
        data = {"x_label": "epoch", "panels": panels}
        curves = figure("curves", "Training with flows of different lengths", caption, data)
        notes = [
            "The figure of the report shows one run of each length. Length 12 is best and length 0 worst; it has no numbers.",
            "All lengths start from the same briefly trained network of their seed, and have the same batches.",
            "With learning rates 50 (weights) and 25 (noise) times higher, no flow has the best ELBO of three lengths, but the "
            "differences are not significant (negative ELBO 0.1018; length 6 0.1050, length 12 0.1046): flowbnn run flow-length "
            "--seeds 3 --set lengths=0,6,12 --set weight_lr=0.01 --set noise_lr=0.05",
            *describe_convergence(parts, settings.lengths),
        ]
        rows = self.rows(settings, parts, METRICS)
        return Findings(answer(parts, settings.lengths), METRICS, rows, [curves], notes)


@torch.no_grad()
def final_bound(
    posterior: NoisePosterior, data: tuple[Tensor, Tensor], draws: int, kl_draws: int
) -> dict[str, float]:
    """Computes the ELBO of a fitted network and its two terms, per training point, with many draws."""
    points, targets = data
    predictive = posterior.predict(points, draws, shared=False, seed=0).cpu()
    target_log_p = predictive.log_samples.gather(-1, targets.view(1, -1, 1).expand(draws, -1, 1))
    likelihood = float(target_log_p.double().mean())
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for noise in noise_layers(posterior.model).values():
            divergence = noise.divergence(kl_draws)
            total += 0.0 if divergence is None else float(divergence.kl)
    kl = total / len(points)
    return {"negative_elbo": kl - likelihood, "log_likelihood": likelihood, "kl": kl}


def answer(parts: SeedResults, lengths: tuple[int, ...]) -> str:
    """Returns the answer, computed from the numbers."""
    bound = {n: parts.values(f"length-{n}", "negative_elbo") for n in lengths}
    means = {n: sum(values) / len(values) for n, values in bound.items()}
    order = sorted(lengths, key=means.__getitem__)
    best, worst = order[0], order[-1]
    text = (
        f"Averaged over {pluralize(len(parts.seeds))}, length {best} has the best ELBO (negative ELBO {means[best]:.4f}) and length "
        f"{worst} the worst ({means[worst]:.4f})."
    )
    if len(lengths) > 1:
        second = paired_difference(bound[order[1]], bound[best])
        verdict = (
            "significant" if second.significant else f"{second.inconclusive}, so the best length is undecided"
        )
        text += f"\nThe difference of the second best, length {order[1]}, to the best is {second.describe()}: {verdict}."
    if 0 in lengths and len(lengths) > 1:
        rival = best if best != 0 else order[1]
        gap = paired_difference(bound[0], bound[rival])
        if worst == 0 and gap.significant:
            text += f"\nAs in the report, no flow is the worst: {gap.describe()} nats per point above length {rival}."
        elif worst == 0:
            text += (
                f"\nNo flow is the worst, as in the report, but its difference to length {rival} is {gap.inconclusive}: "
                f"{gap.describe()}."
            )
        else:
            text += (
                f"\nUnlike in the report, no flow is not the worst: its negative ELBO is {means[0]:.4f}, rank {order.index(0) + 1} of "
                f"{len(order)}, with a difference of {gap.describe()} to length {rival}."
            )
    if 12 in lengths:
        text += (
            "\nLength 12, the best of the report, is also the best here."
            if best == 12
            else f"\nLength 12, the best of the report, has rank {order.index(12) + 1} of {len(order)} here."
        )
    return text


def describe_convergence(parts: SeedResults, lengths: tuple[int, ...], window: int = 5) -> list[str]:
    """Describes the decrease of the negative ELBO between the last two windows of epochs."""
    falls = {}
    for length in lengths:
        histories = [part["history"]["elbo"] for part in parts.of(f"length-{length}")]
        if min(len(history) for history in histories) < 2 * window:
            return []
        drops = [sum(h[-window:]) / window - sum(h[-2 * window : -window]) / window for h in histories]
        falls[length] = sum(drops) / len(drops)
    drops_by_length = ", ".join(f"{fall:.4f} at length {length}" for length, fall in falls.items())
    meaning = (
        "the training had not converged, so part of the differences between lengths is due to speed"
        if 0 in falls and falls[0] > 0 and falls[0] > max(falls[n] for n in lengths if n != 0)
        else "this does not favour any length over no flow"
    )
    return [
        f"Decrease of the negative ELBO from the {window} epochs before the last {window} to these: {drops_by_length} nats; {meaning}."
    ]
