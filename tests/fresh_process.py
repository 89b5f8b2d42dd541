"""Checks that need a new process, which test_fresh_process.py runs as a script.

They check that imports change no global state, which packages are imported on use only, and what is said if one is missing. They load
posteriors that another process has saved, and call the command line. The memory use of forward passes and the loaded predictions are
printed as one line of JSON. A process that has run other tests already holds memory, so these numbers would be wrong there.
"""

import json
import logging
import random
import resource
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution

INPUTS = torch.ones(2, 4)


def state():
    """Returns the global state that an import could change."""
    return (
        Distribution._validate_args,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.initial_seed(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        list(warnings.filters),
    )


def memory():
    """Returns the peak memory of one tensor, and the page faults of twenty passes over feature maps of 48 MB."""
    from flowbnn.compare.measurement import PeakMemory
    from flowbnn.training.device import raise_malloc_trim_threshold

    peak = PeakMemory()
    tensor = torch.ones(30 * 2**20)
    result = {"peak": peak.read(), "value": float(tensor[0]), "faults": []}
    del tensor
    raise_malloc_trim_threshold()

    def run_passes(number, size):
        for _ in range(number):
            maps = [torch.ones(2**18 * size) for _ in range(48 // size)]
            del maps

    for size in (4, 8, 16):
        run_passes(3, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run_passes(20, size)
        result["faults"].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return result


def missing_packages():
    """Returns what is said about packages that are not installed."""
    missing = {}
    sys.modules["matplotlib"] = sys.modules["sklearn"] = None
    try:
        fb.predictive.CategoricalPredictive(torch.zeros(1, 1, 2)).plot_reliability(torch.tensor([0]))
    except fb.FlowBNNError as error:
        missing["matplotlib"] = f"{error.kind}: {error}"
    try:
        import flowbnn.sklearn  # noqa: F401
    except ImportError as error:
        missing["sklearn"] = str(error)
    del sys.modules["matplotlib"], sys.modules["sklearn"]
    return missing


def predictions(folder):
    """Returns samples of the predictions of saved posteriors, which are loaded into networks with other weights."""
    samples = {}
    for path in folder.glob("*.safetensors"):
        network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        posterior = fb.load_posterior(path, network)
        samples[path.stem] = posterior.predict(INPUTS, 4, seed=0).samples.double().flatten().tolist()
    return samples


def own_likelihood(folder):
    """Returns the mean prediction and the setting of a likelihood of the user, and the errors before its class is known."""
    path, errors = folder / "own" / "posterior.safetensors", []
    for options in ({}, {"likelihood": fb.likelihoods.Poisson}):
        if options:
            sys.path.insert(0, str(folder))
            from laplace_noise import LaplaceNoise
        try:
            fb.load_posterior(path, nn.Linear(4, 1), **options)
        except fb.errors.FlowBNNError as error:
            errors.append([error.kind, error.argument, str(error).count("\n")])
    posterior = fb.load_posterior(path, nn.Linear(4, 1), likelihood=LaplaceNoise)
    mean = posterior.predict(INPUTS).mean.flatten().tolist()
    return {"errors": errors, "mean": mean, "scale": posterior.likelihood.scale}


if __name__ == "__main__":
    before = state()
    import flowbnn as fb

    assert state() == before
    assert not {"matplotlib", "rich", "sklearn"} & set(sys.modules)
    # without Triton, nothing calls the operator of its kernels, and registering it takes time
    assert ("flowbnn.kernels.gpu" in sys.modules) == (find_spec("triton") is not None)
    assert not logging.root.handlers
    report = memory()
    warnings.simplefilter("ignore")
    import flowbnn_studies  # noqa: F401

    lazy = {"matplotlib", "rich", "scipy.interpolate", "sklearn"}  # few commands need them
    assert not lazy & set(sys.modules), lazy & set(sys.modules)
    saved = Path(sys.argv[1])
    report |= {"missing": missing_packages(), "loaded": predictions(saved), "own": own_likelihood(saved)}
    print(json.dumps(report), flush=True)
    sys.argv = ["flowbnn", "run", "digit"]
    runpy.run_module("flowbnn_studies", run_name="__main__")
