"""Tests of evaluation_mode."""

import pytest
import torch
from torch import nn

from flowbnn.batches import rows
from flowbnn.batches.arrays import is_array
from flowbnn.errors import FlowBNNError
from flowbnn.networks import evaluation_mode


class Frozen(nn.Sequential):
    """Keeps its first layer in evaluation mode, as many do with batch normalization, and counts who asks."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.asked = 0

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.asked = getattr(self, "asked", 0) + 1
        self[0].eval()
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_training_flags_of_all_modules_are_restored(mode):
    network = nn.Sequential(Frozen(nn.BatchNorm1d(2), nn.Dropout()), nn.Dropout(), nn.Linear(2, 2)).train(
        mode
    )
    network[1].training = not mode
    before = [module.training for module in network.modules()]
    with evaluation_mode(network):
        assert not any(module.training for module in network.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in network.modules()] == before
    assert torch.is_grad_enabled()


def test_training_flags_are_restored_after_an_error():
    network = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval()

    def changed() -> None:
        with evaluation_mode(network):
            network.train()
            raise RuntimeError("in the pass")

    with pytest.raises(RuntimeError, match="in the pass"):
        changed()
    assert not any(module.training for module in network.modules())


def test_a_network_in_evaluation_mode_is_not_changed():
    network = Frozen(nn.BatchNorm1d(2), nn.Dropout()).eval()
    asked = network.asked
    with evaluation_mode(network):
        pass
    assert network.asked == asked
    network.train()
    with evaluation_mode(network):
        assert not network[1].training
    assert network.asked == asked + 3, "train, eval, and train again"
    assert network[1].training
    assert not network[0].training


def test_single_examples_are_refused_with_a_hint():
    with pytest.raises(FlowBNNError) as caught:
        rows(torch.tensor(1))
    assert caught.value.kind == "examples"


def test_lists_that_hold_themselves_are_no_arrays():
    values: list[object] = []
    values.append(values)
    assert not is_array(values)
