"""What a fit says of noise that has learned nothing."""

import warnings

import pytest
import torch
from small_problem import QUIET, loader, network
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNWarning


@pytest.fixture(autouse=True)
def _short_runs_may_stay_at_the_prior():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fallen back onto its prior", category=FlowBNNWarning)
        yield


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # the further layers of these short fits
def test_warnings_name_the_layer():
    warnings.resetwarnings()
    warnings.simplefilter("always", FlowBNNWarning)
    with pytest.warns(FlowBNNWarning, match="layer '0' has fallen back onto its prior"):
        fb.fit(
            fb.to_stochastic(network(), {"0": fb.noise.NormalAffine(base_scale=0.5)}),
            loader(),
            epochs=1,
            noise_lr=1e-7,
            **QUIET,
        )
    model = fb.to_stochastic(network(), {"2": fb.noise.NormalAffine()})
    with torch.no_grad():
        fb.noise.noise_layers(model)["2"].transform[0].raw_log_scale.fill_(-6.0)
    with pytest.warns(FlowBNNWarning, match="layer '2' has collapsed to a point") as caught:
        fb.fit(model, loader(), epochs=1, noise_lr=1e-7, **QUIET)
    assert {one.filename for one in caught} == {__file__}  # the caller's own line

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.read = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x) + nn.functional.linear(x, self.read.weight)

    with pytest.warns(FlowBNNWarning, match="layer 'read' carries noise but the network never calls it"):
        fb.fit(fb.to_stochastic(Idle(), {"*": fb.noise.NormalAffine()}), loader(), epochs=1, **QUIET)


def test_one_warning_for_each_ailment():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)), nn.Linear(4, 3))
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.deep(x) + nn.functional.linear(x, self.first.weight + self.second.weight)

    model = fb.to_stochastic(Deep(), {"*": fb.noise.NormalAffine(base_scale=0.5)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.fit(model, loader(), epochs=1, noise_lr=1e-7, **QUIET)
    idle, prior = [str(one.message) for one in caught if issubclass(one.category, FlowBNNWarning)]
    assert "layers 'first', 'second' carry noise but the network never calls them" in idle
    assert (
        "'deep.4' and 3 more has fallen back onto its prior" in prior
    )  # the idle ones are not told of twice


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (nn.Sigmoid(), True),
        (torch.sigmoid, True),
        (lambda outputs: outputs.squeeze(1).sigmoid(), True),
        (lambda outputs: 0.5 + 0.1 * outputs.tanh(), False),  # logits of one sign
        (lambda outputs: torch.sigmoid(outputs).logit(), False),
        (lambda outputs: torch.sigmoid(outputs).clamp(1e-6, 1 - 1e-6).double().float(), True),
        (lambda outputs: torch.func.vmap(lambda row: row * torch.sigmoid(row))(outputs), False),
    ],
    ids=["module", "function", "method", "logits", "undone", "clamped", "vmap"],
)
def test_a_sigmoid_at_the_end_is_warned_of(last, told):
    class Ended(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 1), last

        def forward(self, x):
            return self.last(self.layer(x))

    data = [(torch.randn(30, 4), torch.arange(30) % 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlowBNNWarning)
        fb.MLE(epochs=1).fit(Ended(), data, **QUIET)
    lines = [str(one.message) for one in caught if "gives probabilities" in str(one.message)]
    assert len(lines) == told
    assert all("(it ends in a sigmoid)" in line for line in lines)
