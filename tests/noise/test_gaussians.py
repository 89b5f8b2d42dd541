"""Tests of concatenated Gaussians."""

import torch
from prepared_context import prepared_context
from torch import nn

import flowbnn as fb
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.gaussians import Gaussians


def stochastic(rules=None):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)).double()
    model = fb.to_stochastic(
        network,
        rules
        or {
            "0": fb.noise.NormalAffine(base_loc=0.7, prior_scale=0.3),
            "1": fb.noise.NormalPlanar(2),
            "*": fb.noise.NormalAffine(),
        },
    ).double()
    with torch.no_grad():
        for parameter in fb.noise.noise_parameters(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_packed_kl_of_a_flow_is_what_its_density_says():
    """Against -log p(x) + log q(x) at many draws, where q's density comes from the inverse."""
    model = stochastic({"1": fb.noise.NormalInvConv(kl_samples=20_000), "*": fb.noise.NormalAffine()})
    layers = noise_layers(model)
    found = divergences(layers)
    flow, noise = layers["1"].posterior(), layers["1"]
    with torch.no_grad():
        x = flow.rsample((20_000,))
        terms = flow.log_prob(x) - noise.prior.distribution().log_prob(x)
    spread = terms.std() / 20_000**0.5
    assert abs(found["1"].kl - terms.mean()) < 6 * spread
    assert abs(found.total.kl - sum(term.kl for term in found.values())) < 1e-9
    assert abs(found.total.entropy - sum(term.entropy for term in found.values())) < 1e-9


def test_packed_draws_of_a_flow_follow_its_distribution():
    model = stochastic({"1": fb.noise.NormalInvConv(), "*": fb.noise.NormalAffine()})
    layers = list(noise_layers(model).values())
    with torch.no_grad():
        block = Gaussians(layers)
        draws, _ = block.sample(block.draw_base(40_000, 0, None, None), 40_000)
        packed = draws[block.keys.index(layers[1].key)]
        single = layers[1].posterior().rsample((40_000,))
    spread = (packed.var(0) + single.var(0)).div(40_000).sqrt()
    assert ((packed.mean(0) - single.mean(0)).abs() < 5 * spread).all()
    assert (packed.std(0) / single.std(0) - 1).abs().max() < 0.03


def test_a_block_follows_the_priors_it_was_made_of():
    model = stochastic()
    layers = list(noise_layers(model).values())
    layers[0].prior.loc.data.fill_(3.0)  # torch counts no version of this
    assert (Gaussians(layers).priors[0] == 3.0).sum() == layers[0].layout.dim


def test_draw_with_kl_has_the_draws_and_the_kl_of_separate_calls():
    """Same distribution of draws, same exact KL for the Gaussians, an unbiased one for the flow, and the pass uses the draws once."""
    model = stochastic({"1": fb.noise.NormalInvConv(kl_samples=4000), "*": fb.noise.NormalAffine()})
    layers = noise_layers(model)
    (context, prepared_terms), truth = prepared_context(layers, 3000), divergences(layers)
    for name in ("0", "2"):
        assert torch.allclose(prepared_terms[name].kl, truth[name].kl)
        assert torch.allclose(prepared_terms[name].entropy, truth[name].entropy)
    flow, prior = layers["1"].posterior(), layers["1"].prior.distribution()
    with torch.no_grad():
        x = flow.rsample((4000,))
        error = (flow.log_prob(x) - prior.log_prob(x)).std() / 4000**0.5
    assert abs(prepared_terms["1"].kl - truth["1"].kl) < 5 * 2**0.5 * error
    draws = dict(context.prepared.tensors)
    assert set(draws) == {noise.key for noise in layers.values()}
    single = layers["1"].posterior().rsample((3000,))
    mine = draws[layers["1"].key]
    spread = (mine.var(0) + single.var(0)).div(3000).sqrt()
    assert mine.shape == single.shape
    assert ((mine.mean(0) - single.mean(0)).abs() < 5 * spread).all()
    x = torch.randn(3000, 3, dtype=torch.float64)
    hidden = model[0].weight @ (x * draws[layers["0"].key]).T + model[0].bias[:, None]
    seen = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]), prepend=True)
    with context:
        model(x)
        assert torch.allclose(seen[0], hidden.T)
        model(x)
    assert not torch.allclose(seen[1], hidden.T), "the next pass draws anew"


def test_draw_with_kl_returns_none_if_layers_cannot_be_concatenated():
    model = stochastic(
        {"1": fb.noise.NormalAffine(components=2), "0": fb.noise.Dropout(0.1), "2": fb.noise.NormalPlanar(1)}
    )
    assert prepared_context(noise_layers(model), 5)[1] is None


def test_gradients_of_draw_with_kl_are_those_of_the_single_layers():
    model = stochastic({"1": fb.noise.NormalInvConv(), "*": fb.noise.NormalAffine()})
    objective = fb.objectives.ELBO(fb.likelihoods.Categorical(), 10)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    parameters = list(model.parameters())
    torch.manual_seed(4)
    terms = objective(model, x, y)
    whole = torch.autograd.grad(terms.loss, parameters, retain_graph=True)
    of_likelihood = torch.autograd.grad(
        -terms.log_likelihood, parameters, retain_graph=True, allow_unused=True
    )
    of_kl = torch.autograd.grad(terms.kl / 10, parameters, allow_unused=True)
    for total, first, second in zip(whole, of_likelihood, of_kl, strict=True):
        parts = sum(term for term in (first, second) if term is not None)
        assert torch.allclose(total, parts)
