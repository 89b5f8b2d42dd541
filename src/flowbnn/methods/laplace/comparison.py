"""Comparison of a Laplace approximation with the network it is made from, and the choice of its prior on validation data."""

from collections.abc import Iterable
from typing import Any

from flowbnn.batches import batch_size
from flowbnn.errors import warn
from flowbnn.methods.laplace.posterior import LaplacePosterior
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import PointPosterior
from flowbnn.training import is_main_process


def compare_with_network(
    posterior: LaplacePosterior, validation: Iterable[Any] | None, training: Iterable[Any], choose: bool
) -> None:
    """Chooses the prior on validation data, and warns if predictions are worse than those of the network itself.

    The NLL of all priors is stored as ``posterior.validation_nll``, by prior scale relative to the fitted one. As the scale decreases,
    the predictions approach those of the network. Scales are tried until the best one is not worse than the network.

    Args:
        posterior: Laplace approximation, whose prior may change.
        validation: Validation data, or None.
        training: Training data, of which the first batches are used if there are no validation data.
        choose: If True, the prior is chosen on the validation data.
    """
    data = _first_batches(training) if validation is None else validation
    network_nll = _mean_nll(PointPosterior(posterior.model, posterior._observation_model()), data)
    priors = [block.prior for block in posterior.blocks]
    precisions = dict(posterior.precisions)

    def scale_prior(factor: float) -> None:
        for block, prior in zip(posterior.blocks, priors, strict=True):
            block.prior = factor * prior
        posterior.precisions = {name: factor * value for name, value in precisions.items()}

    nlls: dict[float, float] = {}
    factors: tuple[float, ...] = (1.0,)  # of the prior precision
    if choose and validation is not None and all(priors):
        factors = (1.0, 10.0, 1e2, 1e3, 1e4, 1e6, 1e8)
    for factor in factors:
        if factor > 1e4 and min(nlls.values()) <= network_nll + 1e-3:
            break  # the posterior is as good as the network, from which 1e6 and more leave hardly a difference
        scale_prior(factor)
        nlls[factor] = _mean_nll(posterior, data)
    best = min(nlls, key=nlls.__getitem__)
    scale_prior(best)
    if validation is not None:
        posterior.validation_nll = {factor**-0.5: nll for factor, nll in nlls.items()}
    # nats per example by which few samples may raise the NLL; most posteriors that exceed it on training data also do so on others
    if nlls[best] > network_nll + 0.1 and is_main_process():
        source, advice = "validation data", "use newton_steps or epochs"
        if validation is None:
            source, advice = "training data", "provide validation data"
        warn(
            f"the NLL on {source} is {nlls[best]:.3g}, versus {network_nll:.3g} of the network; {advice}, or decrease prior_scale",
            kind="worse",
            nll=nlls[best],
            network_nll=network_nll,
        )


def _first_batches(loader: Iterable[Any], num_rows: int = 1000) -> list[Any]:
    """Returns the first batches of a loader, up to the one with the given number of rows."""
    batches, count = [], 0
    for batch in loader:
        batches.append(batch)
        count += batch_size(batch)
        if count >= num_rows:
            break
    return batches


def _mean_nll(posterior: Posterior, data: Iterable[Any]) -> float:
    """Returns the mean negative log-likelihood of some batches."""
    samples = min(32, posterior.default_samples)
    predictive, targets = posterior.predict_with_targets(data, samples, seed=0, progress=False)
    assert targets is not None
    return float(predictive.nll(targets).double().mean())
