"""What a training step with noise costs, as a ratio to the plain network's in the same run.

    python benchmarks/training_step.py [--model lenet] [--batch 128] [--rounds 60] [--threads 2] [--out results]
    python benchmarks/training_step.py --model vgg16 --device cuda --precision bf16-mixed --acceleration compile

One batch, fused Adam: forward, loss (with the KL), backward, update. The variants take turns within every round, so that whatever
else the machine does falls on all of them; the ratio is the median of the rounds'. On a GPU all of them, the plain network too, are
compiled and recorded as ``acceleration`` says.
"""

from common import Stepping, arguments, interleave, report, write

VARIANTS = {
    "plain": ("plain", "channel"),
    "dropout, position": ("dropout", "position"),
    "Gaussian noise, channel": ("gaussian", "channel"),
    "Gaussian noise, position": ("gaussian", "position"),
    "flow noise, channel": ("flow", "channel"),
    "flow noise, position": ("flow", "position"),
    "mixture noise, channel": ("mixture", "channel"),
    "mixture noise, position": ("mixture", "position"),
}


def main() -> None:
    found = arguments(
        __doc__,
        acceleration={"default": "graph", "choices": ("off", "graph", "compile")},
        only={"default": "", "help": "variants to keep, by a part of their name, with commas"},
    )
    kept = [part.strip() for part in found.only.split(",") if part.strip()]
    if kept and not any(part in name for part in kept for name in VARIANTS):
        raise SystemExit(f"no variant has '{found.only}' in its name; there are: {'; '.join(VARIANTS)}")
    steps = {
        name: Stepping(
            found.model, kind, site, found.batch, found.device, found.precision, found.acceleration
        )
        for name, (kind, site) in VARIANTS.items()
        if name == "plain" or not kept or any(part in name for part in kept)
    }
    each = 20 if found.device == "cuda" else 1
    times = interleave(steps, found.rounds, found.device, each)
    how = f"{found.precision}, {found.acceleration}" if found.device == "cuda" else f"{found.threads} threads"
    title = f"{found.model}, batch {found.batch}, {found.device}, {how}, median of {found.rounds} rounds"
    write(found, f"training_step-{found.model}", report(title, times))


if __name__ == "__main__":
    main()
