"""Networks that users bring: each is converted, fitted, predicted, calibrated, saved, loaded and exported, or refused in one line."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnxruntime
import pytest
import tests.user_networks.architectures
import tests.user_networks.functions
import tests.user_networks.libraries
import tests.user_networks.structures
import tests.user_networks.styles  # noqa: F401
import torch
from tests.user_networks.cases import CASES, Case
from torch import nn

import flowbnn as fb
from flowbnn.batches import call, move, named_tensors, split_batch
from flowbnn.data.formats import as_inputs, as_loader
from flowbnn.errors import FlowBNNError
from flowbnn.export.export import uncertainties
from flowbnn.posterior import PredictOptions
from slow_cases import mark_slow

SAMPLES = 2
# networks that have a relative in the default run
RELATIVES = (
    "bert eager attn", "bert grad ckpt", "bert pair", "bert token cls", "distilbert", "electra", "hf convnext",
    "hf mixtral cls", "hf resnet", "hf segformer pixels", "hf swin", "llama cls", "lora bert rules lora only",
    "t5 encoder cls", "timm mobilenetv3 small 050", "timm resnet10t", "timm test convnext", "pyg sage graphs",
    "regression squeezed", "multilabel",
    "attention decoder", "compiled part", "densenet", "graph of sensors", "mixer", "perceiver", "pixel shuffle regression",
    "radiance field", "rotary attention", "siren", "squeezenet", "state space", "tab transformer", "volumes to volumes",
    "wide and deep clicks",
)  # fmt: skip
STEPS = ("convert", "fit", "predict", "calibrate", "load")


# networks of the default run that are exported
EXPORTED = ("early exit",)
# networks that no format takes, with the layer that the message names: empty for code of the network itself, and for its inputs
REFUSED_EXPORTS = {
    "always dropout": "",  # random numbers
    "bfloat16 model": "",  # rounding
    "early exit": "",
    "hf mixtral cls": "model.layers.0.mlp.experts",
    "moe top1 routing": "",
    "packed collate natural": "",
    "packed lstm lengths": "",
    "padded tagger lengths": "",
    "physics informed": "",  # derivatives
    "pyg gat nodes": "",
    "pyg gcn graph loader": "",
    "pyg sage graphs": "",
    "task of a batch": "",
}
# networks with operations that ONNX lacks
WITHOUT_ONNX = ("complex inputs", "fourier operator")


def trains(name: str) -> bool:
    """Returns True if a network can be converted and fitted."""
    return not {"convert", "fit"} & set(CASES[name].refusals)


class Trial:
    """Steps of one case. Every step returns nothing, or raises an error."""

    def __init__(self, case: Case, folder: Any) -> None:
        self.case, self.folder, self.data = case, folder, case.data()

    def network(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        network = self.case.make()
        return network.double() if self.case.double else network

    def convert(self) -> None:
        self.noisy = fb.to_stochastic(self.network(), self.case.rules)

    def fit(self) -> None:
        options = {"likelihood": self.case.likelihood, "output": self.case.output, "validation": None}
        self.posterior = fb.fit(
            self.noisy, self.data, epochs=1, report=False, progress=False, seed=0, **options
        )

    def inputs(self) -> Any:
        inputs = split_batch(next(iter(as_loader(self.data))))[0]
        weight = next(value for value in self.posterior.model.parameters())
        return move(inputs, weight.device, weight.dtype if weight.is_floating_point() else None)

    def outputs(self, posterior: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return posterior.collect(as_inputs(self.inputs()), PredictOptions(SAMPLES, seed=1))[0].double()

    def predict(self) -> None:
        outputs = self.outputs(self.posterior)
        with torch.no_grad():
            single = [call(network, self.inputs()) for network in self.posterior.networks(SAMPLES, seed=1)]
        expected = torch.stack(single).double()
        scale = 1.0 + float(expected.abs().max())
        assert (outputs - expected).abs().max() / scale < self.case.tolerance

    def calibrate(self) -> None:
        options = {"likelihood": self.case.likelihood, "output": self.case.output}
        options = {name: value for name, value in options.items() if value not in ("auto", None)}
        candidate = "noise" if "calibrate" in self.case.refusals else self.case.calibrator
        short = {"candidates": [candidate], "folds": 0, "structure": "factorized", "prior": "fixed"}
        posterior = fb.calibrate(self.network(), self.data, progress=False, seed=0, **short, **options)
        assert torch.isfinite(self.outputs(posterior)).all()

    def load(self) -> None:
        path = self.posterior.save(self.folder / "posterior.safetensors")
        loaded = fb.load_posterior(path, self.network(seed=1))
        if self.case.tolerance < float("inf"):
            torch.testing.assert_close(
                self.outputs(loaded), self.outputs(self.posterior), atol=1e-6, rtol=1e-5
            )

    def export(self) -> str:
        """Exports to ONNX, or to ``torch.export`` if ONNX lacks an operation, and returns the suffix of the file."""
        try:
            suffix = self.export_to("onnx")
        except FlowBNNError:
            suffix = self.export_to("pt2")
        return suffix

    def export_to(self, suffix: str) -> str:
        inputs = self.inputs()  # more rows than those that are traced
        file = fb.export(self.posterior, self.folder / f"model.{suffix}", inputs, samples=SAMPLES, seed=1)
        feeds = dict(zip(file.inputs, [tensor for _, tensor in named_tensors(inputs)], strict=True))
        if suffix == "onnx":
            session = onnxruntime.InferenceSession(str(file.path))
            values = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
            outputs = dict(zip(file.outputs, map(torch.as_tensor, values), strict=True))
        else:
            outputs = torch.export.load(file.path).module()(*feeds.values())
        torch.manual_seed(0)
        for name, value in uncertainties(self.posterior.predict(inputs, SAMPLES, seed=1)).items():
            torch.testing.assert_close(outputs[name], value, rtol=1e-5, atol=1e-5)
        return suffix


def run_steps(case: Case, folder: Any) -> dict[str, str]:
    """Returns the kind of the error of each step that is refused. After a refusal, steps that need its result are left out."""
    trial, refusals = Trial(case, folder), dict[str, str]()
    for step in STEPS:
        if step != "calibrate" and ("convert" in refusals or "fit" in refusals):
            continue
        function: Callable[[], None] = getattr(trial, step)
        if step == "calibrate" and "convert" in refusals:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function()
        except FlowBNNError as error:
            refusals[step] = error.kind if "\n" not in str(error) else "several lines"
    return refusals


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("name", mark_slow(CASES, [name for name in CASES if name not in RELATIVES]))
def test_network_passes_every_step_or_is_refused(name, tmp_path):
    case = CASES[name]
    assert run_steps(case, tmp_path) == dict(case.refusals)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unrefined")
@pytest.mark.parametrize("name", mark_slow([name for name in CASES if trains(name)], EXPORTED))
def test_exported_file_equals_predictions_or_is_refused(name, tmp_path):
    trial = Trial(replace(CASES[name], double=False), tmp_path)  # ONNX Runtime has few operations of float64
    trial.convert()
    trial.fit()
    refusal = REFUSED_EXPORTS.get(name)
    if refusal is None:
        assert trial.export() == ("pt2" if name in WITHOUT_ONNX else "onnx")
        return
    with pytest.raises(FlowBNNError) as caught:
        trial.export()
    assert "\n" not in str(caught.value)
    assert caught.value.kind == "export"
    assert (caught.value.layer or "") == refusal


def test_rounding_and_random_numbers_are_the_only_differences_from_single_networks(tmp_path):
    inexact = {name for name, case in CASES.items() if case.tolerance != 1e-6}
    # the second draws its dropout masks anew in every pass, without a seed
    assert inexact == {"bfloat16 model", "always dropout"}
    trial = Trial(CASES["bfloat16 model"], tmp_path)
    trial.convert()
    trial.noisy.double()
    trial.fit()
    trial.case = replace(trial.case, tolerance=1e-6)
    trial.predict()


def test_registered_layers_have_noise():
    class OwnLinear(nn.Module):
        """Linear layer of an own class."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x @ self.weight.T

    with pytest.raises(FlowBNNError) as caught:
        fb.to_stochastic(OwnLinear(), {"*": fb.noise.NormalAffine()})
    assert "register_layer(OwnLinear, lambda layer: flowbnn.noise.Layout(" in str(caught.value)
    fb.noise.register_layer(OwnLinear, lambda layer: fb.noise.Layout(layer.weight.shape[1]))
    assert fb.describe(fb.to_stochastic(OwnLinear(), {"*": fb.noise.NormalAffine()}))[0].dim == 4
