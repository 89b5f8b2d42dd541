"""Tests of methods with unusual networks, data types and loaders."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from method_cases import CASES
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.methods import Method
from flowbnn.methods.network_layers import reset_parameters
from slow_cases import mark_slow

QUIET: dict[str, Any] = {"progress": False, "seed": 1}
pytestmark = pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def classes(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=generator).to(dtype), torch.arange(16) % 3) for _ in range(3)]


def shuffled_regression() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=generator)
    targets = inputs[:, :1] + torch.randn(40, 1, generator=generator) * inputs[:, 1:2]
    return DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)


@pytest.mark.parametrize(
    "method",
    [
        fb.SGLD(epochs=4, samples=2, cycles=1),
        fb.MCDropout(0.1, epochs=1),
        fb.NodeNoise("gaussian", epochs=1),
        fb.NodeNoise("planar", epochs=1),
        fb.NodeNoise("mixture", epochs=1),
    ],
    ids=repr,
)
def test_fit_does_not_depend_on_the_global_generator(method: Method) -> None:
    results = []
    for global_seed in (1, 2):
        model, loader = network(1), shuffled_regression()
        torch.manual_seed(global_seed)
        posterior = method.fit(model, loader, **QUIET)
        predictive = posterior.predict(torch.ones(3, 4), 4, seed=0)
        results.append(torch.cat([predictive.mean, predictive.aleatoric]))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "method",
    [
        fb.MAP(epochs=1),
        fb.MCDropout(0.1, epochs=1),
        fb.BayesByBackprop(epochs=1),
        fb.MNF(epochs=1),
        fb.Laplace("kron", layers="all", epochs=1),
        fb.SGLD(epochs=4, samples=2, cycles=1),
        fb.HMC(samples=4, warmup=2, chains=2, steps=2, epochs=1),
        fb.SWAG(epochs=4),
        fb.NodeNoise("planar", epochs=1),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize(
    ("weights", "data"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_inputs_are_converted_to_the_dtype_of_the_network(
    method: Method, weights: torch.dtype, data: torch.dtype
) -> None:
    posterior = method.fit(network().to(weights), classes(data), **QUIET)
    assert next(posterior.model.parameters()).dtype == weights
    assert bool(
        torch.isfinite(posterior.predict(torch.ones(2, 4, dtype=data), 2, seed=0).probabilities).all()
    )


def test_ensemble_does_not_change_frozen_weights() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    plain[:2].requires_grad_(False)
    before = deepcopy(plain.state_dict())
    posterior = fb.DeepEnsemble(2, epochs=1).fit(plain, classes(), **QUIET)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(posterior.members[name], before[name].expand(2, *before[name].shape))
    assert not torch.equal(*posterior.members["3.weight"])


def test_reset_parameters_keeps_the_statistics_of_frozen_layers() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.Linear(3, 2), nn.BatchNorm1d(2))
    for layer in (plain[0], plain[2]):
        layer.running_mean.fill_(5.0)  # type: ignore[operator]
    assert reset_parameters(plain) == []
    assert plain[0].running_mean.tolist() == [5.0] * 3  # type: ignore[operator]
    assert plain[2].running_mean.tolist() == [0.0] * 2  # type: ignore[operator]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.attention(inputs, inputs, inputs, need_weights=False)[0].mean(1))


def test_dropout_supports_attention() -> None:
    inputs = torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))
    posterior = fb.MCDropout(0.3, epochs=1).fit(Attention(), [(inputs, torch.arange(12) % 3)], **QUIET)
    assert float(posterior.predict(inputs, 8, seed=0).epistemic.mean()) > 0


def test_draws_of_point_and_tempered_posteriors() -> None:
    point = fb.MAP(epochs=1).fit(network(), classes(), **QUIET)
    assert torch.equal(point.draws(3)["0.bias"], point.model[0].bias.detach().expand(3, 6))  # type: ignore[index]
    inner = fb.BayesByBackprop(epochs=1).fit(network(), classes(), **QUIET)
    tempered = fb.Temperature().fit(inner, classes(), progress=False)
    draws = tempered.draws(2, seed=0)
    assert torch.equal(draws["0.weight"], inner.draws(2, seed=0)["0.weight"])
    assert torch.equal(tempered.log_prob(draws), inner.log_prob(draws))
    dropout = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    with pytest.raises(fb.FlowBNNError) as error:
        fb.MCDropout(epochs=0).fit(dropout, classes(), **QUIET).draws(1)
    assert error.value.kind == "unsupported"


def test_invalid_loaders_are_refused() -> None:
    loaders = ([], TensorDataset(torch.ones(3)), torch.ones(3, 4), iter(classes()))
    for loader in loaders:
        with pytest.raises(fb.FlowBNNError) as error:
            fb.MAP().fit(network(), loader)  # type: ignore[arg-type]
        assert (error.value.kind, error.value.argument) == ("loader", "loader")
        assert "\n" not in str(error.value)


def test_swag_with_one_snapshot_is_refused() -> None:
    with pytest.raises(fb.FlowBNNError) as error:
        fb.SWAG(epochs=2, snapshots_per_epoch=2).fit(network(), classes()[:1])
    assert error.value.argument == "epochs"


def test_load_posterior_refuses_a_string_as_network() -> None:
    with pytest.raises(fb.FlowBNNError) as error:
        fb.load_posterior("missing.safetensors", "network")  # type: ignore[arg-type]
    assert error.value.argument == "network"


def test_network_that_fails_on_its_inputs_is_refused() -> None:
    loader = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(fb.FlowBNNError) as error:
        fb.MAP(epochs=1).fit(nn.Linear(5, 3), loader, progress=False)
    assert (error.value.kind, error.value.fields["shapes"]) == ("network", [(6, 4)])
    assert str(error.value.__cause__).splitlines()[0] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", [fb.BayesByBackprop, fb.MNF])
def test_resuming_with_another_beta_raises_a_warning(method, tmp_path):
    torch.manual_seed(0)
    network, loader = nn.Linear(4, 3), [(torch.randn(6, 4), torch.arange(6) % 3)]
    options = {"checkpoint": tmp_path, "progress": False, "seed": 0}
    method(epochs=1).fit(network, loader, **options)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        method(epochs=2, beta=3.0).fit(network, loader, resume=True, **options)
    assert caught[0].message.fields["kind"] == "changed settings"
    assert caught[0].message.fields["changed"] == {"beta": (1.0, 3.0)}


def test_comparison_without_methods_is_refused():
    loader = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(fb.FlowBNNError) as error:
        fb.compare(nn.Linear(4, 3), loader, loader, methods=[])
    assert error.value.argument == "methods"


# those that read the data in ways of their own
READERS = ["map", "temperature", "laplace", "swag", "hmc", "vbll", "node-noise", "mode-ensemble"]


@pytest.mark.parametrize("name", mark_slow(CASES, READERS))
def test_soft_labels_train_like_labels(name: str) -> None:
    """Rows of one-hot probabilities give the fit of the labels."""
    loader = classes()
    soft = [(x, nn.functional.one_hot(y, 3).float()) for x, y in loader]
    expected = CASES[name].make().fit(network(), loader, **QUIET).predict(loader[0][0], 4, seed=0)
    posterior = CASES[name].make().fit(network(), soft, likelihood="categorical", **QUIET)
    predictive = posterior.predict(loader[0][0], 4, seed=0)
    torch.testing.assert_close(predictive.probabilities, expected.probabilities, atol=1e-3, rtol=0.0)
    assert predictive.evaluate(soft[0][1]) == pytest.approx(predictive.evaluate(loader[0][1]))


def test_smoothed_labels_are_fitted_as_probabilities() -> None:
    """At the optimum the predicted probabilities are the mean of the soft labels."""
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.2, 0.3]], dtype=torch.float64)
    loader = [(torch.zeros(16, 4), rows.repeat(8, 1))]
    posterior = fb.MLE(epochs=300, lr=0.05).fit(nn.Linear(4, 3), loader, **QUIET)
    probabilities = posterior.predict(torch.zeros(1, 4)).probabilities[0]
    torch.testing.assert_close(probabilities, torch.tensor([0.6, 0.2, 0.2]), atol=1e-3, rtol=0.0)


@pytest.mark.parametrize(
    "regression", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["classification", "regression"]
)
@pytest.mark.parametrize("name", mark_slow(CASES, READERS))
def test_data_of_inference_mode_are_used(name: str, regression: bool) -> None:
    """Autograd cannot save tensors that were made in inference mode. They are copied."""
    loader = classes()
    targets = [x[:, :1] if regression else y for x, y in loader]
    with torch.inference_mode():
        inference = [(x.clone(), y.clone()) for (x, _), y in zip(loader, targets, strict=True)]
    method, outputs = CASES[name].make(), 1 if regression else 3
    plain = [(x, y) for (x, _), y in zip(loader, targets, strict=True)]
    expected = method.fit(network(outputs), plain, **QUIET).predict(loader[0][0], 2, seed=0)
    predictive = method.fit(network(outputs), inference, **QUIET).predict(loader[0][0], 2, seed=0)
    first, second = (p.mean if regression else p.probabilities for p in (predictive, expected))
    torch.testing.assert_close(first, second)


class ComplexWeights(nn.Module):
    """Network with complex weights, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.head = nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.cfloat) @ self.spectrum).abs())


@pytest.mark.parametrize(
    "method",
    [
        fb.SWAG(epochs=4),
        fb.SGLD(epochs=4, samples=2, cycles=1),
        fb.HMC(samples=2, warmup=2, chains=1),
        fb.Laplace("diag", layers="all", epochs=0),
        fb.Laplace("full", layers="all", epochs=0),
        fb.BayesByBackprop(epochs=1),
        fb.IVON(epochs=1),
        fb.MNF(epochs=1),
    ],
    ids=lambda method: repr(method),
)
def test_posteriors_of_complex_weights_are_refused(method: Method) -> None:
    with pytest.raises(fb.FlowBNNError) as error:
        method.fit(ComplexWeights(), classes(), **QUIET)
    assert (error.value.kind, error.value.fields["parameter"]) == ("network", "spectrum")
    fb.Laplace(epochs=0).fit(ComplexWeights(), classes(), **QUIET)  # the last layer is real


class FixedGraph(nn.Linear):
    """Graph network with a fixed adjacency matrix of 16 nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.eye(16) + 0.1) @ super().forward(x)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_laplace_of_one_graph_is_refused(structure: Any) -> None:
    with pytest.raises(fb.FlowBNNError) as error:
        fb.Laplace(structure, epochs=0).fit(FixedGraph(4, 3), classes(), **QUIET)
    assert (error.value.kind, error.value.fields["shapes"]) == ("network", [(3, 4)])


class OneArgument(nn.Module):
    """Network that takes a dictionary or a list of tensors as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.linear(batch["x"] if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize("name", mark_slow(CASES, ["map", "laplace", "bayes-by-backprop", "vbll"]))
def test_dictionaries_and_lists_are_one_argument(name: str) -> None:
    network, method = OneArgument(), CASES[name].make()
    x, y = classes()[0]
    for inputs in ({"x": x, "mask": x}, (x, x)):
        posterior = method.fit(network, [(inputs, y)], **QUIET)
        expected = posterior.predict([(inputs, y)], 2, seed=0).probabilities
        torch.testing.assert_close(posterior.predict(inputs, 2, seed=0).probabilities, expected)
