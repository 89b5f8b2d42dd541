"""Tests of DAMP: gradients at perturbed weights, and unchanged weights of the network."""

import torch
from problems import Tied, blobs
from torch import nn

from flowbnn.likelihoods import make_likelihood
from flowbnn.methods.damp import _perturbed_loss
from flowbnn.training import Clock


def test_gradient_is_taken_at_the_perturbed_weights_of_each_sub_batch():
    network, (inputs, labels) = Tied(), blobs(11).tensors
    likelihood = make_likelihood("categorical")
    initial = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(3)
    loss, logs = _perturbed_loss(network, 0.3, 2, likelihood, network, (inputs, labels), Clock(0, 0, 1, 1))
    loss.backward()
    assert all(torch.equal(value, initial[name]) for name, value in network.state_dict().items())
    others = [Tied(), Tied()]
    torch.manual_seed(3)
    total, expected = 0.0, {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    for other, (low, high) in zip(others, ((0, 5), (5, 11)), strict=True):
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                value = network.get_parameter(name)
                parameter.copy_(value if "bias" in name else value * (1.0 + 0.3 * torch.randn_like(value)))
        sub_loss = nn.functional.cross_entropy(other(inputs[low:high]), labels[low:high]) * (high - low) / 11
        sub_loss.backward()
        total += float(sub_loss.detach())
        for name, parameter in other.named_parameters():
            expected[name] += parameter.grad
    assert abs(float(loss.detach()) - total) < 1e-5
    assert abs(float(logs["log_likelihood"]) + total) < 1e-5
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
