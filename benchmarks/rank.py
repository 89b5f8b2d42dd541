"""Measures the loss of ``joint="low-rank"`` compared with a full covariance, in nats, for several ranks.

    python benchmarks/rank.py [--threads 2] [--seeds 5] [--problems digits]

The problems are those of ``flowbnn run posterior-quality``. The weights are trained on some examples and frozen, and the noise is
fitted to others. Every posterior starts at the joint Gaussian of ``fb.calibrate``, as far as its structure can represent it, and is
fitted by the ELBO. Rank 0 is a full covariance within each layer and none across layers. Differences of the ELBO are paired by seed,
with Student's 95 % confidence interval.
"""

import torch
from common import make_parser

from flowbnn import diagnostics
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
    """Returns the ELBO of every structure, in nats."""
    device = {"accelerator": "cpu"}
    case = make_case(problem, settings, seed, device)
    start = fit_by_calibrate(case, seed, device)
    posteriors = {
        name: fit_posterior(recipe, case, settings, seed, device, start) for name, recipe in RECIPES.items()
    }
    return {
        name: diagnostics.pareto_k(posterior, case.loader, settings.predictions, seed).elbo
        for name, posterior in posteriors.items()
    }


def main() -> None:
    parser = make_parser(__doc__, threads=2, seeds=5)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for problem in options.problems:
        results = [elbos(problem, seed, Settings()) for seed in range(options.seeds)]
        print(PROBLEMS[problem].label)
        for name in list(RECIPES)[:-1]:
            loss = paired_difference(
                [result["full"] for result in results], [result[name] for result in results]
            )
            print(f"  {name:8} {loss.describe(2)} nats below a full covariance")


if __name__ == "__main__":
    main()
