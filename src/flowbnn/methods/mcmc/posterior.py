"""Posteriors made of draws of Markov chains, and their convergence diagnostics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn import plots
from flowbnn.errors import pluralize, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.mcmc.potential import LOG_NOISE, NoiseSites, noisy_weights
from flowbnn.metrics.convergence import MIN_DRAWS, arviz_is_installed, effective_sample_size, split_rhat
from flowbnn.noise.layout import layout_of
from flowbnn.options import Count, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.files import select_prefix
from flowbnn.posterior.weights import MemberPosterior, check_members
from flowbnn.training import History


def outputs_rhat(outputs: Tensor) -> float | None:
    """Returns the largest R-hat of function values ``[C, S, K]``, or None for fewer than 100 draws, for which it is too noisy."""
    if outputs.shape[1] < 100 or not arviz_is_installed():
        return None
    return float(split_rhat(outputs.double()).max())


@dataclass(frozen=True)
class ChainDiagnostics:
    """Convergence diagnostics of Markov chains.

    A network computes the same function with permuted hidden units, so chains may sample different permutations, and the R-hat of
    single weights says little. Check the function values (``*_outputs``: log-probabilities, or outputs of a regression, at training
    inputs) and the log-density.

    Args:
        rhat_outputs: Largest R-hat of the function values.
        ess_outputs: Smallest bulk effective sample size of the function values.
        tail_ess_outputs: Smallest tail effective sample size of the function values.
        rhat_density: R-hat of the log posterior density.
        ess_density: Bulk effective sample size of the log posterior density.
        rhat_weights: Largest R-hat of the weights (or noise variables).
        ess_weights: Smallest bulk effective sample size of the weights.
        tail_ess_weights: Smallest tail effective sample size of the weights.
        mixed_weights: Fraction of the weights with an R-hat below 1.05.
        divergences: Number of transitions whose energy error was too large for the step size.
        acceptance: Mean acceptance probability of the draws.
        step_size: Step size of every chain after warm-up.
        gradients: Mean number of gradient evaluations per transition.
        depth: Mean number of doublings of the trajectories of NUTS (0 for HMC).
        chains: Number of chains.
        draws: Number of draws of each chain.
    """

    rhat_outputs: float
    ess_outputs: float
    tail_ess_outputs: float
    rhat_density: float
    ess_density: float
    rhat_weights: float
    ess_weights: float
    tail_ess_weights: float
    mixed_weights: float
    divergences: int
    acceptance: float
    step_size: tuple[float, ...]
    gradients: float
    depth: float
    chains: int
    draws: int

    def __str__(self) -> str:
        return (
            f"{pluralize(self.chains, 'chain')} of {pluralize(self.draws, 'draw')}: R-hat {self.rhat_outputs:.3f} and ESS "
            f"{self.ess_outputs:.0f} of function values, R-hat {self.rhat_weights:.3f} of weights, "
            f"{pluralize(self.divergences, 'divergence')}, acceptance {self.acceptance:.2f}"
        )


class ChainPosterior(MemberPosterior):
    """Posterior made of the draws of Markov chains over weights.

    Args:
        model: Network.
        likelihood: Observation model of the targets.
        members: Weights ``{name: [C * S, ...]}``, chain after chain.
        history: Training record.
        record: Statistics of each draw ``[C, S]``: ``energy``, ``acceptance``, ``divergent``, ``gradients`` and ``depth``. It also has
            function values ``outputs`` ``[C, S, K]``, ``step_size`` of every chain, and ``log_noise`` ``[C, S, D]`` of learned noise.
        sampler: Name of the method and its settings, as plain values.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method, likelihood = fb.HMC(samples=25, warmup=25, chains=2, steps=5, epochs=0), fb.likelihoods.Gaussian(0.1)
    >>> posterior = method.fit(nn.Linear(1, 1), [(x, 2 * x)], likelihood=likelihood, seed=0, progress=False)
    >>> posterior.chains["weight"].shape, posterior.diagnostics().divergences
    (torch.Size([2, 25, 1, 1]), 0)
    """

    kind: ClassVar[str] = "chains"
    # between the 1.01 of Vehtari et al. (2021), strict for networks, and the classical 1.1
    max_rhat: ClassVar[float] = 1.05

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        *,
        record: Mapping[str, Tensor],
        sampler: Mapping[str, Any],
    ) -> None:
        log_noise = record.get(LOG_NOISE)
        super().__init__(
            model, likelihood, members, history, None if log_noise is None else log_noise.flatten(0, 1)
        )
        self.record, self.sampler = dict(record), dict(sampler)

    def __repr__(self) -> str:
        chains, draws = self.record["energy"].shape
        size = f"{pluralize(chains, 'chain')} of {pluralize(draws, 'draw')}"
        return f"{type(self).__name__}({self.sampler['method']}, {size}, {self.likelihood!r})"

    @property
    def chains(self) -> dict[str, Tensor]:
        """Sampled variables by chain, ``{name: [C, S, ...]}``."""
        shape = self.record["energy"].shape
        return {name: value.unflatten(0, shape) for name, value in self.members.items()}

    def diagnostics(self) -> ChainDiagnostics:
        """Computes R-hat, effective sample sizes, divergences and acceptance."""
        record = self.record
        outputs = _worst_diagnostics(record["outputs"].double())
        density = _worst_diagnostics(record["energy"][..., None])
        weights = _worst_diagnostics(*(value.flatten(2) for value in self.chains.values()))
        return ChainDiagnostics(
            *outputs[:3],
            *density[:2],
            *weights,
            divergences=int(record["divergent"].sum()),
            acceptance=float(record["acceptance"].mean()),
            step_size=tuple(record["step_size"].tolist()),
            gradients=float(record["gradients"].double().mean()),
            depth=float(record["depth"].double().mean()),
            chains=record["energy"].shape[0],
            draws=record["energy"].shape[1],
        )

    plot_trace, plot_ranks = plots.plot_trace, plots.plot_ranks

    @checked
    def warn_not_converged(self, thin: Count | None = None) -> None:
        """Warns if transitions diverged, or if the chains disagree.

        Args:
            thin: Number of transitions per draw. The default is that of the settings. It is larger if the run was extended.
        """
        divergent = self.record["divergent"]
        divergences = int(divergent.sum())
        if divergences:
            number = divergent.numel()
            text = f"{divergences} of {number} transitions diverged, so draws miss narrow regions; increase target_accept or warmup"
            warn(text, kind="divergence", divergences=divergences)
        rhat = outputs_rhat(self.record["outputs"])
        if rhat is not None and rhat > self.max_rhat:
            thin, warmup = 2 * (thin or self.sampler["thin"]), max(200, 2 * self.sampler["warmup"])
            advice = f"set thin={thin} and warmup={warmup}, and see posterior.diagnostics()"
            text = f"the chains have not converged (R-hat {rhat:.2f}); {advice}"
            warn(text, kind="rhat", rhat=rhat, thin=thin, warmup=warmup)

    def state(self) -> dict[str, Tensor]:
        members = {f"member.{name}": value for name, value in self.members.items()}
        return members | {f"record.{name}": value for name, value in self.record.items()}

    def settings(self) -> dict[str, Any]:
        return self.sampler

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        members = select_prefix(state, "member")
        record = {name: value.cpu() for name, value in select_prefix(state, "record").items()}
        posterior = cls(
            point.model, point.likelihood, members, point.history, record=record, sampler=settings
        )
        chains, draws = record["energy"].shape
        if chains * draws != len(posterior):
            raise ValueError(f"{len(posterior)} networks, {chains * draws} draws")
        for name, value in record.items():
            shape = value.shape[:2] if name in ("outputs", LOG_NOISE) else value.shape
            kind = {"divergent": torch.bool, "gradients": torch.int64, "depth": torch.int64}.get(name)
            fits = value.is_floating_point() if kind is None else value.dtype == kind
            if shape != ((chains,) if name == "step_size" else (chains, draws)) or not fits:
                raise ValueError(f"wrong {name}: {tuple(value.shape)}, {value.dtype}")
        return posterior


class NoiseChainPosterior(ChainPosterior):
    """Posterior made of the draws of Markov chains over one noise vector per layer.

    ``members`` and ``draws`` hold the noise, ``{layer: [C * S, dim]}``. ``sample`` and ``member`` return networks with the noise
    absorbed into their weights.
    """

    kind: ClassVar[str] = "noise-chains"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        modules = {name: self.model.get_submodule(name) for name in self.members}
        # the original weights, which predictions replace by scaled ones
        self.sites: NoiseSites = {name: (module, module.weight.detach()) for name, module in modules.items()}  # type: ignore[operator]

    def check_members(self, members: Mapping[str, Tensor]) -> None:
        modules = dict(self.model.named_modules())
        expected = {name: torch.empty(layout_of(modules[name]).dim) for name in members if name in modules}
        check_members(expected, members)

    @property
    def names(self) -> list[str]:
        return list(self.weights(0, 0))

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        return noisy_weights(self.sites, super().weights(index, seed))


def _worst_diagnostics(*groups: Tensor, columns: int = 4096) -> tuple[float, float, float, float]:
    """Returns the worst diagnostics of quantities ``[C, S, K]``.

    Args:
        groups: Groups of quantities.
        columns: Number of quantities to process at a time.

    Returns:
        Largest R-hat, smallest bulk and tail effective sample size, and the fraction with an R-hat below 1.05.
    """
    rhat, bulk, tail, mixed, count = 1.0, float("inf"), float("inf"), 0, 0
    for draws in (chunk for group in groups for chunk in group.split(columns, -1)):
        if draws.shape[1] < MIN_DRAWS:
            return (float("nan"),) * 4
        rhats = split_rhat(draws)
        rhat = max(rhat, float(rhats.max()))
        bulk = min(bulk, float(effective_sample_size(draws, "bulk").min()))
        tail = min(tail, float(effective_sample_size(draws, "tail").min()))
        mixed, count = mixed + int((rhats < ChainPosterior.max_rhat).sum()), count + rhats.numel()
    return rhat, bulk, tail, mixed / max(1, count)
