"""A small configuration of every method, and what it can represent of a Gaussian posterior of weights.

What a method is held to in linear regression with known noise, as ``represents``:

* ``exact``: mean and covariance of the true posterior;
* ``mean-field``: the mean, and of the covariance the inverse of the precision's diagonal;
* ``point``: the mean (of Gaussian posteriors the mode), and no spread at all;
* ``likelihood``: the maximum of the likelihood, and no spread;
* ``mean``: the mean, with a spread that is not the posterior's;
* ``near``: another model of the same data, whose mean is within three standard deviations of the true posterior's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from problems import NOISE, PRIOR, QUIET, blobs, conjugate, lines, loader, small

import flowbnn as fb
from flowbnn.methods import METHODS, Method
from flowbnn.transforms import Planar

PROBLEMS = {"classes": (blobs, 3), "numbers": (lines, 2)}
WRONG: tuple[dict[str, Any], ...] = (  # for every method
    {"prior_scale": 0.0},
    {"prior_scale": -1.0},
    {"epochs": -1},
    {"epochs": 2.5},
    {"lr": 0.0},
    {"lr": "a"},
    {"optimizer": "adam"},
    {"optimizer": torch.optim.Adam([torch.ones(1)])},
    {"schedule": 5},
)
VARIATIONAL: tuple[dict[str, Any], ...] = (
    {"base_scale": -1.0},
    {"noise_lr": 0},
    {"beta": -1},
    {"beta": float("inf")},
    {"warmup": 2},
    {"samples": 0},
    {"epochs": 0},
)
CHAIN: tuple[dict[str, Any], ...] = (
    {"samples": 0},
    {"chains": 0},
    {"warmup": -1},
    {"thin": 0},
    {"target_accept": 0.0},
    {"target_accept": 1.0},
    {"over": "inputs"},
    {"layers": "0"},
)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@dataclass(frozen=True)
class Case:
    """One method in the suite.

    Args:
        make: the method for problems of a few seconds, from keyword changes.
        linear: the method for linear regression; its prior has the scale ``PRIOR``.
        represents: see above.
        reason: why it can represent no more.
        samples: of the linear regression's posterior.
        within: largest error of the mean in posterior standard deviations, besides the Monte Carlo error of ``samples``.
        variance_within: largest relative error of the covariance, besides the Monte Carlo error.
        chains: of a Markov chain, where the samples are its states; their number is then judged by the effective sample size.
        refuses: settings that must be refused, each by itself, in one line that names it; besides those of :data:`WRONG`.
    """

    make: Callable[..., Method]
    linear: Callable[[], Method]
    represents: str
    reason: str
    samples: int = 1
    within: float = 1e-3
    variance_within: float = 0.0
    chains: int = 0
    refuses: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


TRAINED: dict[str, Any] = {"epochs": 8, "lr": 0.06}
SETTLED: dict[str, Any] = {"epochs": 250, "lr": 0.1, "schedule": cosine, "prior_scale": PRIOR}

CASES: dict[str, Case] = {
    "mle": Case(
        lambda **more: fb.MLE(**TRAINED | more),
        lambda: fb.MLE(**SETTLED),
        "likelihood",
        "it has no prior and is one network",
    ),
    "map": Case(
        lambda **more: fb.MAP(**TRAINED | more),
        lambda: fb.MAP(**SETTLED),
        "point",
        "it is one network",
    ),
    "damp": Case(
        lambda **more: fb.DAMP(sub_batches=2, **TRAINED | more),
        lambda: fb.DAMP(scale=0.1, **SETTLED),
        "near",
        "where the loss is quadratic the mean of its gradients is that of MAP; the noise of its steps remains",
        refuses=(
            {"scale": 0.0},
            {"sub_batches": 0},
        ),
    ),
    "mc-dropout": Case(
        lambda **more: fb.MCDropout(**TRAINED | more),
        lambda: fb.MCDropout(0.02, **SETTLED),
        "near",
        "its spread is that of dropped inputs, w^2 p / (1 - p), whatever the data say",
        samples=400,
        refuses=(
            {"rate": 0.0},
            {"rate": 1.0},
            {"rate": "a"},
            {"layers": 3},
        ),
    ),
    "deep-ensemble": Case(
        lambda **more: fb.DeepEnsemble(2, **TRAINED | more),
        lambda: fb.DeepEnsemble(2, **SETTLED | {"epochs": 400}),
        "point",
        "where the loss has one minimum, all members end there",
        samples=2,
        refuses=(
            {"members": 0},
            {"members": -1},
            {"members": 2.5},
            {"members": True},
            {"epochs": 0},
        ),
    ),
    "swag": Case(
        lambda **more: fb.SWAG(**{"batch_norm_samples": 4, "epochs": 20, "lr": 0.03} | more),
        lambda: fb.SWAG(epochs=400, lr=0.1, swag_lr=0.02, schedule=cosine, prior_scale=PRIOR),
        "mean",
        "its spread is that of the steps of SGD, which a whole batch does not have",
        samples=100,
        within=1e-2,
        refuses=(
            {"rank": 1},
            {"rank": -1},
            {"begin": 1.0},
            {"momentum": 1.0},
            {"snapshots_per_epoch": 0},
            {"scale": 0.0},
            {"swag_lr": 0.0},
            {"batch_norm_samples": 0},
            {"epochs": 0},
        ),
    ),
    "temperature": Case(
        lambda **more: fb.Temperature(fb.MAP(**TRAINED | more), validation_fraction=0.3),
        lambda: fb.Temperature(fb.MAP(**SETTLED)),
        "point",
        "it is what it is on top of, here MAP",
        options={"validation": "training"},
        refuses=(
            {"validation_fraction": "half"},
            {"validation_fraction": 1.0},
            {"samples": 0},
            {"method": "map"},
        ),
    ),
    "laplace": Case(
        lambda **more: fb.Laplace(**TRAINED | more),
        lambda: fb.Laplace("full", layers="all", newton_steps=1, **SETTLED | {"epochs": 20}),
        "exact",
        "of a network that is linear in its weights and of Gaussian noise",
        samples=4000,
        refuses=(
            {"structure": "krone"},
            {"prior_scale": "evidence"},
            {"predictive": "probits"},
            {"curvature": "hessian"},
            {"newton_steps": -1},
            {"layers": 3},
        ),
    ),
    "bayes-by-backprop": Case(
        lambda **more: fb.BayesByBackprop(**TRAINED | more),
        lambda: fb.BayesByBackprop(noise_lr=0.05, samples=2, **SETTLED | {"epochs": 400, "lr": 0.05}),
        "mean-field",
        "it has a Gaussian of its own for every weight",
        samples=4000,
        within=0.05,
        variance_within=0.02,
        refuses=(
            {"prior": "laplace"},
            {"estimator": "locl"},
            {"pi": 1.0},
            {"pi": None},
            {"sigma1": "wide"},
            {"sigma2": 0.0},
            {"kl_samples": 0},
            {"layers": 3},
            *VARIATIONAL,
        ),
    ),
    "mnf": Case(
        lambda **more: fb.MNF(**TRAINED | more),
        lambda: fb.MNF("planar", noise_lr=0.03, **SETTLED | {"epochs": 300, "lr": 0.05}),
        "mean",
        "its spread is the mean-field one or nearer to the posterior's, as its bound tells",
        samples=600,
        within=0.15,
        refuses=(
            {"flow": "plnar"},
            {"flow": Planar(3)},
            {"flow": 3},
            {"kl_samples": 0},
            {"z_scale": 0.0},
            *VARIATIONAL,
        ),
    ),
    "hmc": Case(
        lambda **more: fb.HMC(
            **{**TRAINED, "samples": 6, "warmup": 16, "chains": 2, "steps": 6, "target_accept": 0.9} | more
        ),
        lambda: fb.HMC(samples=150, warmup=100, chains=4, steps=6, epochs=0, prior_scale=PRIOR),
        "exact",
        "up to Monte Carlo error",
        samples=600,
        chains=4,
        refuses=(
            {"steps": 0},
            *CHAIN,
        ),
    ),
    "nuts": Case(
        lambda **more: fb.NUTS(
            **{**TRAINED, "samples": 6, "warmup": 16, "chains": 2, "max_depth": 3, "target_accept": 0.9}
            | more
        ),
        lambda: fb.NUTS(samples=50, warmup=50, chains=10, max_depth=5, epochs=0, prior_scale=PRIOR),
        "exact",
        "up to Monte Carlo error",
        samples=500,
        chains=10,
        refuses=(
            {"max_depth": 0},
            {"max_depth": 20},
            *CHAIN,
        ),
    ),
    "sgld": Case(
        lambda **more: fb.SGLD(**{"epochs": 24, "lr": 0.1, "samples": 6, "cycles": 2} | more),
        lambda: fb.SGLD(
            samples=1000,
            cycles=0,
            epochs=1100,
            lr=0.03,
            exploration=0.06,
            preconditioned=False,
            prior_scale=PRIOR,
        ),
        "exact",
        "up to Monte Carlo error and the size of its steps",
        samples=1000,
        chains=1,
        variance_within=0.15,
        refuses=(
            {"samples": 0},
            {"epochs": 0},
            {"cycles": -1},
            {"exploration": 1.0},
            {"temperature": -1.0},
            {"optimizer": torch.optim.Adam},
        ),
    ),
    "mode-ensemble": Case(
        lambda **more: fb.ModeEnsemble(4, steps=40, **TRAINED | more),
        lambda: fb.ModeEnsemble(2, steps=100, **SETTLED),
        "near",
        "its members are modes of factors of the inputs, around weights that are trained before",
        samples=2,
        refuses=(
            {"members": 0},
            {"width": "wide"},
            {"steps": 0},
            {"batch_size": 0},
            {"layers": 3},
        ),
    ),
    "node-noise": Case(
        lambda **more: fb.NodeNoise("gaussian", **TRAINED | more),
        lambda: fb.NodeNoise("gaussian", noise_lr=0.02, **SETTLED | {"epochs": 300, "lr": 0.05}),
        "near",
        "its posterior is over factors of the inputs, its weights are learned as parameters",
        samples=400,
        refuses=(
            {"kind": 3},
            {"kind": "plnar"},
            {"components": 0},
            {"site": "pixel"},
            {"gamma": -1.0},
            *VARIATIONAL,
        ),
    ),
}


def case_of(name: str) -> Case:
    if name not in CASES:
        pytest.fail(f"the method '{name}' is registered and has no case in tests/methods/method_cases.py")
    return CASES[name]


@cache
def fitted(name: str, kind: str, /) -> fb.methods.Posterior:
    """A fit to one of :data:`PROBLEMS` that several tests look at."""
    make, outputs = PROBLEMS[kind]
    return case_of(name).make().fit(small(outputs), loader(make()), seed=0, **QUIET)


@cache
def fitted_line(name: str, /) -> fb.methods.Posterior:
    """A fit to :func:`problems.conjugate` that several tests look at."""
    case, (_, network, batches, _) = case_of(name), conjugate(bias=True)
    options = {"validation": batches} if case.options.get("validation") else {}
    known = fb.likelihoods.Gaussian(NOISE)
    return case.linear().fit(network, batches, likelihood=known, seed=0, **QUIET, **options)


NAMES = sorted(METHODS)
