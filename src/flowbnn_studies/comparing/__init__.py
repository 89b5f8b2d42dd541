"""On this network and this data, which method should I use, and what does it cost?"""

from flowbnn_studies.comparing.comparison import Comparison, compare
from flowbnn_studies.comparing.registry import DATA, NETWORKS
from flowbnn_studies.comparing.study import CompareStudy

__all__ = ["DATA", "NETWORKS", "CompareStudy", "Comparison", "compare"]
