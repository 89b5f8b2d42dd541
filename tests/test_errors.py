"""Tests of the helpers that raise errors: their fields and the values in their messages."""

import pytest
import torch

from flowbnn.batches import output_tensor
from flowbnn.errors import (
    FlowBNNError,
    FlowBNNWarning,
    MissingPackageError,
    check_name,
    check_shape,
    nonfinite_error,
    optional_import,
    requirement_error,
    value_error,
    warn,
)


def test_a_missing_package_is_named_and_is_an_import_error():
    with pytest.raises(MissingPackageError) as caught, optional_import("plots", "abacus", "flowbnn[plots]"):
        import a_package_that_does_not_exist  # noqa: F401
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, FlowBNNError)
    assert (caught.value.kind, caught.value.fields["packages"]) == ("missing package", ["abacus"])
    assert "pip install flowbnn[plots]" in str(caught.value)


def test_other_errors_of_an_import_are_not_changed():
    with pytest.raises(OSError), optional_import("plots", "abacus", "flowbnn[plots]"):
        raise OSError


def test_only_unknown_names_are_refused():
    check_name("fc1", ["fc1", "fc2"], "layer")
    with pytest.raises(FlowBNNError) as caught:
        check_name("fc3", ["fc1", "conv"], "layer", kind="name", argument="layer")
    assert (caught.value.kind, caught.value.argument) == ("name", "layer")
    assert "'fc3'" in str(caught.value)
    assert "'fc1'" in str(caught.value)


@pytest.mark.parametrize("make", [value_error, requirement_error])
def test_messages_have_the_value_and_the_advice(make):
    error = make("targets", "integers", torch.float32, "use targets.long()", kind="dtype")
    assert error.kind == "dtype"
    assert "integers, got torch.float32; use targets.long()" in str(error)
    assert "got" not in str(requirement_error("score='margin'", "classes"))


def test_the_argument_of_an_error_can_differ_from_the_name_in_its_message():
    assert value_error("targets", "integers", "floats").argument == "targets"
    assert value_error("the output", "a tensor", "a dict", argument=None).argument is None
    with pytest.raises(FlowBNNError) as caught:
        check_shape("log_prob", torch.zeros(3, 2), (3,), argument="likelihood")
    assert (caught.value.kind, caught.value.argument) == ("shape", "likelihood")


def test_nonfinite_rows_are_counted():
    finite = torch.tensor([[True, True], [False, False], [True, False]])
    error = nonfinite_error("the inputs", finite, "remove them", kind="finite")
    assert (error.kind, error.fields["rows"]) == ("finite", 2)
    assert "2 of 3 rows" in str(error)
    assert "first in row 1" in str(error)


def test_outputs_that_are_no_tensors_are_described():
    with pytest.raises(FlowBNNError) as caught:
        output_tensor({"scores": 1})
    assert (caught.value.kind, caught.value.argument) == ("network", None)
    assert "'scores'" in str(caught.value)


def test_messages_with_names_of_several_lines_have_one_line():
    assert str(FlowBNNError("layer 'a\nb' has no weights")) == "layer 'a b' has no weights"
    with pytest.warns(FlowBNNWarning) as caught:
        warn("layer 'a\nb' has collapsed", layer="a\nb")
    assert str(caught[0].message) == "layer 'a b' has collapsed"
    assert caught[0].message.layer == "a\nb"
