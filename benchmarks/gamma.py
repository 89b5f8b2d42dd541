"""What the weight of the entropy does to noise under shift: a sweep of ``gamma``, on the inputs and on the outputs of layers.

    python benchmarks/gamma.py [--threads 2] [--seeds 5]

An MLP of 64-64-64-10 units is trained on 1,000 of scikit-learn's digits; then weights and noise are trained together by
``fb.NodeNoise``, with ``gamma`` from 0 to 100. Test images: the last 697, as they are and with normal noise of five strengths on their
pixels. NLL and ECE, means over seeds; the last column is the difference of the shifted NLL to that of ``gamma=0``, paired by seed, with
its standard error.
"""

import warnings
from statistics import mean, stdev

import torch
from common import options

import flowbnn as fb
from flowbnn.data import TensorLoader

GAMMAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5)
QUIET = {"progress": False, "accelerator": "cpu"}


def scores(
    posterior: fb.posterior.Posterior, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, ...]:
    """NLL and ECE of the images as they are, and their means over the strengths."""
    source = torch.Generator().manual_seed(0)
    found = []
    for strength in (0.0, *STRENGTHS):
        shifted = images + strength * torch.randn(images.shape, generator=source)
        numbers = fb.evaluate(posterior, (shifted, labels), samples=64, progress=False)
        found.append((numbers["nll"], numbers["ece"]))
    clean, *rest = found
    return *clean, mean(nll for nll, _ in rest), mean(ece for _, ece in rest)


def one_seed(seed: int) -> dict[str, tuple[float, ...]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1000], order[1100:]
    loader = TensorLoader(inputs[train], targets[train], batch_size=50, shuffle=True)
    torch.manual_seed(seed)
    plain = fb.MLE(epochs=30, lr=0.01).fit(fb.models.MLP(64, (64, 64), 10), loader, seed=seed, **QUIET)
    found = {"plain": scores(plain, inputs[test], targets[test])}
    for side in ("input", "output"):
        for gamma in GAMMAS:
            method = fb.NodeNoise("gaussian", side=side, gamma=gamma)
            posterior = method.fit(plain.model, loader, seed=seed, **QUIET)
            found[f"{side}, gamma {gamma:g}"] = scores(posterior, inputs[test], targets[test])
    return found


def main() -> None:
    given = options(__doc__, threads=2, seeds=5).parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    seeds = [one_seed(seed) for seed in range(given.seeds)]
    print(f"{'':<20} {'NLL':>7} {'ECE':>7} {'shifted':>8} {'ECE':>7}   to gamma 0")
    for name in seeds[0]:
        values = [mean(column) for column in zip(*(found[name] for found in seeds), strict=True)]
        line = f"{name:<20} {values[0]:>7.4f} {values[1]:>7.4f} {values[2]:>8.4f} {values[3]:>7.4f}"
        if "gamma" in name:
            base = f"{name.split(',')[0]}, gamma 0"
            gaps = [found[name][2] - found[base][2] for found in seeds]
            error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            line += f"   {mean(gaps):+.4f} +- {error:.4f}"
        print(line)


if __name__ == "__main__":
    main()
