"""Bad input of fit and predict is refused with one line."""

import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.noise import NormalAffine


def nan_at(row: int) -> DataLoader:
    """Returns a loader whose inputs have a NaN in one row."""
    x, y = (tensor.clone() for tensor in blobs().tensors)
    x[row] = float("nan")
    return DataLoader(TensorDataset(x, y), batch_size=40)


def noisy(plain: nn.Module) -> nn.Module:
    return fb.to_stochastic(plain, {"*": NormalAffine()})


def posterior_of(model: nn.Module) -> fb.posterior.NoisePosterior:
    return fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical())


def refused(function) -> FlowBNNError:
    """Returns the error that a function raises, whose message has one line."""
    with pytest.raises(FlowBNNError) as caught:
        function()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("act", "kind", "argument"),
    [
        (lambda m: fb.fit(network(), loader(), **QUIET, validation=None), "network", "network"),
        (lambda m: fb.fit(m, [], **QUIET, validation=None), "loader", "loader"),
        (lambda m: fb.fit(m, 5, **QUIET, validation=None), "loader", "loader"),
        (lambda m: fb.fit(m, iter(loader()), **QUIET, validation=None), "loader", "loader"),
        (
            lambda m: fb.fit(m, DataLoader(blobs().tensors[0], 40), **QUIET, validation=None),
            "loader",
            "loader",
        ),
        (
            lambda m: fb.fit(m, [{"x": torch.ones(2, 4), "y": torch.zeros(2)}], **QUIET, validation=None),
            "loader",
            "loader",
        ),
        (lambda m: fb.fit(m, loader(), epoch=3, **QUIET, validation=None), "unknown setting", "epoch"),
        (lambda m: fb.fit(m, loader(blobs(classes=4)), **QUIET, validation=None), "targets", "targets"),
        (lambda m: fb.fit(m, nan_at(100), **QUIET, validation=None), "batch", None),
        (
            lambda m: fb.fit(m, loader(), checkpoint="/proc/nothing/here", **QUIET, validation=None),
            "file",
            None,
        ),
        (lambda m: fb.evaluate(network(), loader()), "value", "posterior"),
        (lambda m: fb.noise.freeze(network(), "noise"), "network", None),
        (lambda m: posterior_of(m).predict(None), "unsupported", "inputs"),
        (lambda m: posterior_of(m).predict(torch.ones(2, 4), samples=0), "value", "samples"),
        (lambda m: posterior_of(m).predict([]), "empty", None),
        (lambda m: posterior_of(m).predict(torch.full((2, 4), torch.nan)), "finite", None),
    ],
)
def test_bad_input(act, kind, argument):
    error = refused(lambda: act(noisy(network())))
    assert (error.kind, error.argument) == (kind, argument)


@pytest.mark.parametrize("problem", ["weights", "layer"])
def test_a_loss_that_is_not_finite_names_the_layer(problem):
    class Logarithm(nn.Module):
        def forward(self, x):
            return torch.log(x)

    plain = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 3))
    if problem == "weights":
        plain[1] = nn.Identity()
        nn.init.constant_(plain[2].weight, float("inf"))
    error = refused(lambda: fb.fit(noisy(plain), loader(), epochs=1, **QUIET, validation=None))
    assert (error.kind, error.layer) == ("not finite", "2.weight" if problem == "weights" else "1")


def test_overflow_in_half_precision_suggests_single_precision():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    nn.init.constant_(plain[0].weight, 1e5)
    posterior, x = posterior_of(noisy(plain)), torch.ones(5, 4)
    assert posterior.predict(x, samples=2).probabilities.shape == (5, 3)
    error = refused(lambda: posterior.predict(x, samples=2, precision="16-mixed"))
    assert (error.kind, error.fields["inputs"]) == ("not finite", 5)
    assert all(words in str(error) for words in ("layer '0'", "precision='32-true'"))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_predictions_that_are_not_finite_name_the_parameter_or_the_layer(precision):
    posterior = posterior_of(noisy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))))
    weight = posterior.model.get_parameter("1.weight")
    nn.init.constant_(weight, 3e38)
    error = refused(lambda: posterior.predict(torch.full((5, 4), 1e3), samples=2, precision=precision))
    assert (error.kind, error.fields["inputs"], error.fields["total"]) == ("not finite", 5, 5)
    assert "layer '1'" in str(error)
    with torch.no_grad():
        weight[0, 0] = torch.nan
    error = refused(lambda: posterior.predict([torch.ones(5, 4)], samples=2, precision=precision))
    assert error.kind == "not finite"
    assert "parameter '1.weight'" in str(error)


@pytest.mark.parametrize(
    "method",
    [fb.DeepEnsemble(2, epochs=1), fb.SWAG(epochs=2, begin=0), fb.Laplace(epochs=1), fb.MAP(epochs=1)],
)
def test_predictions_of_other_methods_that_are_not_finite_name_the_layer(method):
    class Square(nn.Module):
        def forward(self, x):
            return x.square()

    plain = nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 3))
    posterior = method.fit(plain, loader(), seed=0, **QUIET)
    error = refused(lambda: posterior.predict(torch.full((5, 4), 1e30), samples=2))
    assert (error.kind, error.fields["inputs"]) == ("not finite", 5)
    assert "layer '1'" in str(error)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        torch.jit.script,
        lambda plain: nn.Sequential(plain[0], nn.LazyLinear(3)),
        lambda plain: plain.to("meta"),
    ],
    ids=["script", "lazy", "meta"],
)
def test_networks_that_cannot_be_copied(change):
    for act in (
        lambda plain: fb.MLE(epochs=1).fit(plain, loader(), **QUIET),
        lambda plain: fb.DeepEnsemble(2, epochs=1).fit(plain, loader(), **QUIET),
        lambda plain: fb.calibrate(plain, loader(), **QUIET),
    ):
        error = refused(lambda act=act: act(change(network())))
        assert (error.kind, error.argument) == ("network", "network")


def test_targets_that_are_not_finite_name_their_batch():
    targets = torch.zeros(80)
    targets[70] = float("nan")
    data = DataLoader(TensorDataset(torch.randn(80, 4), targets), batch_size=20)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    for act in (
        lambda: fb.MLE(epochs=0).fit(plain, data, likelihood="gaussian", **QUIET),
        lambda: fb.fit(noisy(plain), data, epochs=1, likelihood="gaussian", **QUIET, validation=None),
    ):
        error = refused(act)
        assert (error.kind, error.fields["tensor"]) == ("batch", "1")
        assert (error.fields["rows"], "batch 4" in str(error)) == (1, True)


def test_networks_with_several_rows_per_example():
    pixels = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(2), nn.Flatten(0, 1))  # 24 rows for 8 images
    data = [(torch.randn(8, 1, 2, 2), torch.zeros(24, dtype=torch.long))]
    for act in (
        lambda: fb.MAP(epochs=1).fit(pixels, data, **QUIET),
        lambda: fb.fit(noisy(pixels), data, epochs=1, **QUIET, validation=None),
    ):
        assert refused(act).kind == "shape"


def test_batches_that_cannot_be_concatenated():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x.mean(1))

    ragged = [(torch.randn(8, length, 4), torch.arange(8) % 3) for length in (5, 7)]
    error = refused(lambda: fb.HMC(epochs=0).fit(Mean(4, 3), ragged, **QUIET))
    assert (error.kind, error.argument) == ("lengths", "loader")
    with pytest.warns(fb.FlowBNNWarning) as warnings:  # which compares the candidates that need outputs only
        fb.calibrate(Mean(4, 3), ragged, **QUIET)
    assert ("excluded", "noise") in [
        (each.message.kind, each.message.fields.get("candidate")) for each in warnings
    ]
