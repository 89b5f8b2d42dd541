"""Measures the effect of the entropy weight ``gamma`` under distribution shift, for noise on the inputs and on the outputs of layers.

    python benchmarks/gamma.py [--threads 2] [--seeds 5]

An MLP of 64-64-64-10 units is trained on 1,000 of scikit-learn's digits. Then weights and noise are trained together by
``fb.NodeNoise``, with ``gamma`` from 0 to 100. The test images are the last 697, in their original form and with normal noise of five
strengths on their pixels. The table has the negative log-likelihood (NLL) and the ECE, averaged over seeds. The last column is the
difference of the shifted NLL to that of ``gamma=0``, paired by seed, with its standard error.
"""

import warnings
from statistics import mean, stdev

import torch
from common import make_parser

import flowbnn as fb
from flowbnn.data import TensorLoader

GAMMAS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)
STRENGTHS = (0.1, 0.2, 0.3, 0.4, 0.5)
TRAINING = {"progress": False, "accelerator": "cpu"}


def evaluate(
    posterior: fb.posterior.Posterior, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, ...]:
    """Returns NLL and ECE of the original images, and their means over the strengths of the noise."""
    generator = torch.Generator().manual_seed(0)
    scores = []
    for strength in (0.0, *STRENGTHS):
        shifted = images + strength * torch.randn(images.shape, generator=generator)
        numbers = fb.evaluate(posterior, (shifted, labels), samples=64, progress=False)
        scores.append((numbers["nll"], numbers["ece"]))
    clean, *shifted_scores = scores
    return *clean, mean(nll for nll, _ in shifted_scores), mean(ece for _, ece in shifted_scores)


def run_seed(seed: int) -> dict[str, tuple[float, ...]]:
    """Returns the scores of every variant for one seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1000], order[1100:]
    loader = TensorLoader(inputs[train], targets[train], batch_size=50, shuffle=True)
    torch.manual_seed(seed)
    plain = fb.MLE(epochs=30, lr=0.01).fit(fb.models.MLP(64, (64, 64), 10), loader, seed=seed, **TRAINING)
    results = {"plain": evaluate(plain, inputs[test], targets[test])}
    for side in ("input", "output"):
        for gamma in GAMMAS:
            method = fb.NodeNoise("gaussian", side=side, gamma=gamma)
            posterior = method.fit(plain.model, loader, seed=seed, **TRAINING)
            results[f"{side}, gamma {gamma:g}"] = evaluate(posterior, inputs[test], targets[test])
    return results


def main() -> None:
    options = make_parser(__doc__, threads=2, seeds=5).parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    seeds = [run_seed(seed) for seed in range(options.seeds)]
    print(f"{'':<20} {'NLL':>7} {'ECE':>7} {'shifted':>8} {'ECE':>7}   to gamma 0")
    for name in seeds[0]:
        values = [mean(column) for column in zip(*(result[name] for result in seeds), strict=True)]
        line = f"{name:<20} {values[0]:>7.4f} {values[1]:>7.4f} {values[2]:>8.4f} {values[3]:>7.4f}"
        if "gamma" in name:
            base = f"{name.split(',')[0]}, gamma 0"
            gaps = [result[name][2] - result[base][2] for result in seeds]
            error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            line += f"   {mean(gaps):+.4f} +- {error:.4f}"
        print(line)


if __name__ == "__main__":
    main()
