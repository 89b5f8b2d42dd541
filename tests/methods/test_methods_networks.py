"""Tests of methods on networks with unusual parameters and passes, against their sampled networks run one at a time."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn.methods import Method

QUIET: dict[str, Any] = {"progress": False, "seed": 1}
pytestmark = [
    pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning"),  # layers that keep their weights
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


class Scaled(nn.Module):
    """Network with a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.second = (
            nn.Linear(4, 6),
            nn.Parameter(torch.tensor(1.5)),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.scale * torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    """Network whose activations are computed again in the backward pass."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.hidden, x, use_reentrant=self.use_reentrant))


class Unchecked(Checkpointed):
    """The same network without checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x))


def normalized() -> nn.Module:
    """Returns a network with the old weight norm, whose weight is no parameter."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def pruned() -> nn.Module:
    """Returns a network with a pruned layer, whose weight is no parameter."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    prune.l1_unstructured(network[0], "weight", amount=0.5)
    return network


METHODS: dict[str, Method] = {
    "map": fb.MAP(epochs=1),
    "ensemble": fb.DeepEnsemble(2, epochs=1),
    "swag": fb.SWAG(epochs=4),
    "sgld": fb.SGLD(epochs=4, samples=2, cycles=1),
    "bayes by backprop": fb.BayesByBackprop(epochs=1),
    "mnf": fb.MNF(epochs=1),
    "hmc": fb.HMC(samples=2, warmup=2, chains=1, epochs=1),
    "laplace": fb.Laplace("diag", layers="all", predictive="sampled", prior_scale=0.1, epochs=0),
}
SAMPLED = ["map", "ensemble", "swag", "sgld", "bayes by backprop", "mnf", "laplace"]
CASES = [
    *((Scaled, name) for name in ("swag", "bayes by backprop", "hmc", "laplace")),
    *((make, name) for make in (normalized, pruned) for name in SAMPLED),
    *((Checkpointed, name) for name in ("map", "swag")),
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_predictions_are_those_of_the_sampled_networks(make: Any, name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    network, data = make(), [(torch.randn(12, 4), torch.arange(12) % 3) for _ in range(2)]
    posterior, inputs = METHODS[name].fit(network, data, **QUIET), data[0][0]
    prediction = posterior.predict(inputs, 2, seed=0)
    with torch.no_grad():
        outputs = [sampled.eval()(inputs) for sampled in posterior.networks(2, seed=0)]
    expected = torch.stack(outputs).softmax(-1).mean(0)
    torch.testing.assert_close(prediction.probabilities, expected, atol=1e-5, rtol=0.0)
    assert posterior.sample(seed=0)(inputs).shape == (12, 3)
    if make is normalized:
        return  # load_posterior refuses the old weight norm
    loaded = fb.load_posterior(posterior.save(tmp_path / "saved.safetensors"), make())
    torch.testing.assert_close(loaded.predict(inputs, 2, seed=0).probabilities, prediction.probabilities)


DRAWN = [
    fb.BayesByBackprop(epochs=1),
    fb.MNF(epochs=1),
    fb.IVON(epochs=1),
    fb.DAMP(epochs=1),
]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("method", DRAWN, ids=lambda method: method.name)
def test_activation_checkpointing_of_drawn_weights_is_refused(method: Method, use_reentrant: bool) -> None:
    """The second run of the layers would see other weights, so that gradients would be wrong."""
    network = nn.Sequential(nn.Linear(4, 4), Checkpointed(use_reentrant))
    with pytest.raises(fb.FlowBNNError) as error:
        method.fit(network, [(torch.randn(12, 4), torch.arange(12) % 3)], **QUIET)
    assert (error.value.kind, error.value.argument) == ("unsupported", "network")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_leaves_the_fit_of_noise_as_it_is(use_reentrant: bool) -> None:
    data, fits = [(torch.randn(12, 4), torch.arange(12) % 3)], []
    for kind in (Checkpointed, Unchecked):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), kind(use_reentrant))
        fits.append(fb.MCDropout(0.3, epochs=2).fit(network, data, **QUIET).model.state_dict())
    for name, value in fits[0].items():
        torch.testing.assert_close(value, fits[1][name])


class TwoOutputs(nn.Linear):
    """Network that returns a tuple of two outputs, and possibly a state whose first axis is not that of the examples."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return (outputs[:, :2], outputs[:, 2:]) if self.out_features > 2 else (outputs, outputs.mean(0))


def output_warnings(network, output):
    """Returns the shapes in warnings about several outputs, and the number of classes that are fitted."""
    torch.manual_seed(0)
    data = [(torch.randn(20, 4), torch.arange(20) % 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = fb.MLE(epochs=1).fit(network, data, output=output, progress=False)
    messages = [warning.message for warning in caught if isinstance(warning.message, fb.FlowBNNWarning)]
    shapes = [message.fields["shapes"] for message in messages if message.kind == "outputs"]
    return shapes, posterior.predict(data[0][0]).probabilities.shape[1]


def test_fits_to_the_first_of_several_outputs_raise_a_warning():
    assert output_warnings(TwoOutputs(4, 5), None) == ([[[20, 2], [20, 3]]], 2)


@pytest.mark.parametrize(("output", "classes"), [(0, 2), (1, 3)])
def test_selected_outputs_raise_no_warning(output, classes):
    assert output_warnings(TwoOutputs(4, 5), output) == ([], classes)


def test_a_state_beside_the_output_raises_no_warning():
    assert output_warnings(TwoOutputs(4, 2), None) == ([], 2)
