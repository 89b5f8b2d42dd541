"""What a resumed fit must not do in silence: take over old data, an old prior, or the place of a run that was cut."""

import warnings

import pytest
import torch
from small_problem import QUIET, blobs, loader, network
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise import FlowNoise
from flowbnn.training import load_tensors
from flowbnn.transforms import Radial


def noisy(recipe=None):
    """Noise that is not its prior, of which a fit would warn."""
    return fb.to_stochastic(network(), {"*": recipe or fb.noise.NormalAffine(base_scale=0.3)})


def test_another_recipe_is_refused_when_a_fit_goes_on(tmp_path):
    fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET)
    other = noisy(fb.noise.NormalAffine(prior_scale=0.1, base_scale=0.3))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(FlowBNNError) as caught:
        fb.fit(other, loader(), epochs=2, checkpoint=tmp_path, resume=True, **QUIET)
    message = str(caught.value)
    assert "\n" not in message
    for words in ("prior_scale of layer '0' 0.5 and this run has 0.1", "as before", "resume=False"):
        assert words in message
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert fb.fit(noisy(), loader(), epochs=2, checkpoint=tmp_path, resume=True, **QUIET).history.epochs == 2


def test_another_rate_of_dropout_is_refused_too(tmp_path):
    fb.MCDropout(rate=0.1, epochs=1).fit(network(), loader(), checkpoint=tmp_path, **QUIET)
    with pytest.raises(FlowBNNError, match="rate of layer .* 0.1 and this run has 0.4"):
        fb.MCDropout(rate=0.4, epochs=2).fit(network(), loader(), checkpoint=tmp_path, resume=True, **QUIET)


def test_a_flow_of_ones_own_goes_on_with_its_prior(tmp_path):
    def recipe(scale):
        return FlowNoise(lambda dim: Radial(dim), prior_scale=scale, base_scale=0.3)

    fb.fit(noisy(recipe(0.5)), loader(), epochs=1, checkpoint=tmp_path, **QUIET)
    resumed = {"epochs": 2, "checkpoint": tmp_path, "resume": True, **QUIET}
    with pytest.raises(FlowBNNError, match="prior_scale of layer .* 0.5 and this run has 0.2"):
        fb.fit(noisy(recipe(0.2)), loader(), **resumed)
    assert fb.fit(noisy(recipe(0.5)), loader(), **resumed).history.epochs == 2


class Cut(Exception):
    """The run is stopped by this."""


def cut(folder, epoch, epochs=4, **options):
    """A fit that ends in an exception after so many whole epochs."""

    class Cutting(DataLoader):
        begun = -1  # one reading precedes training

        def __iter__(self):
            self.begun += 1
            if self.begun > epoch:
                raise Cut
            return super().__iter__()

    with pytest.raises(Cut):
        fb.fit(noisy(), Cutting(blobs(), 40), epochs=epochs, checkpoint=folder, **QUIET, **options)


def epochs_in(path):
    return load_tensors(path)[1]["position"]["epoch"]


def test_the_checkpoint_of_a_run_that_was_cut_is_kept(tmp_path):
    cut(tmp_path, 2)
    last, before = tmp_path / "last.safetensors", tmp_path / "last-before.safetensors"
    assert epochs_in(last) == 2
    with pytest.warns(
        FlowBNNWarning, match=r"in epoch 3, after 0 of .*'last-before.safetensors'.*resume=True"
    ) as told:
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert told[0].message.fields["kind"] == "unfinished checkpoint"
    assert (epochs_in(last), epochs_in(before)) == (1, 2)
    gone_on = fb.fit(noisy(), DataLoader(blobs(), 40), epochs=4, checkpoint=before, resume=True, **QUIET)
    assert gone_on.history.epochs == 4


def test_a_second_run_that_was_cut_does_not_push_out_a_longer_one(tmp_path):
    cut(tmp_path, 2)
    with pytest.warns(FlowBNNWarning, match="keeps it as"):
        cut(tmp_path, 1)
    with pytest.warns(FlowBNNWarning, match=r"in epoch 2, after 0 of .*had come further, stays"):
        cut(tmp_path, 3)
    assert epochs_in(tmp_path / "last-before.safetensors") == 2
    with pytest.warns(FlowBNNWarning, match="keeps it as"):
        cut(tmp_path, 1)
    assert epochs_in(tmp_path / "last-before.safetensors") == 3


def test_a_run_that_fails_before_its_first_checkpoint_leaves_all_as_it_was(tmp_path):
    cut(tmp_path, 2)
    with pytest.warns(FlowBNNWarning, match="was interrupted"):
        cut(tmp_path, 0)
    assert epochs_in(tmp_path / "last.safetensors") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]


def test_a_finished_or_useless_checkpoint_is_replaced_without_a_word(tmp_path):
    rule = fb.training.EarlyStop("loss", patience=1, min_delta=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlowBNNWarning)
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET)
        stopped = fb.fit(noisy(), loader(), epochs=5, checkpoint=tmp_path, early_stop=rule, **QUIET)
        assert stopped.history.epochs == 2
        fb.fit(noisy(), loader(), epochs=3, checkpoint=tmp_path, **QUIET)
        (tmp_path / "last.safetensors").write_bytes(b"nothing of use")
        fb.fit(noisy(), loader(), epochs=1, checkpoint=tmp_path, **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["last.safetensors"]
