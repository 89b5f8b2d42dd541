"""Tests of the fit of a temperature, against derivatives by autograd and a scan over temperatures."""

import math

import pytest
import torch

import flowbnn as fb
from flowbnn.methods import PointPosterior
from flowbnn.methods.calibrators.log_temperature import ClassProblem, PredictiveProblem, fit_temperatures


def make_problem(positions: tuple[int, ...] = (), soft: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits of three samples, with an axis of classes, and labels, some of which are ignored at positions."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(3, 12, *positions, 4, generator=generator).double()
    targets = torch.randint(4, (12, *positions), generator=generator)
    if soft:
        return logits, torch.rand(12, *positions, 4, generator=generator).double().softmax(-1)
    return logits, targets.masked_fill(targets == 3, -100) if positions else targets


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("positions", [(), (5,)])
def test_derivatives_of_labels_equal_those_of_autograd(positions, soft):
    logits, targets = make_problem(positions, soft)
    weights = torch.tensor([0.5, 0.3, 0.2]).double()
    problem = ClassProblem(logits, targets, weights.log())
    for u in (-0.7, 0.0, 1.3):
        leaf = torch.tensor(u, dtype=torch.float64, requires_grad=True)
        samples = (logits / leaf.exp()).softmax(-1)
        mixture = torch.einsum("s,s...->...", weights, samples).log()
        if soft:
            values = (targets * mixture).sum(-1)
        else:
            values = mixture.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
        expected = -values.flatten(1).sum(1) if positions else -values
        (first,) = torch.autograd.grad(expected.sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first, leaf)
        nll, slope, curvature = problem.nll(u, slice(None), derivatives=True)
        torch.testing.assert_close(nll, expected.detach())
        assert slope == pytest.approx(first.item(), rel=1e-9)
        assert curvature == pytest.approx(second.item(), rel=1e-9)


def test_probabilities_of_zero_have_finite_derivatives():
    """One of two samples excludes the label of the first example, and the soft label of the second excludes a class."""
    logits = torch.tensor([[[0.0, -math.inf]] * 2, [[0.0, 1.0], [0.0, -math.inf]]]).double()
    targets = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    problem = ClassProblem(logits, targets, torch.tensor([0.5, 0.5]).double().log())
    nll, slope, curvature = problem.nll(0.0, slice(None), derivatives=True)
    assert nll.tolist() == pytest.approx([math.log(2.0) - math.log(torch.sigmoid(torch.tensor(1.0))), 0.0])
    assert math.isfinite(slope)
    assert math.isfinite(curvature)


def test_class_problem_agrees_with_the_predictive_distribution(monkeypatch):
    """In parts of two rows, and with the temperature of each of two subsets."""
    logits, targets = make_problem()
    posterior = PointPosterior(torch.nn.Identity(), fb.likelihoods.Categorical())
    subsets = [torch.arange(7), torch.arange(5, 12)]
    expected = PredictiveProblem(posterior, logits, targets).fit(subsets)
    monkeypatch.setattr(ClassProblem, "max_outputs", 2 * logits[:, :1].numel())
    fits = fit_temperatures(posterior, logits, targets, subsets)
    for fit, reference in zip(fits, expected, strict=True):
        assert fit.temperature == pytest.approx(reference.temperature, rel=1e-9)
        assert fit.bound == reference.bound


def test_a_label_that_no_sample_allows_does_not_change_the_temperature():
    logits, targets = make_problem()
    posterior = PointPosterior(torch.nn.Identity(), fb.likelihoods.Categorical())
    expected = fit_temperatures(posterior, logits, targets)[0].temperature
    impossible = logits[:, :1].clone()
    impossible[..., targets[0]] = -math.inf
    outputs, labels = torch.cat([logits, impossible], 1), torch.cat([targets, targets[:1]])
    assert fit_temperatures(posterior, outputs, labels)[0].temperature == pytest.approx(expected, rel=1e-6)


def test_labels_of_any_integer_type_are_read():
    logits, targets = make_problem()
    posterior = PointPosterior(torch.nn.Identity(), fb.likelihoods.Categorical())
    fits = [fit_temperatures(posterior, logits, labels)[0] for labels in (targets, targets.to(torch.uint8))]
    assert fits[0].temperature == fits[1].temperature
