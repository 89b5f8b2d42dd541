"""Entry points: every public function, class and method, with valid arguments derived from the signatures.

An entry point is a callable of the public modules' ``__all__``, or a method of an object made by one.
"""

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tests.stress.cases import (
    FIT_ARGUMENTS,
    FITS,
    Fit,
    annotations_of,
    cached_fit,
    loader,
    network,
    noisy_network,
    public_names,
    small_method,
    vectors,
)
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.options import _allows as allows
from flowbnn.transforms import Transform, Univariate
from flowbnn.vae import Decoder

__all__ = ["VARIADIC", "EntryPoint", "entry_points", "entry_points_of_fit", "methods_of"]

VARIADIC = "*"  # name of variadic arguments


def short_loader() -> Any:
    """Returns a loader of two batches."""
    return loader(8)


def probabilities() -> Tensor:
    """Returns the probabilities of three classes for five examples."""
    return torch.softmax(vectors(5, 3), -1)


# valid arguments that the annotation does not determine, by the names of the entry point and the argument, or by that of the argument
# fmt: off
VALID_ARGUMENTS: dict[str, Callable[[], Any]] = {
    **FIT_ARGUMENTS, "loader": short_loader, "train_loader": short_loader, "test_loader": short_loader, "held_out": short_loader,
    "to_stochastic.model": network, "describe.model": noisy_network, "rules": lambda: {"*": fb.noise.NormalAffine()},
    "likelihood": fb.likelihoods.Categorical, "pool": lambda: vectors(12, 3), "acquire.batch_size": lambda: 2,
    "conformalize.coverage": lambda: 0.5, "thresholds": lambda: torch.linspace(0.0, 1.0, 5),
    "conformal_quantile.scores": lambda: vectors(20), "losses": lambda: vectors(20, 5).sort(-1, descending=True).values,
    "risk_threshold.level": lambda: 0.5,
    "labels": lambda: torch.tensor([0, 1, 2, 1, 1]), "read_card.path": lambda: cached_fit("mle").save("saved.safetensors"),
    "conformal_quantile.coverage": lambda: 0.5, "Heads.heads": lambda: {"label": fb.likelihoods.Categorical()},
    "log_mean": lambda: vectors(4, 5, 1), "LogNormalPredictive.loc": lambda: vectors(4, 5, 1),
    "LogNormalPredictive.scale": lambda: vectors(4, 5, 1).exp(), "WeibullPredictive.loc": lambda: vectors(4, 5, 1),
    "WeibullPredictive.scale": lambda: vectors(4, 5, 1).exp(), "QuantilePredictive.values": lambda: vectors(4, 5, 1, 2).sort().values,
    "QuantilePredictive.levels": lambda: (0.1, 0.9), "posterior": lambda: cached_fit("mle"),
    "pareto_k.posterior": lambda: cached_fit("node-noise"), "log_weights": lambda: vectors(50),
    "load_posterior.path": lambda: cached_fit("mle").save("saved.safetensors"),
    "load.path": lambda: cached_fit("mle").save("saved.safetensors"), "save.path": lambda: "new.safetensors", "layer": lambda: "0",
    "inputs": lambda: vectors(5, 3), "values": lambda: vectors(5, 3), "outputs": lambda: vectors(5, 3),
    "predictive.outputs": lambda: vectors(4, 5, 3), "predictions": lambda: vectors(5, 1),
    "root_mean_squared_error.targets": lambda: vectors(5, 1), "targets": lambda: torch.tensor([0, 1, 2, 0, 1]),
    "probabilities": probabilities, "calibration_floor.predictions": probabilities,
    "from_probabilities.probabilities": lambda: torch.softmax(vectors(4, 5, 3), -1), "logits": lambda: vectors(4, 5, 3),
    "from_bernoulli.logits": lambda: vectors(4, 5, 1), "mean": lambda: vectors(4, 5, 1), "variance": lambda: 0.5,
    "low": lambda: vectors(5, 1) - 1, "high": lambda: vectors(5, 1) + 1, "interval_coverage.targets": lambda: vectors(5, 1),
    "known_scores": lambda: vectors(6), "novel_scores": lambda: vectors(6) + 0.5, "uncertainty": lambda: vectors(5),
    "correct": lambda: torch.tensor([True, False, True, True, False]), "by": lambda: "epistemic", "q": lambda: [0.1, 0.5],
    "abstain_above": lambda: 0.3, "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
    "first": lambda: vectors(5, 3), "second": lambda: vectors(5, 3), "decode.z": lambda: vectors(5, 2),
    "points": lambda: vectors(5, 2), "density": lambda: vectors(20),
    "draws": lambda: vectors(2, 20), "healths": lambda: fb.diagnostics.posterior_health(noisy_network(), samples=8),
    "base": lambda: fb.distributions.NormalBase(3).distribution(), "transform": lambda: fb.transforms.Affine(3),
    "freeze.part": lambda: "noise", "unfreeze.part": lambda: "noise",
    "FlowPredictive.loc": lambda: vectors(4, 5, 1), "FlowPredictive.scale": lambda: vectors(4, 5, 1) + 0.5,
    "knots": lambda: fb.likelihoods.Flow("nsf").predictive(vectors(4, 5, 25)).knots,
    "means": lambda: vectors(4, 5, 1, 2), "stds": lambda: vectors(4, 5, 1, 2) + 0.5,
    "MixturePredictive.logits": lambda: vectors(4, 5, 1, 2), "cross_calibrate.make_network": lambda: network,
    "cross_calibrate.method": lambda: fb.MAP(epochs=1), "cross_calibrate.folds": lambda: 2,
    "gated.posterior": lambda: cached_fit("map"), "gated.epochs": lambda: 2, "gated.components": lambda: 2,
    "loc": lambda: vectors(3), "NormalMixture.loc": lambda: vectors(2, 3), "scale": lambda: 0.5,
    "source": lambda: torch.distributions.transforms.ExpTransform(), "order": lambda: [1, 0, 2],
    "runs": lambda: [("planar", 1), ("lu", 1)], "dim": lambda: 3, "dimension": lambda: 0, "hidden": lambda: 2,
    "z": lambda: vectors(5, 3) * 0.8 + 0.1, "x": lambda: vectors(5, 3) * 0.8 + 0.1, "value": lambda: vectors(5, 3),
    "divergence.q": lambda: fb.distributions.NormalBase(3).distribution(),
    "divergence.prior": lambda: fb.distributions.NormalBase(3).distribution(), "document": lambda: {"kind": "x"},
    "tensors": lambda: {"a": vectors(3)}, "save_tensors.path": lambda: "tensors.safetensors",
    "load_tensors.path": lambda: fb.training.save_tensors("read.safetensors", {"a": vectors(3)}, {}),
    "check_writable.path": lambda: "writable.safetensors", "records": lambda: [{"loss": 1.0}],
    "TensorLoader.*": lambda: [vectors(6, 3), vectors(6, 1)], "TensorLoader.batch_size": lambda: 2,
    "Compose.*": lambda: [fb.transforms.Affine(3), fb.transforms.Reverse(3)], "MLP.hidden": lambda: (4,),
    "draws.samples": lambda: 3, "world": lambda: 2, "rank": lambda: 1, "compare.methods": lambda: ["mle"],
    "compare.epochs": lambda: 1, "sizes": lambda: [2, 1], "simulation_ranks.posterior": lambda: cached_fit("node-noise"),
    "univariate": fb.transforms.AffineMap, "FlowModel.base": lambda: fb.distributions.NormalBase(3),
    "LipschitzConv.shape": lambda: (4, 4, 3), "net": lambda: nn.Linear(3, 4), "categories": lambda: 3,
    "base_shape": lambda: [12], "sample_shape": lambda: [2, 2, 3],
    "MultiScale.shape": lambda: [4, 4, 1], "levels": lambda: 1,
    "make_step": lambda: lambda channels, index: fb.transforms.Affine(channels),
    "flow": lambda: fb.flows.RealNVP(3), "fit_density.data": lambda: vectors(20, 3), "fit_density.epochs": lambda: 1,
    "load_density.path": lambda: fb.density.Density(fb.flows.RealNVP(3)).save("density.safetensors"),
    "log_density": lambda: lambda x: -x.square().sum(-1), "fit_target.epochs": lambda: 1,
    "NoveltyDetector.density": lambda: fb.density.Density(fb.flows.RealNVP(3)),
    "NoveltyDetector.held_out_scores": lambda: vectors(5), "latent_dim": lambda: 2, "VAE.shape": lambda: (3,),
    "Autoencoder.shape": lambda: (3,), "GatedConvEncoder.shape": lambda: (1, 4, 4), "GatedConvDecoder.shape": lambda: (1, 4, 4),
    "fit_autoencoder.model": lambda: fb.vae.VAE((3,), 2, hidden=(4,)), "fit_autoencoder.data": lambda: vectors(20, 3).round(),
    "fit_autoencoder.epochs": lambda: 1, "select_samples.samples": lambda: slice(0, 2),
    "load_autoencoder.model": lambda: fb.vae.VAE((3,), 2, hidden=(4,)),
    "load_autoencoder.path": lambda: fb.vae.VAE((3,), 2, hidden=(4,)).save("autoencoder.safetensors"),
    "log_densities": lambda: vectors(5), "Mixture.predictive.outputs": lambda: vectors(4, 5, 15),
    "PointPosterior.model": network, "NoisePosterior.model": noisy_network,
    "members": lambda: [cached_fit("map"), cached_fit("mle")], "register_layer.kind": lambda: nn.PReLU,
    "layout": lambda: lambda module: fb.noise.Layout(1), "DiagonalStudent.df": lambda: 5.0,
    "flow_matching_loss.transform": lambda: fb.transforms.NeuralODE(3, hidden=(4,)),
    "flow_matching_loss.base": lambda: fb.distributions.NormalBase(3).distribution(),
    "flow_matching_loss.data": lambda: vectors(5, 3),
    "flowbnn.distributions.Flow.base": lambda: fb.distributions.NormalBase(3).distribution(),
    "NormalMixture.scale": lambda: vectors(2, 3) + 0.5,
    "simulation_ranks.fit": lambda: lambda batches: cached_fit("node-noise"), "simulation_ranks.simulations": lambda: 2,
}
# fmt: on
# arguments of Gaussian likelihoods and predictives, whose targets are real numbers
REAL: dict[str, Callable[[], Any]] = {
    "outputs": lambda: vectors(5, 1),
    "targets": lambda: vectors(5, 1),
    "predictive.outputs": lambda: vectors(4, 5, 1),
    "values": lambda: vectors(5, 1),
    "by": lambda: "std",
    "pairs": lambda: [(vectors(5, 1), vectors(5, 1))],
}
BINARY: dict[str, Callable[[], Any]] = {
    "outputs": lambda: vectors(5, 1),
    "targets": lambda: torch.tensor([0, 1, 1, 0, 1]),
    "predictive.outputs": lambda: vectors(4, 5, 1),
}
COUNTS = REAL | {"targets": lambda: torch.tensor([[0], [1], [2], [0], [1]])}
TIMES = REAL | {"targets": lambda: vectors(5, 1).exp(), "times": lambda: vectors(5, 1).exp()}


def with_outputs(count: int, arguments: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Returns arguments of a likelihood whose network has several outputs for a target."""
    return arguments | {
        "outputs": lambda: vectors(5, count),
        "predictive.outputs": lambda: vectors(4, 5, count),
    }


CLASS_ARGUMENTS = {
    "Flow": with_outputs(25, REAL),
    "ConformalClassifier": {"data": lambda: short_loader()},
    "ConformalRegressor": {"data": lambda: loader(8, regression=True)},
    "CountPredictive": COUNTS,
    "Poisson": COUNTS,
    "NegativeBinomial": with_outputs(2, COUNTS),
    "LogNormalPredictive": TIMES,
    "WeibullPredictive": TIMES,
    "Survival": with_outputs(
        2, TIMES | {"targets": lambda: torch.stack([vectors(5).exp(), torch.ones(5)], 1)}
    ),
    "QuantilePredictive": REAL,
    "Quantiles": with_outputs(4, REAL),
    "GaussianPredictive": REAL,
    "FlowPredictive": REAL,
    "MixturePredictive": REAL,
    "Gaussian": REAL,
    "Bernoulli": BINARY,
    "LogisticDecoder": {"outputs": lambda: vectors(5, 6)},
}
# objects that functions return, whose methods are tested
RESULTS: dict[str, Callable[[], Any]] = {
    "ConformalClassifier": lambda: fb.conformalize(cached_fit("mle"), loader(24), coverage=0.5),
    "ConformalRegressor": lambda: fb.conformalize(
        cached_fit(Fit("mle", regression=True)), loader(24, regression=True), coverage=0.5
    ),
}
# Base classes, records that functions return, names for use inside the library, and functions that training calls in each step and
# that therefore do not check their arguments. Everything else that users call is tested.
INTERNAL = """
    classes_last Epoch
    Heads HeadsPredictive SurvivalPredictive CountLikelihood CountPredictive.hdr CountPredictive.rescale information link outputs_like
    ConformalClassifier ConformalRegressor LabelSets ProgressBar plot flowbnn.likelihoods.Flow.log_prob flowbnn.likelihoods.Flow.mean
    ClassScore IntervalScore control_risk SelectiveClassifier scores region tuned Columns export PredictOptions target_weights
    hide_ignored attach parameters_of push_to_hub rescale Survival.mean NegativeBinomial.mean
    Poisson.mean Quantiles.mean Quantiles.quantiles Survival.log_prob NegativeBinomial.log_prob Poisson.log_prob Quantiles.log_prob
    absorbs align_batch_axes Amortized append_log_variance average average_outputs Base Bernoulli.log_prob Bernoulli.mean
    BlockTriangular.assign BlockTriangular.variances bounded build build_joint calibrate_outputs canonical_targets
    Categorical.log_prob Categorical.mean check check_members check_weights chosen CircularUniform Clock collect compute
    ConditionalDensity connect context_of ContinuousPredictive coupling_options current_row_shard cut
    Decision Decoder Digits DiscretizedLogistic distribution Divergence divergences Divergences document draw draw_with_kl expand
    extract_features first_nonfinite_layer fit_point fit_problem fit_subsets FixedNoise flat_draw flatten FlowBNNError FlowBNNWarning
    FlowNoise forward_shape from_inner from_dict from_points from_state from_states GatedPosterior Gaussian.log_prob Gaussian.mean
    has_converged History improves initialize InputNoise Interval inverse_shape is_main_process is_torchrun_worker is_unfamiliar
    identity_calibration join kernel LayerHealth Layout layout_of like Likelihood log_densities log_density log_variance looks
    make_autoregressive make_coupling make_levels make_noise_modes make_pixel_noise make_split_noise make_step Marginal MemberPosterior
    Mixture.log_prob Mixture.mean moments move net network_of nodes Noise NoiseContext NoiseGroup NoiseMode novelty_scores
    num_processes OneHotVectors Optimum output_units outputs passes plan plan_training Posterior posterior potential Prediction
    PredictionSummary Predictive prior_log_prob problem push push_normal read read_calibration RealLikelihood rearrange Recipe
    recipe_from_dict refit ReliabilityBin restore RiskCoverage rules run_on_main sample_codes schedule score_folds
    set_loc_and_scale set_row_shard set_rows_interact set_statistics settings settled setup shared_draws side side_length split
    standard standard_log_prob start state step step_schedule stream summarize SummaryCollector temperature.posterior.transform tensors
    terms test_sizes to_dict track train training_loss Transform transform transforms unchanged Univariate
    vector-scaling.posterior.transform velocity VGG16 weight_scale WeightPosterior weights with_fallback wrappable
""".split()  # noqa: SIM905
SKIPPED_ARGUMENTS = {
    "devices",
    "num_nodes",
    "strategy",
    "self",
    "_instance",
}  # these would start other processes


@dataclass
class EntryPoint:
    """A callable of the public interface, with valid arguments.

    Args:
        name: Full name.
        function: Callable.
        valid_arguments: Factories of arguments that replace those of ``VALID_ARGUMENTS``.
    """

    name: str
    function: Callable[..., Any]
    valid_arguments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def last_name(self) -> str:
        """Last part of the full name."""
        return self.name.split(".")[-1]

    @property
    def parameters(self) -> dict[str, tuple[Any, bool]]:
        """Annotation of each parameter, and whether it is required. ``*`` stands for variadic parameters."""
        annotations, parameters = annotations_of(self.function), {}
        for parameter in inspect.signature(self.function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD or parameter.name in SKIPPED_ARGUMENTS:
                continue
            variadic = parameter.kind is parameter.VAR_POSITIONAL
            if variadic and f"{self.last_name}.*" not in VALID_ARGUMENTS:
                continue  # inherited from nn.Module
            annotation = annotations[parameter.name]
            annotation = Any if annotation is parameter.empty else annotation
            required = variadic or parameter.default is parameter.empty
            parameters[VARIADIC if variadic else parameter.name] = (annotation, required)
        return parameters

    def arguments(self) -> dict[str, Any]:
        """Returns valid arguments."""
        return {
            name: self.value(name, annotation)
            for name, (annotation, required) in self.parameters.items()
            if required or f"{self.last_name}.{name}" in {*VALID_ARGUMENTS, *self.valid_arguments}
        }

    def value(self, name: str, annotation: Any) -> Any:
        """Returns a valid argument: that of this entry point, that of the name, or one that the annotation lists."""
        for key in (f"{self.name}.{name}", f"{self.last_name}.{name}", name):
            for factories in (self.valid_arguments, VALID_ARGUMENTS):
                value = factories[key]() if key in factories else None
                if key in factories and (key != name or allows(annotation, value)):
                    return value
        return _simple_value(annotation)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the entry point. Exhausts an iterator and enters a context manager that it returns."""
        keywords = {name: value for name, value in arguments.items() if name != VARIADIC}
        result = self.function(*arguments.get(VARIADIC, ()), **keywords)
        if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                return None
        return list(result) if isinstance(result, Iterator) else result


def _simple_value(annotation: Any) -> Any:
    """Returns a value that an annotation of simple types allows, or None."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return arguments[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return _simple_value(arguments[0])
    values = {int: 2, float: 0.5, bool: False, str: "a"}
    return next((value for kind, value in values.items() if annotation is kind), None)


@cache
def entry_points() -> tuple[EntryPoint, ...]:
    """Returns all entry points, without abstract classes."""
    points = [
        EntryPoint(name, thing)
        for name, thing in public_names()
        if name.split(".")[-1] not in INTERNAL
        and not inspect.isabstract(thing)
        and not name.startswith("flowbnn.plots")  # figures have tests of their own
    ]
    methods: list[EntryPoint] = []
    for point in points:
        if inspect.isclass(point.function):
            cls: Any = point.function
            is_method = issubclass(cls, fb.methods.Method)
            instance = small_method(cls) if is_method else point.call(point.arguments())
            if isinstance(instance, nn.Module):
                instance.eval()
            name = instance.name if is_method else point.last_name
            arguments = _own_arguments(instance) | (
                CLASS_ARGUMENTS.get(name) or _transform_arguments(name, instance)
            )
            is_ambiguous = [other.last_name for other in points].count(name) > 1
            methods += methods_of(point.name if is_ambiguous else name, instance, arguments)
    for name, make in RESULTS.items():
        methods += methods_of(name, make(), CLASS_ARGUMENTS[name])
    methods += [point for fit in FITS for point in entry_points_of_fit(fit)]
    return (*points, *methods)


def _draws_of(posterior: fb.Posterior) -> Mapping[str, Any]:
    """Returns one draw of a posterior, or nothing if it has no draws."""
    try:
        return posterior.draws(1, seed=0)
    except fb.FlowBNNError:
        return {}


def _own_arguments(result: Any) -> dict[str, Callable[[], Any]]:
    """Returns arguments of the methods of an object that depend on the object."""
    arguments: dict[str, Callable[[], Any]] = {"index": lambda: 0}
    if hasattr(result, "save"):
        arguments["load.path"] = lambda: result.save("own.safetensors")
    if isinstance(result, fb.Posterior):
        arguments["log_prob.values"] = lambda: _draws_of(result)
    return arguments


def entry_points_of_fit(fit: Fit | str) -> list[EntryPoint]:
    """Returns the methods of the result of a fit."""
    result = cached_fit(fit)
    kind = "posterior" if isinstance(result, fb.Posterior) else "result"
    return methods_of(f"{fit}.{kind}", result, _own_arguments(result))


# shapes of the inputs of transforms that do not take vectors of length 3
INPUT_SHAPES = {
    "Argmax": (5, 9),
    "Augment": (5, 3),
    "ChannelsFirst": (4, 4, 4),
    "Checkerboard": (4, 4, 4),
    "Dequantization": (5, 3),
    "Integers": (5, 3),
    "MaxPool": (5, 12),
    "MultiScale": (5, 16),
    "OneHot": (5, 9),
    "Reshape": (5, 12),
    "Slice": (5, 5),
    "Squeeze": (4, 4, 4),
    "VAELayer": (5, 2),
}


def _transform_arguments(name: str, transform: Any) -> dict[str, Callable[[], Any]]:
    """Returns points of the domain and the range of a transform that does not take vectors of length 3."""
    if name not in INPUT_SHAPES or not isinstance(transform, Transform):
        return {}
    z = vectors(*INPUT_SHAPES[name])
    x = transform(z)[0].detach()
    return {"z": lambda: z, "x": lambda: x}


def methods_of(name: str, instance: Any, valid_arguments: Mapping[str, Any]) -> list[EntryPoint]:
    """Returns the public methods that classes of this library define, without those of torch.

    Args:
        name: Name of the instance.
        instance: Object whose methods are called.
        valid_arguments: Factories of valid arguments.
    """
    if isinstance(instance, Univariate | Decoder):
        return []
    names = {
        key
        for cls in type(instance).__mro__
        if cls.__module__.startswith("flowbnn")
        for key, value in vars(cls).items()
        if not key.startswith("_") and isinstance(value, types.FunctionType | classmethod)
    }
    torch_names = {
        key for cls in type(instance).__mro__ if cls.__module__.startswith("torch") for key in vars(cls)
    }
    names -= torch_names - ({"forward"} if isinstance(instance, Transform) else set())
    return [
        EntryPoint(f"{name}.{key}", getattr(instance, key), valid_arguments)
        for key in sorted(names)
        if not {key, f"{name}.{key}"} & {*INTERNAL} and not key.startswith("plot_")
    ]
