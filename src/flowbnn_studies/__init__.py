"""Studies: one file for each figure or table of the literature, with settings, published numbers and a run that writes
results.json.

>>> [study.name for study in studies()][:4]
['two-clusters', 'flow-length', 'digits', 'linear-regression']
"""

from importlib import import_module

from flowbnn.compare.results import Metric, SeedResults
from flowbnn_studies.runner.run import open_workers, run_study
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, get_study, register_study, studies

__all__ = [
    "Findings",
    "Job",
    "Metric",
    "Numbers",
    "SeedResults",
    "Story",
    "Study",
    "Variant",
    "get_study",
    "open_workers",
    "register_study",
    "run_study",
    "studies",
]

# file and class (or tuple of studies), in the order of ``flowbnn list`` and of the report
ORDER = (
    "two_clusters:TwoClusters",
    "flow_length:FlowLength",
    "digits:DigitsStudy",
    "linear_regression:LinearRegression",
    "regression_1d:Regression1d",
    "clusters_2d:Clusters2d",
    "elephant:Elephant",
    "uci:Uci",
    "posteriors.calibrate:CalibrateStudy",
    "posteriors.calibrate_cifar10:CalibrateCifar10",
    "posteriors.posterior_quality:PosteriorQuality",
    "posteriors.when_it_matters:WhenItMatters",
    "posteriors.mode_ensembles:ModeEnsembles",
    "compare:CompareStudy",
    "mnist_mlp:MnistMlp",
    "elephant:ElephantFashion",
    "rotated_mnist:RotatedMnist",
    "cifar_5:Cifar5",
    "flows.dlgm_planar:DlgmPlanar",
    "flows.autoencoder_vs_vae:AutoencoderVsVae",
    "flows.novelty_by_density:NoveltyByDensity",
    "flows.image_flows:ImageFlows",
    "flows.tabular_densities:TabularDensities",
    "flows.densities_2d:Densities2d",
    "flows.change_of_variables:ChangeOfVariables",
    "flows.conditional_density:ConditionalDensityStudy",
    "flows.density_gate:DensityGateStudy",
    "flows.energies:Energies",
    "flows.why_flows:WhyFlows",
    "images.study:IMAGE_STUDIES",
)
for _entry in ORDER:
    _file, _, _name = _entry.partition(":")
    _attribute = getattr(import_module(f"flowbnn_studies.{_file}"), _name)
    for _study in _attribute if isinstance(_attribute, tuple) else (_attribute,):
        register_study(_study() if isinstance(_study, type) else _study)
