"""One posterior within the file of another."""

from typing import Any

from torch import Tensor

__all__ = ["Stored"]


class Stored:
    """What one posterior saved, where it is a part of another's file."""

    def __init__(self, path: Any, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
        self.path, self.contents = path, (tensors, document)

    def __str__(self) -> str:
        return str(self.path)
