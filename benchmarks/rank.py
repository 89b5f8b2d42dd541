"""How many directions noise needs across layers: nats that ``joint="low-rank"`` loses to a full covariance.

    python benchmarks/rank.py [--threads 2] [--seeds 5] [--problems digits]

The problems are those of ``flowbnn run posterior-quality``: the weights are trained on some examples and frozen, the noise is fitted to
others. Every posterior starts at the joint Gaussian of ``fb.calibrate``, as near as its structure comes to it, and is fitted by the
ELBO. Rank 0 is a full covariance within each layer and none across; differences of the ELBO are paired by seed, with Student's 95 %
interval.
"""

import torch
from common import options

from flowbnn import quality
from flowbnn.noise import NormalAffine, Recipe
from flowbnn_studies.posteriors.posterior_quality import (
    PROBLEMS,
    Settings,
    fit_by_calibrate,
    fit_posterior,
    make_case,
)
from flowbnn_studies.runner.findings import paired_difference

RANKS = (1, 2, 4, 8, 16, 32)
RECIPES: dict[str, Recipe] = {
    "rank 0": NormalAffine(joint="layers"),
    **{f"rank {rank}": NormalAffine(joint="low-rank", rank=rank) for rank in RANKS},
    "full": NormalAffine(joint="full"),
}


def elbos(problem: str, seed: int, settings: Settings) -> dict[str, float]:
    """The ELBO of every structure, in nats."""
    device = {"accelerator": "cpu"}
    case = make_case(problem, settings, seed, device)
    start = fit_by_calibrate(case, seed, device)
    posteriors = {
        name: fit_posterior(recipe, case, settings, seed, device, start) for name, recipe in RECIPES.items()
    }
    return {
        name: quality.pareto_k(posterior, case.loader, settings.predictions, seed).elbo
        for name, posterior in posteriors.items()
    }


def main() -> None:
    parser = options(__doc__, threads=2, seeds=5)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for problem in given.problems:
        found = [elbos(problem, seed, Settings()) for seed in range(given.seeds)]
        print(PROBLEMS[problem].label)
        for name in list(RECIPES)[:-1]:
            below = paired_difference([one["full"] for one in found], [one[name] for one in found])
            print(f"  {name:8} {below.describe(2)} nats below a full covariance")


if __name__ == "__main__":
    main()
