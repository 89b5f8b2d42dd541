"""One file for each figure or table of the literature: its settings, the published numbers, a run that writes results.json.

>>> [study.name for study in studies()][:8]
['two-clusters', 'flow-length', 'digits', 'linear-regression', 'regression-1d', 'clusters-2d', 'elephant', 'uci']
>>> [study.name for study in studies()][8:13]
['calibrate', 'calibrate-cifar10', 'posterior-quality', 'when-it-matters', 'mode-ensembles']
>>> [study.name for study in studies()][13:18]
['compare', 'mnist-mlp', 'elephant-fashion', 'rotated-mnist', 'cifar-5']
>>> [study.name for study in studies()][18:23]
['dlgm-planar', 'autoencoder-vs-vae', 'novelty-by-density', 'images', 'tabular-densities']
>>> [study.name for study in studies()][23:-4]
['densities-2d', 'change-of-variables', 'energies', 'why-flows']
>>> [study.name for study in studies()][-4:]
['lenet-fashion', 'lenet-cifar10', 'vgg16-cifar10', 'resnet18-cifar10']
"""

from flowbnn.results import Metric, Parts
from flowbnn_studies.cifar_5 import Cifar5
from flowbnn_studies.clusters_2d import Clusters2d
from flowbnn_studies.compare import CompareStudy
from flowbnn_studies.digits import DigitsStudy
from flowbnn_studies.elephant import Elephant, ElephantFashion
from flowbnn_studies.flow_length import FlowLength
from flowbnn_studies.flows.autoencoder_vs_vae import AutoencoderVsVae
from flowbnn_studies.flows.change_of_variables import ChangeOfVariables
from flowbnn_studies.flows.densities_2d import Densities2d
from flowbnn_studies.flows.dlgm_planar import DlgmPlanar
from flowbnn_studies.flows.energies import Energies
from flowbnn_studies.flows.image_flows import ImageFlows
from flowbnn_studies.flows.novelty_by_density import NoveltyByDensity
from flowbnn_studies.flows.tabular_densities import TabularDensities
from flowbnn_studies.flows.why_flows import WhyFlows
from flowbnn_studies.images.rivals import RESNET18
from flowbnn_studies.images.study import IMAGE_STUDIES
from flowbnn_studies.linear_regression import LinearRegression
from flowbnn_studies.mnist_mlp import MnistMlp
from flowbnn_studies.posteriors.calibrate import CalibrateStudy
from flowbnn_studies.posteriors.calibrate_cifar10 import CalibrateCifar10
from flowbnn_studies.posteriors.mode_ensembles import ModeEnsembles
from flowbnn_studies.posteriors.posterior_quality import PosteriorQuality
from flowbnn_studies.posteriors.when_it_matters import WhenItMatters
from flowbnn_studies.regression_1d import Regression1d
from flowbnn_studies.rotated_mnist import RotatedMnist
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.run import run_study
from flowbnn_studies.runner.study import Findings, Study, Variant, get_study, register_study, studies
from flowbnn_studies.runner.workers import open_workers
from flowbnn_studies.two_clusters import TwoClusters
from flowbnn_studies.uci import Uci

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

for _study in (
    TwoClusters(),
    FlowLength(),
    DigitsStudy(),
    LinearRegression(),
    Regression1d(),
    Clusters2d(),
    Elephant(),
    Uci(),
    CalibrateStudy(),
    CalibrateCifar10(),
    PosteriorQuality(),
    WhenItMatters(),
    ModeEnsembles(),
    CompareStudy(),
    MnistMlp(),
    ElephantFashion(),
    RotatedMnist(),
    Cifar5(),
    DlgmPlanar(),
    AutoencoderVsVae(),
    NoveltyByDensity(),
    ImageFlows(),
    TabularDensities(),
    Densities2d(),
    ChangeOfVariables(),
    Energies(),
    WhyFlows(),
    *IMAGE_STUDIES,
    RESNET18,
):
    register_study(_study)
