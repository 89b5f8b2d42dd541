"""Posterior of a stochastic network, and the strategies to sample its outputs.

If all inputs share the draws, a sample is one network. There are two strategies to run many sampled networks
(:meth:`NoisePosterior.outputs`):

* *vmap*: several sampled networks in one pass, by ``torch.func.vmap`` over the draws of all layers. Long jobs on a GPU are compiled
  (:class:`~flowbnn.posterior.compiled.CompiledSampler`).
* *sequential*: one network after the other. The noise is multiplied into the weights of torch's linear layers and convolutions. Hooks
  apply it elsewhere.

Both strategies run every sampled network on all rows of a chunk. They are therefore correct even if rows interact or are routed, as in
BatchNorm or a mixture of experts. Vmap raises an error if the network branches on values or draws random numbers. The sequential
strategy is then used for inputs of that shape.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, has_row_axis, move, rows, take
from flowbnn.convert import fix_noise, to_stochastic
from flowbnn.errors import FlowBNNError, quote_names, requirement_error
from flowbnn.memory import check_memory
from flowbnn.networks import check_copies, copy_network, evaluation_mode
from flowbnn.noise import Noise, noise_layers
from flowbnn.noise.base import make_noise_modes
from flowbnn.noise.batched import example_draws
from flowbnn.noise.contexts import NoiseContext, NoiseMode, forward_sample
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.gaussians import SampleDraws, SharedDraws
from flowbnn.noise.joint import independent_vectors
from flowbnn.noise.layout import absorbs, weight_scale
from flowbnn.noise.recipes import recipe_from_dict
from flowbnn.options import SampleCount, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.compiled import CompiledSampler, forward_sample_by_rules
from flowbnn.posterior.files import (
    PRECISIONS,
    open_posterior_file,
    read_network,
    rewrap_load_errors,
    select_prefix,
)
from flowbnn.posterior.prediction import Prediction, check_rows, clone_sharing_tensors, even_size
from flowbnn.posterior.recorded_draws import recorded_draws
from flowbnn.posterior.report import FitReport
from flowbnn.posterior.trace import ForwardTrace
from flowbnn.records import restore
from flowbnn.training.storage import TensorFile

# fraction of the operations before the first noise above which vmap is faster, because it computes them once
PREFIX_SHARE = {"cpu": 0.05, "cuda": 0.2}
# floating-point operations above which a job takes minutes on a large GPU, so that compiling for a minute pays off; a CPU gains little
COMPILE_FLOPS = {"cpu": math.inf, "cuda": 3e16}


class NoisePosterior(Posterior):
    """Posterior of a stochastic network whose noise has been fitted.

    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.noise import NormalAffine
    >>> network = to_stochastic(nn.Linear(4, 3), {"*": NormalAffine()})
    >>> posterior = NoisePosterior(network, Categorical())
    >>> posterior.predict(torch.zeros(5, 4), 8, seed=0).samples.shape
    torch.Size([8, 5, 3])
    """

    kind = "node noise"
    supports_compile = True
    report: FitReport | None = None  # set by fb.fit
    rows_interact: bool = False  # True if outputs depend on other rows of a batch, set by fb.fit

    def set_rows_interact(self, rows_interact: bool) -> None:
        """Sets whether outputs depend on other rows of a batch, as in a graph. All rows then share the draws of a prediction."""
        self.rows_interact = self.requires_shared = rows_interact

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of some samples by the strategy that suits the network: compiled, vmap or sequential."""
        trace = prediction.measure(inputs)
        sampler = prediction.state.get("sampler", partial(NoiseSampler, prediction))
        inputs = move(inputs, prediction.device, prediction.dtype)
        sampler.seed_batch()
        if sampler.is_worth_compiling(inputs, trace):
            outputs = sampler.run_compiled(inputs, samples, trace)
            if outputs is not None:
                return outputs
        if trace.noise_shapes and not trace.vmap_error and sampler.prefers_vmap(rows(inputs), trace):
            try:
                with nullcontext() if trace.vmap_works else errors_for_slow_vmap():
                    outputs = sampler.run_vmap(inputs, samples, trace)
                trace.vmap_works = True
                return outputs
            except Exception as error:
                if isinstance(error, FlowBNNError):
                    raise
                trace.vmap_error = str(error) or type(error).__name__
                sampler.seed_batch()
        return sampler.run_sequentially(inputs, samples, trace)

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns the networks of a prediction with this seed, as plain networks.

        A draw is multiplied into the weights where that is safe. In attention, recurrent and tied layers it is a buffer, as for
        site ``position`` and side ``output``. It is also a buffer in modules whose own code may read the weight.

        Args:
            samples: Number of networks.
            seed: Seed of the draws.
        """
        check_copies(self.model, samples)
        return fix_noise(self.model, samples, seed)

    @checked
    def draws(self, samples: SampleCount, seed: int | None = None) -> dict[str, Tensor]:
        """Returns noise vectors ``{layer: [samples, dim]}``. A prediction with the same seed uses the same vectors.

        At site ``position`` these are the vectors at one position of the feature map.
        """
        check_draws(noise_layers(self.model).values(), samples, device_of(self.model))
        device, modes = device_of(self.model), make_noise_modes(self.model, "shared", samples, seed)
        with evaluation_mode(self.model):
            return {
                name: layer.shared_vectors(samples, modes[layer.key].seed, device)
                for name, layer in noise_layers(self.model).items()
            }

    @checked
    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log-density ``[S]`` of noise vectors ``{layer: [S, dim]}`` of all layers, as :meth:`draws` returns them."""
        layers = noise_layers(self.model)
        if set(values) != set(layers):
            noise, value = f"noise of {quote_names(list(layers))}", quote_names(list(values))
            raise requirement_error("log_prob", noise, value, "use draws")
        for name, layer in layers.items():
            if not isinstance(layer.joint_noise, InputNoise):
                value = f"{layer.label} in layer '{name}'"
                raise requirement_error("log_prob", "noise with a density", value, layer=name)
        with evaluation_mode(self.model):
            densities = [
                vector.posterior().log_prob(torch.cat([values[name] for name in names], -1))
                for vector, names in independent_vectors(self.model)
            ]
        return torch.stack(densities).sum(0)

    def settings(self) -> dict[str, Any]:
        report = None if self.report is None else self.report.to_dict()
        return {"report": report, "rows_interact": self.rows_interact}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        posterior = cls(point.model, point.likelihood, point.history)
        posterior.report = restore(FitReport | None, settings["report"], "report")
        posterior.set_rows_interact(restore(bool, settings["rows_interact"], "rows_interact"))
        return posterior

    def document(self) -> dict[str, Any]:
        recipes = {
            name: {"recipe": "FlowNoise"} if layer.recipe is None else layer.recipe.to_dict()
            for name, layer in noise_layers(self.model).items()
        }
        return {**super().document(), "recipes": recipes}

    @classmethod
    @checked
    def load(cls, path: str | Path | TensorFile, network: nn.Module) -> "Posterior":
        """Reads a saved posterior.

        Args:
            path: Path of the file.
            network: Network without noise, which is converted by the recipes in the file, or a converted network. It is copied.
        """
        file = open_posterior_file(path, network, [cls.kind])
        with rewrap_load_errors(file):
            if noise_layers(network):
                network = copy_network(network)
            else:
                saved = file.document["recipes"].items()
                rules = {name or "*": recipe_from_dict(recipe) for name, recipe in saved}
                network = to_stochastic(network, rules)
                for name, module in network.named_modules():
                    views = select_prefix(file.views, f"network.{name}") if isinstance(module, Noise) else {}
                    dtypes = {view.dtype for view in views.values()}
                    if len(dtypes) == 1 and dtypes < {*PRECISIONS}:  # recipes make noise in single precision
                        module.to(*dtypes)
        file.check_tensors(cls(*read_network(network, file, read=False)).tensors())
        point = cls(*read_network(network, file))
        with rewrap_load_errors(file):
            posterior = cls.from_state(point, {}, file.document["settings"])
        posterior.read_calibration(file)
        posterior.model.eval()
        for layer in noise_layers(posterior.model).values():
            layer.fitted = True
        return posterior


# -------------------- sampling


def check_draws(layers: Iterable[Noise], samples: int, device: torch.device) -> None:
    """Raises FlowBNNError if the draws of all layers do not fit the memory."""
    check_memory("samples", samples, 4 * samples * sum([layer.layout.dim for layer in layers]), device)


class NoiseSampler:
    """Samples outputs of a stochastic network during one prediction.

    Args:
        prediction: Prediction.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.prediction, self.model, self.ran_out_of_memory = prediction, prediction.model, False
        self.device_kind = "cpu" if prediction.device.type == "cpu" else "cuda"
        self.layers = noise_layers(self.model)
        self.generator = None if prediction.shared else torch.Generator(prediction.device)
        if self.generator is None:
            layers, device = list(self.layers.values()), prediction.device
            check_draws(layers, prediction.samples, device)
            self.modes = make_noise_modes(self.layers, "shared", prediction.samples, prediction.seed)
            if device.type == "cuda":
                self.shared_draws = recorded_draws(layers, self.modes, device, prediction.cache)
            else:
                self.shared_draws = SharedDraws(layers, self.modes, device, cache=prediction.cache.values)
        else:
            self.modes = make_noise_modes(self.layers, "sample", 1, None, self.generator)

    def seed_batch(self) -> None:
        """Seeds the draws of this batch, if every example has its own draws."""
        if self.generator is not None:
            self.generator.manual_seed(self.prediction.seed + self.prediction.batch_index)

    def is_worth_compiling(self, inputs: Any, trace: ForwardTrace) -> bool:
        """Returns True if the passes of this job should be compiled."""
        prediction = self.prediction
        compile_option = prediction.options.compile
        if compile_option is True and not prediction.shared:
            prediction.warn_once("compile", "compile=True is ignored with shared=False")
        if not compile_option or not prediction.shared or not trace.noise_shapes:
            return False
        if compile_option is True:
            return has_row_axis(inputs)
        # if most operations precede the first noise, vmap saves more, because it computes them once
        if trace.prefix_share > 0.5 or not math.isfinite(COMPILE_FLOPS[self.device_kind]):
            return False
        flops = trace.flops_per_row * prediction.samples * max(prediction.total_rows, rows(inputs))
        return flops >= COMPILE_FLOPS[self.device_kind] and has_row_axis(inputs)

    def prefers_vmap(self, total: int, trace: ForwardTrace) -> bool:
        """Returns True if vmap is expected to be faster than the sequential strategy for this number of rows."""
        if trace.prefix_share > PREFIX_SHARE[self.device_kind]:
            return True
        if 2 * total > self.prediction.row_limit:  # one sample fills the pass
            return False
        if self.device_kind == "cuda":  # the launches of one small pass per sample take longer than vmap
            return True
        # on a CPU scaling weights is cheaper than scaling feature maps from about 5e8 operations on
        return trace.flops_per_row * total < 5e8 or not self.absorbed_layers(trace)

    def chunk_sizes(
        self, total: int, num_samples: int, trace: ForwardTrace, divisible: bool = True
    ) -> tuple[int, int]:
        """Returns the number of rows and of samples in a pass by vmap.

        Rows stay together unless they exceed the row limit. The number of samples is limited by the memory of the layers after the
        first noise, because earlier layers are computed once.

        Args:
            total: Number of rows.
            num_samples: Number of samples.
            trace: Measurements of the network.
            divisible: True if the rows may be divided among passes.
        """
        limit = self.prediction.row_limit
        if not divisible:
            return total, max(1, min(num_samples, limit // total))
        noisy_limit = limit
        if not self.prediction.options.max_batch and not self.ran_out_of_memory:
            noisy_limit = limit * max(1, trace.bytes_per_row // max(1, trace.noisy_bytes_per_row))
        size = total if total <= limit else even_size(total, limit)
        if total > limit and trace.prefix_share > PREFIX_SHARE[self.device_kind]:
            shared_rows = noisy_limit // min(num_samples, 8)  # so that eight samples share a prefix
            size = min(size, even_size(total, max(1, shared_rows)))
        return size, max(1, min(num_samples, noisy_limit // size))

    # -------------------- compiled

    def run_compiled(self, inputs: Any, samples: range, trace: ForwardTrace) -> Tensor | None:
        """Returns outputs of compiled passes, or None after a warning if the network does not compile."""
        make = partial(CompiledSampler, self.prediction, self.shared_draws, trace)
        sampler = self.prediction.state.get(("compiled", id(trace)), make)
        return sampler.try_outputs(inputs, samples)

    # -------------------- vmap

    def run_vmap(self, inputs: Any, samples: range, trace: ForwardTrace) -> Tensor:
        """Returns outputs of several samples per pass, by vmap over their draws."""
        prediction, first_sample, results = self.prediction, samples.start, list[Tensor]()
        keys = tuple([(key, number) for key, number, _ in trace.noise_shapes])
        total, divisible = rows(inputs), has_row_axis(inputs)
        forward_function = forward_sample_by_rules if trace.operation_rules else forward_sample
        while first_sample < samples.stop:
            limit = prediction.row_limit
            size, count = self.chunk_sizes(total, samples.stop - first_sample, trace, divisible)
            sample_draws: list[Tensor] = []
            if self.generator is None:
                sample_draws += self.shared_draws.tensors(
                    trace.noise_shapes, first_sample, first_sample + count
                ).values()
            chunk_outputs: list[Tensor] = []
            for start in range(0, total, size):
                chunk = inputs if size >= total else take(inputs, start, start + size)
                draws, examples = sample_draws, 0
                if self.generator is not None:
                    examples = min(size, total - start)
                    draws = self.draw_examples(trace, count, examples)
                forward = torch.vmap(
                    partial(forward_function, self.model, keys, rows=examples), in_dims=(0, None)
                )
                outputs = prediction.attempt(partial(forward, draws, chunk), min(size, total) * count)
                if outputs is None:  # fewer samples, or fewer rows
                    self.ran_out_of_memory = True
                    prediction.row_limit = min(limit, prediction.row_limit)
                    break
                chunk_outputs.append(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
            else:
                results.append(chunk_outputs[0] if len(chunk_outputs) == 1 else torch.cat(chunk_outputs, 1))
                first_sample += count
        outputs = results[0] if len(results) == 1 else torch.cat(results)
        if divisible:
            check_rows(outputs[0], total)
        return outputs

    def draw_examples(self, trace: ForwardTrace, count: int, num_rows: int) -> list[Tensor]:
        """Returns separate draws for every example, ``[count, num_rows, *positions, dim]``, one tensor per call of a layer."""
        layers = list(self.layers.values())
        draws = example_draws(layers, trace.noise_shapes, count * num_rows, self.modes)
        return [tensor.unflatten(0, (count, num_rows)) for tensor in draws.values()]

    # -------------------- sequential

    def run_sequentially(self, inputs: Any, samples: range, trace: ForwardTrace) -> Tensor:
        """Returns the outputs of the sampled networks, which run sequentially over all rows."""
        networks = self.example_networks(samples) if self.generator else self.sampled_networks(samples, trace)
        return self.prediction.run(inputs, networks, len(samples))

    def example_networks(self, samples: range) -> Iterator[Callable[[Any], Tensor]]:
        """Yields a function that runs the network, once per sample. Every example has its own draws."""
        for _ in samples:
            yield partial(self.forward, self.model, NoiseContext(self.modes, sharded=False))

    def sampled_networks(self, samples: range, trace: ForwardTrace) -> Iterator[Callable[[Any], Tensor]]:
        """Yields the sampled networks. The noise is multiplied into the weights where that is possible."""
        names = self.absorbed_layers(trace)
        make = partial(ScaledWeights, self.model, names, self.modes)
        weights = self.prediction.state.get(("weights", names), make) if names else None
        model = self.model if weights is None else weights.model
        for index in samples:
            if weights is not None:
                weights.fill(index)
            source = SampleDraws(self.shared_draws, index)
            yield partial(self.forward, model, NoiseContext(self.modes, source, sharded=False))

    @staticmethod
    def forward(model: nn.Module, context: NoiseContext, inputs: Any) -> Tensor:
        """Runs the network in a context."""
        with context:
            return call(model, inputs)

    def absorbed_layers(self, trace: ForwardTrace) -> tuple[str, ...]:
        """Returns the layers whose weights can hold the noise of a sample: torch's linear layers and convolutions."""
        if self.generator is not None:
            return ()
        calls: dict[int, list[tuple[int, ...]]] = {}
        for key, _, positions in trace.noise_shapes:
            calls.setdefault(key, []).append(positions)
        names = []
        for name, layer in self.layers.items():
            module = self.model.get_submodule(name)
            vector = layer.site == "channel" or (
                isinstance(module, nn.Linear) and calls.get(layer.key) == [()]
            )
            if layer.key in calls and vector and layer.layout.side == "input" and absorbs(module):
                names.append(name)
        return tuple(names)


@contextmanager
def errors_for_slow_vmap() -> Iterator[None]:
    """Context manager that turns torch's warning about a slow vmap loop into an error. The sequential strategy is faster then."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule", category=UserWarning)
        yield


class ScaledWeights:
    """Clone of a network in which some layers run with the noise of one sample in their weights.

    Only the layer itself uses the scaled weight, during its forward pass. Other modules that read or share the weight use the original.

    Args:
        model: Network. If it cannot be cloned, the noise hooks are used instead.
        names: Names of the layers.
        modes: Modes by layer key, which have the seeds and the number of samples.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], modes: Mapping[int, NoiseMode]) -> None:
        self.model, layers = clone_sharing_tensors(model), noise_layers(model)
        self.scaled: list[tuple[nn.Module, Tensor, Tensor, Tensor]] = []
        for name in names if self.model is not model else ():
            module, layer = self.model.get_submodule(name), layers[name]
            weight: Any = module._parameters["weight"]
            scaled = nn.Parameter(torch.empty_like(weight.detach()), requires_grad=False)
            mode = modes[layer.key]
            vectors = layer.shared_vectors(mode.samples, mode.seed, weight.device)
            _disable_noise_hook(module, layer)
            module.forward = partial(_forward_with_weight, module, scaled)
            self.scaled.append((module, weight, scaled, vectors))

    def fill(self, index: int) -> None:
        """Writes the weights of the sample with this index."""
        for module, weight, scaled, vectors in self.scaled:
            torch.mul(weight, weight_scale(module, vectors[index]), out=scaled.data)


def _forward_with_weight(module: nn.Module, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    original = module._parameters["weight"]
    module._parameters["weight"] = weight  # type: ignore[assignment]
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters["weight"] = original


def _disable_noise_hook(module: nn.Module, noise: Noise) -> None:
    """Replaces the noise hook of a layer by an empty hook. Without any hook, torch's fast paths would skip the layer."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is noise:
                hooks[key] = _do_nothing


def _do_nothing(*args: Any) -> None:
    return None
