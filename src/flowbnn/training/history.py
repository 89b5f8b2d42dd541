"""The record of a training run, epoch by epoch."""

from dataclasses import dataclass, field
from typing import Any

from flowbnn import plots
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.records import Record


@dataclass
class History(Record):
    """Record of a training run, epoch by epoch.

    Each epoch records ``loss``, the objective's logs as means over the examples, ``learning_rate``, and the values of ``validate`` as
    ``validation_...``. The learning rate is that of the first parameter group at the end of the epoch.

    Args:
        records: Values of each epoch by name.
        steps: Number of optimizer steps.
        seconds: Duration of the run.
        stopped_early: True if early stopping ended the run.
        best_epoch: Index of the best epoch, if early stopping is used.

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
        """Number of complete epochs."""
        return len(self.records)

    @property
    def names(self) -> list[str]:
        """Names of all recorded values, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    @property
    def last(self) -> dict[str, float]:
        """Record of the last epoch."""
        return self.records[-1] if self.records else {}

    def __getitem__(self, name: str | int) -> Any:
        """Returns one value of all epochs (``history["kl"]``) or all values of one epoch (``history[-1]``)."""
        if isinstance(name, int) and -len(self.records) <= name < len(self.records):
            return self.records[name]
        if name not in self.names:
            hint = nearest(name, self.names) if isinstance(name, str) else f"; there are {self.epochs} epochs"
            raise FlowBNNError(f"the history has no {name!r}{hint}", kind="name", argument=name)
        return [record.get(str(name), float("nan")) for record in self.records]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.records)

    plot, plot_kl = plots.plot_history, plots.plot_kl
