"""Tests that predictions of networks that route rows are those of the sampled networks one at a time."""

import threading
import warnings

import pytest
import torch
from sampling_helpers import one_at_a_time, sampling
from torch import nn
from torch.nn import functional as F

import flowbnn as fb
from flowbnn.noise import noise_layers
from flowbnn.noise.contexts import context_of
from flowbnn.noise.modes import align_batch_axes


class Experts(nn.Module):
    """Every row goes to the expert that a noisy gate chooses."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(4, 3), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))

    def forward(self, x):
        chosen, hidden = self.gate(x).argmax(1), x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            hidden[chosen == number] = expert(x[chosen == number])
        return self.out(torch.tanh(hidden))


class EarlyExit(nn.Module):
    """Rows that a first head is sure of go no further."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        outputs = self.head(hidden)
        unsure = outputs.softmax(1).amax(1) < 0.6
        if bool(unsure.any()):
            outputs = outputs.clone()
            outputs[unsure] = self.last(torch.tanh(self.second(hidden[unsure])))
        return outputs


class Frames(nn.Module):
    """Every frame of a video is a row of the inner layers."""

    def __init__(self, steps_first=False):
        super().__init__()
        self.frame, self.out, self.steps_first = nn.Linear(4, 6), nn.Linear(6, 2), steps_first

    def forward(self, x):
        if self.steps_first:
            hidden = torch.tanh(self.frame(x.transpose(0, 1).flatten(0, 1)))
            return self.out(hidden.unflatten(0, (x.shape[1], len(x))).mean(0))
        return self.out(torch.tanh(self.frame(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


class StepsFirst(Frames):
    def __init__(self):
        super().__init__(steps_first=True)


class Graph(nn.Module):
    """Nodes read their neighbours along the edges."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x, edges):
        hidden = torch.tanh(self.first(x))
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]])
        return self.second(hidden)


class Bags(nn.Module):
    """Bags of words, which begin at the offsets."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(20, 6, mode="mean"), nn.Linear(6, 2)

    def forward(self, words, offsets):
        return self.out(torch.tanh(self.words(words, offsets)))


class Queries(nn.Module):
    """Learned queries go through a noisy layer before they meet the examples."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.project, self.read = nn.Linear(8, 8), nn.Linear(4, 8)
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        queries = self.project(self.queries).expand(len(x), -1, -1)
        memory = self.read(x)
        return self.out(self.attention(queries, memory, memory, need_weights=False)[0].mean(1))


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])


class Meeting(nn.Module):
    """Computes each row from all rows: by a threshold, a rank, or a position in a queue."""

    def __init__(self, meet):
        super().__init__()
        self.first, self.last, self.meet = nn.Linear(4, 8), nn.Linear(8, 2), meet

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(self.meet(hidden) * hidden)


CASES = {
    "largest of the batch": (
        lambda: Meeting(lambda h: (h >= h.amax(0)).float()),
        lambda: (torch.randn(20, 4),),
    ),
    "above the median": (
        lambda: Meeting(lambda h: (h > h.median(0).values).float()),
        lambda: (torch.randn(20, 4),),
    ),
    "first of the batch": (
        lambda: Meeting(lambda h: F.one_hot(h[:, 0].argmax(0), len(h)).unsqueeze(1).float()),
        lambda: (torch.randn(20, 4),),
    ),
    "capacity": (
        lambda: Meeting(lambda h: ((h > 0).float().cumsum(0) < 5).float()),
        lambda: (torch.randn(20, 4),),
    ),
    "experts": (Experts, lambda: (torch.randn(12, 4),)),
    "early exit": (EarlyExit, lambda: (torch.randn(12, 4),)),
    "frames": (Frames, lambda: (torch.randn(6, 5, 4),)),
    "steps first": (StepsFirst, lambda: (torch.randn(6, 5, 4),)),
    "graph": (Graph, lambda: (torch.randn(6, 4), EDGES)),
    "bags": (Bags, lambda: (torch.randint(20, (14,)), torch.tensor([0, 3, 4, 9]))),
    "queries": (Queries, lambda: (torch.randn(6, 7, 4),)),
}
MEETING = {"largest of the batch", "above the median", "first of the batch", "capacity", "early exit"}


@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize("name", CASES)
def test_predictions_are_those_of_the_networks_one_at_a_time(name, site):
    make, inputs = CASES[name]
    for seed in range(2):
        torch.manual_seed(seed)
        model = fb.to_stochastic(make(), {"*": fb.noise.NormalAffine(site=site, base_scale=0.8)}).eval()
        posterior, given = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()), inputs()
        truth = one_at_a_time(model, given, 10, seed).softmax(-1)
        for number in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = posterior.predict(given if len(given) > 1 else given[0], 10, seed=seed)
            kinds = [entry.message.kind for entry in caught]
            assert kinds == [] or (kinds == ["batch"] and name in MEETING and number == 0)
            torch.testing.assert_close(
                found.samples.exp() if found.samples.min() < 0 else found.samples, truth
            )
        assert truth.std(0).max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*depend on the other rows:flowbnn.errors.FlowBNNWarning")
def test_networks_that_route_rows_by_values_run_one_at_a_time():
    torch.manual_seed(0)
    sequential = {"experts", "early exit", "queries"}
    for name, (make, inputs) in CASES.items():
        model, given = fb.to_stochastic(make(), {"*": fb.noise.NormalAffine()}), inputs()
        given = given if len(given) > 1 else given[0]
        with sampling(model, 4) as draw:
            draw(given)
            error = draw.prediction.measure(given).vmap_error
        assert bool(error) == (name in sequential), (name, error)


def test_sampled_networks_are_those_of_the_draws():
    torch.manual_seed(0)
    model = fb.to_stochastic(Frames(), {"*": fb.noise.NormalAffine()}).eval()
    posterior, x = fb.posterior.NoisePosterior(model, fb.likelihoods.Gaussian(dim=2)), torch.randn(4, 5, 4)
    draws, found = posterior.draws(3, seed=2), posterior.predict(x, 3, seed=2).samples
    for index in range(3):
        hidden = F.linear(x * draws["frame"][index], model.frame.weight, model.frame.bias).tanh()
        expected = F.linear(hidden.mean(1) * draws["out"][index], model.out.weight, model.out.bias)
        torch.testing.assert_close(found[index][..., :2], expected)


def test_noise_of_experts_stays_per_row_in_training():
    torch.manual_seed(0)
    for _ in range(10):
        model = fb.to_stochastic(Experts(), {"*": fb.noise.NormalAffine()})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert align_batch_axes(model, torch.randn(32, 4)) == ([], [])
        assert {layer.layout.batch_axis for layer in noise_layers(model).values()} == {0}


@pytest.mark.parametrize("make", [Frames, StepsFirst])
def test_training_draws_once_for_all_frames_of_an_example(make):
    torch.manual_seed(0)
    model = fb.to_stochastic(make(), {"*": fb.noise.NormalAffine()})
    align_batch_axes(model, torch.randn(8, 5, 4))
    seen = []
    model.frame.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),), prepend=True)
    model.frame.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model(torch.randn(7, 5, 4))
    draws = seen[0].unflatten(0, (7, 5) if make is Frames else (5, 7))
    draws = draws if make is Frames else draws.transpose(0, 1)
    assert torch.equal(draws, draws[:, :1].expand_as(draws))
    assert len(draws[:, 0].unique(dim=0)) == 7


def test_predictions_of_eight_threads_equal_those_of_one():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    model = fb.to_stochastic(plain, {"*": fb.noise.NormalAffine()})
    posterior, x = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()), torch.randn(9, 4)
    truth = [posterior.predict(x, 5, seed=seed).samples for seed in range(8)]
    with fb.noise_mode(model, "off"):
        off = model(x)
    found, plainly = [None] * 8, [None] * 8

    def work(seed):
        for _ in range(5):
            found[seed] = posterior.predict(x, 5, seed=seed).samples
            with fb.noise_mode(model, "off"):
                plainly[seed] = model(x)
                assert context_of(noise_layers(model)["0"]).modes[noise_layers(model)["0"].key].mode == "off"

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert all(torch.allclose(one, off) for one in plainly)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
def test_a_compiled_network_is_unwrapped(tmp_path):
    """Its layers had other names, and hooks that they did not call."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    inside = nn.Sequential(torch.compile(plain[0], backend="eager"), *plain[1:])
    data = [(torch.randn(30, 4), torch.arange(30) % 2)]
    quiet = {"progress": False, "seed": 0}
    found = []
    for network in (plain, torch.compile(plain, backend="eager"), inside):
        posterior = fb.calibrate(network, data, folds=0, **quiet)
        again = fb.load_posterior(posterior.save(tmp_path / "one"), network)
        laplace = fb.Laplace(layers="last", epochs=0).fit(network, data, **quiet)
        kept = fb.load_posterior(laplace.save(tmp_path / "two"), network)
        assert list(noise_layers(posterior.model)) == ["0", "2"]
        found.append(
            [one.predict(data[0][0], 4, seed=0).probabilities for one in (posterior, again, laplace, kept)]
        )
    for others in found[1:]:
        for ours, theirs in zip(others, found[0], strict=True):
            assert torch.equal(ours, theirs)


def test_a_network_that_was_compiled_after_its_conversion_is_fitted_saved_and_loaded(tmp_path):
    shared = torch.compile(nn.Linear(4, 4), backend="eager")
    plain = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2))
    model = fb.to_stochastic(plain, {"*": fb.noise.NormalAffine()})
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear, nn.Linear]
    x, quiet = torch.randn(30, 4), {"progress": False, "seed": 0}
    compiled = torch.compile(model, backend="eager")
    posterior = fb.fit(
        compiled, [(x, torch.arange(30) % 2)], epochs=1, inplace=True, **quiet, validation=None
    )
    assert posterior.model is model
    again = fb.load_posterior(posterior.save(tmp_path / "one"), plain)
    assert torch.equal(
        again.predict(x, 4, seed=0).probabilities, posterior.predict(x, 4, seed=0).probabilities
    )


class ScalarParameter(nn.Module):
    """Network with a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * self.layer(x)


@pytest.mark.parametrize(
    "method",
    [
        fb.SWAG(epochs=6),
        fb.BayesByBackprop(epochs=1),
        fb.HMC(samples=2, warmup=2, chains=1, epochs=1),
        fb.Laplace("diag", layers="all", predictive="sampled", prior_scale=0.1, epochs=0),
    ],
)
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # of short fits
def test_parameters_without_axes_are_sampled(method):
    torch.manual_seed(0)
    inputs = torch.randn(12, 4)
    posterior = method.fit(ScalarParameter(), [(inputs, torch.arange(12) % 3)], seed=0, progress=False)
    draws = posterior.draws(2, seed=1)
    assert draws["scale"].shape == (2,)
    outputs = posterior.collect(inputs, fb.posterior.PredictOptions(2, seed=1))[0]
    for index, network in enumerate(posterior.networks(2, seed=1)):
        torch.testing.assert_close(network(inputs), outputs[index], rtol=1e-4, atol=1e-5)
