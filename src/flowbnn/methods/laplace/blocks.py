r"""Gaussians over groups of weights, whose precision is a curvature plus that of the prior.

Each is kept in the basis in which the curvature is diagonal, with eigenvalues :math:`\lambda`: drawing, densities, solving and the
evidence then need the numbers :math:`\lambda + \delta` alone, whatever the prior precision :math:`\delta` is.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["BLOCKS", "Block", "Diagonal", "Full", "Kronecker"]

Shapes = dict[str, tuple[int, ...]]


class Block:
    """A Gaussian over some weights.

    Args:
        shapes: of the weights, by name.
        tensors: what the structure keeps.
        prior: the precision of the prior (and of damping), added to every eigenvalue.
    """

    kind: ClassVar[str] = "block"
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], prior: float = 0.0
    ):
        self.shapes: Shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.tensors, self.prior = dict(tensors), prior
        self.size = self.count(self.shapes)
        self.check()

    @staticmethod
    def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Weights of these shapes."""
        return sum(math.prod(shape) for shape in shapes.values())

    def check(self) -> None:
        """Raise ValueError where the tensors do not fit the weights."""
        if set(self.tensors) != set(self.keeps) or self.eigenvalues.numel() != self.size:
            raise ValueError(f"the curvature of '{next(iter(self.shapes))}' does not fit its weights")

    @property
    def eigenvalues(self) -> Tensor:
        """Of the curvature, in float64."""
        raise NotImplementedError(f"{type(self).__name__} must define eigenvalues")

    def to_basis(self, values: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define to_basis(values)")

    def from_basis(self, values: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define from_basis(values)")

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Weights, or several of each on leading axes, as the structure has them."""
        return torch.cat(
            [values[name].flatten(values[name].ndim - len(s)) for name, s in self.shapes.items()], -1
        )

    def unpack(self, values: Tensor) -> dict[str, Tensor]:
        parts = values.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {
            name: part.reshape(*values.shape[:-1], *shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    @property
    def precision(self) -> Tensor:
        return self.eigenvalues + self.prior

    def log_det(self) -> float:
        """Of the precision."""
        return float(self.precision.log().sum())

    def scale(self, like: Tensor) -> Tensor:
        """Standard deviations in the basis."""
        return self.precision.rsqrt().to(like.dtype)

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """Weights around zero.

        By the symmetric root of the covariance, so that a draw does not hang on the signs and the order of eigenvectors, which
        the last digit of a sum may change.
        """
        precision = self.precision
        noise = torch.randn(precision.shape, generator=generator, dtype=dtype).to(precision.device)
        return self.unpack(self.from_basis(self.to_basis(noise) * self.scale(noise)))

    def quadratic(self, values: Mapping[str, Tensor]) -> Tensor:
        r""":math:`w^T P w` with the precision P."""
        inside = self.to_basis(self.pack(values)).double()
        return (inside.square() * self.precision).sum()

    def solve(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r""":math:`P^{-1} w`."""
        inside = self.to_basis(self.pack(values))
        return self.unpack(self.from_basis(inside / self.precision.to(inside.dtype)))

    def roots(self, rows: Mapping[str, Tensor]) -> Tensor:
        r"""Rows ``{name: [b, c, ...]}`` of a Jacobian times :math:`P^{-1/2}`, ``[b, c, size]``: their products are covariances."""
        inside = self.to_basis(self.pack(rows))
        return (inside * self.scale(inside)).flatten(2)

    def linear_variance(self, columns: list[Tensor]) -> Tensor:
        """Covariance ``[b, C, C]`` of ``W x + b`` with these weights, for the inputs ``[b, D]`` of each of the shapes."""
        raise NotImplementedError(f"{type(self).__name__} must define linear_variance(columns)")


class Diagonal(Block):
    """Independent weights."""

    kind = "diag"
    keeps = ("values",)

    @property
    def eigenvalues(self) -> Tensor:
        return self.tensors["values"]

    def to_basis(self, values: Tensor) -> Tensor:
        return values

    from_basis = to_basis

    def linear_variance(self, columns: list[Tensor]) -> Tensor:
        total, start = torch.zeros((), device=columns[0].device), 0
        variance = self.precision.reciprocal().to(columns[0].dtype)
        for column, shape in zip(columns, self.shapes.values(), strict=True):
            stop = start + math.prod(shape)
            total = total + column.square() @ variance[start:stop].view(shape[0], -1).T
            start = stop
        return torch.diag_embed(total)


class Full(Block):
    """Weights with all their covariances."""

    kind = "full"
    keeps = ("values", "vectors")

    @classmethod
    def of(cls, shapes: Mapping[str, Any], curvature: Tensor, dtype: torch.dtype) -> "Full":
        values, vectors = torch.linalg.eigh(curvature)
        return cls(shapes, {"values": values.clamp_min(0.0), "vectors": vectors.to(dtype).contiguous()})

    def check(self) -> None:
        super().check()
        if self.tensors["vectors"].shape != (self.size, self.size):
            raise ValueError(f"the curvature of '{next(iter(self.shapes))}' does not fit its weights")

    @property
    def eigenvalues(self) -> Tensor:
        return self.tensors["values"]

    def to_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"]

    def from_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"].T


class Kronecker(Block):
    r"""One layer, whose curvature is :math:`B \otimes A`: a factor for its outputs and one for its inputs.

    The bias is one more column of the weights, with an input that is always one.
    """

    kind = "kron"
    keeps = ("inner", "inner_vectors", "outer", "outer_vectors")

    @classmethod
    def of(cls, shapes: Mapping[str, Any], inner: Tensor, outer: Tensor, dtype: torch.dtype) -> "Kronecker":
        tensors: dict[str, Tensor] = {}
        for name, factor in (("inner", inner), ("outer", outer)):
            values, vectors = torch.linalg.eigh(factor)
            tensors |= {name: values.clamp_min(0.0), f"{name}_vectors": vectors.to(dtype).contiguous()}
        return cls(shapes, tensors)

    def check(self) -> None:
        super().check()
        if any(
            self.tensors[f"{name}_vectors"].shape != 2 * self.tensors[name].shape
            for name in ("inner", "outer")
        ):
            raise ValueError(f"the curvature of '{next(iter(self.shapes))}' does not fit its weights")

    @property
    def eigenvalues(self) -> Tensor:
        return self.tensors["outer"].unsqueeze(1) * self.tensors["inner"]

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        columns = []
        for name, shape in self.shapes.items():
            value, lead = values[name], values[name].ndim - len(shape)
            columns.append(value.flatten(lead + 1) if len(shape) > 1 else value.unsqueeze(-1))
        return torch.cat(columns, -1)

    def unpack(self, values: Tensor) -> dict[str, Tensor]:
        widths = [math.prod(shape[1:]) for shape in self.shapes.values()]
        parts = values.split(widths, -1)
        return {
            name: part.reshape(*values.shape[:-2], *shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def to_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"].T @ values @ self.tensors["inner_vectors"]

    def linear_variance(self, columns: list[Tensor]) -> Tensor:
        inside = torch.cat(columns, 1) @ self.tensors["inner_vectors"]
        each = inside.square() @ self.precision.reciprocal().to(inside.dtype).T  # [b, out]
        outer = self.tensors["outer_vectors"]
        return (outer * each.unsqueeze(1)) @ outer.T

    def from_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"] @ values @ self.tensors["inner_vectors"].T


BLOCKS: dict[str, type[Block]] = {kind.kind: kind for kind in (Diagonal, Full, Kronecker)}
