"""One file for each figure or table of the literature: its settings, the published numbers, a run that writes results.json.

>>> [study.name for study in studies()][:7]
['two-clusters', 'flow-length', 'digits', 'regression-1d', 'clusters-2d', 'elephant', 'compare']
>>> [study.name for study in studies()][7:]
['lenet-fashion', 'lenet-cifar10', 'vgg16-cifar10']
"""

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.clusters_2d import Clusters2d
from flowbnn_studies.comparing import CompareStudy, Comparison, compare
from flowbnn_studies.digits import DigitsStudy
from flowbnn_studies.elephant import Elephant
from flowbnn_studies.flow_length import FlowLength
from flowbnn_studies.lenet_cifar10 import LeNetCifar10
from flowbnn_studies.lenet_fashion import LeNetFashion
from flowbnn_studies.regression_1d import Regression1d
from flowbnn_studies.runner.base import Findings, Metric, Parts, Study, Variant
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.running import run_study
from flowbnn_studies.runner.workers import open_workers
from flowbnn_studies.two_clusters import TwoClusters
from flowbnn_studies.vgg16_cifar10 import VGG16Cifar10

__all__ = [
    "Comparison",
    "Findings",
    "Job",
    "Metric",
    "Parts",
    "Study",
    "Variant",
    "compare",
    "get_study",
    "open_workers",
    "register_study",
    "run_study",
    "studies",
]

_STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        TwoClusters(),
        FlowLength(),
        DigitsStudy(),
        Regression1d(),
        Clusters2d(),
        Elephant(),
        CompareStudy(),
        LeNetFashion(),
        LeNetCifar10(),
        VGG16Cifar10(),
    )
}


def studies() -> list[Study]:
    """Every study there is."""
    return list(_STUDIES.values())


def get_study(name: str) -> Study:
    """A study by its name.

    >>> get_study("two-cluster")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: there is no study 'two-cluster'; did you mean 'two-clusters' or 'clusters-2d'?
    """
    if name not in _STUDIES:
        raise FlowBNNError(f"there is no study '{name}'{nearest(name, _STUDIES)}")
    return _STUDIES[name]


def register_study(study: Study) -> None:
    """Add a study of your own; with several processes the module that registers it must be imported by each."""
    _STUDIES[study.name] = study
