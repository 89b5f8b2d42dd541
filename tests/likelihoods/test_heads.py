"""Tests of networks with several heads."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Gaussian, Heads, Poisson, make_likelihood
from flowbnn.packing import pack_targets, read_layout, unpack_targets
from slow_cases import mark_slow


class TwoHeads(nn.Module):
    """Network with a head of three classes and a head of one value."""

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        self.body, self.as_tuple = nn.Sequential(nn.Linear(2, 8), nn.Tanh()), as_tuple
        self.value, self.label = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        outputs = {"value": self.value(features), "class": self.label(features)}
        return (outputs["class"], outputs["value"]) if self.as_tuple else outputs


def make_heads() -> Heads:
    return Heads({"class": Categorical(), "value": Gaussian()})


def make_data(rows: int = 64, unit: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 2, generator=generator)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    values = unit * (inputs.sum(1) + 0.1 * torch.randn(rows, generator=generator))
    return inputs, labels, values


def make_loader(rows: int = 64, as_tuple: bool = False, unit: float = 1.0):
    inputs, labels, values = make_data(rows, unit)
    batches = []
    for low in range(0, rows, 32):
        chunk = slice(low, low + 32)
        targets = {"value": values[chunk], "class": labels[chunk]}
        batches.append((inputs[chunk], (labels[chunk], values[chunk]) if as_tuple else targets))
    return batches


# -------------------- packed targets


def test_packed_targets_are_selected_and_concatenated():
    targets = {"b": torch.randn(5, 2, 3), "a": torch.arange(5), "c": torch.rand(5, 1) > 0.5}
    packed = pack_targets(targets)
    rows = torch.cat([packed[3:], packed[:3]])
    layout = read_layout(rows)
    a, b, c = unpack_targets(rows, layout)
    order = torch.tensor([3, 4, 0, 1, 2])
    assert torch.equal(a, targets["a"][order])
    torch.testing.assert_close(b.float(), targets["b"][order])
    assert torch.equal(c.bool(), targets["c"][order])
    assert read_layout(packed.float()) == layout
    assert read_layout(torch.randn(5, 9)) is None


@pytest.mark.parametrize(
    "targets", ["text", {}, {"a": torch.zeros(())}, (torch.zeros(2), torch.zeros(3)), {"a": [1]}]
)
def test_targets_that_are_no_tensors_are_refused(targets):
    with pytest.raises(FlowBNNError) as caught:
        pack_targets(targets)
    assert caught.value.kind == "targets"


# -------------------- likelihood


def test_log_prob_is_the_sum_over_heads():
    heads, network = make_heads(), TwoHeads()
    inputs, labels, values = make_data(10)
    plain = network(inputs)
    heads.attach(network)
    outputs = network(inputs)
    expected = Categorical().log_prob(plain["class"], labels) + Gaussian().log_prob(plain["value"], values)
    for targets in ({"value": values, "class": labels}, (labels, values)):
        torch.testing.assert_close(heads.log_prob(outputs, targets), expected)
        torch.testing.assert_close(heads.log_prob(outputs, pack_targets(targets)), expected)


def test_nll_is_that_of_the_joint_mixture():
    heads = Heads({"value": Gaussian(0.5), "class": Categorical()}, output_shapes=[(1,), (3,)])
    outputs = torch.randn(4, 6, 4)
    _, labels, values = make_data(6)
    predictive = heads.predictive(outputs)
    log_prob = torch.stack([heads.log_prob(each, {"class": labels, "value": values}) for each in outputs])
    expected = -(log_prob.logsumexp(0) - torch.log(torch.tensor(4.0)))
    torch.testing.assert_close(predictive.nll((values, labels)), expected)
    torch.testing.assert_close(predictive.log_prob({"class": labels, "value": values}), -expected)
    metrics = predictive.evaluate((values, labels))
    assert {"nll", "class_accuracy", "class_nll", "value_rmse", "value_crps"} <= set(metrics)
    torch.testing.assert_close(predictive[2:4].nll((values[2:4], labels[2:4])), expected[2:4])
    torch.testing.assert_close(predictive["class"].probabilities, outputs[..., 1:].softmax(-1).mean(0))


def test_predictive_is_a_dictionary_of_predictives():
    heads = Heads({"value": Gaussian(0.5), "class": Categorical()}, output_shapes=[(1,), (3,)])
    predictive = heads.predictive(torch.randn(4, 6, 4))
    assert list(predictive) == ["value", "class"]
    assert "class" in predictive
    assert len(predictive) == 6
    drawn = predictive.sample(50, seed=0)
    assert (drawn["value"].shape, drawn["class"].shape) == ((50, 6, 1), (50, 6))
    assert torch.equal(drawn["value"], predictive.sample(50, seed=0)["value"])
    assert set(predictive.decide({"class": 0.5, "value": 1.0})) == {"class", "value"}
    with pytest.raises(FlowBNNError) as caught:
        predictive.decide(0.5)
    assert caught.value.argument == "abstain_above"
    assert torch.equal(predictive.uncertainty("class_entropy"), predictive["class"].uncertainty("entropy"))
    with pytest.raises(FlowBNNError) as caught:
        predictive["clas"]
    assert caught.value.kind == "head"


# -------------------- fits

METHODS = {
    "map": lambda: fb.MAP(epochs=2),
    "node-noise": lambda: fb.NodeNoise(epochs=2),
    "ensemble": lambda: fb.DeepEnsemble(2, epochs=2),
    "dropout": lambda: fb.MCDropout(epochs=2),
    "bbb": lambda: fb.BayesByBackprop(epochs=2),
    "swag": lambda: fb.SWAG(epochs=6),
    "sgld": lambda: fb.SGLD(epochs=4, samples=4, cycles=2),
    "hmc": lambda: fb.HMC(samples=4, warmup=4, chains=2, steps=3, epochs=1),
    "laplace": lambda: fb.Laplace(epochs=2),
    "laplace-all": lambda: fb.Laplace("diag", layers="*", epochs=2),
}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
@pytest.mark.parametrize("name", mark_slow(METHODS, ["map", "node-noise", "ensemble", "hmc", "laplace"]))
@pytest.mark.parametrize("as_tuple", [False, True], ids=["dict", "tuple"])
def test_every_method_fits_predicts_saves_and_loads(name, as_tuple, tmp_path):
    torch.manual_seed(0)
    network, loader = TwoHeads(as_tuple), make_loader(as_tuple=as_tuple)
    posterior = METHODS[name]().fit(network, loader, likelihood=make_heads(), progress=False, seed=0)
    assert isinstance(network(torch.zeros(1, 2)), tuple if as_tuple else dict)
    inputs, labels, values = make_data()
    predictive = posterior.predict(inputs, samples=4, seed=0)
    assert predictive["class"].probabilities.shape == (64, 3)
    assert predictive["value"].mean.shape == (64,)
    metrics = fb.evaluate(posterior, loader, samples=4, novel=10.0 * inputs)
    assert {"nll", "class_accuracy", "value_rmse", "auroc_class_entropy", "auroc_value_std"} <= set(metrics)
    loaded = fb.load_posterior(posterior.save(tmp_path / "file"), network)
    targets = {"class": labels, "value": values}
    result = loaded.predict(inputs, samples=4, seed=0).nll(targets)
    torch.testing.assert_close(result, predictive.nll(targets))


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_real_heads_are_learned_in_any_unit():
    loader = make_loader(128, unit=1e3)
    posterior = fb.MLE(epochs=80, lr=0.03).fit(
        TwoHeads(), loader, likelihood=make_heads(), progress=False, seed=0
    )
    metrics = fb.evaluate(posterior, loader)
    assert metrics["class_accuracy"] > 0.9
    assert metrics["value_rmse"] < 400.0


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_fit_calibrate_compare_views_and_adaptive_sampling():
    inputs, labels, values = make_data(40)
    rows = [(inputs[i], {"class": labels[i], "value": values[i]}) for i in range(40)]
    loader = DataLoader(rows, batch_size=16)
    network = TwoHeads()
    posterior = fb.fit(
        fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}),
        loader,
        epochs=2,
        likelihood=make_heads(),
        progress=False,
    )
    averaged = posterior.predict(inputs, 4, views=[lambda x: x, lambda x: x], seed=0)
    expected = posterior.predict(inputs, 4, seed=0)
    torch.testing.assert_close(averaged["class"].probabilities, expected["class"].probabilities)
    assert posterior.predict(inputs, 20, adaptive=0.5).sample_counts.shape == (40,)
    calibrated = fb.calibrate(network, loader, likelihood=make_heads(), folds=2, progress=False)
    assert {"plain", "noise"} <= set(calibrated.calibration.nll)
    table = fb.compare(
        network,
        loader,
        loader,
        methods=["mle", "deep-ensemble"],
        likelihood=make_heads(),
        epochs=1,
        progress=False,
    )
    assert table.best in ("mle", "deep-ensemble")


def test_elbo_takes_several_heads():
    model = fb.to_stochastic(TwoHeads(), {"*": fb.noise.NormalAffine()})
    inputs, labels, values = make_data(8)
    terms = fb.ELBO(make_heads(), num_data=8)(model, inputs, {"class": labels, "value": values})
    terms.loss.backward()
    assert torch.isfinite(terms.loss)


# -------------------- wrong input


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs, labels, values: (inputs, {"class": labels}),
        lambda inputs, labels, values: (inputs, {"class": labels, "values": values}),
        lambda inputs, labels, values: (inputs, (labels,)),
        lambda inputs, labels, values: (inputs, labels),
        lambda inputs, labels, values: (inputs, (labels + 5, values)),
    ],
    ids=["missing", "misspelled", "short", "plain", "label"],
)
def test_heads_without_targets_are_refused(change):
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(TwoHeads(), [change(*make_data(8))], likelihood=make_heads(), progress=False)
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("method", [fb.MLE(epochs=1), fb.Temperature()], ids=["mle", "temperature"])
def test_targets_of_several_heads_need_a_likelihood(method, as_tuple):
    with pytest.raises(FlowBNNError) as caught:
        method.fit(TwoHeads(as_tuple), make_loader(32, as_tuple), progress=False)
    assert (caught.value.kind, caught.value.argument) == ("targets", "likelihood")
    assert "Heads(" in str(caught.value)


@pytest.mark.parametrize("network", [nn.Linear(2, 4), TwoHeads(as_tuple=True)], ids=["tensor", "few"])
def test_networks_without_a_head_are_refused(network):
    heads = Heads({"class": Categorical(), "value": Gaussian(), "count": Poisson()})
    inputs, labels, values = make_data(8)
    loader = [(inputs, {"class": labels, "value": values, "count": labels})]
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network, loader, likelihood=heads, progress=False)
    assert (caught.value.kind, caught.value.argument) == ("outputs", "outputs")


def test_laplace_refuses_a_head_without_curvature():
    heads = Heads({"class": Categorical(), "value": Gaussian("predicted")})
    with pytest.raises(FlowBNNError) as caught:
        fb.Laplace(epochs=1).fit(TwoHeads(), make_loader(), likelihood=heads, progress=False)
    assert caught.value.kind in ("likelihood", "outputs")


def test_settings_are_saved_in_order():
    heads = Heads({"z": "gaussian", "a": Categorical()}, output_shapes=[(1,), (3,)])
    loaded = make_likelihood(heads.to_dict())
    assert (loaded.names, loaded.output_shapes) == (("z", "a"), [(1,), (3,)])
