"""Tests that files are compared with the objects that load them: tensors, layers, optimizer and random state."""

import warnings

import pytest
import torch
from checkpoint_runs import halving, make, refusal, run, snapshot
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training import EarlyStop, load_tensors, save_tensors
from flowbnn.training.compatibility import check_optimizer_state, check_tensors, describe_layers


def test_every_tensor_of_a_checkpoint_is_refused_in_another_shape(interrupted):
    path = interrupted / "last.safetensors"
    tensors, document = load_tensors(path)
    for name, tensor in tensors.items():
        for shape in [(0,), (*tensor.shape, 2)]:
            if shape == tuple(tensor.shape):
                continue
            save_tensors(path, {**tensors, name: torch.ones(shape, dtype=tensor.dtype)}, document)
            error = refusal(interrupted, make(schedule=halving), early_stop=EarlyStop("loss"))
            assert error.kind in ("architecture", "file"), (name, shape)


def test_every_real_tensor_of_a_checkpoint_must_be_finite(interrupted):
    path = interrupted / "last.safetensors"
    tensors, document = load_tensors(path)
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    assert any("exp_avg" in name for name in names)
    for name in names:
        save_tensors(path, {**tensors, name: torch.full_like(tensors[name], torch.nan)}, document)
        error = refusal(interrupted, make(schedule=halving), early_stop=EarlyStop("loss"))
        assert error.kind == "not finite", name


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
    ],
)
def test_states_of_optimizers_fit_themselves_and_no_other_shape(optimizer, tmp_path):
    network = nn.Linear(3, 2)
    network.bias.requires_grad_(False)  # has no state
    first, fresh = optimizer(network.parameters()), optimizer(network.parameters())
    network(torch.ones(1, 3)).sum().backward()
    first.step()
    stored, names = first.state_dict(), ["weight", "bias"]
    check_optimizer_state(fresh, stored, names, tmp_path, finite=True)
    assert not any(key == "exp_avg" for state in fresh.state.values() for key in state)
    for key, value in stored["state"].get(0, {}).items():
        for forged in (torch.zeros(0), torch.zeros(7, 7), "word"):
            state = {**stored["state"], 0: {**stored["state"][0], key: forged}}
            with pytest.raises(FlowBNNError) as caught:
                check_optimizer_state(fresh, {**stored, "state": state}, names, tmp_path)
            assert set(caught.value.fields["differences"]) == {f"{key} of weight"}, value


def test_the_order_of_parameters_in_a_file_is_not_used(interrupted):
    path = interrupted / "last.safetensors"
    tensors, document = load_tensors(path)
    groups = document["optimizer"]["param_groups"]
    assert groups[0]["params"] == [0, 1]
    groups[0]["params"] = [1, 0]  # would give each parameter the state of the other
    save_tensors(path, tensors, document)
    resumed, expected = make(schedule=halving), make(schedule=halving)
    run(resumed, interrupted, resume=True, epochs=4, early_stop=EarlyStop("loss"))
    run(expected, None, epochs=4, early_stop=EarlyStop("loss"))
    for left, right in zip(snapshot(resumed)[0], snapshot(expected)[0], strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("entry", "value"), [("epoch", "x"), ("step", -1), ("batches", 2.5)])
def test_positions_must_be_counts(interrupted, entry, value):
    path = interrupted / "last.safetensors"
    tensors, document = load_tensors(path)
    document["position"][entry] = value
    save_tensors(path, tensors, document)
    assert refusal(interrupted, make(schedule=halving), early_stop=EarlyStop("loss")).kind == "file"


def test_numbers_of_masks_may_be_infinite_where_they_are_in_the_network():
    mask = torch.tensor([0.0, -torch.inf])
    check_tensors({"mask": mask}, {"mask": mask.clone()}, "a", finite=True)
    with pytest.raises(FlowBNNError) as caught:
        check_tensors({"mask": mask}, {"mask": torch.full((2,), -torch.inf)}, "a", finite=True)
    assert (caught.value.kind, caught.value.layer) == ("not finite", "mask")


def resume_with(folder, activation, **options):
    """Trains an epoch with a ReLU and resumes with another network or other options."""
    for layer, epochs, settings in ((nn.ReLU(), 1, {}), (activation, 2, {"resume": True, **options})):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1))
        run((network, torch.optim.Adam(network.parameters()), None), folder, epochs=epochs, **settings)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.LeakyReLU()])
def test_resume_with_another_activation_is_refused(tmp_path, activation):
    with pytest.raises(FlowBNNError) as caught:
        resume_with(tmp_path, activation)
    assert caught.value.kind == "checkpoint"
    assert set(caught.value.fields["changed"]) == {"layer '1'"}


class Activated(nn.Module):
    """Network whose activation is a function, which no tensor of a file shows."""

    def __init__(self, activation):
        super().__init__()
        self.activation, self.first, self.second = activation, nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


def test_resume_with_another_function_as_activation_is_refused(tmp_path):
    assert describe_layers(Activated(torch.tanh))[""] == "Activated(activation=tanh)"
    data = [(torch.randn(8, 2), torch.randn(8, 1))]

    def fit(activation, epochs):
        options = {"checkpoint": tmp_path / "run", "resume": True, "seed": 0, "progress": False}
        return fb.MAP(epochs=epochs).fit(Activated(activation), data, **options)

    fit(torch.tanh, 1)
    with pytest.raises(FlowBNNError) as error:
        fit(nn.functional.silu, 2)
    assert error.value.kind == "checkpoint"
    fit(torch.tanh, 2)


@pytest.mark.parametrize("change", [{"clip_gradient": 0.5}, {"precision": "bf16-mixed"}])
def test_resume_with_another_precision_or_gradient_norm_is_warned_about(tmp_path, change):
    with pytest.warns(FlowBNNWarning) as caught:
        resume_with(tmp_path, nn.ReLU(inplace=True), **change)
    assert [set(warning.message.fields["changed"]) for warning in caught] == [set(change)]


def test_descriptions_of_layers_hold_their_settings():
    first, second = (nn.Sequential(nn.Linear(1, 1), nn.Dropout(rate)) for rate in (0.1, 0.2))
    assert describe_layers(first) != describe_layers(second)
    plain, inplace = (nn.Sequential(nn.ReLU(inplace=value)) for value in (False, True))
    assert describe_layers(plain) == describe_layers(inplace.eval())


@pytest.mark.parametrize("method", [fb.MAP(epochs=1), fb.NodeNoise(epochs=1)])
@pytest.mark.parametrize("added", [True, False])
def test_added_and_removed_layers_without_weights_are_warned_about(method, added, tmp_path):
    short = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    long = nn.Sequential(*short, nn.Tanh())
    saved, other = (short, long) if added else (long, short)
    data = [(torch.randn(20, 2), torch.arange(20) % 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = method.fit(saved, data, seed=0, progress=False).save(tmp_path / "posterior")
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        fb.load_posterior(path, other)
    assert [warning.message.kind for warning in caught] == ["layers"]
