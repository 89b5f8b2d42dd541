"""Peak memory of a training step with noise, as a ratio to the plain network's in the same run.

    python benchmarks/memory.py --model vgg16 --device cuda --precision bf16-mixed [--batch 128] [--acceleration compile]

On a GPU the peak is torch's own count of what is allocated at once: weights, gradients, the optimizer's state, activations. On a
processor torch does not count, so that there only what autograd keeps for the backward pass is counted, with the weights.
"""

import gc

import torch
from common import Stepping, arguments, write
from training_step import VARIANTS


def on_gpu(step: Stepping) -> int:
    recorder = step.recorder
    assert recorder is not None
    for _ in range(3):
        recorder.warm = 0
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    recorder.warm = 0
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def on_cpu(step: Stepping) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.step(step.model, step.batch, step.clock)
    for parameter in step.model.parameters():  # a gradient and two moments for each weight
        kept.pop(parameter.untyped_storage().data_ptr(), None)
        kept[parameter.data_ptr()] = 4 * parameter.untyped_storage().nbytes()
    return sum(kept.values())


def main() -> None:
    found = arguments(__doc__, acceleration={"default": "off", "choices": ("off", "compile")})
    rows, plain = [], 0
    print(f"{found.model}, batch {found.batch}, {found.device}, {found.precision}, {found.acceleration}")
    for name, (kind, site) in VARIANTS.items():
        gc.collect()
        if found.device == "cuda":
            torch.cuda.empty_cache()
        acceleration = "compile" if found.acceleration == "compile" else "off"
        step = Stepping(found.model, kind, site, found.batch, found.device, found.precision, acceleration)
        peak = on_gpu(step) if found.device == "cuda" else on_cpu(step)
        plain = plain or peak
        rows.append({"variant": name, "bytes": peak, "ratio": peak / plain})
        print(f"  {name:38} {peak / 2**20:9.1f} MiB   {peak / plain:.3f} x plain", flush=True)
        del step
    write(found, f"memory-{found.model}", rows)


if __name__ == "__main__":
    main()
