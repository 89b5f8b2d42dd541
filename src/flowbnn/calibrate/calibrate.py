"""Calibration of a trained network on held-out data by several calibrators, weighted or chosen by cross-validation.

On training data the likelihood is overconfident, so a more accurate posterior gives worse predictions. Always calibrate on held-out
data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
from torch import nn

from flowbnn.calibrate.cross_validation import (
    SCALINGS,
    Folds,
    Predictions,
    choose_candidate,
    predict_noise,
    predict_plain,
    predict_refit,
    predict_scaled,
)
from flowbnn.calibrate.data_limits import find_limits, warn_unreliable
from flowbnn.calibrate.flow import FlowFit
from flowbnn.calibrate.mixture import predict_mixture
from flowbnn.calibrate.problem import CalibrationProblem, HeldOutData, PriorName, read_held_out
from flowbnn.convert import Rule
from flowbnn.errors import FlowBNNError, nonfinite_error, requirement_error, warn
from flowbnn.likelihoods import Bernoulli, Categorical
from flowbnn.likelihoods.classes import ClassLikelihood
from flowbnn.methods.calibrators.folds import split_folds
from flowbnn.methods.calibrators.label_problems import MIN_EXAMPLES, hard_labels
from flowbnn.methods.calibrators.last_layer import LastLayerProblem, LastLayerRefit
from flowbnn.methods.fit_options import LikelihoodName
from flowbnn.methods.variational.base import FlowName
from flowbnn.metrics import calibration_error
from flowbnn.networks import OutputSelection, copy_network, select_output
from flowbnn.noise import Recipe
from flowbnn.noise.base import check_without_noise
from flowbnn.options import Count, Ge, Positive, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.report import Calibration
from flowbnn.training import History, ProgressBar, is_main_process
from flowbnn.training.progress import terminal

CandidateName = Literal[  # the simplest first
    "plain",
    "temperature",
    "vector",
    "matrix",
    "refit",
    "noise",
    "noise+temperature",
    "noise+matrix",
    "mixture",
]
CANDIDATES: tuple[CandidateName, ...] = get_args(CandidateName)


@checked
def calibrate(
    network: nn.Module,
    held_out: Any,
    *,
    candidates: Sequence[CandidateName] | Literal["auto"] = "auto",
    structure: Literal["auto", "full", "chain", "layers", "factorized"] = "auto",
    prior: Literal["auto", "fitted", "fixed"] = "auto",
    prior_scale: Positive | None = None,
    rules: Mapping[Rule, Recipe | None] | None = None,
    flow: FlowName | Recipe | None = None,
    folds: Literal[0] | Annotated[int, Ge(2)] = 4,
    samples: Count = 64,
    likelihood: LikelihoodName = "auto",
    output: OutputSelection | None = None,
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto",
    seed: Seed = 0,
    progress: bool = True,
) -> Posterior:
    r"""Calibrates a trained network on held-out data, by a mixture of calibrators with weights from cross-validation.

    The candidates are

    * ``"plain"``: the network itself,
    * ``"temperature"``: :class:`~flowbnn.Temperature`,
    * ``"vector"`` and ``"matrix"``: structured :class:`~flowbnn.VectorScaling` and :class:`~flowbnn.MatrixScaling`,
    * ``"refit"``: a refit of the last layer (:class:`~flowbnn.LastLayerRefit`),
    * ``"noise"``: noise in all layers,
    * ``"noise+temperature"`` and ``"noise+matrix"``: noise followed by a scaling,
    * ``"mixture"``: a mixture of all other candidates, with weights fitted by stacking, and a temperature. Members with a weight below
      0.02 are dropped.

    The mixture is returned, unless the plain network has a lower negative log-likelihood (NLL). In this case temperature scaling is
    returned, or the plain network if its NLL is lower than that of temperature scaling by more than two standard errors. Without a
    mixture among the candidates, the one with the lowest NLL is returned, or the plain network if its NLL is within one standard
    error of the lowest. A regression has no mixture. The plain network is also returned, with a warning, if the data cannot calibrate
    it: examples of one class, equal targets, or labels that contradict the network (unless ``folds`` is 0). The caller's network is
    not modified.

    The noise has a Gaussian posterior over all layers. It is fitted to the ELBO by natural gradients
    (:mod:`flowbnn.methods.variational.natural_gradient`), which takes ten to thirty passes over the held-out data and needs no tuning.

    Args:
        network: Trained network. It is copied.
        held_out: Data that the weights were not trained on: a loader of ``(inputs, targets)``, a ``Dataset``, or a pair of tensors or
            arrays. Every pass must give the same examples, in any order.
        candidates: Names of the candidates. ``"auto"`` compares all that the likelihood and the network allow, except
            ``"noise+matrix"``, which is slow. If ``folds`` is 0, it fits the noise only.
        structure: Structure of the covariance of the noise: ``"full"``, a ``"chain"`` of layers (each linear in the previous one),
            independent ``"layers"``, or ``"factorized"``. ``"auto"`` is factorized if there are fewer examples than dimensions, else
            full up to 6,000 dimensions, then a chain, then factorized.
        prior: Prior of the noise. ``"fixed"`` is :math:`\mathcal N(1, \mathrm{scale}^2)`. ``"fitted"`` has a mean and a standard
            deviation for every layer that maximize the ELBO, which helps with few examples. For classes ``"auto"`` is fixed if there
            are more than eight examples for each dimension, else fitted. For a regression it compares both on the first half of the
            folds, and on at least two folds. Each fold uses the prior that is better on the other compared folds. Without folds it is
            fixed if there are more examples than dimensions, else fitted.
        prior_scale: Standard deviation :math:`\mathrm{scale}` of the fixed prior. The default is 0.5.
        rules: Noise of each layer, with its prior, as in :func:`~flowbnn.to_stochastic`. By default all layers get noise with the same
            prior.
        flow: Flow on the noise before the covariance, by name (``"coupling"``, ``"nsf"``, ``"iaf"``, ... as in
            :class:`~flowbnn.NodeNoise`) or as a recipe. It acts on the noise of all layers at once. With ``structure="factorized"``
            every layer has its own flow. It starts at the Gaussian, is trained by the ELBO (:mod:`flowbnn.calibrate.flow`), and is
            dropped if it does not improve the ELBO. Training takes hundreds of steps of 32 passes over the data, so use it for small
            networks or on a GPU.
        folds: Number of folds of the cross-validation. If it is 0, the only candidate is fitted to all data without a comparison.
        samples: Number of samples of the predictions in the cross-validation.
        likelihood: Observation model. ``"auto"`` chooses it by the targets. For a regression, pass the likelihood of the trained
            network (``posterior.likelihood``), which has its noise scale. Otherwise the scale is fitted to the residuals on
            the training folds.
        output: Name, position or function that selects the tensor of outputs, see :func:`~flowbnn.select_output`.
        accelerator: Device type to compute on.
        seed: Seed of all draws.
        progress: If True, shows progress bars and prints the comparison.

    Returns:
        The posterior of the chosen candidate. Its attribute ``calibration`` has the comparison (:class:`Calibration`).

    Raises:
        FlowBNNError: If the network already has noise, returns NaN, or is not supported by the candidates, or if ``rules`` give
            noise that is not Gaussian.

    >>> import flowbnn as fb
    >>> generator = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(300, 2, generator=generator)
    >>> targets = (inputs.sum(1) + torch.randn(300, generator=generator) > 0).long()
    >>> network = fb.models.MLP(2, (16,), 2)
    >>> plain = fb.MLE(epochs=200, lr=0.02).fit(network, [(inputs[:100], targets[:100])], seed=0, progress=False)
    >>> posterior = calibrate(plain.model, [(inputs[100:], targets[100:])], progress=False)
    >>> posterior.calibration.nll[posterior.calibration.choice] < posterior.calibration.nll["plain"]
    True
    """
    _check_arguments(network, prior_scale, rules)
    if output is not None:
        network = select_output(copy_network(network), output)
    data = read_held_out(network, held_out, likelihood, accelerator, seed)
    names = _candidate_names(candidates, folds > 0, data)
    num_folds = (
        min(folds, len(data) // 2) if len(data) >= MIN_EXAMPLES else 0
    )  # a fold has at least two examples
    groups = split_folds(data.targets, num_folds, seed) if num_folds else []
    limits = find_limits(data, groups, folds > 0)

    def make_problem() -> CalibrationProblem:
        return CalibrationProblem(data, rules, flow, prior_scale or 0.5, structure, seed)

    noise_options = {"rules": rules, "flow": flow, "prior_scale": prior_scale}
    arguments = [name for name, value in noise_options.items() if value is not None]
    arguments += [] if structure == "auto" else ["structure"]
    exclude_failures = candidates == "auto"
    search = _CandidateSearch(
        data, Folds(data, groups), make_problem, prior, samples, seed, progress, exclude_failures, arguments
    )
    if limits is not None and (folds > 0 or limits.kind in ("classes", "targets")):
        search.excluded = {name: limits.message for name in names if name not in limits.candidates}
        names = [name for name in names if name in limits.candidates] or ["plain"]
    posterior = search.compare(names) if num_folds else search.fit_without_folds(names)
    report = posterior.calibration = search.report
    warn_unreliable(data, limits, report.choice, report.temperature, search.temperature_bound)
    if progress and (console := terminal()) is not None:
        console.print(str(report), highlight=False)
    return posterior


def _check_arguments(network: nn.Module, prior_scale: float | None, rules: Mapping[Rule, Any] | None) -> None:
    """Raises FlowBNNError if the network already has noise, or if both arguments set the prior."""
    check_without_noise(network, "calibrate")
    if prior_scale is not None and rules is not None:
        text = "prior_scale excludes rules; set prior_scale of each recipe"
        raise FlowBNNError(text, kind="rules", argument="prior_scale")


def _candidate_names(candidates: Sequence[str] | str, folds: bool, data: HeldOutData) -> list[str]:
    """Returns the names of the candidates, the simplest first. With folds the plain network is always one of them.

    Raises:
        FlowBNNError: If a candidate needs classes and the targets are not classes, or if several are compared without folds.
    """
    has_classes = isinstance(data.likelihood, Categorical | Bernoulli)
    need_classes = ("vector", "matrix", "noise+temperature", "noise+matrix", "mixture")
    if candidates == "auto":
        unused = ("noise+matrix",) if has_classes else need_classes  # slow, so only on request
        return [name for name in CANDIDATES if name not in unused] if folds else ["noise"]
    unsuitable = [name for name in candidates if name in need_classes and not has_classes]
    if unsuitable:
        fields = {"kind": "likelihood", "argument": "candidates"}
        raise requirement_error(
            f"candidate '{unsuitable[0]}'", "classes", data.likelihood, "remove it", **fields
        )
    if not folds and len(candidates) != 1:
        text = f"{len(candidates)} candidates need folds; set folds, or one candidate"
        raise FlowBNNError(text, kind="folds", argument="candidates")
    return [name for name in CANDIDATES if name in candidates or (folds and name == "plain")]


@dataclass
class _CandidateSearch:
    """Compares candidates, and fits the best one to all data.

    ``compare`` and ``fit_without_folds`` return the posterior, and set ``report`` and ``temperature_bound``.

    Args:
        data: Network and held-out data.
        folds: Folds of the data.
        make_problem: Function that adds noise to the network.
        prior: Prior of the noise, or ``"auto"``.
        samples: Number of samples of the predictions.
        seed: Seed of the folds of a refit.
        progress: If True, shows progress bars.
        exclude_failures: If True, a candidate that does not support the network is excluded. Otherwise its error is raised.
        noise_arguments: Arguments about the noise that the caller has set. Errors about them are raised.
    """

    data: HeldOutData
    folds: Folds
    make_problem: Callable[[], CalibrationProblem]
    prior: Literal["auto", "fitted", "fixed"]
    samples: int
    seed: int
    progress: bool
    exclude_failures: bool
    noise_arguments: Sequence[str]
    predictions: dict[str, Predictions] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    problem: CalibrationProblem | None = None
    chosen_prior: str = ""
    flow_fit: FlowFit | None = None
    report: Calibration = field(default_factory=lambda: Calibration("plain"))
    temperature_bound: str = ""

    def compare(self, names: Sequence[str]) -> Posterior:
        """Returns the posterior of the best candidate, and sets the report."""
        visible = self.progress and is_main_process()
        with ProgressBar(
            "calibrating", len(names) + 1, unit="candidate", equal_steps=False, visible=visible
        ) as bar:
            for index, name in enumerate(names):
                bar.update(index, label=f"calibrating: {name}")
                self._predict(name)
            # per label, like the metrics; a common factor does not change the choice
            per_label = {
                name: prediction.nll / self.data.num_positions
                for name, prediction in self.predictions.items()
            }
            choice = choose_candidate(per_label)
            bar.update(len(names), label=f"calibrating: {choice.name}, all data")
            posterior = self.predictions[choice.name].finish()
        has_classes = any(prediction.probabilities is not None for prediction in self.predictions.values())
        targets = hard_labels(self.data.targets) if has_classes else self.data.targets
        self._write_report(
            choice.name,
            nll={name: float(values.mean()) for name, values in per_label.items()},
            ece={
                name: calibration_error(prediction.probabilities, targets)
                for name, prediction in self.predictions.items()
                if prediction.probabilities is not None
            },
            difference=dict(choice.difference),
        )
        return posterior

    def fit_without_folds(self, names: Sequence[str]) -> Posterior:
        """Returns the posterior of the only candidate."""
        (name,) = names
        all_rows = torch.arange(len(self.data))
        if name == "plain":
            posterior: Posterior = self.data.point_posterior(all_rows)
        elif name == "noise":
            problem = self.problem = self.make_problem()
            posterior = self._fit_noise(problem.default_prior if self.prior == "auto" else self.prior)
        elif name == "refit":
            point, batches = self.data.point_posterior(all_rows), self.data.batches(all_rows)
            posterior = LastLayerRefit().fit_problem(LastLayerProblem.read(point, batches), self.seed)
        elif name in ("temperature", "vector", "matrix"):
            outputs = self.data.outputs.double()[None]
            point = self.data.point_posterior(all_rows)
            posterior = SCALINGS[name].calibrate_outputs(point, outputs, self.data.targets)
        else:
            text = f"candidate '{name}' needs folds; set folds"
            raise FlowBNNError(text, kind="folds", argument="folds")
        self._write_report(name)
        return posterior

    def _predict(self, name: str) -> None:
        """Adds the predictions of one candidate, or the reason why it has none."""
        try:
            if name == "plain":
                result = predict_plain(self.folds)
            elif name == "refit":
                result = predict_refit(self.folds)
            elif name == "noise":
                result = self._predict_noise()
            elif name.startswith("noise+"):
                inner = self.predictions.get("noise")
                if inner is None and "noise" not in self.excluded:
                    inner = self._predict_noise()
                if inner is None:
                    self.excluded[name] = "noise is excluded"
                    return
                result = predict_scaled(self.folds, name.removeprefix("noise+"), inner)
            elif name == "mixture":
                if len(self.predictions) < 3:
                    self.excluded[name] = "it needs two other fitted candidates"
                    return
                result = predict_mixture(self.folds, self.predictions)
            else:
                result = predict_scaled(self.folds, name)
        except FlowBNNError as error:
            self._exclude(name, error)
            return
        if not bool(result.nll.isfinite().all()):
            fields: dict[str, Any] = {"kind": "not finite", "argument": "network"}
            finite = result.nll.isfinite()
            self._exclude(name, nonfinite_error("the likelihood", finite, "check the network", **fields))
            return
        self.predictions[name] = result

    def _exclude(self, name: str, error: FlowBNNError) -> None:
        """Excludes a candidate that failed. Errors of the plain network and errors about arguments of the caller are raised."""
        if name == "plain" or not self.exclude_failures or error.argument in self.noise_arguments:
            raise error
        self.excluded[name] = str(error)
        if name == "noise":
            warn(f"noise not compared: {error}", **{**error.fields, "kind": "excluded", "candidate": name})

    def _predict_noise(self) -> Predictions:
        """Returns the predictions of the noise, and sets its prior."""
        self.problem = self.make_problem()
        priors: list[PriorName]
        if self.prior != "auto":
            priors = [self.prior]
        elif isinstance(self.data.likelihood, ClassLikelihood):
            priors = [self.problem.default_prior]
        else:
            priors = ["fixed", "fitted"]
        result, prior = predict_noise(
            self.problem, self.folds, priors, self.samples, self.progress, self._fit_noise
        )
        self.chosen_prior = prior
        return result

    def _fit_noise(self, prior: PriorName) -> Posterior:
        """Returns the posterior of the noise for all examples."""
        assert self.problem is not None
        all_rows = torch.arange(len(self.data))
        visible = self.progress and is_main_process()
        with ProgressBar("noise, all data", unit="pass", visible=visible) as bar:
            fit = self.problem.fit_gaussian(
                all_rows,
                prior,
                callback=lambda number, elbo: bar.update(number, values=[f"ELBO {elbo:.4g}"]),
            )
        posterior, self.flow_fit = self.problem.make_posterior(fit, all_rows, self.progress)
        posterior.history = History([{"elbo": value / len(self.data)} for value in fit.trace])
        self.chosen_prior = prior
        if not fit.converged:
            text = f"the ELBO did not converge in {len(fit.trace)} passes; decrease prior_scale, or use fb.Temperature"
            warn(text, kind="convergence")
        return posterior

    def _write_report(self, choice: str, **scores: Any) -> None:
        """Sets the report."""
        fit = self.data.fit_temperature(torch.arange(len(self.data)))
        flow, problem = self.flow_fit, self.problem
        self.temperature_bound = fit.bound
        self.report = Calibration(
            choice,
            **scores,
            excluded=self.excluded,
            folds=len(self.folds.groups),
            examples=len(self.data),
            temperature=fit.temperature,
            dimensions=0 if problem is None else problem.dim,
            structure="" if problem is None else problem.structure,
            prior=self.chosen_prior,
            flow=None if flow is None else flow.label,
            flow_gain=None if flow is None else flow.gain,
            flow_error=None if flow is None else flow.error,
        )
