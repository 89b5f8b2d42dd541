"""Peak memory of a training step with noise, as a ratio to the plain network's in the same run.

    python benchmarks/memory.py --model vgg16 --device cuda --precision bf16-mixed [--batch 128] [--acceleration compile]

On a GPU the peak is torch's own count of what is allocated at once: weights, gradients, the optimizer's state, activations, and what
cuBLAS and cuDNN work in. On a processor torch does not count, so that there only what the forward pass keeps for the backward pass is
counted, with the weights, their gradients and moments; with ``--acceleration compile`` that is what the compiled step would keep on a
GPU, by the partition that ``torch.compile`` makes of it, and nothing is run.

Every variant has a process of its own: cuBLAS keeps what it works in (on an H200 32 MiB for each stream and thread) until the process
ends, and the variants that come later would be charged with what the earlier ones left.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from common import Stepping, arguments, chosen, write
from training_step import VARIANTS

from flowbnn import kernels


def on_gpu(step: Stepping) -> int:
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


def on_cpu(step: Stepping, precision: str, compiled: bool) -> int:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        kept = (handed_over if compiled else kept_by_autograd)(step)
    for parameter in step.model.parameters():  # a gradient and two moments for each weight
        kept.pop(parameter.untyped_storage()._cdata, None)
        kept[parameter.untyped_storage()._cdata] = 4 * parameter.untyped_storage().nbytes()
    return sum(kept.values())


def kept_by_autograd(step: Stepping) -> dict[int, int]:
    """Bytes that the step's graph holds on to, by storage."""
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.objective(step.batch, step.clock)
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}


class _Counted(BaseException):
    """The partition is known: there is no need to go on."""


def handed_over(step: Stepping) -> dict[int, int]:
    """Bytes that the compiled step's forward graph hands to its backward graph, by storage; inputs of the step are not counted."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # some decompositions need it and do not load it
    kept: dict[int, int] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **rest
        )
        for node in forward.graph.output_node().args[0][num_fwd_outputs:]:
            value = node.meta.get("val")
            if node.op != "placeholder" and isinstance(value, torch.Tensor):
                kept[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        raise _Counted

    def never(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("nothing is to be compiled")

    backend = aot_autograd(
        fw_compiler=never, bw_compiler=never, partition_fn=partition, decompositions=select_decomp_table()
    )
    compiled = torch.compile(step.objective, fullgraph=True, dynamic=False, backend=backend)
    try:  # nothing is run, so that the kernels of a GPU can be counted where there is none
        with mock.patch.object(kernels, "available", lambda z: z.dtype == torch.float32):
            compiled(step.batch, step.clock)
    except _Counted:
        return kept
    raise AssertionError("the step was not compiled")


def measure(found: argparse.Namespace, name: str) -> int:
    torch.set_num_threads(found.threads)
    kind, site = VARIANTS[name]
    step = Stepping(found.model, kind, site, found.batch, found.device, found.precision, found.acceleration)
    if found.device == "cuda":
        return on_gpu(step)
    return on_cpu(step, found.precision, found.acceleration == "compile")


def main() -> None:
    found = arguments(
        __doc__,
        on_cpu=True,
        acceleration={"default": "off", "choices": ("off", "compile")},
        only={"default": "", "help": "variants to keep, by a part of their name, with commas"},
    )
    names = chosen(found.only, VARIANTS)
    rows, plain = [], 0
    print(f"{found.model}, batch {found.batch}, {found.device}, {found.precision}, {found.acceleration}")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for name in names:
            peak = processes.submit(measure, found, name).result()
            plain = plain or peak
            rows.append({"variant": name, "bytes": peak, "ratio": peak / plain})
            print(f"  {name:38} {peak / 2**20:9.1f} MiB   {peak / plain:.3f} x plain", flush=True)
    write(found, f"memory-{found.model}", rows)


if __name__ == "__main__":
    main()
