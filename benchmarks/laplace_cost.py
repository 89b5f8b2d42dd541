"""Measures the time of a Laplace approximation of a LeNet, in forward passes over the same images in the same run.

    python benchmarks/laplace_cost.py [--images 10000] [--batch 250] [--rounds 15] [--threads 2] [--device cpu] [--all] [--out results]

``plain`` is one forward pass over all images, without gradients. The other variants fit ``Laplace(..., epochs=0)`` on the same
batches. Their time includes the copy of the network, the pass, the decomposition of the curvature and the search for the prior by
marginal likelihood. ``--all`` adds variants over all layers, which need backward passes.
"""

import torch
from common import MODELS, input_shape, interleave, parse_arguments, positive_int, print_ratios, write_results

import flowbnn as fb

EXTRA = {
    "images": {"type": positive_int, "default": 10_000},
    "all": {"action": "store_true", "help": "also measure all layers"},
}
LAST_LAYER = {
    f"{structure}, last layer": fb.Laplace(structure, epochs=0) for structure in ("kron", "diag", "full")
}
ALL_LAYERS = {
    "kron, all layers, one sampled target": fb.Laplace("kron", layers="all", curvature="sampled", epochs=0),
    "kron, all layers": fb.Laplace("kron", layers="all", epochs=0),
    "diag, all layers, one sampled target": fb.Laplace("diag", layers="all", curvature="sampled", epochs=0),
}


def main() -> None:
    options = parse_arguments(__doc__, **EXTRA)
    rounds, device = min(options.rounds, 15), options.device
    torch.manual_seed(0)
    network = MODELS[options.model]().eval().to(device)
    images = torch.randn(options.images, *input_shape(options.model), device=device)
    labels = torch.randint(10, (options.images,), device=device)
    batches = list(zip(images.split(options.batch), labels.split(options.batch), strict=True))

    @torch.no_grad()
    def plain() -> None:
        for inputs, _ in batches:
            network(inputs)

    runs = {"plain": plain}
    for name, method in (LAST_LAYER | ALL_LAYERS if options.all else LAST_LAYER).items():

        def fit(method: fb.Laplace = method) -> None:
            method.fit(network, batches, progress=False, seed=0)

        runs[name] = fit
    times = interleave(runs, rounds, device, warm=2)
    title = (
        f"{options.model}, {options.images} images, batch {options.batch}, {device}, {options.threads} threads, "
        f"median of {rounds} rounds"
    )
    write_results(options, f"laplace-{options.model}", print_ratios(title, times))


if __name__ == "__main__":
    main()
