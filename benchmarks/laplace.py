"""What a Laplace approximation of a trained LeNet costs, in forward passes over the same images in the same run.

    python benchmarks/laplace.py [--images 10000] [--batch 250] [--rounds 15] [--threads 2] [--device cpu] [--all] [--out results]

``plain`` is one forward pass over all images, without gradients. The others fit ``Laplace(..., epochs=0)`` on the same batches, from
the caller's network to a posterior that can predict: the copy of the network, the pass, the decomposition of the curvature and the
search for the prior by marginal likelihood are all in the time. ``--all`` adds all layers, which need backward passes.
"""

import torch
from common import MODELS, arguments, interleave, positive, report, shape_of, write

import flowbnn as fb

EXTRA = {
    "images": {"type": positive, "default": 10_000},
    "all": {"action": "store_true", "help": "all layers as well"},
}
LAST = {f"{structure}, last layer": fb.Laplace(structure, epochs=0) for structure in ("kron", "diag", "full")}
ALL = {
    "kron, all layers, one drawn target": fb.Laplace("kron", layers="all", curvature="sampled", epochs=0),
    "kron, all layers": fb.Laplace("kron", layers="all", epochs=0),
    "diag, all layers, one drawn target": fb.Laplace("diag", layers="all", curvature="sampled", epochs=0),
}


def main() -> None:
    found = arguments(__doc__, **EXTRA)
    rounds, device = min(found.rounds, 15), found.device
    torch.manual_seed(0)
    network = MODELS[found.model]().eval().to(device)
    images = torch.randn(found.images, *shape_of(found.model), device=device)
    labels = torch.randint(10, (found.images,), device=device)
    batches = list(zip(images.split(found.batch), labels.split(found.batch), strict=True))

    @torch.no_grad()
    def plain() -> None:
        for some, _ in batches:
            network(some)

    runs = {"plain": plain}
    for name, method in (LAST | ALL if found.all else LAST).items():

        def fit(method: fb.Laplace = method) -> None:
            method.fit(network, batches, progress=False, seed=0)

        runs[name] = fit
    times = interleave(runs, rounds, device, warm=2)
    title = (
        f"{found.model}, {found.images} images, batch {found.batch}, {device}, {found.threads} threads, "
        f"median of {rounds} rounds"
    )
    write(found, f"laplace-{found.model}", report(title, times))


if __name__ == "__main__":
    main()
