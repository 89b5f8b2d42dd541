"""Linear transforms against explicit matrices."""

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.kernels.reference import triangles
from flowbnn.transforms.linear import LULinear, Permutation, Reverse, Shuffle, normalize_rows, reflect


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_lu_linear_is_the_product_of_its_factors() -> None:
    linear = LULinear(4, bias=True, permute=True, init_std=1.0, generator=seeded(0)).double()
    nn.init.normal_(linear.bias, generator=seeded(1))
    with torch.no_grad():
        linear.factors.diagonal().copy_(torch.tensor([0.5, -1.0, 2.0, 0.1]))
    permutation = torch.eye(4, dtype=torch.float64)[linear.order]
    lower, upper, _ = triangles(linear.factors, linear.bound)
    weight = permutation @ lower @ upper
    z = torch.randn(3, 4, generator=seeded(2), dtype=torch.float64)
    x, log_det = linear(z)
    torch.testing.assert_close(x, z @ weight.T + linear.bias)
    torch.testing.assert_close(log_det, torch.linalg.slogdet(weight).logabsdet.expand(3))
    assert torch.equal(lower.diagonal(), torch.ones(4, dtype=torch.float64))
    assert torch.equal(lower, lower.tril())
    assert torch.equal(upper, upper.triu())


def test_lu_linear_on_the_last_axis_is_a_1x1_convolution() -> None:
    linear = LULinear(3, init_std=1.0, generator=seeded(0)).double()
    z = torch.randn(2, 5, 4, 3, generator=seeded(1), dtype=torch.float64)
    lower, upper, _ = triangles(linear.factors, linear.bound)
    weight = (lower @ upper)[:, :, None, None]
    x, log_det = linear(z)
    torch.testing.assert_close(x.permute(0, 3, 1, 2), nn.functional.conv2d(z.permute(0, 3, 1, 2), weight))
    assert log_det.shape == (2, 5, 4)


def test_lu_linear_starts_at_its_permutation() -> None:
    linear = LULinear(5, permute=True, init_std=0.0, generator=seeded(3))
    z = torch.randn(2, 5, generator=seeded(0))
    x, log_det = linear(z)
    assert torch.equal(x, z[:, linear.order])
    assert torch.equal(log_det, torch.zeros(2))


def test_generator_determines_the_start() -> None:
    assert torch.equal(Shuffle(50, seeded(4)).order, Shuffle(50, seeded(4)).order)
    assert not torch.equal(Shuffle(50, seeded(4)).order, Shuffle(50, seeded(5)).order)
    assert torch.equal(LULinear(5, generator=seeded(4)).factors, LULinear(5, generator=seeded(4)).factors)


def test_product_of_reflections_equals_single_reflections():
    rows = torch.randn(6, 5, dtype=torch.float64, generator=seeded(0))
    rows[2], rows[4] = 0.0, rows[3]  # a zero row reflects nothing, and two equal rows cancel
    product = torch.eye(5, dtype=torch.float64)
    for row in rows:
        product = product if not row.any() else product @ (torch.eye(5) - 2 * row.outer(row) / (row @ row))
    units = normalize_rows(rows)
    assert torch.allclose(reflect(torch.eye(5, dtype=torch.float64), units), product, atol=1e-14)
    assert torch.allclose(reflect(reflect(rows, units), units.flip(0)), rows, atol=1e-14)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: LULinear(0), "value", "dim"),
        (lambda: LULinear(3)(torch.zeros(2, 1)), "shape", None),
        (lambda: LULinear(3).inverse(torch.tensor(1.0)), "shape", None),
        (lambda: LULinear(3)(torch.zeros(3, dtype=torch.float64)), "dtype", None),
        (lambda: Permutation([0, 2]), "value", "order"),
        (lambda: Permutation([]), "value", "order"),
        (lambda: Permutation([0, 0]), "value", "order"),
        (lambda: Reverse(2)(torch.zeros(3)), "shape", None),
        (lambda: Reverse(0), "value", "dim"),
        (lambda: Shuffle(-1), "value", "dim"),
    ],
)
def test_bad_input_raises(call, kind: str, argument: str | None) -> None:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)
