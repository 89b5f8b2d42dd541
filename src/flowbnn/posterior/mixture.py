"""Mixture of posteriors of one architecture, which may be of different kinds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import pluralize, requirement_error, value_error
from flowbnn.likelihoods import Categorical, Gaussian, Likelihood, RealLikelihood
from flowbnn.likelihoods.classes import ClassLikelihood
from flowbnn.options import NonEmpty, Positive, SampleCount, checked
from flowbnn.posterior.base import Posterior, Prediction, load_posterior
from flowbnn.posterior.files import open_posterior_file, rewrap_load_errors
from flowbnn.posterior.gated import check_without_gate
from flowbnn.posterior.prediction import new_seed
from flowbnn.predictive import CategoricalPredictive
from flowbnn.training.storage import NestedTensorFile, TensorFile


class MixturePosterior(Posterior):
    """Mixture of posteriors: networks that were trained on different folds, or several calibrators of one network.

    Samples are assigned to members in proportion to their weights (:meth:`schedule`). With equal weights sample ``s`` of M members is
    sample ``s // M`` of member ``s % M``. The outputs are log-probabilities of classes, or means and log-variances of a regression, so
    that each member may have its own calibration and its own observation noise.

    Args:
        members: Posteriors, whose networks have the same architecture.
        weights: Positive weights of the members. They are normalized; the default is equal weights.

    >>> import flowbnn as fb
    >>> members = [fb.posterior.PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical()) for _ in range(2)]
    >>> MixturePosterior(members).predict(torch.zeros(4, 2)).samples.shape
    torch.Size([2, 4, 3])
    """

    kind: ClassVar[str] = "mixture"

    @checked
    def __init__(
        self,
        members: Annotated[Sequence[Posterior], NonEmpty()],
        weights: Sequence[Positive] | None = None,
    ) -> None:
        weights = [1.0] * len(members) if weights is None else list(weights)
        if len(weights) != len(members):
            raise value_error("weights", f"{len(members)} numbers", len(weights))
        for member in members:
            check_without_gate(member)
        self.members, self.weights = list(members), [float(weight) / sum(weights) for weight in weights]
        super().__init__(members[0].model, _output_likelihood(members[0].likelihood))
        count, largest = len(members), max(member.default_samples for member in members)
        if len(set(weights)) > 1:
            self.default_samples = max(64, largest)  # weights are represented to within 1/64
        else:
            self.default_samples = count if largest == 1 else count * -(-largest // count)

    def __repr__(self) -> str:
        kinds = sorted({type(member).__name__ for member in self.members})
        return f"{type(self).__name__}({pluralize(len(self.members), 'member')}: {', '.join(kinds)})"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns log-probabilities, or means and log-variances, of some samples."""
        schedule, results = self.schedule(samples.stop), dict[int, Tensor]()
        for index, member in enumerate(self.members):
            turns = [sample for sample, (number, _) in enumerate(schedule) if number == index]
            turns = [sample for sample in turns if sample >= samples.start]
            if not turns:
                continue
            first, last = schedule[turns[0]][1], schedule[turns[-1]][1]
            if member.default_samples == 1:  # all samples are the same
                last = first = 0
            options = replace(prediction.options, seed=prediction.seed, compile=False, adaptive=None)
            with Prediction(member.model, options, last - first + 1, member.cache) as inner:
                inner.batch_index, inner.total_rows = prediction.batch_index, prediction.total_rows
                predictive = member._predictive(member.outputs(inputs, range(first, last + 1), inner))
            values = natural_outputs(predictive).to(prediction.device)
            for position, sample in enumerate(turns):
                results[sample] = values[position if len(values) > 1 else 0]
        return torch.stack([results[sample] for sample in samples])

    def schedule(self, samples: int) -> list[tuple[int, int]]:
        """Returns the member of each sample, and the number of the sample within its member; see :func:`assign_samples`."""
        return assign_samples(self.weights, samples)

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns networks of the members in turn."""
        seed, schedule = new_seed() if seed is None else seed, self.schedule(samples)
        groups = []
        for index, member in enumerate(self.members):
            count = sum(number == index for number, _ in schedule)
            groups.append(member.networks(count, seed) if count else [])
        return [groups[index][number] for index, number in schedule]

    def document(self) -> dict[str, Any]:
        members = [member.document() for member in self.members]
        return {**super().document(), "members": members, "weights": self.weights}

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
            posterior = cls(members, file.document["weights"])
        file.check_tensors(posterior.tensors())
        posterior.read_calibration(file)
        return posterior


def assign_samples(weights: Sequence[float], samples: int) -> list[tuple[int, int]]:
    """Returns the member of each sample of a mixture, and the number of the sample within its member.

    Each sample goes to the member that is farthest behind its weight, so that every prefix of the samples has nearly the weights of
    the mixture.

    Args:
        weights: Weights of the members, whose sum is 1.
        samples: Number of samples.

    >>> assign_samples([0.75, 0.25], 4)
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    counts, result = [0] * len(weights), list[tuple[int, int]]()
    for total in range(1, samples + 1):
        deficits = [weight * total - count for weight, count in zip(weights, counts, strict=True)]
        index = max(range(len(deficits)), key=deficits.__getitem__)
        result.append((index, counts[index]))
        counts[index] += 1
    return result


class MemberClasses(Categorical):
    """Likelihood of log-probabilities with the classes on the last axis, for targets of the likelihood of the members.

    Args:
        source: Likelihood of the members.
    """

    def __init__(self, source: ClassLikelihood) -> None:
        super().__init__(class_axis=-1)
        self.source = source

    def extra_repr(self) -> str:
        """Returns an empty string."""
        return ""

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns targets in the form that predictives and metrics expect."""
        return self.source.canonical_targets(targets)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of the likelihood of the members."""
        return self.source.to_dict()


def _output_likelihood(likelihood: Likelihood) -> Likelihood:
    """Returns the observation model of log-probabilities, or of means and log-variances."""
    if isinstance(likelihood, ClassLikelihood):
        return MemberClasses(likelihood)
    if not isinstance(likelihood, RealLikelihood):
        return Categorical()
    if not isinstance(likelihood, Gaussian):
        raise requirement_error("a mixture", "classes or a Gaussian", likelihood, argument="likelihood")
    result = Gaussian("predicted")
    result.shape = likelihood.shape
    return result


def natural_outputs(predictive: Any) -> Tensor:
    """Returns the log-probabilities ``[S, B, ..., C]`` of a predictive distribution, or its means and log-variances ``[S, B, 2 D]``."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.log_samples
    variances = predictive.sample_variances.expand_as(predictive.samples)
    return torch.cat([predictive.samples, variances.log()], -1)
