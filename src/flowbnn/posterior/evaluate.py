"""The metrics of a posterior on held-out data, the same for every method."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flowbnn.batches import as_loader
from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc
from flowbnn.options import accepts_options_of, checked
from flowbnn.posterior.base import Posterior, PredictOptions
from flowbnn.predictive import CategoricalPredictive


@accepts_options_of(PredictOptions)
@checked
def evaluate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    novel: Iterable[Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Metrics of a posterior on held-out data: accuracy, NLL, Brier and ECE, or RMSE, NLL, CRPS and coverage.

    Args:
        loader: batches of ``(inputs, targets)``, or one such pair.
        novel: inputs of a kind the network has not seen, a loader or a pair likewise, or a tensor; adds ``novelty_auroc`` and
            ``novelty_aupr``, the chance that a novel input has a larger predictive entropy than a known one, and the average
            precision of finding it so.
        seed, options: of the prediction, as in :class:`PredictOptions`; adaptive sampling adds ``sample_counts``, the mean over the
            inputs of ``loader``.
    """
    predictive, targets = posterior.predict_with_targets(as_loader(loader), seed=seed, **options)
    if targets is None:
        raise FlowBNNError(
            "evaluation needs batches of (inputs, targets), but the loader gives inputs alone", kind="loader"
        )
    report = {name: float(value) for name, value in predictive.evaluate(targets).items()}
    if options.get("adaptive") is not None:
        report["sample_counts"] = float(predictive.sample_counts.double().mean())
    if novel is not None:
        strange = posterior.predict(as_loader(novel), seed=seed, **options)
        scores = novelty_scores(predictive), novelty_scores(strange)
        report |= {"novelty_auroc": novelty_auroc(*scores), "novelty_aupr": novelty_aupr(*scores)}
    return report


def novelty_scores(predictive: Any) -> Tensor:
    """What ranks inputs by how novel they seem, ``[B]``: the entropy of classes, the epistemic variance of real values."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.entropy
    return predictive.epistemic.reshape(len(predictive), -1).sum(-1)
