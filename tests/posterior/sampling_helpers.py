"""Networks with every kind of noise, other compilers, and outputs by a chosen strategy."""

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

import flowbnn as fb
from flowbnn.noise.base import make_noise_modes, noise_layers
from flowbnn.noise.contexts import NoiseContext
from flowbnn.noise.gaussians import SampleDraws, SharedDraws
from flowbnn.posterior.noise import NoisePosterior, NoiseSampler
from flowbnn.posterior.prediction import Prediction, PredictionCache, PredictOptions

MIXED = {
    "conv1": fb.noise.Dropout(0.3, site="channel"),
    "conv2": fb.noise.NormalInvConv(),
    "fc1": fb.noise.NormalPlanar(2),
    "fc2": fb.noise.NormalAffine(components=2),
    "*": fb.noise.NormalAffine(),
}
MAPPED = {
    "conv1": fb.noise.NormalAffine(site="position"),
    "conv2": fb.noise.NormalInvConv(site="position"),
    "fc1": fb.noise.Dropout(0.2, site="position"),
    "fc2": fb.noise.NormalAffine(site="position", components=2),
    "fc3": fb.noise.NormalPlanar(1, site="position"),
}
CACHES = WeakKeyDictionary()  # one for each network, as a posterior has it


def compile_by(backend, monkeypatch):
    """Lets torch.compile use another backend."""
    original = torch.compile

    def compile_(function, *, mode, **options):
        return original(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_)


@contextmanager
def sampling(model, samples, strategy="auto", cache=None, **options):
    """Opens a prediction and yields a function ``draw(inputs, start, stop)`` that returns the outputs of some samples.

    Args:
        model: Stochastic network.
        samples: Number of samples.
        strategy: ``"auto"``, ``"vmap"`` or ``"sequential"``.
        cache: Cache of the posterior; one for each network by default.
        options: Options of the prediction.
    """
    cache = CACHES.setdefault(model, PredictionCache()) if cache is None else cache
    posterior = NoisePosterior(model, fb.likelihoods.Categorical())
    with Prediction(model, PredictOptions(samples, **options), samples, cache) as prediction:
        sampler = NoiseSampler(prediction)

        def draw(inputs, start=0, stop=samples):
            if strategy == "auto":
                prediction.state.values["sampler"] = sampler
                return posterior.outputs(inputs, range(start, stop), prediction)
            trace, inputs = prediction.measure(inputs), prediction.to_device(inputs)
            run = sampler.run_vmap if strategy == "vmap" else sampler.run_sequentially
            return run(inputs, range(start, stop), trace)

        draw.sampler, draw.prediction = sampler, prediction
        yield draw


def sample_outputs(model, inputs, samples, strategy="auto", **options):
    """Returns outputs ``[samples, rows, ...]`` of a stochastic network."""
    with sampling(model, samples, strategy, **options) as draw:
        return draw(inputs)


def compiled_outputs(model, inputs, samples, seed=1, **options):
    """Returns the outputs of compiled passes."""
    return sample_outputs(model, inputs, samples, seed=seed, compile=True, **options)


def one_at_a_time(model, inputs, samples, seed):
    """Returns the outputs of every sampled network by itself, multiplied by the hooks: the reference for all strategies."""
    modes = make_noise_modes(model, "shared", samples, seed)
    shared = SharedDraws(list(noise_layers(model).values()), modes, torch.device("cpu"))
    outputs = []
    with torch.no_grad():
        for index in range(samples):
            with NoiseContext(modes, SampleDraws(shared, index), sharded=False):
                outputs.append(model(*inputs) if isinstance(inputs, tuple) else model(inputs))
    return torch.stack(outputs)


class SinglePrecisionHead(nn.Module):
    """Network that disables autocast for its last layer, which therefore has no weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())
