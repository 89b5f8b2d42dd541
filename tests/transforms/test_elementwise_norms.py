"""ActNorm and BatchNorm: initialization, statistics, and batches that break other implementations."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.compose import Inverse
from flowbnn.transforms.elementwise import ActNorm, BatchNorm


def rows(*shape: int, seed: int = 0) -> Tensor:
    return 2 + 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("batch", [(64,), (4, 8)], ids=str)
def test_actnorm_normalizes_its_first_batch_in_the_direction_of_the_call(
    direction: str, batch: tuple[int, ...]
) -> None:
    norm = ActNorm(3).double()
    value, log_det = getattr(norm, direction)(rows(*batch, 3))
    flat = value.detach().reshape(-1, 3)
    torch.testing.assert_close(flat.mean(0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(flat.std(0, correction=0), torch.ones(3, dtype=torch.float64))
    deviation = rows(*batch, 3).reshape(-1, 3).std(0, correction=0)
    torch.testing.assert_close(log_det.detach(), -deviation.log().sum().expand(batch))
    state = copy.deepcopy(norm.state_dict())
    norm(rows(*batch, 3, seed=1))
    assert all(torch.equal(now, state[name]) for name, now in norm.state_dict().items())


@pytest.mark.parametrize("batch", [(), (0,), (1,), (1, 1)], ids=str)
def test_actnorm_is_not_initialized_by_fewer_than_two_rows(batch: tuple[int, ...]) -> None:
    norm = ActNorm(3).double()
    value, log_det = norm(rows(*batch, 3))
    assert torch.equal(value, rows(*batch, 3))
    assert torch.equal(log_det, torch.zeros(batch, dtype=torch.float64))
    assert not norm.initialized
    norm(rows(64, 3))
    assert norm.initialized


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6, -3e-30])
def test_actnorm_only_centres_a_constant_column(constant: float) -> None:
    batch = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    batch[:, 1] = constant
    for direction in ("forward", "inverse"):
        norm = ActNorm(2)
        value, log_det = getattr(norm, direction)(batch)
        assert value.isfinite().all()
        assert log_det.isfinite().all()
        assert norm.log_scale[1] == 0
        assert value[:, 1].abs().max() <= 1e-6 * abs(constant)


def test_actnorm_stays_finite_after_infinite_or_huge_batches() -> None:
    norm = ActNorm(3)
    norm(torch.tensor([[1.0, float("nan"), 1e30], [2.0, 1.0, -1e30]]))
    assert all(parameter.isfinite().all() for parameter in norm.parameters())
    assert norm.log_scale.abs().max() < norm.bound


def test_actnorm_is_not_initialized_in_evaluation_or_without_data_init() -> None:
    for norm in (ActNorm(2).eval(), ActNorm(2, data_init=False)):
        value, _ = norm(rows(10, 2).float())
        assert torch.equal(value, rows(10, 2).float())


def test_loaded_actnorm_is_not_initialized_again() -> None:
    trained = ActNorm(2)
    trained(rows(64, 2).float())
    loaded = ActNorm(2)
    loaded.load_state_dict(trained.state_dict())
    other = rows(64, 2, seed=3).float() * 100
    expected = trained(other)[0]
    for norm in (loaded, copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert torch.equal(norm(other)[0], expected)
    loaded.load_state_dict(ActNorm(2).state_dict())
    assert abs(loaded(other)[0].mean().item()) < 1e-5


@pytest.mark.parametrize(
    ("direction", "initialized"),
    [("forward", False), pytest.param("inverse", False, marks=pytest.mark.slow), ("forward", True)],
    ids=["forward", "inverse", "initialized"],
)
def test_actnorm_compiles_in_training(direction: str, initialized: bool) -> None:
    norm = ActNorm(2)
    if initialized:
        norm(rows(64, 2).float())
    copied = copy.deepcopy(norm)
    torch._dynamo.reset()
    backend = "eager" if initialized else "aot_eager"  # the initialization is traced as well
    compiled = torch.compile(getattr(norm, direction), fullgraph=True, backend=backend)
    for seed in (1, 2):
        value = rows(16, 2, seed=seed).float()
        for ours, theirs in zip(compiled(value), getattr(copied, direction)(value), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert norm.initialized


def test_batch_norm_in_training_equals_torch() -> None:
    norm = BatchNorm(3).double()
    with torch.no_grad():
        norm.shift.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.raw_log_scale.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    z = rows(32, 3).requires_grad_()
    x, log_det = norm(z)
    alpha = (8 * torch.tanh(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64) / 8)).exp()
    expected = F.batch_norm(z, None, None, alpha, norm.shift, training=True, eps=norm.eps)
    torch.testing.assert_close(x, expected)
    expected_log_det = (alpha / (z.var(0, correction=0) + norm.eps).sqrt()).prod().log()
    torch.testing.assert_close(log_det, expected_log_det.expand(32))
    ours = torch.autograd.grad(x.pow(3).sum(), z)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected.pow(3).sum(), z)[0])


def test_batch_norm_updates_running_statistics_and_inverts_in_evaluation() -> None:
    norm = BatchNorm(3, momentum=0.25).double()
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for seed in range(4):
        z = rows(4, 8, 3, seed=seed)
        norm(z)
        flat = z.reshape(-1, 3)
        mean = 0.75 * mean + 0.25 * flat.mean(0)
        variance = 0.75 * variance + 0.25 * flat.var(0, correction=0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_variance, variance)
    norm.eval()
    z = rows(5, 3, seed=9)
    x, log_det = norm(z)
    torch.testing.assert_close(x, (z - mean) / (variance + norm.eps).sqrt())
    back, log_det_back = norm.inverse(x)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(log_det_back, -log_det)
    torch.testing.assert_close(norm.running_mean, mean)


@pytest.mark.parametrize("batch", [(), (0,), (1,)], ids=str)
def test_batch_norm_uses_running_statistics_for_fewer_than_two_rows(batch: tuple[int, ...]) -> None:
    norm = BatchNorm(3).double()
    norm(rows(32, 3))
    state = copy.deepcopy(norm.state_dict())
    x, log_det = norm(rows(*batch, 3))
    assert all(torch.equal(now, state[name]) for name, now in norm.state_dict().items())
    expected = norm.eval()(rows(*batch, 3))
    assert torch.equal(x, expected[0])
    assert torch.equal(log_det, expected[1])
    assert log_det.shape == batch


def test_batch_norm_of_a_constant_column_is_finite() -> None:
    norm = BatchNorm(2)
    z = torch.ones(8, 2, requires_grad=True)
    x, log_det = norm(z)
    (x.sum() + log_det.sum()).backward()
    assert x.isfinite().all()
    assert log_det.isfinite().all()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_batch_between_forward_and_backward_is_harmless() -> None:
    norm = BatchNorm(2)
    z = rows(8, 2).float().requires_grad_()
    loss = norm.inverse(z)[0].sum() + norm(z)[0].square().sum()
    norm(rows(8, 2, seed=1).float())
    loss.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_inverse_batch_norm_normalizes_data() -> None:
    norm = Inverse(BatchNorm(2)).double()
    z, _ = norm.inverse(rows(64, 2))
    torch.testing.assert_close(z.detach().mean(0), torch.zeros(2, dtype=torch.float64))


def test_batch_norm_compiles_in_training() -> None:
    norm = BatchNorm(2)
    copied = copy.deepcopy(norm)
    torch._dynamo.reset()
    compiled = torch.compile(norm.forward, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        value = rows(16, 2, seed=seed).float()
        for ours, theirs in zip(compiled(value), copied(value), strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(norm.running_variance, copied.running_variance)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: ActNorm(0), "value", "dim"),
        (lambda: ActNorm(3)(torch.zeros(5, 1)), "shape", None),
        (lambda: BatchNorm(2, momentum=0.0), "value", "momentum"),
        (lambda: BatchNorm(2, eps=0.0), "value", "eps"),
        (lambda: BatchNorm(3).inverse(torch.zeros(5, 1)), "shape", None),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)
