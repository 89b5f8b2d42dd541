"""What torch's compiler and the C library are told."""

import platform
import resource
import subprocess
import sys
import warnings

import pytest

from flowbnn.training.device import quiet_compiler


def test_remarks_of_the_compiler_are_no_errors_where_warnings_are():
    told = {"message": "Online softmax is disabled", "category": UserWarning, "filename": "x.py", "lineno": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_compiler():
            warnings.warn_explicit(**told, module="torch._inductor.lowering")
            with pytest.raises(UserWarning, match="Online"):
                warnings.warn_explicit(**told, module="flowbnn.noise")
        with pytest.raises(UserWarning, match="Online"):
            warnings.warn_explicit(**told, module="torch._inductor.lowering")


# in a process of its own: one that has run other tests has memory at hand that it need not ask for
MEMORY = """
import resource, torch
from flowbnn.diagnostics.cost import PeakMemory
from flowbnn.training.device import keep_memory
memory = PeakMemory()
held = torch.ones(30 * 2**20)
print(memory.read(), float(held[0]))
del held
keep_memory()
def passes(number, size):  # over maps of 48 MB in all
    for _ in range(number):
        maps = [torch.ones(2**18 * size) for _ in range(48 // size)]
        del maps
for size in (4, 8, 16):
    passes(3, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    passes(20, size)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_is_seen_or_not_told_and_kept_from_pass_to_pass():
    """Pages that twenty passes have faulted in: next to none, where it was each page in every pass."""
    peak, value, *found = subprocess.check_output([sys.executable, "-c", MEMORY], text=True).split()
    assert value == "1.0"
    assert peak == "None" or 110 <= float(peak) < 400
    assert len(found) == 3
    if platform.libc_ver()[0] == "glibc":
        assert max(map(int, found)) < 0.02 * 20 * 48 * 2**20 / resource.getpagesize()
