"""Mistakes of users are refused before time is lost on them, in a line that says what to do."""

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


def one_line(call, *words):
    with pytest.raises(FlowBNNError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (
            [(INPUTS * torch.nan, LABELS)],
            "validation inputs have NaN or infinite values in 40 of 40 rows (the first is row 0)",
        ),
        ([(INPUTS, LABELS + 9)], "the first batch of the validation data does not fit: labels run from 9"),
        ([(INPUTS[:, :3], LABELS)], "first batch of the validation data"),
        ([INPUTS], "validation needs batches of (inputs, targets)"),
        ([], "the loader for validation is empty"),
        (iter([(INPUTS, LABELS)]), "only once"),
        (INPUTS, "validation needs a loader of batches"),
    ],
)
@pytest.mark.parametrize("fit", [fb.fit, fb.MLE(epochs=1).fit], ids=["noise", "plain"])
def test_validation_data_are_tried_before_the_first_step(fit, validation, words):
    counted = Counted()
    model = nn.Sequential(counted, *network())
    model = fb.to_stochastic(model, {"*": fb.noise.NormalAffine()}) if fit is fb.fit else model
    one_line(lambda: fit(model, loader(), validation=validation, **QUIET), words)
    assert counted.passes == 0


@pytest.mark.filterwarnings("ignore:the noise of layers:flowbnn.errors.FlowBNNWarning")
def test_a_pair_of_tensors_is_validation_data_and_the_look_at_it_changes_nothing():
    histories = []
    for validation in ((INPUTS, LABELS), [(INPUTS, LABELS)], None):
        posterior = fb.fit(stochastic(), loader(), epochs=2, seed=1, validation=validation, **QUIET)
        histories.append(posterior.history)
    assert histories[0].records == histories[1].records
    assert "validation_nll" in histories[0]
    assert histories[0]["loss"] == histories[2]["loss"]
    assert histories[0][-1] == histories[0].records[1]
    one_line(lambda: histories[0][2], "2 epochs")
    one_line(lambda: histories[0][1.5], "1.5")


def test_a_pair_of_tensors_to_train_on_is_told_how_to_become_a_loader():
    one_line(
        lambda: fb.fit(stochastic(), (INPUTS, LABELS), **QUIET),
        "TensorLoader(inputs, targets, batch_size=128",
    )
    one_line(
        lambda: fb.MLE().fit(network(), (INPUTS, LABELS), **QUIET),
        "TensorLoader(inputs, targets, batch_size=128",
    )


def test_unknown_options_point_to_the_right_ones():
    model = stochastic()
    one_line(lambda: fb.fit(model, loader(), lr=1e-3, **QUIET), "'lr'", "weight_lr")
    one_line(lambda: fb.fit(model, loader(), device="cuda", **QUIET), "'device'", "'devices'")
    one_line(lambda: fb.fit(model, loader(), nose_lr=1e-3, **QUIET), "did you mean 'noise_lr'")
    one_line(lambda: fb.MLE().fit(network(), loader(), weight_lr=1.0, **QUIET), "'weight_lr'")
    one_line(lambda: fb.Laplace(newton_steps=-1), "newton_steps", "an integer of at least 0")


def test_a_posterior_where_a_network_belongs_is_told_of_its_model():
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    for use in (
        fb.describe,
        fb.to_deterministic,
        lambda p: fb.noise.freeze(p, "weights"),
        lambda p: fb.noise_mode(p, "off").__enter__(),
    ):
        one_line(lambda use=use: use(posterior), ".model")
    one_line(lambda: fb.describe(3), "must be a Module, got 3")


def test_inputs_that_do_not_fit_are_told_what_to_do(tmp_path):
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    one_line(lambda: posterior.predict(INPUTS[0], 2), "inputs[None]")
    one_line(lambda: posterior.predict(INPUTS.long(), 2), "inputs.float()")
    one_line(lambda: posterior.predict(np.zeros((2, 4)), 2), "torch.from_numpy(inputs)")
    one_line(lambda: posterior.predict(INPUTS, "128"), "got '128'")
    one_line(lambda: fb.load_posterior(tmp_path, network()), "is a folder")


def test_targets_far_from_a_network_that_is_not_fresh_are_warned_of():
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


def test_weights_in_a_network_of_other_layers_are_warned_of(tmp_path):
    posterior = fb.posterior.NoisePosterior(stochastic(), fb.likelihoods.Categorical())
    path = posterior.save(tmp_path / "a.safetensors")
    other = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    with pytest.warns(FlowBNNWarning) as caught:
        fb.load_posterior(path, other)
    assert [(entry.message.kind, entry.message.fields["changed"]) for entry in caught] == [
        ("layers", {"1": ("ReLU", "Tanh")})
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.load_posterior(path, network())


def test_tensors_that_do_not_go_together_are_refused_in_one_line():
    block, pictures = fb.transforms.Residual(3, context_dim=2), torch.zeros(5, 1, 8, 8)
    coder = fb.vae.Autoencoder((1, 8, 8), 2)
    one_line(lambda: block(torch.zeros(5, 3), [1, 2]), "Residual needs a dense tensor", "got list")
    one_line(lambda: fb.data.TensorLoader(torch.eye(5).to_sparse(), batch_size=2), "use", ".to_dense()")
    far = torch.empty(5, 3, device="meta")
    one_line(lambda: fb.distributions.DiagonalLaplace(far, torch.ones(5, 3)), "scale is on cpu, loc on meta")
    one_line(lambda: coder.interpolate(pictures[:2], pictures), "(2, 1, 8, 8)")
