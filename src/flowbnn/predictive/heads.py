"""Predictive distribution of several targets with predictives of their own."""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Literal, Self

import torch
from torch import Tensor

from flowbnn.errors import check_name, describe_value, quote_names, value_error
from flowbnn.metrics.checks import mean_as_float
from flowbnn.options import Count, check, checked
from flowbnn.predictive.base import Predictive

TargetSplit = Callable[[Any], Mapping[str, Tensor]]


class HeadsPredictive(Predictive):
    r"""Predictive distribution of several heads, each with its own predictive: ``prediction["class"].probabilities``.

    The heads of one sampled network are independent given the inputs, so the mixture of S samples is

    .. math:: p(y \mid x) = \frac1S \sum_s \prod_h p_{sh}(y_h \mid x) .

    Args:
        heads: Predictive of each head, by name, all of the same samples and inputs.
        split: Function from targets of all heads to targets by name.

    >>> from flowbnn.likelihoods import Gaussian, Categorical, Heads
    >>> likelihood = Heads({"class": Categorical(), "value": Gaussian(1.0)}, output_shapes=[(3,), (1,)])
    >>> prediction = likelihood.predictive(torch.zeros(5, 2, 4))  # 5 samples, 2 inputs
    >>> prediction
    HeadsPredictive(samples=5, inputs=2; 'class': CategoricalPredictive, 'value': GaussianPredictive)
    >>> prediction.nll({"class": torch.tensor([0, 1]), "value": torch.zeros(2, 1)})  # log(3) + log(2 pi) / 2
    tensor([2.0176, 2.0176])
    """

    can_rescale = False

    def __init__(self, heads: Mapping[str, Any], split: TargetSplit) -> None:
        self._heads, self._split = dict(heads), split
        first = next(iter(self._heads.values()))
        self._tensors = tuple(tensor for head in self._heads.values() for tensor in head._tensors)
        self._sample_counts = first._sample_counts
        self.uncertainties = tuple(
            f"{name}_{by}" for name, head in heads.items() for by in head.uncertainties
        )

    # -------------------- access by name

    def keys(self) -> KeysView[str]:
        """Returns the names of the heads."""
        return self._heads.keys()

    def values(self) -> ValuesView[Any]:
        """Returns the predictives of the heads."""
        return self._heads.values()

    def items(self) -> ItemsView[str, Any]:
        """Returns names and predictives of the heads."""
        return self._heads.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __contains__(self, name: object) -> bool:
        return name in self._heads

    def __getitem__(self, index: Any) -> Any:
        """Returns the predictive of a head by its name, or the predictive of some inputs."""
        if not isinstance(index, str):
            return self._map(lambda head: head[index])
        check_name(index, self._heads, "head", kind="head", argument=index)
        return self._heads[index]

    def _map(self, function: Callable[[Any], Any]) -> Self:
        """Returns the predictive whose heads are results of a function."""
        predictive = type(self)({name: function(head) for name, head in self.items()}, self._split)
        log_density = self.log_density
        predictive.log_density = None if log_density is None else next(iter(predictive.values())).log_density
        return predictive

    def select_samples(self, samples: slice) -> Self:
        """Returns the predictive of some samples, which every input must have.

        Args:
            samples: Slice of the samples.
        """
        return self._map(lambda head: head.select_samples(samples))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the predictive on another device or in another dtype, with the arguments of :meth:`torch.Tensor.to`."""
        return self._map(lambda head: head.to(*args, **kwargs))

    # -------------------- distribution

    @property
    def samples(self) -> Tensor:
        """Predictions of each sample, ``[S, B, K]``, those of all heads in order."""
        return torch.cat([head.samples.flatten(2).double() for head in self.values()], -1)

    @property
    def sampling_error(self) -> Tensor:
        """Largest Monte Carlo error of the heads for each input, ``[B]``."""
        return torch.stack([head.sampling_error.double() for head in self.values()]).amax(0)

    def nll(self, targets: Any) -> Tensor:
        """Returns the negative log-likelihood of the targets of all heads for each input, ``[B]``.

        Args:
            targets: Dictionary, or tuple in the order of the heads.
        """
        parts, log_prob = self._split(targets), []
        for index in range(self.num_samples):
            sample = [head.select_samples(slice(index, index + 1)) for head in self.values()]
            nll = [
                head.nll(parts[name].to(self._tensors[0].device))
                for name, head in zip(self, sample, strict=True)
            ]
            log_prob.append(-torch.stack([value.to(nll[0].dtype) for value in nll]).sum(0))
        return -self._log_mean_exp(torch.stack(log_prob))

    def log_prob(self, targets: Any) -> Tensor:
        """Returns the log-likelihood of the targets of all heads under the mixture, ``[B]``."""
        return -self.nll(targets)

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Draws targets by head, each ``[number, B, ...]``. Each draw uses one of the S samples for all heads and inputs.

        Args:
            number: Number of draws.
            seed: Seed of the draws. None uses torch's global generator.
        """
        indices, generator = self._draw_sample_indices(number, seed)
        indices = indices.expand(-1, len(self))
        result: dict[str, Tensor] = {}
        for name, head in self.items():
            for index in indices.unique().tolist():
                head_seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
                draws = head.select_samples(slice(index, index + 1)).sample(number, head_seed)
                mask = (indices == index).view(*indices.shape, *(1,) * (draws.ndim - 2))
                result[name] = torch.where(mask, draws, result.get(name, draws))
        return result

    def quantiles(self, q: float | Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Returns the quantiles of each head that has them, by name.

        Args:
            q: Levels between 0 and 1.
        """
        return {name: head.quantiles(q) for name, head in self.items() if hasattr(head, "quantiles")}

    # -------------------- decisions and metrics

    def uncertainty(self, by: str) -> Tensor:
        """Returns an uncertainty of a head, such as ``"class_entropy"``.

        Args:
            by: Name of the head and of its uncertainty, one of :attr:`uncertainties`.
        """
        check("by", by, Literal[self.uncertainties])
        heads = {f"{name}_{each}": (head, each) for name, head in self.items() for each in head.uncertainties}
        head, name = heads[by]
        return head.uncertainty(name)

    def decide(
        self, abstain_above: Mapping[str, float], by: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Returns the decision of each head, by name.

        Args:
            abstain_above: Uncertainty of each head above which it abstains.
            by: Names of the uncertainties of some heads. The default is that of the head.
        """
        if not isinstance(abstain_above, Mapping):
            expected = f"thresholds by head, {quote_names(list(self))}"
            raise value_error("abstain_above", expected, describe_value(abstain_above))
        by = by or {}
        return {
            name: self[name].decide(threshold, **({"by": by[name]} if name in by else {}))
            for name, threshold in abstain_above.items()
        }

    def evaluate(self, targets: Any) -> dict[str, float]:
        """Returns the NLL of all heads together, and the metrics of each head, such as ``"class_accuracy"``.

        Args:
            targets: Dictionary, or tuple in the order of the heads.
        """
        parts = self._split(targets)
        metrics = {"nll": mean_as_float(self.nll(targets))}
        for name, head in self.items():
            values = head.evaluate(parts[name].to(self._tensors[0].device))
            metrics |= {f"{name}_{metric}": float(value) for metric, value in values.items()}
        return metrics

    def __repr__(self) -> str:
        heads = ", ".join(f"'{name}': {type(head).__name__}" for name, head in self.items())
        return f"HeadsPredictive(samples={self._describe_sample_counts()}, inputs={len(self)}; {heads})"
