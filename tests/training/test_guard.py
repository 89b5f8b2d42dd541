"""Numbers that stop being numbers are traced to where they began."""

import pytest
import torch
from objectives import train
from torch import nn

from flowbnn.batches import check_finite_batch
from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, first_nonfinite_layer, load_tensors
from flowbnn.training import train as train_objective


class Root(nn.Module):
    """Two blocks; the second can be told to divide by zero, and so can the root."""

    def __init__(self, fault=None):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.second = Divider(fault == "second")
        self.fault = fault

    def forward(self, x):
        x = self.second(self.first(x))
        return x / 0.0 if self.fault == "root" else x


class Divider(nn.Module):
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


def test_the_guilty_module_is_named():
    x = torch.ones(2, 2)
    for fault, expected in [(None, None), ("second", "second"), ("root", "")]:
        model = Root(fault)
        assert first_nonfinite_layer(model, lambda model=model: model(x)) == expected
        hooks = [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
        assert hooks == []


def test_a_broken_weight_is_traced_to_its_layer_and_hooks_go_away_on_failure():
    model = Root()
    with torch.no_grad():
        model.first[0].bias[1] = float("nan")
    assert first_nonfinite_layer(model, lambda: model(torch.ones(2, 2))) == "first.0"
    with pytest.raises(RuntimeError):
        first_nonfinite_layer(model, lambda: model(torch.ones(2, 7)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_default_of_float64_is_no_fault():
    """A kernel of torch that looks at all gradients takes tensors of float32 beside them."""
    torch.set_default_dtype(torch.float64)
    try:
        batches = [(batch.double(),) for (batch,) in clean()]
        assert fit(Root(), batches, epochs=1).steps == len(batches)
        with pytest.raises(FlowBNNError, match="not finite"):
            fit(Root("second"), batches, epochs=1)
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_finite_numbers_are_no_fault():
    check_finite_batch([torch.full((4, 3), 3e38)], 0, 0)
    check_finite_batch([torch.full((4, 3), 6e4, dtype=torch.float16), torch.arange(4), "text", None], 0, 0)
    assert first_nonfinite_layer(nn.Identity(), lambda: None) is None


def test_nan_in_a_batch():
    inputs = torch.zeros(6, 2, 2)
    inputs[1, 0, 1], inputs[4, 1, 1], inputs[4, 0, 0] = float("nan"), float("inf"), float("nan")
    with pytest.raises(FlowBNNError, match=r"epoch 3, batch 8: 2 of 6 rows of tensor 'image' hold NaN"):
        check_finite_batch({"image": inputs, "label": torch.zeros(6)}, 2, 7)
    with pytest.raises(FlowBNNError, match=r"1 of 2 rows of tensor '1'"):
        check_finite_batch((torch.zeros(2, 3), torch.tensor([0.0, float("nan")])), 0, 0)
    with pytest.raises(FlowBNNError, match=r"'1.mask' has no rows"):
        check_finite_batch([torch.zeros(2), {"mask": torch.zeros(0, 2)}], 0, 0)


def test_training_stops_before_a_bad_batch_touches_the_model():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    batches = clean()
    batches[2][0][1, 0] = float("nan")
    with pytest.raises(FlowBNNError, match="epoch 1, batch 3: 1 of 3 rows"):
        fit(model, batches, epochs=2)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_loss_that_is_not_finite_names_layer_epoch_step_and_checkpoint(tmp_path):
    model = Root()

    def step(model, batch, clock):
        model.second.faulty = clock.step == 6
        return loss_step(model, batch, clock)

    with pytest.raises(FlowBNNError) as caught:
        fit(model, clean(), step, epochs=3, checkpoint=tmp_path)
    text = str(caught.value)
    path = tmp_path / "last.safetensors"
    assert text.startswith(
        "the loss is not finite in epoch 2, step 7: layer 'second' (Divider) made it first"
    )
    assert str(path) in text
    assert "\n" not in text
    tensors, document = load_tensors(path)
    assert document["position"]["step"] == 4
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_the_same_draws_are_used_to_find_the_layer():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x) + torch.where(torch.rand(()) < 0.05, torch.inf, 0.0)

    torch.manual_seed(0)
    with pytest.raises(FlowBNNError, match=r"layer '0' \(Rare\) made it first"):
        fit(nn.Sequential(Rare(), nn.Identity()), clean(), epochs=100)


def test_a_term_outside_the_layers_is_named():
    def step(model, batch, clock):
        fit_term = model(batch[0]).square().mean()
        kl = torch.log(torch.zeros(())) * fit_term
        return fit_term - kl, {"log_likelihood": -fit_term, "kl": kl}

    with pytest.raises(FlowBNNError, match="every layer's output is finite, but 'kl' is not"):
        fit(Root(), clean(), step, epochs=1)


def test_inputs_spoilt_by_the_step_are_no_layers_fault():
    def step(model, batch, clock):
        return loss_step(model, (batch[0] * torch.inf,), clock)

    with pytest.raises(FlowBNNError, match=r"the model itself \(Root\) was given inputs that are not finite"):
        fit(Root(), clean(), step, epochs=1)


def test_a_gradient_that_is_not_finite_names_the_parameter():
    def step(model, batch, clock):
        loss = model(batch[0]).square().mean()
        hidden = model.second.inner.bias * 0.0
        return loss + hidden.abs().pow(0.5).sum(), {}

    model = Root()
    before = [parameter.clone() for parameter in model.parameters()]
    for clip in (None, 1.0):
        with pytest.raises(
            FlowBNNError, match=r"gradient of 'second.inner.bias' is not finite in epoch 1, step 1"
        ):
            fit(model, clean(), step, epochs=1, clip_gradient=clip)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Beside(nn.Module):
    """A network with another layer beside it."""

    def __init__(self, network):
        super().__init__()
        self.network, self.likelihood = network, nn.Linear(1, 1)

    def forward(self, batch, clock):
        return self.likelihood(self.network(batch[0])).square().mean(), {}


def test_names_are_those_that_the_user_knows(tmp_path):
    def fault(objective, **options):
        optimizer = torch.optim.SGD(objective.parameters(), lr=options.pop("lr", 0.01))
        settings = TrainingOptions(accelerator="cpu", epochs=2, **options)
        with pytest.raises(FlowBNNError) as caught:
            train_objective(objective, optimizer, clean(), settings, name_prefix="network")
        return str(caught.value), caught.value.layer

    class Spoilt(Beside):
        def forward(self, batch, clock):
            loss, logs = super().forward(batch, clock)
            return loss + (self.network.second.inner.bias * 0.0).abs().pow(0.5).sum(), logs

    class Overflowing(Beside):
        def forward(self, batch, clock):
            return self.network.first[0].weight.sum() * 1e30, {}

    words, layer = fault(Beside(Root("second")))
    assert "layer 'second' (Divider) made it first" in words
    assert layer == "second"
    assert "the model itself (Root) made it first" in fault(Beside(Root("root")))[0]
    words, layer = fault(Spoilt(Root()))
    assert "the gradient of 'second.inner.bias' is" in words
    assert layer == "second.inner.bias"
    broken = Beside(Root())
    nn.init.constant_(broken.network.second.inner.weight, torch.nan)
    assert "parameter 'second.inner.weight' is not finite" in fault(broken)[0]
    words, layer = fault(Overflowing(Root()), lr=1e30, checkpoint=tmp_path)
    assert "parameter 'first.0.weight' is" in words
    assert layer == "first.0.weight"
    broken = Beside(Root())
    nn.init.constant_(broken.likelihood.weight, torch.inf)
    assert "parameter 'likelihood.weight' is not finite" in fault(broken)[0]

    objective = Beside(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.01)
    train_objective(
        objective, optimizer, clean(), TrainingOptions(epochs=1, checkpoint=tmp_path, accelerator="cpu")
    )
    other = fault(Beside(nn.Sequential(nn.Linear(2, 1))), checkpoint=tmp_path, resume=True)[0]
    assert "it lacks 0.weight, 0.bias; it has besides weight, bias" in other


def test_an_optimizer_of_another_model():
    optimizer = torch.optim.SGD(Root().parameters(), lr=0.1)
    with pytest.raises(FlowBNNError, match="parameters that are not part of the objective"):
        train(Root(), loss_step, optimizer, clean(), TrainingOptions(epochs=1, accelerator="cpu"))
    model = Root()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=0.1)
    with pytest.raises(FlowBNNError, match="no parameter of the optimizer has a gradient"):
        train(model, lambda model, batch, clock: (model.first(batch[0]).sum(), {}), optimizer, clean())


def test_clipping_is_by_the_norm_of_all_parameters():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()

    def step(model, batch, clock):
        return 3 * model.bias.sum() + 4 * model.weight[0, 0], {}

    options = TrainingOptions(epochs=1, clip_gradient=1.0, accelerator="cpu")
    train(model, step, optimizer, clean(1), options)
    assert torch.allclose(model.bias, bias - 0.6)
    assert torch.allclose(weight - model.weight, torch.tensor([[0.8, 0.0]]))


def test_a_norm_that_overflows_is_clipped_and_is_no_fault():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()

    def step(model, batch, clock):
        return (model.weight * 1e30).sum(), {}

    fit(model, clean(1), step, lr=1.0, epochs=1, clip_gradient=1.0)
    assert torch.equal(model.weight, before)


def test_weights_that_overflow_are_not_written(tmp_path):
    model = nn.Linear(2, 1, bias=False)

    def step(model, batch, clock):
        return model.weight.sum() * (1e30 if clock.step == 5 else 0.0), {}

    with pytest.raises(FlowBNNError, match="parameter 'weight' is not finite") as caught:
        fit(model, clean(6), step, lr=1e30, epochs=1, checkpoint=tmp_path, checkpoint_every=2)
    assert "last good checkpoint" in str(caught.value)
    assert load_tensors(tmp_path / "last.safetensors")[1]["position"]["step"] == 4
