"""Diagnostics of a posterior: convergence, Pareto k-hat, evidence, agreement with reference chains, modes, collapsed layers."""

from flowbnn.diagnostics.agreement import agreement
from flowbnn.diagnostics.evidence import evidence, pareto_k
from flowbnn.diagnostics.gap import elbo_gap
from flowbnn.diagnostics.marginals import Marginal, count_modes, marginal
from flowbnn.diagnostics.modes import modes
from flowbnn.diagnostics.noise_chains import noise_chains
from flowbnn.diagnostics.report import diagnose
from flowbnn.diagnostics.simulation import simulation_ranks
from flowbnn.metrics.convergence import effective_sample_size, split_rhat, standard_error
from flowbnn.metrics.pareto import pareto_smoothed
from flowbnn.noise.collapse import LayerHealth, health_warnings, posterior_health

__all__ = [
    "LayerHealth",
    "Marginal",
    "agreement",
    "count_modes",
    "diagnose",
    "effective_sample_size",
    "elbo_gap",
    "evidence",
    "health_warnings",
    "marginal",
    "modes",
    "noise_chains",
    "pareto_k",
    "pareto_smoothed",
    "posterior_health",
    "simulation_ranks",
    "split_rhat",
    "standard_error",
]
