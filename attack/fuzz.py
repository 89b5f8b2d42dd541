"""Every public function, class and method with wrong arguments, made from the signatures themselves.

A door is something a user calls: what the public modules list in ``__all__``, and the methods of objects made from it. A try calls a
door with arguments that it serves, but for one or two, which are of the wrong type, shape or size. It is *served* (a result without
NaN, and no argument that its annotation forbids), *refused* (a ``FlowBNNError`` of one line, or Python's own ``TypeError`` at the
call), or it has failed: any other exception, a hang, or nonsense.
"""

import contextlib
import inspect
import io
import math
import os
import random
import signal
import tempfile
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flowbnn as fb
from attack import Budget, Tally, short
from flowbnn.options import _allows as allows
from flowbnn.transforms import Transform

__all__ = ["attack", "doors", "tried"]

SECONDS = 20  # for one call
NAN = float("nan")
SEVERAL = "*"  # the arguments of a function that takes any number of them


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def noisy() -> nn.Module:
    return fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})


def loader() -> Any:
    return fb.data.TensorLoader(torch.randn(8, 3), torch.arange(8) % 2, batch_size=4)


@cache
def fitted(name: str) -> Any:
    """A posterior of this method."""
    more = {"validation": loader()} if name == "temperature" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return small(name).fit(network(), loader(), progress=False, seed=0, **more)


def small(name: str) -> Any:
    """A method that fits in a moment."""
    few: dict[str, Any] = {"deep-ensemble": {"members": 2}, "swag": {"epochs": 4, "per_epoch": 2}}
    few |= {
        "nuts": {"samples": 2, "warmup": 2, "chains": 1},
        "sgld": {"samples": 2, "cycles": 1, "epochs": 4},
    }
    few["mode-ensemble"] = {"members": 2, "steps": 2}
    few["hmc"] = {**few["nuts"], "steps": 2}
    return fb.methods.METHODS[name](**{"epochs": 1} | few.get(name, {}))


def vectors(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def probabilities() -> Tensor:
    return torch.softmax(vectors(5, 3), -1)


# arguments that a door serves, by its name and the argument's, or by the argument's alone, where the annotation does not tell
# fmt: off
SERVED: dict[str, Callable[[], Any]] = {
    "network": network, "model": noisy, "loader": loader, "train_loader": loader, "test_loader": loader, "held_out": loader,
    "to_stochastic.model": network, "describe.model": noisy, "rules": lambda: {"*": fb.noise.NormalAffine()},
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
    "abstain_above": lambda: 0.3, "points": lambda: vectors(5, 2), "density": lambda: vectors(20),
    "draws": lambda: vectors(2, 20), "healths": lambda: fb.diagnostics.posterior_health(noisy(), samples=8),
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
    "TensorLoader.*": lambda: [vectors(5, 3), vectors(5, 1)], "TensorLoader.batch_size": lambda: 2,
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
    "NoveltyDetector.density": lambda: fb.density.Density(fb.flows.RealNVP(3)), "NoveltyDetector.center": lambda: None,
    "NoveltyDetector.held_out": lambda: vectors(5), "latent_dim": lambda: 2, "VAE.shape": lambda: (3,),
    "Autoencoder.shape": lambda: (3,), "GatedConvEncoder.shape": lambda: (1, 4, 4), "GatedConvDecoder.shape": lambda: (1, 4, 4),
    "fit_autoencoder.model": lambda: fb.vae.VAE((3,), 2, hidden=(4,)), "fit_autoencoder.data": lambda: vectors(20, 3).round(),
    "fit_autoencoder.epochs": lambda: 1, "part.samples": lambda: slice(0, 2),
    "simulation_ranks.fit": lambda: lambda batches: fitted("node-noise"), "simulation_ranks.simulations": lambda: 2,
}
# fmt: on
# of Gaussian kinds, whose targets are real numbers
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
# what the rooms of the library say to each other, and what training calls at every step and therefore does not look at its arguments
INTERNAL = """
    Base Likelihood Predictive Posterior Transform Noise InputNoise NoiseGroup NoisePass Setting Share Layout Prediction
    Divergences Divergence Digits Optimum LayerHealth Marginal ReliabilityBin RiskCoverage Decision Interval Clock FlowBNNError
    FlowBNNWarning absorbs ahead align_batch_axes current_share divergences layout_of pass_of recipe_from_dict register_layer
    settings_of share_batch shared_draws weight_scale wrappable alone check_weights connect first_nonfinite_layer track train
    launched is_main_process processes MemberPosterior NoisePosterior PointPosterior WeightPosterior Recipe FlowNoise VGG16
    History outputs collect state settings restored document tensors read restore weights stream chosen log_density network_of
    from_states kernel plan rules looks settled bounded share distribution problem moments settle start canonical average to_dict
    from_dict improves expand check terms setup potential cut fix join split move move_back from_points push push_normal
    NormalMixture DiagonalNormal FixedNoise Flow check_members divergence flat_draw Categorical.log_prob Gaussian.log_prob
    DiscretizedLogistic OneHotVectors Univariate Amortized flow_matching_loss velocity forward_shape inverse_shape there back ends
    Decoder DiagonalStudent Bernoulli.log_prob log_variance with_level BlockTriangular.match BlockTriangular.variances
""".split()  # noqa: SIM905
UNTRIED = {"devices", "num_nodes", "strategy", "self", "_instance"}  # would start other processes

# fmt: off
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "0": lambda: 0, "-1": lambda: -1, "2.5": lambda: 2.5, "nan": lambda: NAN,
    "inf": lambda: math.inf, "1e30": lambda: 1e30, "2**70": lambda: 2**70, "'x'": lambda: "x", "'0.9'": lambda: "0.9",
    "''": lambda: "", "b'x'": lambda: b"x", "[]": list, "[1, 2]": lambda: [1, 2], "[[1.0], [2.0]]": lambda: [[1.0], [2.0]],
    "['a']": lambda: ["a"], "(0.5, 0.1)": lambda: (0.5, 0.1), "{}": dict, "{1: 2}": lambda: {1: 2}, "object()": object,
    "int": lambda: int, "print": lambda: print, "range(3)": lambda: range(3), "iter([])": lambda: iter([]), "1j": lambda: 1j,
    "nan tensor": lambda: torch.full((5, 3), NAN), "inf tensor": lambda: torch.full((5, 3), math.inf),
    "huge tensor": lambda: torch.full((5, 3), 3e38), "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(5, 0), "one row": lambda: vectors(1, 3), "7 columns": lambda: vectors(5, 7),
    "a scalar": lambda: torch.tensor(0.5), "4 axes": lambda: vectors(2, 5, 3, 1),
    "integers": lambda: torch.arange(15).reshape(5, 3), "negative labels": lambda: torch.tensor([-1, 0, 1, 0, 1]),
    "large labels": lambda: torch.tensor([0, 1, 7, 0, 1]), "real labels": lambda: torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0]),
    "complex tensor": lambda: torch.ones(5, 3, dtype=torch.complex64),
    "boolean tensor": lambda: torch.ones(5, 3, dtype=torch.bool), "half tensor": lambda: vectors(5, 3).half(),
    "sparse tensor": lambda: torch.eye(5).to_sparse(), "meta tensor": lambda: torch.empty(5, 3, device="meta"),
    "numpy array": lambda: vectors(5, 3).numpy(), "numpy labels": lambda: np.array([0, 1, 2, 0, 1]),
    "numpy strings": lambda: np.array(["a", "b"]), "numpy objects": lambda: np.array([None, {}], dtype=object),
    "a list of lists": lambda: vectors(5, 3).tolist(), "a Linear": lambda: nn.Linear(7, 5), "no weights": nn.ReLU,
    "numpy loader": lambda: [(vectors(4, 3).numpy(), np.array([0, 1, 0, 1]))],
    "numpy targets": lambda: [(vectors(4, 3), np.array([0, 1, 0, 1]))], "list targets": lambda: [(vectors(4, 3), [0, 1, 0, 1])],
    "tuple of lists": lambda: ([[1.0, 2.0, 3.0]], [0]),
    "nan loader": lambda: [(torch.full((4, 3), NAN), torch.tensor([0, 1, 0, 1]))], "loader of text": lambda: [("a", "b")],
    "loader without targets": lambda: [vectors(4, 3)],
    "empty batches": lambda: [(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))],
    "a pair": lambda: (vectors(4, 3), torch.tensor([0, 1, 0, 1])),
    "labels too large": lambda: [(vectors(4, 3), torch.tensor([0, 1, 5, 1]))], "a folder": lambda: ".",
    "no such folder": lambda: "nowhere/file.safetensors", "a nul in a path": lambda: "a\0b", "a long path": lambda: "a" * 5000,
}
# fmt: on


@dataclass
class Door:
    """Something that users call, and how to make arguments that it serves."""

    name: str
    function: Callable[..., Any]
    served: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, tuple[Any, bool]]:
        """Names with the annotation and whether a value must be given; ``*`` for any number of them."""
        hints = _hints(self.function)
        found = {}
        for one in inspect.signature(self.function).parameters.values():
            if one.kind is not one.VAR_KEYWORD and one.name not in UNTRIED:
                several = one.kind is one.VAR_POSITIONAL
                if several and f"{self.name.split('.')[-1]}.*" not in SERVED:
                    continue  # of torch's own Module
                annotation = hints.get(one.name, one.annotation)
                annotation = Any if annotation is one.empty else annotation
                found[SEVERAL if several else one.name] = (annotation, several or one.default is one.empty)
        return found

    def arguments(self) -> dict[str, Any]:
        """Arguments that are served."""
        last = self.name.split(".")[-1]
        parameters = self.parameters.items()
        return {
            name: self.value(name, kind)
            for name, (kind, needed) in parameters
            if needed or f"{last}.{name}" in SERVED
        }

    def value(self, name: str, annotation: Any) -> Any:
        """One such argument."""
        last = self.name.split(".")[-1]
        for key in (f"{last}.{name}", name):
            for table in (self.served, SERVED):
                if key in table:
                    return table[key]()
        return _simple(annotation)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result, with iterators and context managers gone through."""
        named = {name: value for name, value in arguments.items() if name != SEVERAL}
        result = self.function(*arguments.get(SEVERAL, ()), **named)
        if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, nn.Module):
            with result:
                return None
        return list(result) if isinstance(result, Iterator) else result


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    owner: Any = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


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
def doors() -> tuple[Door, ...]:
    """All of them, from the public names."""
    found: dict[int, Door] = {}
    modules = [fb, *(one for one in map(vars(fb).get, fb.__all__) if inspect.ismodule(one))]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if name not in INTERNAL and (inspect.isclass(thing) or inspect.isfunction(thing)):
                found.setdefault(id(thing), Door(f"{module.__name__}.{name}", thing))
    made: list[tuple[str, Any, dict[str, Any]]] = [
        ("CategoricalPredictive", fb.predictive.CategoricalPredictive(vectors(4, 5, 3)), {}),
        ("GaussianPredictive", fb.predictive.GaussianPredictive(vectors(4, 5, 1), 0.5), REAL),
        ("Categorical", fb.likelihoods.Categorical(), {}),
        ("Gaussian", fb.likelihoods.Gaussian(), REAL),
        ("Bernoulli", fb.likelihoods.Bernoulli(), BINARY),
        ("TensorLoader", loader(), {}),
    ]
    made += [(name, small(name), {}) for name in fb.methods.METHODS]
    made += [(f"{name}.posterior", fitted(name), _of(fitted(name))) for name in fb.methods.METHODS]
    for door in list(found.values()):
        if inspect.isclass(door.function) and issubclass(door.function, Transform):
            name = door.name.split(".")[-1]
            transform = door.call(door.arguments()).eval()
            made.append((name, transform, _points(name, transform)))
    methods = [door for name, thing, served in made for door in _methods(name, thing, served)]
    return (*found.values(), *methods)


# shapes of what a map of vectors of length 3 does not take
STARTS = {
    "Argmax": (5, 9),
    "Augment": (5, 2),
    "ChannelsFirst": (4, 4, 4),
    "Checkerboard": (4, 4, 4),
    "MaxPool": (5, 12),
}
STARTS |= {
    "MultiScale": (5, 16),
    "OneHot": (5, 9),
    "Reshape": (5, 12),
    "Slice": (5, 4),
    "Squeeze": (4, 4, 4),
    "VAELayer": (5, 2),
}
STARTS |= {"Dequantization": (5, 3), "Integers": (5, 3)}


def _points(name: str, transform: Any) -> dict[str, Callable[[], Any]]:
    """Where its two directions are defined, if not at vectors of length 3."""
    if name not in STARTS:
        return {}
    start = vectors(*STARTS[name])
    end = transform(start)[0].detach()
    return {"z": lambda: start, "x": lambda: end}


def _of(posterior: Any) -> dict[str, Callable[[], Any]]:
    """Arguments that the methods of this posterior serve."""
    return {
        "load.path": lambda: posterior.save("own.safetensors"),
        "log_prob.values": lambda: posterior.draws(1, seed=0),
        "index": lambda: 0,
    }


def _methods(name: str, thing: Any, served: dict[str, Any]) -> list[Door]:
    """The public methods that our own classes define."""
    names = {
        key
        for kind in type(thing).__mro__
        if kind.__module__.startswith("flowbnn")
        for key, value in vars(kind).items()
        if not key.startswith("_") and isinstance(value, types.FunctionType | classmethod)
    }
    return [
        Door(f"{name}.{key}", getattr(thing, key), served)
        for key in sorted(names)
        if not {key, f"{name}.{key}"} & {*INTERNAL}
    ]


def _nan(result: Any) -> bool:
    """Whether NaN is among the numbers of a result."""
    if isinstance(result, Tensor):
        return result.is_floating_point() and result.device.type != "meta" and bool(result.isnan().any())
    if isinstance(result, float):
        return math.isnan(result)
    if isinstance(result, Mapping):
        return any(map(_nan, result.values()))
    if isinstance(result, nn.Module):
        return any(map(_nan, result.state_dict().values()))
    if isinstance(result, fb.predictive.Predictive):
        return _nan(result.standard_error)
    return isinstance(result, Sequence) and not isinstance(result, str) and any(map(_nan, result))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No output, no warnings, an alarm against hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(door: Door, wrong: Mapping[str, str]) -> tuple[str, str]:
    """One try, with the arguments of ``wrong`` replaced by values of :data:`WRONG`: how it ended, and what failed, if anything."""
    with _quiet():
        arguments = door.arguments()
        changes = {name: WRONG[label]() for name, label in wrong.items()}
        forbidden = [name for name, value in changes.items() if not allows(door.parameters[name][0], value)]
        arguments |= {name: [value] if name == SEVERAL else value for name, value in changes.items()}
        flow = door.name.endswith((".forward", ".inverse"))  # which is exact up to inputs of scale 100
        sick = any(label[:3] in ("nan", "inf", "hug" if flow else "nan") for label in wrong.values())
        try:
            result = door.call(arguments)
        except fb.FlowBNNError as error:
            text = str(error)
            return (
                ("refused", "") if text and "\n" not in text else ("failed", f"not one line: {text!r:.200}")
            )
        except TypeError as error:
            if len(traceback.extract_tb(error.__traceback__)) <= 3 and "argument" in str(error):
                return "refused", ""
            return "failed", _trace(error)
        except Exception as error:
            return "failed", _trace(error)
    if _nan(result) and not sick:
        return "failed", "served with NaN"
    if forbidden and forbidden[0] not in (
        SEVERAL,
        "context",
        "abstain_above",
    ):  # which may be unused, or infinity
        return "failed", f"served, though the annotation of {forbidden[0]} does not allow it"
    return "served", ""


def _trace(error: BaseException) -> str:
    """What a bare trace ends with, and the last place of ours in it."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "flowbnn" in frame.filename]
    where = f" in {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{where}: {short(error)}"


def cases(seed: int, every: bool = False) -> Iterator[tuple[Door, dict[str, str]]]:
    """Wrong arguments without end: one of a door's, sometimes two. Or every argument with every value, once."""
    dice = random.Random(seed)
    open_doors = [door for door in doors() if door.parameters]
    while not every:
        door = dice.choice(open_doors)
        names = dice.sample(list(door.parameters), min(len(door.parameters), dice.choice([1, 1, 1, 2])))
        labels = {name: dice.choice(list(WRONG)) for name in names}
        if all(possible(door, name, label) for name, label in labels.items()):
            yield door, labels
    for door in open_doors:
        for name in door.parameters:
            yield from ((door, {name: label}) for label in WRONG if possible(door, name, label))


def possible(door: Door, name: str, label: str) -> bool:
    """Not so an integer that is allowed and asks for a thousand years, and a tensor without numbers where none are looked at."""
    annotation = door.parameters[name][0]
    if label == "meta tensor" and door.name.endswith((".forward", ".inverse")):
        return False  # which torch serves
    return label != "2**70" or not allows(annotation, 2**70) or annotation is Any


def attack(seed: int, budget: Budget, opened: bool = True) -> Tally:
    """Every door with good arguments, if they are to be ``opened``, then wrong ones until the budget is over."""
    tally = Tally("fuzz", seed)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for door in doors() if opened else ():
                with _quiet():
                    served = _served(door)
                if served:
                    tally.add("failed", f"{door.name}() with good arguments: {served}")
            for door, wrong in cases(seed):
                if not budget.allows(tally):
                    break
                outcome, failure = tried(door, wrong)
                tally.add(outcome, failure and f"{door.name}({wrong}): {failure}")
        finally:
            os.chdir(before)
    return tally


def _served(door: Door) -> str:
    try:
        return "NaN" if _nan(door.call(deepcopy(door.arguments()))) else ""
    except Exception as error:
        if isinstance(error, fb.FlowBNNError) and error.kind == "unsupported":
            return ""
        return _trace(error)
