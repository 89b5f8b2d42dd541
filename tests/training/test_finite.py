"""Tests that values which are not finite end a run and are traced to their source."""

import pytest
import torch
from objectives import SparseAndDouble, train
from torch import nn

from flowbnn.batches import check_finite_batch
from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, first_nonfinite_layer, load_tensors
from flowbnn.training import train as train_objective


class Root(nn.Module):
    """Network of two blocks. The second block or the network itself may produce infinity.

    Args:
        fault: ``"second"``, ``"root"`` or None.
    """

    def __init__(self, fault=None):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.second = FaultyLinear(fault == "second")
        self.fault = fault

    def forward(self, x):
        x = self.second(self.first(x))
        return x / 0.0 if self.fault == "root" else x


class FaultyLinear(nn.Module):
    def __init__(self, faulty):
        super().__init__()
        self.inner, self.faulty = nn.Linear(3, 1), faulty

    def forward(self, x):
        x = x * torch.inf if self.faulty else x
        return self.inner(x)


def loss_step(model, batch, clock):
    loss = model(batch[0]).square().mean()
    return loss, {"log_likelihood": -loss}


def fit(model, batches, step=loss_step, lr=0.01, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return train(model, step, optimizer, batches, TrainingOptions(accelerator="cpu", **options))


def clean(count=4):
    source = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 2, generator=source),) for _ in range(count)]


def test_first_nonfinite_layer_names_the_module():
    x = torch.ones(2, 2)
    for fault, expected in [(None, None), ("second", "second"), ("root", "")]:
        model = Root(fault)
        assert first_nonfinite_layer(model, lambda model=model: model(x)) == expected
        hooks = [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
        assert hooks == []


def test_first_nonfinite_layer_removes_its_hooks_after_an_error():
    model = Root()
    with torch.no_grad():
        model.first[0].bias[1] = float("nan")
    assert first_nonfinite_layer(model, lambda: model(torch.ones(2, 2))) == "first.0"
    with pytest.raises(RuntimeError):
        first_nonfinite_layer(model, lambda: model(torch.ones(2, 7)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_float64_as_default_dtype_is_supported():
    torch.set_default_dtype(torch.float64)
    try:
        batches = [(batch.double(),) for (batch,) in clean()]
        assert fit(Root(), batches, epochs=1).steps == len(batches)
        with pytest.raises(FlowBNNError) as caught:
            fit(Root("second"), batches, epochs=1)
        assert caught.value.kind == "not finite"
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_finite_values_are_accepted():
    check_finite_batch([torch.full((4, 3), 3e38)], 0, 0)
    check_finite_batch([torch.full((4, 3), 6e4, dtype=torch.float16), torch.arange(4), "text", None], 0, 0)
    assert first_nonfinite_layer(nn.Identity(), lambda: None) is None


def test_nan_in_a_batch_names_rows_and_tensor():
    inputs = torch.zeros(6, 2, 2)
    inputs[1, 0, 1], inputs[4, 1, 1], inputs[4, 0, 0] = float("nan"), float("inf"), float("nan")
    cases = [
        ({"image": inputs, "label": torch.zeros(6)}, "image", 2),
        ((torch.zeros(2, 3), torch.tensor([0.0, float("nan")])), "1", 1),
        ([torch.zeros(2), {"mask": torch.zeros(0, 2)}], "1.mask", None),
        ([torch.tensor([1.0, complex(0.0, float("inf"))])], "0", 1),
    ]
    for batch, tensor, rows in cases:
        with pytest.raises(FlowBNNError) as caught:
            check_finite_batch(batch, 2, 7)
        assert (caught.value.kind, caught.value.fields["tensor"]) == ("batch", tensor)
        assert caught.value.fields.get("rows") == rows
        assert "epoch 3, batch 8" in str(caught.value)


def test_bad_batch_ends_training_before_it_reaches_the_model():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    batches = clean()
    batches[2][0][1, 0] = float("nan")
    with pytest.raises(FlowBNNError) as caught:
        fit(model, batches, epochs=2)
    assert caught.value.kind == "batch"
    assert "epoch 1, batch 3" in str(caught.value)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_nonfinite_loss_names_layer_epoch_step_and_checkpoint(tmp_path):
    model = Root()

    def step(model, batch, clock):
        model.second.faulty = clock.step == 6
        return loss_step(model, batch, clock)

    with pytest.raises(FlowBNNError) as caught:
        fit(model, clean(), step, epochs=3, checkpoint=tmp_path)
    message, path = str(caught.value), tmp_path / "last.safetensors"
    assert (caught.value.kind, caught.value.layer) == ("not finite", "second")
    for words in ("in epoch 2, step 7", "FaultyLinear", str(path)):
        assert words in message
    assert "\n" not in message
    tensors, document = load_tensors(path)
    assert document["position"]["step"] == 4
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_source_is_searched_with_the_same_random_numbers():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x) + torch.where(torch.rand(()) < 0.05, torch.inf, 0.0)

    torch.manual_seed(0)
    with pytest.raises(FlowBNNError) as caught:
        fit(nn.Sequential(Rare(), nn.Identity()), clean(), epochs=100)
    assert (caught.value.kind, caught.value.layer) == ("not finite", "0")


def test_nonfinite_term_of_the_loss_is_named():
    def step(model, batch, clock):
        fit_term = model(batch[0]).square().mean()
        kl = torch.log(torch.zeros(())) * fit_term
        return fit_term - kl, {"log_likelihood": -fit_term, "kl": kl}

    with pytest.raises(FlowBNNError) as caught:
        fit(Root(), clean(), step, epochs=1)
    assert (caught.value.layer, caught.value.fields["term"]) == (None, "kl")


def test_nonfinite_inputs_are_not_blamed_on_a_layer():
    def step(model, batch, clock):
        return loss_step(model, (batch[0] * torch.inf,), clock)

    with pytest.raises(FlowBNNError) as caught:
        fit(Root(), clean(), step, epochs=1)
    assert (caught.value.kind, caught.value.layer) == ("not finite", None)
    assert "received inputs" in str(caught.value)


def test_nonfinite_gradient_names_the_parameter():
    def step(model, batch, clock):
        loss = model(batch[0]).square().mean()
        zero = model.second.inner.bias * 0.0
        return loss + zero.abs().pow(0.5).sum(), {}

    model = Root()
    before = [parameter.clone() for parameter in model.parameters()]
    for clip in (None, 1.0):
        with pytest.raises(FlowBNNError) as caught:
            fit(model, clean(), step, epochs=1, clip_gradient=clip)
        assert (caught.value.kind, caught.value.layer) == ("not finite", "second.inner.bias")
        assert "in epoch 1, step 1" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class WithLikelihood(nn.Module):
    """Objective of a network and another layer."""

    def __init__(self, network):
        super().__init__()
        self.network, self.likelihood = network, nn.Linear(1, 1)

    def forward(self, batch, clock):
        return self.likelihood(self.network(batch[0])).square().mean(), {}


def test_names_leave_out_the_prefix_of_the_objective(tmp_path):
    def fault(objective, **options):
        optimizer = torch.optim.SGD(objective.parameters(), lr=options.pop("lr", 0.01))
        settings = TrainingOptions(accelerator="cpu", epochs=2, **options)
        with pytest.raises(FlowBNNError) as caught:
            train_objective(objective, optimizer, clean(), settings, name_prefix="network")
        return caught.value

    class InfiniteGradient(WithLikelihood):
        def forward(self, batch, clock):
            loss, logs = super().forward(batch, clock)
            return loss + (self.network.second.inner.bias * 0.0).abs().pow(0.5).sum(), logs

    class Overflowing(WithLikelihood):
        def forward(self, batch, clock):
            return self.network.first[0].weight.sum() * 1e30, {}

    assert fault(WithLikelihood(Root("second"))).layer == "second"
    assert "the model itself (Root)" in str(fault(WithLikelihood(Root("root"))))
    assert fault(InfiniteGradient(Root())).layer == "second.inner.bias"
    broken = WithLikelihood(Root())
    nn.init.constant_(broken.network.second.inner.weight, torch.nan)
    assert fault(broken).layer == "second.inner.weight"
    assert fault(Overflowing(Root()), lr=1e30, checkpoint=tmp_path).layer == "first.0.weight"
    broken = WithLikelihood(Root())
    nn.init.constant_(broken.likelihood.weight, torch.inf)
    assert fault(broken).layer == "likelihood.weight"

    objective = WithLikelihood(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.01)
    train_objective(
        objective, optimizer, clean(), TrainingOptions(epochs=1, checkpoint=tmp_path, accelerator="cpu")
    )
    error = fault(WithLikelihood(nn.Sequential(nn.Linear(2, 1))), checkpoint=tmp_path, resume=True)
    assert error.kind == "architecture"
    assert set(error.fields["differences"]) == {"0.weight", "0.bias", "weight", "bias"}


def test_optimizers_of_other_parameters_are_refused():
    optimizer = torch.optim.SGD(Root().parameters(), lr=0.1)
    with pytest.raises(FlowBNNError) as caught:
        train(Root(), loss_step, optimizer, clean(), TrainingOptions(epochs=1, accelerator="cpu"))
    assert caught.value.argument == "optimizer"
    model = Root()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=0.1)
    with pytest.raises(FlowBNNError) as caught:
        train(model, lambda model, batch, clock: (model.first(batch[0]).sum(), {}), optimizer, clean())
    assert (caught.value.kind, caught.value.argument) == ("gradient", "optimizer")


def test_gradients_of_several_dtypes_and_layouts_are_accepted():
    def step(model, batch, clock):
        return model(batch).square().mean(), {}

    model = SparseAndDouble()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = TrainingOptions(epochs=2, accelerator="cpu")
    assert train(model, step, optimizer, [torch.arange(5), torch.tensor([1, 1])], options).steps == 4


def test_gradients_are_clipped_by_their_total_norm():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()

    def step(model, batch, clock):
        return 3 * model.bias.sum() + 4 * model.weight[0, 0], {}

    options = TrainingOptions(epochs=1, clip_gradient=1.0, accelerator="cpu")
    train(model, step, optimizer, clean(1), options)
    assert torch.allclose(model.bias, bias - 0.6)
    assert torch.allclose(weight - model.weight, torch.tensor([[0.8, 0.0]]))


def test_overflow_of_the_norm_is_clipped():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()

    def step(model, batch, clock):
        return (model.weight * 1e30).sum(), {}

    fit(model, clean(1), step, lr=1.0, epochs=1, clip_gradient=1.0)
    assert torch.equal(model.weight, before)


def test_nonfinite_weights_are_not_saved(tmp_path):
    model = nn.Linear(2, 1, bias=False)

    def step(model, batch, clock):
        return model.weight.sum() * (1e30 if clock.step == 5 else 0.0), {}

    with pytest.raises(FlowBNNError) as caught:
        fit(model, clean(6), step, lr=1e30, epochs=1, checkpoint=tmp_path, checkpoint_every=2)
    assert (caught.value.kind, caught.value.layer) == ("not finite", "weight")
    assert "last good checkpoint" in str(caught.value)
    assert load_tensors(tmp_path / "last.safetensors")[1]["position"]["step"] == 4
