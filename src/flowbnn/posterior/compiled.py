r"""The draws of one sample handed to a compiled pass, so that :math:`z \circ x` melts into the kernels before it.

All vectors of a sample lie in one row, ``[samples, width]``, so that a pass has one more input, of constant shape: the row of its
sample, or several rows where a pass takes several samples. Inside, every layer reads its slice. The rows are made ahead, in few
launches; those of maps (site ``position``) for as many samples as memory holds.
"""

import threading
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, dtype_of, evaluation_mode, pad, repeat, rows, take
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import settings_of
from flowbnn.noise.batched import shared_draws
from flowbnn.noise.layout import absorbs
from flowbnn.noise.passes import NoisePass, Setting
from flowbnn.posterior.prediction import Prediction, check_rows, compiled, even
from flowbnn.posterior.recording import Recording
from flowbnn.posterior.weights import StandIns
from flowbnn.training.device import quiet_compiler, unlimited_recompiles

ROW_BYTES = {"cpu": 2**25, "cuda": 2**28}  # of the draws that wait for their passes
MAPS = 16  # samples whose maps are drawn at a time: while their passes run, the next ones are launched
ALIGNED = 16  # numbers: every slice of a row begins where wide loads may
LONGEST = 160  # letters of a reason
CLOSE = 0.02  # of the largest output: what rounding to half precision may change

Ask = tuple[str, tuple[int, ...]]  # a layer, and the positions at which it multiplies


def reason(error: BaseException) -> str:
    """The first line of what an error says, and the next where torch says there only who failed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = " ".join(lines[:2]) if lines[0].endswith("raised:") else lines[0]
    return told[:LONGEST].rstrip(" .:")


def uncompilable() -> tuple[type[Exception], ...]:
    """What torch raises where a network does not compile."""
    from torch._dynamo import exc  # takes a second to load, which only those who compile should wait for

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def unguarded() -> AbstractContextManager[Any]:
    """Compiled functions that have been called as they will be called are not checked again: half of what a call costs a CPU.

    torch has this setting for all threads, so it is left alone where another one might run compiled functions of its own.
    """
    threads = threading.enumerate()
    alone = threading.current_thread() is threading.main_thread() and sum(not t.daemon for t in threads) == 1
    return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if alone else nullcontext()


class Unasked(Exception):
    """A pass asks for draws that no trial told of: what a layer multiplies has another shape with more rows."""


class Table:
    """Where every layer finds its slice of a row of draws, and where the samples enter the batch."""

    def __init__(self, settings: dict[int, Setting], starts: dict[tuple[int, tuple[int, ...]], int]) -> None:
        self.settings, self.starts = settings, starts
        self.entry = (-1, 1)


class Row:
    """The draws of the samples of one pass, ``[samples, width]``."""

    def __init__(self, table: Table, tensor: Tensor) -> None:
        self.table, self.tensor = table, tensor

    def draws(self, layer: Noise, at: tuple[int, ...], device: torch.device) -> Tensor:
        if (layer.key, at) not in self.table.starts:
            raise Unasked(f"noise is asked for at {at}, which two rows of inputs did not do")
        start, size = self.table.starts[layer.key, at], layer.layout.dim
        for count in at:
            size *= count
        return self.tensor[:, start : start + size].view(len(self.tensor), *at, layer.layout.dim)


def pass_given(model: nn.Module, table: Table, draws: Tensor, inputs: Any) -> Tensor:
    """One pass of the network with these draws, ``[samples, width]``: what is compiled."""
    state = NoisePass(table.settings, shares=False)
    state.given, state.entry = Row(table, draws), table.entry
    with state:
        return call(model, inputs)


@dataclass
class Form:
    """What a network's passes ask for, from a pass over two rows.

    Args:
        asks: layers and the positions at which they multiply, those of site ``channel`` first.
        weights: how the stand-ins for the weights lie in half precision; None where layers must have their own.
        failure: why the network does not compile, once that has been tried.
    """

    asks: tuple[Ask, ...] = ()
    weights: torch.memory_format | None = None
    failure: str = ""


def form_for(prediction: Prediction, inputs: Any) -> Form:
    """The form for inputs of this shape, made once and kept with the posterior."""
    shown, half = prediction.recorded(inputs), prediction.half
    return prediction.cache.get(("form", id(shown)), lambda: _make_form(prediction, inputs, shown, half))


def _make_form(prediction: Prediction, inputs: Any, shown: Recording, half: torch.dtype | None) -> Form:
    model, layers = prediction.own, noise_layers(prediction.own)
    names = {layer.key: name for name, layer in layers.items()}
    asks = [(names[key], at) for key, at in shown.asked]
    if shown.error is not None:
        return Form(failure=reason(shown.error))
    if not asks:
        return Form(failure="no noise is reached")
    calls = Counter(
        [name for (name, _), number in zip(asks, shown.asked.values(), strict=True) for _ in range(number)]
    )
    for name, layer in layers.items():
        if layer.site == "position" and calls[name] > 1:
            return Form(
                failure=f"layer '{name}' is called {calls[name]} times, with noise of its own each time"
            )
    asks.sort(key=lambda ask: layers[ask[0]].site == "position")
    weights = None
    if half is not None:
        with evaluation_mode(model), NoisePass(settings_of(model, "off"), shares=False):
            few = take(inputs, 0, 2)
            weights = _fitting(prediction, few, half, call(model, few))
    return Form(tuple(asks), weights)


def _fitting(
    prediction: Prediction, few: Any, half: torch.dtype, truth: Tensor
) -> torch.memory_format | None:
    """How weights may lie in half precision, so that the network still runs and gives what it gave."""
    formats = [torch.preserve_format]
    if truth.device.type == "cuda":  # where half precision is quickest with the channels last
        formats.insert(0, torch.channels_last)
    for kind in formats:
        try:
            with HalfWeights(prediction.own, half, kind, {}):
                outputs = call(prediction.own, few)
        except Exception:  # whatever the reason, this way does not serve this network
            continue
        gap = (outputs.float() - truth.float()).abs().max()
        if outputs.shape == truth.shape and bool(gap <= CLOSE * truth.float().abs().max()):
            return kind
    return None


class HalfWeights(StandIns):
    """Weights of linear layers and convolutions in half precision: autocast would cast them again in every pass.

    Args:
        half: the precision.
        kind: memory format of two-dimensional convolutions.
        kept: stand-ins of earlier predictions: the same memory serves again, which CUDA graphs need.
    """

    def __init__(
        self, model: nn.Module, half: torch.dtype, kind: torch.memory_format, kept: dict[Any, nn.Parameter]
    ) -> None:
        parts = list(model.modules())
        uses = Counter(id(own) for part in parts for own in part._parameters.values())
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        for number, module in enumerate(parts):
            weight: Any = module._parameters["weight"] if absorbs(module) else None
            if weight is None or weight.dtype != torch.float32 or uses[id(weight)] > 1:
                continue
            own = kind if weight.ndim == 4 else torch.preserve_format
            key = (number, weight.shape, weight.stride(), half, weight.device, own)
            if key not in kept:
                empty = torch.empty_like(weight, dtype=half, memory_format=own)
                kept[key] = nn.Parameter(empty, requires_grad=False)
            places.append((module._parameters, "weight", kept[key]))
        super().__init__(places)
        if self.places:  # every time: writing to a weight's .data would go unnoticed
            with torch.no_grad():
                torch._foreach_copy_([place[3] for place in self.places], [place[2] for place in self.places])


class GivenDraws:
    """The draws of all samples of a prediction, row by row.

    Args:
        prediction: whose draws they are.
        form: what its passes ask for.
        state: of the prediction: it has the seeds.
    """

    def __init__(self, prediction: Prediction, form: Form, state: NoisePass) -> None:
        model, half = prediction.own, prediction.half
        self.form, self.state, self.device, self.samples = form, state, prediction.device, prediction.samples
        self.layers = noise_layers(model)
        self.table = Table({layer.key: Setting("shared") for layer in self.layers.values()}, {})
        self.width = 0
        for name, at in form.asks:
            layer = self.layers[name]
            self.table.starts[layer.key, at] = self.width
            self.width += -(-layer.layout.dim * prod(at) // ALIGNED) * ALIGNED
        channel = list(dict.fromkeys(name for name, _ in form.asks if self.layers[name].site == "channel"))
        draws = shared_draws([self.layers[name] for name in channel], state, self.device)
        self.vectors = dict(zip(channel, draws, strict=True))
        self.dtype = torch.promote_types(dtype_of(model) or torch.float32, torch.float32)
        self.weights: AbstractContextManager[Any] = nullcontext()
        if form.weights is not None and half is not None:
            kept: dict[Any, nn.Parameter] = prediction.cache.get("half weights", dict)
            self.weights = HalfWeights(model, half, form.weights, kept)
        self.block: tuple[int, Tensor] = (0, torch.empty(0))

    def rows(self, first: int, last: int, high: int) -> Tensor:
        """The draws of the samples from ``first`` up to ``last``, ``[last - first, width]``; the last one again from ``high`` on.

        What is made ahead for the samples up to ``high`` is kept until others are asked for.
        """
        stop = min(last, high)
        start, block = self.block
        if not (start <= first and stop <= start + len(block)):
            kind = "cpu" if self.device.type == "cpu" else "cuda"
            each = max(1, ROW_BYTES[kind] // (4 * max(1, self.width)))
            maps = len(self.vectors) < len({name for name, _ in self.form.asks})
            each = max(last - first, min(each, MAPS) if maps else each)
            start, end = first, min(first + each, high if maps else self.samples)
            self.block = (start, torch.empty(0))  # let go of the last one before the next is made
            self.block = (start, block := self._filled(start, end))
        part = block[first - start : stop - start]
        return pad(part, last - first) if stop < last else part

    def _filled(self, start: int, stop: int) -> Tensor:
        block = torch.zeros(stop - start, self.width, dtype=self.dtype, device=self.device)
        places, vectors = [], []
        for name, at in self.form.asks:
            layer = self.layers[name]
            begin, size = self.table.starts[layer.key, at], layer.layout.dim * prod(at)
            place = block[:, begin : begin + size]
            if name in self.vectors:
                places.append(place)
                vectors.append(self.vectors[name][start:stop])
            else:
                seed = self.state.settings[layer.key].seed
                place.copy_(layer.shared_maps(at, start, stop, seed, self.device).flatten(1))
        if places:
            torch._foreach_copy_(places, vectors)
        return block


# -------------------- samples

# floating-point operations of a compiled pass that fills the device: 128 images of VGG16 leave much of a large GPU idle, which is
# quickest with 4,096 rows a pass; a CPU is full with one sample
FILLED = {"cpu": 0.0, "cuda": 2.7e12}
WASTED = 0.25  # of the samples: at most so many are computed for nothing in a last pass that is not full
GRAPHED = 7e11  # a pass with less work than this waits for its launches: replay it from a CUDA graph


def compiled_outputs(
    prediction: Prediction, state: NoisePass, inputs: Any, samples: range, plan: Any
) -> Tensor | None:
    """Outputs ``[len(samples), batch, ...]`` by compiled passes; None, after a warning, where the network does not compile."""
    form = form_for(prediction, inputs)
    failures: tuple[type[Exception], ...] = (*uncompilable(), Unasked, AssertionError)
    if not form.failure:
        try:
            passes = prediction.state.get(
                ("passes", id(form)), lambda: CompiledPasses(prediction, form, state)
            )
            with evaluation_mode(prediction.own):
                return passes(inputs, samples, plan)
        # what is compiled asserts how tensors lie, and fails where torch's libraries have changed their mind since
        except failures as error:
            form.failure = reason(error)
    prediction.warn_once(
        "compile",
        f"the network does not compile in one graph ({form.failure}), so the passes run as they are",
    )
    return None


def graphed(device: torch.device, work: float) -> bool:
    """Whether to replay passes of so many floating-point operations from a CUDA graph."""
    return device.type == "cuda" and work < GRAPHED


class CompiledPasses:
    """Compiled passes of constant shape, each of one sample or of as many as fill the device."""

    def __init__(self, prediction: Prediction, form: Form, state: NoisePass) -> None:
        self.prediction, self.state = prediction, state
        self.given = GivenDraws(prediction, form, state)

    def __call__(self, inputs: Any, samples: range, plan: Any) -> Tensor:
        prediction, given = self.prediction, self.given
        result: list[Tensor] = []

        def take_samples(index: int, several: int, pieces: list[Any], one_pass: Any) -> bool:
            draws, count = (
                given.rows(index, index + several, samples.stop),
                min(several, samples.stop - index),
            )
            for start, stop, some, fits in pieces:
                size = rows(some)
                batch = repeat(some, several) if plan.fold != "late" and several > 1 else some
                outputs = (one_pass if fits else pass_given)(prediction.own, given.table, draws, batch)
                outputs = check_rows(outputs, several * size).reshape(several, size, *outputs.shape[1:])
                if not result:
                    dtype = torch.promote_types(outputs.dtype, torch.float32)
                    shape = (len(samples), rows(inputs), *outputs.shape[2:])
                    result.append(outputs.new_empty(shape, dtype=dtype))
                at = index - samples.start
                result[0][at : at + count, start:stop] = outputs[:count, : stop - start]
            return True

        index = samples.start
        several, graphs, one_pass, pieces = self.cut(inputs, samples, plan)
        # without this prediction's pass around them, the passes that are compiled are the same in every prediction
        with (
            self.state.lifted(),
            given.weights,
            quiet_compiler(),
            unlimited_recompiles(),
            ExitStack() as settled,
        ):
            while index < samples.stop:
                work = partial(take_samples, index, several, pieces, one_pass)
                if prediction.attempt(work, prediction.fixed * several) is None:
                    settled.close()
                    prediction.fixed = 0
                    several, graphs, one_pass, pieces = self.cut(inputs, samples, plan)
                    continue
                if index == samples.start and graphs:
                    settled.enter_context(unguarded())
                index += several
        return result[0]

    def cut(self, inputs: Any, samples: range, plan: Any) -> tuple[int, bool, Any, list[Any]]:
        """How many samples go through at once, whether from a CUDA graph, by what function, and the pieces of the inputs.

        A piece is its first and last row, its inputs, and whether they have the shape of a compiled pass: a last one that is nearly
        full is padded.
        """
        prediction, count, pieces = self.prediction, rows(inputs), []
        prediction.fixed = size = min(prediction.fixed or even(count, prediction.limit), prediction.limit)
        for start in range(0, count, size):
            stop = min(start + size, count)
            some, fits = take(inputs, start, stop), 2 * (stop - start) >= size
            pieces.append((start, stop, pad(some, size) if fits and stop - start < size else some, fits))
        several = self.several(plan, len(samples))
        self.given.table.entry = (plan.first, several) if plan.fold == "late" else (-1, 1)
        graphs = graphed(prediction.device, plan.work * size * several)
        return several, graphs, compiled(prediction.cache, graphs, pass_given, whole=True), pieces

    def several(self, plan: Any, number: int) -> int:
        """How many samples a pass takes so that it fills the device; one, where only some of them are asked for."""
        prediction = self.prediction
        if not plan.fold or number < prediction.samples:
            return 1
        filled = FILLED["cpu" if prediction.device.type == "cpu" else "cuda"]
        several = int(filled / max(1.0, plan.work * prediction.fixed))
        several = max(1, min(several, prediction.limit // prediction.fixed, number))
        several = 2 ** (several.bit_length() - 1)  # every number is compiled anew: a few must do
        while -number % several > WASTED * number:
            several //= 2
        return several
