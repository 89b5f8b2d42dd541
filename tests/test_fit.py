"""fb.fit: fit, predict, save and load."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

import flowbnn as fb
from flowbnn.batches import reported_size, split_batch
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training import load_tensors, save_tensors


@pytest.fixture(autouse=True)
def _ignore_collapse_in_short_runs():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has collapsed to its prior", category=FlowBNNWarning)
        yield


def fitted(**options) -> fb.posterior.NoisePosterior:
    model = fb.to_stochastic(network(), {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()})
    return fb.fit(
        model,
        loader(),
        **{
            "epochs": 8,
            "weight_lr": 0.01,
            "noise_lr": 0.01,
            "seed": 0,
            "validation": None,
            **QUIET,
            **options,
        },
    )


def test_the_example_of_the_readme():
    plain = fb.MLE(epochs=4, lr=0.01).fit(network(), loader(), **QUIET)
    bayesian = fb.to_stochastic(
        plain.model, {"0": fb.noise.NormalPlanar(length=2), "*": fb.noise.NormalAffine()}
    )
    posterior = fb.fit(bayesian, loader(), epochs=4, **QUIET, validation=None)
    images = blobs().tensors[0][:7]
    prediction = posterior.predict(images, samples=16)
    assert prediction.probabilities.shape == (7, 3)
    assert prediction.epistemic.shape == (7,)
    assert prediction.decide(abstain_above=0.5).values.shape == (7,)


def test_a_fit_raises_the_elbo():
    posterior = fitted(epochs=12)
    elbo = posterior.history["elbo"]
    assert elbo[-1] > elbo[0]
    assert fb.evaluate(posterior, loader(), progress=False)["accuracy"] > 0.85
    record = posterior.history.last
    assert record["elbo"] == pytest.approx(record["log_likelihood"] - record["kl"] / 240, abs=1e-4)
    assert record["kl"] == pytest.approx(record["kl/0"] + record["kl/2"], rel=1e-4)
    assert "entropy/0" in record


def test_frozen_weights_stay():
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    before = [p.clone() for p in fb.noise.weight_parameters(model)]
    noise_before = [p.clone() for p in fb.noise.noise_parameters(model)]
    fb.noise.freeze(model, "weights")
    fb.fit(model, loader(), epochs=2, inplace=True, **QUIET, validation=None)
    assert all(torch.equal(a, b) for a, b in zip(before, fb.noise.weight_parameters(model), strict=True))
    assert not any(
        torch.equal(a, b) for a, b in zip(noise_before, fb.noise.noise_parameters(model), strict=True)
    )
    fb.noise.freeze(model, "noise")
    with pytest.raises(FlowBNNError) as error:
        fb.fit(model, loader(), epochs=1, **QUIET, validation=None)
    assert (error.value.kind, error.value.argument) == ("network", "network")


def test_regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=generator)
    y = 2 * x + 0.5 * torch.randn(400, 1, generator=generator)
    torch.manual_seed(0)
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)), {"*": fb.noise.NormalAffine()}
    )
    data = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    posterior = fb.fit(
        model, data, epochs=40, weight_lr=0.02, noise_lr=0.02, warmup=0.3, **QUIET, validation=None
    )
    assert isinstance(posterior.likelihood, fb.likelihoods.Gaussian)
    assert float(posterior.likelihood.log_scale.detach().exp()) == pytest.approx(0.5, rel=0.25)
    report = fb.evaluate(posterior, data, samples=64, progress=False)
    assert report["rmse"] < 0.65
    assert 0.8 < report["coverage_90"] < 0.97
    prediction = posterior.predict(x[:5], samples=64)
    torch.testing.assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    predicted = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    posterior = fb.fit(
        fb.to_stochastic(predicted, {"*": fb.noise.NormalAffine()}),
        data,
        epochs=1,
        likelihood=fb.likelihoods.Gaussian("predicted"),
        **QUIET,
        validation=None,
    )
    assert posterior.predict(x[:5]).mean.shape == (5, 1)


def test_regression_with_large_targets():
    """The learned noise of targets of size 100 starts at the size of the residuals and ends near the truth."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=generator)
    y = 150 + 20 * x + 50 * torch.randn(400, 1, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    nn.init.constant_(net[2].bias, 150.0)
    data = loader(TensorDataset(x, y))
    posterior = fb.fit(
        fb.to_stochastic(net, {"0": fb.noise.NormalAffine()}),
        data,
        epochs=10,
        weight_lr=0.05,
        **QUIET,
        validation=None,
    )
    assert float(posterior.likelihood.log_scale.detach().exp()) == pytest.approx(50.0, rel=0.25)
    assert 0.8 < fb.evaluate(posterior, data, samples=32, progress=False)["coverage_90"] < 0.97
    assert "NoisePosterior(Sequential, 1 layer with noise" in repr(posterior)


def test_bernoulli_from_one_logit():
    data = blobs(classes=2)
    model = fb.to_stochastic(nn.Linear(4, 1), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(model, loader(data), epochs=20, weight_lr=0.05, **QUIET, validation=None)
    assert fb.evaluate(posterior, loader(data), progress=False)["accuracy"] > 0.9


def test_the_same_seed_gives_the_same_posterior():
    first, second, other = fitted(epochs=2), fitted(epochs=2), fitted(epochs=2, seed=1)
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert not torch.equal(first.model[0].weight, other.model[0].weight)


def test_a_resumed_fit_equals_an_uninterrupted_one(tmp_path):
    whole = fitted(epochs=6)

    class Killed(Exception):
        pass

    def breaking(stop: int):
        class Loader(DataLoader):
            passes = 0

            def __iter__(self):
                Loader.passes += 1
                if Loader.passes > stop:
                    raise Killed
                return super().__iter__()

        return Loader(blobs(), batch_size=40, shuffle=True)

    path = tmp_path / "b.safetensors"
    model = fb.to_stochastic(network(), {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()})
    options = {"epochs": 6, "weight_lr": 0.01, "noise_lr": 0.01, "seed": 0, "checkpoint": path, **QUIET}
    with pytest.raises(Killed):
        fb.fit(model, breaking(4), **options, validation=None)
    again = fb.to_stochastic(network(), {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()})
    resumed = fb.fit(again, loader(), resume=True, **options, validation=None)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.history["elbo"] == whole.history["elbo"]


def test_save_and_load(tmp_path):
    posterior = fitted(epochs=2)
    x = blobs().tensors[0][:6]
    expected = posterior.predict(x, samples=8, seed=5).probabilities
    path = posterior.save(tmp_path / "posterior.safetensors")
    for start in (
        network(),
        fb.to_stochastic(network(), {"0": fb.noise.NormalPlanar(2), "*": fb.noise.NormalAffine()}),
    ):
        loaded = fb.posterior.NoisePosterior.load(path, start)
        assert torch.equal(loaded.predict(x, samples=8, seed=5).probabilities, expected)
        assert loaded.history["elbo"] == posterior.history["elbo"]
    plain = fb.MLE(epochs=1).fit(network(), loader(), **QUIET)
    path = plain.save(tmp_path / "plain.safetensors")
    assert torch.equal(
        fb.posterior.PointPosterior.load(path, network()).predict(x).probabilities,
        plain.predict(x).probabilities,
    )
    bare = fb.fit(
        fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()}),
        loader(),
        epochs=1,
        **QUIET,
        validation=None,
    )
    path = bare.save(tmp_path / "bare.safetensors")
    loaded = fb.posterior.NoisePosterior.load(path, nn.Linear(4, 3))
    assert torch.equal(loaded.predict(x, seed=1).probabilities, bare.predict(x, seed=1).probabilities)


def test_bad_files_do_not_change_the_network(tmp_path):
    posterior = fitted(epochs=1)
    path = posterior.save(tmp_path / "posterior.safetensors")
    other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(FlowBNNError) as caught:
        fb.posterior.NoisePosterior.load(path, other)
    assert caught.value.kind == "architecture"
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(FlowBNNError) as caught:
        fb.posterior.NoisePosterior.load(path, nn.Sequential(nn.Linear(4, 16)))
    assert caught.value.kind == "file"
    with pytest.raises(FlowBNNError) as caught:
        fb.posterior.PointPosterior.load(path, other)
    assert caught.value.kind == "file"
    (tmp_path / "short.safetensors").write_bytes(path.read_bytes()[:100])
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04\x95cos\nsystem\n")
    for name in ("short", "pickle", "missing"):
        with pytest.raises(FlowBNNError) as error:
            fb.posterior.NoisePosterior.load(tmp_path / f"{name}.safetensors", network())
        assert "\n" not in str(error.value)


def test_early_stopping_restores_the_best_epoch():
    posterior = fitted(
        epochs=30,
        weight_lr=0.2,
        validation=loader(),
        early_stop=fb.training.EarlyStop("validation_nll", patience=2),
    )
    values = posterior.history["validation_nll"]
    assert posterior.history.best_epoch == len(values) - 3 < 27
    assert posterior.history.best_epoch == values.index(min(values))
    assert "validation_accuracy" in posterior.history


def test_repeats_and_schedules_and_optimizers():
    posterior = fitted(
        epochs=2,
        repeats=3,
        optimizer=torch.optim.SGD,
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.01, 0.1], total_steps=steps
        ),
    )
    assert posterior.history.epochs == 2


def test_predictions_of_a_loader_are_in_its_order():
    posterior = fitted(epochs=1)
    x, y = blobs().tensors
    batches = DataLoader(TensorDataset(x, y), batch_size=32)
    together = posterior.predict(x, samples=4, seed=2).probabilities
    torch.testing.assert_close(posterior.predict(batches, samples=4, seed=2).probabilities, together)
    torch.testing.assert_close(
        posterior.predict(list(x.split(50)), samples=4, seed=2).probabilities, together
    )
    _, targets = posterior.predict_with_targets(batches, samples=4, seed=2)
    assert torch.equal(targets, y)
    own = posterior.predict(batches, samples=4, seed=2, shared=False).probabilities
    assert own.shape == together.shape


def test_networks_with_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, left, right):
            return self.a(left) + self.b(right)

    x, y = blobs().tensors
    model = fb.to_stochastic(Two(), {"*": fb.noise.NormalAffine()})
    batches = [((x[i : i + 40], x[i : i + 40]), y[i : i + 40]) for i in range(0, 240, 40)]
    posterior = fb.fit(model, batches, epochs=1, **QUIET, validation=None)
    assert posterior.predict((x, x), samples=3).probabilities.shape == (240, 3)
    assert posterior.predict({"left": x, "right": x}, samples=3).probabilities.shape == (240, 3)


def test_entropy_detects_novel_inputs():
    posterior = fitted(epochs=20)
    strange = [(torch.zeros(50, 4) + 1.0, torch.zeros(50, dtype=torch.long))]
    report = fb.evaluate(posterior, loader(), novel=strange, samples=32, progress=False)
    assert report["auroc_entropy"] > 0.8


def test_dropout_as_noise():
    model = fb.to_stochastic(network(), {"2": fb.noise.Dropout(0.3)})
    posterior = fb.fit(model, loader(), epochs=3, weight_lr=0.02, **QUIET, validation=None)
    assert posterior.history["kl"] == [0.0] * 3
    prediction = posterior.predict(blobs().tensors[0], samples=20)
    assert prediction.epistemic.max() > 1e-4


def test_reported_size():
    data = blobs(100)
    assert reported_size(DataLoader(data, batch_size=30)) == 100
    assert reported_size(DataLoader(data, batch_size=30, drop_last=True)) == 90
    assert reported_size(DataLoader(data, batch_size=30, sampler=SubsetRandomSampler(range(40)))) == 40
    assert reported_size(DataLoader(data, batch_sampler=BatchSampler(range(30), 7, False))) == 30
    assert reported_size(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))) == 100
    assert reported_size(DataLoader(list(torch.zeros(10, 10, 4)), batch_size=None)) is None
    assert reported_size([(torch.zeros(7, 2), torch.zeros(7)), (torch.zeros(3, 2), torch.zeros(3))]) == 10
    labels = torch.zeros(3)
    assert split_batch((1, 2, labels)) == ((1, 2), labels)
    with pytest.raises(FlowBNNError) as caught:
        split_batch((1, object()))
    assert caught.value.kind == "targets"
    assert reported_size(iter([])) is None


@pytest.mark.parametrize(
    ("likelihood", "targets", "outputs"),
    [
        ("bernoulli", torch.arange(240).remainder(2).float(), 1),
        ("bernoulli", torch.arange(240).remainder(2)[:, None], 1),
        ("gaussian", torch.arange(240).remainder(5), 1),
        ("gaussian", torch.randn(240), 1),
        ("categorical", torch.arange(240).remainder(3).int(), 3),
    ],
    ids=["bernoulli-float", "bernoulli-column", "gaussian-integers", "gaussian-vector", "int32-labels"],
)
def test_evaluate_accepts_the_targets_of_a_fit(likelihood, targets, outputs):
    x = blobs().tensors[0]
    data = loader(TensorDataset(x, targets))
    model = fb.to_stochastic(nn.Linear(4, outputs), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(model, data, epochs=1, likelihood=likelihood, validation=data, **QUIET)
    report = fb.evaluate(posterior, data, samples=4, progress=False)
    assert report.keys() == fb.evaluate(posterior, (x, targets), samples=4, progress=False).keys()
    assert not posterior.predict(x[:3]).samples.requires_grad


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_fit_in_other_precisions(precision):
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalPlanar(1)})
    expected = pytest.warns(FlowBNNWarning) if precision == "bf16-true" else nullcontext([])
    with expected as caught:
        posterior = fb.fit(model, loader(), epochs=1, precision=precision, validation=loader(), **QUIET)
    assert {one.message.fields["kind"] for one in caught} == ({"precision"} if caught else set())
    assert posterior.predict(blobs().tensors[0], samples=3).probabilities.shape == (240, 3)


def test_labels_are_checked_in_every_epoch():
    class Turning(list):
        passes = 0

        def __iter__(self):
            Turning.passes += 1
            x, y = blobs().tensors
            # from the third epoch on
            return iter([(x, torch.full_like(y, -100) if Turning.passes > 3 else y)])

    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError) as caught:
        fb.fit(
            model,
            Turning([(torch.zeros(240, 4), torch.zeros(240))]),
            epochs=5,
            num_data=240,
            **QUIET,
            validation=None,
        )
    assert caught.value.kind == "targets"
    assert Turning.passes == 4


def test_noise_is_trained_inside_noise_mode():
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    with fb.noise_mode(model, "off"):
        fb.fit(model, loader(), epochs=1, noise_lr=0.01, inplace=True, **QUIET, validation=None)
    assert all((p != 0).any() for p in fb.noise.noise_parameters(model))


def test_fit_returns_a_fitted_copy():
    model = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    posterior = fb.fit(model, loader(), epochs=1, seed=0, **QUIET, validation=None)
    assert posterior.model is not model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer.fitted for layer in fb.noise.noise_layers(model).values())
    again = fb.fit(model, loader(), epochs=1, seed=0, inplace=True, **QUIET, validation=None)
    assert again.model is model
    assert all(torch.equal(value, again.tensors()[name]) for name, value in posterior.tensors().items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return fitted(epochs=1).save(tmp_path_factory.mktemp("saved") / "posterior.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("recipes"),
        lambda d: d.pop("likelihood"),
        lambda d: d.pop("history"),
        lambda d: d.update(recipes={}),
        lambda d: d["recipes"].update({"0": "planar"}),
        lambda d: d["recipes"]["0"].update(length=10**6),
        lambda d: d["recipes"]["0"].update(length=2.5),
        lambda d: d["recipes"]["0"].update(prior_scale="wide"),
        lambda d: d["recipes"]["0"].update(colour="red"),
        lambda d: d["recipes"]["0"].update(batch_axis="q"),
        lambda d: d["likelihood"].update(extra=1),
        lambda d: d["history"].update(extra=1),
    ],
)
def test_damaged_files_are_refused(change, saved, tmp_path):
    tensors, document = load_tensors(saved)
    change(document)
    path = tmp_path / "posterior.safetensors"
    save_tensors(path, tensors, document)
    with pytest.raises(FlowBNNError) as error:
        fb.posterior.NoisePosterior.load(path, network())
    assert "\n" not in str(error.value)
