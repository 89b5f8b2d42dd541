"""Checks that need a new process, which test_fresh_process.py runs as a script.

They check that imports change no global state, print the memory use of forward passes as one line of JSON, and call the command line.
A process that has run other tests already holds memory, so these numbers would be wrong there.
"""

import json
import logging
import random
import resource
import runpy
import sys
import warnings

import numpy as np
import torch
from torch.distributions import Distribution


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


if __name__ == "__main__":
    before = state()
    import flowbnn  # noqa: F401

    assert state() == before
    assert not {"matplotlib.pyplot", "rich"} & set(sys.modules)
    assert not logging.root.handlers
    print(json.dumps(memory()), flush=True)
    warnings.simplefilter("ignore")
    import flowbnn_studies  # noqa: F401

    lazy = {"matplotlib", "rich", "scipy.interpolate", "sklearn"}  # few commands need them
    assert not lazy & set(sys.modules), lazy & set(sys.modules)
    sys.argv = ["flowbnn", "run", "digit"]
    runpy.run_module("flowbnn_studies", run_name="__main__")
