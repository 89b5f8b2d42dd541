"""Every named flow as a density, as the posterior of an autoencoder, and as noise of a network."""

from inspect import signature

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.flows import named_flows
from flowbnn.noise import Layout, NormalFlow
from flowbnn.noise.recipes import recipe_from_dict
from flowbnn.transforms import CircularSplineMap

SMALL = {"hidden": (8,), "units": 3}


def recipe(name: str, **options) -> NormalFlow:
    parameters = signature(named_flows()[name]).parameters
    settings = {key: value for key, value in SMALL.items() if key in parameters}
    return NormalFlow(name, length=1, settings=settings, **options)


def has_cheap_draws(name: str) -> bool:
    """Returns True for bijections of real vectors with cheap draws."""
    transform = recipe(name).transforms(2)[0]
    return transform.cheap in ("both", "forward") and not transform.discrete and not transform.stochastic


NAMES = [name for name in named_flows() if has_cheap_draws(name)]


def test_most_named_flows_have_cheap_draws() -> None:
    expected = {
        "glow",
        "iaf",
        "naf",
        "nice",
        "nsf",
        "planar",
        "radial",
        "realnvp",
        "residualflow",
        "sylvester",
    }
    assert expected <= set(NAMES)
    assert "maf" not in NAMES
    assert all(isinstance(fb.NodeNoise(name).rules()["*"], fb.noise.Recipe) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_flow_works_as_density_posterior_and_noise(name: str) -> None:
    torch.manual_seed(0)
    flow = fb.flows.FlowModel(fb.distributions.NormalBase(2, 0.0, 1.0), recipe(name).transforms(2)[0])
    x = torch.randn(32, 2)
    optimizer = torch.optim.SGD(flow.parameters(), 1e-2)
    loss = -flow().log_prob(2 * x + 1).mean()
    loss.backward()
    optimizer.step()
    assert -flow().log_prob(2 * x + 1).mean() <= loss

    vae = fb.vae.VAE((1, 2, 2), 2, hidden=(4,), posterior=name, length=1)
    vae.log_prob(torch.rand(8, 1, 2, 2).round()).mean().backward()
    assert all(p.grad.isfinite().all() for p in vae.parameters() if p.grad is not None)
    assert any(p.grad is not None for p in vae.flow.parameters())

    batches = [(x, (x[:, 0] > 0).long())]
    for joint in (None, "layers"):
        method = fb.NodeNoise(recipe(name, joint=joint, kl_samples=2), epochs=1, repeats=1)
        network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        posterior = method.fit(network, batches, seed=0, progress=False)
        assert posterior.predict(x, 4, seed=0).log_samples.isfinite().all()
        draws = posterior.draws(3, seed=0)
        assert {layer_draws.shape for layer_draws in draws.values()} == {(3, 2), (3, 3)}
        assert posterior.log_prob(draws).isfinite().all()


def test_residual_noise_of_wide_layers_has_an_exact_density() -> None:
    noise = fb.NodeNoise("residualflow").rules()["*"].build(Layout(12))
    draws, log_prob = noise.posterior().rsample_and_log_prob((4,))
    torch.testing.assert_close(noise.posterior().log_prob(draws), log_prob, rtol=0, atol=1e-3)


def test_saved_residual_noise_has_the_same_draws_and_densities(tmp_path) -> None:
    """Its networks use power iteration in training and exact singular values in evaluation."""
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    posterior = fb.NodeNoise("residualflow", epochs=1).fit(
        network, [(x, (x[:, 0] > 0).long())], seed=0, progress=False
    )
    loaded = fb.load_posterior(posterior.save(tmp_path / "noise.safetensors"), network)
    assert not any(module.training for module in loaded.model.modules())
    for each in (loaded, posterior):
        draws = posterior.draws(3, seed=0)
        each.model.train()
        torch.testing.assert_close(each.draws(3, seed=0), draws, rtol=0, atol=1e-6)
        log_prob = each.log_prob(draws)
        each.model.eval()
        torch.testing.assert_close(log_prob, posterior.log_prob(draws), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["nsf", "iaf"])
def test_noise_starts_at_the_base_of_the_recipe(name: str) -> None:
    noise = recipe(name, base_scale=0.2).build(Layout(3))
    draws = noise.draw((20_000,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), torch.ones(3), atol=0.01, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.full((3,), 0.2), atol=0.005, rtol=0)


def test_named_recipe_prints_compares_and_round_trips_through_a_dictionary() -> None:
    nsf = NormalFlow("nsf", settings={"bins": 4})
    assert str(nsf) == "NormalFlow(flow='nsf', length=2, settings={'bins': 4})"
    assert recipe_from_dict(nsf.to_dict()) == nsf
    assert fb.NodeNoise("nsf", joint="full").rules()["*"] == NormalFlow("nsf", joint="full")
    assert len({nsf, NormalFlow("iaf")}) == 2


def test_slow_draws_raise_a_warning() -> None:
    for slow in (NormalFlow("maf"), fb.noise.FlowNoise(fb.transforms.Autoregressive)):
        with pytest.warns(FlowBNNWarning) as caught:
            slow.build(Layout(3))
        assert caught[0].message.fields["kind"] == "slow draws"
        assert caught[0].filename == __file__
    NormalFlow("maf").build(Layout(1))  # one entry costs one pass
    with pytest.warns(FlowBNNWarning) as caught:
        fb.vae.VAE((1, 8, 8), 3, hidden=(4,), posterior=lambda dim, size: fb.flows.MAF(dim, size).transform)
    assert caught[0].message.fields["kind"] == "slow draws"
    assert caught[0].filename == __file__
    with pytest.warns(FlowBNNWarning) as caught:
        fb.fit_target(
            fb.flows.MAF(2, hidden=(4,)), lambda x: -x.square().sum(-1), epochs=1, samples=2, progress=False
        )
    assert caught[0].message.fields["kind"] == "slow draws"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: NormalFlow("nfs"), "flow"),
        (lambda: NormalFlow("nsf", settings={"bin": 4}).build(Layout(2)), "bin"),
        (lambda: NormalFlow("nsf", settings={"circular": True}).build(Layout(2)), "settings"),
        (
            lambda: NormalFlow("iaf", settings={"univariate": CircularSplineMap()}).build(Layout(2)),
            "settings",
        ),
        (lambda: fb.NodeNoise("maf"), "kind"),
        (lambda: fb.NodeNoise(NormalFlow("nsf"), joint="full"), "joint"),
        (lambda: fb.NodeNoise({"*": None}, prior_scale=0.1), "prior_scale"),
    ],
)
def test_bad_input_raises(call, argument: str) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
