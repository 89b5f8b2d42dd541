"""Several samples in a compiled pass: the same samples as one by one."""

import pytest
import torch
from compiling import MAPPED, MIXED, compiled_outputs

import flowbnn as fb
from conversion_networks import Residual
from flowbnn.inference import sampling
from flowbnn.inference.given import MAPS, pass_given
from flowbnn.inference.sampling import Sampler, sample_outputs
from flowbnn.layers import noise_layers
from flowbnn.models import LeNet


@pytest.mark.parametrize("rules", [MIXED, MAPPED, {"fc1": fb.NormalPlanar(2), "fc3": fb.NormalAffine()}])
def test_several_samples_in_a_pass_are_the_samples_one_by_one(rules, traced, monkeypatch):
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3), rules).eval()
    images = torch.randn(6, 3, 32, 32)
    expected = sample_outputs(model, images, MAPS + 3, seed=1)
    work = sampling.plan_for(model, images).work
    seen = []
    monkeypatch.setattr(sampling, "checked", lambda found, count: seen.append(count) or found)
    for several, passed in ((4, 4), (MAPS, 10), (100, 19)):  # in passes as equal as may be
        monkeypatch.setitem(sampling.FILLED, "cpu", work * 6 * several)
        traced["graphs"] = 0
        seen.clear()
        found = compiled_outputs(model, images, MAPS + 3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert traced["graphs"] == 1, "a last pass that is not full is padded"
        assert seen == [6 * passed] * -(-(MAPS + 3) // passed)
    assert all(layer.repeat == 1 for layer in noise_layers(model).values())


def test_several_samples_around_a_skip_connection(traced, monkeypatch):
    """The samples enter at the input, and memory that runs out takes fewer of them first."""
    torch.manual_seed(0)
    model = fb.to_stochastic(Residual(), {"stem": fb.NormalAffine(site="position"), "*": fb.NormalPlanar(1)})
    x = torch.randn(8, 3, 8, 8)
    expected = sample_outputs(model, x, 10, seed=5)
    monkeypatch.setitem(sampling.FILLED, "cpu", 1e18)
    passed = []

    def tight(model, row, draws, inputs):
        passed.append(len(draws))
        if len(draws) * len(x) > 24:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return pass_given(model, row, draws, inputs)

    monkeypatch.setattr(sampling, "compiled", lambda *args, **options: tight)
    with pytest.warns(fb.FlowBNNWarning, match="memory ran out with 80 rows in one pass; going on with 40"):
        found = compiled_outputs(model, x, 10, seed=5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert passed == [10, 5, 2, 2, 2, 2, 2]


def test_a_part_of_the_samples_goes_through_one_by_one(monkeypatch):
    """As adaptive sampling asks for them: passes of its looks would all have other shapes."""
    model = fb.to_stochastic(LeNet(3), MIXED)
    monkeypatch.setitem(sampling.FILLED, "cpu", 1e18)
    passed = []
    monkeypatch.setattr(
        sampling,
        "compiled",
        lambda *args, **options: lambda *given: passed.append(len(given[2])) or pass_given(*given),
    )
    with Sampler(model, 8, seed=1, compile=True) as draw:
        draw(torch.randn(4, 3, 32, 32), 0, 3)
        draw(torch.randn(4, 3, 32, 32))
    assert passed == [1, 1, 1, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("rules", [MIXED, MAPPED])
def test_on_a_gpu_few_images_go_through_with_several_samples(rules, precision, monkeypatch):
    """Compiled, and replayed from a CUDA graph: the same samples as without compiling."""
    torch.manual_seed(0)
    model = fb.to_stochastic(LeNet(3).cuda(), rules).eval()
    images = torch.randn(32, 3, 32, 32, device="cuda")
    work = 32 * sampling.plan_for(model, images).work
    allowed = {"rtol": 1e-3, "atol": 1e-3} if precision is None else {"rtol": 0.05, "atol": 0.03}
    with Sampler(model, 10, seed=1, precision=precision) as draw:
        expected = draw(images)
    for several in (1, 4, 10):
        monkeypatch.setitem(sampling.FILLED, "cuda", several * work)
        for _ in range(2):
            found = compiled_outputs(model, images, 10, precision=precision)
            torch.testing.assert_close(found, expected, **allowed)
    assert expected.std(0).max() > 0.01
