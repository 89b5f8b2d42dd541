"""Tests of adapters in a network with noise: merging and saving keep the noise, or raise an error."""

import copy

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError


class LoRALinear(nn.Module):
    """Linear layer with a low-rank adapter, in the structure of peft."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer, self.scaling, self.merged = base_layer, {"default": 2.0}, False
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def merge(self, safe_merge=False, adapter_names=None):
        product = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight.data += self.scaling["default"] * product
        self.merged = True

    def forward(self, x):
        outputs = self.base_layer(x)
        if self.merged:
            return outputs
        return outputs + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


class AdaptedNetwork(nn.Module):
    """Network with two adapted layers, in the structure of a PeftModel."""

    def __init__(self, make=LoRALinear):
        super().__init__()
        self.peft_config = {"default": {}}
        self.first, self.last = make(nn.Linear(4, 8)), make(nn.Linear(8, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def merge_adapter(self):
        for module in self.modules():
            if hasattr(module, "base_layer"):
                module.merge()

    def merge_and_unload(self):
        self.merge_adapter()
        network = copy.deepcopy(self)
        network.first, network.last = network.first.base_layer, network.last.base_layer
        return network

    def save_pretrained(self):
        return {name: value.clone() for name, value in self.state_dict().items() if "lora_" in name}


def posterior_of(rules, make=LoRALinear):
    torch.manual_seed(0)
    network = AdaptedNetwork(make).eval()
    model = fb.to_stochastic(network, {name: fb.noise.NormalAffine(base_scale=0.5) for name in rules})
    return network, fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())


@pytest.mark.parametrize("rules", [["*"], ["*lora_*"], ["*base_layer"]])
@torch.no_grad()
def test_merging_a_sample_keeps_its_noise(rules):
    network, posterior = posterior_of(rules)
    x, sample = torch.randn(5, 4), posterior.sample(0)
    expected = sample(x)
    torch.testing.assert_close(expected.softmax(-1), posterior.predict(x, 1, seed=0).samples[0])
    assert (expected - network(x)).abs().max() > 0.01
    merged = sample.merge_and_unload()
    torch.testing.assert_close(merged(x), expected)
    assert isinstance(merged.first, nn.Linear)


@torch.no_grad()
def test_saved_adapters_hold_the_noise_of_a_sample():
    network, posterior = posterior_of(["*lora_*"])
    x, sample = torch.randn(5, 4), posterior.sample(0)
    network.load_state_dict(sample.save_pretrained(), strict=False)
    torch.testing.assert_close(network(x), sample(x))


def test_networks_with_noise_are_neither_merged_nor_saved_without_it():
    _, posterior = posterior_of(["*"])
    for model in (posterior.model, copy.deepcopy(posterior).model):
        for call, kind in ((model.merge_adapter, "merge"), (model.save_pretrained, "save")):
            with pytest.raises(FlowBNNError) as caught:
                call()
            assert caught.value.kind == kind
    with pytest.raises(FlowBNNError) as caught:
        posterior.sample(0).save_pretrained()  # the base layers hold noise that adapters cannot
    assert caught.value.kind == "save"
    plain = fb.to_deterministic(posterior.model)
    plain.merge_adapter()
    assert set(plain.save_pretrained())


class DoRALinear(LoRALinear):
    """Adapter whose forward pass reads the weights of its layers."""

    def __init__(self, base_layer):
        super().__init__(base_layer)
        self.use_dora = {"default": True}


def test_a_sample_with_noise_outside_its_weights_is_not_merged():
    _, posterior = posterior_of(["*"], DoRALinear)
    with pytest.raises(FlowBNNError) as caught:
        posterior.sample(0).merge_and_unload()
    assert caught.value.kind == "merge"
