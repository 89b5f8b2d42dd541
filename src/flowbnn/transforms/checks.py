"""The check that transforms of vectors share."""

from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["check_dim", "check_dtype", "check_width"]


def check_dim(dim: int, owner: object) -> int:
    """``dim``, if it can be the length of a vector."""
    if dim < 1:
        raise FlowBNNError(f"{type(owner).__name__} needs a dimension of at least 1, not {dim}")
    return dim


def check_width(value: Tensor, dim: int, owner: object) -> None:
    """Refuse vectors of another length, which would broadcast or index their way to a wrong log-det in silence."""
    if value.ndim == 0 or value.shape[-1] != dim:
        raise FlowBNNError(
            f"{type(owner).__name__} takes vectors of length {dim} on the last axis, not shape {tuple(value.shape)}"
        )


def check_dtype(value: Tensor, parameter: Tensor, owner: object) -> None:
    """Refuse an input of another dtype than the parameters: a product of the two fails deep inside torch."""
    if value.dtype != parameter.dtype:
        raise FlowBNNError(
            f"{type(owner).__name__} has {parameter.dtype} parameters but got {value.dtype} input; "
            "cast one of them with .to(dtype)"
        )
