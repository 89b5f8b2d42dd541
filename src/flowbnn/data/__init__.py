"""Data sets, each made from a seed, and a loader for what lies in memory."""

from flowbnn.data.clusters import best_possible, clusters, true_probability
from flowbnn.data.digits import Digits, load_digits
from flowbnn.data.loader import TensorLoader

__all__ = ["Digits", "TensorLoader", "best_possible", "clusters", "load_digits", "true_probability"]
