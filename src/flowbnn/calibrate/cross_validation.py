"""Cross-validation of a calibrated network against the network without noise and temperature scaling."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowbnn.calibrate.problem import CalibrationProblem, PriorName
from flowbnn.metrics import calibration_error
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import CategoricalPredictive
from flowbnn.training.progress import track


@dataclass(frozen=True)
class Scores:
    """Held-out scores of ``"plain"``, ``"temperature"`` and ``"calibrated"``. They are empty without cross-validation.

    Args:
        prior: Prior of the calibrated network.
        nll: Mean negative log-likelihood (NLL) of each method.
        ece: Expected calibration error of each method. Empty for a regression.
        gain: Mean NLL of temperature scaling minus the mean NLL of the calibrated network.
        error: Standard error of the gain.
    """

    prior: PriorName
    nll: dict[str, float] = field(default_factory=dict)
    ece: dict[str, float] = field(default_factory=dict)
    gain: float | None = None
    error: float | None = None


def cross_validate(
    problem: CalibrationProblem, priors: Sequence[PriorName], folds: int, samples: int, progress: bool
) -> Scores:
    """Runs K-fold cross-validation.

    Args:
        problem: Network and held-out data.
        priors: Priors to choose from. The better one on the first fold is used from then on.
        folds: Number of folds.
        samples: Number of samples of a prediction.
        progress: If True, shows a progress bar.
    """
    prior, predictions = predict_folds(problem, priors, folds, samples, progress)
    nll = {name: torch.cat(prediction.nll) for name, prediction in predictions.items()}
    gain = nll["temperature"] - nll["calibrated"]
    return Scores(
        prior=prior,
        nll={name: float(values.mean()) for name, values in nll.items()},
        ece={
            name: calibration_error(torch.cat(prediction.probabilities), torch.cat(prediction.targets))
            for name, prediction in predictions.items()
            if prediction.probabilities
        },
        gain=float(gain.mean()),
        error=float(gain.std() / len(gain) ** 0.5),
    )


@dataclass
class FoldPredictions:
    """Predictions of one method for the held-out examples of each fold.

    Args:
        nll: Negative log-likelihoods of the examples, one tensor for each fold.
        probabilities: Class probabilities ``[B, C]``, one tensor for each fold. Empty for a regression.
        targets: Targets, one tensor for each fold.
    """

    nll: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


def predict_folds(
    problem: CalibrationProblem, priors: Sequence[PriorName], folds: int, samples: int, progress: bool
) -> tuple[PriorName, dict[str, FoldPredictions]]:
    """Predicts every fold by methods that are fitted to the other folds.

    Args:
        problem: Network and held-out data.
        priors: Priors to choose from. The better one on the first fold is used from then on.
        folds: Number of folds.
        samples: Number of samples of a prediction.
        progress: If True, shows a progress bar.

    Returns:
        The prior, and the predictions of ``"plain"``, ``"temperature"`` and ``"calibrated"``.
    """
    order = torch.randperm(len(problem.data), generator=torch.Generator().manual_seed(problem.seed))
    predictions: dict[str, FoldPredictions] = defaultdict(FoldPredictions)
    for fold in track(range(folds), "cross-validation", progress):
        training = torch.cat([order[other::folds] for other in range(folds) if other != fold])
        inputs, targets = problem.data.select(order[fold::folds])
        for name, posterior in _fit_methods(problem, priors, training).items():
            predictive = posterior.predict(inputs, samples, seed=problem.seed, progress=False)
            predictions[name].nll.append(predictive.nll(targets).double().cpu())
            predictions[name].targets.append(targets)
            if isinstance(predictive, CategoricalPredictive):
                predictions[name].probabilities.append(predictive.probabilities)
        priors = [min(priors, key=lambda prior: float(predictions[prior].nll[0].mean()))]
    (prior,) = priors
    names = {"plain": "plain", "temperature": "temperature", "calibrated": prior}
    return prior, {name: predictions[key] for name, key in names.items()}


def _fit_methods(
    problem: CalibrationProblem, priors: Sequence[PriorName], training: Tensor
) -> dict[str, Posterior]:
    """Fits the baselines, and the calibrated network with each prior, to the training folds.

    The first fit does not start from the fit to all examples, which has seen the held-out fold. The fit with the second prior starts
    from the first.
    """
    posteriors: dict[str, Posterior] = {
        "plain": problem.point_estimate(training),
        "temperature": problem.scale_temperature(training),
    }
    start = None
    for prior in priors:
        fit = problem.fit_gaussian(training, prior, start)
        posteriors[prior], _ = problem.make_posterior(fit, training)
        start = fit.gaussian
    return posteriors
