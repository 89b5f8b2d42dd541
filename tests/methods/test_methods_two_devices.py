"""Tests that no method mixes tensors of two devices, on a stand-in for an accelerator that needs none."""

import math

import pytest
import torch
from method_cases import CASES, PROBLEMS
from problems import loader, small

import flowbnn as fb
from slow_cases import mark_slow
from two_devices import DEVICE, accelerator

OPTIONS = {"progress": False, "seed": 0}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize(
    "case",
    mark_slow(
        [*(f"{name} regression" for name in CASES), "node-noise classification", "laplace classification"],
        [
            *(
                f"{name} regression"
                for name in CASES
                if name not in ("mle", "map", "damp", "nuts", "laplace", "mnf")
            ),
            "laplace classification",
        ],
    ),
)
def test_fits_and_predictions_stay_on_one_device(case, monkeypatch):
    name, kind = case.split()
    make, outputs = PROBLEMS[kind]
    data = loader(make(32))
    with accelerator(monkeypatch):
        settings = {} if name in ("swag", "sgld") else {"epochs": 2}  # these two need several epochs
        posterior = CASES[name].make(**settings).fit(small(outputs), data, **OPTIONS)
        assert {value.device for value in posterior.model.parameters()} == {DEVICE}
        prediction = posterior.predict(make(8).tensors[0], 4, seed=0)
        assert prediction.samples.device == DEVICE
        assert math.isfinite(fb.evaluate(posterior, data, samples=4, progress=False)["nll"])


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_flows_stay_on_one_device(monkeypatch):
    with accelerator(monkeypatch):
        data = loader(PROBLEMS["regression"][0](32))
        posterior = fb.NodeNoise("planar", epochs=1).fit(small(2), data, **OPTIONS)
        assert posterior.predict(torch.zeros(3, 4), 2, seed=0).samples.device == DEVICE
        density = fb.fit_density(fb.flows.RealNVP(2), torch.randn(64, 2), epochs=1, progress=False)
        assert {value.device for value in density.parameters()} == {DEVICE}


def test_the_stand_in_refuses_tensors_of_two_devices(monkeypatch):
    with accelerator(monkeypatch):
        tensor = torch.zeros(3, device=DEVICE)
        assert (tensor + torch.tensor(1.0)).device == DEVICE  # numbers may be on the CPU
        assert tensor.cpu().device.type == "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            tensor.clamp_(max=torch.ones(3))
