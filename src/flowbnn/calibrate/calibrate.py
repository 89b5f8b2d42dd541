"""Calibration of a trained network by noise that is fitted on held-out data, with fixed weights.

On training data the likelihood is overconfident, so a more accurate posterior gives worse predictions. Always calibrate on held-out
data.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import nn

from flowbnn.calibrate.cross_validation import Scores, cross_validate
from flowbnn.calibrate.flow import FlowFit
from flowbnn.calibrate.problem import CalibrationProblem, PriorName, read_held_out
from flowbnn.convert import Rule
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood, RealLikelihood
from flowbnn.methods.variational.base import FlowName
from flowbnn.methods.variational.natural_gradient import MAX_PASSES, NaturalFit
from flowbnn.noise import Recipe, noise_layers
from flowbnn.options import Count, Ge, Positive, Seed, checked
from flowbnn.posterior.calibration import Calibration
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.training.progress import History, terminal


@checked
def calibrate(
    network: nn.Module,
    held_out: Iterable[Any],
    *,
    structure: Literal["auto", "full", "chain", "layers", "factorized"] = "auto",
    prior: Literal["auto", "fitted", "fixed"] = "auto",
    prior_scale: Positive | None = None,
    rules: Mapping[Rule, Recipe | None] | None = None,
    flow: FlowName | Recipe | None = None,
    folds: Literal[0] | Annotated[int, Ge(2)] = 4,
    samples: Count = 64,
    likelihood: Literal["auto", "categorical", "bernoulli", "gaussian"] | Likelihood = "auto",
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto",
    seed: Seed = 0,
    progress: bool = True,
) -> NoisePosterior:
    r"""Fits noise in a trained network to held-out data. The weights stay fixed.

    The posterior is one Gaussian over the noise of all layers. It is fitted to the ELBO by natural gradients
    (:mod:`flowbnn.methods.variational.natural_gradient`), which takes ten to thirty passes over the held-out data and needs no tuning.
    Cross-validation compares it with the network without noise and with temperature scaling.

    Args:
        network: Trained network. It is copied.
        held_out: Batches of ``(inputs, targets)``, or one pair, that the weights were not trained on, as for temperature scaling. Every
            pass must give the same examples, in any order.
        structure: Structure of the covariance: ``"full"``, a ``"chain"`` of layers (each linear in the previous one), independent
            ``"layers"``, or ``"factorized"``. ``"auto"`` is full up to 6,000 dimensions, then a chain, then factorized.
        prior: Prior of the noise. ``"fixed"`` is :math:`\mathcal N(1, \mathrm{scale}^2)`. ``"fitted"`` has a mean and a standard
            deviation for every layer that maximize the ELBO, which helps with few examples. ``"auto"`` takes the better one on the
            first fold. Without folds it is fixed if there are more examples than dimensions.
        prior_scale: Standard deviation :math:`\mathrm{scale}` of the fixed prior. The default is 0.5.
        rules: Noise of each layer, with its prior, as in :func:`~flowbnn.to_stochastic`. By default all layers get noise with the same
            prior.
        flow: Flow on the noise before the covariance, by name (``"coupling"``, ``"nsf"``, ``"iaf"``, ... as in
            :class:`~flowbnn.NodeNoise`) or as a recipe. It acts on the noise of all layers at once. With ``structure="factorized"``
            every layer has its own flow. It starts at the Gaussian, is trained by the ELBO (:mod:`flowbnn.calibrate.flow`), and is
            dropped if it does not improve the ELBO. Training takes hundreds of steps of 32 passes over the data, so use it for small
            networks or on a GPU.
        folds: Number of folds of the cross-validation, or 0 for none.
        samples: Number of samples of the predictions in the cross-validation.
        likelihood: Observation model. ``"auto"`` chooses it by the targets. For a regression, pass the likelihood of the trained
            network (``posterior.likelihood``), which has its noise scale. Otherwise the scale is fitted to the residuals on
            the training folds.
        accelerator: Device type to compute on.
        seed: Seed of all draws.
        progress: If True, shows progress bars and prints the comparison.

    Returns:
        A posterior with a comparison in ``calibration`` (:class:`Calibration`) and the ELBO in ``history``.

    Raises:
        FlowBNNError: If the network has noise already, or if ``rules`` give noise that is not Gaussian.

    >>> import flowbnn as fb
    >>> generator = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(300, 2, generator=generator)
    >>> targets = (inputs.sum(1) + torch.randn(300, generator=generator) > 0).long()
    >>> network = fb.models.MLP(2, (16,), 2)
    >>> plain = fb.MLE(epochs=200, lr=0.02).fit(network, [(inputs[:100], targets[:100])], seed=0, progress=False)
    >>> posterior = calibrate(plain.model, [(inputs[100:], targets[100:])], progress=False)
    >>> posterior.calibration.nll["calibrated"] < posterior.calibration.nll["plain"]
    True
    """
    _check_arguments(network, prior_scale, rules)
    data = read_held_out(network, held_out, likelihood, accelerator, seed)
    problem = CalibrationProblem(data, rules, flow, prior_scale or 0.5, structure, seed)
    folds = min(folds, len(data) // 2) if len(data) >= 4 else 0
    priors = _candidate_priors(prior, folds, problem)
    all_indices = torch.arange(len(data))
    fit = problem.fit_gaussian(all_indices, priors[0])
    scores = cross_validate(problem, priors, folds, samples, progress) if folds else Scores(priors[0])
    if scores.prior != priors[0]:
        fit = problem.fit_gaussian(all_indices, scores.prior, start=fit.gaussian)
    posterior, flow_fit = problem.make_posterior(fit, all_indices, progress)
    temperature = problem.scale_temperature(all_indices).temperature
    posterior.calibration = _make_report(problem, folds, scores, temperature, flow_fit)
    posterior.history = History([{"elbo": value / len(data)} for value in fit.trace])
    _warn_unreliable(problem, fit, temperature)
    if progress and (console := terminal()) is not None:
        console.print(str(posterior.calibration), highlight=False)
    return posterior


def _check_arguments(network: nn.Module, prior_scale: float | None, rules: Mapping[Rule, Any] | None) -> None:
    """Raises FlowBNNError if the network has noise already, or if the prior is given twice."""
    if noise_layers(network):
        text = "network already has noise; use fb.to_deterministic(network)"
        raise FlowBNNError(text, kind="network", argument="network")
    if prior_scale is not None and rules is not None:
        text = "prior_scale excludes rules; set it in each recipe"
        raise FlowBNNError(text, kind="rules", argument="prior_scale")


def _candidate_priors(prior: str, folds: int, problem: CalibrationProblem) -> list[PriorName]:
    """Returns the priors to choose from by cross-validation. Without folds there is only one."""
    if prior != "auto":
        return ["fitted" if prior == "fitted" else "fixed"]
    if folds:
        return ["fixed", "fitted"]
    return ["fixed" if len(problem.data) > problem.dim else "fitted"]


def _make_report(
    problem: CalibrationProblem, folds: int, scores: Scores, temperature: float, flow_fit: FlowFit | None
) -> Calibration:
    """Returns the comparison of the calibrated network with the baselines."""
    return Calibration(
        nll=scores.nll,
        ece=scores.ece,
        gain=scores.gain,
        error=scores.error,
        folds=folds,
        examples=len(problem.data),
        dimensions=problem.dim,
        structure=problem.structure,
        prior=scores.prior,
        temperature=temperature,
        flow=None if flow_fit is None else flow_fit.label,
        flow_gain=None if flow_fit is None else flow_fit.gain,
        flow_error=None if flow_fit is None else flow_fit.error,
    )


def _warn_unreliable(problem: CalibrationProblem, fit: NaturalFit, temperature: float) -> None:
    """Warns about too few examples, a fit that has not converged, and data that the weights seem to have memorized.

    A temperature below 0.8 means that the network is underconfident on the data, which is typical of training data. It is exactly 1 if
    all examples are classified correctly. In a regression the temperature depends on the noise scale and is not checked.

    Args:
        problem: Network and held-out data.
        fit: Fit to all examples.
        temperature: Temperature on all examples.
    """
    count = len(problem.data)
    if count < 20:  # the standard error of an accuracy of 0.8 is then 0.09
        warn(f"at least 20 held-out examples are needed to assess calibration, got {count}", kind="examples")
    if not fit.converged:
        warn(
            f"the ELBO did not converge in {MAX_PASSES} passes over the held-out data; check for very large outputs of the network, "
            "decrease prior_scale, or use temperature scaling",
            kind="convergence",
        )
    memorized = temperature < 0.8 or temperature == 1.0
    if memorized and not isinstance(problem.data.likelihood, RealLikelihood):
        warn(
            f"the optimal temperature {temperature:.2f} of the held-out data is typical of training data, on which calibration makes "
            "the network overconfident; pass data that the weights have not seen",
            kind="memorized",
            temperature=temperature,
        )
