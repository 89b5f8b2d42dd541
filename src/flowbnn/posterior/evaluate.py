"""Metrics of a posterior on held-out data."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flowbnn.batches import as_loader
from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc
from flowbnn.options import checked
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import CategoricalPredictive


@checked
def evaluate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    novel: Iterable[Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Returns the metrics of a posterior on held-out data.

    These are accuracy, negative log-likelihood (NLL), Brier score and expected calibration error (ECE) for classification, and root
    mean squared error (RMSE), NLL, continuous ranked probability score (CRPS) and coverage for regression.

    Args:
        posterior: Posterior of any method.
        loader: Batches of ``(inputs, targets)``, or one such pair.
        novel: Out-of-distribution inputs: a loader, a pair, or a tensor. They add ``novelty_auroc``, the probability that a novel input
            has a larger predictive entropy than an input of ``loader``, and ``novelty_aupr``, the average precision of detecting it.
        seed: Seed of the prediction.
        options: Other options of :meth:`Posterior.predict`. Adaptive sampling adds ``sample_counts``, the mean number of samples.

    >>> import torch
    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.posterior import PointPosterior
    >>> posterior = PointPosterior(torch.nn.Linear(2, 3), Categorical())
    >>> sorted(evaluate(posterior, (torch.zeros(5, 2), torch.zeros(5).long())))
    ['accuracy', 'brier', 'ece', 'nll']
    """
    predictive, targets = posterior.predict_with_targets(as_loader(loader), seed=seed, **options)
    if targets is None:
        raise FlowBNNError("evaluate needs a loader of (inputs, targets), got inputs alone", kind="loader")
    report = {name: float(value) for name, value in predictive.evaluate(targets).items()}
    if options.get("adaptive") is not None:
        report["sample_counts"] = float(predictive.sample_counts.double().mean())
    if novel is not None:
        novel_predictive = posterior.predict(as_loader(novel), seed=seed, **options)
        scores = novelty_scores(predictive), novelty_scores(novel_predictive)
        report |= {"novelty_auroc": novelty_auroc(*scores), "novelty_aupr": novelty_aupr(*scores)}
    return report


def novelty_scores(predictive: Any) -> Tensor:
    """Returns scores ``[B]`` that are larger for novel inputs: the entropy of classes, the epistemic variance of real values."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.entropy
    return predictive.epistemic.reshape(len(predictive), -1).sum(-1)
