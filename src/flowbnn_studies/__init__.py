"""One file for each figure or table of the literature: its settings, the published numbers, a run that writes results.json.

>>> [study.name for study in studies()][:7]
['two-clusters', 'flow-length', 'digits', 'regression-1d', 'clusters-2d', 'elephant', 'compare']
>>> [study.name for study in studies()][7:]
['lenet-fashion', 'lenet-cifar10', 'vgg16-cifar10']
"""

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.results import Metric, Parts
from flowbnn_studies.clusters_2d import Clusters2d
from flowbnn_studies.compare import CompareStudy
from flowbnn_studies.digits import DigitsStudy
from flowbnn_studies.elephant import Elephant
from flowbnn_studies.flow_length import FlowLength
from flowbnn_studies.images.study import IMAGE_STUDIES
from flowbnn_studies.regression_1d import Regression1d
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.run import run_study
from flowbnn_studies.runner.study import Findings, Study, Variant
from flowbnn_studies.runner.workers import open_workers
from flowbnn_studies.two_clusters import TwoClusters

__all__ = [
    "Findings",
    "Job",
    "Metric",
    "Parts",
    "Study",
    "Variant",
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
        *IMAGE_STUDIES,
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
        raise FlowBNNError(f"there is no study '{name}'{nearest(name, _STUDIES)}", argument="study")
    return _STUDIES[name]


def register_study(study: Study) -> None:
    """Add a study of your own; with several processes the module that registers it must be imported by each."""
    _STUDIES[study.name] = study
