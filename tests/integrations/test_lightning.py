"""Tests of the callbacks for Lightning."""

import warnings

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.integrations.lightning import CalibrationCallback, NoiseCallback

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Classifier(lightning.LightningModule):
    """Module with its loss inside."""

    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.automatic_optimization = not manual

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Data(lightning.LightningDataModule):
    """Data module with training and validation data."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(X[:48], Y[:48]), 16)

    def val_dataloader(self):
        return DataLoader(TensorDataset(X[48:], Y[48:]), 16)


def make_trainer(*callbacks, epochs=10, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), **quiet, **options)


def noise_scale(module):
    """Returns the mean standard deviation of the noise."""
    draws = fb.posterior.NoisePosterior(module, fb.likelihoods.Categorical()).draws(64, seed=0)
    return float(torch.cat([value.std(0) for value in draws.values()]).mean())


def stochastic(**options):
    return fb.to_stochastic(Classifier(**options), {"*": fb.noise.NormalAffine(base_scale=0.3)})


@pytest.mark.parametrize("manual", [False, True])
def test_noise_is_trained_with_its_kl(manual):
    callback, module = NoiseCallback(), stochastic(manual=manual)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlowBNNWarning)
        make_trainer(callback).fit(module, Data())
    assert callback.term.num_data == 48
    assert len(callback.term.history) == 30
    posterior = callback.posterior(module, Data())
    assert posterior.predict(X, 8, seed=0).probabilities.shape == (64, 2)
    collapsed = stochastic(manual=manual)
    with pytest.warns(FlowBNNWarning) as caught:
        make_trainer().fit(collapsed, Data())
    assert [warning.message.fields["kind"] for warning in caught if hasattr(warning.message, "fields")] == [
        "kl"
    ]
    assert noise_scale(module) > 1.2 * noise_scale(collapsed)


def test_accumulated_gradients_have_one_kl():
    callback = NoiseCallback()
    make_trainer(callback, epochs=1, accumulate_grad_batches=3, limit_train_batches=3).fit(
        stochastic(), Data()
    )
    assert len(callback.term.history) == 1


def test_number_of_examples_follows_the_limit_of_batches():
    callback = NoiseCallback()
    make_trainer(callback, epochs=1, limit_train_batches=2).fit(stochastic(), Data())
    assert callback.term.num_data == 32


def test_module_without_noise_is_refused():
    with pytest.raises(FlowBNNError) as caught:
        make_trainer(NoiseCallback(), epochs=1).fit(Classifier(), Data())
    assert caught.value.argument == "model"


def test_frozen_noise_and_networks_inside_a_module_raise_no_warning():
    module = stochastic()
    fb.noise.freeze(module, "noise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlowBNNWarning)
        make_trainer(epochs=1).fit(module, Data())


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
def test_calibration_at_the_end_of_training():
    callback, module = CalibrationCallback(candidates=["temperature"], progress=False), Classifier()
    make_trainer(callback, epochs=2).fit(module, Data())
    assert callback.posterior.predict(X).probabilities.shape == (64, 2)
    with pytest.raises(FlowBNNError) as caught:
        make_trainer(CalibrationCallback(), epochs=1).fit(Classifier(), Data().train_dataloader())
    assert caught.value.argument == "held_out"


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
def test_data_modules_and_modules_are_fitted():
    posterior = fb.fit(stochastic(), Data(), epochs=1, report=False, progress=False, validation=None)
    assert posterior.predict(Data(), 3).probabilities.shape[1] == 2
