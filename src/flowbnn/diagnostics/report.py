"""One table and one sentence: is the posterior good, and could a richer one matter here?"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flowbnn.diagnostics.agreement import TEST, Agreement, agreement, climb
from flowbnn.diagnostics.evidence import Draws, Gap, ParetoK, elbo_gap, pareto_k
from flowbnn.diagnostics.noise_chains import NoiseChains, noise_chains, seconds_for
from flowbnn.diagnostics.noise_target import DENSE, NoiseTarget
from flowbnn.errors import pluralize
from flowbnn.options import NonNegative, Seed, checked
from flowbnn.posterior.base import Posterior

SMALL = 0.01  # nats for each example: a gap that predictions do not show
LEAST = 1.0  # nat in all: a gap that is small however few the examples
NEAR = 0.03  # total variation that hardly anyone would notice


@dataclass(frozen=True, eq=False)
class Report:
    """What :func:`diagnose` found; ``print(report)`` shows the table and the sentence.

    Args:
        pareto: importance sampling from the posterior.
        dimensions, examples: of the noise, and of the data.
        chains, gap, agreement: None where chains were left out.
        modes, missed: distinct maxima of the exact density that climbs from the prior end at, and those that no chain has visited; 0
            where chains were left out.
        needed: seconds that chains should take; infinite where that is beyond all limits, or was not looked at.
    """

    pareto: ParetoK
    dimensions: int
    examples: int
    chains: NoiseChains | None = None
    gap: Gap | None = None
    agreement: Agreement | None = None
    modes: int = 0
    missed: int = 0
    needed: float = math.inf

    @property
    def judged(self) -> bool:
        """Whether chains that have mixed, and have been at every mode, stand behind the verdict."""
        return self.agreement is not None and self.agreement.certified and not self.missed

    @property
    def vouched(self) -> bool:
        """Whether importance sampling alone says that the posterior is good: usable weights, and a small gap by them."""
        near = self.pareto.gap < max(LEAST, SMALL * self.examples)
        return self.pareto.verdict != "bad" and near and not self.missed  # which its own draws do not see

    @property
    def good(self) -> bool:
        """Whether predictions could hardly be nearer to those of the exact posterior."""
        if self.agreement is None or not self.judged:
            return self.vouched
        return self.agreement.variation <= max(NEAR, 1.5 * self.agreement.variation_floor)

    @property
    def richer(self) -> str:
        """What a posterior would need to be better by enough to matter: ``"nothing"``, or the largest part of the gap."""
        if self.gap is None or self.agreement is None or not self.judged:
            return "nothing" if self.pareto.verdict == "good" and self.vouched else "unknown"
        if self.good and (self.gap.per_example < SMALL or self.agreement.within_floor):
            return "nothing"
        parts = {"within": self.gap.within, "across": self.gap.across, "shape": self.gap.rest}
        return max(parts, key=lambda name: parts[name] if parts[name] == parts[name] else -1.0)

    @property
    def sentence(self) -> str:
        unknown = "Importance sampling cannot vouch for this posterior"
        first = (
            f"This posterior is {'' if self.good else 'not '}good" if self.good or self.judged else unknown
        )
        need = {
            "nothing": "a richer one could hardly matter here",
            "unknown": "whether a richer one would matter only chains can tell "
            + (f"({self._unrun})" if self.chains is None else "that have been at every mode"),
            "within": "one with correlation within layers (joint='layers') could matter here",
            "across": "one with correlation across layers (joint='full', or 'chain' for large networks) could matter here",
            "shape": "correlation would not help it; train it longer, or put a flow on it",
        }[self.richer]
        if self.chains is not None and not self.judged:
            why = f"have not mixed, R-hat {self.chains.rhat:.3f}"
            if self.missed:
                why = f"have missed {self.missed} of {self.modes} modes"
            first += f" ({'by its own draws only: ' if self.good else ''}the chains {why})"
        verdict = f"{first}, {'and' if self.good == (self.richer == 'nothing') else 'but'} {need}."
        if self.modes > 1:
            verdict += (
                f" The exact posterior has {self.modes} modes or more: diagnostics.modes() gives them, "
                "evidence(method='tempered') weighs"
                f" "
                "them, and fb.ModeEnsemble has a member at each."
            )
        return verdict

    @property
    def _unrun(self) -> str:
        """Why there are no chains."""
        if self.dimensions > DENSE:
            return f"which run up to {DENSE:,} dimensions"
        if self.needed < math.inf:
            return f"which should take {self.needed:.0f} s: give more seconds="
        return "which are run where seconds= allows"

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and what to compare it with."""
        k, gap, chains, near = self.pareto, self.gap, self.chains, self.agreement
        rows = [
            ("noise", pluralize(self.dimensions, "dimension"), pluralize(self.examples, "example")),
            ("Pareto k-hat", f"{k.k:.2f}", f"{k.verdict}: below 0.5 good, below {k.usable:.2f} usable"),
            ("ELBO", f"{k.elbo:.2f} ± {k.elbo_error:.2f}", "nats"),
        ]
        if gap is None or chains is None or near is None:
            rows.append(
                ("log-evidence", f"{k.evidence:.2f} ± {k.evidence_error:.2f}", "by importance sampling")
            )
            if k.verdict != "bad":
                rows.append(("gap", f"{k.gap:.2f}", f"{k.gap / self.examples:.4f} per example"))
            return rows
        draws, halves = chains.position[..., 0].numel(), "between halves of the chains"
        best = gap.evidence
        return [
            *rows,
            ("log-evidence", f"{best.value:.2f} ± {best.error:.2f}", f"by {best.method}"),
            ("gap", f"{gap.nats:.2f} ± {gap.error:.2f}", f"{gap.per_dimension:.4f} per dimension, {gap.per_example:.4f} per example"),
            ("  within layers", f"{gap.within:.2f}", "nats that correlation there would gain"),
            ("  across layers", f"{gap.across:.2f}", "nats that correlation there would gain"),
            ("  rest", f"{gap.rest:.2f}", "means, widths, shape"),
            ("chains", f"R-hat {chains.rhat:.3f}", f"{draws:,} draws worth {chains.effective:.0f}, {chains.divergences} divergences"),
            ("total variation", f"{near.variation:.4f}", f"{near.variation_floor:.4f} {halves}"),
            ("agreement", f"{near.agreement:.1%}", f"{near.agreement_floor:.1%} {halves}"),
            ("modes", f"{self.modes}", f"found by climbs, {self.missed} missed by the chains"),
            ("NLL", f"{near.excess:+.4f}", "against the chains' predictions"),
        ]  # fmt: skip

    def __str__(self) -> str:
        rows = self.rows()
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{wide[0]}}  {value:>{wide[1]}}  {beside}" for name, value, beside in rows]
        return "\n".join([*lines, self.sentence])


@checked
def diagnose(
    posterior: Posterior,
    loader: Iterable[Any],
    samples: Draws = 400,
    seconds: NonNegative = 300.0,
    test: Iterable[Any] | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Report:
    """Say how good a posterior of noise is, and whether a richer one could matter: print a table and a sentence.

    Importance sampling always; chains, and climbs for modes, where chains should take no longer than ``seconds``, by the time that a
    few transitions take.

    Args:
        posterior: of noise, fitted.
        loader: the data that it was fitted to; they must be the same in every pass.
        samples: draws for importance sampling.
        seconds: for chains; 0 leaves them out.
        test: where predictions are compared with those of the chains; at the loader's data unless given.
        seed: of all draws.
        progress: show a bar, and print.

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
    target = NoiseTarget(posterior, loader, seed)
    data, test = [target.data], None if test is None else [target.read(test, TEST)]
    needed = seconds_for(target, seconds) if target.dim <= DENSE and seconds else math.inf
    report = Report(pareto_k(posterior, data, samples, seed), target.dim, target.count, needed=needed)
    if needed <= seconds:
        longest = int(min(4, seconds // needed))
        chains = noise_chains(posterior, data, longest=longest, seed=seed, progress=progress)
        gap = elbo_gap(posterior, data, chains, samples, seed)
        near = agreement(posterior, data, chains, test, seed=seed)
        found = climb(chains.target)
        report = replace(
            report, chains=chains, gap=gap, agreement=near, modes=len(found), missed=found.missed(chains)
        )
    if progress:
        print(report)
    return report
