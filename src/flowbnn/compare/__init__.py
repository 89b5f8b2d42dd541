"""Comparison of methods on a user's own network and data."""

from flowbnn.compare.comparison import Comparison
from flowbnn.compare.experiment import compare

__all__ = ["Comparison", "compare"]
