"""Every kind of noise in one network, other compilers, and the outputs of compiled passes."""

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

import flowbnn as fb
from flowbnn.posterior import forward as passes
from flowbnn.posterior.base import Prediction, PredictOptions
from flowbnn.posterior.forward import Kept
from flowbnn.posterior.noise_sampler import Sampler

MIXED = {
    "conv1": fb.Dropout(0.3, site="channel"),
    "conv2": fb.NormalInvConv(),
    "fc1": fb.NormalPlanar(2),
    "fc2": fb.NormalAffine(components=2),
    "*": fb.NormalAffine(),
}
MAPPED = {
    "conv1": fb.NormalAffine(site="position"),
    "conv2": fb.NormalInvConv(site="position"),
    "fc1": fb.Dropout(0.2, site="position"),
    "fc2": fb.NormalAffine(site="position", components=2),
    "fc3": fb.NormalPlanar(1, site="position"),
}


def compile_by(backend, monkeypatch):
    """torch.compile with another backend."""
    original = torch.compile

    def compile_(function, *, mode, **options):
        return original(function, backend=backend, **options)

    monkeypatch.setattr(passes.torch, "compile", compile_)


KEPT = WeakKeyDictionary()  # of each network, as a posterior would keep it


@contextmanager
def drawing(model, samples, plan="auto", **options):
    """Draws from a network during one prediction: ``draw(inputs, low, high)``."""
    kept = KEPT.setdefault(model, Kept())
    with Prediction(model, PredictOptions(samples, **options), samples, kept) as prediction:
        sampler = Sampler(prediction, plan)

        def draw(inputs, low=0, high=samples):
            return sampler(inputs, low, high)

        draw.sampler = sampler
        yield draw


def compiled_outputs(model, inputs, samples, seed=1, **options):
    with drawing(model, samples, seed=seed, compile=True, **options) as draw:
        return draw(inputs)
