"""Measures the time of a training step with noise, as a ratio to the network without noise in the same run.

    python benchmarks/training_step.py [--model lenet] [--batch 128] [--rounds 60] [--threads 2] [--clock wall] [--out results]
    python benchmarks/training_step.py --model vgg16 --device cuda --precision bf16-mixed --acceleration compile
    python benchmarks/training_step.py --each     # one kind of noise on every layer, site channel
    python benchmarks/training_step.py --threads 1 --clock cpu   # CPU time, on a machine with other load

A step uses one batch and fused Adam: forward, loss (with the KL divergence), backward, update. The variants take turns within every
round, so that other load of the machine affects all of them. The ratio is the median over rounds. On a GPU all variants, also the
network without noise, are compiled or recorded according to ``--acceleration``.
"""

from typing import Any

from common import (
    CLOCKS,
    TrainingStep,
    interleave,
    parse_arguments,
    print_ratios,
    select_variants,
    write_results,
)

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
RECIPES = (
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
    options = parse_arguments(
        __doc__,
        acceleration={"default": "graph", "choices": ("off", "graph", "compile")},
        only={"default": "", "help": "words of variant names to measure, separated by commas"},
        each={"action": "store_true", "help": "one kind of noise on every layer"},
        clock={"choices": sorted(CLOCKS), "default": "wall", "help": "cpu: CPU time, for busy machines"},
    )
    variants = VARIANTS
    if options.each:
        variants = {
            "plain": VARIANTS["plain"],
            **{str(recipe): ({"*": recipe}, "channel") for recipe in RECIPES},
        }
    settings = (options.batch, options.device, options.precision, options.acceleration)
    steps = {
        name: TrainingStep(options.model, *variants[name], *settings)
        for name in select_variants(options.only, variants)
    }
    each = 20 if options.device == "cuda" else 1
    times = interleave(steps, options.rounds, options.device, each, clock=CLOCKS[options.clock])
    mode = (
        f"{options.precision}, {options.acceleration}"
        if options.device == "cuda"
        else f"{options.threads} threads"
    )
    title = (
        f"{options.model}, batch {options.batch}, {options.device}, {mode}, median of {options.rounds} rounds"
    )
    name = "flows" if options.each else "training_step"
    write_results(options, f"{name}-{options.model}", print_ratios(title, times))


if __name__ == "__main__":
    main()
