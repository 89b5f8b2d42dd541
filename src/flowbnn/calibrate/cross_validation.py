"""Cross-validation of the candidates of a calibration: predictions for folds that a candidate was not fitted to."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.calibrate.problem import CalibrationProblem, HeldOutData, PriorName
from flowbnn.likelihoods import RealLikelihood, learns_noise
from flowbnn.methods.calibrators.last_layer import LastLayerProblem, LastLayerRefit
from flowbnn.methods.calibrators.log_temperature import fit_temperatures
from flowbnn.methods.calibrators.scaling import MatrixScaling, VectorScaling
from flowbnn.methods.calibrators.temperature import Temperature, TemperedPosterior
from flowbnn.methods.variational.block_gaussian import BlockGaussian
from flowbnn.posterior.base import Posterior, PredictOptions
from flowbnn.posterior.report import Difference
from flowbnn.posterior.weights import PointPosterior
from flowbnn.predictive import CategoricalPredictive
from flowbnn.regression import set_noise_scale
from flowbnn.training import ProgressBar

SCALINGS: dict[str, Any] = {
    "temperature": Temperature(),
    "vector": VectorScaling(),
    "matrix": MatrixScaling(),
}


@dataclass(frozen=True, eq=False)
class Folds:
    """Folds of the held-out data.

    Args:
        data: Network and held-out data.
        groups: Indices of the examples of each fold.
    """

    data: HeldOutData
    groups: Sequence[Tensor]

    @property
    def training_rows(self) -> list[Tensor]:
        """Indices of the examples of all folds but one, for each fold."""
        return [
            torch.cat([*self.groups[:fold], *self.groups[fold + 1 :]]) for fold in range(len(self.groups))
        ]


class Predictions(NamedTuple):
    """Predictions of one candidate for all examples, each by a fit to the other folds.

    Args:
        nll: Negative log-likelihoods ``[N]`` in float64, on the CPU.
        probabilities: Class probabilities ``[N, C]`` or ``[N, *positions, C]``, or None for a regression.
        finish: Function that fits the candidate to all examples and returns its posterior. Later calls return the same posterior.
        outputs: Sampled outputs ``[S, N, ...]`` of the predictions, which other candidates may transform.
        log_samples: Log-probabilities ``[S, N, ..., C]`` of several sampled networks, or None.
    """

    nll: Tensor
    probabilities: Tensor | None
    finish: Callable[[], Posterior]
    outputs: Tensor | None = None
    log_samples: Tensor | None = None


def gather(folds: Folds, predictives: Sequence[Any], finish: Callable[[], Posterior]) -> Predictions:
    """Returns the predictions of all examples from the predictive distributions of the folds.

    Args:
        folds: Folds of the data.
        predictives: Predictive distribution of each fold, for its examples.
        finish: Function that fits the candidate to all examples.
    """
    nll = torch.zeros(len(folds.data), dtype=torch.float64)
    probabilities = log_samples = None
    for group, predictive in zip(folds.groups, predictives, strict=True):
        targets = folds.data.targets[group.to(folds.data.targets.device)]
        nll[group] = predictive.nll(targets.to(_device(predictive))).double().cpu()
        if isinstance(predictive, CategoricalPredictive):
            values = predictive.probabilities.cpu()
            # single precision is enough for the many numbers of pixels
            values = values.double() if values.ndim == 2 else values.float()
            if probabilities is None:
                probabilities = values.new_zeros(len(nll), *values.shape[1:])
            probabilities[group] = values
            if predictive.num_samples > 1:
                if log_samples is None:
                    log_samples = torch.zeros(predictive.num_samples, *probabilities.shape)
                log_samples[:, group] = predictive.log_samples.float().cpu()
    # noise alone and noise with a temperature may be members of one mixture
    return Predictions(nll, probabilities, cache(finish), log_samples=log_samples)


def _device(predictive: Any) -> torch.device:
    """Returns the device of a predictive distribution."""
    return predictive._tensors[0].device


def predict_plain(folds: Folds) -> Predictions:
    """Predicts with the plain network."""
    data, outputs = folds.data, folds.data.outputs.double()[None]
    predictives = [
        data.point_posterior(training)._predictive(outputs[:, group.to(outputs.device)])
        for training, group in zip(folds.training_rows, folds.groups, strict=True)
    ]
    return gather(folds, predictives, lambda: data.point_posterior(torch.arange(len(data))))


def predict_scaled(folds: Folds, name: str, inner: Predictions | None = None) -> Predictions:
    """Predicts with a scaled network, or with a scaled posterior.

    Args:
        folds: Folds of the data.
        name: Name of the scaling.
        inner: Predictions of the posterior that is scaled, or None for the network without noise.
    """
    data, calibrator, all_rows = folds.data, SCALINGS[name], torch.arange(len(folds.data))
    outputs = data.outputs.double()[None] if inner is None or inner.outputs is None else inner.outputs
    device, targets = outputs.device, data.targets
    if not data.scale_is_known:  # the noise scale of a regression differs between folds
        posteriors = [
            calibrator.calibrate_outputs(
                data.point_posterior(rows), outputs[:, rows.to(device)], targets[rows.to(device)]
            )
            for rows in (*folds.training_rows, all_rows)
        ]
    else:
        base = data.point_posterior(all_rows)
        subsets = [rows.to(device) for rows in (*folds.training_rows, all_rows)]
        if name == "temperature":
            fits = fit_temperatures(base, outputs, targets, subsets)
            posteriors = [TemperedPosterior(base, fit.temperature) for fit in fits]
        else:
            posteriors = calibrator.fit_subsets(base, outputs, targets, subsets)
    predictives = [
        posterior._predictive(outputs[:, group.to(device)])
        for posterior, group in zip(posteriors, folds.groups, strict=False)
    ]
    return gather(
        folds, predictives, lambda: posteriors[-1] if inner is None else posteriors[-1].wrap(inner.finish())
    )


def predict_refit(folds: Folds) -> Predictions:
    """Predicts with a refitted last layer. The penalty and the learned noise scale of a fold are chosen on the other folds."""
    data, calibrator = folds.data, LastLayerRefit()
    all_rows = torch.arange(len(data))
    problem = LastLayerProblem.read(data.point_posterior(all_rows), data.batches(all_rows))
    scores = calibrator.score_folds(problem, folds.groups)
    choices = choose_per_fold(scores.nll.cpu(), folds.groups)
    predictives = []
    for choice, training, group in zip(choices, folds.training_rows, folds.groups, strict=True):
        outputs, likelihood = scores.outputs[choice], deepcopy(data.likelihood).double()
        if learns_noise(likelihood):  # fitted to held-out residuals, as in the posterior of all examples
            rows = training.to(outputs.device)
            set_noise_scale(likelihood, [(outputs[rows], problem.targets[rows])])
        posterior = PointPosterior(data.network, likelihood)
        values = problem.network_outputs(outputs[group.to(outputs.device)])
        predictives.append(posterior._predictive(values[None]))
    best = int(scores.nll.mean(1).argmin())
    return gather(folds, predictives, lambda: calibrator.refit(problem, scores, best))


def choose_per_fold(nll: Tensor, groups: Sequence[Tensor]) -> list[int]:
    """Returns for each fold the setting with the lowest NLL on all other folds.

    The examples of a fold therefore never choose its setting.

    Args:
        nll: Negative log-likelihoods of the settings, ``[K, N]``, where each example was held out from the fit.
        groups: Indices of the examples of each fold.
    """
    total = nll.sum(1)
    return [int((total - nll[:, group].sum(1)).argmin()) for group in groups]


class NoisePrediction(NamedTuple):
    """Prediction of one fold by a network with noise.

    Args:
        predictive: Predictive distribution.
        outputs: Sampled outputs.
        gaussian: Gaussian of the noise.
        total: Sum of the negative log-likelihoods.
    """

    predictive: Any
    outputs: Tensor
    gaussian: BlockGaussian
    total: float


def predict_fold(
    problem: CalibrationProblem,
    training: Tensor,
    group: Tensor,
    prior: PriorName,
    samples: int,
    start: BlockGaussian | None,
    callback: Callable[[int, float], None] | None = None,
) -> NoisePrediction:
    """Predicts a fold with noise that is fitted to the other folds.

    Args:
        problem: Network with noise and held-out data.
        training: Indices of the examples of the other folds.
        group: Indices of the examples of the fold.
        prior: Prior of the noise.
        samples: Number of samples.
        start: Gaussian to start from, which must not depend on the fold, or None.
        callback: Function that is called after every pass of the fit with the number of passes and the ELBO per example.
    """
    fit = problem.fit_gaussian(training, prior, start, precise=False, callback=callback)
    posterior, _ = problem.make_posterior(fit, training)
    inputs, targets = problem.data.select(group)
    options = PredictOptions(samples, seed=problem.seed, progress=False)
    outputs, _, _ = posterior.collect(inputs, options)
    predictive = posterior._predictive(outputs)
    return NoisePrediction(predictive, outputs, fit.gaussian, float(predictive.nll(targets).double().sum()))


def predict_noise(
    problem: CalibrationProblem,
    folds: Folds,
    priors: Sequence[PriorName],
    samples: int,
    progress: bool,
    finish: Callable[[PriorName], Posterior],
) -> tuple[Predictions, PriorName]:
    """Predicts all folds with noise, and chooses its prior.

    Several priors are compared on the first half of the folds, and on at least two folds. Each fold uses the prior that is best on
    the other compared folds. The examples of a fold therefore never choose its prior.

    Args:
        problem: Network with noise and held-out data.
        folds: Folds of the data.
        priors: Priors to choose from.
        samples: Number of samples of a prediction.
        progress: If True, shows a progress bar.
        finish: Function that fits the noise with a prior to all examples.

    Returns:
        The predictions, and the prior with the lowest NLL on the compared folds.
    """
    compared_folds = range(max(2, len(folds.groups) // 2) if len(priors) > 1 else 0)
    results = list[dict[PriorName, NoisePrediction]]()

    def best_prior(selection: Sequence[int]) -> PriorName:
        return min(priors, key=lambda prior: sum(results[fold][prior].total for fold in selection))

    pairs = list(zip(folds.training_rows, folds.groups, strict=True))
    num_fits = len(pairs) + len(compared_folds) * (len(priors) - 1)
    with ProgressBar("noise", num_fits, unit="fit", visible=progress) as bar:
        for fold, (training, group) in enumerate(pairs):
            results.append({})
            start = None
            for prior in priors if fold in compared_folds else [best_prior(compared_folds)]:
                labels = f"fold {fold + 1}", f"{prior} prior"

                def show_pass(number: int, elbo: float, labels: Sequence[str] = labels) -> None:
                    bar.update(values=[f"ELBO {elbo:.4g}", *labels, f"pass {number}"])

                results[-1][prior] = predict_fold(problem, training, group, prior, samples, start, show_pass)
                start = results[-1][prior].gaussian
                bar.update(bar.completed + 1)
    fold_predictions = [
        result[best_prior([index for index in compared_folds if index != fold])]
        if fold in compared_folds
        else next(iter(result.values()))
        for fold, result in enumerate(results)
    ]
    prior = best_prior(compared_folds)
    predictions = gather(folds, [result.predictive for result in fold_predictions], lambda: finish(prior))
    if isinstance(folds.data.likelihood, RealLikelihood):
        return predictions, prior
    outputs = torch.cat([result.outputs for result in fold_predictions], 1)
    order = torch.cat(list(folds.groups)).argsort().to(outputs.device)
    return predictions._replace(outputs=outputs[:, order].double()), prior


class Choice(NamedTuple):
    """Result of :func:`choose_candidate`.

    Args:
        name: Name of the candidate.
        difference: NLL of each candidate minus that of the plain network, and its standard error.
    """

    name: str
    difference: Mapping[str, Difference]


def choose_candidate(nll: Mapping[str, Tensor]) -> Choice:
    """Chooses the mixture unless the NLL of the plain network is lower, or without a mixture the candidate with the lowest NLL.

    If the plain network has a lower NLL than the mixture, the temperature is chosen, because a single parameter can be fitted to
    examples that are too few for the mixture. The plain network is chosen only if its NLL is lower than that of the temperature by
    more than two standard errors. With few errors among the examples, the folds without them have too low a temperature, so that
    cross-validation overestimates the NLL of the temperature of all examples.

    Without a mixture, the plain network is chosen if its NLL is within one standard error of the lowest. The standard error is that of
    the paired difference.

    Args:
        nll: Negative log-likelihoods of all examples, by candidate. It must contain ``"plain"``.

    >>> flat, better = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 1.4, 2.6, 3.5])
    >>> choose_candidate({"plain": flat, "temperature": flat - 0.001 * better, "noise": better}).name
    'noise'
    """
    means = {name: float(values.mean()) for name, values in nll.items()}
    if "mixture" not in means:
        best = min(means, key=means.__getitem__)
        gap = Difference.of(nll["plain"], nll[best])
        best = "plain" if gap.mean <= gap.error else best
    elif means["mixture"] < means["plain"]:
        best = "mixture"
    elif "temperature" not in means:
        best = "plain"
    else:
        gap = Difference.of(nll["temperature"], nll["plain"])
        best = "plain" if gap.mean > 2.0 * gap.error else "temperature"
    return Choice(best, {key: Difference.of(values, nll["plain"]) for key, values in nll.items()})
