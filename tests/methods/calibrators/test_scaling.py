"""Tests of files of posteriors with matrix scaling."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.methods.calibrators.scaling import ScaledPosterior
from flowbnn.training import load_tensors, save_tensors


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("forge", [lambda tensor: tensor.to(torch.int16), lambda tensor: tensor * torch.nan])
def test_forged_files_are_refused(tmp_path, name, forge):
    network = nn.Linear(2, 3)
    inner = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())
    path = ScaledPosterior(inner, 2.0, torch.eye(3), torch.zeros(3)).save(tmp_path / "scaled.safetensors")
    tensors, document = load_tensors(path)
    tensors[f"posterior.{name}"] = forge(tensors[f"posterior.{name}"])
    save_tensors(path, tensors, document)
    with pytest.raises(fb.FlowBNNError) as error:
        fb.load_posterior(path, network)
    assert error.value.kind == "file"
