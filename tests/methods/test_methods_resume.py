"""Tests of resumed fits: changed recipes, and checkpoints of interrupted runs."""

import warnings

import pytest
import torch
from problems import of_kind
from small_problem import QUIET, blobs, loader, network
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise import FlowNoise
from flowbnn.training import load_tensors
from flowbnn.transforms import Radial


def noisy(recipe=None):
    """Returns a stochastic network whose noise differs from its prior, so that a fit does not warn."""
    return fb.to_stochastic(network(), {"*": recipe or fb.noise.NormalAffine(base_scale=0.3)})


def test_resuming_with_another_recipe_is_refused(tmp_path):
    fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET, validation=None)
    other = noisy(fb.noise.NormalAffine(prior_scale=0.1, base_scale=0.3))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(FlowBNNError) as error:
        fb.fit(other, loader(), epochs=2, checkpoint=tmp_path, resume=True, **QUIET, validation=None)
    assert "\n" not in str(error.value)
    assert error.value.kind == "checkpoint"
    assert error.value.fields["changed"]["prior_scale of layer '0'"] == ("0.5", "0.1")
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert (
        fb.fit(
            noisy(), loader(), epochs=2, checkpoint=tmp_path, resume=True, **QUIET, validation=None
        ).history.epochs
        == 2
    )


def test_resuming_with_another_dropout_rate_is_refused(tmp_path):
    fb.MCDropout(rate=0.1, epochs=1).fit(network(), loader(), checkpoint=tmp_path, **QUIET)
    with pytest.raises(FlowBNNError) as error:
        fb.MCDropout(rate=0.4, epochs=2).fit(network(), loader(), checkpoint=tmp_path, resume=True, **QUIET)
    assert error.value.kind == "checkpoint"
    assert error.value.fields["changed"] == {"rate of layer '2'": ("0.1", "0.4")}


def test_resuming_a_custom_flow_with_another_prior_is_refused(tmp_path):
    def recipe(scale):
        return FlowNoise(lambda dim: Radial(dim), prior_scale=scale, base_scale=0.3)

    fb.fit(noisy(recipe(0.5)), loader(), epochs=1, checkpoint=tmp_path, **QUIET, validation=None)
    options = {"epochs": 2, "checkpoint": tmp_path, "resume": True, **QUIET}
    with pytest.raises(FlowBNNError) as error:
        fb.fit(noisy(recipe(0.2)), loader(), **options, validation=None)
    assert error.value.kind == "checkpoint"
    assert error.value.fields["changed"]["prior_scale of layer '0'"] == ("0.5", "0.2")
    assert fb.fit(noisy(recipe(0.5)), loader(), **options, validation=None).history.epochs == 2


class Interruption(Exception):
    """Exception that interrupts a run."""


def interrupted_fit(folder, epoch, epochs=4, **options):
    """Runs a fit that is interrupted after this many epochs."""

    class InterruptedLoader(DataLoader):
        num_readings = -1  # one reading precedes training

        def __iter__(self):
            self.num_readings += 1
            if self.num_readings > epoch:
                raise Interruption
            return super().__iter__()

    with pytest.raises(Interruption):
        fb.fit(
            noisy(),
            InterruptedLoader(blobs(), 40),
            epochs=epochs,
            checkpoint=folder,
            **QUIET,
            **options,
            validation=None,
        )


def saved_epoch(path):
    return load_tensors(path)[1]["position"]["epoch"]


def test_checkpoint_of_an_interrupted_run_is_kept(tmp_path):
    interrupted_fit(tmp_path, 2)
    last, before = tmp_path / "last.safetensors", tmp_path / "last-before.safetensors"
    assert saved_epoch(last) == 2
    with pytest.warns(FlowBNNWarning) as caught:
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET, validation=None)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert caught[0].message.fields["kind"] == "unfinished checkpoint"
    assert caught[0].message.fields["backup"] == str(before)
    assert (saved_epoch(last), saved_epoch(before)) == (1, 2)
    resumed = fb.fit(
        noisy(), DataLoader(blobs(), 40), epochs=4, checkpoint=before, resume=True, **QUIET, validation=None
    )
    assert resumed.history.epochs == 4


def test_backup_of_a_longer_interrupted_run_is_kept(tmp_path):
    interrupted_fit(tmp_path, 2)
    with pytest.warns(FlowBNNWarning) as caught:
        interrupted_fit(tmp_path, 1)
    assert of_kind(caught, "unfinished checkpoint")
    with pytest.warns(FlowBNNWarning) as caught:
        interrupted_fit(tmp_path, 3)
    assert of_kind(caught, "unfinished checkpoint")
    assert saved_epoch(tmp_path / "last-before.safetensors") == 2
    with pytest.warns(FlowBNNWarning) as caught:
        interrupted_fit(tmp_path, 1)
    assert of_kind(caught, "unfinished checkpoint")
    assert saved_epoch(tmp_path / "last-before.safetensors") == 3


def test_run_that_fails_before_its_first_checkpoint_changes_no_file(tmp_path):
    interrupted_fit(tmp_path, 2)
    with pytest.warns(FlowBNNWarning) as caught:
        interrupted_fit(tmp_path, 0)
    assert of_kind(caught, "unfinished checkpoint")
    assert saved_epoch(tmp_path / "last.safetensors") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]


def test_finished_or_damaged_checkpoint_is_replaced_without_a_warning(tmp_path):
    rule = fb.training.EarlyStop("loss", patience=1, min_delta=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlowBNNWarning)
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET, validation=None)
        stopped = fb.fit(
            noisy(), loader(), epochs=5, checkpoint=tmp_path, early_stop=rule, **QUIET, validation=None
        )
        assert stopped.history.epochs == 2
        fb.fit(noisy(), loader(), epochs=3, checkpoint=tmp_path, **QUIET, validation=None)
        (tmp_path / "last.safetensors").write_bytes(b"damaged")
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET, validation=None)
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]
