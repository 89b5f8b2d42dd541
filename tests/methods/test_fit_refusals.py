"""What fit and predict refuse, each in one line."""

import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError


def nan_at(row: int) -> DataLoader:
    x, y = (tensor.clone() for tensor in blobs().tensors)
    x[row] = float("nan")
    return DataLoader(TensorDataset(x, y), batch_size=40)


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (lambda m: fb.fit(network(), loader(), **QUIET), "has no noise; convert it first"),
        (lambda m: fb.fit(m, [], **QUIET), "loader for training is empty"),
        (lambda m: fb.fit(m, 5, **QUIET), "loader"),
        (lambda m: fb.fit(m, iter(loader()), **QUIET), "only once"),
        (
            lambda m: fb.posterior.NoisePosterior(m, fb.likelihoods.Categorical()).predict(None),
            "a tensor of inputs or a loader",
        ),
        (lambda m: fb.fit(m, DataLoader(blobs().tensors[0], 40), **QUIET), "alone; .*TensorLoader"),
        (
            lambda m: fb.fit(m, [{"x": torch.ones(2, 4), "labels": torch.zeros(2)}], **QUIET),
            r"pop\('labels'\)",
        ),
        (lambda m: fb.evaluate(network(), loader()), "posterior=.* must be a Posterior"),
        (lambda m: fb.noise.freeze(network(), "noise"), "has no noise"),
        (lambda m: fb.fit(m, loader(), epoch=3, **QUIET), "did you mean 'epochs'"),
        (lambda m: fb.fit(m, loader(blobs(classes=4)), **QUIET), "labels run from 0 to 3"),
        (lambda m: fb.fit(m, nan_at(100), **QUIET), "NaN|nan"),
        (lambda m: fb.fit(m, loader(), checkpoint="/proc/nothing/here", **QUIET), "/proc/nothing/here"),
        (
            lambda m: fb.posterior.NoisePosterior(m, fb.likelihoods.Categorical()).predict(
                torch.ones(2, 4), samples=0
            ),
            "samples.* at least 1",
        ),
        (
            lambda m: fb.posterior.NoisePosterior(m, fb.likelihoods.Categorical()).predict([]),
            "the loader is empty",
        ),
        (
            lambda m: fb.posterior.NoisePosterior(m, fb.likelihoods.Categorical()).predict(
                torch.full((2, 4), torch.nan)
            ),
            "2 of 2 rows",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(act, line):
    with pytest.raises(FlowBNNError, match=line) as error:
        act(fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()}))
    assert "\n" not in str(error.value)


def test_a_loss_that_is_not_finite_names_what_made_it_first():
    model = Exploding()
    with torch.no_grad():
        model.second.weight.fill_(float("inf"))
    with pytest.raises(FlowBNNError, match="parameter 'second.weight' is not finite"):
        fb.fit(fb.to_stochastic(model, {"*": fb.noise.NormalAffine()}), loader(), epochs=1, **QUIET)

    class Logarithm(nn.Module):
        def forward(self, x):
            return torch.log(x)

    network = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 3))
    with pytest.raises(FlowBNNError, match="layer '1'"):
        fb.fit(fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}), loader(), epochs=1, **QUIET)


def test_a_network_that_overflows_in_half_precision_is_named_and_float32_offered():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with torch.no_grad():
        network[0].weight.fill_(1e5)
    posterior = fb.posterior.NoisePosterior(
        fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}), fb.likelihoods.Categorical()
    )
    x = torch.ones(5, 4)
    assert posterior.predict(x, samples=2).probabilities.shape == (5, 3)
    with pytest.raises(
        FlowBNNError, match=r"5 of 5 inputs: layer '0' overflows in 16-mixed: predict in float32"
    ):
        posterior.predict(x, samples=2, precision="16-mixed")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_predictions_that_are_no_numbers_name_the_parameter_or_the_layer(precision):
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    posterior = fb.posterior.NoisePosterior(
        fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}), fb.likelihoods.Categorical()
    )
    with torch.no_grad():
        posterior.model.get_parameter("1.weight").fill_(3e38)
    with pytest.raises(FlowBNNError, match=r"5 of 5 inputs: layer '1' makes NaN or infinity of them: look"):
        posterior.predict(torch.full((5, 4), 1e3), samples=2, precision=precision)
    with torch.no_grad():
        posterior.model.get_parameter("1.weight")[0, 0] = torch.nan
    with pytest.raises(
        FlowBNNError, match=r"5 of 5 inputs: parameter '1.weight' holds NaN or infinity: load"
    ):
        posterior.predict([torch.ones(5, 4)], samples=2, precision=precision)


@pytest.mark.parametrize(
    "method",
    [fb.DeepEnsemble(2, epochs=1), fb.SWAG(epochs=2, begin=0), fb.Laplace(epochs=1), fb.MAP(epochs=1)],
)
def test_so_do_those_of_other_methods(method):
    class Square(nn.Module):
        def forward(self, x):
            return x.square()

    network = nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 3))
    posterior = method.fit(network, loader(), seed=0, **QUIET)
    with pytest.raises(FlowBNNError, match=r"5 of 5 inputs: layer '1' makes NaN or infinity of them"):
        posterior.predict(torch.full((5, 4), 1e30), samples=2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (torch.jit.script, "is TorchScript.*give the network that it was made from"),
        (lambda plain: nn.Sequential(plain[0], nn.LazyLinear(3)), "LazyLinear has no input width yet"),
        (lambda plain: plain.to("meta"), "its weights are meta tensors"),
        (lambda plain: setattr(plain, "cache", plain[0].weight * 2) or plain, "cannot be copied"),
    ],
)
def test_a_network_that_cannot_be_copied_is_refused_in_one_line(change, line):
    for act in (
        lambda given: fb.MLE(epochs=1).fit(given, loader(), **QUIET),
        lambda given: fb.DeepEnsemble(2, epochs=1).fit(given, loader(), **QUIET),
        lambda given: fb.calibrate(given, loader(), **QUIET),
    ):
        with pytest.raises(FlowBNNError, match=line) as error:
            act(change(network()))
        assert "\n" not in str(error.value)


def test_targets_that_are_not_finite_are_named_where_they_only_set_the_noise_level():
    targets = torch.zeros(80)
    targets[70] = float("nan")
    data = DataLoader(TensorDataset(torch.randn(80, 4), targets), batch_size=20)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    noisy = fb.to_stochastic(plain, {"*": fb.noise.NormalAffine()})
    for act in (
        lambda: fb.MLE(epochs=0).fit(plain, data, likelihood="gaussian", **QUIET),
        lambda: fb.fit(noisy, data, epochs=1, likelihood="gaussian", **QUIET),
    ):
        with pytest.raises(FlowBNNError) as caught:
            act()
        assert (caught.value.kind, caught.value.fields["tensor"]) == ("batch", "1")
        assert "batch 4: 1 of 20 rows" in str(caught.value)


def test_a_network_with_several_rows_for_an_example_is_refused_before_it_is_trained():
    pixels = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(2), nn.Flatten(0, 1))  # of 8 images 24 rows
    data = [(torch.randn(8, 1, 2, 2), torch.zeros(24, dtype=torch.long))]
    for act in (
        lambda: fb.MAP(epochs=1).fit(pixels, data, **QUIET),
        lambda: fb.fit(fb.to_stochastic(pixels, {"*": fb.noise.NormalAffine()}), data, epochs=1, **QUIET),
    ):
        with pytest.raises(FlowBNNError, match=r"gave \(24,\) rows of outputs for 8 rows of inputs"):
            act()


def test_batches_that_cannot_be_joined_are_refused_where_all_examples_are_needed_together():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x.mean(1))

    ragged = [(torch.randn(8, length, 4), torch.arange(8) % 3) for length in (5, 7)]
    for act in (
        lambda: fb.calibrate(Mean(4, 3), ragged, **QUIET),
        lambda: fb.HMC(epochs=0).fit(Mean(4, 3), ragged, **QUIET),
    ):
        with pytest.raises(FlowBNNError, match="pad them to one length"):
            act()
