"""How good is a posterior of noise, and could a richer one matter?"""

from flowbnn.quality.chains import noise_chains
from flowbnn.quality.compared import agreement, modes, simulation_ranks
from flowbnn.quality.evidence import elbo_gap, evidence, pareto_k
from flowbnn.quality.report import diagnose

__all__ = [
    "agreement",
    "diagnose",
    "elbo_gap",
    "evidence",
    "modes",
    "noise_chains",
    "pareto_k",
    "simulation_ranks",
]
