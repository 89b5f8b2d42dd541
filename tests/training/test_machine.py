"""What torch's compiler is told; what the C library is: test_resume.py, in a process of its own."""

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
