"""Measures the peak memory of a training step with noise, as a ratio to the network without noise in the same run.

    python benchmarks/memory.py --model vgg16 --device cuda --precision bf16-mixed [--batch 128] [--acceleration compile]

On a GPU the peak is the allocation that torch reports: weights, gradients, state of the optimizer, activations, and workspaces of
cuBLAS and cuDNN. On a CPU torch reports nothing. There the script counts the tensors saved for the backward pass, the weights, their
gradients and moments. With ``--acceleration compile`` it counts what the compiled step would save on a GPU, according to the
partition of ``torch.compile``, without running it.

Every variant runs in its own process. cuBLAS keeps its workspace (on an H200 32 MiB for each stream and thread) until the process ends.
Later variants would otherwise include it.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from common import TrainingStep, parse_arguments, select_variants, write_results
from training_step import VARIANTS

from flowbnn import kernels


def peak_on_gpu(step: TrainingStep) -> int:
    """Returns the peak memory of a step on a GPU, in bytes."""
    recorder = step.recorder
    assert recorder is not None
    for _ in range(3):
        recorder.warmup_steps = 0
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    recorder.warmup_steps = 0
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def peak_on_cpu(step: TrainingStep, precision: str, compiled: bool) -> int:
    """Returns the memory of a step on a CPU, in bytes: saved tensors, weights, gradients and moments."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        saved = (saved_by_compiled_step if compiled else saved_by_autograd)(step)
    for parameter in step.model.parameters():  # a gradient and two moments for each weight
        saved.pop(parameter.untyped_storage()._cdata, None)
        saved[parameter.untyped_storage()._cdata] = 4 * parameter.untyped_storage().nbytes()
    return sum(saved.values())


def saved_by_autograd(step: TrainingStep) -> dict[int, int]:
    """Returns the bytes that autograd saves for the backward pass, by storage."""
    tensors: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        step.objective(step.batch, step.clock)
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


class _PartitionDone(BaseException):
    """Raised when the partition is known, to stop the compilation."""


def saved_by_compiled_step(step: TrainingStep) -> dict[int, int]:
    """Returns the bytes that the compiled forward graph saves for the backward graph, by storage, without the inputs of the step."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # some decompositions need it but do not import it
    saved: dict[int, int] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        for node in forward.graph.output_node().args[0][num_fwd_outputs:]:
            value = node.meta.get("val")
            if node.op != "placeholder" and isinstance(value, torch.Tensor):
                saved[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        raise _PartitionDone

    def fail(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("the compiler must not run")

    backend = aot_autograd(
        fw_compiler=fail, bw_compiler=fail, partition_fn=partition, decompositions=select_decomp_table()
    )
    compiled = torch.compile(step.objective, fullgraph=True, dynamic=False, backend=backend)
    try:  # nothing runs, so that GPU kernels can be counted without a GPU
        with mock.patch.object(kernels, "available", lambda z: z.dtype == torch.float32):
            compiled(step.batch, step.clock)
    except _PartitionDone:
        return saved
    raise AssertionError("the step was not compiled")


def measure(options: argparse.Namespace, name: str) -> int:
    """Returns the memory of one variant, in bytes."""
    torch.set_num_threads(options.threads)
    kind, site = VARIANTS[name]
    step = TrainingStep(
        options.model, kind, site, options.batch, options.device, options.precision, options.acceleration
    )
    if options.device == "cuda":
        return peak_on_gpu(step)
    return peak_on_cpu(step, options.precision, options.acceleration == "compile")


def main() -> None:
    options = parse_arguments(
        __doc__,
        on_cpu=True,
        acceleration={"default": "off", "choices": ("off", "compile")},
        only={"default": "", "help": "words of variant names to measure, separated by commas"},
    )
    names = select_variants(options.only, VARIANTS)
    rows, plain = [], 0
    print(
        f"{options.model}, batch {options.batch}, {options.device}, {options.precision}, {options.acceleration}"
    )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for name in names:
            peak = processes.submit(measure, options, name).result()
            plain = plain or peak
            rows.append({"variant": name, "bytes": peak, "ratio": peak / plain})
            print(f"  {name:38} {peak / 2**20:9.1f} MiB   {peak / plain:.3f} x plain", flush=True)
    write_results(options, f"memory-{options.model}", rows)


if __name__ == "__main__":
    main()
