r"""Many samples of a network's outputs, in few and full passes.

With draws that all inputs share, a sample is the plain network with other weights, or the samples are folded into the batch: which of
them serves a network best is told in :mod:`flowbnn.inference.plans`. A compiled pass is handed the draws of its sample instead
(:mod:`flowbnn.inference.given`). Passes are cut to what the device's memory holds; when it runs out nevertheless, they are halved
and the work goes on.
"""

import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference.absorbing import ScaledWeights
from flowbnn.inference.batches import call, repeat, rows, take
from flowbnn.inference.given import Form, GivenDraws, Unasked, form_for, pass_given, reason
from flowbnn.inference.memory import max_rows
from flowbnn.inference.passes import (
    Compile,
    compiled,
    device_of,
    dtype_of,
    evaluating,
    uncompilable,
    unguarded,
)
from flowbnn.inference.plans import Plan, observe, plan_for
from flowbnn.inference.running import Passes, Piece, Result, checked, even
from flowbnn.layers import noise, noise_layers
from flowbnn.training.machine import many_shapes, unconcerned

__all__ = [
    "Sampler",
    "device_of",
    "dtype_of",
    "evaluating",
    "max_rows",
    "observe",
    "plan_for",
    "sample_outputs",
]

# floating-point operations of a compiled pass that takes several samples of few inputs: 128 images of VGG16 leave much of a large GPU
# idle (one, two, four and eight samples in a pass: 0.88, 1.08, 1.25 and 1.38 of the plain network's speed on an H200); a processor has
# its hands full with one sample
FILLED = {"cpu": 0.0, "cuda": 6.6e11}
WASTED = 0.25  # of the samples: at most so many are computed for nothing in a last pass that is not full
MOSTLY = 0.5  # of the work before the first noise: from here on, having it once saves more than compiling


class Sampler(Passes):
    """Samples of a stochastic network's outputs. The draws are made once, whatever the number of calls.

    Args:
        samples: how many there are in all.
        shared: the same draws for all inputs ("the same networks"), or a draw of its own for every example.
        seed: of the draws; None takes one from torch's global generator.
        plan: ``"auto"`` chooses, ``"absorb"`` and ``"fold"`` insist (where the network allows it).
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
        plan: str = "auto",
    ) -> None:
        super().__init__(model, max_batch, precision, compile)
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        self.samples, self.shared, self.wanted = samples, shared, plan
        self.seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        self.scaled: ScaledWeights | None = None
        self.given: dict[int, GivenDraws] = {}
        self.told = False

    def __enter__(self) -> "Sampler":
        super().__enter__()
        generator = None if self.shared else torch.Generator(self.device).manual_seed(self.seed)
        mode, samples = ("shared", self.samples) if self.shared else ("sample", 1)
        try:
            self.stack.enter_context(noise(self.model, mode, samples, self.seed, generator))  # type: ignore[arg-type]
        except BaseException:
            self.stack.close()
            raise
        self.layers = noise_layers(self.model)
        return self

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Outputs ``[high - low, batch, ...]`` of the samples from ``low`` up to ``high``, written to ``out`` where it is given."""
        inputs, high = self.ready(inputs), self.samples if high is None else high
        assert self.limit is not None
        # trials have two rows where there are two; where these do not fit, one sample of one row goes through at a time
        trial = partial(plan_for, self.model, inputs, self.half)
        plan = self.limit.attempt(trial, min(2, rows(inputs))) or Plan("single")
        size = even(rows(inputs), self.limit.rows)
        result = Result(out, high - low, rows(inputs))
        fast = None
        if self._compiles(plan, rows(inputs)):
            form = form_for(self.model, inputs, self.half)
            if self.wanted == "auto" and self._hand(inputs, low, high, form, plan, result):
                return result.tensor
            graphs = self.graphs(plan.work * (self.fixed or size))
            if plan.whole and self.wanted != "fold" and (form.pieces or not form.failure):
                fast = compiled(self.model, graphs)
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
            if self.compile is True:
                self._tell("compile=True has no effect: draws are not shared, so the passes run as they are")
            return False
        if self.compile == "auto" and plan.fold == "late" and plan.before > MOSTLY:
            return False  # a late fold does most of the work once
        return self.worth_compiling(plan.work * self.samples * max(self.total, count))

    def _tell(self, line: str) -> None:
        if not self.told:
            self.told = True
            warnings.warn(line, FlowBNNWarning)

    def _tell_uncompiled(self, form: Form, pieces: bool) -> None:
        if form.failure:
            way = "it is compiled in pieces" if pieces else "the passes run as they are"
            self._tell(f"the network does not compile in one graph ({form.failure}), so {way}")

    def _hand(self, inputs: Any, low: int, high: int, form: Form, plan: Plan, result: Result) -> bool:
        """Compiled passes that are handed their draws, of one sample or of a few; False where the network does not compile."""
        if form.failure:
            return False
        if id(form) not in self.given:
            self.given[id(form)] = GivenDraws(self.model, form, self.half, self.samples)
        given = self.given[id(form)]
        # what is compiled asserts how tensors lie, and fails where torch's libraries have changed their mind since
        failures: tuple[type[Exception], ...] = (*uncompilable(), Unasked, AssertionError)
        assert self.limit is not None

        def cut() -> tuple[int, bool, Any, list[Piece]]:
            """How many samples go through at once, whether from a CUDA graph, by what function, and the inputs of its passes."""
            pieces = self.pieces(inputs)
            several = self._several(plan, high - low)
            if plan.fold == "late":
                self.layers[plan.first].repeat = several
            graphs = self.graphs(plan.work * self.fixed * several)
            return several, graphs, compiled(self.model, graphs, pass_given, whole=True), pieces

        def take_samples(index: int, several: int, pieces: list[Piece], one_pass: Any) -> bool:
            draws, at = given.rows(index, index + several, high), index - low
            count = min(several, high - index)
            for start, stop, some, fits in pieces:
                size = rows(some)
                if plan.fold != "late" and several > 1:
                    some = repeat(some, several)
                outputs = (one_pass if fits else pass_given)(self.model, given.row, draws, some)
                outputs = checked(outputs, several * size).reshape(several, size, *outputs.shape[1:])
                result.write(outputs[:count, : stop - start], at, at + count, start, stop)
            return True

        several, graphs, one_pass, pieces = cut()
        index = low
        try:
            with given.handed(), unconcerned(), many_shapes(), ExitStack() as settled:
                while index < high:
                    work = partial(take_samples, index, several, pieces, one_pass)
                    if self.limit.attempt(work, self.fixed * several) is None:
                        settled.close()
                        self.fixed = 0
                        several, graphs, one_pass, pieces = cut()
                        continue
                    if index == low and graphs:
                        settled.enter_context(unguarded())
                    index += several
        except failures as error:
            form.failure, form.pieces = reason(error), type(error).__name__ in ("Unsupported", "UserError")
            del self.given[id(form)]
            return False
        finally:
            if plan.fold == "late":
                self.layers[plan.first].repeat = 1
        return True

    def _several(self, plan: Plan, number: int) -> int:
        """How many samples a compiled pass takes so that it fills the device; one, where only some of them are asked for."""
        assert self.limit is not None
        if plan.fold == "single" or number < self.samples:
            return 1
        filled = FILLED["cpu" if self.device.type == "cpu" else "cuda"] / max(1.0, plan.work * self.fixed)
        several = max(1, min(int(filled), self.limit.rows // self.fixed, number))
        several = 2 ** (several.bit_length() - 1)  # every number is compiled anew: a few must do
        while -number % several > WASTED * number:
            several //= 2
        return several

    def _absorb(self, inputs: Any, low: int, high: int, plan: Plan, fast: Any, result: Result) -> None:
        """The plain network with the weights of one sample after the other."""
        for layer in self.layers.values():
            layer.part, layer.repeat = (0, self.samples), 1
        if self.scaled is None or self.scaled.names != plan.absorbed:
            half = self.half if plan.half else None
            self.scaled = ScaledWeights(self.model, plan.absorbed, half, keep=fast is not None)
        with self.scaled as weights:
            for index in range(low, high):
                weights.fill(index)
                for layer in self.layers.values():
                    layer.part = (index, index + 1)

                def write(outputs: Tensor, start: int, stop: int, at: int = index - low) -> None:
                    result.write(outputs.unsqueeze(0), at, at + 1, start, stop)

                self.through(inputs, write, fast)

    def _fold(self, inputs: Any, low: int, high: int, plan: Plan, result: Result) -> None:
        """Several samples in one pass, as blocks of the batch."""
        assert self.limit is not None
        count, start = rows(inputs), 0
        while start < count:
            at_once = 1 if plan.fold == "single" else min(high - low, self.limit.rows)  # samples in one pass
            stop = min(start + max(1, self.limit.rows // at_once), count)
            some, first = take(inputs, start, stop), low
            while first < high:
                last = min(first + at_once, high)
                blocks = last - first
                for layer in self.layers.values():
                    layer.part, layer.repeat = (first, last), 1
                if plan.fold == "late":
                    self.layers[plan.first].repeat = blocks
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
    shared: bool = True,
    seed: int | None = None,
    max_batch: int | None = None,
    plan: str = "auto",
) -> Tensor:
    """Outputs ``[samples, batch, ...]`` of a stochastic network; the arguments are those of :class:`Sampler`."""
    with Sampler(model, samples, shared=shared, seed=seed, max_batch=max_batch, plan=plan) as sampler:
        return sampler(inputs)
