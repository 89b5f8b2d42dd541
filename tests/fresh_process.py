"""What only a process without a past can show, run as a script by test_fresh_process.py, whose imports serve it all.

That importing the library changes nothing global; the memory that passes take, as one line of JSON: a process that has run tests has
memory at hand that it need not ask for; and last, what the command line says.
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
    """What an import could have changed for others."""
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
    """The peak of what one tensor takes, and the pages that twenty passes over maps of 48 MB have faulted in."""
    from flowbnn.compare.measurement import PeakMemory
    from flowbnn.training.device import raise_malloc_trim_threshold

    peak = PeakMemory()
    held = torch.ones(30 * 2**20)
    answer = {"peak": peak.read(), "value": float(held[0]), "faults": []}
    del held
    raise_malloc_trim_threshold()

    def passes(number, size):
        for _ in range(number):
            maps = [torch.ones(2**18 * size) for _ in range(48 // size)]
            del maps

    for size in (4, 8, 16):
        passes(3, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        passes(20, size)
        answer["faults"].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return answer


if __name__ == "__main__":
    before = state()
    import flowbnn  # noqa: F401

    assert state() == before
    assert not {"matplotlib.pyplot", "rich"} & set(sys.modules)
    assert not logging.root.handlers
    print(json.dumps(memory()), flush=True)
    warnings.simplefilter("ignore")
    import flowbnn_studies  # noqa: F401

    late = {"matplotlib", "rich", "scipy.interpolate", "sklearn"}  # few commands need them, all would wait
    assert not late & set(sys.modules), late & set(sys.modules)
    sys.argv = ["flowbnn", "run", "digit"]
    runpy.run_module("flowbnn_studies", run_name="__main__")
