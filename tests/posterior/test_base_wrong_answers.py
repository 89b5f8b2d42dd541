"""Regression tests of mistakes that once gave wrong results without a warning."""

import pytest
import torch
from torch import nn

import flowbnn as fb

NOISE = {"*": fb.noise.NormalAffine()}


def mlp(inputs: int = 6, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def data(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 6)
    return x, (x[:, 0] > 0).long()


def quietly(*args, **options):
    return fb.fit(*args, epochs=1, progress=False, **options, validation=None)


@pytest.mark.parametrize(
    "method", [fb.MAP(epochs=3, lr=0.05), fb.BayesByBackprop(epochs=2), fb.MCDropout(epochs=2)]
)
def test_load_posterior_copies_the_network(method, tmp_path):
    (x, y), network = data(), mlp()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for name, labels in (("a", y), ("b", 1 - y)):
        method.fit(network, [(x, labels)], progress=False, seed=0).save(tmp_path / name)
    first = fb.load_posterior(tmp_path / "a", network)
    told = first.predict(x, 4, seed=0).probabilities
    fb.load_posterior(tmp_path / "b", network)
    assert torch.equal(first.predict(x, 4, seed=0).probabilities, told)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_first_batch_of_one_class_is_not_taken_for_regression(first):
    x, _ = data(8)
    for outputs, name in ((1, "bernoulli"), (2, "categorical")):
        with pytest.raises(fb.FlowBNNError) as caught:
            quietly(mlp_noise(outputs), [(x, torch.full((8,), first)), (x, 1 - torch.full((8,), first))])
        assert (caught.value.kind, caught.value.argument) == ("targets", "likelihood")
        assert name in str(caught.value)


def mlp_noise(outputs: int = 2) -> nn.Module:
    return fb.to_stochastic(mlp(outputs=outputs), NOISE)


@pytest.mark.filterwarnings("ignore:.*prior.*:flowbnn.errors.FlowBNNWarning")
def test_dropping_trained_means_raises_a_warning():
    x, y = data()
    model = mlp_noise()
    fb.to_deterministic(model)  # nothing was trained: nothing to say
    posterior = fb.fit(model, [(x, y)], epochs=30, noise_lr=0.05, progress=False, validation=None)
    with pytest.warns(fb.errors.FlowBNNWarning) as raised:
        fb.to_deterministic(posterior.model)
    assert [warning.message.kind for warning in raised] == ["mean"]
    plain = fb.to_deterministic(posterior.model, absorb=True)
    with fb.noise_mode(posterior.model, "mean"):
        torch.testing.assert_close(plain(x), posterior.model(x))


@pytest.mark.parametrize(
    ("last", "outputs", "likelihood"), [(nn.Softmax(1), 2, "categorical"), (nn.Sigmoid(), 1, "bernoulli")]
)
def test_probabilities_instead_of_logits_raise_a_warning(last, outputs, likelihood):
    (x, y), network = data(), nn.Sequential(*mlp(outputs=outputs), last)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        fb.MLE(epochs=1).fit(network, [(x, y)], likelihood=likelihood, progress=False)
    assert caught[0].message.fields["kind"] == "probabilities"


def test_evaluate_refuses_fractional_labels():
    x, y = data()
    posterior = fb.posterior.PointPosterior(mlp(), fb.likelihoods.Categorical())
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.evaluate(posterior, (x, y * 0.9), progress=False)
    assert caught.value.kind == "targets"
    assert fb.evaluate(posterior, (x, y.double()), progress=False) == fb.evaluate(
        posterior, (x, y), progress=False
    )


def test_transposed_targets_are_refused():
    with pytest.raises(fb.FlowBNNError) as caught:
        quietly(mlp_noise(2), [(torch.randn(32, 6), torch.randn(2, 32))])
    assert caught.value.kind == "targets"


@pytest.mark.parametrize(
    ("threshold", "by"), [(2, "entropy"), (-1, "entropy"), (-0.1, "epistemic"), ("a", "entropy")]
)
def test_invalid_thresholds_are_refused(threshold, by):
    prediction = fb.posterior.PointPosterior(mlp(), fb.likelihoods.Categorical()).predict(data()[0])
    with pytest.raises(fb.FlowBNNError) as error:
        prediction.decide(threshold, by=by)
    assert (error.value.kind, error.value.argument) == ("value", "abstain_above")
    assert f"got {threshold!r}" in str(error.value)
    assert (prediction.decide(float("inf")).values >= 0).all()
    usual = prediction.uncertainty("entropy").quantile(0.5)
    assert int((prediction.decide(usual).values == -1).sum()) == 20, "a threshold may be a tensor"


@pytest.mark.parametrize(
    ("inputs", "shapes", "hint"),
    [
        (torch.randn(3, 5), [(3, 5)], ""),
        (torch.zeros(3, 6, dtype=torch.uint8), [(3, 6)], "; use images.float() / 255"),
        ((torch.randn(3, 6), torch.zeros(3)), [(3, 6), (3,)], ""),
    ],
)
@pytest.mark.parametrize("noisy", [False, True])
def test_inputs_that_the_network_rejects_raise_one_line(inputs, shapes, hint, noisy):
    posterior = (
        fb.posterior.NoisePosterior(mlp_noise(), fb.likelihoods.Categorical())
        if noisy
        else fb.posterior.PointPosterior(mlp(), fb.likelihoods.Categorical())
    )
    with pytest.raises(fb.FlowBNNError) as caught:
        posterior.predict(inputs, 4)
    assert (caught.value.kind, caught.value.fields["shapes"]) == ("network", shapes)
    assert str(caught.value).endswith(hint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "targets", "advice"),
    [
        (2, torch.zeros(8, 1).long(), "targets.squeeze(1)"),
        (2, torch.eye(2).repeat(4, 1).long(), "targets.argmax(1)"),
        (1, torch.arange(8), "likelihood='gaussian'"),
    ],
)
def test_targets_of_another_form_are_refused_with_advice(outputs, targets, advice):
    with pytest.raises(fb.FlowBNNError) as caught:
        quietly(mlp_noise(outputs), [(torch.randn(8, 6), targets)])
    assert caught.value.kind == "targets"
    assert advice in str(caught.value)
