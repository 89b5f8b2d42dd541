"""Tests of exported densities: log-densities and samples in ONNX Runtime."""

import onnxruntime
import pytest
import torch

import flowbnn as fb
from flowbnn.density import Density
from flowbnn.distributions import MixtureBase, NormalBase
from flowbnn.flows import FlowModel
from flowbnn.transforms import Affine, BlockTriangular, Compose, LULinear
from slow_cases import mark_slow

SMALL = {"length": 1, "hidden": (4,)}
FLOWS = {
    "nice": lambda: fb.flows.NICE(3, length=2, hidden=(4,)),
    "realnvp": lambda: fb.flows.RealNVP(3, length=2, hidden=(4,)),
    "maf": lambda: fb.flows.MAF(3, **SMALL),
    "iaf": lambda: fb.flows.IAF(3, **SMALL),
    "nsf": lambda: fb.flows.NSF(3, **SMALL),
    "householder": lambda: fb.flows.Householder(3),
    "lu": lambda: FlowModel(NormalBase(3), Compose(LULinear(3, permute=True, bias=True), Affine(3))),
    "block triangular": lambda: FlowModel(NormalBase(3), BlockTriangular((1, 2), "chain")),
    "mixture base": lambda: FlowModel(MixtureBase(3, 2), LULinear(3)),
}
FORWARD = {
    "planar": lambda: fb.flows.Planar(3, length=1),
    "sylvester": lambda: fb.flows.Sylvester(3, length=1),
}


def random_density(make):
    torch.manual_seed(0)
    flow = make()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return Density(flow, torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.5, 2.0, 1.0])).eval()


def run(path, feeds):
    session = onnxruntime.InferenceSession(str(path))
    values = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.as_tensor, values), strict=True))


@pytest.mark.parametrize("name", mark_slow(FLOWS, ["maf"]))
def test_log_prob_in_onnx(name, tmp_path):
    density = random_density(FLOWS[name])
    file = fb.export(density, tmp_path / "density.onnx")
    for rows in (1, 5):
        x = density.sample(rows, seed=rows)
        with torch.no_grad():
            expected = density.log_prob(x)
        torch.testing.assert_close(run(file.path, {"x": x})["log_prob"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mark_slow(FORWARD, ["planar"]))
def test_samples_in_onnx(name, tmp_path):
    density = random_density(FORWARD[name])
    file = fb.export(density, tmp_path / "density.onnx", noise="input")
    outputs, expected = run(file.path, file.draws(3, 5)), density.sample(5, seed=3)
    torch.testing.assert_close(outputs["samples"], expected, rtol=1e-5, atol=1e-5)
    assert outputs["log_prob"].shape == (5,)


def test_samples_and_their_density_in_torch(tmp_path):
    density = random_density(FLOWS["realnvp"])
    file = fb.export(density, tmp_path / "density.pt2", noise="input")
    outputs = torch.export.load(file.path).module()(*file.draws(3, 5).values())
    samples = density.sample(5, seed=3)
    torch.testing.assert_close(outputs["samples"], samples)
    torch.testing.assert_close(outputs["log_prob"], density.log_prob(samples).detach(), rtol=1e-5, atol=1e-5)


def test_estimated_densities_are_refused(tmp_path):
    density = Density(fb.flows.FFJORD(2, hidden=(4,), trace="hutchinson"))
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(density, tmp_path / "density.pt2")
    assert error.value.kind in ("unsupported", "export")
