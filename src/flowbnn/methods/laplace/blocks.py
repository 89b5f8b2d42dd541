r"""Zero-mean Gaussians over groups of weights. Their precision is a curvature plus the precision of the prior.

Each block is stored in the eigenbasis of its curvature, with eigenvalues :math:`\lambda`. Sampling, densities, linear solves and
the evidence then need only :math:`\lambda + \delta`, for any prior precision :math:`\delta`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


class CurvatureBlock:
    """Base class for zero-mean Gaussians over a group of weights.

    Subclasses define :meth:`to_basis` and :meth:`from_basis`. Subclasses that pack weights into a matrix also define ``row_axes`` and
    :attr:`eigenvalues`.

    Args:
        shapes: Shapes of the weights, by name.
        tensors: Eigenvalues (in float64) and eigenvectors of the curvature, by name.
        prior: Precision of the prior, which is added to every eigenvalue.
    """

    kind: ClassVar[str]
    row_axes: ClassVar[int] = 0  # leading axes of a weight that stay rows when the other axes are packed

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor], prior: float = 0.0
    ) -> None:
        self.shapes: Shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.tensors, self.prior = dict(tensors), prior
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return {"values": (self.size,)}

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the curvature, in float64."""
        return self.tensors["values"]

    @abstractmethod
    def to_basis(self, values: Tensor) -> Tensor:
        """Transforms packed weights to the eigenbasis."""

    @abstractmethod
    def from_basis(self, values: Tensor) -> Tensor:
        """Transforms from the eigenbasis to packed weights; the inverse of :meth:`to_basis`."""

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenates weights into one tensor. The weights may have leading batch axes."""
        columns = []
        for name, shape in self.shapes.items():
            value = values[name]
            first_column_axis = value.ndim - len(shape) + self.row_axes
            columns.append(value.reshape(*value.shape[:first_column_axis], -1))
        return torch.cat(columns, -1)

    def unpack(self, values: Tensor) -> dict[str, Tensor]:
        """Splits a packed tensor into weights by name; the inverse of :meth:`pack`."""
        sizes = [math.prod(shape[self.row_axes :]) for shape in self.shapes.values()]
        batch_shape = values.shape[: values.ndim - 1 - self.row_axes]
        pieces = zip(self.shapes.items(), values.split(sizes, -1), strict=True)
        return {name: piece.reshape((*batch_shape, *shape)) for (name, shape), piece in pieces}

    @property
    def precision(self) -> Tensor:
        """Eigenvalues of the precision matrix, prior included."""
        return self.eigenvalues + self.prior

    def log_det(self) -> float:
        """Returns the log-determinant of the precision matrix."""
        return float(self.precision.log().sum())

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
        """Samples weights with the symmetric root of the covariance, which does not depend on the signs and order of eigenvectors."""
        precision = self.precision
        noise = torch.randn(precision.shape, generator=generator, dtype=dtype).to(precision.device)
        return self.unpack(self.from_basis(self.to_basis(noise) * precision.rsqrt().to(dtype)))

    def quadratic_form(self, values: Mapping[str, Tensor]) -> Tensor:
        r"""Returns :math:`w^T P w` for the precision matrix :math:`P`."""
        return (self.to_basis(self.pack(values)).double().square() * self.precision).sum()

    def solve(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""Returns :math:`P^{-1} w` for the precision matrix :math:`P`."""
        coordinates = self.to_basis(self.pack(values))
        return self.unpack(self.from_basis(coordinates / self.precision.to(coordinates.dtype)))

    def whiten(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        r"""Returns :math:`J P^{-1/2}` as ``[b, c, size]``. Products of its rows are covariances.

        Args:
            jacobian: Rows of a Jacobian, ``{name: [b, c, ...]}``.
        """
        coordinates = self.to_basis(self.pack(jacobian))
        return (coordinates * self.precision.rsqrt().to(coordinates.dtype)).flatten(2)


class LayerBlock(CurvatureBlock):
    """Base class for Gaussians over the weights of one layer, with independent outputs of a linear layer in some basis."""

    @abstractmethod
    def output_variances(self, columns: Sequence[Tensor]) -> Tensor:
        """Returns the variances ``[b, out]`` of the outputs of a linear layer in the basis of :meth:`to_output_basis`.

        Args:
            columns: Inputs ``[b, D]`` that multiply each of the weights of the layer.
        """

    @abstractmethod
    def to_output_basis(self, rows: Tensor | None) -> Tensor | None:
        """Transforms vectors ``[..., out]`` to the basis in which the outputs are independent. None stands for the identity matrix."""

    def linear_variance(
        self, columns: Sequence[Tensor], gradients: Tensor | None = None, diagonal: bool = False
    ) -> Tensor:
        """Returns the covariance ``[b, C, C]`` of outputs of the network by the weights of a linear layer.

        Args:
            columns: Inputs ``[b, D]`` that multiply each of the weights of the layer.
            gradients: Gradients ``[b, C, out]`` of the outputs of the network in those of the layer. None for the output layer.
            diagonal: If True, returns only the diagonal ``[b, C]``.
        """
        variances, rows = self.output_variances(columns), self.to_output_basis(gradients)
        if rows is None:
            return variances if diagonal else torch.diag_embed(variances)
        if not diagonal:
            return (rows * variances.unsqueeze(1)) @ rows.mT
        if rows.ndim == 2:
            return variances @ rows.square().T
        return (rows.square() @ variances.unsqueeze(2)).squeeze(2)


class DiagonalBlock(LayerBlock):
    """Gaussian with independent weights."""

    kind = "diag"

    def to_basis(self, values: Tensor) -> Tensor:
        return values

    from_basis = to_basis

    def output_variances(self, columns: Sequence[Tensor]) -> Tensor:
        variances = self.unpack(self.precision.reciprocal().to(columns[0].dtype)).values()
        terms = [
            column.square() @ variance.view(len(variance), -1).T
            for column, variance in zip(columns, variances, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def to_output_basis(self, rows: Tensor | None) -> Tensor | None:
        return rows


class FullBlock(CurvatureBlock):
    """Gaussian with a full covariance matrix."""

    kind = "full"

    @classmethod
    def from_matrix(cls, shapes: Shapes, curvature: Tensor, dtype: torch.dtype) -> "FullBlock":
        """Builds a block from a curvature matrix in float64; eigenvectors are stored in ``dtype``."""
        values, vectors = torch.linalg.eigh(curvature)
        return cls(shapes, {"values": values.clamp_min(0.0), "vectors": vectors.to(dtype).contiguous()})

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"values": (self.size,), "vectors": (self.size, self.size)}

    def to_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"]

    def from_basis(self, values: Tensor) -> Tensor:
        return values @ self.tensors["vectors"].T


class KroneckerBlock(LayerBlock):
    r"""Gaussian over one layer with the curvature :math:`B \otimes A`: factor B of the outputs and factor A of the inputs.

    The bias is one more column of the weight matrix, whose input is always one.
    """

    kind = "kron"
    row_axes = 1

    @classmethod
    def from_factors(
        cls, shapes: Shapes, inner: Tensor, outer: Tensor, dtype: torch.dtype
    ) -> "KroneckerBlock":
        """Builds a block from the factors of the inputs (``inner``) and outputs (``outer``) in float64."""
        tensors: dict[str, Tensor] = {}
        for name, factor in (("inner", inner), ("outer", outer)):
            values, vectors = torch.linalg.eigh(factor)
            tensors |= {name: values.clamp_min(0.0), f"{name}_vectors": vectors.to(dtype).contiguous()}
        return cls(shapes, tensors)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = next(iter(self.shapes.values()))[0]
        columns = self.size // rows
        factors = {"inner": (columns,), "outer": (rows,)}
        return {**factors, "inner_vectors": (columns, columns), "outer_vectors": (rows, rows)}

    @property
    def eigenvalues(self) -> Tensor:
        return self.tensors["outer"].unsqueeze(1) * self.tensors["inner"]

    def to_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"].T @ values @ self.tensors["inner_vectors"]

    def from_basis(self, values: Tensor) -> Tensor:
        return self.tensors["outer_vectors"] @ values @ self.tensors["inner_vectors"].T

    def output_variances(self, columns: Sequence[Tensor]) -> Tensor:
        coordinates = torch.cat(list(columns), 1) @ self.tensors["inner_vectors"]
        return coordinates.square() @ self.precision.reciprocal().to(coordinates.dtype).T

    def to_output_basis(self, rows: Tensor | None) -> Tensor:
        outer = self.tensors["outer_vectors"]
        return outer if rows is None else rows @ outer
