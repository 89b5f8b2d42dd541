"""The posterior of a stochastic network, and how samples of its outputs are taken.

Draws that all inputs share make a sample one network. There are two ways to run many of them, chosen in :meth:`NoisePosterior.outputs`:

* *plain*: one network after the other, with the noise multiplied into the weights of torch's own linear layers and convolutions and by
  the hooks elsewhere; or the samples folded into the batch, as so many blocks of rows, where that is the same;
* *compiled* (:mod:`flowbnn.posterior.compiled`): passes of constant shape that are handed their draws.

Folding assumes that every row keeps its place. It is taken only where a recorded pass shows nothing that could move rows, and a trial
with two samples in the batch gives for the first one what that sample gives alone (:func:`plan_for`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import call, copy_network, device_of, evaluation_mode, has_row_axis, repeat, rows, take
from flowbnn.convert import at_draw, to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import settings_of
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import independent_vectors
from flowbnn.noise.layout import absorbs, weight_scale
from flowbnn.noise.passes import NoisePass, Setting, Unfolded
from flowbnn.noise.recipes import recipe_from_dict
from flowbnn.options import Count, checked
from flowbnn.posterior.base import PRECISIONS, Posterior, opened, reading
from flowbnn.posterior.calibration import Calibration
from flowbnn.posterior.compiled import compiled_outputs
from flowbnn.posterior.prediction import Prediction, check_rows, even
from flowbnn.posterior.recording import Recording, TrialDraws, outcome
from flowbnn.posterior.report import FitReport
from flowbnn.posterior.weights import StandIns, stand_in
from flowbnn.training.storage import TensorFile

# products of feature maps cost some hundredths of a pass on a CPU, and a fifth or more on a GPU, which waits for its memory
LATE_SHARE = {"cpu": 0.05, "cuda": 0.2}  # of the work, before the first noise
LEAST_WORK = {"cpu": 5e8, "cuda": 2e11}  # floating-point operations of a pass for one sample
MOSTLY = 0.5  # of the work before the first noise: from here on, having it once saves more than compiling
# floating-point operations of a job: minutes on a large GPU, where compiling takes the better part of one; a CPU gains little
WORTH_COMPILING = {"cpu": math.inf, "cuda": 3e16}


class NoisePosterior(Posterior):
    """A stochastic network whose noise has been fitted."""

    kind = "node noise"
    compiles = True
    calibration: Calibration | None = None  # what cross-validation says, where fb.calibrate fitted the noise
    report: FitReport | None = None  # set by fb.fit

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """The one place where the way to take samples is chosen: compiled, folded into the batch, or one by one."""
        sampler: Sampler = prediction.state.get("sampler", lambda: Sampler(prediction))
        inputs = prediction.ready(inputs)
        if sampler.generator is not None:  # every batch its own draws
            sampler.generator.manual_seed(prediction.seed + prediction.batch)
        plan = prediction.attempt(partial(plan_for, prediction, inputs), 2) or SamplingPlan()
        if worth_compiling(prediction, inputs, plan):
            outputs = compiled_outputs(prediction, sampler.state, inputs, samples, plan)
            if outputs is not None:
                return outputs
        size = even(rows(inputs), prediction.limit)
        if not plan.fold or (prediction.shared and plan.absorbs(size, prediction.device)):
            return sampler.one_by_one(inputs, samples, plan)
        try:
            return sampler.folded(inputs, samples, plan)
        except Unfolded:
            plan.fold = ""
            return sampler.one_by_one(inputs, samples, plan)

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """The first network of a prediction with this seed, plain: one draw of the noise is in its weights.

        Layers whose weights cannot take it (attention, recurrent, tied, site ``position``, side ``output``) have it as a buffer that
        multiplies.
        """
        shown = [value for value in self.cache.values.values() if isinstance(value, Recording)]
        return at_draw(self.model, seed, {name for one in shown for name in one.read_elsewhere})

    @checked
    def draws(self, samples: Count, seed: int | None = None) -> dict[str, Tensor]:
        """Noise vectors ``{layer: [samples, dim]}``; the same seed gives those that a prediction with it uses.

        At site ``position`` these are the vectors at one position of the feature map.
        """
        device, settings = device_of(self.model), settings_of(self.model, "shared", samples, seed)
        with evaluation_mode(self.model):
            return {
                name: layer.shared_vectors(samples, settings[layer.key].seed, device)
                for name, layer in noise_layers(self.model).items()
            }

    @checked
    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density ``[S]`` of noise vectors ``{layer: [S, dim]}`` of all layers, as :meth:`draws` gives them."""
        layers, given = noise_layers(self.model), set(values)
        trouble = "" if given == set(layers) else "log_prob takes the noise of every layer, as draws gives it"
        for name, layer in layers.items():
            if not trouble and not isinstance(layer.whole, InputNoise):
                trouble = f"the noise of layer '{name}' is {layer.label}, which has no density"
        if trouble:
            raise FlowBNNError(trouble, kind="unsupported")
        with evaluation_mode(self.model):
            each = [
                vector.posterior().log_prob(torch.cat([values[name] for name in names], -1))
                for vector, names in independent_vectors(self.model)
            ]
        return torch.stack(each).sum(0)

    def settings(self) -> dict[str, Any]:
        return {"report": None if self.report is None else self.report.to_dict()}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        posterior, report = cls(point.model, point.likelihood, point.history), settings.get("report")
        posterior.report = None if report is None else FitReport.from_dict(report)
        return posterior

    def document(self) -> dict[str, Any]:
        recipes = {
            name: {"recipe": "FlowNoise"} if layer.recipe is None else layer.recipe.to_dict()
            for name, layer in noise_layers(self.model).items()
        }
        told = None if self.calibration is None else asdict(self.calibration)
        return {**super().document(), "recipes": recipes, "calibration": told}

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> "Posterior":
        """Read a saved posterior.

        Args:
            network: the plain network, which is converted by the recipes in the file, or one that is converted already.
        """
        file = opened(path, network, [cls.kind])
        with reading(file):
            if noise_layers(network):
                network = copy_network(network)
            else:
                saved = file.document["recipes"].items()
                rules = {name or "*": recipe_from_dict(recipe) for name, recipe in saved}
                network = to_stochastic(network, rules)
                noises = {name: part for name, part in network.named_modules() if isinstance(part, Noise)}
                for name, noise in noises.items():  # in the run's precision; the recipes make them in single
                    own = (at for at in file.views if at.startswith(f"network.{name}."))
                    found = {file.views[at].dtype for at in own}
                    if len(found) == 1 and found < {*PRECISIONS}:
                        noise.to(*found)
        file.check_names(cls.restore(network, file, read=False).tensors())
        point = cls.restore(network, file)
        with reading(file):
            restored = cls.restored(point, {}, file.document["settings"])
            told = file.document.get("calibration")
            restored.calibration = None if told is None else Calibration(**told)
        restored.model.eval()  # as a fit leaves it
        for layer in noise_layers(restored.model).values():
            layer.fitted = True
        return restored


# -------------------- plans


@dataclass
class SamplingPlan:
    """How samples of a network may be taken.

    Args:
        fold: whether samples may be folded into the batch: ``"late"`` at the first noisy layer, ``"input"``, or ``""`` not at all.
        first: the key of that layer.
        times: rows that each noisy layer sees for one row of the batch, by its key.
        absorbed: layers whose shared noise their weights can take.
        work: floating-point operations of one row in matrix products and convolutions; 0 if unknown.
        before: the share of them before the first noise.
    """

    fold: str = ""
    first: int = -1
    times: dict[int, int] = field(default_factory=dict)
    absorbed: tuple[str, ...] = ()
    work: float = 0.0
    before: float = 0.0

    def absorbs(self, rows: int, device: torch.device) -> bool:
        """Whether one network after the other, its noise in the weights, is quicker where a sample has passes of so many rows."""
        kind = "cpu" if device.type == "cpu" else "cuda"
        if not self.absorbed or (self.fold == "late" and self.before > LATE_SHARE[kind]):
            return False
        return self.work * rows >= LEAST_WORK[kind]


def plan_for(prediction: Prediction, inputs: Any) -> SamplingPlan:
    """The plan for inputs of this shape, found once and kept with the posterior."""
    shown = prediction.recorded(inputs)
    if isinstance(shown.plan, SamplingPlan):
        return shown.plan
    model, layers = prediction.model, noise_layers(prediction.model)
    plan, called = SamplingPlan(work=shown.flops or 0.0), [name for name in shown.calls if name in layers]
    if shown.error is not None or not called:
        return plan  # where the network itself fails, the real pass says why
    uses = Counter([id(own) for part in model.modules() for own in part._parameters.values()])
    plan.absorbed = tuple([name for name in called if _absorbable(model, name, layers[name], shown, uses)])
    first = layers[called[0]]
    plan.first, reached = first.key, shown.calls[called[0]]
    if shown.flops:
        late = first.passes_through or first.layout.side == "output"
        plan.before = (reached.after if late else reached.before) / (shown.flops * shown.rows)
    for name in called:
        plan.times[layers[name].key] = _times(layers[name], shown, name)
    certain = True
    if has_row_axis(inputs) and not shown.unusual and min(plan.times.values()) > 0:
        late = plan.before > 0.0 and first.layout.batch_axis == 0 and plan.times[first.key] == 1
        for plan.fold in ("late", "input") if late else ("input",):
            right = _try_fold(prediction, take(inputs, 0, 2), plan, shown)
            if right:
                break
        else:
            plan.fold, certain = "", right is not None
    if certain:
        shown.plan = plan
    return plan


def _times(layer: Noise, shown: Recording, name: str) -> int:
    """How many rows a layer sees for one row of the batch; 0 where that is no integer or it has no batch axis."""
    outside = layer.passes_through or layer.layout.side == "output"
    shape = shown.calls[name].outputs if outside else shown.calls[name].inputs
    axis = layer.layout.batch_axis
    if axis is None or len(shape) <= max(layer.layout.unbatched_ndim, axis):
        return 0
    return 0 if shape[axis] % shown.rows else shape[axis] // shown.rows


def _absorbable(model: nn.Module, name: str, layer: Noise, shown: Recording, uses: Counter[int]) -> bool:
    """Whether the weight can take the layer's shared noise: torch's own linear layer or convolution, whose weight nobody else reads.

    Noise at site ``position`` has one vector for a linear layer that reads plain vectors, once in a pass.
    """
    module, one = model.get_submodule(name), shown.calls[name]
    if layer.layout.side != "input" or not absorbs(module) or name in shown.read_elsewhere:
        return False
    if layer.site == "position" and not (
        isinstance(module, nn.Linear) and len(one.inputs) == 2 and one.count == 1
    ):
        return False
    return uses[id(module._parameters["weight"])] == 1


def _try_fold(prediction: Prediction, few: Any, plan: SamplingPlan, shown: Recording) -> bool | None:
    """Whether two samples in one batch give for the first what it gave alone; None where their outputs do not differ."""
    model, count = prediction.model, shown.rows
    state = NoisePass(settings_of(model, "shared", 2, 0), shares=False)
    state.given, state.rows = TrialDraws(2), {key: 2 * times * count for key, times in plan.times.items()}
    if plan.fold == "late":
        state.entry = (plan.first, 2)
    with state:
        both = outcome(partial(call, model, few if plan.fold == "late" else repeat(few, 2)))
    alone = shown.outputs
    if isinstance(both, Exception):
        return False  # whatever the reason, this way does not serve this network
    if alone is None or both.shape[:1] != (2 * count,) or len(alone) != count:
        return False
    apart = (both[count:] - both[:count]).abs().max()
    gap = (both[:count] - alone).abs().max()
    scale = alone.abs().max()
    if not bool(apart > 1e-4 * scale):
        return None if bool(gap <= 1e-4 * scale) else False
    # a wrong fold errs by as much as samples differ; arithmetic by far less
    return bool(gap <= (0.02 if prediction.half is None else 0.1) * apart + 1e-5 * scale)


# -------------------- samples


def worth_compiling(prediction: Prediction, inputs: Any, plan: SamplingPlan) -> bool:
    """Whether to compile for this job."""
    asked = prediction.options.compile
    if asked is True and not prediction.shared:
        prediction.warn_once(
            "compile", "compile=True has no effect: draws are not shared, so the passes run as they are"
        )
    if not asked or not prediction.shared or not has_row_axis(inputs):
        return False
    if asked is True:
        return True
    if plan.fold == "late" and plan.before > MOSTLY:
        return False  # a late fold does most of the work once
    kind = "cpu" if prediction.device.type == "cpu" else "cuda"
    return plan.work * prediction.samples * max(prediction.total, rows(inputs)) >= WORTH_COMPILING[kind]


class ScaledWeights(StandIns):
    """Stand-ins for the weights of some layers, filled with those of one sample after the other.

    Inside the ``with`` block these layers have no noise of their own.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], state: NoisePass) -> None:
        layers = noise_layers(model)
        self.state, self.layers = state, [layers[name] for name in names]
        self.modules = [model.get_submodule(name) for name in names]
        held = [module._parameters for module in self.modules]
        super().__init__((weights, "weight", stand_in(weights["weight"])) for weights in held)  # type: ignore[arg-type]
        self.draws = []
        for layer, (_, _, weight, _) in zip(self.layers, self.places, strict=True):
            self.draws.append(layer.shared_vectors(*state.settings[layer.key][1:3], weight.device))

    def fill(self, index: int) -> None:
        """Make the network the sample of this index."""
        for module, draws, (_, _, own, stand) in zip(self.modules, self.draws, self.places, strict=True):
            torch.mul(own, weight_scale(module, draws[index]), out=stand.data)

    def __enter__(self) -> Self:
        self.before = self.state.settings
        self.state.settings = {**self.before, **{layer.key: Setting("off") for layer in self.layers}}
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.state.settings = self.before
        super().__exit__(*error)


class Sampler:
    """Samples of a stochastic network's outputs, for the length of a prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction, self.model = prediction, prediction.model
        self.generator = None if prediction.shared else torch.Generator(prediction.device)
        mode: Any = "shared" if prediction.shared else "sample"
        samples = prediction.samples if prediction.shared else 1
        settings = settings_of(self.model, mode, samples, prediction.seed, self.generator)
        self.state = prediction.stack.enter_context(NoisePass(settings, shares=False, held={}))

    def one_by_one(self, inputs: Any, samples: range, plan: SamplingPlan) -> Tensor:
        """One network after the other, over all rows."""
        self.state.entry, self.state.rows = (-1, 1), {}
        return self.prediction.run(inputs, self.networks(samples, plan), len(samples))

    def networks(self, samples: range, plan: SamplingPlan) -> Iterator[Callable[[Any], Tensor]]:
        """The network as each sample has it, one after the other."""
        one_pass = partial(call, self.model)
        if not (self.prediction.shared and plan.absorbed):
            for index in samples:
                self.state.part = (index, index + 1) if self.prediction.shared else None
                yield one_pass
            return
        weights = self.prediction.state.get(
            plan.absorbed, lambda: ScaledWeights(self.model, plan.absorbed, self.state)
        )
        with weights:
            for index in samples:
                weights.fill(index)
                self.state.part = (index, index + 1)
                yield one_pass

    def folded(self, inputs: Any, samples: range, plan: SamplingPlan) -> Tensor:
        """Several samples in one pass, as blocks of the batch."""
        prediction, total, result, start = self.prediction, rows(inputs), None, 0
        while start < total:
            at_once = min(len(samples), prediction.limit)
            stop = min(start + max(1, prediction.limit // at_once), total)
            some = inputs if stop - start == total else take(inputs, start, stop)
            count, first = stop - start, samples.start
            while first < samples.stop:
                last = min(first + at_once, samples.stop)
                blocks = last - first
                self.state.part = (first, last) if self.prediction.shared else None
                self.state.entry = (plan.first, blocks) if plan.fold == "late" else (-1, 1)
                self.state.rows = {key: blocks * count * times for key, times in plan.times.items()}
                batch = repeat(some, blocks) if plan.fold == "input" else some
                outputs = prediction.attempt(partial(call, self.model, batch), blocks * count)
                if outputs is None:
                    if blocks == 1:
                        break  # fewer inputs, and their samples from the first
                    at_once = max(1, min(at_once, prediction.limit // count))
                    continue
                outputs = check_rows(outputs, blocks * count).reshape(blocks, count, *outputs.shape[1:])
                if result is None:
                    dtype = torch.promote_types(outputs.dtype, torch.float32)
                    if (blocks, count) == (len(samples), total):
                        return outputs.to(dtype)
                    result = outputs.new_empty((len(samples), total, *outputs.shape[2:]), dtype=dtype)
                result[first - samples.start : last - samples.start, start:stop] = outputs
                first = last
            start = stop if first >= samples.stop else start
        assert result is not None
        return result
