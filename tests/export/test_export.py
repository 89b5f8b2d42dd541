"""Tests of exported files: they give the predictions of posteriors in ONNX Runtime and in ``torch.export``."""

import json
import sys

import onnxruntime
import pytest
import torch
from export_networks import NETWORKS, images, lenet, vectors
from torch import nn

import flowbnn as fb
from flowbnn.batches import named_tensors
from flowbnn.export.export import uncertainties
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian
from flowbnn.methods.calibrators.scaling import ScaledPosterior
from flowbnn.methods.calibrators.temperature import TemperedPosterior
from flowbnn.numerics import is_concrete
from flowbnn.posterior import MemberPosterior, MixturePosterior, NoisePosterior, PointPosterior
from slow_cases import mark_slow

SAMPLES = 4


def add_noise(network, likelihood=None, rules=None):
    torch.manual_seed(0)
    network = fb.to_stochastic(network.eval(), rules or {"*": fb.noise.NormalAffine()})
    return NoisePosterior(network.eval(), likelihood or Categorical())


def mlp(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def export_or_skip(*arguments, **options):
    """Exports a posterior. Skips the test if this version of torch cannot store sampled weights."""
    try:
        return fb.export(*arguments, **options)
    except fb.FlowBNNError as error:
        if error.argument == "format" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
            pytest.skip(str(error))
        raise


def run(file, inputs, seed=0):
    """Returns the outputs of an exported file."""
    feeds = dict(zip(file.inputs, [tensor for _, tensor in named_tensors(inputs)], strict=False))
    feeds |= file.draws(seed) if file.noise == "input" else {}
    assert list(feeds) == list(file.inputs)
    if file.format == "torch":
        return torch.export.load(file.path).module()(*feeds.values())
    session = onnxruntime.InferenceSession(str(file.path))
    values = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.as_tensor, values), strict=True))


def assert_predicts(file, posterior, inputs, seed=0):
    expected = uncertainties(posterior.predict(inputs, file.samples, seed=seed))
    outputs = run(file, inputs, seed)
    assert list(outputs) == list(file.outputs) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, rtol=1e-5, atol=1e-5)


# -------------------- networks


@pytest.mark.parametrize("name", mark_slow(NETWORKS, ["named inputs"]))
def test_onnx_gives_predictions_of_any_network(name, tmp_path):
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    posterior = add_noise(make())
    file = fb.export(posterior, tmp_path / "model.onnx", inputs(4), samples=SAMPLES)
    assert_predicts(file, posterior, inputs(2))
    assert_predicts(file, posterior, inputs(1))


@pytest.mark.parametrize(
    "name",
    mark_slow(["resnet", "mobilenet", "gru", "transformer", "upsampler"], ["mobilenet"]),
)
def test_torch_gives_predictions(name, tmp_path):
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    posterior = add_noise(make())
    file = fb.export(posterior, tmp_path / "model.pt2", inputs(4), samples=SAMPLES)
    for rows in (1, 2, 7):
        assert_predicts(file, posterior, inputs(rows))


def test_noise_as_input_takes_draws_of_any_seed(tmp_path):
    posterior = add_noise(lenet())
    file = fb.export(posterior, tmp_path / "model.onnx", images(4), samples=SAMPLES, noise="input")
    assert list(file.inputs) == ["inputs", "noise.0", "noise.3", "noise.6", "noise.8"]
    for seed in (0, 5):
        assert_predicts(file, posterior, images(2), seed)


@pytest.mark.parametrize("site", mark_slow(["channel", "position"], ["position"]))
def test_noise_of_both_sites_and_of_flows(site, tmp_path):
    rules = {"0": fb.noise.NormalPlanar(length=2, site=site), "*": fb.noise.NormalAffine(site=site)}
    posterior = add_noise(lenet(), rules=rules)
    file = fb.export(posterior, tmp_path / "model.pt2", images(4), samples=SAMPLES)
    assert_predicts(file, posterior, images(2))


def test_layers_before_the_noise_run_once(tmp_path):
    posterior = add_noise(lenet(), rules={"8": fb.noise.NormalAffine(), "*": None})
    file = fb.export(posterior, tmp_path / "model.pt2", images(4), samples=SAMPLES)
    program = torch.export.load(file.path)
    shapes = [n.meta["val"].shape for n in program.graph.nodes if n.target is torch.ops.aten.conv2d.default]
    assert [str(shape[0]) for shape in shapes] == [str(program.graph_signature and shapes[0][0])] * 2
    assert "*" not in str(shapes[0][0])  # B rows rather than K * B
    assert_predicts(file, posterior, images(2))


# -------------------- methods


def ensemble(outputs, likelihood, log_noise=None):
    networks = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)) for _ in range(3)]
    states = [network.state_dict() for network in networks]
    return MemberPosterior.from_states(mlp(outputs), likelihood, states, log_noise=log_noise)


def fitted(method, likelihood="categorical", network=None):
    inputs = vectors(20, 4)
    targets = (inputs[:, 0] > 0).long() if likelihood == "categorical" else inputs[:, :2]
    return method.fit(network or mlp(2), (inputs, targets), likelihood=likelihood, progress=False)


def dropout_network():
    layers = (
        nn.Linear(4, 6),
        nn.SELU(),
        nn.Dropout(0.3),
        nn.Linear(6, 6),
        nn.AlphaDropout(0.2),
        nn.Linear(6, 2),
    )
    return nn.Sequential(*layers)


POSTERIORS = {
    "point": lambda: PointPosterior(mlp(), Categorical()),
    "gaussian": lambda: add_noise(mlp(2), Gaussian(0.5, dim=2)),
    "predicted variance": lambda: add_noise(mlp(2), Gaussian("predicted")),
    "bernoulli": lambda: add_noise(mlp(1), Bernoulli()),
    "ensemble": lambda: ensemble(3, Categorical()),
    "ensemble with noise": lambda: ensemble(2, Gaussian(dim=2), torch.randn(3, 2)),
    "temperature": lambda: TemperedPosterior(add_noise(mlp()), 1.7),
    "temperature of a regression": lambda: TemperedPosterior(add_noise(mlp(2), Gaussian(0.5, dim=2)), 1.7),
    "matrix": lambda: ScaledPosterior(add_noise(mlp()), 1.7, torch.randn(3, 3), torch.randn(3)),
    "mixture": lambda: MixturePosterior([add_noise(mlp()), ensemble(3, Categorical())], [2.0, 1.0]),
    "mixture of regressions": lambda: MixturePosterior(
        [add_noise(mlp(2), Gaussian(s, dim=2)) for s in (0.1, 0.5)]
    ),
    "dropout": lambda: fitted(fb.MCDropout(epochs=1), network=dropout_network()),
    "swag": lambda: fitted(fb.SWAG(epochs=4)),
    "laplace": lambda: fitted(fb.Laplace(epochs=1)),
    "laplace of a regression": lambda: fitted(fb.Laplace(epochs=1), "gaussian"),
    "bayes by backprop": lambda: fitted(fb.BayesByBackprop(epochs=1)),
    "mnf": lambda: fitted(fb.MNF(epochs=1)),
    "hmc": lambda: fitted(fb.HMC(warmup=2, samples=2, chains=1, epochs=0)),
}


# every kind of sampled networks, and of calibrations
KINDS = [
    "predicted variance",
    "bernoulli",
    "ensemble with noise",
    "matrix",
    "mixture",
    "dropout",
    "laplace",
    "mnf",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mark_slow(POSTERIORS, KINDS))
def test_every_kind_of_posterior(name, tmp_path):
    torch.manual_seed(0)
    posterior = POSTERIORS[name]()
    file = export_or_skip(posterior, tmp_path / "model.pt2", vectors(5, 4), samples=SAMPLES, noise="input")
    assert_predicts(file, posterior, vectors(2, 4), seed=3)


@pytest.mark.parametrize("name", mark_slow(["ensemble", "mixture of regressions", "matrix"], ["ensemble"]))
def test_kinds_of_posteriors_in_onnx(name, tmp_path):
    torch.manual_seed(0)
    posterior = POSTERIORS[name]()
    file = fb.export(posterior, tmp_path / "model.onnx", vectors(5, 4), samples=SAMPLES)
    assert_predicts(file, posterior, vectors(2, 4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", mark_slow(["Gaussian", "NegativeBinomial", "Survival", "Quantiles"], ["Survival"])
)
def test_likelihoods_of_real_numbers(name, tmp_path):
    likelihood = getattr(fb.likelihoods, name)()
    posterior = ensemble(
        getattr(likelihood, "num_outputs", 2 if name == "NegativeBinomial" else 1), likelihood
    )
    suffix = "pt2" if name == "Quantiles" else "onnx"
    file = export_or_skip(posterior, tmp_path / f"model.{suffix}", vectors(3, 4), samples=SAMPLES)
    for number in (1, 5):  # rows
        assert_predicts(file, posterior, vectors(number, 4))


class ErrorFunction(nn.Module):
    def forward(self, x):
        return torch.erf(x)


@pytest.mark.parametrize("cause", mark_slow(["network", "likelihood"], ["network"]))
def test_error_functions_in_double_precision_are_refused_in_onnx(cause, tmp_path):
    network = nn.Sequential(nn.Linear(4, 3), ErrorFunction()).double()
    posterior = PointPosterior(network, Categorical())
    if cause == "likelihood":
        posterior = ensemble(4, fb.likelihoods.Quantiles())
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.export(posterior, tmp_path / "model.onnx", vectors(3, 4), samples=SAMPLES)
    assert (caught.value.kind, caught.value.argument) == ("export", "format")


GATES = {  # posterior, targets, layer of the features, flow
    "classes, inputs": (lambda: add_noise(mlp()), torch.arange(60) % 3, None, "nsf"),
    "classes, layer": (lambda: add_noise(mlp()), torch.arange(60) % 3, "0", "realnvp"),
    "regression, layer": (lambda: add_noise(mlp(2), Gaussian(0.5, dim=2)), vectors(60, 2), "0", "maf"),
}


@pytest.mark.parametrize("suffix", mark_slow(["onnx", "pt2"], ["pt2"]))
@pytest.mark.parametrize("name", mark_slow(GATES, ["regression, layer"]))
def test_density_gates_are_exported(name, suffix, tmp_path):
    make, targets, features, flow = GATES[name]
    torch.manual_seed(0)
    inputs = vectors(60, 4)
    posterior = fb.gated(make(), (inputs, targets), features, 0.3, epochs=1, flow=flow)
    file = fb.export(posterior, tmp_path / f"model.{suffix}", inputs, samples=SAMPLES)
    rows = torch.cat([vectors(5, 4), 30.0 * vectors(3, 4)])
    assert set(posterior.is_unfamiliar(rows).tolist()) == {False, True}
    assert "log_density" in file.outputs
    assert_predicts(file, posterior, rows)
    assert_predicts(file, posterior, rows[:1])


def test_heads_are_outputs_with_their_names(tmp_path):
    likelihood = fb.likelihoods.Heads({"class": "categorical", "value": Gaussian(1.0)}, [(3,), (1,)])
    posterior = ensemble(4, likelihood)
    file = fb.export(posterior, tmp_path / "model.pt2", vectors(3, 4), samples=SAMPLES)
    assert list(file.outputs)[::3] == ["class_probabilities", "value_mean"]
    assert_predicts(file, posterior, vectors(5, 4))


def test_ensemble_of_convolutions(tmp_path):
    torch.manual_seed(0)
    states = [lenet().state_dict() for _ in range(2)]
    posterior = MemberPosterior.from_states(lenet(), Categorical(), states)
    file = fb.export(posterior, tmp_path / "model.onnx", images(4), samples=2)
    assert_predicts(file, posterior, images(3))


# -------------------- description


def test_file_holds_its_description_and_the_weights_once(tmp_path):
    network = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3))
    file = fb.export(add_noise(network), tmp_path / "model.onnx", vectors(5, 4), samples=SAMPLES, seed=7)
    weights = 4 * sum(value.numel() for value in network.parameters())
    draws = 4 * SAMPLES * (4 + 200 + 200)
    assert weights + draws < file.num_bytes < weights + draws + 20_000
    assert file.inputs == {"inputs": (["batch", 4], "float32")}
    assert file.outputs["probabilities"] == (["batch", 3], "float32")
    assert file.outputs["epistemic"] == (["batch"], "float32")
    assert file.num_bytes == file.path.stat().st_size
    metadata = onnxruntime.InferenceSession(str(file.path)).get_modelmeta().custom_metadata_map
    document = json.loads(metadata["flowbnn"])
    assert (document["samples"], document["seed"], document["noise"]) == (SAMPLES, 7, "fixed")
    assert b"site-packages" not in file.path.read_bytes()
    extra = {"flowbnn": ""}
    other = fb.export(add_noise(mlp()), tmp_path / "model.pt2", vectors(5, 4), samples=SAMPLES)
    torch.export.load(other.path, extra_files=extra)
    assert json.loads(extra["flowbnn"])["format"] == "torch"


def test_example_may_be_a_loader_an_array_or_one_row(tmp_path):
    posterior = add_noise(mlp())
    loader = [(vectors(5, 4), torch.zeros(5).long())]
    for example in (loader, vectors(1, 4).numpy()):
        file = fb.export(posterior, tmp_path / "model.pt2", example, samples=SAMPLES)
        assert file.format == "torch"
        assert_predicts(file, posterior, vectors(6, 4))


@pytest.mark.parametrize("predictive", ["linearized", "probit"])
@pytest.mark.parametrize("structure", mark_slow(["kron", "diag"], ["kron"]))
def test_linearized_output_layers_of_laplace(structure, predictive, tmp_path):
    posterior = fitted(fb.Laplace(structure, epochs=0, predictive=predictive))
    file = fb.export(posterior, tmp_path / "model.pt2", vectors(5, 4), samples=SAMPLES)
    assert_predicts(file, posterior, vectors(1, 4))
    assert_predicts(file, posterior, vectors(7, 4))


@pytest.mark.parametrize(
    "method",
    [fb.Laplace(epochs=0, layers="all"), fb.Laplace("full", epochs=0, predictive="probit")],
    ids=["all layers", "full"],
)
def test_laplace_predictives_that_need_derivatives_are_refused(method, tmp_path):
    posterior = fitted(method)
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.pt2", vectors(5, 4), samples=2)
    assert (error.value.kind, error.value.argument) == ("unsupported", "model")
    assert "sampled" in str(error.value)


class Cells(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell, self.head = kind(3, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.GRUCell, {}), (nn.LSTMCell, {"bias": False}), (nn.RNNCell, {"nonlinearity": "relu"})],
    ids=["gru", "lstm", "relu"],
)
def test_recurrent_cells_run_with_any_batch_size(kind, options, tmp_path):
    torch.manual_seed(0)
    posterior = add_noise(Cells(kind, **options))
    file = fb.export(posterior, tmp_path / "model.pt2", vectors(5, 2, 3), samples=2)
    assert_predicts(file, posterior, vectors(1, 2, 3))
    assert_predicts(file, posterior, vectors(7, 2, 3))


class Projected(nn.Module):
    """LSTM with projections, or with packed sequences."""

    def __init__(self, packs=False, **options):
        super().__init__()
        self.lstm, self.packs = nn.LSTM(3, 4, batch_first=True, bidirectional=True, **options), packs
        self.head = nn.Linear(2 * (self.lstm.proj_size or 4), 3)

    def forward(self, x):
        if self.packs:
            lengths = (x[..., 0] != 0).sum(1)
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.lstm(x)[1][0].transpose(0, 1).flatten(1))
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projected_lstms_run_in_onnx(tmp_path):
    torch.manual_seed(0)
    posterior = add_noise(Projected(proj_size=2))
    file = export_or_skip(posterior, tmp_path / "model.onnx", vectors(5, 2, 3), samples=2)
    assert_predicts(file, posterior, vectors(7, 2, 3))


def test_packed_sequences_are_refused_with_advice(tmp_path):
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.export(add_noise(Projected(packs=True)), tmp_path / "model.pt2", vectors(5, 2, 3), samples=2)
    assert caught.value.kind == "export"
    assert "padded sequences" in str(caught.value)


class Places(nn.Module):
    """Network with an embedding of positions, whose noise has no axis of examples, and a layer that never runs."""

    def __init__(self):
        super().__init__()
        self.unused, self.places, self.head = nn.Linear(3, 3), nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x + self.places(torch.arange(4))).sum(1)


def test_noise_without_an_axis_of_examples_multiplies_rows(tmp_path):
    torch.manual_seed(0)
    noise = fb.noise.NormalAffine
    posterior = add_noise(Places(), rules={"places": noise(batch_axis="none"), "*": noise()})
    file = fb.export(posterior, tmp_path / "model.pt2", vectors(5, 4, 3), samples=SAMPLES)
    assert_predicts(file, posterior, vectors(7, 4, 3))
    program = torch.export.load(file.path)
    products = [node for node in program.graph.nodes if "linear" in str(node.target)]
    assert len(products) == 1  # one pass over the rows of all samples


# -------------------- errors


def test_an_empty_example_is_refused(tmp_path):
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(PointPosterior(nn.Linear(4, 3), Categorical()), tmp_path / "model.pt2", [])
    assert (error.value.kind, error.value.argument) == ("empty", "example_inputs")


class FixedSize(nn.Module):
    def forward(self, x):
        return x.reshape(int(x.shape[0]), -1)


def test_layer_that_fixes_the_batch_size_is_named(tmp_path):
    posterior = PointPosterior(nn.Sequential(nn.Linear(4, 3), FixedSize()), Categorical())
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.pt2", vectors(5, 4))
    assert (error.value.kind, error.value.layer) == ("export", "1")
    assert "x.shape[0]" in str(error.value)


class LastSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, sequences):
        return self.lstm(sequences)[1][0][0]


class Masked(nn.Module):
    """Branches on a comparison of two masks, and on the inputs if ``branch`` is a function."""

    def __init__(self, branch=None):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        causal = bool((mask == torch.ones_like(mask).tril()).all())
        x = x[..., None, :].expand(len(x), x.shape[1], x.shape[1]) * (mask if causal else 1.0)
        negative = self.branch is not None and bool(self.branch(x, mask))
        return -x.sum(-1) if negative else x.sum(-1)


def overwrite(x, mask):
    mask[0] = x[0, 0]
    return mask.view(-1)[:3].max() > 10.0


def test_conditions_without_inputs_are_constants(tmp_path, recwarn, capfd):
    posterior = PointPosterior(nn.Sequential(nn.Linear(4, 3), Masked()), Categorical())
    file = fb.export(posterior, tmp_path / "model.onnx", vectors(5, 4), samples=SAMPLES)
    assert_predicts(file, posterior, vectors(7, 4))
    assert "len" not in globals()
    branches = [
        lambda x, mask: x.max() > 10.0,
        overwrite,
        lambda x, mask: (mask.mul_(x[0, 0, 0]) > 10.0).any(),
        lambda x, mask: torch.full((2,), x.max().item()).max() > 10.0,
        lambda x, mask: torch.ones(len(x.flatten()[x.flatten() > 1.0])).sum() > 100.0,
        lambda x, mask: torch.ones(len(x)).sum() > 2.0,
    ]
    for branch in branches:  # each is false for the examples, but not for all inputs
        posterior = PointPosterior(nn.Sequential(nn.Linear(4, 3), Masked(branch)), Categorical())
        with pytest.raises(fb.FlowBNNError) as error:
            fb.export(posterior, tmp_path / "refused.onnx", vectors(5, 4))
        assert error.value.kind == "export"
    assert not (tmp_path / "refused.onnx").exists()
    assert capfd.readouterr().err == ""


class Distances(nn.Module):
    """Radial basis functions."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return torch.exp(-torch.cdist(x, self.centers))


def test_distances_are_exported_for_any_batch_size(tmp_path):
    """The kernel of torch for more than 25 rows is another one, which limits the batch size of a trace."""
    posterior, x = PointPosterior(nn.Sequential(Distances(), nn.Linear(5, 3)), Categorical()), vectors(40, 4)
    file = fb.export(posterior, tmp_path / "model.pt2", x[:3], samples=1)
    operations = {str(node.target) for node in torch.export.load(file.path).graph.nodes}
    assert not any("cdist" in name for name in operations)  # which ONNX lacks
    outputs = torch.export.load(file.path).module()(x)
    torch.testing.assert_close(outputs["probabilities"], posterior.predict(x).probabilities)


class Solves(nn.Module):
    """Checks its inputs if Python can read them, and solves systems with two matrices."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.Parameter(torch.eye(4) + 0.3 * torch.randn(2, 4, 4))

    def forward(self, x):
        if is_concrete(x):
            assert bool(x.isfinite().all())
        for matrix in self.matrices.tril():
            x = torch.linalg.solve_triangular(matrix, x, upper=False, left=False)
        return x


def test_constants_are_matched_if_a_trace_leaves_out_checks(tmp_path):
    torch.manual_seed(0)
    posterior = PointPosterior(nn.Sequential(Solves(), nn.Linear(4, 3)), Categorical())
    file = fb.export(posterior, tmp_path / "model.onnx", vectors(5, 4), samples=1)
    assert_predicts(file, posterior, vectors(7, 4))


@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_are_constants(kind, tmp_path):
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map=kind)
    posterior, x = PointPosterior(nn.Sequential(layer, nn.Linear(4, 3)), Categorical()), vectors(6, 4)
    file = fb.export(posterior, tmp_path / "model.pt2", x[:3], samples=1)
    operations = {str(node.target) for node in torch.export.load(file.path).graph.nodes}
    assert not any("linalg" in name or "householder" in name for name in operations)
    outputs = torch.export.load(file.path).module()(x)
    torch.testing.assert_close(outputs["probabilities"], posterior.predict(x).probabilities)


class Slope(nn.Module):
    """Network that differentiates in its forward pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.body(x).sum(), x)[0]


def test_networks_that_differentiate_are_refused(tmp_path):
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.export(PointPosterior(Slope(), Categorical()), tmp_path / "model.pt2", vectors(3, 4), samples=1)
    assert caught.value.kind == "export"
    assert "torch.autograd.grad" in str(caught.value)


def test_inputs_that_are_no_tensors_are_refused(tmp_path):
    sequences = nn.utils.rnn.pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    posterior = PointPosterior(LastSteps(), Categorical())
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.pt2", sequences)
    assert (error.value.kind, error.value.argument) == ("export", "example_inputs")


class Branching(nn.Module):
    def forward(self, x):
        return x if bool((x > 0).all()) else -x


def test_layer_that_branches_on_values_is_named(tmp_path):
    posterior = PointPosterior(nn.Sequential(nn.Linear(4, 3), Branching()), Categorical())
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.onnx", vectors(5, 4))
    assert (error.value.kind, error.value.layer) == ("export", "1")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x.unsqueeze(-1) * x.unsqueeze(-2))


def test_layer_that_onnx_lacks_is_named(tmp_path):
    posterior = PointPosterior(nn.Sequential(nn.Linear(4, 3), Eigenvalues()), Categorical())
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.onnx", vectors(5, 4))
    assert (error.value.kind, error.value.layer) == ("export", "1")
    file = fb.export(posterior, tmp_path / "model.pt2", vectors(5, 4), samples=1)
    assert_predicts(file, posterior, vectors(2, 4))


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(add_noise(mlp()), tmp_path / "model.onnx", vectors(5, 4))
    assert error.value.kind == "missing package"
    assert "flowbnn[export]" in str(error.value)


def test_unsupported_posteriors_and_draws(tmp_path):
    torch.manual_seed(0)
    inputs = vectors(60, 4)
    posterior = add_noise(mlp())
    with pytest.raises(fb.FlowBNNError) as error:
        fb.export(posterior, tmp_path / "model.pt2")
    assert error.value.argument == "example_inputs"
    file = fb.export(posterior, tmp_path / "model.pt2", inputs, samples=2)
    with pytest.raises(fb.FlowBNNError) as error:
        file.draws(0)
    assert error.value.argument == "noise"


def test_paths_of_unknown_formats_are_refused(tmp_path):
    posterior = add_noise(mlp())
    with pytest.raises(fb.FlowBNNError, match=r"\.onnx or \.pt2, got model\.tflite; or set format") as caught:
        fb.export(posterior, tmp_path / "model.tflite", vectors(5, 4))
    assert caught.value.argument == "path"
    assert not list(tmp_path.iterdir())
    assert fb.export(posterior, tmp_path / "model", vectors(5, 4), samples=2, format="torch").path.exists()
