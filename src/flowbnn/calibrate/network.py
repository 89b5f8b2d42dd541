"""A trained network and data that it has not seen give a calibrated Bayesian network: its noise is fitted, its weights stay.

On data that the weights have memorised, a better posterior of the noise is more wrong, since the likelihood that it believes in is. On
data that they have not seen it predicts better.
"""

import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import copy_network, device_of, dtype_of, move, pick, take
from flowbnn.calibrate.flow import fit_flow
from flowbnn.convert import Rule, to_stochastic
from flowbnn.diagnostics.fixed_data import check_row_independence, read_fixed_data
from flowbnn.distributions import NormalBase
from flowbnn.errors import FlowBNNError, FlowBNNWarning, pluralize, warn
from flowbnn.likelihoods import Gaussian, Likelihood, learns_noise
from flowbnn.methods.fitting import prepare
from flowbnn.methods.temperature import TemperedPosterior, temper
from flowbnn.methods.variational.base import FLOWS, FlowName
from flowbnn.methods.variational.block_gaussian import BlockGaussian
from flowbnn.methods.variational.natural import PASSES, NaturalFit, NoisyNetwork, Structure, fit_gaussian
from flowbnn.metrics import calibration_error
from flowbnn.noise import Noise, NormalAffine, Recipe, noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import DENSE, check_size, independent_vectors
from flowbnn.noise.modes import align_batch_axes
from flowbnn.options import Count, Ge, Positive, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.calibration import Calibration
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.regression import fit_residual_scale
from flowbnn.training.device import device_kind
from flowbnn.training.progress import History, terminal, track
from flowbnn.training.randomness import temporary_seed

FEW = 20  # held-out examples
ROWS = 256  # that go through the plain network at once
Prior = Literal["fitted", "fixed"]


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
    r"""Fit the noise of a trained network, its weights untouched, to data that the weights have not seen.

    The posterior is one Gaussian over the noise of all layers, fitted by natural gradients to the ELBO
    (:mod:`flowbnn.methods.variational.natural`): ten to thirty passes over the held-out data, nothing to tune.

    Args:
        network: trained; it is copied.
        held_out: batches of ``(inputs, targets)``, or one pair of all, that the weights were not trained on, as for temperature
            scaling; the same ones in every pass, in any order.
        structure: of the covariance: ``"full"``, a ``"chain"`` of layers (each linear in the one before), independent ``"layers"``, or
            ``"factorized"``. ``"auto"``: full up to 6,000 dimensions, else a chain, else factorized.
        prior: of the noise: ``"fixed"``, :math:`\mathcal N(1, \mathrm{scale}^2)`; ``"fitted"``, with a mean and a width for every
            layer that maximise the ELBO, which few examples need; ``"auto"``, the better one on the first fold, or, without folds,
            fixed where there are more examples than dimensions.
        prior_scale: :math:`\mathrm{scale}`, 0.5 unless given.
        rules: which layers get noise, and under which priors, as in :func:`~flowbnn.to_stochastic`; all, under the same prior,
            unless given.
        flow: on the noise before its covariance, by its name (``"coupling"``, ``"nsf"``, ``"iaf"``, ... as in
            :class:`~flowbnn.NodeNoise`) or as a recipe: on all layers' noise at once, or with ``structure="factorized"`` on every
            layer's own. It begins at the Gaussian, is trained by the ELBO (:mod:`flowbnn.calibrate.flow`), and is left out where it
            does not raise it; hundreds of steps of 32 passes over the data each, so for small networks or a GPU.
        folds: of the cross-validation that compares the result with the plain network and with temperature scaling; 0 leaves it
            out.
        samples: of the predictions in it.
        likelihood: observation model; found from the targets. Of a regression, give that of the trained network, which has its noise
            level (``posterior.likelihood``); where it is not known, the comparison takes the size of the plain network's residuals on
            the examples that are not left out.
        accelerator: where to compute.
        seed: of all draws.
        progress: show what is going on, and the comparison at the end.

    Returns:
        A posterior that predicts. Its ``calibration`` (:class:`Calibration`) has the comparison, its ``history`` the ELBO.

    >>> import flowbnn as fb
    >>> source = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(300, 2, generator=source)
    >>> targets = (inputs.sum(1) + torch.randn(300, generator=source) > 0).long()
    >>> network = fb.models.MLP(2, (16,), 2)
    >>> plain = fb.MLE(epochs=200, lr=0.02).fit(network, [(inputs[:100], targets[:100])], seed=0, progress=False)
    >>> posterior = calibrate(plain.model, [(inputs[100:], targets[100:])], progress=False)
    >>> posterior.calibration.nll["calibrated"] < posterior.calibration.nll["plain"]
    True
    """
    if noise_layers(network):
        raise FlowBNNError(
            "this network has noise already; calibrate takes the plain one, which fb.to_deterministic gives back",
            kind="network",
            argument="network",
        )
    if prior_scale is not None and rules is not None:
        raise FlowBNNError(
            "the width of the prior is given twice: leave out prior_scale, the rules have their own",
            kind="rules",
            argument="prior_scale",
        )
    data = read_fixed_data(held_out, seed, "calibration")
    plain = copy_network(network).to(_device(network, accelerator)).eval()
    plain.requires_grad_(False)
    batches = [take(data, low, low + ROWS) for low in range(0, len(data[1]), ROWS)]
    chosen, first, check = prepare(plain, batches, likelihood, seed, trains=False)
    check(data)
    inputs, targets = move(data, device_of(plain), dtype_of(plain))
    targets = chosen.canonical(targets).to(device_of(plain))
    fresh = learns_noise(chosen) and not (
        isinstance(likelihood, Gaussian) and bool(likelihood.log_scale.any())
    )
    work = _Work(
        plain,
        chosen,
        inputs,
        targets,
        rules,
        flow,
        prior_scale or 0.5,
        structure,
        samples,
        seed,
        first,
        not fresh,
    )
    folds = min(folds, len(targets) // 2) if len(targets) >= 4 else 0
    if len(targets) < FEW:
        warn(
            f"calibration is hard to tell by {pluralize(len(targets), 'held-out example')}; give at least {FEW}",
            kind="examples",
        )
    kinds: list[Prior] = ["fixed", "fitted"] if prior == "auto" else [prior]
    if not folds and prior == "auto":
        kinds = ["fixed" if len(targets) > work.dim else "fitted"]
    everything = torch.arange(len(targets))
    result = work.fit(everything, kinds[0])
    report: dict[str, Any] = {"nll": {}, "ece": {}, "gain": None, "error": None}
    if folds:
        result, scores, errors = work.cross_validate(kinds, result, folds, progress)
        names = {"plain": "plain", "temperature": "temperature", "calibrated": kinds[0]}
        difference = scores["temperature"] - scores[kinds[0]]
        report = {
            "nll": {name: float(scores[key].mean()) for name, key in names.items()},
            "ece": {name: errors[key] for name, key in names.items() if key in errors},
            "gain": float(difference.mean()),
            "error": float(difference.std() / len(difference) ** 0.5),
        }
    posterior, fitted_flow = work.flowed(result, everything, progress)
    if not result.settled:
        warn(
            f"the ELBO has not settled after {PASSES} passes over the held-out data, so the noise is not what it asks for: are the "
            "network's outputs very large? A narrower prior_scale is easier to fit, and temperature scaling needs none",
            kind="settled",
        )
    temperature = work.tempered(everything).temperature
    posterior.calibration = Calibration(
        **report,
        folds=folds,
        examples=len(targets),
        dimensions=work.dim,
        structure=work.structure,
        prior=kinds[0],
        temperature=temperature,
        **fitted_flow,
    )
    posterior.history = History([{"elbo": value / len(targets)} for value in result.trace])
    if not isinstance(chosen, Gaussian):  # whose noise level tells nothing of other data
        _warn_of_memory(temperature)
    if progress and (console := terminal()) is not None:
        console.print(str(posterior.calibration), highlight=False)
    return posterior


def _device(network: nn.Module, accelerator: str) -> torch.device:
    kind = device_kind(accelerator)
    own = device_of(network)
    return own if own.type == kind else torch.device(kind)


def _warn_of_memory(temperature: float) -> None:
    """A network is sure of itself where it was trained, and rightly so: data that ask for a lower temperature are those."""
    if temperature < 0.8 or temperature == 1.0:  # the latter where all are predicted right
        why = "are all predicted right, as those that the weights were trained on often are"
        if temperature < 0.8:
            why = (
                f"ask for a temperature of {temperature:.2f}, as those that the weights were trained on do (or fresh ones, where the "
                "training was short or strongly regularised)"
            )
        warn(
            f"the held-out data {why}. If the weights have seen them, noise that is fitted to them is over-confident: give "
            "data that the weights have not seen; without any, train one network for each fold of the data on the other folds, "
            "calibrate it on its own fold, and average their predictions",
            kind="memorised",
            temperature=temperature,
        )


class _Work:
    """The network, the held-out data, and what is fitted to parts of them."""

    def __init__(
        self,
        plain: nn.Module,
        likelihood: Likelihood,
        inputs: Any,
        targets: Tensor,
        rules: Mapping[Rule, Recipe | None] | None,
        flow: str | Recipe | None,
        scale: float,
        structure: str,
        samples: int,
        seed: int,
        first: Any,
        knows_level: bool,
    ) -> None:
        self.plain, self.likelihood, self.inputs, self.targets = plain, likelihood, inputs, targets
        self.samples, self.seed, self.knows_level = samples, seed, knows_level
        everywhere: dict[Rule, Recipe | None] = {"*": NormalAffine(prior_scale=scale)}
        self.rules = _without(everywhere if rules is None else rules, joint=None)
        self.first = first
        model = self._noisy(self.rules)
        layers = noise_layers(model)
        for name, noise in layers.items():
            if not _is_gaussian(noise):
                raise FlowBNNError(
                    f"calibrate fits a Gaussian under a normal prior, not {noise.label} of layer '{name}'; give rules of "
                    "NormalAffine() without components, prior_df, base_df and site='position'",
                    kind="rules",
                    argument="rules",
                    layer=name,
                )
        sizes = [noise.layout.dim for noise in layers.values()]
        self.structure: Structure = structure_for(structure, sizes)
        self.loc, self.scale = (
            torch.cat([getattr(noise.prior, name) for noise in layers.values()]) for name in ("loc", "scale")
        )
        if self.structure != "factorized":  # layers whose priors differ are joined all the same
            self.rules = _without(self.rules, prior_loc=1.0, prior_scale=scale, base_loc=1.0, base_scale=0.1)
            model = self._noisy(self.rules, self.structure)
            if len(independent_vectors(model)) > 1:
                raise FlowBNNError(
                    f"structure='{self.structure}' joins layers of one kind of noise, and the rules have several; let them differ in "
                    "their priors only, or take structure='factorized'",
                    kind="rules",
                    argument="rules",
                )
        self.model, self.dim, self.with_flow = model, sum(sizes), None
        check_row_independence(NoisyNetwork(model, likelihood), inputs)
        if flow is not None:
            recipe = flow if isinstance(flow, Recipe) else FLOWS[flow]()
            if type(recipe).transforms is Recipe.transforms:
                raise FlowBNNError(
                    f"{recipe} has no flow to lie on the Gaussian; take flow='nsf' or fb.noise.NormalPlanar(), or leave flow out",
                    argument="flow",
                )
            shared = [field.name for field in fields(Recipe)]
            rules = {
                rule: None
                if own is None
                else replace(recipe, **{name: getattr(own, name) for name in shared})
                for rule, own in self.rules.items()
            }
            with temporary_seed(seed):
                self.with_flow = self._noisy(rules, self.structure)

    def _noisy(self, rules: Mapping[Rule, Recipe | None], structure: Structure = "factorized") -> nn.Module:
        """The network with this noise, its axes of the examples found."""
        model = to_stochastic(self.plain, rules, joint=None if structure == "factorized" else structure)
        align_batch_axes(model, self.first)
        return model

    def fit(self, index: Tensor, prior: Prior, start: BlockGaussian | None = None) -> NaturalFit:
        """The Gaussian for these examples, from where it begins."""
        return fit_gaussian(
            self.model,
            self.point(index).likelihood,
            *self._some(index),
            self.structure,
            prior=prior,
            loc=self.loc,
            scale=self.scale,
            start=start,
            seed=self.seed,
        )

    def flowed(
        self, result: NaturalFit, index: Tensor, show: bool = False
    ) -> tuple[NoisePosterior, dict[str, Any]]:
        """The network with this posterior, or with a flow on it that is better for these examples; and what the flow gains."""
        gaussian = self.posterior(result)
        if self.with_flow is None:
            return gaussian, {}
        flow = self.posterior(result, self.with_flow)
        fit = fit_flow(gaussian, flow, *self._some(index), seed=self.seed, show=show)
        label = independent_vectors(flow.model)[0][0].label if fit.better else None
        return fit.posterior, {"flow": label, "flow_gain": fit.gain, "flow_error": fit.error}

    @torch.no_grad()
    def posterior(self, result: NaturalFit, model: nn.Module | None = None) -> NoisePosterior:
        """The network with this posterior, whatever flow its noise has left as it is."""
        q, low = result.gaussian, 0
        model = deepcopy(self.model if model is None else model)
        deviation = q.variances().sqrt()
        for vector, _ in independent_vectors(model):
            part = slice(low, low + vector.layout.dim)
            low = part.stop
            roots = [deviation[part]] if self.structure == "factorized" else q.roots
            vector.set_gaussian(q.mean[part], roots, q.maps)
            assert isinstance(vector.prior, NormalBase)
            vector.prior.loc.copy_(q.loc[part])
            vector.prior.scale.copy_(q.variance[part].sqrt())
        for layer in noise_layers(model).values():
            layer.fitted = True
        return NoisePosterior(model, result.likelihood)

    def point(self, index: Tensor) -> PointPosterior:
        """The plain network, with the noise level that it was given, or with the size of its residuals at these examples."""
        likelihood = deepcopy(self.likelihood)
        if not self.knows_level:
            fit_residual_scale(self.plain, likelihood, self._batches(index))
        return PointPosterior(self.plain, likelihood)

    def tempered(self, index: Tensor) -> TemperedPosterior:
        """The plain network with the temperature for these examples."""
        # of data that are all predicted right, which calibrate tells once and for all of them
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FlowBNNWarning)
            return temper(self.point(index), self._batches(index), progress=False)

    def _batches(self, index: Tensor) -> list[tuple[Any, Tensor]]:
        return [self._some(part) for part in index.split(ROWS)]

    def _some(self, index: Tensor) -> tuple[Any, Tensor]:
        index = index.to(self.targets.device)
        return pick(self.inputs, index), self.targets[index]

    def cross_validate(
        self, kinds: list[Prior], whole: NaturalFit, folds: int, show: bool
    ) -> tuple[NaturalFit, dict[str, Tensor], dict[str, float]]:
        """The fit to all examples, and of all that is compared the examples' negative log-likelihoods, each left out once, and
        calibration errors.

        The fit to a part begins afresh: one that began at ``whole``, of the first kind of prior, would know of what is left out. Of
        several kinds the one that is better on the first fold remains in ``kinds``.
        """
        order = torch.randperm(len(self.targets), generator=torch.Generator().manual_seed(self.seed))
        losses: dict[str, list[Tensor]] = {}
        probabilities: dict[str, list[Tensor]] = {}
        truth: list[Tensor] = []
        for number in track(range(folds), "cross-validation", show):
            out = order[number::folds]
            kept = torch.cat([order[other::folds] for other in range(folds) if other != number])
            inputs, targets = self._some(out)
            rivals: dict[str, Posterior] = {"plain": self.point(kept), "temperature": self.tempered(kept)}
            start: BlockGaussian | None = None
            for kind in kinds:  # the first one is that of the whole
                part = self.fit(kept, kind, start)
                rivals[kind], start = self.flowed(part, kept)[0], part.gaussian
            truth.append(targets)
            for name, rival in rivals.items():
                predictive = rival.predict(inputs, self.samples, seed=self.seed, progress=False)
                losses.setdefault(name, []).append(predictive.nll(targets).double().cpu())
                if hasattr(predictive, "probabilities"):
                    probabilities.setdefault(name, []).append(predictive.probabilities)
            if len(kinds) > 1:  # the prior is chosen on the first fold
                best = min(kinds, key=lambda kind: float(losses[kind][0].mean()))
                if best != kinds[0]:
                    whole = self.fit(torch.arange(len(order)), best, whole.gaussian)
                kinds[:] = [best]
        errors = {
            name: float(calibration_error(torch.cat(some), torch.cat(truth)))
            for name, some in probabilities.items()
            if some[0].ndim == 2 and len(some) == folds
        }
        return whole, {name: torch.cat(some) for name, some in losses.items()}, errors


def _is_gaussian(noise: Noise) -> bool:
    """Whether the noise of a layer is one vector, with a learnable Gaussian as posterior and a normal prior."""
    if not isinstance(noise, InputNoise) or noise.site != "channel":
        return False
    normal = isinstance(noise.base, NormalBase) and isinstance(noise.prior, NormalBase)
    return normal and noise.start is not None and not noise.rest


def _without(rules: Mapping[Rule, Recipe | None], **given: Any) -> dict[Rule, Recipe | None]:
    """The rules with these settings in place of their own."""
    return {rule: None if own is None else replace(own, **given) for rule, own in rules.items()}


def structure_for(asked: Any, sizes: list[int]) -> Structure:
    """The richest structure that fits, or the one asked for; one that cannot be is refused.

    >>> structure_for("auto", [500, 400]), structure_for("auto", [5000, 4000]), structure_for("auto", [25_088])
    ('full', 'chain', 'factorized')
    """
    if asked != "auto":
        if asked != "factorized":
            check_size(asked, sizes, "structure", width=8)
        return asked
    return "full" if sum(sizes) <= DENSE else "chain" if max(sizes) <= DENSE else "factorized"
