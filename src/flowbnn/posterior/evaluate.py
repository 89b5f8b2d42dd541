"""Metrics of a posterior on held-out data."""

from typing import Any

from torch import Tensor

from flowbnn.batches import require_targets
from flowbnn.data.formats import as_inputs, as_loader
from flowbnn.density import Density
from flowbnn.density.density import finite_scores
from flowbnn.metrics import novelty_auroc
from flowbnn.options import checked
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import HeadsPredictive


@checked
def evaluate(
    posterior: Posterior,
    loader: Any,
    *,
    novel: Any = None,
    density: Density | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Returns the metrics of a posterior on held-out data.

    For classification these are accuracy, negative log-likelihood (NLL), Brier score and expected calibration error (ECE). For
    regression they are root mean squared error (RMSE), NLL, continuous ranked probability score (CRPS) and coverage.

    Args:
        posterior: Posterior of any method.
        loader: Loader of ``(inputs, targets)``, ``Dataset``, or pair of tensors or arrays.
        novel: Out-of-distribution inputs: a loader, a pair, or a tensor. They add one AUROC for each score of
            :func:`novelty_scores`. It is the probability that a novel input has a larger score than an input of ``loader``.
            Classification has ``auroc_entropy``, ``auroc_mutual_information`` and ``auroc_energy``. Regression has ``auroc_std`` and
            ``auroc_epistemic``. A density adds ``auroc_density``.
        density: Density of the inputs, from :func:`~flowbnn.fit_density`. A posterior of :func:`~flowbnn.gated` has its own.
        seed: Seed of the prediction.
        options: Other options of :meth:`Posterior.predict`. Adaptive sampling adds ``sample_counts``, the mean number of samples.

    >>> import torch
    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.posterior import PointPosterior
    >>> posterior = PointPosterior(torch.nn.Linear(2, 3), Categorical())
    >>> sorted(evaluate(posterior, (torch.zeros(5, 2), torch.zeros(5).long())))
    ['accuracy', 'brier', 'ece', 'nll']
    """
    columns = posterior.columns
    loader = as_loader(loader, columns=columns)
    predictive, targets = posterior.predict_with_targets(loader, seed=seed, **options)
    report = {name: float(value) for name, value in predictive.evaluate(require_targets(targets)).items()}
    if options.get("adaptive") is not None:
        report["sample_counts"] = float(predictive.sample_counts.double().mean())
    if novel is not None:
        novel = (
            as_loader(novel, columns=columns)
            if isinstance(novel, tuple)
            else as_inputs(novel, "novel", columns)
        )
        known_scores = novelty_scores(predictive)
        novel_scores = novelty_scores(posterior.predict(novel, seed=seed, **options))
        if density is not None:
            known_scores["density"], novel_scores["density"] = (
                -finite_scores(density.score(data)) for data in (loader, novel)
            )
        for name, scores in known_scores.items():
            report[f"auroc_{name}"] = novelty_auroc(scores, novel_scores[name])
    return report


def novelty_scores(predictive: Any) -> dict[str, Tensor]:
    """Returns scores ``[B]`` that tend to be larger for novel inputs, by name.

    For classes these are the entropy, the mutual information of several samples, and the energy of logits, each averaged over the
    positions of an input. Predictives without logits, such as those of a mixture of posteriors, have no energy. For real
    values they are the standard deviation, and the epistemic variance of several samples. A posterior with a density gate adds minus
    the log-density.

    Args:
        predictive: Predictive distribution.

    >>> import torch
    >>> from flowbnn.predictive import CategoricalPredictive
    >>> list(novelty_scores(CategoricalPredictive(torch.zeros(4, 3, 2))))
    ['entropy', 'mutual_information', 'energy']
    """
    if isinstance(predictive, HeadsPredictive):
        return {
            f"{name}_{score}": values
            for name, head in predictive.items()
            for score, values in novelty_scores(head).items()
        }
    has_samples = predictive.num_samples > 1
    scores: dict[str, Tensor] = {}
    if "entropy" in predictive.uncertainties:
        scores["entropy"] = _mean_over_positions(predictive.entropy)
        if has_samples:
            scores["mutual_information"] = _mean_over_positions(predictive.mutual_information)
        energy = _mean_over_positions(predictive.energy)
        # the energy of predictives without logits consists of rounding errors
        if bool((energy.abs() > 1e-5).any()):
            scores["energy"] = energy
    else:
        names = ("std", "epistemic") if has_samples else ("std",)
        scores |= {name: getattr(predictive, name).reshape(len(predictive), -1).sum(-1) for name in names}
    if predictive.log_density is not None:
        scores["density"] = -predictive.log_density
    return scores


def _mean_over_positions(values: Tensor) -> Tensor:
    """Returns the mean ``[B]`` of values ``[B, *positions]``."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values
