"""Mixture of posteriors of one architecture, which may be of different kinds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.likelihoods import Categorical, Gaussian, Likelihood, RealLikelihood
from flowbnn.options import checked
from flowbnn.posterior.base import (
    Posterior,
    Prediction,
    load_posterior,
    open_posterior_file,
    rewrap_load_errors,
)
from flowbnn.posterior.prediction import new_seed
from flowbnn.predictive import CategoricalPredictive
from flowbnn.training.storage import NestedTensorFile, TensorFile


class MixturePosterior(Posterior):
    """Equally weighted mixture of posteriors, such as networks that were trained and calibrated on different folds.

    Sample ``s`` of M members is sample ``s // M`` of member ``s % M``. Members have equal weights if the number of samples is a
    multiple of M, as the default is. The outputs are log-probabilities of classes, or means and log-variances of a regression, so
    that each member may have its own calibration and its own observation noise.

    Args:
        members: Posteriors, whose networks have the same architecture.

    >>> import flowbnn as fb
    >>> members = [fb.posterior.PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical()) for _ in range(2)]
    >>> MixturePosterior(members).predict(torch.zeros(4, 2)).samples.shape
    torch.Size([2, 4, 3])
    """

    kind: ClassVar[str] = "mixture"

    @checked
    def __init__(self, members: Sequence[Posterior]) -> None:
        if not members:
            raise FlowBNNError("a mixture needs at least one member", argument="members")
        self.members = list(members)
        super().__init__(members[0].model, _output_likelihood(members[0].likelihood))
        count, largest = len(members), max(member.default_samples for member in members)
        self.default_samples = count if largest == 1 else count * -(-largest // count)

    def __repr__(self) -> str:
        kinds = sorted({type(member).__name__ for member in self.members})
        return f"{type(self).__name__}({pluralize(len(self.members), 'member')}: {', '.join(kinds)})"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns log-probabilities, or means and log-variances, of some samples."""
        count, results = len(self.members), dict[int, Tensor]()
        for index, member in enumerate(self.members):
            numbers = [sample for sample in samples if sample % count == index]
            if not numbers:
                continue
            options = replace(prediction.options, seed=prediction.seed, compile=False, adaptive=None)
            with Prediction(member.model, options, len(numbers), member.cache) as inner:
                inner.batch_index, inner.total_rows = prediction.batch_index, prediction.total_rows
                inner_range = range(numbers[0] // count, numbers[-1] // count + 1)
                predictive = member._predictive(member.outputs(inputs, inner_range, inner))
            for number, values in zip(numbers, _natural_outputs(predictive), strict=True):
                results[number] = values.to(prediction.device)
        return torch.stack([results[number] for number in samples])

    def networks(self, samples: int, seed: int | None = None) -> list[nn.Module]:
        """Returns networks of the members in turn."""
        seed, count = new_seed() if seed is None else seed, len(self.members)
        numbers = [len(range(index, samples, count)) for index in range(count)]
        pairs = zip(self.members, numbers, strict=True)
        groups = [member.networks(number, seed) if number else [] for member, number in pairs]
        return [groups[index % count][index // count] for index in range(samples)]

    def document(self) -> dict[str, Any]:
        return {**super().document(), "members": [member.document() for member in self.members]}

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"members.{index}.{name}": value
            for index, member in enumerate(self.members)
            for name, value in member.tensors().items()
        }

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> "Posterior":
        """Reads a saved mixture into copies of ``network``."""
        file = open_posterior_file(path, network, [cls.kind])
        with rewrap_load_errors(file):
            documents = [dict(document) for document in file.document["members"]]
        parts = [
            NestedTensorFile(file, f"members.{index}.", document) for index, document in enumerate(documents)
        ]
        members = [load_posterior(part, network) for part in parts]
        with rewrap_load_errors(file):
            posterior = cls(members)
        file.check_names(posterior.tensors())
        posterior.read_calibration(file)
        return posterior


def _output_likelihood(likelihood: Likelihood) -> Likelihood:
    """Returns the observation model of log-probabilities, or of means and log-variances."""
    if not isinstance(likelihood, RealLikelihood):
        return Categorical()
    if not isinstance(likelihood, Gaussian):
        text = f"a mixture of posteriors supports classes and Gaussian noise, got {likelihood!r}"
        raise FlowBNNError(text, kind="unsupported", argument="likelihood")
    result = Gaussian("predicted")
    result.shape = likelihood.shape
    return result


def _natural_outputs(predictive: Any) -> Tensor:
    """Returns the log-probabilities ``[S, B, C]`` of a predictive distribution, or its means and log-variances ``[S, B, 2 D]``."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.log_samples
    variances = predictive.sample_variances.expand_as(predictive.samples)
    return torch.cat([predictive.samples, variances.log()], -1)
