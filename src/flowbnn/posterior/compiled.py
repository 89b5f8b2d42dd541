r"""The draws of one sample handed to a compiled pass, so that :math:`z \circ x` melts into the kernels before it.

All vectors of a sample lie in one row, ``[samples, width]``, so that a pass has one more input, of constant shape: the row of its
sample, or several rows where a pass takes several samples. Inside, every layer reads its slice. The rows are made ahead, in few
launches; those of maps (site ``position``) for as many samples as memory holds.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.noise import Noise, NoisePass, Setting, absorbs, noise_layers, settings_of, shared_draws
from flowbnn.posterior.batches import call, pad, take, tensors_of
from flowbnn.posterior.forward import device_of, dtype_of, evaluating, parts_of

__all__ = ["Form", "GivenDraws", "HalfWeights", "Unasked", "form_for", "pass_given", "reason"]

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

    def draws(self, layer: Noise, at: tuple[int, ...]) -> Tensor:
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
    """What a network's passes ask for, found on two rows.

    Args:
        asks: layers and the positions at which they multiply, those of site ``channel`` first.
        weights: how the stand-ins for the weights lie in half precision; None where layers must have their own.
        failure: why the network does not compile, once that has been tried.
        pieces: whether it might compile in pieces all the same.
    """

    asks: tuple[Ask, ...]
    weights: torch.memory_format | None = None
    failure: str = ""
    pieces: bool = False


_FORMS: WeakKeyDictionary[nn.Module, dict[Any, Form]] = WeakKeyDictionary()


def form_for(model: nn.Module, inputs: Any, half: torch.dtype | None) -> Form:
    """The form for inputs of this shape, found once and remembered with the network; called at the precision of the passes."""
    known = _FORMS.setdefault(model, {})
    layouts = tuple((name, layer.layout, layer.site) for name, layer in noise_layers(model).items())
    key = (layouts, half, tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(inputs)))
    if key not in known:
        try:
            known[key] = _find_form(model, take(inputs, 0, 2), half)
        except Exception as error:  # a network that does not take two rows, say
            known[key] = Form((), failure=reason(error))
        if not known[key].asks and not known[key].failure:
            known[key].failure = "no noise is reached"
    return known[key]


def _find_form(model: nn.Module, few: Any, half: torch.dtype | None) -> Form:
    layers, device = noise_layers(model), device_of(model)
    asks: Counter[Ask] = Counter()

    class Recorder:
        """Draws of ones, and who asks for them."""

        def draws(self, layer: Noise, at: tuple[int, ...]) -> Tensor:
            asks[names[layer.key], at] += 1
            return torch.ones(1, *at, layer.layout.dim, device=device)

    names = {layer.key: name for name, layer in layers.items()}
    state = NoisePass(settings_of(model, "shared", 1, 0), shares=False)
    state.given = Recorder()
    with evaluating(model), state:
        truth = call(model, few)
        for name, layer in layers.items():
            calls = sum(number for (asking, _), number in asks.items() if asking == name)
            if layer.site == "position" and calls > 1:
                raise FlowBNNError(f"layer '{name}' is called {calls} times, with noise of its own each time")
        weights = None if half is None else _fitting(model, few, half, truth)
    ordered = sorted(asks, key=lambda ask: layers[ask[0]].site == "position")
    return Form(tuple(ordered), weights)


def _fitting(model: nn.Module, few: Any, half: torch.dtype, truth: Tensor) -> torch.memory_format | None:
    """How weights may lie in half precision, so that the network still runs and gives what it gave."""
    formats = [torch.preserve_format]
    if truth.device.type == "cuda":  # where half precision is quickest with the channels last
        formats.insert(0, torch.channels_last)
    for kind in formats:
        try:
            with HalfWeights(model, half, kind, keep=False):
                found = call(model, few)
        except Exception:  # whatever the reason, this way does not serve this network
            continue
        gap = (found.float() - truth.float()).abs().max()
        if found.shape == truth.shape and bool(gap <= CLOSE * truth.float().abs().max()):
            return kind
    return None


_HALVES: WeakKeyDictionary[nn.Module, dict[Any, nn.Parameter]] = WeakKeyDictionary()


class HalfWeights:
    """Weights of linear layers and convolutions in half precision: autocast would cast them again in every pass.

    They stand in for the weights inside the ``with`` block. The network's own parameters are not written to.

    Args:
        half: the precision.
        kind: memory format of two-dimensional convolutions.
        keep: use the same memory in every prediction, which CUDA graphs need.
    """

    def __init__(
        self, model: nn.Module, half: torch.dtype, kind: torch.memory_format, keep: bool = True
    ) -> None:
        parts = parts_of(model)
        uses = Counter(id(own) for part in parts for own in part._parameters.values())
        kept = _HALVES.setdefault(model, {}) if keep else {}
        self.places: list[tuple[nn.Module, nn.Parameter, nn.Parameter]] = []
        for number, module in enumerate(parts):
            if not absorbs(module):
                continue
            weight: Any = module._parameters["weight"]
            if weight.dtype != torch.float32 or uses[id(weight)] > 1:
                continue
            own = kind if weight.ndim == 4 else torch.preserve_format
            key = (number, weight.shape, weight.stride(), half, weight.device, own)
            if key not in kept:
                empty = torch.empty_like(weight, dtype=half, memory_format=own)
                kept[key] = nn.Parameter(empty, requires_grad=False)
            self.places.append((module, weight, kept[key]))
        if self.places:  # every time: writing to a weight's .data would go unnoticed
            with torch.no_grad():
                torch._foreach_copy_([half for _, _, half in self.places], [own for _, own, _ in self.places])

    def __enter__(self) -> "HalfWeights":
        for module, _, buffer in self.places:
            module._parameters["weight"] = buffer
        return self

    def __exit__(self, *error: object) -> None:
        for module, weight, _ in self.places:
            module._parameters["weight"] = weight


class GivenDraws:
    """The draws of all samples, row by row, for a network that holds shared noise.

    Args:
        model: the network.
        form: what its passes ask for.
        half: precision of the passes, where it is not the network's own.
        state: of the prediction: it knows seeds and how many samples there are.
    """

    def __init__(self, model: nn.Module, form: Form, half: torch.dtype | None, state: NoisePass) -> None:
        self.form, self.state, self.device = form, state, device_of(model)
        self.layers = noise_layers(model)
        self.samples = next(iter(state.settings.values())).samples
        settings = {layer.key: Setting("shared") for layer in self.layers.values()}
        self.table = Table(settings, {})
        self.width = 0
        for name, at in form.asks:
            layer = self.layers[name]
            self.table.starts[layer.key, at] = self.width
            self.width += -(-layer.layout.dim * prod(at) // ALIGNED) * ALIGNED
        channel = list(dict.fromkeys(name for name, _ in form.asks if self.layers[name].site == "channel"))
        found = shared_draws([self.layers[name] for name in channel], state, self.device)
        self.vectors = dict(zip(channel, found, strict=True))
        self.dtype = torch.promote_types(dtype_of(model) or torch.float32, torch.float32)
        self.weights = (
            None if form.weights is None or half is None else HalfWeights(model, half, form.weights)
        )
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
        found = block[first - start : stop - start]
        return pad(found, last - first) if stop < last else found

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

    def handed(self) -> AbstractContextManager[Any]:
        """The weights are in half precision where that serves."""
        return nullcontext() if self.weights is None else self.weights
