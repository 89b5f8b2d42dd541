"""Tests of post-hoc calibrators: optima against other solvers, interface, saving, and errors."""

import math
from copy import deepcopy

import pytest
import torch
from problems import blobs, lines, loader, small
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import MemberPosterior, PointPosterior
from flowbnn.methods.calibrators.folds import split_folds
from flowbnn.methods.calibrators.last_layer import LastLayerProblem, RefitSetting
from flowbnn.methods.calibrators.lbfgs import minimize_batch

QUIET = {"progress": False, "accelerator": "cpu"}
CALIBRATORS = [fb.Temperature(), fb.VectorScaling(), fb.MatrixScaling(), fb.LastLayerRefit()]
each_calibrator = pytest.mark.parametrize("calibrator", CALIBRATORS, ids=lambda calibrator: calibrator.name)


def trained(outputs: int = 3) -> nn.Module:
    """Returns a network that has memorized 24 examples."""
    data = blobs(24) if outputs == 3 else lines(24)
    options = {"seed": 0, **QUIET}
    return fb.MLE(epochs=60, lr=0.1).fit(small(outputs), loader(data), **options).model


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return trained()


def held_out(count: int = 96) -> tuple[Tensor, Tensor]:
    inputs, labels = blobs(count + 24).tensors
    return inputs[24:], labels[24:]


@each_calibrator
def test_one_line_calibrates_a_network_and_keeps_its_weights(calibrator, network, tmp_path):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    posterior = calibrator.fit(network, held_out(), **QUIET)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    plain = PointPosterior(network, posterior.likelihood)
    scores = [fb.evaluate(each, [held_out()], progress=False)["nll"] for each in (plain, posterior)]
    assert scores[1] < scores[0]
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), small())
    assert type(loaded) is type(posterior)
    inputs = held_out()[0]
    assert torch.equal(loaded.predict(inputs).probabilities, posterior.predict(inputs).probabilities)
    sampled = posterior.sample(0)(inputs).softmax(-1)
    torch.testing.assert_close(sampled, posterior.predict(inputs).probabilities)
    assert posterior.history.epochs == 0


@each_calibrator
def test_frozen_networks_are_calibrated(calibrator, network):
    posterior = calibrator.fit(deepcopy(network).requires_grad_(False), held_out(), **QUIET)
    assert torch.isfinite(posterior.predict(held_out()[0]).probabilities).all()


@pytest.mark.parametrize("calibrator", CALIBRATORS[:3], ids=lambda calibrator: calibrator.name)
def test_posteriors_of_any_method_are_calibrated(calibrator, tmp_path):
    method = fb.DeepEnsemble(2, epochs=20, lr=0.05)
    ensemble = method.fit(small(), loader(blobs()), seed=0, **QUIET)
    posterior = calibrator.fit(ensemble, held_out(), progress=False)
    assert posterior.posterior is ensemble
    on_top = type(calibrator)(method)
    fitted = on_top.fit(small(), loader(blobs()), validation=[held_out()], seed=0, **QUIET)
    inputs = held_out()[0]
    torch.testing.assert_close(fitted.predict(inputs).probabilities, posterior.predict(inputs).probabilities)
    loaded = fb.load_posterior(fitted.save(tmp_path / "posterior"), small())
    assert torch.equal(loaded.predict(inputs).log_samples, fitted.predict(inputs).log_samples)


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the network is not trained
def test_bernoulli_outputs_are_scaled():
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(80, 4)
    data = inputs, (inputs[:, 0] + 0.5 > 0).long()
    for calibrator in CALIBRATORS:
        posterior = calibrator.fit(network, data, **QUIET)
        probabilities = posterior.predict(inputs).probabilities
        torch.testing.assert_close(posterior.sample(0)(inputs).sigmoid()[:, 0], probabilities[:, 1])


# -------------------- optima


def reference_scaling(logits: Tensor, labels: Tensor, temperature: float, matrix: bool) -> Tensor:
    """Returns log-probabilities of structured scaling by torch's L-BFGS, from the formula of the paper."""
    z, (count, classes) = (logits / temperature).log_softmax(-1), logits.shape
    change = torch.zeros(classes, classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(classes, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(
        [change, bias],
        max_iter=500,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
    )

    def mapped() -> Tensor:
        weight = eye + change * (1.0 if matrix else eye)
        return (z @ weight.mT + bias).log_softmax(-1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        diagonal, rest = (change * eye).square().sum(), (change * (1 - eye)).square().sum()
        loss = nn.functional.nll_loss(mapped(), labels)
        loss = loss + classes / count * (diagonal + bias.square().sum())
        loss = loss + classes * (classes - 1) / count * rest
        loss.backward()
        return loss

    optimizer.step(closure)
    return mapped().detach()


@pytest.mark.parametrize("calibrator", [fb.VectorScaling(), fb.MatrixScaling()], ids=lambda c: c.name)
def test_scaling_minimizes_the_penalized_likelihood(calibrator, network):
    inputs, labels = held_out()
    posterior = calibrator.fit(network.double(), (inputs.double(), labels), **QUIET)
    logits = network(inputs.double()).detach()
    expected = reference_scaling(logits, labels, posterior.temperature, calibrator.matrix)
    network.float()
    torch.testing.assert_close(
        posterior.predict(inputs.double()).log_probabilities, expected, rtol=0, atol=1e-4
    )


def test_vector_scaling_corrects_factors_and_offsets():
    source = torch.Generator().manual_seed(0)
    logits = (2.0 * torch.randn(5_000, 3, generator=source)).log_softmax(-1)
    truth = (logits * torch.tensor([0.5, 1.0, 1.5]) + torch.tensor([0.5, 0.0, -0.5])).log_softmax(-1)
    samples = torch.multinomial(truth.exp(), 1, generator=source)[:, 0]
    identity = PointPosterior(nn.Identity(), fb.likelihoods.Categorical())
    scores = [
        fb.VectorScaling().fit(identity, (logits, samples), progress=False),
        fb.Temperature().fit(identity, (logits, samples), progress=False),
    ]
    vector, temperature = (
        -(truth.exp() * each.predict(logits).log_probabilities).sum(-1).mean() for each in scores
    )
    entropy = -(truth.exp() * truth).sum(-1).mean()
    assert vector - entropy < 0.5 * (temperature - entropy)


@pytest.mark.filterwarnings("ignore:class frequencies")  # the members are random
def test_scaling_of_a_posterior_maximizes_the_likelihood_of_the_mixture():
    torch.manual_seed(0)
    members = {"weight": 3.0 * torch.randn(3, 3, 4).double(), "bias": torch.randn(3, 3).double()}
    posterior = MemberPosterior(nn.Linear(4, 3).double(), fb.likelihoods.Categorical(), members)
    inputs, labels = held_out(40)
    scaled = fb.VectorScaling().fit(posterior, (inputs.double(), labels), progress=False)
    samples = (posterior.predict(inputs.double()).log_samples / scaled.temperature).log_softmax(-1)
    factor, bias = (value.clone().requires_grad_() for value in (scaled.weight.diagonal(), scaled.bias))
    mapped = (samples * factor + bias).log_softmax(-1)
    nll = -(mapped[:, torch.arange(40), labels].logsumexp(0) - math.log(3)).sum()
    objective = nll + 3 * ((factor - 1).square().sum() + bias.square().sum())
    for slope in torch.autograd.grad(objective, [factor, bias]):
        assert float(slope.abs().max()) < 1e-4
    torch.testing.assert_close(scaled.predict(inputs.double()).nll(labels).sum(), nll.detach())


def test_batched_lbfgs_solves_every_problem():
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(5, 30, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (5, 30), generator=generator).double()
    penalty = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 100.0], dtype=torch.float64)

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        logits = (design[rows] @ x[..., None])[..., 0]
        nll = nn.functional.binary_cross_entropy_with_logits(logits, labels[rows], reduction="none")
        return nll.sum(1) + penalty[rows] * x.square().sum(1)

    start = torch.zeros(5, 4, dtype=torch.float64)
    together = minimize_batch(objective, start)
    for row in range(5):
        alone = minimize_batch(lambda x, rows, row=row: objective(x, rows + row), start[:1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-6)
    leaf = together.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(leaf, torch.arange(5)).sum(), leaf)
    assert float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("center", ["trained", "zero"])
def test_refit_of_a_regression_is_ridge_regression(center):
    network = trained(2)
    inputs, targets = lines(80).tensors
    posterior = PointPosterior(network, fb.likelihoods.Gaussian(0.5))
    problem = LastLayerProblem.read(posterior, [(inputs, targets)])
    (weight,) = problem.fit([(torch.arange(80), RefitSetting(0.1, center))])
    features, anchor = problem.features, problem.weight if center == "trained" else 0.0 * problem.weight
    ridge = 0.1 * float(features.square().mean()) * 80 * 0.5**2
    left = features.mT @ features + ridge * torch.eye(features.shape[1])
    expected = torch.linalg.solve(left, features.mT @ targets.double() + ridge * anchor.mT).mT
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-3)


def test_refit_chooses_a_large_penalty_on_random_labels(network):
    inputs, _ = held_out()
    labels = torch.multinomial(
        network(inputs).detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0)
    )
    refitted = fb.LastLayerRefit().fit(network, (inputs, labels[:, 0]), **QUIET)
    before, after = (each[-1].weight.detach() for each in (network, refitted.model))
    assert float((after - before).norm() / before.norm()) < 0.2  # the labels are those of the network


def test_refit_sets_the_noise_of_a_regression():
    network = trained(2)
    inputs, targets = lines(80).tensors
    posterior = fb.LastLayerRefit().fit(network, (inputs, targets), **QUIET)
    residual = (targets - posterior.model(inputs)).std(0)
    assert ((posterior.likelihood.log_scale.exp() / residual - 1.0).abs() < 0.3).all()


def test_refit_of_a_network_in_the_units_of_the_targets():
    inputs, targets = lines(40).tensors
    fit = fb.MLE(epochs=3).fit(small(2), (inputs, 1000.0 + 50.0 * targets), seed=0, **QUIET)
    network, held_out = fit.model, (inputs, 1020.0 + 50.0 * targets)
    assert "flowbnn_loc" in network.state_dict()
    posterior = fb.LastLayerRefit(penalties=[1e-7]).fit(network, held_out, **QUIET)
    with torch.no_grad():
        features = nn.functional.pad(network[:-1](inputs), (0, 1), value=1.0)
        expected = features @ torch.linalg.lstsq(features.double(), held_out[1].double()).solution.float()
        torch.testing.assert_close(posterior.model(inputs), expected, atol=0.5, rtol=0)
        assert (network(inputs) - held_out[1]).square().mean() > 100.0


# -------------------- errors


@pytest.mark.parametrize("calibrator", [fb.VectorScaling(), fb.MatrixScaling()], ids=lambda c: c.name)
def test_scaling_of_a_regression_is_refused(calibrator):
    with pytest.raises(FlowBNNError) as caught:
        calibrator.fit(small(2), lines().tensors, **QUIET)
    assert (caught.value.kind, caught.value.argument) == ("likelihood", "likelihood")


@each_calibrator
def test_bad_arguments_are_refused(calibrator, network):
    noisy = fb.to_stochastic(small(), {"*": fb.noise.NormalAffine()})
    for bad, argument in ((noisy, "network"), ("a network", "network")):
        with pytest.raises(FlowBNNError) as caught:
            calibrator.fit(bad, held_out(), **QUIET)
        assert caught.value.argument == argument
    for option, value in {
        "validation": [held_out()],
        "checkpoint": "a",
        "num_data": 3,
        "epochs": 2,
        "lr": 1.0,
    }.items():
        with pytest.raises(FlowBNNError) as caught:
            calibrator.fit(network, held_out(), **{option: value}, **QUIET)
        assert caught.value.argument == option
    with pytest.raises(FlowBNNError) as caught:
        type(calibrator)(epochs=3)
    assert caught.value.argument == "epochs"
    with pytest.raises(FlowBNNError) as caught:
        calibrator.fit(network, [], **QUIET)
    assert caught.value.kind == "loader"


def test_refit_needs_a_linear_output_layer():
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with pytest.raises(FlowBNNError) as caught:
        fb.LastLayerRefit().fit(network, held_out(), **QUIET)
    assert caught.value.kind == "layer"
    ensemble = fb.DeepEnsemble(2, epochs=1).fit(small(), loader(blobs()), seed=0, **QUIET)
    with pytest.raises(FlowBNNError) as caught:
        fb.LastLayerRefit().fit(ensemble, held_out(), progress=False)
    assert caught.value.kind == "network"


def test_forged_files_are_refused(network, tmp_path):
    posterior = fb.MatrixScaling().fit(network, held_out(), **QUIET)
    for name, value in {"weight": torch.eye(2), "bias": torch.zeros(4)}.items():
        forged = fb.MatrixScaling().fit(network, held_out(), **QUIET)
        setattr(forged, name, value)
        with pytest.raises(FlowBNNError) as caught:
            fb.load_posterior(forged.save(tmp_path / "forged"), small())
        assert caught.value.kind == "file"
    with pytest.raises(FlowBNNError):
        fb.load_posterior(posterior.save(tmp_path / "posterior"), nn.Linear(4, 3))


# -------------------- folds


def test_folds_are_stratified_and_disjoint():
    labels = torch.tensor([0] * 40 + [1] * 10 + [2] * 3)
    groups = split_folds(labels, 5, seed=1)
    assert sorted(torch.cat(groups).tolist()) == list(range(53))
    for group in groups:
        counts = torch.bincount(labels[group], minlength=3)
        assert counts[0] == 8
        assert counts[1] == 2
        assert counts[2] <= 1
    real = split_folds(torch.randn(10, 1), 4, seed=0)
    assert [len(group) for group in real] == [3, 3, 2, 2]


@pytest.mark.parametrize("calibrator", CALIBRATORS[1:3], ids=lambda calibrator: calibrator.name)
def test_few_examples_do_not_diverge(calibrator):
    """Unpenalized vector scaling has an NLL of 9.5 with 100 images."""
    torch.manual_seed(0)
    network = nn.Linear(20, 10)
    inputs = torch.randn(1000, 20)
    labels = torch.multinomial(network(inputs).detach().softmax(-1), 1)[:, 0]
    posterior = calibrator.fit(network, (inputs[:30], labels[:30]), **QUIET)
    nll = fb.evaluate(posterior, [(inputs[30:], labels[30:])], progress=False)["nll"]
    plain = nn.functional.cross_entropy(network(inputs[30:]), labels[30:]).item()
    assert nll < plain + 0.1


@pytest.mark.parametrize("calibrator", CALIBRATORS[1:], ids=lambda calibrator: calibrator.name)
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_unfit_labels_are_named_and_one_class_changes_no_prediction(calibrator, kind, network):
    inputs, labels = held_out()
    targets = torch.ones_like(labels) if kind == "classes" else (labels + 1) % 3
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = calibrator.fit(network, (inputs, targets), **QUIET)
    assert [entry.message.kind for entry in caught] == [kind]
    if kind == "classes":
        expected = network.eval()(inputs).detach().softmax(-1)
        torch.testing.assert_close(posterior.predict(inputs).probabilities, expected)


@each_calibrator
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_data_that_cannot_calibrate_raise_one_warning_and_change_no_prediction(calibrator, count, network):
    inputs, labels = held_out()
    same = (labels == 1).nonzero().flatten()[:count]
    several = torch.arange(count)
    for rows, kind in ((same, "classes"), (several, "examples"))[: 2 if count < 4 else 1]:
        with pytest.warns(FlowBNNWarning) as caught:
            posterior = calibrator.fit(network, (inputs[rows], labels[rows]), **QUIET)
        expected = "classes" if len(labels[rows].unique()) == 1 else kind
        assert [entry.message.kind for entry in caught] == [expected]
        probabilities = network.eval()(inputs).detach().softmax(-1)
        torch.testing.assert_close(posterior.predict(inputs).probabilities, probabilities)


@pytest.mark.parametrize("calibrator", [fb.Temperature(), fb.LastLayerRefit()], ids=lambda each: each.name)
@pytest.mark.parametrize(("count", "kind"), [(1, "examples"), (3, "examples"), (40, "targets")])
def test_regressions_without_usable_targets_are_not_changed(calibrator, count, kind):
    inputs, targets = lines(96).tensors
    plain = fb.MLE(epochs=10, lr=0.05).fit(small(2), (inputs, targets), seed=0, **QUIET)
    held_out = (inputs[:count], targets[:count] if kind == "examples" else torch.ones(count, 2))
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = calibrator.fit(plain, held_out, **QUIET)
    assert [entry.message.kind for entry in caught] == [kind]
    nll = [fb.evaluate(each, (inputs, targets), progress=False)["nll"] for each in (posterior, plain)]
    assert nll[0] == pytest.approx(nll[1], rel=1e-6)


def test_a_refit_needs_a_problem(network):
    with pytest.raises(FlowBNNError) as error:
        fb.LastLayerRefit().fit_problem(network)
    assert error.value.argument == "problem"


def test_no_warning_is_raised_for_good_data(network, recwarn):
    for calibrator in CALIBRATORS:
        calibrator.fit(network, held_out(), **QUIET)
    assert not [entry for entry in recwarn if isinstance(entry.message, FlowBNNWarning)]


@pytest.mark.parametrize("calibrator", [fb.VectorScaling(), fb.MatrixScaling()])
def test_scaling_keeps_the_energy_of_the_logits(calibrator, network):
    """The energy of normalized logits would be zero for every input."""
    posterior, inputs = calibrator.fit(network, held_out(), **QUIET), held_out()[0]
    logits = network(inputs).detach() / posterior.temperature
    torch.testing.assert_close(posterior.predict(inputs).energy, -logits.logsumexp(-1))
    outputs = posterior.sample(0)(inputs).detach()
    torch.testing.assert_close(outputs.softmax(-1), posterior.predict(inputs).probabilities)
    torch.testing.assert_close(outputs.logsumexp(-1), logits.logsumexp(-1))


class GraphNetwork(nn.Linear):
    """Network on the nodes of one graph, whose edges have another number of rows."""

    def forward(self, x, edges):
        return super().forward(x.index_add(0, edges[0], x[edges[1]]))


def test_refit_of_one_graph_is_refused_by_its_own_name():
    graph = {"x": torch.randn(6, 2), "edges": torch.randint(6, (2, 9))}
    data = [(graph, torch.arange(6) % 3)]
    with pytest.raises(FlowBNNError, match="LastLayerRefit needs .*; use fb.MatrixScaling"):
        fb.LastLayerRefit().fit(GraphNetwork(2, 3), data, **QUIET)
    with pytest.raises(FlowBNNError, match="Laplace needs .*; use SWAG"):
        fb.Laplace(epochs=0).fit(GraphNetwork(2, 3), data, **QUIET)
