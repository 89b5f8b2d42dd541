"""Several samples in a compiled pass: the same samples as one by one."""

import pytest
import torch
from compiling import MAPPED, MIXED, compiled_outputs, drawing, plan_for, sample_outputs
from torch import nn

import flowbnn as fb
from conversion_networks import Residual
from flowbnn.models import LeNet
from flowbnn.posterior import compiled as given
from flowbnn.posterior.compiled import MAPS, GivenDraws, pass_given


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        (MIXED, ((7, 4), (100, 8))),  # powers of two that waste little
        (MAPPED, ((100, 8),)),
        ({"fc1": fb.noise.NormalPlanar(2), "fc3": fb.noise.NormalAffine()}, ((7, 4),)),
    ],
)
def test_several_samples_in_a_pass_are_the_samples_one_by_one(rules, sizes, traced, monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), rules).eval()
    images = torch.randn(6, 3, 32, 32)
    samples = MAPS + 4
    expected = sample_outputs(model, images, samples, seed=1)
    work = plan_for(model, images).work
    seen = []
    monkeypatch.setattr(given, "check_rows", lambda found, count: seen.append(count) or found)
    for several, passed in sizes:
        monkeypatch.setitem(given.FILLED, "cpu", work * 6 * several)
        seen.clear()
        found = compiled_outputs(model, images, samples)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert seen == [6 * passed] * -(-samples // passed)
    assert traced["graphs"] == len(sizes), "a last pass that is not full is padded"


def test_several_samples_around_a_skip_connection(traced, monkeypatch):
    """The samples enter at the input, and memory that runs out takes fewer of them first."""
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Residual(), {"stem": fb.noise.NormalAffine(site="position"), "*": fb.noise.NormalPlanar(1)}
    )
    x = torch.randn(8, 3, 8, 8)
    expected = sample_outputs(model, x, 10, seed=5)
    monkeypatch.setitem(given.FILLED, "cpu", 1e18)
    passed = []

    def tight(model, table, draws, inputs):
        passed.append(len(draws))
        if len(draws) * len(x) > 24:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return pass_given(model, table, draws, inputs)

    monkeypatch.setattr(given, "compiled", lambda *args, **options: tight)
    with pytest.warns(
        fb.errors.FlowBNNWarning, match="memory ran out with 32 rows in one pass; going on with 16"
    ):
        found = compiled_outputs(model, x, 10, seed=5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert passed == [4, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("rules", [MIXED, MAPPED])
def test_draws_that_do_not_fit_memory_are_made_for_fewer_samples(rules, traced, monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), rules)
    images = torch.randn(4, 3, 32, 32)
    expected = sample_outputs(model, images, 32, seed=1)
    monkeypatch.setitem(given.FILLED, "cpu", 1e18)
    monkeypatch.setitem(given.ROW_BYTES, "cpu", 1)
    whole = GivenDraws._filled

    def filled(self, start, stop):
        if stop - start > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, start, stop)

    monkeypatch.setattr(GivenDraws, "_filled", filled)
    with pytest.warns(fb.errors.FlowBNNWarning, match="memory ran out with 128 rows"):
        found = compiled_outputs(model, images, 32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_many_numbers_of_samples_and_of_inputs_are_compiled(traced, monkeypatch):
    """torch stops compiling a function for good after eight shapes, unless it is told that there will be more."""
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    monkeypatch.setitem(given.FILLED, "cpu", 1e18)
    x = torch.randn(4, 4)
    for samples in range(2, 20):
        found = compiled_outputs(model, x, samples)
        torch.testing.assert_close(found, sample_outputs(model, x, samples, seed=1))
    assert traced["graphs"] == 5, "1, 2, 4, 8 or 16 samples in a pass"
    for number in range(5, 9):
        assert compiled_outputs(model, torch.randn(number, 4), 2).shape == (2, number, 3)
    assert traced["graphs"] == 9


def test_a_part_of_the_samples_goes_through_one_by_one(monkeypatch):
    """As adaptive sampling asks for them: passes of its looks would all have other shapes."""
    model = fb.to_stochastic(LeNet(3), MIXED)
    monkeypatch.setitem(given.FILLED, "cpu", 1e18)
    passed = []
    monkeypatch.setattr(
        given,
        "compiled",
        lambda *args, **options: lambda *all: passed.append(len(all[2])) or pass_given(*all),
    )
    with drawing(model, 8, seed=1, compile=True) as draw:
        draw(torch.randn(4, 3, 32, 32), 0, 3)
        draw(torch.randn(4, 3, 32, 32))
    assert passed == [1, 1, 1, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("rules", [MIXED, MAPPED])
def test_on_a_gpu_few_images_go_through_with_several_samples(rules, precision, monkeypatch):
    """Compiled, and replayed from a CUDA graph: the same samples as without compiling."""
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3).cuda(), rules).eval()
    images = torch.randn(32, 3, 32, 32, device="cuda")
    work = 32 * plan_for(model, images).work
    allowed = {"rtol": 1e-3, "atol": 1e-3} if precision == "32-true" else {"rtol": 0.05, "atol": 0.03}
    with drawing(model, 16, seed=1, precision=precision) as draw:
        expected = draw(images)
    apart = (expected - expected.roll(1, 0)).abs().amax((1, 2)).min()  # of any sample and the one before it
    for several in (1, 4, 16):
        monkeypatch.setitem(given.FILLED, "cuda", several * work)
        for _ in range(2):
            found = compiled_outputs(model, images, 16, precision=precision)
            torch.testing.assert_close(found, expected, **allowed)
            assert (found - expected).abs().max() < 0.5 * apart, (
                "samples in another order would be further off"
            )
