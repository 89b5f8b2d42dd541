"""Every case of the contract suite."""

from case import Case
from cases_conditioned import CASES as CONDITIONED
from cases_dynamics import CASES as DYNAMICS
from cases_images import CASES as IMAGES
from cases_maps import CASES as MAPS
from cases_sums import CASES as SUMS

__all__ = ["CASES"]

CASES: list[Case] = [*SUMS, *MAPS, *CONDITIONED, *DYNAMICS, *IMAGES]
