r"""Gaussians over groups of weights, whose precision is a curvature plus the precision of the prior.

Each is kept in the eigenbasis of its curvature, with eigenvalues :math:`\lambda`: drawing, densities, solving and the evidence
then need only the numbers :math:`\lambda + \delta`, whatever the prior precision :math:`\delta` is.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


class Block:
    """A Gaussian around zero over some weights.

    ``tensors`` are eigenvalues (float64) and eigenvectors of the curvature; ``prior``, its precision, is added to every eigenvalue.
    Subclasses define ``to_basis`` and ``from_basis``, and where weights are not one vector ``kept_axes`` and ``eigenvalues``.
    """

    kind: ClassVar[str]
    kept_axes: ClassVar[int] = 0  # of a weight, in front of those that become columns

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor], prior: float = 0.0
    ) -> None:
        self.shapes: Shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.tensors, self.prior = dict(tensors), prior
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def eigenvalues(self) -> Tensor:
        """Of the curvature, in float64."""
        return self.tensors["values"]

    @abstractmethod
    def to_basis(self, values: Tensor) -> Tensor:
        """Packed weights in the eigenbasis."""

    @abstractmethod
    def from_basis(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`to_basis`."""

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Weights by name, possibly with leading axes, as one tensor."""
        parts = []
        for name, shape in self.shapes.items():
            value, end = values[name], values[name].ndim - len(shape) + self.kept_axes
            parts.append(value.reshape(*value.shape[:end], -1))
        return torch.cat(parts, -1)

    def unpack(self, values: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`pack`."""
        sizes = [math.prod(shape[self.kept_axes :]) for shape in self.shapes.values()]
        lead = values.shape[: values.ndim - 1 - self.kept_axes]
        parts = zip(self.shapes.items(), values.split(sizes, -1), strict=True)
        return {name: part.reshape(*lead, *shape) for (name, shape), part in parts}

    @property
    def precision(self) -> Tensor:
        """In the eigenbasis."""
        return self.eigenvalues + self.prior

    def log_det(self) -> float:
        """Of the precision."""
        return float(self.precision.log().sum())

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """Weights drawn with the symmetric root of the covariance, which does not depend on the signs and order of eigenvectors."""
        precision = self.precision
        noise = torch.randn(precision.shape, generator=generator, dtype=dtype).to(precision.device)
        return self.unpack(self.from_basis(self.to_basis(noise) * precision.rsqrt().to(dtype)))

    def quadratic(self, values: Mapping[str, Tensor]) -> Tensor:
        r""":math:`w^T P w` with the precision P."""
        return (self.to_basis(self.pack(values)).double().square() * self.precision).sum()

    def solve(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r""":math:`P^{-1} w`."""
        inside = self.to_basis(self.pack(values))
        return self.unpack(self.from_basis(inside / self.precision.to(inside.dtype)))

    def roots(self, rows: Mapping[str, Tensor]) -> Tensor:
        r"""Rows ``{name: [b, c, ...]}`` of a Jacobian times :math:`P^{-1/2}`, ``[b, c, size]``: their products are covariances."""
        inside = self.to_basis(self.pack(rows))
        return (inside * self.precision.rsqrt().to(inside.dtype)).flatten(2)


class Diagonal(Block):
    """Independent weights."""

    kind = "diag"

    def to_basis(self, values: Tensor) -> Tensor:
        return values

    from_basis = to_basis

    def linear_variance(self, columns: Sequence[Tensor]) -> Tensor:
        """Covariance ``[b, C, C]`` of a linear layer's outputs, for the inputs ``[b, D]`` that multiply each of its weights."""
        variances = self.unpack(self.precision.reciprocal().to(columns[0].dtype)).values()
        parts = [
            column.square() @ variance.view(len(variance), -1).T
            for column, variance in zip(columns, variances, strict=True)
        ]
        return torch.diag_embed(torch.stack(parts).sum(0))


class Full(Block):
    """Weights with all their covariances."""

    kind = "full"

    @classmethod
    def of(cls, shapes: Shapes, curvature: Tensor, dtype: torch.dtype) -> "Full":
        values, vectors = torch.linalg.eigh(curvature)
        return cls(shapes, {"values": values.clamp_min(0.0), "vectors": vectors.to(dtype).contiguous()})

    def to_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"]

    def from_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"].T


class Kronecker(Block):
    r"""One layer with the curvature :math:`B \otimes A`: a factor for its outputs and one for its inputs.

    The bias is one more column of the weight matrix, with an input that is always one.
    """

    kind = "kron"
    kept_axes = 1

    @classmethod
    def of(cls, shapes: Shapes, inner: Tensor, outer: Tensor, dtype: torch.dtype) -> "Kronecker":
        tensors: dict[str, Tensor] = {}
        for name, factor in (("inner", inner), ("outer", outer)):
            values, vectors = torch.linalg.eigh(factor)
            tensors |= {name: values.clamp_min(0.0), f"{name}_vectors": vectors.to(dtype).contiguous()}
        return cls(shapes, tensors)

    @property
    def eigenvalues(self) -> Tensor:
        return self.tensors["outer"].unsqueeze(1) * self.tensors["inner"]

    def to_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"].T @ values @ self.tensors["inner_vectors"]

    def from_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"] @ values @ self.tensors["inner_vectors"].T

    def linear_variance(self, columns: Sequence[Tensor]) -> Tensor:
        """As :meth:`Diagonal.linear_variance`."""
        inside = torch.cat(list(columns), 1) @ self.tensors["inner_vectors"]
        variances = inside.square() @ self.precision.reciprocal().to(inside.dtype).T  # [b, out]
        outer = self.tensors["outer_vectors"]
        return (outer * variances.unsqueeze(1)) @ outer.T


BLOCKS: dict[str, type[Block]] = {kind.kind: kind for kind in (Diagonal, Full, Kronecker)}
