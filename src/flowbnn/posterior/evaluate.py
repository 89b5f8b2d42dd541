"""The metrics of a posterior on held-out data, the same for every method."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc
from flowbnn.options import checked, takes
from flowbnn.posterior.base import Posterior, PredictOptions


@takes(PredictOptions)
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
        seed, options: of the prediction, as in :class:`PredictOptions`; adaptive sampling adds ``samples_spent``, the mean over the
            inputs of ``loader``.
    """
    predictive, targets = posterior.predict_with_targets(_as_loader(loader), seed=seed, **options)
    if targets is None:
        raise FlowBNNError(
            "evaluation needs batches of (inputs, targets), but the loader gives inputs alone", kind="loader"
        )
    report = {name: float(value) for name, value in predictive.evaluate(targets).items()}
    if options.get("adaptive") is not None:
        report["samples_spent"] = float(predictive.samples_spent.double().mean())
    if novel is not None:
        strange = posterior.predict(_as_loader(novel), seed=seed, **options)
        known_score, novel_score = (getattr(p, "entropy", None) for p in (predictive, strange))
        if known_score is None or novel_score is None:
            known_score, novel_score = (
                p.epistemic.reshape(len(p), -1).sum(-1) for p in (predictive, strange)
            )
        report["novelty_auroc"] = float(novelty_auroc(known_score, novel_score))
        report["novelty_aupr"] = float(novelty_aupr(known_score, novel_score))
    return report


def _as_loader(data: Any) -> Any:
    """One pair of inputs and targets is a loader of one batch."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return [data]
    return data
