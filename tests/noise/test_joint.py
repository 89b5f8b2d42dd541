"""Tests of joint noise: draws, density, KL, files and invalid combinations."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

import flowbnn as fb
from flowbnn.diagnostics import posterior_health
from flowbnn.distributions import Flow, NormalBase, divergence
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine, NormalCoupling, noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.joint import independent_vectors
from flowbnn.transforms import BlockTriangular

STRUCTURES = ("full", "chain", "low-rank", "layers")


def network() -> MLP:
    torch.manual_seed(0)
    return MLP(4, (6, 5), 3)


def stochastic(joint: str, recipe: fb.noise.Recipe = NormalAffine()) -> nn.Module:  # noqa: B008
    model = fb.to_stochastic(network().double(), {"*": recipe}, joint=joint)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in fb.noise.noise_parameters(model):
            parameter += 0.3 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    return model


def random_covariance(dim: int) -> torch.Tensor:
    root = torch.randn(dim, 2 * dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return root @ root.mT / dim


@pytest.mark.parametrize("across", ["none", "chain", "low-rank"])
def test_kl_and_variances_are_those_of_the_covariance(across: str) -> None:
    map_ = BlockTriangular((2, 3, 2), across, rank=2).double()
    with torch.no_grad():
        for parameter in map_.parameters():
            parameter.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    columns = (map_(torch.eye(7, dtype=torch.float64))[0] - map_.shift).mT
    exact = MultivariateNormal(map_.shift, columns @ columns.mT)
    prior = NormalBase(7).double().distribution()
    found = divergence(Flow(NormalBase(7, 0.0, 1.0).double().distribution(), map_), prior)
    wanted = kl_divergence(exact, MultivariateNormal(prior.mean, prior.variance.diag()))
    torch.testing.assert_close(found.kl, wanted)
    torch.testing.assert_close(found.entropy, exact.entropy())
    torch.testing.assert_close(map_.variances(torch.ones(7, dtype=torch.float64)), exact.variance)


def test_a_single_block_is_any_gaussian() -> None:
    covariance, mean = random_covariance(6), torch.arange(6, dtype=torch.float64)
    map_ = BlockTriangular((6,), scale=0.1).double()
    map_.assign(mean, [torch.linalg.cholesky(covariance)])
    columns = (map_(torch.eye(6, dtype=torch.float64))[0] - map_.shift).mT
    torch.testing.assert_close(columns @ columns.mT, covariance)
    torch.testing.assert_close(map_.shift.detach(), mean)


@pytest.mark.parametrize("joint", STRUCTURES)
def test_layers_draw_from_one_vector(joint: str) -> None:
    """Training draws, shared draws and the density are those of the joint covariance."""
    model = stochastic(joint)
    ((vector, names),) = independent_vectors(model)
    assert names == ["fc1", "fc2", "fc3"]
    columns = (
        vector.transform(torch.eye(15).double())[0] - vector.transform(torch.zeros(15).double())[0]
    ).mT.detach()
    covariance = columns @ columns.mT
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for name in names:  # each layer's factor, seen through inputs of one
        layer = model.get_submodule(name)
        hooks.append(
            layer.register_forward_pre_hook(
                lambda module, args, name=name: seen.update({name: args[0].detach()})
            )
        )
        layer.register_forward_hook(lambda module, args, output: torch.ones_like(output))
    with fb.noise_mode(model, "sample", seed=2):
        model(torch.ones(40_000, 4).double())
    draws = torch.cat([seen[name] for name in names], -1)
    scale = covariance.diagonal().sqrt()
    gap = (draws.T.cov() - covariance) / scale / scale[:, None]
    assert gap.abs().max() < 0.05
    posterior = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())
    shared = posterior.draws(2_000, seed=4)
    values = torch.cat([shared[name] for name in names], -1)
    assert ((values.T.cov() - covariance) / scale / scale[:, None]).abs().max() < 0.2
    exact = MultivariateNormal(vector.mean(), covariance)
    torch.testing.assert_close(posterior.log_prob(shared), exact.log_prob(values).detach())
    kl = divergences(noise_layers(model))
    assert list(kl) == ["joint"]
    assert kl.total is not None
    torch.testing.assert_close(kl.total.kl, vector.divergence().kl)


@pytest.mark.parametrize("joint", STRUCTURES)
def test_fitted_saved_and_loaded(joint: str, tmp_path) -> None:
    model = fb.to_stochastic(network(), {"*": NormalCoupling(2)}, joint=joint)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    loader = fb.data.TensorLoader(inputs, torch.arange(40) % 3, batch_size=20)
    posterior = fb.fit(model, loader, epochs=2, seed=0, progress=False, accelerator="cpu", validation=None)
    assert "kl/joint" in posterior.history
    predicted = posterior.predict(inputs, 5, seed=1).probabilities
    torch.testing.assert_close(
        posterior.sample(1)(inputs).softmax(-1), posterior.predict(inputs, 1, seed=1).probabilities
    )
    loaded = fb.load_posterior(posterior.save(tmp_path / "joint.safetensors"), network())
    assert torch.equal(loaded.predict(inputs, 5, seed=1).probabilities, predicted)
    one_by_one = torch.stack(
        [posterior.predict(inputs[i : i + 1], 5, seed=1).probabilities[0] for i in range(3)]
    )
    torch.testing.assert_close(one_by_one, predicted[:3])


def test_only_layers_with_the_same_recipe_are_joined() -> None:
    rules = {"fc1": NormalAffine(joint="full"), "fc2": NormalAffine(joint="full"), "fc3": NormalAffine()}
    model = fb.to_stochastic(network(), rules)
    assert [names for _, names in independent_vectors(model)] == [["fc1", "fc2"], ["fc3"]]


def test_two_joint_vectors_have_different_names() -> None:
    wide = NormalAffine(joint="full", base_scale=0.2)
    rules = {"fc1": wide, "fc2": wide, "fc3": NormalAffine(joint="full"), "fc4": NormalAffine(joint="full")}
    model = fb.to_stochastic(MLP(4, (5, 5, 5), 3), rules)
    kl = divergences(noise_layers(model))
    assert list(kl) == ["joint", "joint from fc3"] == [health.layer for health in posterior_health(model)]
    assert kl.total is not None
    torch.testing.assert_close(sum(term.kl for term in kl.values()), kl.total.kl)


def test_a_layer_of_a_joined_network_cannot_run_alone() -> None:
    model = stochastic("full")
    with pytest.raises(fb.FlowBNNError) as caught:
        model.fc1(torch.ones(2, 4).double())
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "joint")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"joint": "full", "rank": 3}, "rank"),
        ({"site": "output"}, "site"),
        ({"site": "position", "joint": "full"}, "joint"),
    ],
)
def test_invalid_combinations_are_refused(options, argument) -> None:
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.to_stochastic(network(), {"*": NormalAffine(**options)})
    assert caught.value.argument == argument


def test_node_noise_joint_gives_a_joint_posterior() -> None:
    loader = fb.data.TensorLoader(torch.randn(20, 4), torch.arange(20) % 3, batch_size=10)
    posterior = fb.NodeNoise("joint", epochs=1).fit(network(), loader, progress=False, accelerator="cpu")
    assert [names for _, names in independent_vectors(posterior.model)] == [["fc1", "fc2", "fc3"]]


def test_a_covariance_that_is_too_large_is_refused() -> None:
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.to_stochastic(MLP(2, (4000, 4000), 1), {"*": NormalAffine()}, joint="full")
    fields = caught.value.fields
    assert (fields["kind"], fields["argument"], fields["size"]) == ("size", "joint", 8002)
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.to_stochastic(MLP(2, (7000,), 1), {"*": NormalAffine()}, joint="chain")
    assert caught.value.fields["size"] == 7000


@pytest.mark.parametrize("site", ["channel", "position"])
def test_dropout_is_not_joined(site: str) -> None:
    """By channel it became a Gaussian with the name of dropout."""
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.to_stochastic(network(), {"*": fb.noise.Dropout(site=site)}, joint="full")
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "joint")
