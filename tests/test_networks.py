"""Tests of calls and copies of networks that take or return unusual objects."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import flowbnn as fb
from flowbnn.batches import call, move
from flowbnn.errors import FlowBNNError
from flowbnn.networks import copy_network, deepcopy_network


class TakesOne(nn.Linear):
    """Network that takes a dictionary or a list as one argument."""

    def forward(self, batch):
        first = batch["x"] if isinstance(batch, dict) else batch[0]
        return super().forward(first)


class TakesTwo(nn.Linear):
    """Network with two arguments."""

    def forward(self, x, shift):
        return super().forward(x) + shift


def test_networks_that_take_a_dictionary_or_a_list_as_one_argument():
    x, network = torch.ones(3, 2), TakesOne(2, 1)
    expected = nn.Linear.forward(network, x)
    for inputs in ({"x": x, "mask": x}, [x, x], (x, x)):
        assert torch.equal(call(network, inputs), expected)
    two = TakesTwo(2, 1)
    assert torch.equal(call(two, (x, 1.0)), call(two, {"x": x, "shift": 1.0}))
    with pytest.raises(TypeError):
        call(two, {"x": x, "word": 1.0})


def test_dictionaries_of_outputs_with_logits():
    class Logits(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "features": x}

    network = Logits(2, 3)
    assert call(network, torch.ones(4, 2)).shape == (4, 3)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_networks_whose_weights_are_computed_can_be_copied():
    old = nn.utils.weight_norm(nn.Linear(2, 3))
    pruned = prune.l1_unstructured(nn.Linear(2, 3), "weight", amount=0.5)
    cached = nn.Linear(2, 3)
    cached.cache = [cached.weight * 2]
    for network in (old, pruned, cached):
        network(torch.ones(1, 2)).sum().backward()  # the weight has a history now
        copy = copy_network(network)
        assert torch.equal(copy(torch.ones(1, 2)), network(torch.ones(1, 2)))
        posterior = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())
        assert torch.equal(posterior.sample()(torch.ones(1, 2)), network(torch.ones(1, 2)))


def test_tensors_of_inference_mode_can_be_used_by_autograd():
    with torch.inference_mode():
        x = torch.ones(2, 2)
    nn.Linear(2, 1)(move(x, torch.device("cpu"))).sum().backward()


@pytest.mark.parametrize(
    "use",
    [
        lambda network, data: fb.MAP(epochs=1).fit(network, data, progress=False),
        lambda network, data: fb.HMC(samples=2, warmup=2, epochs=0).fit(network, data, progress=False),
        lambda network, data: fb.Laplace(layers="all", epochs=0).fit(network, data, progress=False),
        lambda network, data: fb.calibrate(network, data, progress=False),
        lambda network, data: fb.Temperature().fit(point_posterior(network), data, progress=False),
    ],
    ids=["map", "hmc", "laplace", "calibrate", "temperature"],
)
def test_fits_in_inference_mode_are_refused(use):
    data = [(torch.ones(6, 4), torch.arange(6) % 3)]
    with torch.inference_mode(), pytest.raises(FlowBNNError) as caught:
        use(nn.Linear(4, 3), data)
    assert caught.value.kind == "unsupported"
    assert "inference_mode" in str(caught.value)


def point_posterior(network):
    return fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())


def test_training_in_no_grad_is_refused():
    with torch.no_grad(), pytest.raises(FlowBNNError) as caught:
        fb.MAP(epochs=1).fit(nn.Linear(4, 3), [(torch.ones(6, 4), torch.arange(6) % 3)], progress=False)
    assert caught.value.kind == "unsupported"
    assert "no_grad" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_named_by_every_function():
    scripted = torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2))
    with pytest.raises(FlowBNNError) as caught:
        fb.to_stochastic(scripted, {"*": fb.noise.NormalAffine()})
    assert "TorchScript" in str(caught.value)


UNUSABLE = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)),
    "meta": lambda: nn.Sequential(nn.Linear(4, 3, device="meta"), nn.Linear(3, 2)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:Lazy modules:UserWarning"
)
@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize(
    "use",
    [
        lambda network, data: fb.MAP(epochs=1).fit(network, data, progress=False),
        lambda network, data: fb.Temperature().fit(network, data, progress=False),
        lambda network, data: fb.calibrate(network, data, progress=False),
        lambda network, data: fb.compare(network, data, data, methods=["mle"], epochs=1, progress=False),
        lambda network, data: fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}),
    ],
    ids=["fit", "temperature", "calibrate", "compare", "to_stochastic"],
)
def test_networks_without_weights_or_layers_are_refused(name, use):
    with pytest.raises(FlowBNNError) as caught:
        use(UNUSABLE[name](), [(torch.ones(6, 4), torch.arange(6) % 2)])
    assert (caught.value.kind, caught.value.argument) == ("network", "network")
    if name != "scripted":
        assert "'0'" in str(caught.value)


def test_embeddings_with_sparse_gradients_are_trained():
    tokens, network = torch.arange(12) % 5, nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    posterior = fb.MAP(epochs=2).fit(network, (tokens, tokens % 3), progress=False)
    assert network[0].sparse
    assert not torch.equal(posterior.model.get_parameter("0.weight"), network[0].weight)


def test_sparse_adam_is_refused():
    tokens, network = torch.arange(12) % 5, nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    method = fb.MAP(epochs=1, optimizer=torch.optim.SparseAdam)
    with pytest.raises(FlowBNNError) as caught:
        method.fit(network, (tokens, tokens % 3), progress=False)
    assert caught.value.argument == "optimizer"


def test_networks_whose_attributes_contain_themselves_are_copied():
    network, settings = nn.Linear(2, 1), {"stored": torch.ones(1, requires_grad=True) * 2.0}
    settings["self"] = settings
    network.settings = settings
    copied = deepcopy_network(network)
    assert copied.settings["self"] is copied.settings
    assert copied.settings["stored"].is_leaf


def test_dropout_in_place_changes_no_data():
    torch.manual_seed(0)
    inputs = torch.randn(20, 4)
    expected, data = inputs.clone(), [(inputs, torch.arange(20) % 3)]
    fb.MAP(epochs=2).fit(nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 3)), data, progress=False)
    assert torch.equal(inputs, expected)


def test_dictionaries_of_strings_have_rows():
    class Lengths(nn.Linear):
        def forward(self, text):
            return super().forward(torch.tensor([[float(len(word))] for word in text]))

    inputs, targets = {"text": ["a", "bb", "ccc", "dddd"]}, torch.arange(4) % 2
    posterior = fb.MAP(epochs=1).fit(Lengths(1, 2), [(inputs, targets)], progress=False)
    expected = posterior.model(inputs["text"]).softmax(-1)
    torch.testing.assert_close(posterior.predict(inputs).probabilities, expected)
    assert fb.evaluate(posterior, [(inputs, targets)])["nll"] > 0.0


class Decrements(nn.Linear):
    """Network that changes its inputs in place."""

    def forward(self, x):
        x -= 1.0
        return super().forward(x)


@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
def test_inputs_that_a_network_changes_in_place_stay_as_they_are(as_tuple, tmp_path):
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    inputs, original = ((x,) if as_tuple else x), x.clone()
    posterior = fb.DeepEnsemble(members=2, epochs=2).fit(Decrements(4, 3), [(inputs, y)], progress=False)
    loaded = fb.load_posterior(posterior.save(tmp_path / "p.safetensors"), Decrements(4, 3))
    for each in (posterior, loaded):
        weights = [member.get_parameter("weight") for member in each.networks(2, seed=0)]
        biases = [member.get_parameter("bias") for member in each.networks(2, seed=0)]
        expected = [((original - 1.0) @ w.T + b).softmax(-1) for w, b in zip(weights, biases, strict=True)]
        torch.testing.assert_close(each.predict(inputs, 2, seed=0).probabilities, sum(expected) / 2)
    assert torch.equal(x, original)


def test_networks_that_differentiate_by_torch_func_are_refused():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x):
            return torch.vmap(torch.func.grad(lambda row: self.energy(row).squeeze()))(x)

    network = fb.to_stochastic(Force(), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        fb.fit(network, (torch.randn(12, 4), torch.randn(12, 4)), epochs=1, progress=False)
    assert (caught.value.kind, caught.value.layer) == ("unsupported", "energy.0")


def test_one_number_and_lists_of_examples_are_no_outputs():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    class Images(nn.Linear):
        def forward(self, images):
            return torch.stack([super(Images, self).forward(image).mean(0) for image in images])

    with pytest.raises(FlowBNNError) as caught:
        fb.MAP(epochs=1).fit(Mean(4, 1), (torch.randn(12, 4), torch.randn(12)), progress=False)
    assert "one row for each example" in str(caught.value)
    data = [([torch.randn(2, 4) for _ in range(12)], torch.arange(12) % 3)]
    with pytest.raises(FlowBNNError) as caught:
        fb.MAP(epochs=1).fit(Images(4, 3), data, progress=False)
    assert "pad them to one tensor" in str(caught.value)


def test_attributes_that_cannot_be_copied_are_named():
    network = nn.Sequential(nn.Linear(4, 3))
    network[0].lock = threading.Lock()
    for use in (
        lambda: fb.MAP(epochs=1).fit(network, (torch.randn(6, 4), torch.arange(6) % 3), progress=False),
        lambda: fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}),
    ):
        with pytest.raises(FlowBNNError) as caught:
            use()
        assert (caught.value.kind, caught.value.argument) == ("network", "network")
        assert "'0.lock' is a lock" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "advice"),
    [
        (lambda y: None, "return a tensor"),
        (lambda y: y.detach().numpy(), "return a tensor"),
        (lambda y: {"loss_boxes": y.sum(), "loss_labels": y.sum()}, "in training mode as well"),
        (lambda y: y.T, "one row for each example"),
        (lambda y: torch.complex(y, y), "return logits or real numbers"),
    ],
    ids=["none", "array", "losses", "transposed", "complex"],
)
def test_outputs_that_are_no_rows_of_numbers_are_refused(result, advice):
    class Returns(nn.Linear):
        def forward(self, x):
            return result(super().forward(x))

    with pytest.raises(FlowBNNError) as caught:
        fb.MAP(epochs=1).fit(Returns(4, 3), (torch.randn(6, 4), torch.arange(6) % 3), progress=False)
    assert advice in str(caught.value)
