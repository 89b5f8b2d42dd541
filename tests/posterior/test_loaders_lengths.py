"""Tests of batches that are padded to different lengths: predictions, metrics and calibration do not depend on the padding."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.posterior import MemberPosterior, NoisePosterior
from flowbnn.posterior.prediction import KEPT_BYTES

LENGTHS = (5, 7, 4)
TOKENS = torch.randint(1, 12, (24, 7), generator=torch.Generator().manual_seed(0))
SIZES = 2 + torch.arange(24) % 3
MASK = torch.arange(7) < SIZES[:, None]


class Tagger(nn.Module):
    """Network of tokens, with a class for each sequence or for each token."""

    def __init__(self, each_token, first=False, outputs=3):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, outputs)
        self.each_token, self.first = each_token, first

    def forward(self, tokens, mask):
        hidden = torch.tanh(self.embedding(tokens))
        if self.each_token:
            return self.head(hidden).movedim(-1, 1) if self.first else self.head(hidden)
        mask = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def batches(each_token, lengths=LENGTHS, ignored=-100):
    labels = torch.where(MASK, TOKENS % 3, ignored) if each_token else TOKENS[:, 0] % 3
    result = []
    for number, length in enumerate(lengths):
        rows = slice(8 * number, 8 * number + 8)
        targets = labels[rows, :length] if each_token else labels[rows]
        result.append(((TOKENS[rows, :length], MASK[rows, :length].long()), targets))
    return result


def noisy(each_token, likelihood=None, **options):
    torch.manual_seed(0)
    network = fb.to_stochastic(Tagger(each_token, **options), {"*": fb.noise.NormalAffine()})
    return NoisePosterior(network.eval(), likelihood or Categorical())


def assert_equal_metrics(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert abs(value - second[name]) < 1e-6, name


@pytest.mark.parametrize("keep_samples", [True, False])
@pytest.mark.parametrize("axis", [1, -1])
def test_predictions_of_tokens_do_not_depend_on_the_padding(axis, keep_samples):
    likelihood = Categorical(class_axis=axis, ignore_index=7)
    posterior = noisy(True, likelihood, first=axis == 1)
    data, equal = batches(True, ignored=7), batches(True, (7, 7, 7), ignored=7)
    options = {"seed": 0, "samples": 4, "progress": False, "keep_samples": keep_samples}
    assert_equal_metrics(fb.evaluate(posterior, data, **options), fb.evaluate(posterior, equal, **options))
    prediction, expected = (posterior.predict(each, **options) for each in (data, equal))
    for name in ("probabilities", "entropy", "mutual_information"):
        values, others = getattr(prediction, name), getattr(expected, name)
        assert values.shape == others.shape
        torch.testing.assert_close(values[MASK], others[MASK])
    torch.testing.assert_close(prediction.probabilities[0, 5:], torch.full((2, 3), 1 / 3))
    assert posterior.predict_with_targets(data, 2)[1].eq(-100).sum() == (~MASK).sum()


def test_small_summaries_of_different_lengths_are_joined(monkeypatch):
    monkeypatch.setitem(KEPT_BYTES, False, 1)
    likelihood = Categorical(class_axis=-1)
    options = {"seed": 0, "samples": 4, "keep_samples": False, "progress": False}
    results = [
        fb.evaluate(noisy(True, likelihood), each, **options)
        for each in (batches(True), batches(True, (7,) * 3))
    ]
    assert_equal_metrics(*results)
    prediction = noisy(True, likelihood).predict(batches(True), **options)
    torch.testing.assert_close(prediction.probabilities[0, 5:], torch.full((2, 3), 1 / 3))
    assert float(prediction.epistemic[0, 5:].abs().max()) < 1e-6


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("each_token", [False, True])
def test_fits_and_calibrations_take_batches_of_different_lengths(each_token):
    likelihood = Categorical(class_axis=-1) if each_token else "auto"
    data, equal = batches(each_token), batches(each_token, (7,) * 3)
    options = {"likelihood": likelihood, "progress": False, "seed": 0}
    point = fb.MLE(epochs=2).fit(Tagger(each_token), data, validation=data, **options)
    assert fb.evaluate(point, data)["nll"] > 0
    names = ["temperature", "vector"]
    posteriors = [
        fb.calibrate(point.model, each, candidates=names, folds=3, **options) for each in (data, equal)
    ]
    for name, value in posteriors[1].calibration.nll.items():
        assert abs(posteriors[0].calibration.nll[name] - value) < 1e-5, name
    report = fb.calibrate(point.model, data, folds=3, **options).calibration
    assert {"noise", "refit"} <= set(report.excluded)


def test_other_outputs_of_different_shapes_are_refused():
    posterior = noisy(True, fb.likelihoods.Gaussian(1.0, dim=3), outputs=3)
    with pytest.raises(fb.FlowBNNError) as caught:
        posterior.predict(batches(True), 2, progress=False)
    assert caught.value.kind in ("shape", "outputs")


def test_members_of_ensembles_take_batches_of_different_lengths():
    torch.manual_seed(0)
    networks = [Tagger(True) for _ in range(2)]
    states = [network.state_dict() for network in networks]
    posterior = MemberPosterior.from_states(networks[0], Categorical(class_axis=-1), states)
    mixture = fb.posterior.MixturePosterior([posterior, posterior])
    for each in (posterior, mixture):
        results = [
            fb.evaluate(each, data, progress=False) for data in (batches(True), batches(True, (7,) * 3))
        ]
        assert_equal_metrics(*results)
