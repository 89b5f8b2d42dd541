"""What a training step with noise costs, as a ratio to the plain network's in the same run.

    python benchmarks/training_step.py [--model lenet] [--batch 128] [--rounds 60] [--threads 2] [--out results]
    python benchmarks/training_step.py --model vgg16 --device cuda --precision bf16-mixed --acceleration compile
    python benchmarks/training_step.py --each     # one kind of noise at every layer, site channel

One batch, fused Adam: forward, loss (with the KL), backward, update. The variants take turns within every round, so that whatever
else the machine does falls on all of them; the ratio is the median of the rounds'. On a GPU all of them, the plain network too, are
compiled and recorded as ``acceleration`` says.
"""

from typing import Any

from common import Stepping, arguments, chosen, interleave, report, write

from flowbnn import noise

Variants = dict[str, tuple[str | dict[str, Any], str]]
VARIANTS: Variants = {
    "plain": ("plain", "channel"),
    "dropout, position": ("dropout", "position"),
    "Gaussian noise, channel": ("gaussian", "channel"),
    "Gaussian noise, position": ("gaussian", "position"),
    "flow noise, channel": ("flow", "channel"),
    "flow noise, position": ("flow", "position"),
    "mixture noise, channel": ("mixture", "channel"),
    "mixture noise, position": ("mixture", "position"),
}
EACH = (
    noise.NormalAffine(),
    noise.NormalAffine(components=4),
    noise.NormalPlanar(length=2),
    noise.NormalRadial(length=2),
    noise.NormalInvConv(),
    noise.NormalSylvester(length=2),
    noise.NormalCoupling(length=2),
    noise.NormalGlow(length=2),
    noise.Dropout(0.1),
)


def main() -> None:
    found = arguments(
        __doc__,
        acceleration={"default": "graph", "choices": ("off", "graph", "compile")},
        only={"default": "", "help": "variants to keep, by a part of their name, with commas"},
        each={"action": "store_true", "help": "one kind of noise at every layer"},
    )
    variants = VARIANTS
    if found.each:
        variants = {"plain": VARIANTS["plain"], **{str(one): ({"*": one}, "channel") for one in EACH}}
    options = (found.batch, found.device, found.precision, found.acceleration)
    steps = {name: Stepping(found.model, *variants[name], *options) for name in chosen(found.only, variants)}
    each = 20 if found.device == "cuda" else 1
    times = interleave(steps, found.rounds, found.device, each)
    how = f"{found.precision}, {found.acceleration}" if found.device == "cuda" else f"{found.threads} threads"
    title = f"{found.model}, batch {found.batch}, {found.device}, {how}, median of {found.rounds} rounds"
    name = "flows" if found.each else "training_step"
    write(found, f"{name}-{found.model}", report(title, times))


if __name__ == "__main__":
    main()
