"""Is the posterior any good?"""

from flowbnn.diagnostics.chains import effective_sample_size, split_rhat, standard_error
from flowbnn.diagnostics.collapse import LayerHealth, health_warnings, posterior_health
from flowbnn.diagnostics.modes import Marginal, count_modes, marginal
from flowbnn.diagnostics.pareto import pareto_smoothed

__all__ = [
    "LayerHealth",
    "Marginal",
    "count_modes",
    "effective_sample_size",
    "health_warnings",
    "marginal",
    "pareto_smoothed",
    "posterior_health",
    "split_rhat",
    "standard_error",
]
