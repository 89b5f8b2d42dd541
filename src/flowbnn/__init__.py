"""flowbnn turns a trained PyTorch network into a Bayesian one, by noise from learned normalizing flows.

>>> import torch, flowbnn as fb
>>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
>>> bayesian = fb.to_stochastic(network, {"0": fb.noise.NormalPlanar(length=2), "*": fb.noise.NormalAffine()})
>>> bayesian(torch.ones(5, 2)).shape
torch.Size([5, 3])

Recipes of noise are in :mod:`flowbnn.noise`, observation models in :mod:`flowbnn.likelihoods`, flows in :mod:`flowbnn.transforms` and
:mod:`flowbnn.distributions`, posteriors in :mod:`flowbnn.posterior`, and training options in :mod:`flowbnn.training`.
"""

import gc

collects_garbage = gc.isenabled()
gc.disable()  # an import makes no garbage, and a pass over the objects of torch takes a quarter of its time
try:
    from flowbnn import (
        active,
        conformal,
        data,
        density,
        diagnostics,
        distributions,
        flows,
        likelihoods,
        metrics,
        models,
        nets,
        noise,
        plots,
        posterior,
        predictive,
        training,
        transforms,
        vae,
    )
    from flowbnn.active import acquire
    from flowbnn.calibrate import calibrate, cross_calibrate
    from flowbnn.compare import compare
    from flowbnn.conformal import conformalize, control_risk
    from flowbnn.convert import describe, to_deterministic, to_stochastic
    from flowbnn.density import fit_density, fit_target, load_density
    from flowbnn.diagnostics import diagnose
    from flowbnn.errors import FlowBNNError, FlowBNNWarning
    from flowbnn.export import export
    from flowbnn.fit import fit
    from flowbnn.methods import (
        DAMP,
        HMC,
        IVON,
        MAP,
        MLE,
        MNF,
        NUTS,
        SGLD,
        SWAG,
        VBLL,
        BayesByBackprop,
        DeepEnsemble,
        Laplace,
        LastLayerRefit,
        MatrixScaling,
        MCDropout,
        ModeEnsemble,
        NodeNoise,
        Temperature,
        VectorScaling,
    )
    from flowbnn.networks import select_output
    from flowbnn.noise import noise_mode, parameter_groups
    from flowbnn.objectives import ELBO
    from flowbnn.posterior import Posterior, evaluate, gated, load_posterior
    from flowbnn.version import __version__ as __version__
finally:
    if collects_garbage:
        gc.enable()

__all__ = [
    "DAMP",
    "ELBO",
    "HMC",
    "IVON",
    "MAP",
    "MLE",
    "MNF",
    "NUTS",
    "SGLD",
    "SWAG",
    "VBLL",
    "BayesByBackprop",
    "DeepEnsemble",
    "FlowBNNError",
    "FlowBNNWarning",
    "Laplace",
    "LastLayerRefit",
    "MCDropout",
    "MatrixScaling",
    "ModeEnsemble",
    "NodeNoise",
    "Posterior",
    "Temperature",
    "VectorScaling",
    "acquire",
    "active",
    "calibrate",
    "compare",
    "conformal",
    "conformalize",
    "control_risk",
    "cross_calibrate",
    "data",
    "density",
    "describe",
    "diagnose",
    "diagnostics",
    "distributions",
    "evaluate",
    "export",
    "fit",
    "fit_density",
    "fit_target",
    "flows",
    "gated",
    "likelihoods",
    "load_density",
    "load_posterior",
    "metrics",
    "models",
    "nets",
    "noise",
    "noise_mode",
    "parameter_groups",
    "plots",
    "posterior",
    "predictive",
    "select_output",
    "to_deterministic",
    "to_stochastic",
    "training",
    "transforms",
    "vae",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
