r"""One file of all sampled networks of a posterior, or of a density, for ONNX Runtime or ``torch.export``.

The file computes the mean prediction and its uncertainties for any batch size. Random numbers are not drawn in the file: it holds the
K draws of a seed, or takes draws as inputs. The same seed therefore gives the same answer in every runtime.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    apply,
    has_row_axis,
    is_batch,
    is_container,
    move,
    named_tensors,
    pad,
    rows,
    split_batch,
    take,
)
from flowbnn.data.formats import as_inputs
from flowbnn.density.density import Density
from flowbnn.errors import FlowBNNError, describe_value, requirement_error, value_error
from flowbnn.export.blocks import SampledNetworks
from flowbnn.export.densities import DensityGraph, SampleGraph, base_draws
from flowbnn.export.gates import GateGraph
from flowbnn.export.graphs import Format, check_installed, trace, write_program
from flowbnn.export.samplers import make_samplers
from flowbnn.options import File, SampleCount, Seed, check, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.gated import GatedPosterior
from flowbnn.posterior.prediction import Prediction, PredictOptions, clone_sharing_tensors
from flowbnn.predictive import CategoricalPredictive, HeadsPredictive

FORMATS: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch"}
EXAMPLE_ROWS = 3  # rows of the examples that are traced; torch.export treats one row as a constant


@dataclass(frozen=True)
class ExportedModel:
    """Description of an exported file, which the file holds as well.

    Args:
        path: Path of the file.
        format: ``"onnx"`` or ``"torch"``.
        kind: Kind of the posterior, or ``"density"``.
        inputs: Shape and dtype of each input, in the order of the arguments. The batch axis is ``"batch"``.
        outputs: Shape and dtype of each output.
        samples: Number of sampled networks.
        seed: Seed of the draws.
        noise: ``"fixed"`` if the file holds the draws, ``"input"`` if they are inputs.
        num_bytes: Size of the file.
    """

    path: Path
    format: Format
    kind: str
    inputs: Mapping[str, tuple[list[int | str], str]]
    outputs: Mapping[str, tuple[list[int | str], str]]
    samples: int
    seed: int
    noise: Literal["fixed", "input"]
    num_bytes: int = 0
    _draw: Callable[..., dict[str, Tensor]] = field(default=dict, repr=False, compare=False)

    @checked
    def draws(self, seed: Seed, count: SampleCount | None = None) -> dict[str, Tensor]:
        """Returns the values of the noise inputs for a seed, by name.

        Args:
            seed: Seed of the draws. A prediction with this seed and number of samples gives the same answer.
            count: Number of examples to sample from a density. Posteriors have the number of samples of the file.

        Raises:
            FlowBNNError: If the file holds its draws.
        """
        if self.noise != "input":
            hint = "export with noise='input'"
            raise requirement_error("draws", "noise inputs", f"noise='{self.noise}'", hint, argument="noise")
        return self._draw(seed) if count is None else self._draw(seed, count)

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as plain values."""
        names = ("format", "kind", "inputs", "outputs", "samples", "seed", "noise")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.kind}, {self.samples} samples, seed {self.seed}, {self.num_bytes:,} bytes"
        ]
        for title, entries in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {title:<6} {name}: {dtype} {shape}" for name, (shape, dtype) in entries.items()]
        return "\n".join(lines)


# -------------------- modules that are traced


class PredictiveGraph(nn.Module):
    """Module from inputs, and draws if they are inputs, to the mean prediction and its uncertainties.

    Args:
        posterior: Posterior.
        sampler: Sampled networks of the posterior.
        inputs: Example inputs, whose structure the arguments are put into.
        noise: ``"fixed"`` if the module holds the draws, ``"input"`` if they are its last arguments.
    """

    def __init__(
        self, posterior: Posterior, sampler: SampledNetworks, inputs: Any, noise: Literal["fixed", "input"]
    ) -> None:
        super().__init__()
        self.posterior, self.sampler, self.structure = posterior, sampler, inputs
        self.likelihood = posterior.likelihood
        self.noise_names = list(sampler.draws) if noise == "input" else []
        self.count = len(named_tensors(inputs))
        self.gate: GateGraph | None = None
        if isinstance(posterior, GatedPosterior):
            self.posterior, row = posterior.posterior, posterior.gate.fallback.new_ones(1, dtype=torch.bool)
            with torch.no_grad():
                outputs = sampler(inputs, sampler.draws)[:, :1]
                predictive = self.posterior._predictive(outputs).with_fallback(row, posterior.gate.fallback)
            network = clone_sharing_tensors(posterior.model).eval()
            self.gate = GateGraph(posterior.gate, network, uncertainties(predictive))

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        values = iter(tensors)
        inputs = apply(self.structure, lambda _: next(values))
        draws = dict(zip(self.noise_names, values, strict=True)) or self.sampler.draws
        result = uncertainties(self.posterior._predictive(self.sampler(inputs, draws)))
        return result if self.gate is None else self.gate(inputs, result)


def uncertainties(predictive: Any) -> dict[str, Tensor]:
    """Returns mean probabilities or the mean of the targets, epistemic and aleatoric uncertainty of a predictive distribution.

    A posterior with a density gate adds the log-density of each input.

    >>> values = uncertainties(CategoricalPredictive(torch.tensor([[[2.0, 0.0]], [[-2.0, 0.0]]])))
    >>> values["probabilities"], values["aleatoric"]
    (tensor([[0.5000, 0.5000]]), tensor([0.3653]))
    """
    if isinstance(predictive, HeadsPredictive):
        heads = {name: uncertainties(head) for name, head in predictive.items()}
        return {f"{head}_{name}": value for head, values in heads.items() for name, value in values.items()}
    density = {} if predictive.log_density is None else {"log_density": predictive.log_density}
    if type(predictive) is CategoricalPredictive:
        # fewer operations than its properties, which serve adaptive sampling
        logs = predictive.log_samples
        samples = logs.exp()
        mean = samples.mean(0)
        negative_aleatoric = (samples * logs.clamp(min=-1e4)).sum((0, -1)) * (1.0 / len(logs))
        negative_total = (mean * mean.clamp(min=1e-37).log()).sum(-1)
        epistemic = (negative_aleatoric - negative_total).clamp(min=0.0)
        return {"probabilities": mean, "epistemic": epistemic, "aleatoric": -negative_aleatoric, **density}
    first = "probabilities" if hasattr(type(predictive), "probabilities") else "mean"
    return {name: getattr(predictive, name) for name in (first, "epistemic", "aleatoric")} | density


# -------------------- the function


@checked
def export(
    model: Posterior | Density,
    path: File,
    example_inputs: Any = None,
    samples: SampleCount = 32,
    seed: Seed = 0,
    noise: Literal["fixed", "input"] = "fixed",
    format: Format | None = None,
) -> ExportedModel:
    r"""Writes a posterior, or a density, to one file that runs without flowbnn.

    The file of a posterior returns ``probabilities`` (or ``mean`` for a regression), ``epistemic`` and ``aleatoric`` for any batch
    size, those of ``posterior.predict(inputs, samples, seed=seed)``. For classes the uncertainties are the mutual information and the
    expected entropy in nats, whose sum is the entropy of the probabilities. For a regression they are variances in squared units of
    the targets. Outputs of several heads begin with the name of the head, such as ``class_probabilities``. A posterior of
    :func:`~flowbnn.gated` returns ``log_density`` as well.

    Noise and dropout masks multiply the rows of one network, so that the file holds its weights once. Methods that sample weights need
    ``samples`` copies of these weights.

    The file of a density returns the ``log_prob`` of examples. With ``noise="input"`` it returns ``samples`` and their ``log_prob``
    for draws of the base distribution instead.

    Args:
        model: Posterior of any method, or density.
        path: Path of the file, which ends in ``.onnx`` for ONNX Runtime, or in ``.pt2`` for ``torch.export.load``.
        example_inputs: Inputs of the network, a batch of any size or a loader. Densities draw examples if it is None.
        samples: Number K of sampled networks.
        seed: Seed of the draws.
        noise: ``"fixed"`` stores the draws in the file. ``"input"`` makes them inputs of the graph, and
            :meth:`ExportedModel.draws` returns them for any seed.
        format: ``"onnx"`` or ``"torch"``. None decides by the end of the path. With a format, the path may have any end.

    Returns:
        A description of the file, with the names, shapes and dtypes of its inputs and outputs.

    Raises:
        FlowBNNError: If a layer cannot be exported, with its name, or if a package is missing.

    >>> import tempfile, flowbnn as fb
    >>> network = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()}).eval()
    >>> posterior = fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = export(posterior, f"{folder}/model.pt2", torch.zeros(5, 4), samples=8)
    ...     outputs = torch.export.load(file.path).module()(torch.zeros(2, 4))
    >>> {name: tuple(value.shape) for name, value in outputs.items()}
    {'probabilities': (2, 3), 'epistemic': (2,), 'aleatoric': (2,)}
    """
    path = Path(os.fspath(path))
    format = format or FORMATS.get(path.suffix)
    if format is None:
        hint = "or set format"
        raise value_error(
            "path", f"a file that ends in {' or '.join(FORMATS)}", path.name, hint, kind="format"
        )
    check_installed(format)
    write = partial(_write, path=path, format=format, samples=samples, seed=seed, noise=noise)
    if isinstance(model, Density):
        return _export_density(model, example_inputs, seed, noise, write)
    check("example_inputs", example_inputs, object if example_inputs is not None else Tensor, "export")
    return _export_posterior(model, example_inputs, samples, seed, noise, write)


def _export_posterior(
    posterior: Posterior, example_inputs: Any, samples: int, seed: int, noise: Any, write: Callable[..., Any]
) -> ExportedModel:
    """Exports by the first kind of sampled networks that equals the prediction and can be traced."""
    inputs = as_inputs(example_inputs, "example_inputs", posterior.columns)
    if not is_batch(inputs):
        batch = next(iter(inputs), None)
        if batch is None:
            raise FlowBNNError("example_inputs is empty", kind="empty", argument="example_inputs")
        inputs = split_batch(batch)[0]
    _check_tensors(inputs)
    batched = has_row_axis(inputs)
    inputs = pad(take(inputs, 0, EXAMPLE_ROWS), EXAMPLE_ROWS) if batched else inputs
    expected = uncertainties(posterior.predict(inputs, samples, seed=seed))
    options = PredictOptions(samples=samples, seed=seed)
    errors: list[FlowBNNError] = []
    with Prediction(posterior.model, options, samples, posterior.cache) as prediction:
        inputs = move(inputs, prediction.device, prediction.dtype)
        for make in make_samplers(posterior, inputs, prediction, samples):
            try:
                graph = PredictiveGraph(posterior, make(), inputs, noise).eval()
                tensors = [*(tensor for _, tensor in named_tensors(inputs))]
                tensors += [graph.sampler.draws[name] for name in graph.noise_names]
                _check_equal(graph(*tensors), expected)
                batch_axes = [batched] * graph.count + [False] * len(graph.noise_names)
                program = trace(graph, tensors, batch_axes)
                _check_equal(program.module()(*tensors), expected)
            except Exception as error:  # the next kind is slower and serves more networks
                errors.append(_as_export_error(error))
                continue
            names = [*_input_names(posterior.model, inputs), *graph.noise_names]
            draw = partial(_draws, posterior, type(graph.sampler), inputs, samples)
            return write(program, tensors, names, expected, posterior.kind, draw, batch_axes)
    raise errors[-1]  # of the kind that serves most networks


def _check_tensors(inputs: Any) -> None:
    """Raises FlowBNNError if inputs hold graphs or packed sequences, which are no inputs of a file."""
    entries = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if type(inputs) is tuple else [inputs]
    )
    container = next((entry for entry in entries if is_container(entry)), None)
    if container is not None:
        hint = "export a network whose forward takes tensors, such as x and edge_index"
        value, fields = describe_value(container), {"kind": "export", "argument": "example_inputs"}
        raise requirement_error("export", "inputs of tensors", value, hint, **fields)


def _as_export_error(error: Exception) -> FlowBNNError:
    """Returns an error about the export."""
    if isinstance(error, FlowBNNError):
        return error
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return FlowBNNError(f"export failed ({reason})", kind="export")


def _draws(
    posterior: Posterior, kind: type[SampledNetworks], inputs: Any, samples: int, seed: int
) -> dict[str, Tensor]:
    """Returns the draws of another seed."""
    options = PredictOptions(samples=samples, seed=seed)
    with Prediction(posterior.model, options, samples, posterior.cache) as prediction:
        for make in make_samplers(posterior, inputs, prediction, samples):
            sampler = make()
            if type(sampler) is kind:
                return sampler.draws
    return {}


def _check_equal(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises FlowBNNError if the values of a graph differ from those of the prediction by more than rounding."""
    for name, value in expected.items():
        tolerance = 1e-4 * (0.1 + float(value.abs().max()))
        if values[name].shape != value.shape or not torch.allclose(
            values[name], value.to(values[name]), rtol=0.0, atol=tolerance
        ):
            text = f"the graph and predict give different {name}; use a network in float32 without random numbers"
            raise FlowBNNError(text, kind="export", output=name)


def _input_names(model: nn.Module, inputs: Any) -> list[str]:
    """Returns a name for each tensor of the inputs: the keys of a mapping, or the names of the arguments of ``forward``."""
    paths = [name for name, _ in named_tensors(inputs)]
    arguments = [name for name in signature(type(model).forward).parameters if name != "self"]
    if isinstance(inputs, Tensor) or (isinstance(inputs, list | tuple) and len(arguments) >= len(paths)):
        generic = any(name in ("args", "kwargs", "input") for name in arguments[: len(paths)])
        if not generic and all(path.isdigit() for path in paths):
            return arguments[: len(paths)]
    if isinstance(inputs, Tensor):
        return ["inputs"]
    return [f"inputs_{path}" if path[0].isdigit() else path for path in paths]


# -------------------- densities


def _export_density(
    density: Density, example_inputs: Any, seed: int, noise: Any, write: Callable[..., Any]
) -> ExportedModel:
    """Exports the log-density of examples, or examples from base noise."""
    if density.lower_bound:
        raise requirement_error("export", "an exact log_prob", "a lower bound", argument="model")
    with torch.no_grad():
        if noise == "input":
            draw: Callable[..., dict[str, Tensor]] = partial(base_draws, density)
            tensors = list(draw(seed, EXAMPLE_ROWS).values())
            graph: nn.Module = SampleGraph(density)
        else:
            draw = dict
            examples = density.sample(EXAMPLE_ROWS, seed=seed) if example_inputs is None else example_inputs
            examples = torch.as_tensor(examples)
            tensors = [pad(examples[:EXAMPLE_ROWS], EXAMPLE_ROWS)]
            graph = DensityGraph(density)
        graph.eval()
        expected = graph(*tensors)
        program = trace(graph, tensors, [True])
    names = ["noise" if noise == "input" else "x"]
    return write(program, tensors, names, expected, "density", draw, [True])


# -------------------- files


def _write(
    program: Any,
    tensors: list[Tensor],
    names: list[str],
    expected: Mapping[str, Tensor],
    kind: str,
    draw: Callable[..., dict[str, Tensor]],
    batch_axes: Sequence[bool],
    *,
    path: Path,
    format: Format,
    samples: int,
    seed: int,
    noise: Literal["fixed", "input"],
) -> ExportedModel:
    """Writes the file and returns its description."""
    size = rows(tensors[0])

    def describe(tensor: Tensor, has_batch_axis: bool) -> tuple[list[int | str], str]:
        shape: list[int | str] = list(tensor.shape)
        if has_batch_axis and shape and shape[0] == size:
            shape[0] = "batch"
        return shape, str(tensor.dtype).removeprefix("torch.")

    inputs = {
        name: describe(tensor, has_batch)
        for name, tensor, has_batch in zip(names, tensors, batch_axes, strict=True)
    }
    outputs = {name: describe(value, any(batch_axes)) for name, value in expected.items()}
    result = ExportedModel(path, format, kind, inputs, outputs, samples, seed, noise, _draw=draw)
    write_program(program, path, format, names, result.to_dict())
    return ExportedModel(path, format, kind, inputs, outputs, samples, seed, noise, path.stat().st_size, draw)
