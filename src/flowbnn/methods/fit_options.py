"""Options of every ``fit``."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from flowbnn.data.formats import align_columns, as_loader, columns_of
from flowbnn.errors import describe_value, requirement_error
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.data_summary import check_loader, check_targets_differ, count_examples
from flowbnn.networks import OutputSelection
from flowbnn.options import Count, Probability, check, options
from flowbnn.posterior.prediction import new_seed
from flowbnn.training import TrainingOptions
from flowbnn.training.logs import is_csv

LikelihoodName = (
    Likelihood
    | Literal[
        "auto",
        "categorical",
        "bernoulli",
        "gaussian",
        "flow",
        "mixture",
        "poisson",
        "negative_binomial",
        "survival",
        "quantiles",
    ]
)


@options(kw_only=True, owner="fit")
class FitOptions(TrainingOptions):
    """Options of every ``fit``. They extend :class:`~flowbnn.training.TrainingOptions`.

    Args:
        likelihood: Likelihood of the targets, or its name. ``"auto"`` is categorical for integer targets, Bernoulli for integer targets
            and one output, and Gaussian with learned noise for real-valued targets.
        num_data: Number of training examples. By default, it is taken from the loader.
        validation: Loader of held-out data, a fraction of the data to hold out, or None. The negative log-likelihood (NLL) of held-out
            data and the accuracy or error are recorded at every epoch. Methods fit learned noise to the held-out data for these
            numbers, because the noise shrinks with the residuals of the training data. The recorded coverage is then about right by
            construction. Methods hold out a fraction only to find their number of epochs (``epochs=None``). :func:`~flowbnn.fit` always
            does, to verify its result.
        batch_size: Number of examples in a batch, if the data are no loader. The default is about 64. These data are shuffled.
        output: Name, position or function that selects the tensor of outputs from what the network returns. By default it is the tensor
            itself, ``.logits``, ``["logits"]``, or the first tensor of a tuple.
    """

    likelihood: LikelihoodName = "auto"
    num_data: Count | None = None
    validation: Any = 0.1
    batch_size: Count | None = None
    output: OutputSelection | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation is None or isinstance(self.validation, int | float | str):
            check("validation", self.validation, Probability | None, "fit")
        else:
            loader = as_loader(self.validation, stage="validation", argument="validation")
            object.__setattr__(self, "validation", loader)

    def training_loader(self, data: Any) -> Iterable[Any]:
        """Returns training data of any format as a loader.

        Args:
            data: Training data. Data that are no loader are shuffled, in batches of ``batch_size``.

        Raises:
            FlowBNNError: If the data have no targets, only one class, or only equal targets with a learned noise scale.
        """
        loader: Iterable[Any] = as_loader(data, batch_size=self.batch_size, shuffle=True, stage="train")
        check_loader(loader)
        if self.validation_loader is not None:
            object.__setattr__(self, "validation", align_columns(self.validation, columns_of(loader)))
        if loader is data and self.batch_size is not None:
            size = getattr(data, "batch_size", None)
            if size != self.batch_size:
                subject, value = f"batch_size={self.batch_size}", describe_value(data)
                fields = {"kind": "loader", "argument": "batch_size"}
                raise requirement_error(subject, "data without batches", value, **fields)
        if isinstance(self.likelihood, str) and self.likelihood in (
            "auto",
            "categorical",
            "bernoulli",
            "gaussian",
        ):
            check_targets_differ(loader, self.likelihood)
        return loader

    @property
    def validation_loader(self) -> Iterable[Any] | None:
        """Loader of held-out data, or None if ``validation`` is a fraction or None."""
        return None if isinstance(self.validation, float) else self.validation

    def resolve_seed(self) -> int:
        """Returns the seed, or a random one from torch's generator if none is set."""
        return new_seed() if self.seed is None else self.seed

    def num_examples(self, loader: Iterable[Any]) -> int:
        """Returns the number of training examples."""
        return count_examples(loader) if self.num_data is None else self.num_data

    def for_stage(self, name: str, description: str, **changes: Any) -> Self:
        """Returns the options of one of several training runs, which has a checkpoint and a log of its own."""
        folder, log = self.checkpoint, self.log
        if folder is not None:
            changes["checkpoint"] = Path(str(folder).removesuffix(".safetensors")) / f"{name}.safetensors"
        if log is not None:
            path = Path(log)
            changes["log"] = path.with_name(f"{path.stem}-{name}.csv") if is_csv(path) else path / name
        return replace(self, description=description, **changes)


AnyFitOptions = TypeVar("AnyFitOptions", bound=FitOptions)
