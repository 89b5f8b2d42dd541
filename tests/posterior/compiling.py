"""Every kind of noise in one network, other compilers, and the outputs of compiled passes."""

from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

import flowbnn as fb
from flowbnn.posterior import noise
from flowbnn.posterior import prediction as passes
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


def compile_by(backend, monkeypatch):
    """torch.compile with another backend."""
    original = torch.compile

    def compile_(function, *, mode, **options):
        return original(function, backend=backend, **options)

    monkeypatch.setattr(passes.torch, "compile", compile_)


KEPT = WeakKeyDictionary()  # of each network, as a posterior would keep it


@contextmanager
def drawing(model, samples, plan="auto", kept=None, **options):
    """Draws from a network during one prediction: ``draw(inputs, low, high)``.

    Args:
        plan: ``"absorb"`` and ``"fold"`` insist on one of the plain ways, where the network allows it.
    """
    kept = KEPT.setdefault(model, PredictionCache()) if kept is None else kept
    with Prediction(model, PredictOptions(samples, **options), samples, kept) as prediction:
        posterior = noise.NoisePosterior(model, fb.likelihoods.Categorical())

        def draw(inputs, low=0, high=samples):
            shown = None
            if plan != "auto":
                found, shown = (
                    noise.plan_for(prediction, prediction.ready(inputs)),
                    prediction.recorded(inputs),
                )
                shown.plan = replace(found, fold="") if plan == "absorb" else replace(found, absorbed=())
            try:
                return posterior.outputs(inputs, range(low, high), prediction)
            finally:
                if shown is not None:
                    shown.plan = found

        draw.sampler = prediction.state.get("sampler", lambda: noise.Sampler(prediction))
        draw.prediction = prediction
        yield draw


def compiled_outputs(model, inputs, samples, seed=1, **options):
    with drawing(model, samples, seed=seed, compile=True, **options) as draw:
        return draw(inputs)


def sample_outputs(model, inputs, samples, plan="auto", **options):
    """Outputs ``[samples, batch, ...]`` of a stochastic network."""
    with drawing(model, samples, plan, **options) as draw:
        return draw(inputs)


def plan_for(model, inputs, **options):
    """The plan of a first prediction."""
    with drawing(model, 4, kept=PredictionCache(), **options) as draw:
        return noise.plan_for(draw.prediction, draw.prediction.ready(inputs))
