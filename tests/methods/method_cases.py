"""A small configuration of every method, and the posterior that it can represent in a linear regression with known noise.

Values of ``Case.represents``:

* ``exact``: mean and covariance of the exact posterior;
* ``mean-field``: the exact mean, and the inverse of the diagonal of the precision as covariance;
* ``point``: the exact mean (the mode of a Gaussian posterior), without variance;
* ``likelihood``: the maximum-likelihood solution, without variance;
* ``mean``: the exact mean, with a different variance;
* ``near``: a different model of the same data, whose mean is within three posterior standard deviations.
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

PROBLEMS = {"classification": (blobs, 3), "regression": (lines, 2)}
INVALID_SETTINGS: tuple[dict[str, Any], ...] = (  # of every method
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
INVALID_VARIATIONAL: tuple[dict[str, Any], ...] = (
    {"base_scale": -1.0},
    {"noise_lr": 0},
    {"beta": -1},
    {"beta": float("inf")},
    {"warmup": 2},
    {"samples": 0},
    {"epochs": 0},
)
INVALID_CHAIN: tuple[dict[str, Any], ...] = (
    {"samples": 0},
    {"chains": 0},
    {"warmup": -1},
    {"thin": 0},
    {"target_accept": 0.0},
    {"target_accept": 1.0},
    {"variables": "inputs"},
    {"layers": "0"},
)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@dataclass(frozen=True)
class Case:
    """Test case of one method.

    Args:
        make: Function from settings to the method for problems of a few seconds.
        linear: Function that returns the method for the linear regression, with the prior scale ``PRIOR``.
        represents: Part of the exact posterior that the method represents, see above.
        reason: Reason why it represents no more.
        samples: Number of samples of the posterior of the linear regression.
        mean_tolerance: Largest error of the mean in posterior standard deviations, in addition to the Monte Carlo error.
        variance_tolerance: Largest relative error of the covariance, in addition to the Monte Carlo error.
        chains: Number of Markov chains whose states the samples are; their effective sample size is then used. 0 for others.
        invalid: Settings that must be refused, in addition to :data:`INVALID_SETTINGS`.
        options: Options of ``fit`` for the linear regression.
    """

    make: Callable[..., Method]
    linear: Callable[[], Method]
    represents: str
    reason: str
    samples: int = 1
    mean_tolerance: float = 1e-3
    variance_tolerance: float = 0.0
    chains: int = 0
    invalid: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


SHORT: dict[str, Any] = {"epochs": 8, "lr": 0.06}
CONVERGED: dict[str, Any] = {"epochs": 250, "lr": 0.1, "schedule": cosine, "prior_scale": PRIOR}

CASES: dict[str, Case] = {
    "mle": Case(
        lambda **settings: fb.MLE(**SHORT | settings),
        lambda: fb.MLE(**CONVERGED),
        "likelihood",
        "it has no prior and is one network",
    ),
    "map": Case(
        lambda **settings: fb.MAP(**SHORT | settings),
        lambda: fb.MAP(**CONVERGED),
        "point",
        "it is one network",
    ),
    "damp": Case(
        lambda **settings: fb.DAMP(sub_batches=2, **SHORT | settings),
        lambda: fb.DAMP(scale=0.1, **CONVERGED),
        "near",
        "for a quadratic loss the mean of its gradients equals that of MAP, but its steps have noise",
        invalid=(
            {"scale": 0.0},
            {"sub_batches": 0},
        ),
    ),
    "mc-dropout": Case(
        lambda **settings: fb.MCDropout(**SHORT | settings),
        lambda: fb.MCDropout(0.02, **CONVERGED),
        "near",
        "its variance is that of dropped inputs, w^2 p / (1 - p), for any data",
        samples=400,
        invalid=(
            {"rate": 0.0},
            {"rate": 1.0},
            {"rate": "a"},
            {"layers": 3},
            {"repeats": 0},
        ),
    ),
    "deep-ensemble": Case(
        lambda **settings: fb.DeepEnsemble(2, **SHORT | settings),
        lambda: fb.DeepEnsemble(2, **CONVERGED | {"epochs": 400}),
        "point",
        "all members converge to the only minimum of the loss",
        samples=2,
        invalid=(
            {"members": 0},
            {"members": -1},
            {"members": 2.5},
            {"members": True},
            {"epochs": 0},
        ),
    ),
    "swag": Case(
        lambda **settings: fb.SWAG(**{"batch_norm_samples": 4, "epochs": 20, "lr": 0.03} | settings),
        lambda: fb.SWAG(epochs=250, lr=0.1, swag_lr=0.02, schedule=cosine, prior_scale=PRIOR),
        "mean",
        "its variance is that of minibatches, and the data are one batch",
        samples=100,
        mean_tolerance=1e-2,
        invalid=(
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
        lambda **settings: fb.Temperature(fb.MAP(**SHORT | settings), validation_fraction=0.3),
        lambda: fb.Temperature(fb.MAP(**CONVERGED)),
        "point",
        "its inner method is MAP",
        options={"validation": "training"},
        invalid=(
            {"validation_fraction": "half"},
            {"validation_fraction": 1.0},
            {"samples": 0},
            {"method": "map"},
        ),
    ),
    "laplace": Case(
        lambda **settings: fb.Laplace(**SHORT | settings),
        lambda: fb.Laplace("full", layers="all", newton_steps=1, **CONVERGED | {"epochs": 20}),
        "exact",
        "the network is linear in its weights and the noise is Gaussian",
        samples=4000,
        invalid=(
            {"structure": "krone"},
            {"prior_scale": "evidence"},
            {"predictive": "probits"},
            {"curvature": "hessian"},
            {"newton_steps": -1},
            {"layers": 3},
        ),
    ),
    "bayes-by-backprop": Case(
        lambda **settings: fb.BayesByBackprop(**SHORT | settings),
        lambda: fb.BayesByBackprop(noise_lr=0.1, repeats=16, **CONVERGED | {"epochs": 150}),
        "mean-field",
        "its weights are independent",
        samples=4000,
        mean_tolerance=0.05,
        variance_tolerance=0.02,
        invalid=(
            {"prior": "laplace"},
            {"estimator": "locl"},
            {"pi": 1.0},
            {"pi": None},
            {"sigma1": "wide"},
            {"sigma2": 0.0},
            {"kl_samples": 0},
            {"layers": 3},
            *INVALID_VARIATIONAL,
        ),
    ),
    "ivon": Case(
        lambda **settings: fb.IVON(
            **{"epochs": 20, "lr": 0.2} | {k: v for k, v in settings.items() if k != "lr"}
        ),
        lambda: fb.IVON(
            epochs=300,
            lr=0.1,
            hessian_init=4.0,
            hessian_momentum=0.99,
            repeats=8,
            schedule=cosine,
            prior_scale=PRIOR,
        ),
        "mean-field",
        "its weights are independent",
        samples=4000,
        mean_tolerance=0.05,
        variance_tolerance=0.05,  # the Hessian is a running mean of estimates from draws
        invalid=(
            {"momentum": 1.0},
            {"hessian_momentum": 1.0},
            {"hessian_init": 0.0},
            {"beta": 0.0},
            {"repeats": 0},
            {"epochs": 0},
            {"layers": 3},
            {"optimizer": torch.optim.Adam},
        ),
    ),
    "vbll": Case(
        lambda **settings: fb.VBLL(**SHORT | settings),
        lambda: fb.VBLL(noise_lr=0.1, **CONVERGED | {"epochs": 200}),
        "exact",
        "the network is its last layer",
        samples=4000,
        mean_tolerance=1e-2,
        variance_tolerance=0.02,
        invalid=(
            {"structure": "kron"},
            {"base_scale": -1.0},
            {"noise_lr": 0},
            {"beta": -1},
            {"warmup": 2},
            {"repeats": 2},
            {"epochs": 0},
        ),
    ),
    "mnf": Case(
        lambda **settings: fb.MNF(**{"flow": "planar", **SHORT} | settings),
        lambda: fb.MNF("planar", noise_lr=0.05, repeats=4, **CONVERGED | {"epochs": 100}),
        "mean",
        "its covariance lies between mean-field and exact",
        samples=600,
        mean_tolerance=0.15,
        invalid=(
            {"flow": "plnar"},
            {"flow": Planar(3)},
            {"flow": 3},
            {"kl_samples": 0},
            {"z_scale": 0.0},
            *INVALID_VARIATIONAL,
        ),
    ),
    "hmc": Case(
        lambda **settings: fb.HMC(
            **{**SHORT, "samples": 4, "warmup": 8, "chains": 2, "steps": 6, "target_accept": 0.9} | settings
        ),
        lambda: fb.HMC(samples=100, warmup=60, chains=6, steps=6, epochs=0, prior_scale=PRIOR),
        "exact",
        "up to Monte Carlo error",
        samples=600,
        chains=6,
        invalid=(
            {"steps": 0},
            *INVALID_CHAIN,
        ),
    ),
    "nuts": Case(
        lambda **settings: fb.NUTS(
            **{**SHORT, "samples": 4, "warmup": 8, "chains": 2, "max_depth": 3, "target_accept": 0.9}
            | settings
        ),
        lambda: fb.NUTS(samples=50, warmup=40, chains=10, max_depth=5, epochs=0, prior_scale=PRIOR),
        "exact",
        "up to Monte Carlo error",
        samples=500,
        chains=10,
        invalid=(
            {"max_depth": 0},
            {"max_depth": 20},
            *INVALID_CHAIN,
        ),
    ),
    "sgld": Case(
        lambda **settings: fb.SGLD(**{"epochs": 24, "lr": 0.1, "samples": 6, "cycles": 2} | settings),
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
        "up to Monte Carlo error and discretization error",
        samples=1000,
        chains=1,
        variance_tolerance=0.15,
        invalid=(
            {"samples": 0},
            {"epochs": 0},
            {"cycles": -1},
            {"exploration": 1.0},
            {"temperature": -1.0},
            {"optimizer": torch.optim.Adam},
        ),
    ),
    "mode-ensemble": Case(
        lambda **settings: fb.ModeEnsemble(4, steps=40, **SHORT | settings),
        lambda: fb.ModeEnsemble(2, steps=100, **CONVERGED),
        "near",
        "its members are modes of factors of the inputs, with trained weights",
        samples=2,
        invalid=(
            {"members": 0},
            {"width": "wide"},
            {"steps": 0},
            {"batch_size": 0},
            {"layers": 3},
        ),
    ),
    "node-noise": Case(
        lambda **settings: fb.NodeNoise("gaussian", **SHORT | settings),
        lambda: fb.NodeNoise("gaussian", noise_lr=0.04, **CONVERGED | {"epochs": 150, "lr": 0.05}),
        "near",
        "its posterior is over factors of the inputs, with trained weights",
        samples=400,
        invalid=(
            {"kind": 3},
            {"kind": "plnar"},
            {"components": 0},
            {"site": "pixel"},
            {"gamma": -1.0},
            *INVALID_VARIATIONAL,
        ),
    ),
}


def case_of(name: str) -> Case:
    if name not in CASES:
        pytest.fail(f"the registered method '{name}' has no case in tests/methods/method_cases.py")
    return CASES[name]


@cache
def fitted(name: str, kind: str, /) -> fb.methods.Posterior:
    """Returns a fit to one of :data:`PROBLEMS`, shared by several tests."""
    make, outputs = PROBLEMS[kind]
    return case_of(name).make().fit(small(outputs), loader(make()), seed=0, **QUIET)


@cache
def fitted_line(name: str, /) -> fb.methods.Posterior:
    """Returns a fit to :func:`problems.conjugate`, shared by several tests."""
    case, (_, network, batches, _) = case_of(name), conjugate(bias=True)
    options = {"validation": batches} if case.options.get("validation") else {}
    likelihood = fb.likelihoods.Gaussian(NOISE)
    return case.linear().fit(network, batches, likelihood=likelihood, seed=0, **QUIET, **options)


NAMES = sorted(METHODS)
