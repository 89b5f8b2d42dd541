"""What a walk through all methods with a user's odd networks and data found."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.methods import Method, temper

QUIET: dict[str, Any] = {"progress": False, "seed": 1}
pytestmark = pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def classes(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=source).to(dtype), torch.arange(16) % 3) for _ in range(3)]


def shuffled_numbers() -> DataLoader[Any]:
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=source)
    targets = inputs[:, :1] + torch.randn(40, 1, generator=source) * inputs[:, 1:2]
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
def test_a_seed_is_all_that_a_fit_draws_from(method: Method) -> None:
    found = []
    for elsewhere in (1, 2):
        torch.manual_seed(elsewhere)
        posterior = method.fit(network(1), _loader_of(elsewhere), **QUIET)
        predictive = posterior.predict(torch.ones(3, 4), 4, seed=0)
        found.append(torch.cat([predictive.mean, predictive.aleatoric]))
    assert torch.equal(*found)


def _loader_of(elsewhere: int) -> DataLoader[Any]:
    loader = shuffled_numbers()
    torch.manual_seed(elsewhere)
    return loader


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
def test_inputs_are_brought_to_the_precision_of_the_network(
    method: Method, weights: torch.dtype, data: torch.dtype
) -> None:
    posterior = method.fit(network().to(weights), classes(data), **QUIET)
    assert next(posterior.model.parameters()).dtype == weights
    assert bool(
        torch.isfinite(posterior.predict(torch.ones(2, 4, dtype=data), 2, seed=0).probabilities).all()
    )


def test_an_ensemble_leaves_frozen_weights_as_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    plain[:2].requires_grad_(False)
    before = deepcopy(plain.state_dict())
    posterior = fb.DeepEnsemble(2, epochs=1).fit(plain, classes(), **QUIET)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(posterior.members[name], before[name].expand(2, *before[name].shape))
    assert not torch.equal(*posterior.members["3.weight"])


def test_a_new_start_keeps_the_statistics_of_frozen_layers() -> None:
    from flowbnn.methods.ensemble import reset_parameters

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


def test_dropout_goes_into_networks_with_attention() -> None:
    inputs = torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0))
    posterior = fb.MCDropout(0.3, epochs=1).fit(Attention(), [(inputs, torch.arange(12) % 3)], **QUIET)
    assert float(posterior.predict(inputs, 8, seed=0).epistemic.mean()) > 0


def test_every_posterior_has_draws_or_says_why_not() -> None:
    point = fb.MAP(epochs=1).fit(network(), classes(), **QUIET)
    assert torch.equal(point.draws(3)["0.bias"], point.model[0].bias.detach().expand(3, 6))  # type: ignore[index]
    within = fb.BayesByBackprop(epochs=1).fit(network(), classes(), **QUIET)
    tempered = temper(within, classes(), progress=False)
    draws = tempered.draws(2, seed=0)
    assert torch.equal(draws["0.weight"], within.draws(2, seed=0)["0.weight"])
    assert torch.equal(tempered.log_prob(draws), within.log_prob(draws))
    own = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    with pytest.raises(fb.FlowBNNError, match="has no draws"):
        fb.MCDropout(epochs=0).fit(own, classes(), **QUIET).draws(1)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: fb.MAP().fit(network(), []), "the loader is empty"),
        (lambda: fb.MAP().fit(network(), TensorDataset(torch.ones(3))), "takes a loader of batches"),  # type: ignore[arg-type]
        (lambda: fb.MAP().fit(network(), torch.ones(3, 4)), "takes a loader of batches"),
        (lambda: fb.MAP().fit(network(), iter(classes())), "only once"),
        (
            lambda: fb.SWAG(epochs=2, snapshots_per_epoch=2).fit(network(), classes()[:1]),
            "one set of weights and no variance",
        ),
        (lambda: fb.load_posterior("missing.safetensors", "network"), "network=.* must be a Module"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_said_in_one_line(wrong: Callable[[], Any], line: str) -> None:
    with pytest.raises(fb.FlowBNNError, match=line) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_a_network_that_does_not_fit_its_data_is_told_in_one_line():
    loader = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(
        fb.FlowBNNError, match=r"the network fails on the first batch, of shape \(6, 4\): mat1 and mat2"
    ) as told:
        fb.MAP(epochs=1).fit(nn.Linear(5, 3), loader, progress=False)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("method", [fb.BayesByBackprop, fb.MNF])
def test_a_resumed_bound_tells_that_its_weight_has_changed(method, tmp_path):
    torch.manual_seed(0)
    network, loader = nn.Linear(4, 3), [(torch.randn(6, 4), torch.arange(6) % 3)]
    options = {"checkpoint": tmp_path, "progress": False, "seed": 0}
    method(epochs=1).fit(network, loader, **options)
    with pytest.warns(fb.errors.FlowBNNWarning, match=r"beta.*1\.0.*3\.0"):
        method(epochs=2, beta=3.0).fit(network, loader, resume=True, **options)


def test_a_comparison_of_nothing_is_refused():
    loader = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(fb.FlowBNNError, match="methods must not be empty"):
        fb.compare(nn.Linear(4, 3), loader, loader, methods=[])
