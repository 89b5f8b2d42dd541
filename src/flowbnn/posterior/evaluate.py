"""One judge for every posterior."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import novelty_aupr, novelty_auroc
from flowbnn.posterior.adaptive import Adaptive
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.forward import Compile
from flowbnn.posterior.views import View

__all__ = ["evaluate"]


def evaluate(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    novel: Iterable[Any] | None = None,
    samples: int | None = None,
    shared: bool = True,
    seed: int = 0,
    adaptive: Adaptive | float | None = None,
    views: Sequence[View] = (),
    precision: str | None = None,
    compile: Compile = "auto",
    progress: bool = True,
) -> dict[str, float]:
    """Metrics of a posterior on held-out data: accuracy, NLL, Brier and ECE, or RMSE, NLL and coverage.

    Args:
        loader: batches of ``(inputs, targets)``, or one such pair.
        novel: inputs of a kind the network has not seen, a loader or a pair likewise, or a tensor; adds ``novelty_auroc`` and
            ``novelty_aupr``, the chance that a novel input has a larger predictive entropy than a known one, and the average
            precision of finding it so.
        samples, shared, seed, adaptive, views, precision, compile, progress: as in :meth:`Posterior.predict`; adaptive sampling adds
            ``samples_spent``, the mean over the inputs of ``loader``.
    """
    if not isinstance(posterior, Posterior):
        raise FlowBNNError(
            f"evaluate takes a posterior from fit or fit_point, not a {type(posterior).__name__}"
        )
    options: dict[str, Any] = {
        "samples": samples,
        "shared": shared,
        "seed": seed,
        "adaptive": adaptive,
        "views": views,
        "precision": precision,
        "compile": compile,
        "progress": progress,
    }
    loader = _as_loader(loader)
    predictive, targets = posterior.predict_with_targets(loader, **options)
    if targets is None:
        raise FlowBNNError("evaluation needs batches of (inputs, targets), but the loader gives inputs alone")
    report = {name: float(value) for name, value in predictive.evaluate(targets).items()}
    if adaptive is not None:
        report["samples_spent"] = float(predictive.samples_spent.double().mean())
    if novel is not None:
        strange = posterior.predict(_as_loader(novel), **options)
        known_score, novel_score = (getattr(p, "entropy", None) for p in (predictive, strange))
        if known_score is None or novel_score is None:
            known_score, novel_score = predictive.epistemic.sum(-1), strange.epistemic.sum(-1)
        report["novelty_auroc"] = float(novelty_auroc(known_score, novel_score))
        report["novelty_aupr"] = float(novelty_aupr(known_score, novel_score))
    return report


def _as_loader(data: Any) -> Any:
    """One pair of inputs and targets is a loader of one batch."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return [data]
    return data
