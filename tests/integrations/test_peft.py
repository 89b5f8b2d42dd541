"""Tests of noise on the adapters of a real peft model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_bert, texts
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.integrations.peft import load_adapters, save_adapters, to_stochastic_lora
from flowbnn.training import load_tensors, save_tensors

pytestmark = pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning", "ignore::FutureWarning")
RECIPES = {
    "gaussian": fb.noise.NormalAffine(base_scale=0.3),
    "flow": fb.noise.NormalPlanar(2, base_scale=0.3),
}
WORDS = {name: values for name, values in texts(12).columns.items() if name != "labels"}


def make_lora():
    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query", "value"])
    model = get_peft_model(make_bert(), config).eval()
    for name, value in model.named_parameters():
        if "lora_B" in name:  # as after training
            nn.init.normal_(value, std=0.5)
    return model


def fit(recipe, **options):
    model = to_stochastic_lora(make_lora(), recipe, **options)
    return fb.fit(model, texts(), epochs=1, report=False, progress=False, validation=None, seed=0)


@pytest.mark.parametrize("name", RECIPES)
def test_noise_is_on_the_low_rank_vectors(name, tmp_path):
    posterior = fit(RECIPES[name])
    layers = fb.noise.noise_layers(posterior.model)
    assert {layer.layout.dim for layer in layers.values()} == {3}
    assert len(layers) == 2
    samples = posterior.predict(WORDS, 3, seed=1).samples
    with torch.no_grad():
        single = [fb.batches.call(network, WORDS) for network in posterior.networks(3, seed=1)]
    torch.testing.assert_close(samples, torch.stack(single).softmax(-1), atol=1e-6, rtol=1e-5)
    assert samples.std(0).max() > 1e-4
    path = save_adapters(posterior, tmp_path / "adapters.safetensors")
    whole = posterior.save(tmp_path / "whole.safetensors")
    assert path.stat().st_size < 0.8 * whole.stat().st_size
    loaded = load_adapters(path, make_bert())
    torch.testing.assert_close(loaded.predict(WORDS, 3, seed=1).samples, samples)
    assert type(loaded) is type(posterior)


def test_merged_samples_keep_the_noise():
    posterior = fit(RECIPES["flow"])
    sample = posterior.sample(1)
    with torch.no_grad():
        expected = sample(**WORDS).logits
        merged = sample.merge_and_unload()
        torch.testing.assert_close(merged(**WORDS).logits, expected, atol=1e-5, rtol=1e-4)
    assert not any("lora" in name for name, _ in merged.named_modules())
    with pytest.raises(FlowBNNError) as caught:
        posterior.model.merge_and_unload()
    assert caught.value.kind == "merge"


def test_weights_may_stay_fixed():
    model = make_lora()
    posterior = fit(RECIPES["gaussian"], train_weights=False)
    state = posterior.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_invalid_models_and_files_are_refused(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        to_stochastic_lora(make_bert())
    assert caught.value.argument == "model"
    posterior = fit(RECIPES["gaussian"])
    path = save_adapters(posterior, tmp_path / "adapters.safetensors")
    with pytest.raises(FlowBNNError) as caught:
        load_adapters(path, nn.Linear(2, 2))
    assert caught.value.kind == "architecture"
    tensors, document = load_tensors(path)
    save_tensors(path, dict(list(tensors.items())[1:]), document)  # the base model must not replace it
    with pytest.raises(FlowBNNError) as caught:
        load_adapters(path, make_bert())
    assert (caught.value.kind, caught.value.fields["names"]) == ("file", [next(iter(tensors))])
    whole = posterior.save(tmp_path / "whole.safetensors")
    with pytest.raises(FlowBNNError) as caught:
        load_adapters(whole, make_bert())
    assert caught.value.kind == "file"
    plain = fb.MLE(epochs=0).fit(nn.Linear(2, 2), [(torch.zeros(4, 2), torch.arange(4) % 2)], progress=False)
    with pytest.raises(FlowBNNError) as caught:
        save_adapters(plain, tmp_path / "other.safetensors")
    assert caught.value.kind == "save"
