"""Options of every ``fit``."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from flowbnn.batches import (
    as_loader,
)
from flowbnn.likelihoods import (
    Likelihood,
)
from flowbnn.methods.data_summary import count_examples
from flowbnn.options import Count, Probability, options
from flowbnn.posterior.prediction import new_seed
from flowbnn.training import TrainingOptions

LikelihoodName = Likelihood | Literal["auto", "categorical", "bernoulli", "gaussian", "flow", "mixture"]


@options(kw_only=True, owner="fit")
class FitOptions(TrainingOptions):
    """Options of every ``fit``. They extend :class:`~flowbnn.training.TrainingOptions`.

    Args:
        likelihood: Likelihood of the targets, or its name. ``"auto"`` is categorical for integer targets, Bernoulli for integer targets
            and one output, and Gaussian with learned noise for real-valued targets.
        num_data: Number of training examples. By default, it is taken from the loader.
        validation: Loader of held-out data, a fraction of the data to hold out, or None. The negative log-likelihood (NLL) of held-out
            data and the accuracy or error are recorded at every epoch. Methods hold out a fraction only to find their number of epochs
            (``epochs=None``). :func:`~flowbnn.fit` always does, to verify its result.
    """

    likelihood: LikelihoodName = "auto"
    num_data: Count | None = None
    validation: Probability | Iterable[Any] | None = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "validation", as_loader(self.validation))

    @property
    def held_out(self) -> Iterable[Any] | None:
        """Loader of held-out data, or None if ``validation`` is a fraction or None."""
        return None if isinstance(self.validation, float) else self.validation

    def resolve_seed(self) -> int:
        """Returns the seed, or a random one from torch's generator if none is set."""
        return new_seed() if self.seed is None else self.seed

    def num_examples(self, loader: Iterable[Any]) -> int:
        """Returns the number of training examples."""
        return count_examples(loader) if self.num_data is None else self.num_data

    def for_stage(self, name: str, description: str, **changes: Any) -> Self:
        """Returns the options of one of several training runs, which has its own file in the folder ``checkpoint``."""
        folder, board = self.checkpoint, self.tensorboard
        if folder is not None:
            changes["checkpoint"] = Path(str(folder).removesuffix(".safetensors")) / f"{name}.safetensors"
        if board is not None:
            changes["tensorboard"] = Path(board) / name
        return replace(self, description=description, **changes)


AnyFitOptions = TypeVar("AnyFitOptions", bound=FitOptions)
