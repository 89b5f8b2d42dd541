"""Tests on a CUDA device: gradients that are not finite, memory of recorded runs, and noise at positions."""

import gc

import pytest
import torch
from objectives import SparseAndDouble, train
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods.fitting import Objective
from flowbnn.noise import noise_layers
from flowbnn.objectives import ELBO
from flowbnn.training import TrainingOptions, load_tensors
from flowbnn.training import train as train_objective
from flowbnn.training.cuda_graph import Recorder
from flowbnn.training.options import Clock

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu


def network(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


def step_with_fault(at):
    def step(model, batch, clock):
        loss = model(batch[0].to(model[2].bias.dtype)).square().mean()
        # finite, with an infinite gradient
        fault = (model[2].bias * 0.0).abs().pow(0.5).sum() if clock.step == at else 0.0
        return loss + fault, {"log_likelihood": -loss}

    return step


def data(count=4):
    source = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 2, generator=source),) for _ in range(count)]


def fit(model, at, fused=True, **options):
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    settings = TrainingOptions(**({"epochs": 2, "accelerator": "cuda"} | options))
    return train(model, step_with_fault(at), optimizer, data(), settings)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_infinite_gradients_are_found_in_every_precision(precision):
    with pytest.raises(FlowBNNError) as caught:
        fit(network(), 2, precision=precision)
    assert (caught.value.kind, caught.value.layer) == ("not finite", "2.bias")
    history = fit(network(), -1, precision=precision)
    assert history.epochs == 2


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("at", [2, 3, 7])
def test_nonfinite_gradient_is_named_and_fused_optimizers_keep_the_weights(tmp_path, at, clip):
    model, expected = network(), network()
    with pytest.raises(FlowBNNError) as caught:
        fit(model, at, clip_gradient=clip, checkpoint=tmp_path, checkpoint_every=2)
    assert (caught.value.kind, caught.value.layer) == ("not finite", "2.bias")
    assert f"in epoch {at // 4 + 1}, step {at + 1}" in str(caught.value)
    assert "updated with it" not in str(caught.value)
    assert load_tensors(tmp_path / "last.safetensors")[1]["position"]["step"] == at // 2 * 2

    def stopping(model, batch, clock):
        if clock.step == at:
            raise KeyboardInterrupt
        return step_with_fault(-1)(model, batch, clock)

    optimizer = torch.optim.Adam(expected.parameters(), fused=True)
    settings = TrainingOptions(epochs=2, accelerator="cuda", clip_gradient=clip)
    with pytest.raises(KeyboardInterrupt):
        train(expected, stopping, optimizer, data(), settings)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_nonfinite_gradients_of_several_dtypes_and_layouts():
    def step(model, batch, clock):
        loss = model(batch).square().mean()
        fault = (model.linear.bias * 0.0).abs().pow(0.5).sum() if clock.step == 5 else 0.0
        return loss + fault, {}

    model = SparseAndDouble()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainingOptions(epochs=3, accelerator="cuda")
    with pytest.raises(FlowBNNError) as caught:
        train(model, step, optimizer, [torch.arange(5), torch.tensor([1, 1])], settings)
    assert caught.value.layer == "linear.bias"
    assert "in epoch 3, step 6" in str(caught.value)


def test_message_says_if_the_weights_were_updated():
    with pytest.raises(FlowBNNError) as caught:
        fit(network(), 2, fused=False)
    assert caught.value.layer == "2.bias"
    assert "updated with it" in str(caught.value)


def test_recorded_runs_free_their_memory():
    """cuBLAS keeps a workspace for every stream, so all recordings share one stream."""

    class Squares(nn.Module):
        capturable = True

        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, batch, clock):
            return self.network(batch[0]).square().mean(), {}

    allocated = []
    for _ in range(3):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        options = TrainingOptions(epochs=2, accelerator="cuda", acceleration="graph")
        train_objective(Squares(model), optimizer, data(), options)
        del model, optimizer
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] - allocated[1] < 2**20


@pytest.mark.parametrize("acceleration", ["graph", "compile"])
def test_flows_at_positions_are_recorded_and_the_probe_changes_nothing(acceleration):
    """The pass that finds the number of positions changes neither statistics nor random numbers."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 40, 3), nn.Flatten(), nn.Linear(160, 2)
    )
    rules = {
        "*": fb.noise.NormalAffine(site="position"),
        "0": fb.noise.NormalInvConv(site="position"),
        "3": fb.noise.NormalInvConv(site="position"),
    }
    model = fb.to_stochastic(plain, rules).cuda().train()
    objective = ELBO(fb.likelihoods.Categorical(), 100)

    def loss(outputs_of, batch, clock):
        return objective(model, batch[0], batch[1], forward=outputs_of).loss, {}

    optimizer = torch.optim.Adam(fb.parameter_groups(model), fused=True)
    options = TrainingOptions(precision="bf16-mixed", acceleration=acceleration)
    recorder = Recorder(
        Objective(model, fb.likelihoods.Categorical(), loss), optimizer, options, torch.device("cuda", 0)
    )
    batch = torch.randn(8, 3, 6, 6, device="cuda"), torch.arange(8, device="cuda") % 2
    for number in range(6):
        assert recorder.step(batch, Clock(0, number, 6, 1))
        assert int(model[1].num_batches_tracked) == number + 1
    assert not recorder.is_nonfinite(wait=True)
    assert recorder.graph is not None
    assert objective._shapes[8][noise_layers(model)["3"].key] == ((4, 4), True)
    assert all(module.training for module in model.modules())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
