"""Tests of the data and posteriors that diagnostics accept."""

import random

import numpy as np
import pytest
import torch

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods.calibrators.temperature import TemperedPosterior


class AugmentedData(torch.utils.data.Dataset):
    """Data whose inputs are perturbed at random in every pass."""

    def __init__(self, problem, draw):
        self.problem, self.draw = problem, draw

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.problem.inputs[index] + 0.1 * self.draw(), self.problem.targets[index]


def test_shuffled_data_are_accepted(problem):
    loader = fb.data.TensorLoader(problem.inputs, problem.targets, batch_size=8, shuffle=True)
    result = fb.diagnostics.pareto_k(problem.exact, loader, samples=50)
    assert result.elbo == pytest.approx(problem.evidence, abs=1e-3)


@pytest.mark.parametrize("draw", [lambda: torch.randn(5), random.random, np.random.rand])
def test_data_that_change_between_passes_are_refused(problem, draw):
    loader = torch.utils.data.DataLoader(AugmentedData(problem, draw), batch_size=5)
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.pareto_k(problem.exact, loader)
    assert caught.value.kind == "loader"


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        ([(torch.ones(0, 5), torch.ones(0, 1))], "batch"),
        ([], "loader"),
        (torch.utils.data.DataLoader([]), "loader"),
    ],
)
def test_empty_loaders_are_refused(problem, loader, kind):
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.pareto_k(problem.exact, loader)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_posteriors_without_a_density_of_noise_are_refused(problem):
    options = {"seed": 0, "progress": False}
    dropout = fb.MCDropout(epochs=1, rate=0.01).fit(problem.network, problem.loader, **options)
    point = fb.MLE(epochs=1).fit(problem.network, problem.loader, **options)
    for posterior in (dropout, TemperedPosterior(problem.exact, 1.5), point):
        with pytest.raises(FlowBNNError) as caught:
            fb.diagnostics.pareto_k(posterior, problem.loader)
        assert (caught.value.kind, caught.value.argument) == ("unsupported", "posterior")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [fb.diagnose, fb.diagnostics.agreement])
@pytest.mark.parametrize("test", [[], [(torch.ones(3, 7), torch.ones(3, 1))]])
def test_bad_test_data_are_refused_before_chains_are_run(problem, function, test, monkeypatch):
    monkeypatch.setattr("flowbnn.methods.mcmc.chain_sampler.ChainSampler.run", None)
    with pytest.raises(FlowBNNError):
        function(problem.exact, problem.loader, test=test)


@pytest.mark.parametrize("count", [1, 12, 21])
def test_different_numbers_of_inputs_and_targets_are_refused(problem, count):
    targets = problem.targets[:1].expand(count, 1)
    for wrong in (targets, targets[0, 0]):
        with pytest.raises(FlowBNNError) as caught:
            fb.diagnose(problem.exact, [(problem.inputs, wrong)])
        # a list with one tensor and one number is a list with one example
        assert caught.value.kind in ("targets", "batch") + ("network",) * (wrong.ndim == 0)
        assert "\n" not in str(caught.value)
