"""The network, the held-out data and the noise of a calibration, and the posteriors that are fitted to subsets of the data."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    check_finite_batch,
    device_of,
    join_padded,
    move_data,
    pick,
    split_batch,
    take,
)
from flowbnn.calibrate.flow import FlowFit, fit_flow
from flowbnn.convert import Rule, to_stochastic
from flowbnn.data.formats import as_loader, columns_of
from flowbnn.diagnostics.fixed_data import check_row_independence, read_fixed_data
from flowbnn.distributions import NormalBase
from flowbnn.errors import FlowBNNError, requirement_error
from flowbnn.likelihoods import Gaussian, Likelihood, learns_noise
from flowbnn.likelihoods.classes import ClassLikelihood
from flowbnn.methods.calibrators.log_temperature import (
    TemperatureFit,
    fit_temperatures,
    supports_temperature,
)
from flowbnn.methods.fit_options import FitOptions
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.base import FLOWS
from flowbnn.methods.variational.block_gaussian import BlockGaussian
from flowbnn.methods.variational.natural_gradient import NaturalFit, Structure, fit_gaussian
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.metrics.checks import IGNORED
from flowbnn.networks import copy_network, deepcopy_network, evaluation_mode, input_columns, set_input_columns
from flowbnn.noise import Noise, NormalAffine, Recipe, noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.inspection import check_called, remove_noise_without_gradient, warn_idle
from flowbnn.noise.joint import MAX_DENSE_DIM, check_size, independent_vectors
from flowbnn.noise.modes import align_batch_axes
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.weights import PointPosterior
from flowbnn.regression import set_noise_scale
from flowbnn.training.device import move_to_accelerator
from flowbnn.training.randomness import preserve_rng_state, temporary_seed

BATCH_SIZE = 256  # rows of a forward pass of the network without noise
PriorName = Literal["fitted", "fixed"]
Rules = Mapping[Rule, Recipe | None]


@dataclass(frozen=True, eq=False)
class HeldOutData:
    """A trained network and the data to calibrate it on, on the same device.

    Args:
        network: Trained network with fixed weights, in evaluation mode.
        inputs: Inputs of all examples.
        targets: Targets of all examples.
        likelihood: Observation model.
        scale_is_known: If True, the likelihood already has a noise scale. Otherwise, the scale is fitted to residuals.
        whole_batches: Inputs of each batch, if rows of the inputs cannot be selected, as those of graphs and of batches with different
            lengths. Only candidates that need no more than the outputs of the network are then possible.
        refusal: Error of all other candidates in that case.
    """

    network: nn.Module
    inputs: Any
    targets: Tensor
    likelihood: Likelihood
    scale_is_known: bool = True
    whole_batches: Sequence[Any] = ()
    refusal: FlowBNNError | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs of the network without noise, ``[N, ...]``."""
        with evaluation_mode(self.network), torch.no_grad():
            starts = range(0, len(self), BATCH_SIZE)
            batches = self.whole_batches or [take(self.inputs, low, low + BATCH_SIZE) for low in starts]
            return join_padded([call(self.network, batch) for batch in batches])

    @property
    def num_positions(self) -> float:
        """Mean number of labels of an example, which is above 1 for pixels, tokens and several labels."""
        if not isinstance(self.likelihood, ClassLikelihood):
            return 1.0
        if self.targets.is_floating_point():
            return self.targets[..., 0].numel() / len(self)
        return int((self.targets != IGNORED).sum()) / len(self)

    def point_posterior(self, indices: Tensor) -> PointPosterior:
        """Returns the network without noise. An unknown noise scale is fitted to the residuals of these examples."""
        likelihood = deepcopy(self.likelihood)
        if not self.scale_is_known:
            assert isinstance(likelihood, Gaussian)
            indices = indices.to(self.targets.device)
            with torch.no_grad():
                set_noise_scale(likelihood, [(self.outputs[indices], self.targets[indices])])
        return PointPosterior(self.network, likelihood)

    def fit_temperature(self, indices: Tensor) -> TemperatureFit:
        """Fits a temperature to these examples. It is 1 for likelihoods without a temperature, such as counts."""
        posterior, indices = self.point_posterior(indices), indices.to(self.targets.device)
        outputs = self.outputs[indices].double()[None]
        if not supports_temperature(posterior._predictive(outputs[:, :1])):
            return TemperatureFit(1.0, "")
        (fit,) = fit_temperatures(posterior, outputs, self.targets[indices])
        return fit

    def check_rows(self) -> None:
        """Raises FlowBNNError if rows of the inputs cannot be selected."""
        if self.refusal is not None:
            raise self.refusal

    def select(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Returns the inputs and targets of the examples with these indices."""
        self.check_rows()
        indices = indices.to(self.targets.device)
        return pick(self.inputs, indices), self.targets[indices]

    def batches(self, indices: Tensor) -> list[tuple[Any, Tensor]]:
        """Returns batches of the examples with these indices."""
        return [self.select(batch) for batch in indices.split(BATCH_SIZE)]


def read_held_out(
    network: nn.Module,
    held_out: Any,
    likelihood: Any,
    accelerator: str,
    seed: int,
) -> HeldOutData:
    """Reads the held-out data, chooses the likelihood, and copies the network to the device.

    Args:
        network: Trained network.
        held_out: Data of any format.
        likelihood: Observation model, or its name.
        accelerator: Device type to compute on.
        seed: Seed of the generators of the loader.
    """
    held_out = as_loader(held_out, stage="validation", columns=input_columns(network))
    data, whole_batches, refusal = None, list[Any](), None
    try:
        data = read_fixed_data(held_out, seed, "calibration")
        batches = [take(data, low, low + BATCH_SIZE) for low in range(0, len(data[1]), BATCH_SIZE)]
    except FlowBNNError as error:
        if error.kind not in ("rows", "lengths"):
            raise
        refusal, batches = error, _read_batches(held_out, seed)
    network = set_input_columns(copy_network(network), columns_of(held_out))
    network = move_to_accelerator(network, accelerator).eval().requires_grad_(False)
    prepared = prepare(network, batches, FitOptions(likelihood=likelihood, seed=seed), trained=False)
    prepared_likelihood = prepared.likelihood
    for batch in [data] if data is not None else batches:
        prepared.check_batch(batch)
    if data is not None:
        inputs, targets = move_data(data, network)
    else:
        inputs, parts = None, [move_data(batch, network) for batch in batches]
        whole_batches = [batch for batch, _ in parts]
        ignored = getattr(prepared_likelihood, "ignore_index", IGNORED)
        targets = join_padded([values for _, values in parts], fill=ignored)
    targets = prepared_likelihood.canonical_targets(targets).to(device_of(network))
    scale_is_known = not learns_noise(prepared_likelihood) or (
        isinstance(likelihood, Gaussian) and bool(likelihood.log_scale.any())
    )
    return HeldOutData(network, inputs, targets, prepared_likelihood, scale_is_known, whole_batches, refusal)


def _read_batches(held_out: Any, seed: int) -> list[tuple[Any, Tensor]]:
    """Returns the inputs and targets of all batches of a loader, and restores its generators."""
    batches = []
    with preserve_rng_state(held_out, seed):
        for number, batch in enumerate(held_out):
            check_finite_batch(batch, None, number)
            batches.append(split_batch(batch))
    return batches


class CalibrationProblem:
    """Fits posteriors of noise to subsets of the held-out data.

    Args:
        data: Network and held-out data.
        rules: Noise of each layer, or None for Gaussian noise in all layers.
        flow: Flow on the noise, by name or as a recipe, or None.
        prior_scale: Standard deviation of the prior if ``rules`` is None.
        structure: Structure of the covariance, or ``"auto"``.
        seed: Seed of all draws.

    Raises:
        FlowBNNError: If the rules give noise that is not Gaussian, or if the flow has no transform.
    """

    def __init__(
        self,
        data: HeldOutData,
        rules: Rules | None = None,
        flow: str | Recipe | None = None,
        prior_scale: float = 0.5,
        structure: str = "auto",
        seed: int = 0,
    ) -> None:
        data.check_rows()
        self.data, self.seed = data, seed
        rules = {"*": NormalAffine(prior_scale=prior_scale)} if rules is None else rules
        self.rules = self._exclude_idle_layers(_update_rules(rules, joint=None))
        layers = noise_layers(self._add_noise(self.rules))
        for name, noise in layers.items():
            _check_gaussian(name, noise)
        sizes = [noise.layout.dim for noise in layers.values()]
        self.dim = sum(sizes)
        self.structure = choose_structure(structure, sizes, len(data))
        self.loc, self.scale = (
            torch.cat([getattr(noise.prior, name) for noise in layers.values()]) for name in ("loc", "scale")
        )
        if self.structure != "factorized":
            # a joint vector needs equal recipes; the fits use self.loc and self.scale
            self.rules = _update_rules(
                self.rules, prior_loc=1.0, prior_scale=prior_scale, base_loc=1.0, base_scale=0.1
            )
        self.network = self._add_noise(self.rules, self.structure)
        if self.structure != "factorized" and len(independent_vectors(self.network)) > 1:
            text = (
                f"structure='{self.structure}' needs equal recipes, except priors; use structure='factorized'"
            )
            raise FlowBNNError(text, kind="rules", argument="rules")
        self._check_rows()
        self.flow_network = None if flow is None else self._add_flow(flow)

    def _check_rows(self) -> None:
        """Checks that the outputs of the examples are independent. Errors of a layer have its name."""
        try:
            check_row_independence(NoisyNetwork(self.network, self.data.likelihood), self.data.inputs)
        except FlowBNNError as error:
            keys = {noise.key: name for name, noise in noise_layers(self.network).items()}
            name = keys.get(error.fields.get("key", -1))
            if name is None:
                raise
            raise FlowBNNError(f"layer '{name}': {error}", **error.fields, layer=name) from None

    def _add_noise(self, rules: Rules, structure: Structure = "factorized") -> nn.Module:
        """Returns the network with noise."""
        joint = None if structure == "factorized" else structure
        model = to_stochastic(self.data.network, rules, joint=joint)
        align_batch_axes(model, take(self.data.inputs, 0, BATCH_SIZE))
        return model

    def _exclude_idle_layers(self, rules: dict[Rule, Recipe | None]) -> dict[Rule, Recipe | None]:
        """Returns rules without noise in layers that the network does not call, or that no gradient reaches.

        Layers whose input does not depend on the examples, such as embeddings of positions, are excluded as well.

        Raises:
            FlowBNNError: If no layer is left, or if a rule gives noise to a layer without an axis of the examples.
        """
        network, inputs = to_stochastic(self.data.network, rules), take(self.data.inputs, 0, BATCH_SIZE)
        idle, constant = align_batch_axes(network, inputs)
        check_called(network, [*idle, *constant])
        for name, noise in noise_layers(network).items():
            if noise.layout.batch_axis is None and name not in constant:
                fields = {"kind": "rules", "argument": "rules", "layer": name}
                hint = f"add the rule '{name}': None"
                raise requirement_error("calibrate", f"a batch axis in layer '{name}'", hint=hint, **fields)
        if idle:
            warn_idle(idle)
        if idle or constant:
            rules = rules | dict.fromkeys([*idle, *constant])
            network = self._add_noise(rules)
        return rules | dict.fromkeys(remove_noise_without_gradient(network, inputs))

    def _add_flow(self, flow: str | Recipe) -> nn.Module:
        """Returns the network with noise that a flow transforms."""
        recipe = flow if isinstance(flow, Recipe) else FLOWS[flow]()
        if type(recipe).transforms is Recipe.transforms:
            text = f"{recipe} has no flow; set flow='nsf', flow=fb.noise.NormalPlanar() or flow=None"
            raise FlowBNNError(text, argument="flow")
        names = [field.name for field in fields(Recipe)]
        rules = {
            rule: None
            if gaussian is None
            else replace(recipe, **{name: getattr(gaussian, name) for name in names})
            for rule, gaussian in self.rules.items()
        }
        with temporary_seed(self.seed):
            return self._add_noise(rules, self.structure)

    @property
    def default_prior(self) -> PriorName:
        """Prior of the noise without a comparison: fixed if there are enough examples for each dimension, else fitted.

        A fitted prior gains much with few examples of classes, and loses at most a few thousandths of a nat with many. In regressions
        with few examples either may be better.
        """
        min_examples = 8 if isinstance(self.data.likelihood, ClassLikelihood) else 1
        return "fixed" if len(self.data) > min_examples * self.dim else "fitted"

    def fit_gaussian(
        self,
        indices: Tensor,
        prior: PriorName,
        start: BlockGaussian | None = None,
        precise: bool = True,
        callback: Callable[[int, float], None] | None = None,
    ) -> NaturalFit:
        """Fits a Gaussian posterior of the noise to the examples with these indices.

        Args:
            indices: Indices of the examples.
            prior: Prior of the noise, fixed or fitted.
            start: Gaussian to start from. By default, a narrow one around the network, for classes at its temperature.
            precise: If False, the fit takes half of the time, see :func:`fit_gaussian`.
            callback: Function that is called after every pass with the number of passes and the ELBO per example.
        """
        temperature = 1.0
        # that of a regression scales the observation noise instead of the outputs
        if start is None and isinstance(self.data.likelihood, ClassLikelihood):
            temperature = self.data.fit_temperature(indices).temperature
        return fit_gaussian(
            self.network,
            self.data.point_posterior(indices).likelihood,
            *self.data.select(indices),
            self.structure,
            prior=prior,
            loc=self.loc,
            scale=self.scale,
            start=start,
            temperature=temperature,
            precise=precise,
            seed=self.seed,
            callback=callback,
        )

    def make_posterior(
        self, fit: NaturalFit, indices: Tensor, progress: bool = False
    ) -> tuple[NoisePosterior, FlowFit | None]:
        """Returns the posterior of a fit, with a flow if one is configured and improves the ELBO.

        Args:
            fit: Gaussian fit.
            indices: Indices of the examples that the flow is fitted to.
            progress: If True, shows a progress bar.

        Returns:
            The posterior, and the fit of the flow, or None without a flow.
        """
        gaussian = self.gaussian_posterior(fit, self.network)
        if self.flow_network is None:
            return gaussian, None
        start = self.gaussian_posterior(fit, self.flow_network)
        flow_fit = fit_flow(gaussian, start, *self.data.select(indices), seed=self.seed, progress=progress)
        return flow_fit.posterior, flow_fit

    @torch.no_grad()
    def gaussian_posterior(self, fit: NaturalFit, network: nn.Module) -> NoisePosterior:
        """Returns a network whose noise is the Gaussian of a fit. A flow of the noise keeps its parameters.

        Args:
            fit: Gaussian fit.
            network: Network with noise. It is copied.
        """
        q, start = fit.gaussian, 0
        network = deepcopy_network(network)
        std = q.variances().sqrt()
        for vector, _ in independent_vectors(network):
            entries = slice(start, start + vector.layout.dim)
            start = entries.stop
            roots = [std[entries]] if self.structure == "factorized" else q.roots
            vector.set_gaussian(q.mean[entries], roots, q.maps)
            assert isinstance(vector.prior, NormalBase)
            vector.prior.loc.copy_(q.prior_mean[entries])
            vector.prior.scale.copy_(q.prior_variance[entries].sqrt())
        for layer in noise_layers(network).values():
            layer.fitted = True
        return NoisePosterior(network, fit.likelihood)


def _check_gaussian(layer: str, noise: Noise) -> None:
    """Raises FlowBNNError if the noise of a layer is not one vector with a Gaussian posterior and a normal prior."""
    if isinstance(noise, InputNoise) and noise.site == "channel":
        normal = isinstance(noise.base, NormalBase) and isinstance(noise.prior, NormalBase)
        if normal and noise.gaussian_base is not None and not noise.flow_tail:
            return
    supported = "NormalAffine() without components, prior_df, base_df and site='position'"
    text = f"calibrate supports {supported}, got {noise.label} in layer '{layer}'"
    raise FlowBNNError(text, kind="rules", argument="rules", layer=layer)


def _update_rules(rules: Rules, **settings: Any) -> dict[Rule, Recipe | None]:
    """Returns the rules with changed settings in all recipes."""
    return {rule: None if recipe is None else replace(recipe, **settings) for rule, recipe in rules.items()}


def choose_structure(structure: Any, sizes: list[int], num_examples: int) -> Structure:
    """Returns the structure of the covariance.

    ``"auto"`` is factorized if there are fewer examples than noise variables, because correlations are then not determined by the data.
    Otherwise it is the most general structure that fits into memory.

    Args:
        structure: Name of the structure, or ``"auto"``.
        sizes: Numbers of noise variables of the layers.
        num_examples: Number of held-out examples.

    Raises:
        FlowBNNError: If the layers are too large for the structure.

    >>> choose_structure("auto", [500, 400], 1_000), choose_structure("auto", [500, 400], 100)
    ('full', 'factorized')
    >>> choose_structure("auto", [5_000, 4_000], 10_000), choose_structure("auto", [25_088], 50_000)
    ('chain', 'factorized')
    """
    if structure != "auto":
        if structure != "factorized":
            check_size(structure, sizes, "structure", width=8)
        return structure
    if num_examples < sum(sizes):
        return "factorized"
    return "full" if sum(sizes) <= MAX_DENSE_DIM else "chain" if max(sizes) <= MAX_DENSE_DIM else "factorized"
