r"""Many samples of a network's outputs, in few and full passes.

With draws that all inputs share, a sample is the plain network with other weights, or the samples are folded into the batch: which of
them serves a network best is told in :mod:`flowbnn.posterior.noise_sampler`. A compiled pass is handed the draws of its sample instead
(:mod:`flowbnn.posterior.compiled`). Passes are cut to what the device's memory holds; when it runs out nevertheless, they are halved
and the work goes on.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flowbnn.errors import FlowBNNWarning
from flowbnn.noise import (
    Noise,
    NoisePass,
    Setting,
    absorbs,
    noise_layers,
    noise_mode,
    settings_of,
    weight_scale,
)
from flowbnn.posterior.base import Prediction, PredictOptions
from flowbnn.posterior.batches import apply, call, join, mirrored, pad, repeat, rows, take, tensors_of
from flowbnn.posterior.compiled import Form, GivenDraws, Unasked, form_for, pass_given, reason
from flowbnn.posterior.forward import (
    Kept,
    Limit,
    casting,
    checked,
    compiled,
    device_of,
    dtype_of,
    evaluating,
    even,
    parts_of,
    uncompilable,
    unguarded,
)
from flowbnn.training.device import many_shapes, unconcerned

__all__ = [
    "Plan",
    "Sampler",
    "ScaledWeights",
    "absorbable",
    "device_of",
    "dtype_of",
    "evaluating",
    "observe",
    "plan_for",
    "sample_outputs",
]

# -------------------- absorbing.py

_BUFFERS: WeakKeyDictionary[nn.Module, dict[Any, nn.Parameter]] = WeakKeyDictionary()


def absorbable(model: nn.Module) -> tuple[str, ...]:
    """Layers whose shared noise their weights can take: torch's linear and convolution layers with a weight of their own.

    Noise at site ``position`` has one vector for a linear layer that reads plain vectors; whether it does, a trial must tell.
    """
    uses = Counter(
        id(own) for part in parts_of(model) for own in part._parameters.values() if own is not None
    )
    found = []
    for name, layer in noise_layers(model).items():
        module = model.get_submodule(name)
        fits = layer.site == "channel" or isinstance(module, nn.Linear)
        if fits and layer.layout.side == "input" and absorbs(module) and uses[id(module.weight)] == 1:
            found.append(name)
    return tuple(found)


class ScaledWeights:
    """Stand-ins for the weights of some layers, to be filled with those of one sample after the other.

    Inside the ``with`` block these layers have no noise of their own. Whatever happens in it, the network gets its weights back.

    Args:
        model: a stochastic network.
        names: of the layers, as :func:`absorbable` gives them.
        state: the pass that holds the shared draws.
        half: precision of the stand-ins, where the layers run in it; None is that of the weights.
        keep: use the same memory in every prediction, which compiled passes and CUDA graphs need.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        state: NoisePass,
        half: torch.dtype | None = None,
        keep: bool = False,
    ) -> None:
        self.names, self.state = names, state
        layers = noise_layers(model)
        self.layers: list[Noise] = [layers[name] for name in names]
        self.modules = [model.get_submodule(name) for name in names]
        self.weights: list[nn.Parameter] = [module._parameters["weight"] for module in self.modules]  # type: ignore[misc]
        self.draws: list[Tensor] = [
            vectors(layer, state, weight.device)
            for layer, weight in zip(self.layers, self.weights, strict=True)
        ]
        kept = _BUFFERS.setdefault(model, {}) if keep else {}
        self.buffers = []
        for name, weight in zip(names, self.weights, strict=True):
            dtype = half if half is not None and weight.dtype == torch.float32 else weight.dtype
            key = (name, tuple(weight.shape), weight.stride(), dtype, weight.device)
            if key not in kept:
                kept[key] = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=False)
            self.buffers.append(kept[key])

    def fill(self, index: int) -> None:
        """Make the network the sample of this index."""
        parts = zip(self.modules, self.weights, self.draws, self.buffers, strict=True)
        for module, weight, draws, buffer in parts:
            torch.mul(weight, weight_scale(module, draws[index]), out=buffer.data)

    def __enter__(self) -> "ScaledWeights":
        self.before = self.state.settings
        self.state.settings = {**self.before, **{layer.key: Setting("off") for layer in self.layers}}
        for module, buffer in zip(self.modules, self.buffers, strict=True):
            module._parameters["weight"] = buffer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.state.settings = self.before
        for module, weight in zip(self.modules, self.weights, strict=True):
            module._parameters["weight"] = weight


def vectors(layer: Noise, state: NoisePass, device: torch.device) -> Tensor:
    """The shared draws of a layer, ``[samples, dim]``."""
    if state.given is not None:
        return state.given.draws(layer, ())
    _, samples, seed, _ = state.settings[layer.key]
    return layer.shared_vectors(samples, seed, device)


# -------------------- plans.py

# products of feature maps cost some hundredths of a pass on a CPU, and a fifth or more on a GPU, which waits for its memory
LATE_SHARE = {"cpu": 0.05, "cuda": 0.2}  # of the work, before the first noise
LEAST_WORK = {"cpu": 5e8, "cuda": 2e11}  # floating-point operations of a pass for one sample


@dataclass(frozen=True)
class Plan:
    """What the trial found.

    Args:
        fold: ``"late"`` (at the layer ``first``), ``"input"`` or ``"single"``.
        first: the layer at which a late fold happens.
        absorbed: layers whose shared noise their weights can take.
        whole: whether no other noise is left then, so that a sample is the plain network.
        work: floating-point operations of one row in linear and convolution layers.
        before: the share of them before the first noise.
        half: whether the weights may stand in half precision when that is what layers run in.
    """

    fold: str
    first: str = ""
    absorbed: tuple[str, ...] = ()
    whole: bool = False
    work: float = 0.0
    before: float = 0.0
    half: bool = False

    def absorbs(self, rows: int, device: torch.device, compiled: bool = False) -> bool:
        """Whether to absorb shared draws when one sample has passes of this many rows."""
        if not self.absorbed:
            return False
        if self.fold == "single" or (compiled and self.whole):
            return True
        kind = "cpu" if device.type == "cpu" else "cuda"
        if self.fold == "late" and self.before > LATE_SHARE[kind]:
            return False
        return self.work * rows >= LEAST_WORK[kind]


_PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(model: nn.Module, inputs: Any, half: torch.dtype | None = None) -> Plan:
    """The plan for inputs of this shape, found once and remembered with the network."""
    known = _PLANS.setdefault(model, {})
    layouts = tuple((name, layer.layout, layer.site) for name, layer in noise_layers(model).items())
    candidates = absorbable(model)
    key = (layouts, candidates, half, tuple(tensor.shape[1:] for tensor in tensors_of(inputs)))
    if key not in known:
        few = take(inputs, 0, 2)
        shaken = _shaken(inputs)
        if rows(inputs) == 1:
            few = join([few, mirrored(few)])
            try:
                return known.setdefault(
                    key, _find_plan(model, few, join([shaken, mirrored(shaken)]), candidates, half)
                )
            except Exception:  # a network for one row at a time
                return Plan("single")
        known[key] = _find_plan(model, few, shaken, candidates, half)
    return known[key]


def observe(model: nn.Module, inputs: Any) -> dict[str, tuple[int, ...]]:
    """The noisy layers in the order a pass calls them, with the shape of what each multiplies (empty if it is no tensor)."""
    found: dict[str, tuple[int, ...]] = {}
    handles = []
    for name, layer in noise_layers(model).items():

        def record(
            module: nn.Module,
            args: Any,
            kwargs: Any,
            output: Any,
            name: str = name,
            side: str = layer.layout.side,
        ) -> None:
            value = output if side == "output" else next(iter((*args, *kwargs.values())), None)
            found.setdefault(name, tuple(value.shape) if isinstance(value, Tensor) else ())

        handles.append(model.get_submodule(name).register_forward_hook(record, with_kwargs=True))
    try:
        with evaluating(model), noise_mode(model, "off"):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _work(model: nn.Module, few: Any, first: str) -> tuple[float, float]:
    """Floating-point operations of one row, and the share of them before the noise of the layer ``first``."""
    counter = FlopCounterMode(display=False)
    before: list[float] = []

    def record(*_: Any) -> None:
        if not before:
            before.append(counter.get_total_flops())

    module = model.get_submodule(first)
    late = noise_layers(model)[first].passes_through or noise_layers(model)[first].layout.side == "output"
    handle = module.register_forward_hook(record) if late else module.register_forward_pre_hook(record)
    try:
        with evaluating(model), noise_mode(model, "off"), counter:
            call(model, few)
    finally:
        handle.remove()
    total = float(counter.get_total_flops())
    return total / rows(few), (before[0] / total if total and before else 0.0)


class Trial:
    """Draws between a half and one and a half in place of the posterior's, which may be too narrow to tell two plans apart."""

    samples = 3

    def __init__(self, state: NoisePass, device: torch.device) -> None:
        self.state, self.device = state, device

    def draws(self, layer: Noise, at: tuple[int, ...]) -> Tensor:
        low, high = self.state.part or (0, self.samples)
        source = torch.Generator(self.device).manual_seed(layer.key)
        drawn = torch.rand((self.samples, *at, layer.layout.dim), generator=source, device=self.device)
        return 0.5 + drawn[low:high]


def _shaken(inputs: Any) -> Any:
    """Two rows, moved at random by as much as inputs differ: rows of zeros, or two alike, would tell nothing about a plan."""
    source = torch.Generator().manual_seed(0)

    def shake(tensor: Tensor) -> Tensor:
        some = tensor[:2]
        if not tensor.is_floating_point():
            return some
        scale = tensor[:64].float().std() if tensor[:64].numel() > 1 else tensor.new_ones(()).float()
        scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
        noise = torch.randn(some.shape, generator=source).to(tensor.device)
        return (some + scale * noise).to(tensor.dtype)

    return apply(inputs, shake)


def _find_plan(
    model: nn.Module, few: Any, shaken: Any, candidates: tuple[str, ...], half: torch.dtype | None
) -> Plan:
    """The plan, tried on shaken rows where these tell something, else on the rows themselves."""
    seen = observe(model, few)
    if seen:
        for trial in (shaken, few):
            plan = _try_plan(model, trial, seen, candidates, half)
            if plan is not None:
                work, before = _work(model, few, next(iter(seen)))
                return replace(plan, work=work, before=before)
    return Plan("single")  # where the network itself fails, the real call says why


def _try_plan(
    model: nn.Module,
    few: Any,
    seen: dict[str, tuple[int, ...]],
    candidates: tuple[str, ...],
    half: torch.dtype | None,
) -> Plan | None:
    """The plan that these rows show to be right; None where the network refuses them or they cannot tell."""
    order = list(seen)
    device = device_of(model)
    samples = 3
    layers = noise_layers(model)

    def attempt(fold: str, low: int, high: int) -> Tensor | None:
        state.part = (low, high)
        state.entry = (layers[order[0]].key, high - low) if fold == "late" else (-1, 1)
        try:
            return call(model, repeat(few, high - low) if fold == "input" else few)
        except Exception:  # whatever the reason, this way does not serve this network
            return None

    def absorbed(names: tuple[str, ...], half: torch.dtype | None) -> Tensor | None:
        state.part, state.entry = (0, samples), (-1, 1)
        outputs = []
        try:
            with ScaledWeights(model, names, state, half) as weights, casting(device, half):
                for index in range(samples):
                    weights.fill(index)
                    state.part = (index, index + 1)
                    outputs.append(call(model, few))
        except Exception:  # as above
            return None
        return torch.cat(outputs)

    def right(found: Tensor | None) -> bool:
        return (
            found is not None and found.shape == truth.shape and bool((found - truth).abs().max() <= allowed)
        )

    state = NoisePass(settings_of(model, "shared", samples, 0), shares=False)
    state.given = Trial(state, device)
    with evaluating(model), state:
        with torch.autocast(device.type, enabled=False):
            singles = [attempt("single", index, index + 1) for index in range(samples)]
            alone = [single for single in singles if single is not None]
            if len(alone) < samples or not all(bool(single.isfinite().all()) for single in alone):
                return None
            truth = torch.cat(alone)
            # a wrong plan errs by as much as samples differ; arithmetic by far less
            apart = (torch.stack(alone).float() - alone[0].float()).abs().max()
            if not bool(apart > 1e-4 * truth.abs().max()):
                return None
            allowed = 0.02 * apart + 1e-5 * truth.abs().max()
            folds = ("late", "input") if layers[order[0]].layout.batch_axis == 0 else ("input",)
            fold = next((fold for fold in folds if right(attempt(fold, 0, samples))), "single")
            names = tuple(
                name
                for name in order
                if name in candidates and (layers[name].site == "channel" or len(seen[name]) == 2)
            )
            names = names if names and right(absorbed(names, None)) else ()
        halves = bool(names) and half is not None and absorbed(names, half) is not None
    first = order[0] if fold == "late" else ""
    return Plan(fold, first, names, len(names) == len(order), half=halves)


# floating-point operations of a compiled pass that takes several samples of few inputs: 128 images of VGG16 leave much of a large GPU
# idle (one, two, four and eight samples in a pass: 0.88, 1.08, 1.25 and 1.38 of the plain network's speed on an H200); a processor has
# its hands full with one sample
FILLED = {"cpu": 0.0, "cuda": 6.6e11}
WASTED = 0.25  # of the samples: at most so many are computed for nothing in a last pass that is not full
MOSTLY = 0.5  # of the work before the first noise: from here on, having it once saves more than compiling


Piece = tuple[
    int, int, Any, bool
]  # first and last row, the inputs, and whether they have the shape of a compiled pass
WORTH_COMPILING = 3e16  # floating-point operations of a job: minutes on a large GPU, where compiling takes the better part of one
GRAPHED = 7e11  # a pass with less work than this waits for its launches: replay it from a CUDA graph


class Outputs:
    """Outputs ``[samples, batch, ...]``, allocated when the shape of a row is known, in float32 or better."""

    def __init__(self, samples: int, batch: int) -> None:
        self.out: Tensor | None = None
        self.samples, self.batch = samples, batch

    def write(self, outputs: Tensor, low: int, high: int, start: int, stop: int) -> None:
        if self.out is None:
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            self.out = outputs.new_empty((self.samples, self.batch, *outputs.shape[2:]), dtype=dtype)
        self.out[low:high, start:stop] = outputs

    @property
    def tensor(self) -> Tensor:
        assert self.out is not None
        return self.out


class Sampler:
    """Samples of a stochastic network's outputs. The draws are made once, whatever the number of calls.

    Args:
        prediction: the prediction they are for.
        plan: ``"auto"`` chooses, ``"absorb"`` and ``"fold"`` insist (where the network allows it).
    """

    def __init__(self, prediction: Prediction, plan: str = "auto") -> None:
        self.prediction, self.wanted = prediction, plan
        self.model, self.device, self.half = prediction.model, prediction.device, prediction.half
        self.samples, self.shared, self.seed = prediction.samples, prediction.shared, prediction.seed
        self.scaled: ScaledWeights | None = None
        self.given: dict[int, GivenDraws] = {}
        self.told = False
        self.generator = None if self.shared else torch.Generator(self.device)
        mode, samples = ("shared", self.samples) if self.shared else ("sample", 1)
        settings = settings_of(self.model, mode, samples, self.seed, self.generator)  # type: ignore[arg-type]
        self.state = prediction.stack.enter_context(NoisePass(settings, shares=False, held={}))
        self.layers = noise_layers(self.model)

    @property
    def limit(self) -> Limit:
        assert self.prediction.limit is not None
        return self.prediction.limit

    def __call__(self, inputs: Any, low: int, high: int) -> Tensor:
        """Outputs ``[high - low, batch, ...]`` of the samples from ``low`` up to ``high``."""
        inputs = self.prediction.ready(inputs)
        if self.generator is not None:  # every batch its own draws
            self.generator.manual_seed(self.seed + self.prediction.batch)
        # trials have two rows where there are two; where these do not fit, one sample of one row goes through at a time
        trial = partial(plan_for, self.model, inputs, self.half)
        plan = self.limit.attempt(trial, min(2, rows(inputs))) or Plan("single")
        size = even(rows(inputs), self.limit.rows)
        result = Outputs(high - low, rows(inputs))
        fast = None
        if self._compiles(plan, rows(inputs)):
            form = form_for(self.model, inputs, self.half)
            if self.wanted == "auto" and self._hand(inputs, low, high, form, plan, result):
                return result.tensor
            graphs = self.graphs(plan.work * (self.prediction.fixed or size))
            if plan.whole and self.wanted != "fold" and (form.pieces or not form.failure):
                fast = compiled(self.prediction.kept, graphs)
            self._tell_uncompiled(form, fast is not None)
        absorb = self.shared and plan.absorbs(size, self.device, fast is not None)
        if self.wanted != "auto":
            absorb = self.shared and bool(plan.absorbed) and self.wanted == "absorb"
        if absorb:
            self._absorb(inputs, low, high, plan, fast, result)
        else:
            self._fold(inputs, low, high, plan, result)
        return result.tensor

    def _compiles(self, plan: Plan, count: int) -> bool:
        if not self.shared:
            if self.prediction.options.compile is True:
                self._tell("compile=True has no effect: draws are not shared, so the passes run as they are")
            return False
        if self.prediction.options.compile == "auto" and plan.fold == "late" and plan.before > MOSTLY:
            return False  # a late fold does most of the work once
        return self.worth_compiling(plan.work * self.samples * max(self.prediction.total, count))

    def _tell(self, line: str) -> None:
        if not self.told:
            self.told = True
            warnings.warn(line, FlowBNNWarning)

    def _tell_uncompiled(self, form: Form, pieces: bool) -> None:
        if form.failure:
            way = "it is compiled in pieces" if pieces else "the passes run as they are"
            self._tell(f"the network does not compile in one graph ({form.failure}), so {way}")

    def _hand(self, inputs: Any, low: int, high: int, form: Form, plan: Plan, result: Outputs) -> bool:
        """Compiled passes that are handed their draws, of one sample or of a few; False where the network does not compile."""
        if form.failure:
            return False
        if id(form) not in self.given:
            self.given[id(form)] = GivenDraws(self.model, form, self.half, self.state)
        given = self.given[id(form)]
        # what is compiled asserts how tensors lie, and fails where torch's libraries have changed their mind since
        failures: tuple[type[Exception], ...] = (*uncompilable(), Unasked, AssertionError)

        def cut() -> tuple[int, bool, Any, list[Piece]]:
            """How many samples go through at once, whether from a CUDA graph, by what function, and the inputs of its passes."""
            pieces = self.pieces(inputs)
            several = self._several(plan, high - low)
            given.table.entry = (self.layers[plan.first].key, several) if plan.fold == "late" else (-1, 1)
            graphs = self.graphs(plan.work * self.prediction.fixed * several)
            return several, graphs, compiled(self.prediction.kept, graphs, pass_given, whole=True), pieces

        def take_samples(index: int, several: int, pieces: list[Piece], one_pass: Any) -> bool:
            draws, at = given.rows(index, index + several, high), index - low
            count = min(several, high - index)
            for start, stop, some, fits in pieces:
                size = rows(some)
                if plan.fold != "late" and several > 1:
                    some = repeat(some, several)
                outputs = (one_pass if fits else pass_given)(self.model, given.table, draws, some)
                outputs = checked(outputs, several * size).reshape(several, size, *outputs.shape[1:])
                result.write(outputs[:count, : stop - start], at, at + count, start, stop)
            return True

        several, graphs, one_pass, pieces = cut()
        index = low
        try:
            with self.lifted(), given.handed(), unconcerned(), many_shapes(), ExitStack() as settled:
                while index < high:
                    work = partial(take_samples, index, several, pieces, one_pass)
                    if self.limit.attempt(work, self.prediction.fixed * several) is None:
                        settled.close()
                        self.prediction.fixed = 0
                        several, graphs, one_pass, pieces = cut()
                        continue
                    if index == low and graphs:
                        settled.enter_context(unguarded())
                    index += several
        except failures as error:
            form.failure, form.pieces = reason(error), type(error).__name__ in ("Unsupported", "UserError")
            del self.given[id(form)]
            return False
        return True

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without this prediction's pass around them, the passes that are compiled are the same in every prediction."""
        self.state.__exit__()
        try:
            yield
        finally:
            self.state.__enter__()

    def _several(self, plan: Plan, number: int) -> int:
        """How many samples a compiled pass takes so that it fills the device; one, where only some of them are asked for."""
        if plan.fold == "single" or number < self.samples:
            return 1
        filled = FILLED["cpu" if self.device.type == "cpu" else "cuda"] / max(
            1.0, plan.work * self.prediction.fixed
        )
        several = max(1, min(int(filled), self.limit.rows // self.prediction.fixed, number))
        several = 2 ** (several.bit_length() - 1)  # every number is compiled anew: a few must do
        while -number % several > WASTED * number:
            several //= 2
        return several

    def pieces(self, inputs: Any) -> list[Piece]:
        """The inputs cut for compiled passes of constant shape: a last piece that is nearly full is padded."""
        count, found = rows(inputs), []
        size = min(self.prediction.fixed or even(count, self.limit.rows), self.limit.rows)
        self.prediction.fixed = size
        for start in range(0, count, size):
            stop = min(start + size, count)
            some, fits = take(inputs, start, stop), 2 * (stop - start) >= size
            found.append((start, stop, pad(some, size) if fits and stop - start < size else some, fits))
        return found

    def worth_compiling(self, work: float) -> bool:
        """Whether to compile for a job of so many floating-point operations."""
        if self.prediction.options.compile == "auto":
            return self.device.type == "cuda" and work >= WORTH_COMPILING
        return bool(self.prediction.options.compile)

    def graphs(self, work: float) -> bool:
        """Whether to replay passes of so many floating-point operations from a CUDA graph."""
        return self.device.type == "cuda" and work < GRAPHED

    def _absorb(self, inputs: Any, low: int, high: int, plan: Plan, fast: Any, result: Outputs) -> None:
        """The plain network with the weights of one sample after the other."""
        self.state.part, self.state.entry = None, (-1, 1)
        if self.scaled is None or self.scaled.names != plan.absorbed:
            half = self.half if plan.half else None
            self.scaled = ScaledWeights(self.model, plan.absorbed, self.state, half, keep=fast is not None)
        with self.scaled as weights:
            for index in range(low, high):
                weights.fill(index)
                self.state.part = (index, index + 1)
                self.prediction.compiles = fast is not None
                for outputs, start, stop, _ in self.prediction.chunks(inputs, self.prediction.network):
                    result.write(outputs.unsqueeze(0), index - low, index - low + 1, start, stop)

    def _fold(self, inputs: Any, low: int, high: int, plan: Plan, result: Outputs) -> None:
        """Several samples in one pass, as blocks of the batch."""
        count, start = rows(inputs), 0
        while start < count:
            at_once = 1 if plan.fold == "single" else min(high - low, self.limit.rows)  # samples in one pass
            stop = min(start + max(1, self.limit.rows // at_once), count)
            some, first = take(inputs, start, stop), low
            while first < high:
                last = min(first + at_once, high)
                blocks = last - first
                self.state.part = (first, last)
                self.state.entry = (self.layers[plan.first].key, blocks) if plan.fold == "late" else (-1, 1)
                batch = repeat(some, blocks) if plan.fold == "input" else some
                found = self.limit.attempt(partial(call, self.model, batch), blocks * (stop - start))
                if found is not None:
                    outputs = checked(found, blocks * (stop - start))
                    shape = (blocks, stop - start, *outputs.shape[1:])
                    result.write(outputs.reshape(shape), first - low, last - low, start, stop)
                    first = last
                elif blocks > 1:
                    at_once = max(1, min(at_once, self.limit.rows // (stop - start)))
                else:  # fewer inputs, and their samples from the first
                    break
            start = stop if first >= high else start


def sample_outputs(
    model: nn.Module,
    inputs: Any,
    samples: int,
    *,
    plan: str = "auto",
    kept: Kept | None = None,
    **options: Any,
) -> Tensor:
    """Outputs ``[samples, batch, ...]`` of a stochastic network; the options are those of a prediction."""
    with Prediction(model, PredictOptions(samples, **options), samples, kept or Kept()) as prediction:
        return Sampler(prediction, plan)(inputs, 0, samples)
