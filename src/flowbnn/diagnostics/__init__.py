"""Is the posterior any good?"""

from flowbnn.diagnostics.collapse import LayerHealth, posterior_health
from flowbnn.diagnostics.modes import Marginal, count_modes, marginal

__all__ = ["LayerHealth", "Marginal", "count_modes", "marginal", "posterior_health"]
