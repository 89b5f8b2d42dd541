"""Report on the quality of a posterior of noise: a table and a verdict."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from flowbnn.diagnostics.agreement import Agreement, agreement
from flowbnn.diagnostics.evidence import Draws, ParetoK, pareto_k
from flowbnn.diagnostics.gap import Gap, elbo_gap
from flowbnn.diagnostics.modes import find_modes
from flowbnn.diagnostics.noise_chains import NoiseChains, estimate_seconds, noise_chains
from flowbnn.diagnostics.noise_target import MAX_DENSE_DIM, NoiseTarget
from flowbnn.errors import pluralize
from flowbnn.options import NonNegative, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.training import ProgressBar

Upgrade = Literal["none", "unknown", "within", "across", "shape"]


@dataclass(frozen=True, eq=False)
class Report:
    """Result of :func:`diagnose`. ``print(report)`` shows a table and the verdict.

    Args:
        pareto: Result of importance sampling from the posterior.
        dimensions: Number of noise variables.
        examples: Number of examples.
        chains: Markov chains over the noise, or None if none were run.
        gap: KL divergence to the exact posterior, or None without chains.
        agreement: Agreement with the chains, or None without chains.
        modes: Number of modes of the exact density, or 0 without chains.
        missed: Number of these modes that no chain visited.
        required_seconds: Estimated running time of chains. Infinite if it is far above the limit or was not estimated.
    """

    small_gap: ClassVar[float] = 0.01  # nats per example; a smaller gap hardly affects predictions

    pareto: ParetoK
    dimensions: int
    examples: int
    chains: NoiseChains | None = None
    gap: Gap | None = None
    agreement: Agreement | None = None
    modes: int = 0
    missed: int = 0
    required_seconds: float = math.inf

    @property
    def verified(self) -> bool:
        """True if the verdict is based on chains that have mixed and have visited every mode."""
        return self.agreement is not None and self.agreement.converged and not self.missed

    @property
    def importance_sampling_ok(self) -> bool:
        """True if importance sampling alone supports the posterior: usable weights, a small gap, and no missed modes."""
        # with few examples, one nat in total is small as well
        small = self.pareto.gap < max(1.0, self.small_gap * self.examples)
        return self.pareto.verdict != "bad" and small and not self.missed

    @property
    def good(self) -> bool:
        """True if the predictions are close to the predictions of the exact posterior.

        With verified chains, this means a total variation of at most 0.03, or of 1.5 times its floor. Otherwise it is
        :attr:`importance_sampling_ok`.
        """
        if self.agreement is None or not self.verified:
            return self.importance_sampling_ok
        return self.agreement.variation <= max(0.03, 1.5 * self.agreement.variation_floor)

    @property
    def suggested_upgrade(self) -> Upgrade:
        """Change of the posterior that would gain the most.

        One of ``"none"``, ``"unknown"``, ``"within"`` and ``"across"`` (correlation within or across layers), and ``"shape"`` (longer
        training, or a flow).
        """
        if self.gap is None or self.agreement is None or not self.verified:
            return "none" if self.pareto.verdict == "good" and self.importance_sampling_ok else "unknown"
        if self.good and (self.gap.per_example < self.small_gap or self.agreement.within_floor):
            return "none"
        gains: dict[Upgrade, float] = {
            "within": self.gap.within_layers,
            "across": self.gap.across_layers,
            "shape": self.gap.remainder,
        }
        return max(gains, key=lambda name: -1.0 if math.isnan(gains[name]) else gains[name])

    @property
    def sentence(self) -> str:
        """Verdict in one or two sentences."""
        if self.good or self.verified:
            verdict = f"This posterior is {'' if self.good else 'not '}good"
        else:
            verdict = "Importance sampling cannot confirm this posterior"
        if self.chains is not None and not self.verified:
            problem = f"have not mixed, R-hat {self.chains.rhat:.3f}"
            if self.missed:
                problem = f"missed {self.missed} of {self.modes} modes"
            verdict += f" ({'judged by importance sampling only: ' if self.good else ''}the chains {problem})"
        advice = {
            "none": "needs no upgrade",
            "unknown": f"chains are needed to suggest an upgrade ({self._missing_chains_reason})",
            "within": "correlation within layers (joint='layers') could improve it",
            "across": "correlation across layers (joint='full' or 'chain') could improve it",
            "shape": "longer training, or a flow, could improve it",
        }[self.suggested_upgrade]
        conjunction = "and" if self.good == (self.suggested_upgrade == "none") else "but"
        text = f"{verdict}, {conjunction} {advice}."
        if self.modes > 1:
            text += (
                f" The exact posterior has at least {self.modes} modes: see diagnostics.modes(), "
                "evidence(method='tempered') and fb.ModeEnsemble."
            )
        return text

    @property
    def _missing_chains_reason(self) -> str:
        """Reason why no verified chains are available."""
        if self.chains is not None:
            return "visiting every mode"
        if self.dimensions > MAX_DENSE_DIM:
            return f"at most {MAX_DENSE_DIM:,} dimensions"
        if self.required_seconds < math.inf:
            return f"about {self.required_seconds:.0f} s; increase seconds"
        return "increase seconds"

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the rows of the table: name, value and explanation."""
        k = self.pareto
        rows = [
            ("noise", pluralize(self.dimensions, "dimension"), pluralize(self.examples, "example")),
            (
                "Pareto k-hat",
                f"{k.k:.2f} ± {k.k_error:.2f}",
                f"{k.verdict}: good below 0.5, usable below {k.max_usable_k:.2f}",
            ),
            ("ELBO", f"{k.elbo:.2f} ± {k.elbo_error:.2f}", "nats"),
        ]
        if self.gap is not None and self.chains is not None and self.agreement is not None:
            return rows + _chain_rows(self.gap, self.chains, self.agreement, self.modes, self.missed)
        rows.append(("log-evidence", f"{k.evidence:.2f} ± {k.evidence_error:.2f}", "by importance sampling"))
        if k.verdict != "bad":
            rows.append(("gap", f"{k.gap:.2f}", f"{k.gap / self.examples:.4f} per example"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {note}" for name, value, note in rows]
        return "\n".join([*lines, self.sentence])


def _chain_rows(
    gap: Gap, chains: NoiseChains, agreement: Agreement, modes: int, missed: int
) -> list[tuple[str, str, str]]:
    """Returns the rows of the table that need chains."""
    draws, halves = chains.position[..., 0].numel(), "between half chains"
    evidence = gap.evidence
    return [
        ("log-evidence", f"{evidence.value:.2f} ± {evidence.error:.2f}", f"by {evidence.method}"),
        ("gap", f"{gap.nats:.2f} ± {gap.error:.2f}", f"{gap.per_dimension:.4f} per dimension, {gap.per_example:.4f} per example"),
        ("  within layers", f"{gap.within_layers:.2f}", "nats by correlation"),
        ("  across layers", f"{gap.across_layers:.2f}", "nats by correlation"),
        ("  remainder", f"{gap.remainder:.2f}", "means, variances, shape"),
        ("chains", f"R-hat {chains.rhat:.3f}", f"{draws:,} draws, ESS {chains.effective:.0f}, {chains.divergences} divergences"),
        ("total variation", f"{agreement.variation:.4f}", f"{agreement.variation_floor:.4f} {halves}"),
        ("agreement", f"{agreement.agreement:.1%}", f"{agreement.agreement_floor:.1%} {halves}"),
        ("modes", f"{modes}", f"{missed} missed by chains"),
        ("NLL", f"{agreement.excess:+.4f}", "relative to chains"),
    ]  # fmt: skip


@checked
def diagnose(
    posterior: Posterior,
    loader: Any,
    samples: Draws = 400,
    seconds: NonNegative = 300.0,
    test: Any = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Report:
    """Measures the quality of a posterior of noise, suggests an improvement, and prints a table.

    Importance sampling is always done. Markov chains and the search for modes are run if the chains are estimated to take at most
    ``seconds``.

    Args:
        posterior: Fitted posterior of noise.
        loader: Data that the posterior was fitted to: a loader, a ``Dataset``, or a pair of tensors or arrays.
            Every pass must give the same examples.
        samples: Number of draws of importance sampling.
        seconds: Time limit of the chains. No chains are run if it is 0.
        test: Data for the comparison of predictions with the chains. The default is the data of the loader.
        seed: Seed of all draws.
        progress: If True, shows a progress bar and prints the report.

    Returns:
        The report.

    >>> import flowbnn as fb
    >>> import torch
    >>> inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    >>> data = [(inputs, inputs.sum(1, keepdim=True))]
    >>> method = fb.NodeNoise(fb.noise.NormalAffine(), epochs=20)
    >>> posterior = method.fit(torch.nn.Linear(3, 1), data, seed=0, progress=False)
    >>> report = diagnose(posterior, data, seconds=0, progress=False)
    >>> report.dimensions, report.examples, report.gap
    (3, 30, None)
    """
    with ProgressBar("diagnosing", 6, unit="step", equal_steps=False, visible=progress) as bar:

        def begin(step: int, name: str) -> None:
            bar.update(step - 1, label=f"diagnosing: {name}")

        begin(1, "timing of chains")
        target = NoiseTarget(posterior, loader, seed)
        data, test = [target.data], None if test is None else [target.read(test, "test data")]
        required = estimate_seconds(target, seconds) if target.dim <= MAX_DENSE_DIM and seconds else math.inf
        begin(2, "importance sampling")
        pareto = pareto_k(posterior, data, samples, seed)
        report = Report(pareto, target.dim, target.count, required_seconds=required)
        if required <= seconds:
            extension = int(min(4, seconds // required))
            begin(3, "chains")
            chains = noise_chains(posterior, data, max_extension=extension, seed=seed, progress=progress)
            begin(4, "modes")
            modes = find_modes(chains.target, progress=progress)
            begin(5, "gap to the exact posterior")
            gap = elbo_gap(posterior, data, chains, samples, seed)
            begin(6, "agreement with the chains")
            report = replace(
                report,
                chains=chains,
                gap=gap,
                agreement=agreement(posterior, data, chains, test, seed=seed),
                modes=len(modes),
                missed=modes.missed(chains),
            )
    if progress:
        print(report)
    return report
