"""Tests of networks whose outputs depend on other rows of the batch, or on random numbers of their own."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise import noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.contexts import NoiseContext
from flowbnn.posterior.trace import examples_interact

QUIET = {"progress": False, "seed": 0}


class Block(nn.Module):
    """Two layers with a function of the hidden units between them."""

    def __init__(self, function=lambda hidden: hidden):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.last(self.function(torch.tanh(self.first(x))))


class BatchNormalized(Block):
    """Block with a BatchNorm that has no running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.function = self.norm


class Graph(Block):
    """Sums the hidden units of the neighbours of each node."""

    def forward(self, x, edges):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden.index_add(0, edges[1], hidden[edges[0]]))


def attention(hidden):
    return F.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None])[0]


DEPENDENCES = {
    "none": (Block, []),
    "dropout": (lambda: Block(lambda h: F.dropout(h, 0.1)), ["random"]),
    "randn": (lambda: Block(lambda h: h + torch.randn_like(h)), ["random"]),
    "attention": (lambda: Block(attention), ["batch"]),
    "batch norm": (BatchNormalized, ["batch"]),
    "first row": (lambda: Block(lambda h: h - h[:1]), ["batch"]),
    "last row": (lambda: Block(lambda h: h - h[-1:]), ["batch"]),
}


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", DEPENDENCES)
def test_predictions_warn_once_of_random_numbers_and_of_rows_that_interact(name, noisy):
    torch.manual_seed(0)
    make, expected = DEPENDENCES[name]
    network, likelihood = make(), fb.likelihoods.Categorical()
    if noisy:
        noise = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
        posterior = fb.posterior.NoisePosterior(noise, likelihood)
    else:
        posterior = fb.methods.PointPosterior(network, likelihood)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (5, 7):
            posterior.predict(torch.randn(rows, 4), 2, seed=0)
    assert [entry.message.kind for entry in caught] == expected
    if name == "batch norm":
        assert caught[0].message.fields["layers"] == ["norm"]


@pytest.mark.parametrize("name", DEPENDENCES)
def test_examples_that_interact_are_told_from_random_numbers(name):
    torch.manual_seed(0)
    make, expected = DEPENDENCES[name]
    state = torch.get_rng_state()
    assert examples_interact(make(), torch.randn(20, 4)) == (expected == ["batch"])
    torch.set_rng_state(state)
    before = torch.randn(20, 4)
    examples_interact(make(), before)
    assert not examples_interact(make(), before[:1])


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # random numbers and batch statistics
@pytest.mark.parametrize("name", DEPENDENCES)
def test_fit_finds_examples_that_interact_from_two_rows(name):
    torch.manual_seed(0)
    make, expected = DEPENDENCES[name]
    data = TensorLoader(torch.randn(16, 4), torch.arange(16) % 3, batch_size=8)
    model = fb.to_stochastic(make(), {"*": fb.noise.NormalAffine(base_loc=1.5)})
    posterior = fb.fit(model, data, epochs=1, report=False, **QUIET, validation=None)
    assert posterior.rows_interact == (expected == ["batch"])


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])


def graph_loader():
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(6, 4, generator=generator), EDGES), torch.arange(6) % 3) for _ in range(3)]


@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize("samples", [1, 3])
def test_training_draws_once_per_batch_if_rows_interact(site, samples):
    torch.manual_seed(0)
    recipe = fb.noise.NormalAffine(site=site, base_scale=0.5)
    model = fb.to_stochastic(Graph(), {"*": recipe})
    options = {"epochs": 1, "repeats": samples, "report": False, **QUIET}
    posterior = fb.fit(model, graph_loader(), **options, validation=None)
    assert posterior.rows_interact
    factors = []
    layer = posterior.model.first
    layer.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),), prepend=True)
    layer.register_forward_hook(lambda module, args, output: factors.append(args[0]))
    (inputs, targets), elbo = graph_loader()[0], fb.ELBO(posterior.likelihood, 18)
    terms = elbo(posterior.model, inputs, targets, samples=samples)
    assert len(terms.outputs) == 6 * samples
    assert len(factors) == samples
    for factor in factors:
        assert torch.equal(factor, factor[:1].expand_as(factor))
    assert len(torch.stack(factors).unique(dim=0)) == samples


def test_spread_of_training_draws_is_that_of_predictions_if_rows_interact():
    """Draws per row would average the noise of the neighbours, and so narrow the outputs."""
    torch.manual_seed(0)
    model = fb.to_stochastic(Graph(), {"*": fb.noise.NormalAffine(base_scale=0.5)})
    posterior = fb.fit(model, graph_loader(), epochs=1, noise_lr=0.0, report=False, **QUIET, validation=None)
    inputs = graph_loader()[0][0]
    options = fb.posterior.PredictOptions(1000, seed=0)
    predicted = posterior.collect(inputs, options)[0].std(0)
    with torch.no_grad(), NoiseContext(make_noise_modes(posterior.model, "sample", 1, 0)):
        trained = torch.stack([posterior.model(*inputs) for _ in range(1000)]).std(0)
    torch.testing.assert_close(trained, predicted, rtol=0.15, atol=0.0)


def test_rows_that_interact_are_stored_and_need_shared_draws(tmp_path):
    torch.manual_seed(0)
    model = fb.to_stochastic(Graph(), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(model, graph_loader(), epochs=1, report=False, **QUIET, validation=None)
    loaded = fb.load_posterior(posterior.save(tmp_path / "graph.safetensors"), Graph())
    for each in (posterior, loaded):
        with pytest.raises(FlowBNNError) as caught:
            each.predict(graph_loader()[0][0], 2, shared=False)
        assert (caught.value.kind, caught.value.argument) == ("unsupported", "shared")
    independent = fb.fit(
        fb.to_stochastic(Block(), {"*": fb.noise.NormalAffine()}),
        TensorLoader(torch.randn(16, 4), torch.arange(16) % 3, batch_size=8),
        epochs=1,
        report=False,
        **QUIET,
        validation=None,
    )
    assert not independent.rows_interact
    assert not any(layer.layout.one_draw for layer in noise_layers(independent.model).values())


def test_a_network_that_fails_on_replaced_rows_has_no_dependence():
    class Sorted(Block):
        def forward(self, x):
            if x[:, 0].diff().min() <= 0:
                raise ValueError("rows must be sorted")
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FlowBNNWarning)
        assert not examples_interact(Sorted(), torch.arange(32.0).view(8, 4))
