"""Invalid input is refused early, with an error of one line and its fields."""

import warnings

import numpy as np
import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning

INPUTS, LABELS = blobs(40).tensors


def stochastic():
    return fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})


class Counted(nn.Module):
    passes = 0

    def forward(self, x):
        self.passes += self.training
        return x


def assert_refused(call, kind, argument=None):
    """Asserts that a call raises a FlowBNNError of one line with these fields, and returns its message."""
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument), str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("validation", "kind", "argument"),
    [
        ([(INPUTS * torch.nan, LABELS)], "finite", None),
        ([(INPUTS, LABELS + 9)], "targets", "targets"),
        ([(INPUTS[:, :3], LABELS)], "network", None),
        ([INPUTS], "loader", "loader"),
        ([], "loader", "loader"),
        (iter([(INPUTS, LABELS)]), "loader", "loader"),
        (INPUTS, "loader", "loader"),
    ],
)
@pytest.mark.parametrize("fit", [fb.fit, fb.MLE(epochs=1).fit], ids=["noise", "plain"])
def test_validation_data_are_checked_before_the_first_step(fit, validation, kind, argument):
    counted = Counted()
    model = nn.Sequential(counted, *network())
    model = fb.to_stochastic(model, {"*": fb.noise.NormalAffine()}) if fit is fb.fit else model
    assert_refused(lambda: fit(model, loader(), validation=validation, **QUIET), kind, argument)
    assert counted.passes == 0


@pytest.mark.parametrize(
    ("targets", "kind"),
    [(torch.ones(40, 1), "targets"), (torch.ones(40), "targets"), (torch.ones(40).long(), "classes")],
)
def test_equal_targets_are_refused_if_the_noise_scale_is_learned(targets, kind):
    torch.manual_seed(0)
    layer, data = nn.Linear(INPUTS.shape[1], 3 if kind == "classes" else 1), (INPUTS, targets)
    stochastic_layer = fb.to_stochastic(layer, {"*": fb.noise.NormalAffine()})
    assert_refused(lambda: fb.fit(stochastic_layer, data, **QUIET), kind, "loader")
    assert_refused(lambda: fb.MLE(epochs=1).fit(layer, data, **QUIET), kind, "loader")
    if kind == "targets":
        fb.MLE(epochs=1).fit(layer, data, likelihood=fb.likelihoods.Gaussian(1.5), **QUIET)


@pytest.mark.filterwarnings("ignore:the noise of layers:flowbnn.errors.FlowBNNWarning")
def test_a_pair_of_tensors_is_validation_data_and_the_check_changes_nothing():
    histories = []
    for validation in ((INPUTS, LABELS), [(INPUTS, LABELS)], None):
        posterior = fb.fit(stochastic(), loader(), epochs=2, seed=1, validation=validation, **QUIET)
        histories.append(posterior.history)
    assert histories[0].records == histories[1].records
    assert "validation_nll" in histories[0]
    assert histories[0]["loss"] == histories[2]["loss"]
    assert histories[0][-1] == histories[0].records[1]
    assert_refused(lambda: histories[0][2], "name", 2)
    assert_refused(lambda: histories[0][1.5], "name", 1.5)


def test_a_list_of_inputs_and_targets_is_a_list_of_batches():
    for fit in (
        lambda: fb.fit(stochastic(), [INPUTS, LABELS], **QUIET, validation=None),
        lambda: fb.MLE().fit(network(), [INPUTS, LABELS], **QUIET),
    ):
        assert "(inputs, targets)" in assert_refused(fit, "loader", "loader")


def test_unknown_options_are_refused_with_suggestions():
    model = stochastic()
    for argument, suggestion in (("lr", "weight_lr"), ("device", "'devices'"), ("nose_lr", "'noise_lr'")):
        message = assert_refused(
            lambda argument=argument: fb.fit(model, loader(), **{argument: 1e-3}, **QUIET, validation=None),
            "unknown setting",
            argument,
        )
        assert suggestion in message
    assert_refused(
        lambda: fb.MLE().fit(network(), loader(), weight_lr=1.0, **QUIET), "unknown setting", "weight_lr"
    )
    assert_refused(lambda: fb.Laplace(newton_steps=-1), "value", "newton_steps")


def test_a_posterior_instead_of_a_network_is_refused():
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    for use in (fb.describe, fb.to_deterministic, lambda p: fb.noise.freeze(p, "weights")):
        assert ".model" in assert_refused(lambda use=use: use(posterior), "value", "model")
    assert ".model" in assert_refused(lambda: fb.noise_mode(posterior, "off").__enter__(), "network")
    assert_refused(lambda: fb.describe(3), "value", "model")


class ConstantOutputs(nn.Linear):
    """Layer whose outputs do not depend on its weights, in another dtype."""

    def __init__(self, dtype):
        super().__init__(4, 3)
        self.dtype = dtype

    def forward(self, x):
        return super().forward(x).detach().to(self.dtype)


@pytest.mark.parametrize(
    "method", [fb.MLE(epochs=1), fb.Laplace(epochs=1), fb.HMC(samples=2, warmup=2, epochs=0)]
)
def test_outputs_that_cannot_be_fitted_are_refused(method):
    fit = lambda dtype: method.fit(ConstantOutputs(dtype), loader(), **QUIET)  # noqa: E731
    for dtype in (torch.long, torch.bool):
        assert_refused(lambda dtype=dtype: fit(dtype), "dtype", "outputs")
    expected = ("gradient", "network") if isinstance(method, fb.HMC) else ("objective", "objective")
    assert_refused(lambda: fit(torch.float32), *expected)


class ReturnsText(fb.likelihoods.Categorical):
    def log_prob(self, outputs, targets):
        return "x"


def test_likelihoods_must_return_tensors():
    fit = lambda: fb.MLE(epochs=1).fit(network(), loader(), likelihood=ReturnsText(), **QUIET)  # noqa: E731
    assert "ReturnsText.log_prob" in assert_refused(fit, "value", "likelihood")


class ReshapesListOfInputs(nn.Module):
    """Network whose first input is a list of one tensor, and whose second input is a number for each batch."""

    def forward(self, tensors, scale):
        return tensors[0].reshape(3, 5) * scale


def test_hint_for_single_examples_needs_a_single_input():
    posterior = fb.posterior.PointPosterior(ReshapesListOfInputs(), fb.likelihoods.Categorical())
    message = assert_refused(lambda: posterior.predict(([torch.ones(20, 5)], torch.ones(1))), "network")
    assert "invalid for input" in message
    assert "inputs[None]" not in message


def test_inputs_that_do_not_fit_are_refused(tmp_path):
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    assert "inputs[None]" in assert_refused(lambda: posterior.predict(INPUTS[0], 2), "shape")
    assert "inputs.float()" in assert_refused(lambda: posterior.predict(INPUTS.long(), 2), "network")
    assert_refused(lambda: posterior.predict(np.full((2, 4), {}), 2), "dtype", "inputs")
    assert_refused(lambda: posterior.predict(INPUTS, "128"), "value", "samples")
    assert_refused(lambda: fb.load_posterior(tmp_path, network()), "file")


def test_targets_far_from_the_outputs_raise_a_warning():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    kelvin = 293.0 + 5.0 * inputs[:, :1]
    model = nn.Linear(4, 1)
    nn.init.constant_(model.bias, 1000.0)  # a fresh one takes the units of its targets
    with pytest.warns(FlowBNNWarning) as caught:
        fb.MLE(epochs=1).fit(model, [(inputs, kelvin)], **QUIET)
    assert caught[0].message.fields["kind"] == "units"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.MLE(epochs=1).fit(nn.Linear(4, 1), [(inputs, (kelvin - 293.0) / 5.0)], **QUIET)
        fb.MLE(epochs=1).fit(nn.Linear(4, 1), [(inputs, kelvin)], **QUIET)
        fb.MLE(epochs=1).fit(nn.Linear(4, 1), [(inputs[:4], kelvin[:4])], **QUIET)  # too few to tell


def test_weights_for_other_layers_raise_a_warning(tmp_path):
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    path = posterior.save(tmp_path / "a.safetensors")
    other = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    with pytest.warns(FlowBNNWarning) as caught:
        fb.load_posterior(path, other)
    assert [(entry.message.kind, entry.message.fields["changed"]) for entry in caught] == [
        ("layers", {"1": ("ReLU()", "Tanh()")})
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.load_posterior(path, network())


def test_tensors_that_do_not_fit_together_are_refused():
    block, images = fb.transforms.Residual(3, context_dim=2), torch.zeros(5, 1, 8, 8)
    autoencoder = fb.vae.Autoencoder((1, 8, 8), 2)
    assert_refused(lambda: block(torch.zeros(5, 3), [1, 2]), "dtype")
    assert_refused(lambda: fb.data.TensorLoader(torch.eye(5).to_sparse(), batch_size=2), "loader")
    meta = torch.empty(5, 3, device="meta")
    assert_refused(lambda: fb.distributions.DiagonalLaplace(meta, torch.ones(5, 3)), "value", "scale")
    assert_refused(lambda: autoencoder.interpolate(images[:2], images), "shape", "second")
