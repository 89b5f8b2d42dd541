"""What torch's compiler and the C library are told."""

import platform
import resource
import subprocess
import sys
import warnings

import pytest

from flowbnn.training.machine import unconcerned


def test_remarks_of_the_compiler_are_no_errors_where_warnings_are():
    told = {"message": "Online softmax is disabled", "category": UserWarning, "filename": "x.py", "lineno": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unconcerned():
            warnings.warn_explicit(**told, module="torch._inductor.lowering")
            with pytest.raises(UserWarning, match="Online"):
                warnings.warn_explicit(**told, module="flowbnn.layers")
        with pytest.raises(UserWarning, match="Online"):
            warnings.warn_explicit(**told, module="torch._inductor.lowering")


PAGES = """
import resource, torch
from flowbnn.training.machine import keep_memory
if {keep}:
    keep_memory()
def passes(number):
    for _ in range(number):
        maps = [torch.ones(2**21) for _ in range(4)]  # 8 MB each
        del maps
passes(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
passes(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")
def test_memory_is_kept_from_pass_to_pass():
    """Pages that twenty passes over 32 MB of maps have faulted in: next to none, where it was each of them in every pass."""
    found = {
        keep: int(subprocess.check_output([sys.executable, "-c", PAGES.format(keep=keep)], text=True))
        for keep in (False, True)
    }
    every = 20 * 2**25 / resource.getpagesize()
    if found[False] < 0.5 * every:
        pytest.skip("this system keeps its memory, or has it in larger pages")
    assert found[True] < 0.05 * every
