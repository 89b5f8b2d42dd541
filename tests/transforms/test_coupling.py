"""Couplings and Glow steps, in cases that break published libraries."""

import statistics

import pytest
import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets import ConditionerMLP
from flowbnn.transforms.compose import Compose
from flowbnn.transforms.coupling import AdditiveCoupling, AffineCoupling, GlowStep


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bent_data(dim: int, rows: int, scale: float) -> Tensor:
    """Returns correlated noise with a long parabolic tail."""
    correlated = (
        0.5 * torch.randn(rows, dim, generator=seeded(0)) @ torch.randn(dim, dim, generator=seeded(1))
    )
    return scale * (correlated + correlated[:, :1].square())


def train(flow: Compose, data: Tensor, steps: int = 50, rate: float = 1e-3) -> list[float]:
    """Trains by maximum likelihood with Adam and returns the loss of every step."""
    optimizer = torch.optim.Adam(flow.parameters(), rate)
    losses = []
    for _ in range(steps):
        z, log_det = flow.inverse(data)
        loss = (0.5 * z.square().sum(-1) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def worst_round_trip(flow: Compose, dim: int, scale: float) -> float:
    """Returns the largest relative error of both round trips, or NaN if a number is not finite."""
    start = scale * torch.randn(256, dim, generator=seeded(5))
    worst = 0.0
    with torch.no_grad():
        for forward, backward in ((flow.forward, flow.inverse), (flow.inverse, flow.forward)):
            end, log_det = forward(start)
            restored, _ = backward(end)
            if not (end.isfinite().all() and log_det.isfinite().all() and restored.isfinite().all()):
                return float("nan")
            worst = max(worst, ((restored - start).abs().max() / start.abs().max()).item())
    return worst


def real_nvp(dim: int, layers: int, compress: bool = True, seed: int = 0) -> Compose:
    torch.manual_seed(seed)
    return Compose(
        *(AffineCoupling(dim, "alternating", flip=bool(i % 2), compress=compress) for i in range(layers))
    )


@pytest.mark.parametrize(
    ("layers", "rate", "data_scale", "starts", "steps"),
    [(8, 1e-2, 1.0, 3, 25), pytest.param(32, 1e-3, 10.0, 1, 20, marks=pytest.mark.slow)],
)
def test_trained_real_nvp_is_invertible(
    layers: int, rate: float, data_scale: float, starts: int, steps: int
) -> None:
    # Fast training amplifies rounding errors, which depend on the machine: the test uses the median of three starts.
    errors = []
    for seed in range(starts):
        flow = real_nvp(19, layers, seed=seed)
        losses = train(flow, bent_data(19, 128, data_scale), steps, rate)
        assert losses[-1] < 0.9 * losses[0]
        errors.append(max(worst_round_trip(flow, 19, scale) for scale in (1, 10, 100)))
    assert all(error < 1e-4 for error in errors)  # also fails for NaN
    assert statistics.median(errors) < 1e-5


def test_real_nvp_without_compression_is_not_invertible_far_out() -> None:
    """Nets that read distant points without compression amplify rounding errors."""
    flow = real_nvp(19, 32, compress=False)
    train(flow, bent_data(19, 128, 10.0), steps=20)
    assert worst_round_trip(flow, 19, 1) < 1e-5
    assert worst_round_trip(flow, 19, 100) > 1.0


def test_scale_of_a_coupling_is_bounded_for_any_net() -> None:
    class HugeOutput(nn.Module):
        def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
            return torch.full((*value.shape[:-1], 4), 1e30)

    coupling = AffineCoupling(4, net=HugeOutput(), bound=2.0)
    for function, sign in ((coupling.forward, 1.0), (coupling.inverse, -1.0)):
        value, log_det = function(torch.zeros(3, 4))
        torch.testing.assert_close(log_det, torch.full((3,), sign * 4.0))
        assert value.isfinite().all()


@pytest.mark.parametrize("output", [-1e6, 0.0, 1e6])
def test_positive_log_scales_shrink_data(output: float) -> None:
    class ConstantOutput(nn.Module):
        def forward(self, value: Tensor, context: Tensor | None = None) -> Tensor:
            return torch.full((*value.shape[:-1], 4), output)

    coupling = AffineCoupling(4, net=ConstantOutput(), bound=2.0, positive_log_scale=True)
    x = torch.randn(3, 4, generator=seeded(0))
    z, log_det = coupling.inverse(x)
    assert log_det.min() >= -4.0
    assert log_det.max() <= 0.0
    scale = log_det.div(2).exp().unsqueeze(-1)
    torch.testing.assert_close(z[:, 2:], (x[:, 2:] - output) * scale)
    if output == 0.0:  # starts at sigmoid(2), as in Glow, except for the soft bound
        torch.testing.assert_close(scale[0, 0], torch.tensor(0.8808), rtol=0.0, atol=2e-4)


def glow(dim: int, steps: int, data_init: bool) -> Compose:
    torch.manual_seed(0)
    return Compose(*(GlowStep(dim, flip=bool(i % 2), data_init=data_init) for i in range(steps)))


def test_initial_glow_steps_are_invertible_at_scale_100() -> None:
    assert max(worst_round_trip(glow(19, 4, False), 19, scale) for scale in (1, 10, 100)) < 2e-6


@pytest.mark.parametrize(
    "data_init", [pytest.param(False, marks=pytest.mark.slow), True], ids=["from-identity", "from-data"]
)
def test_trained_glow_steps_are_invertible_at_scale_100(data_init: bool) -> None:
    flow = glow(19, 4, data_init)
    losses = train(flow, bent_data(19, 128, 1.0))
    assert losses[-1] < losses[0]
    assert max(worst_round_trip(flow, 19, scale) for scale in (1, 10, 100)) < 1e-5


def test_glow_step_starts_near_the_identity() -> None:
    z = 1 + 0.5 * torch.randn(4096, 6, generator=seeded(0))
    x, log_det = GlowStep(6, generator=seeded(1))(z)
    assert (x - z).abs().max() < 0.1
    assert torch.equal(log_det, torch.zeros(4096))


@pytest.mark.parametrize("kind", [AdditiveCoupling, AffineCoupling])
def test_each_direction_calls_the_net_once(kind: type[AffineCoupling]) -> None:
    coupling = kind(5)
    calls = []
    coupling.net.register_forward_hook(lambda *_: calls.append(1))
    coupling(torch.zeros(2, 5))
    assert len(calls) == 1
    coupling.inverse(torch.zeros(2, 5))
    assert len(calls) == 2


@pytest.mark.parametrize("dim", [2, 3, 7])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("mask", ["half", "alternating"])
def test_coupling_keeps_the_entries_of_its_mask(dim: int, flip: bool, mask: str) -> None:
    coupling = AffineCoupling(dim, mask, flip)
    nn.init.ones_(coupling.net.layers[-1].bias)
    z = torch.zeros(dim)
    x, _ = coupling(z)
    expected = [i < dim // 2 for i in range(dim)] if mask == "half" else [i % 2 == 0 for i in range(dim)]
    assert (x == z).tolist() == [unchanged != flip for unchanged in expected]


def test_coupling_depends_on_its_context() -> None:
    coupling = AffineCoupling(4, context_dim=2).double()
    nn.init.normal_(coupling.net.layers[-1].weight, generator=seeded(0))
    z = torch.randn(5, 4, generator=seeded(1), dtype=torch.float64)
    context = torch.randn(5, 2, generator=seeded(2), dtype=torch.float64)
    x, log_det = coupling(z, context)
    assert not torch.allclose(x, coupling(z, context + 1)[0])
    backward, log_det_back = coupling.inverse(x, context)
    torch.testing.assert_close(backward, z)
    torch.testing.assert_close(log_det_back, -log_det)
    mapped, _ = torch.func.vmap(coupling)(z, context)
    torch.testing.assert_close(mapped, x)


def test_mask_is_saved_and_loaded() -> None:
    saved = AffineCoupling(4, mask=[True, False, False, True])
    nn.init.ones_(saved.net.layers[-1].bias)
    loaded = AffineCoupling(4, mask="half")
    loaded.load_state_dict(saved.state_dict())
    z = torch.arange(4.0)
    assert torch.equal(loaded(z)[0], saved(z)[0])


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: AffineCoupling(1), "value", "dim"),
        (lambda: GlowStep(1), "value", "dim"),
        (lambda: AdditiveCoupling(3, mask="checkers"), "value", "mask"),
        (lambda: AdditiveCoupling(3, mask=[True, False]), "value", "mask"),
        (lambda: AdditiveCoupling(3, mask=[1, 0, 1]), "value", "mask"),
        (lambda: AdditiveCoupling(2, mask=[True, True]), "value", "mask"),
        (lambda: AdditiveCoupling(2, mask=[False, False]), "value", "mask"),
        (lambda: AffineCoupling(4, bound=0.0), "value", "bound"),
        (lambda: AffineCoupling(4, net=ConditionerMLP(2, 3))(torch.zeros(4)), "shape", "net"),
        (lambda: AffineCoupling(4)(torch.zeros(2, 5)), "shape", None),
        (lambda: AffineCoupling(4, context_dim=2)(torch.zeros(2, 4)), "shape", "context"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)
