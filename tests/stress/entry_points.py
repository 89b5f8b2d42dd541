"""Every public function, class and method, and arguments that it serves, made from the signatures themselves.

A entry_point is something a user calls: what the public modules list in ``__all__``, and the methods of objects made from it.
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
    fitted,
    loader,
    network,
    noisy_network,
    public,
    small_method,
    vectors,
)
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.options import _allows as allows
from flowbnn.transforms import Transform, Univariate
from flowbnn.vae import Decoder

__all__ = ["VARIADIC", "EntryPoint", "entry_points", "methods_of"]

VARIADIC = "*"  # the arguments of a function that takes any number of them


def few_rows() -> Any:
    return loader(8)


def probabilities() -> Tensor:
    return torch.softmax(vectors(5, 3), -1)


# arguments that a entry_point serves, by its name and the argument's, or by the argument's alone, where the annotation does not tell
# fmt: off
VALID_ARGUMENTS: dict[str, Callable[[], Any]] = {
    **FIT_ARGUMENTS, "loader": few_rows, "train_loader": few_rows, "test_loader": few_rows, "held_out": few_rows,
    "to_stochastic.model": network, "describe.model": noisy_network, "rules": lambda: {"*": fb.noise.NormalAffine()},
    "likelihood": fb.likelihoods.Categorical, "posterior": lambda: fitted("mle"),
    "pareto_k.posterior": lambda: fitted("node-noise"), "log_weights": lambda: vectors(50),
    "load_posterior.path": lambda: fitted("mle").save("saved.safetensors"),
    "load.path": lambda: fitted("mle").save("saved.safetensors"), "save.path": lambda: "new.safetensors", "layer": lambda: "0",
    "inputs": lambda: vectors(5, 3), "values": lambda: vectors(5, 3), "outputs": lambda: vectors(5, 3),
    "predictive.outputs": lambda: vectors(4, 5, 3), "predictions": lambda: vectors(5, 1),
    "root_mean_squared_error.targets": lambda: vectors(5, 1), "targets": lambda: torch.tensor([0, 1, 2, 0, 1]),
    "probabilities": probabilities, "given": probabilities,
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
    "part": lambda: fb.transforms.Affine(3), "freeze.part": lambda: "noise", "unfreeze.part": lambda: "noise",
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
    "compare.epochs": lambda: 1, "sizes": lambda: [2, 1], "simulation_ranks.posterior": lambda: fitted("node-noise"),
    "univariate": fb.transforms.AffineMap, "FlowModel.base": lambda: fb.distributions.NormalBase(3),
    "LipschitzConv.shape": lambda: (4, 4, 3), "net": lambda: nn.Linear(3, 4), "categories": lambda: 3,
    "before": lambda: [12], "after": lambda: [2, 2, 3],
    "MultiScale.shape": lambda: [4, 4, 1], "levels": lambda: 1, "step": lambda: lambda channels, number: fb.transforms.Affine(channels),
    "flow": lambda: fb.flows.RealNVP(3), "fit_density.data": lambda: vectors(20, 3), "fit_density.epochs": lambda: 1,
    "load_density.path": lambda: fb.density.Density(fb.flows.RealNVP(3)).save("density.safetensors"),
    "log_density": lambda: lambda x: -x.square().sum(-1), "fit_target.epochs": lambda: 1,
    "NoveltyDetector.density": lambda: fb.density.Density(fb.flows.RealNVP(3)),
    "NoveltyDetector.held_out": lambda: vectors(5), "latent_dim": lambda: 2, "VAE.shape": lambda: (3,),
    "Autoencoder.shape": lambda: (3,), "GatedConvEncoder.shape": lambda: (1, 4, 4), "GatedConvDecoder.shape": lambda: (1, 4, 4),
    "fit_autoencoder.model": lambda: fb.vae.VAE((3,), 2, hidden=(4,)), "fit_autoencoder.data": lambda: vectors(20, 3).round(),
    "fit_autoencoder.epochs": lambda: 1, "part.samples": lambda: slice(0, 2),
    "simulation_ranks.fit": lambda: lambda batches: fitted("node-noise"), "simulation_ranks.simulations": lambda: 2,
}
# fmt: on
# of Gaussian kinds, whose targets are real named_tensors
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
CLASS_ARGUMENTS = {
    "GaussianPredictive": REAL,
    "Gaussian": REAL,
    "Bernoulli": BINARY,
    "LogisticDecoder": {"outputs": lambda: vectors(5, 6)},
}
# what the rooms of the library say to each other, and what training calls at every step and therefore does not look at its arguments
INTERNAL = """
    absorbs ahead align_batch_axes Amortized average Base Bernoulli.log_prob BlockTriangular.assign BlockTriangular.variances
    bounded build build_joint canonical Categorical.log_prob check check_members check_weights chosen Clock collect compute
    connect coupling current_share cut Decision Decoder DiagonalNormal DiagonalStudent Digits DiscretizedLogistic distribution
    Divergence divergence divergences Divergences document draw ends expand extract_features first_nonfinite_layer fix FixedNoise
    flat_draw Flow flow_matching_loss FlowBNNError FlowBNNWarning FlowNoise forward_shape from_dict from_points from_states
    Gaussian.log_prob History improves InputNoise Interval inverse_shape is_main_process is_torchrun_worker join kernel
    LayerHealth Layout layout_of like Likelihood log_density log_variance looks Marginal MemberPosterior moments move moved net
    network_of Noise NoiseGroup NoisePass NoisePosterior NormalMixture num_processes OneHotVectors Optimum ordered outputs pass_of
    passes pixel_noise plan PointPosterior Posterior posterior potential Prediction Predictive prior_log_prob problem push
    push_normal read Recipe recipe_from_dict register_layer ReliabilityBin restore restored RiskCoverage rules run_on_main
    sample_codes scales set_loc_and_scale Setting settings settings_of settle settled setup share share_batch shared_draws side
    split split_noise standard standard_log_prob start state step stream tensors terms to_dict track train training_loss Transform
    transforms Univariate velocity VGG16 weight_scale WeightPosterior weights with_level wrappable
""".split()  # noqa: SIM905
SKIPPED_ARGUMENTS = {"devices", "num_nodes", "strategy", "self", "_instance"}  # would start other processes


@dataclass
class EntryPoint:
    """Something that users call, and how to make arguments that it serves."""

    name: str
    function: Callable[..., Any]
    served: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, tuple[Any, bool]]:
        """Names with the annotation and whether a value must be given; ``*`` for any number of them."""
        known, found = annotations_of(self.function), {}
        for one in inspect.signature(self.function).parameters.values():
            if one.kind is not one.VAR_KEYWORD and one.name not in SKIPPED_ARGUMENTS:
                several = one.kind is one.VAR_POSITIONAL
                if several and f"{self.name.split('.')[-1]}.*" not in VALID_ARGUMENTS:
                    continue  # of torch's own Module
                annotation = Any if known[one.name] is one.empty else known[one.name]
                found[VARIADIC if several else one.name] = (annotation, several or one.default is one.empty)
        return found

    def arguments(self) -> dict[str, Any]:
        """Arguments that are served."""
        last = self.name.split(".")[-1]
        parameters = self.parameters.items()
        return {
            name: self.value(name, kind)
            for name, (kind, needed) in parameters
            if needed or f"{last}.{name}" in {*VALID_ARGUMENTS, *self.served}
        }

    def value(self, name: str, annotation: Any) -> Any:
        """One such argument: of this entry_point, or of this name where the annotation allows it, or what the annotation names."""
        last = self.name.split(".")[-1]
        for key in (f"{last}.{name}", name):
            for table in (self.served, VALID_ARGUMENTS):
                value = table[key]() if key in table else None
                if key in table and (key != name or allows(annotation, value)):
                    return value
        return _simple(annotation)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result, with iterators and context managers gone through."""
        named = {name: value for name, value in arguments.items() if name != VARIADIC}
        result = self.function(*arguments.get(VARIADIC, ()), **named)
        if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                return None
        return list(result) if isinstance(result, Iterator) else result


def _simple(annotation: Any) -> Any:
    """A value that an annotation of plain types allows."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return parts[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return _simple(parts[0])
    plain = {int: 2, float: 0.5, bool: False, str: "a"}
    return next((value for kind, value in plain.items() if annotation is kind), None)


@cache
def entry_points() -> tuple[EntryPoint, ...]:
    """All of them, from the public names."""
    found = [EntryPoint(name, thing) for name, thing in public() if name.split(".")[-1] not in INTERNAL]
    made: list[EntryPoint] = []
    for entry_point in found:
        if inspect.isclass(entry_point.function):
            name = entry_point.name.split(".")[-1]
            kind: Any = entry_point.function
            known = issubclass(kind, fb.methods.Method)
            thing = small_method(kind.name) if known else entry_point.call(entry_point.arguments())
            if isinstance(thing, nn.Module):
                thing.eval()
            name = thing.name if known else name
            made += methods_of(name, thing, CLASS_ARGUMENTS.get(name) or _points(name, thing))
    made += [entry_point for fit in FITS for entry_point in results_of(fit)]
    return (*found, *made)


def results_of(fit: Fit | str) -> list[EntryPoint]:
    """The entry_points of what a fit gives."""
    result = fitted(fit)
    kind = "posterior" if isinstance(result, fb.Posterior) else "result"
    return methods_of(f"{fit}.{kind}", result, _of(result))


# shapes of what a map of vectors of length 3 does not take
INPUT_SHAPES = {
    "Argmax": (5, 9),
    "Augment": (5, 2),
    "ChannelsFirst": (4, 4, 4),
    "Checkerboard": (4, 4, 4),
    "MaxPool": (5, 12),
}
INPUT_SHAPES |= {
    "MultiScale": (5, 16),
    "OneHot": (5, 9),
    "Reshape": (5, 12),
    "Slice": (5, 4),
    "Squeeze": (4, 4, 4),
    "VAELayer": (5, 2),
}
INPUT_SHAPES |= {"Dequantization": (5, 3), "Integers": (5, 3)}


def _points(name: str, transform: Any) -> dict[str, Callable[[], Any]]:
    """Where the two directions of a transform are defined, if not at vectors of length 3."""
    if name not in INPUT_SHAPES or not isinstance(transform, Transform):
        return {}
    start = vectors(*INPUT_SHAPES[name])
    end = transform(start)[0].detach()
    return {"z": lambda: start, "x": lambda: end}


def _of(result: Any) -> dict[str, Callable[[], Any]]:
    """Arguments that the methods of what a fit gave serve."""
    return {
        "load.path": lambda: result.save("own.safetensors"),
        "log_prob.values": lambda: result.draws(1, seed=0),
        "index": lambda: 0,
    }


def methods_of(name: str, thing: Any, served: Mapping[str, Any]) -> list[EntryPoint]:
    """The public methods that our own classes define; how networks and distributions are called is torch's to say."""
    if isinstance(thing, Univariate | Decoder):
        return []
    names = {
        key
        for kind in type(thing).__mro__
        if kind.__module__.startswith("flowbnn")
        for key, value in vars(kind).items()
        if not key.startswith("_") and isinstance(value, types.FunctionType | classmethod)
    }
    theirs = {
        key for kind in type(thing).__mro__ if kind.__module__.startswith("torch") for key in vars(kind)
    }
    names -= theirs - ({"forward"} if isinstance(thing, Transform) else set())
    return [
        EntryPoint(f"{name}.{key}", getattr(thing, key), served)
        for key in sorted(names)
        if not {key, f"{name}.{key}"} & {*INTERNAL}
    ]
