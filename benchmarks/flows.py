"""What each kind of noise costs: a training step with that noise at every layer, as a ratio to the plain network's in the same run.

    python benchmarks/flows.py [--model lenet] [--batch 128] [--rounds 20] [--threads 2] [--out results]
    python benchmarks/flows.py --device cuda --precision bf16-mixed

Site ``channel``; one batch, fused Adam. ``training_step.py`` has Xiong's report's own mixture of layers.
"""

from common import Stepping, arguments, interleave, report, write

import flowbnn as fb

RECIPES = (
    fb.noise.NormalAffine(),
    fb.noise.NormalAffine(components=4),
    fb.noise.NormalPlanar(length=2),
    fb.noise.NormalRadial(length=2),
    fb.noise.NormalInvConv(),
    fb.noise.NormalSylvester(length=2),
    fb.noise.NormalCoupling(length=2),
    fb.noise.NormalGlow(length=2),
    fb.noise.Dropout(0.1),
)


def main() -> None:
    found = arguments(__doc__, acceleration={"default": "graph", "choices": ("off", "graph", "compile")})
    chosen = {str(recipe): {"*": recipe} for recipe in RECIPES}
    options = (found.batch, found.device, found.precision, found.acceleration)
    steps = {"plain": Stepping(found.model, "plain", "channel", *options)}
    steps |= {name: Stepping(found.model, rules, "channel", *options) for name, rules in chosen.items()}
    times = interleave(steps, found.rounds, found.device, 20 if found.device == "cuda" else 1)
    title = f"{found.model}, batch {found.batch}, {found.device}, {found.precision}, median of {found.rounds} rounds"
    write(found, f"flows-{found.model}", report(title, times))


if __name__ == "__main__":
    main()
