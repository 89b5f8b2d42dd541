"""Tests of the loader of tensors in memory."""

import numpy as np
import pytest
import torch

import flowbnn as fb
from flowbnn.batches import count_data
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError


def test_every_example_appears_once_with_its_target():
    inputs = torch.arange(10.0)
    loader = TensorLoader(
        inputs, inputs.long(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert len(loader) == 3
    order = torch.cat([x for x, _ in batches])
    assert sorted(order.tolist()) == inputs.tolist()
    assert order.tolist() != inputs.tolist()
    assert torch.equal(order.long(), torch.cat([y for _, y in batches]))


def test_orders_depend_on_the_generator():
    generator = torch.Generator().manual_seed(0)
    loader = TensorLoader(torch.arange(50), batch_size=50, shuffle=True, generator=generator)
    state = generator.get_state()
    (first,), (second,) = next(iter(loader)), next(iter(loader))
    generator.set_state(state)
    (again,) = next(iter(loader))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_arrays_and_lists_are_converted():
    inputs, targets = next(iter(TensorLoader(np.zeros((3, 2)), [0, 1, 0], batch_size=2)))
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [0, 1]


def test_number_of_examples_is_known():
    assert count_data(TensorLoader(torch.zeros(7, 2), batch_size=3)) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorLoader(batch_size=2),
        lambda: TensorLoader(torch.zeros(3), torch.zeros(4), batch_size=2),
        lambda: TensorLoader(torch.zeros(3), batch_size=0),
        lambda: TensorLoader(torch.zeros(3), batch_size=2.5),
        lambda: TensorLoader(torch.tensor(1.0), batch_size=1),
        lambda: TensorLoader(["a", "b"], batch_size=1),
        lambda: TensorLoader(torch.zeros(3), batch_size=4, drop_last=True),
        lambda: TensorLoader(torch.zeros(3), batch_size=4, suffle=True),
    ],
)
def test_invalid_arguments_are_refused(make):
    with pytest.raises(FlowBNNError) as caught:
        make()
    assert caught.value.kind in ("loader", "value", "unknown setting")
    assert "\n" not in str(caught.value)


def test_flipped_and_read_only_arrays_are_accepted():
    rows, labels = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.arange(3)
    ((inputs, targets),) = TensorLoader(rows[::-1], labels[::-1], batch_size=3)
    assert inputs.tolist() == [[4.0, 5.0], [2.0, 3.0], [0.0, 1.0]]
    assert targets.tolist() == [2, 1, 0]
    rows.setflags(write=False)
    ((inputs,),) = TensorLoader(rows, batch_size=3)
    assert inputs.tolist() == rows.tolist()
    density = fb.fit_density(fb.flows.NICE(2, hidden=(4,)), rows.repeat(8, 0)[::-1], epochs=1, progress=False)
    assert density.log_prob(rows[::-1]).shape == (3,)


def test_lists_of_rows_are_refused_with_a_hint():
    posterior = fb.posterior.PointPosterior(torch.nn.Linear(2, 2), fb.likelihoods.Categorical())
    with pytest.raises(FlowBNNError) as caught:
        posterior.predict([[1.0, 2.0], [3.0, 4.0]])
    assert caught.value.kind == "targets"
    assert "torch.as_tensor" in str(caught.value)
