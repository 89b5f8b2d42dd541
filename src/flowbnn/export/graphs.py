"""Traces of modules by ``torch.export``, and the files that they are written to."""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table

from flowbnn.errors import FlowBNNError, MissingPackageError, requirement_error
from flowbnn.export.constants import ConstantValues, traceable_len
from flowbnn.networks import evaluation_mode, watch_modules
from flowbnn.training.storage import atomic_write

Format = Literal["onnx", "torch"]


def check_installed(format: Format) -> None:
    """Raises FlowBNNError if a package that writes the format is missing."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if format == "onnx" and missing:
        text = f"export needs {' and '.join(missing)}: pip install flowbnn[export]"
        raise MissingPackageError(text, kind="missing package", argument="path", packages=missing)


# -------------------- traces


class ActiveModules:
    """Names of the modules whose forward pass is running, so that an error can name the layer.

    Args:
        module: Module that is traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = {name: child for name, child in module.named_modules() if name}
        self.names: list[str] = []
        self.sizes: list[torch.SymInt] = []
        self.fixed: str | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager that follows the forward pass."""
        with (
            watch_modules({"": self.module}, self._record_sizes, None),
            watch_modules(self.modules, self._begin, self._end),
        ):
            yield

    def _record_sizes(self, name: str, module: nn.Module, tensors: tuple[Tensor, ...], kwargs: Any) -> None:
        sizes: list[Any] = [tensor.shape[0] for tensor in tensors if tensor.ndim]
        self.sizes = [size for size in sizes if isinstance(size, torch.SymInt)]

    def _begin(self, name: str, *args: Any) -> None:
        self._find_fixed()
        self.names.append(name)

    def _end(self, name: str, *args: Any) -> None:
        self._find_fixed()
        self.names.pop()

    def _find_fixed(self) -> None:
        """Remembers the layer that is running if the batch size has become a constant."""
        if self.fixed is None and self.names and any(map(is_constant_size, self.sizes)):
            self.fixed = layer_name(self.names[-1])

    def layer(self) -> str | None:
        """Returns the innermost layer that was running, or None outside of all layers."""
        return (layer_name(self.names[-1]) or None) if self.names else None


def is_constant_size(size: Any) -> bool:
    """Returns True if a size of a traced tensor is a number, or a symbol whose value has been fixed."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def layer_name(name: str) -> str:
    """Returns the name of a layer in the network of the user, from its name in the traced module.

    >>> layer_name("sampler.network.0.conv1")
    '0.conv1'
    >>> layer_name("sampler.network")  # the whole network
    ''
    """
    return re.sub(r"^(?:[\w.]*?\bsampler(?:\.|$))?(?:network(?:\.|$))*", "", name)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Context manager that silences warnings and log messages of torch's exporters, and saves no stack traces, which files omit."""
    names = (
        "torch.onnx",
        "torch.export",
        "torch._export",
        "torch.fx.experimental.symbolic_shapes",
        "onnxscript",
        "onnx_ir",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    config: Any = torch.fx.config  # the option is newer than the oldest supported torch
    no_stack_traces = getattr(config, "do_not_emit_stack_traces", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            config.do_not_emit_stack_traces = no_stack_traces
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def trace(module: nn.Module, tensors: Sequence[Tensor], dynamic: Sequence[bool]) -> Any:
    """Returns the ``ExportedProgram`` of a module.

    Args:
        module: Module in evaluation mode, whose arguments are tensors.
        tensors: Example arguments.
        dynamic: True for each argument whose first axis is the batch.

    Raises:
        FlowBNNError: If the module cannot be traced, with the layer.
    """
    constants = ConstantValues()
    with torch.no_grad(), evaluation_mode(module), quiet_exporter(), traceable_len(module), constants:
        for scale in (1.0, 0.5):
            inputs = [tensor * scale if tensor.is_floating_point() else tensor for tensor in tensors]
            constants.begin_pass(inputs)
            module(*inputs)
        if constants.has_conditions:
            inputs = [
                tensor[:2] if has_batch else tensor
                for tensor, has_batch in zip(tensors, dynamic, strict=True)
            ]
            constants.begin_pass(inputs)
            module(*inputs)
        try:
            return _trace(module, tensors, dynamic, constants, torch.export.Dim("batch", min=1))
        except FlowBNNError as error:
            if not error.fields.get("constraint"):
                raise
        # torch cannot prove that a condition on strides holds for all batch sizes, so it becomes a check at run time
        return _trace(module, tensors, dynamic, constants, torch.export.Dim.AUTO)


def _trace(
    module: nn.Module,
    tensors: Sequence[Tensor],
    dynamic: Sequence[bool],
    constants: ConstantValues,
    batch: Any,
) -> Any:
    """Traces a module once, with a kind of batch axis."""
    active, shapes = ActiveModules(module), tuple({0: batch} if has_batch else {} for has_batch in dynamic)
    constants.begin_trace()
    try:
        with active.watch(), redirect_stderr(StringIO()):  # torch prints the graph that it could not finish
            program = torch.export.export(
                module, tuple(tensors), dynamic_shapes={"tensors": shapes}, strict=False
            )
    except Exception as error:
        layer = active.layer()  # None after the last layer, where torch solves conditions on the batch size
        words = str(error)
        by_value = "data-dependent" in words  # such as int(x), not a condition on the batch size
        if layer is None and not by_value and ("specialized" in words or "generated guard" in words):
            raise _fixed_batch_size(active.fixed, constraint=True) from error
        where = f"layer '{layer}'" if layer else "the network"
        text = f"{where} cannot be exported ({_reason(error)}){_advice(error)}"
        constraint = layer is None and not by_value
        raise FlowBNNError(text, kind="export", layer=layer, constraint=constraint) from error
    places = [node for node in program.graph.nodes if node.op == "placeholder"][-len(tensors) :]
    for place, has_batch in zip(places, dynamic, strict=True):
        if has_batch and is_constant_size(place.meta["val"].shape[0]):
            raise _fixed_batch_size(active.fixed)
    return program


def _fixed_batch_size(layer: str | None, **fields: Any) -> FlowBNNError:
    """Returns the error about a network that cannot be traced for all batch sizes."""
    where = f"layer '{layer}'" if layer else "the network"
    text = f"{where} cannot be exported (it fixes the batch size; use x.shape[0])"
    return FlowBNNError(text, kind="export", layer=layer or None, **fields)


def _reason(error: BaseException) -> str:
    """Returns the line of an error message that says what happened."""
    lines = [line.strip(" -") for line in str(error).strip().splitlines() if line.strip(" -")]
    line = (lines or [type(error).__name__])[0]
    if "data-dependent" in line:
        return "its operations depend on the values of tensors"
    if "fake tensor" in line:
        return "it has operations that torch cannot trace, such as torch.autograd.grad or changes of .data"
    return line[:160].rstrip(" .:")


def _advice(error: BaseException) -> str:
    """Returns the end of an error message that says what to change, for conditions on values and for packed sequences."""
    if "data-dependent" not in str(error):
        return ""
    frames = [frame.name for frame in extract_tb(error.__traceback__)]
    if any("pack" in name for name in frames):
        return "; use padded sequences"
    return "; compute all branches, and select by torch.where"


# -------------------- files


def write_program(
    program: Any, path: Path, format: Format, names: Sequence[str], document: Mapping[str, Any]
) -> None:
    """Writes a traced program to one file, atomically.

    Args:
        program: Traced program.
        path: Path of the file.
        format: ``"onnx"`` or ``"torch"``.
        names: Names of the inputs.
        document: Description, which is stored in the file.
    """
    content = json.dumps(document)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths and code of the machine that exported
    stores_vmap = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    names_of_calls = [getattr(node.target, "__name__", "") for node in program.graph.nodes]
    if format == "torch" and not stores_vmap and any("vmap" in name for name in names_of_calls):
        hint, fields = "use format='onnx'", {"kind": "export", "argument": "format"}
        value = f"torch {torch.__version__}"
        raise requirement_error("format='torch' with sampled weights", "torch 2.13", value, hint, **fields)
    if format == "torch":
        with atomic_write(path) as temporary, quiet_exporter(), temporary.open("wb") as file:
            torch.export.save(program, file, extra_files={"flowbnn": content})
        return
    onnx_program = to_onnx(program, names, list(document["outputs"]))
    onnx_program.model.metadata_props["flowbnn"] = content
    onnx_program.model.producer_name = "flowbnn"
    graph, reserved = onnx_program.model.graph, {*names, *document["outputs"]}
    for node in graph.all_nodes():
        node.metadata_props.clear()
        if node.op_type == "Erf" and node.inputs[0].dtype.name == "DOUBLE":
            raise _unsupported("the network", "uses Erf of float64", argument="format")
        for value in node.outputs:
            if value.name in reserved and value not in graph.outputs:  # a name of ours, which must be unique
                value.name = f"{value.name}_of_{node.name}"
    for value in (*onnx_program.model.graph.inputs, *onnx_program.model.graph.outputs):
        if value.shape is not None and not isinstance(value.shape[0] if len(value.shape) else 0, int):
            value.shape = type(value.shape)(["batch", *value.shape[1:]])
    values = onnx_program.model.graph.initializers.values()
    size = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    if size > 2**31 - 2**20:  # a protocol buffer holds 2 GB
        value, hint = f"{size / 2**30:.1f} GB", "use fewer samples, or format='torch'"
        raise requirement_error(
            "format='onnx'", "less than 2 GB", value, hint, kind="export", argument="samples"
        )
    with atomic_write(path) as temporary:
        onnx_program.save(temporary, external_data=False)


def to_onnx(program: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Returns the ONNX program of a traced program.

    Raises:
        FlowBNNError: If ONNX has no such operation, with the layer that needs it.
    """
    try:
        with quiet_exporter():
            program = unroll_projected_lstms(program)
            return torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=list(inputs), output_names=list(outputs)
            )
    except Exception as error:
        operation, layer = _failed_operation(program, error)
        where = f"layer '{layer}'" if layer else "the network"
        problem = f"uses {operation}" if operation else f"fails ({_cause(error)})"
        raise _unsupported(where, problem, layer=layer) from error


def unroll_projected_lstms(program: Any) -> Any:
    """Returns a program whose LSTMs with ``proj_size``, which ONNX lacks, are products of matrices, step by step."""
    lstm = torch.ops.aten.lstm.input
    calls = [node for node in program.graph.nodes if node.target == lstm]
    # the state and the cell have the same size without a projection
    if all(node.args[1][0].meta["val"].shape == node.args[1][1].meta["val"].shape for node in calls):
        return program
    return program.run_decompositions({lstm: decomposition_table[lstm]})


def _unsupported(where: str, problem: str, **fields: Any) -> FlowBNNError:
    """Returns the error about a part of the network that ONNX does not support."""
    text = f"ONNX does not support {where}, which {problem}; use format='torch'"
    return FlowBNNError(text, kind="export", **fields)


def _failed_operation(program: Any, error: BaseException) -> tuple[str, str | None]:
    """Returns the operation that an exporter did not know, and the layer that uses it."""
    messages, cause = "", error
    while cause is not None:
        messages, cause = f"{messages} {cause}", cause.__cause__  # type: ignore[assignment]
    match = re.search(r"op='([\w.]+)'", messages) or re.search(r"(?:torch\.ops\.)?(aten\.[\w.]+)", messages)
    if match is None:
        return "", None
    operation = match[1]
    with quiet_exporter():
        graphs = (program.graph, program.run_decompositions().graph)
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op == "call_function" and operation in (
            str(node.target),
            str(node.target).rpartition(".")[0],
        ):
            stack = (node.meta.get("nn_module_stack") or {}).values()
            named = [name for name in (layer_name(path) for path, *_ in stack if path) if name]
            named = [name for name in named if not name.startswith("_empty_nn_module_stack")]
            return operation, named[-1] if named else None
    return operation, None


def _cause(error: BaseException) -> str:
    """Returns the first line of the innermost error."""
    with suppress(AttributeError):
        while error.__cause__ is not None:
            error = error.__cause__
    return _reason(error)
