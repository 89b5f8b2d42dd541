"""What a training run leaves behind: one record of numbers per epoch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, overload

from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest

__all__ = ["Averages", "History"]


@dataclass
class History:
    """The record of a run, epoch by epoch.

    Each record holds ``loss``, the objective's logs as means over the epoch's examples, ``learning_rate``
    (of the first parameter group, at the epoch's end) and what ``validate`` returned, under ``validation_...``.

    >>> history = History([{"loss": 2.0, "kl": 5.0}, {"loss": 1.0, "kl": 4.5}])
    >>> history["kl"], history.epochs, history.last["loss"]
    ([5.0, 4.5], 2, 1.0)
    >>> History.from_dict(history.to_dict()) == history
    True
    """

    records: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    stopped_early: bool = False
    best_epoch: int | None = None

    @property
    def epochs(self) -> int:
        """Number of whole epochs recorded."""
        return len(self.records)

    @property
    def names(self) -> list[str]:
        """Every name that some epoch recorded, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    @property
    def last(self) -> dict[str, float]:
        """The last epoch's record."""
        return self.records[-1] if self.records else {}

    @overload
    def __getitem__(self, name: str) -> list[float]: ...

    @overload
    def __getitem__(self, name: int) -> dict[str, float]: ...

    def __getitem__(self, name: str | int) -> list[float] | dict[str, float]:
        """All epochs of one number by its name, or all numbers of one epoch by its index: ``history["kl"]``, ``history[-1]``."""
        if isinstance(name, int) and -len(self.records) <= name < len(self.records):
            return self.records[name]
        if name not in self.names:
            close = nearest(name, self.names) if isinstance(name, str) else f" of {len(self.records)} epochs"
            raise FlowBNNError(f"the history holds no {name!r}{close}", kind="name", argument=name)
        return [record.get(str(name), float("nan")) for record in self.records]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "History":
        """The inverse of :meth:`to_dict`."""
        try:
            history = cls(**values)
            history.records = [{k: float(v) for k, v in record.items()} for record in history.records]
        except (TypeError, ValueError, AttributeError) as error:
            raise FlowBNNError(f"this is not a stored history ({error})", kind="file") from None
        return history


class Averages:
    """Running means of scalars, each weighted by the number of examples it stands for.

    Values on an accelerator are summed there, so that no step waits for the device.

    >>> import torch
    >>> averages = Averages()
    >>> averages.add({"loss": torch.tensor(1.0)}, weight=3)
    >>> averages.add({"loss": torch.tensor(5.0)}, weight=1)
    >>> averages.means()
    {'loss': 2.0}
    """

    def __init__(self, totals: Mapping[str, float] | None = None, weights: Mapping[str, float] | None = None):
        self.totals: dict[str, float | Tensor] = dict(totals or {})
        self.weights: dict[str, float] = dict(weights or {})

    def add(self, values: Mapping[str, Tensor | float], weight: float) -> None:
        """Count one batch."""
        for name, value in values.items():
            amount: float | Tensor
            if isinstance(value, Tensor) and value.device.type != "cpu":
                # float64 where the device has it: an epoch of float32 additions loses digits
                amount = value.detach().double() if value.device.type == "cuda" else value.detach()
            else:
                amount = value.item() if isinstance(value, Tensor) else float(value)
            self.totals[name] = self.totals.get(name, 0.0) + amount * weight
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def means(self) -> dict[str, float]:
        """The means so far."""
        return {name: float(total) / self.weights[name] for name, total in self.totals.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "totals": {name: float(total) for name, total in self.totals.items()},
            "weights": dict(self.weights),
        }
