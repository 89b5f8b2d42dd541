"""Compares methods with other packages: fits and predictions of the same network on the same batches.

    python benchmarks/method_peers.py [--rounds 15] [--samples 32] [--images 256] [--only laplace] [--clock cpu] [--out results]

A perceptron with two hidden layers of 64 units and ten classes is fitted to 1,024 examples in batches of 128. Bayes by Backprop is
compared in steps, the other methods in whole fits with the same number of epochs. Predictions are mean probabilities of ``images``
inputs with ``samples`` samples. MC dropout and SWAG have no package of their own and are compared with loops in torch.

Hamiltonian Monte Carlo and NUTS sample a perceptron with 16 hidden units, with 200 examples and four chains (Pyro: one). Their time
is divided by the number of leapfrog steps of all chains. blackjax is compiled before the measurement.

Packages that are not installed are left out and listed. The variants take turns within every round. The ratio is the time of flowbnn
over that of the other package, and the median over rounds.
"""

import importlib.util
import os
import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import CLOCKS, MODELS, interleave, make_parser, parse_with, write_results
from torch import Tensor, nn
from torch.nn import functional as F

import flowbnn as fb
from methods import make_step

PEERS = ("laplace", "bayesian_torch", "torchbnn", "posteriors", "pyro", "numpyro", "blackjax")
DISTRIBUTIONS = {
    "laplace": "laplace-torch",
    "bayesian_torch": "bayesian-torch",
    "pyro": "pyro-ppl",
}
EPOCHS, BATCH = 10, 128
QUIET = {"progress": False, "seed": 0, "validation": None}
Runs = dict[str, Callable[[], Any]]
Group = tuple[str, Runs, dict[str, int]]  # title, runs by package, and leapfrog steps by package


class Problem:
    """Network and data of all comparisons.

    Args:
        images: Number of inputs of a prediction.
        samples: Number of samples of a prediction.
    """

    def __init__(self, images: int, samples: int) -> None:
        torch.manual_seed(0)
        self.network, self.samples = MODELS["mlp"](), samples
        x, teacher = torch.randn(1024, 20), torch.randn(20, 10)
        y = (x @ teacher + torch.randn(1024, 10)).argmax(-1)
        self.batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        self.inputs = torch.randn(images, 20)
        train(self.network, self.batches, torch.optim.Adam(self.network.parameters(), 1e-2), EPOCHS)

    def copy(self, dropout: float = 0.0) -> nn.Sequential:
        """Returns a copy of the network, with dropout after every activation if the rate is positive."""
        layers = []
        for layer in deepcopy(self.network):
            layers.append(layer)
            if dropout and isinstance(layer, nn.ReLU):
                layers.append(nn.Dropout(dropout))
        return nn.Sequential(*layers)


def train(
    network: nn.Module,
    batches: list[Any],
    optimizer: Any,
    epochs: int,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Trains a network by maximum likelihood and calls ``after`` at the end of every epoch."""
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        after()


@torch.no_grad()
def mean_probabilities(forward: Callable[[Tensor], Tensor], problem: Problem) -> Tensor:
    """Returns mean probabilities over passes of a random function."""
    total: Any = 0.0
    for _ in range(problem.samples):
        total = total + forward(problem.inputs).softmax(-1)
    return total / problem.samples


def predictions(posterior: Any, problem: Problem) -> Callable[[], Tensor]:
    """Returns a function that predicts with a posterior of this package, with other samples at every call."""
    seeds = iter(range(10**9))
    return lambda: posterior.predict(problem.inputs, problem.samples, seed=next(seeds)).probabilities


# -------------------- methods


def laplace(problem: Problem, missing: list[str]) -> list[Group]:
    """Laplace approximations of all layers, and their probit predictions."""
    groups: list[Group] = []
    for structure in ("kron", "diag", "full"):
        network = (
            problem.copy()
            if structure != "full"
            else nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10))
        )
        method = fb.Laplace(structure, layers="all", prior_scale=1.0, predictive="probit", epochs=0)
        fit = partial(method.fit, network, problem.batches, num_data=1024, **QUIET)
        fits: Runs = {"flowbnn": fit}
        predicts: Runs = {"flowbnn": predictions(fit(), problem)}
        if "laplace" not in missing:
            from laplace import Laplace

            def fit_peer(network: nn.Module = network, structure: str = structure) -> Any:
                peer = Laplace(
                    network,
                    "classification",
                    subset_of_weights="all",
                    hessian_structure=structure,
                    prior_precision=1.0,
                )
                peer.fit(ListLoader(problem.batches))
                return peer

            peer = fit_peer()
            fits["laplace"] = fit_peer
            predicts["laplace"] = torch.no_grad()(partial(peer, problem.inputs, link_approx="probit"))
        name = "Laplace, " + structure + (", 16 units" if structure == "full" else "")
        groups += [(f"{name}: fit", fits, {}), (f"{name}: predict", predicts, {})]
    return groups


class ListLoader(list[Any]):
    """List of batches with the number of examples as ``len(loader.dataset)``, which laplace-torch reads."""

    @property
    def dataset(self) -> range:
        return range(sum(len(y) for _, y in self))


def bayes_by_backprop(problem: Problem, missing: list[str]) -> list[Group]:
    """Steps and predictions of Bayes by Backprop."""
    steps: dict[str, Runs] = {
        name: {
            "flowbnn": make_step(fb.BayesByBackprop(estimator=estimator), problem.copy(), problem.batches[0])
        }
        for name, estimator in (("reparameterization", "reparameterization"), ("flipout", "flipout"))
    }
    fitted = fb.BayesByBackprop(epochs=1).fit(problem.copy(), problem.batches, num_data=1024, **QUIET)
    predicts: Runs = {"flowbnn": predictions(fitted, problem)}

    def peer_step(network: nn.Module, kl: Callable[[], Tensor]) -> Callable[[], None]:
        optimizer, (x, y) = torch.optim.Adam(network.parameters(), fused=True), problem.batches[0]

        def step() -> None:
            optimizer.zero_grad()
            (F.cross_entropy(network(x), y) + kl() / 1024).backward()
            optimizer.step()

        return step

    if "bayesian_torch" not in missing:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        for kind in ("Reparameterization", "Flipout"):
            network = problem.copy()
            settings = {
                "prior_mu": 0.0,
                "prior_sigma": 1.0,
                "posterior_mu_init": 0.0,
                "posterior_rho_init": -3.0,
            }
            dnn_to_bnn(network, settings | {"type": kind, "moped_enable": False, "moped_delta": 0.5})
            steps[kind.lower()]["bayesian_torch"] = peer_step(network, partial(get_kl_loss, network))
            if kind == "Reparameterization":
                predicts["bayesian_torch"] = partial(mean_probabilities, network, problem)
    if "torchbnn" not in missing:
        import torchbnn

        layers = [
            torchbnn.BayesLinear(0.0, 0.1, layer.in_features, layer.out_features)
            if isinstance(layer, nn.Linear)
            else layer
            for layer in problem.copy()
        ]
        network = nn.Sequential(*layers)
        divergence = torchbnn.BKLLoss(reduction="sum", last_layer_only=False)
        steps["reparameterization"]["torchbnn"] = peer_step(network, lambda: divergence(network))
        predicts["torchbnn"] = partial(mean_probabilities, network, problem)
    groups: list[Group] = [(f"Bayes by Backprop, {name}: step", runs, {}) for name, runs in steps.items()]
    return [*groups, ("Bayes by Backprop: predict", predicts, {})]


def dropout(problem: Problem, missing: list[str]) -> list[Group]:
    """Fits and predictions of MC dropout, beside loops in torch."""
    network = problem.copy(dropout=0.1)
    method = fb.MCDropout(epochs=EPOCHS, schedule=None)

    def fit_loop() -> None:
        copy = deepcopy(network).train()
        train(copy, problem.batches, torch.optim.Adam(copy.parameters(), 1e-3, fused=True), EPOCHS)

    fit = partial(method.fit, network, problem.batches, num_data=1024, **QUIET)
    forward = deepcopy(network).train()
    predicts: Runs = {
        "flowbnn": predictions(fit(), problem),
        "loop": partial(mean_probabilities, forward, problem),
    }
    return [
        ("MC dropout: fit", {"flowbnn": fit, "loop": fit_loop}, {}),
        ("MC dropout: predict", predicts, {}),
    ]


class SWAGLoop:
    """SWAG with ten deviations in a few lines of torch: moments of snapshots at the end of every epoch."""

    def __init__(self, problem: Problem) -> None:
        self.network, self.problem = problem.copy(), problem
        self.weights = list(self.network.parameters())
        self.mean = self.square = torch.zeros(sum(weight.numel() for weight in self.weights))
        self.count, self.deviations = 0, list[Tensor]()

    def record(self) -> None:
        """Adds the current weights to the moments."""
        vector = nn.utils.parameters_to_vector(self.weights).detach()
        self.count += 1
        self.mean = self.mean + (vector - self.mean) / self.count
        self.square = self.square + (vector.square() - self.square) / self.count
        self.deviations = [*self.deviations, vector - self.mean][-10:]

    def fit(self) -> "SWAGLoop":
        """Trains with SGD."""
        optimizer = torch.optim.SGD(self.weights, 1e-2, 0.9)
        train(self.network, self.problem.batches, optimizer, EPOCHS, self.record)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of a network with new weights."""
        deviations = torch.stack(self.deviations)
        diagonal = (self.square - self.mean.square()).clamp(min=1e-30).sqrt()
        low_rank = torch.randn(len(deviations)) @ deviations / (len(deviations) - 1) ** 0.5
        vector = self.mean + 0.5**0.5 * (diagonal * torch.randn_like(diagonal) + low_rank)
        nn.utils.vector_to_parameters(vector, self.weights)
        return self.network(x)


def swag(problem: Problem, missing: list[str]) -> list[Group]:
    """Fits and predictions of SWAG, beside a loop in torch."""
    method = fb.SWAG(rank=10, epochs=EPOCHS, begin=0.0)
    fit = partial(method.fit, problem.copy(), problem.batches, num_data=1024, **QUIET)
    fits: Runs = {"flowbnn": fit, "loop": lambda: SWAGLoop(problem).fit()}
    predicts: Runs = {
        "flowbnn": predictions(fit(), problem),
        "loop": partial(mean_probabilities, SWAGLoop(problem).fit().forward, problem),
    }
    return [("SWAG: fit", fits, {}), ("SWAG: predict", predicts, {})]


def sgld(problem: Problem, missing: list[str]) -> list[Group]:
    """Stochastic gradient Langevin dynamics with 20 snapshots, without preconditioner."""
    method = fb.SGLD(epochs=EPOCHS, samples=20, cycles=0, preconditioned=False, lr=1e-3)
    fits: Runs = {"flowbnn": partial(method.fit, problem.copy(), problem.batches, num_data=1024, **QUIET)}
    if "posteriors" not in missing:
        import posteriors

        network = problem.copy()

        def log_posterior(parameters: Any, batch: Any) -> tuple[Tensor, Tensor]:
            outputs = torch.func.functional_call(network, parameters, (batch[0],))
            prior = sum(-0.5 * value.square().sum() for value in parameters.values())
            return -F.cross_entropy(outputs, batch[1]) + prior / 1024, outputs

        transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=1e-3, temperature=1 / 1024)

        def fit() -> list[Any]:
            parameters = {name: value.detach().clone() for name, value in network.named_parameters()}
            state, snapshots = transform.init(parameters), []
            for epoch in range(EPOCHS):
                for number, batch in enumerate(problem.batches):
                    state, _ = transform.update(state, batch)
                    if epoch >= EPOCHS // 2 and number % 2:
                        snapshots.append(state.params)
            return snapshots

        fits["posteriors"] = fit
    return [("SGLD: fit", fits, {})]


# -------------------- chains

SAMPLES, WARMUP, CHAINS, LEAPFROG, SIZES = 20, 20, 4, 16, (4, 16, 3)


def chains(name: str, problem: Problem, missing: list[str]) -> list[Group]:
    """Hamiltonian Monte Carlo or NUTS."""
    torch.manual_seed(1)
    x = torch.randn(200, SIZES[0])
    y = (x @ torch.randn(SIZES[0], SIZES[2])).argmax(-1)
    makers = {"pyro": pyro_chains, "numpyro": numpyro_chains, "blackjax": blackjax_chains}
    runs: Runs = {"flowbnn": partial(flowbnn_chains, name, x, y)}
    runs |= {package: partial(make, name, x, y) for package, make in makers.items() if package not in missing}
    steps = {package: run() for package, run in runs.items()}  # also compiles
    return [(f"{name}: sampling", runs, steps)]


def flowbnn_chains(name: str, x: Tensor, y: Tensor) -> int:
    """Samples and returns the number of leapfrog steps of all chains."""
    from flowbnn.methods.mcmc.potential import NetworkPotential

    network = nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]))
    settings = {"samples": SAMPLES, "warmup": WARMUP, "chains": CHAINS, "epochs": 0, "prior_scale": 1.0}
    method = fb.HMC(steps=LEAPFROG, **settings) if name == "HMC" else fb.NUTS(**settings)
    calls, original = [0], NetworkPotential.__call__

    def count(self: Any, position: Tensor) -> Any:
        calls[0] += len(position)
        return original(self, position)

    with patch.object(NetworkPotential, "__call__", count):
        method.fit(network, [(x, y)], num_data=len(x), **QUIET)
    return calls[0]


def split_weights(vector: Any) -> tuple[Any, ...]:
    """Returns the weights and biases of both layers of a vector."""
    n_in, width, n_out = SIZES
    first, second = n_in * width, width * n_out
    parts = vector[:first], vector[first : first + width], vector[first + width : first + width + second]
    return parts[0].reshape(n_in, width), parts[1], parts[2].reshape(width, n_out), vector[-n_out:]


NUM_WEIGHTS = SIZES[0] * SIZES[1] + SIZES[1] + SIZES[1] * SIZES[2] + SIZES[2]


def pyro_chains(name: str, x: Tensor, y: Tensor) -> int:
    """Samples one chain with Pyro, which would run several one after the other."""
    from pyro.infer import HMC, MCMC, NUTS

    calls = [0]

    def potential(values: dict[str, Tensor]) -> Tensor:
        calls[0] += 1
        w1, b1, w2, b2 = split_weights(values["w"])
        loss = F.cross_entropy(torch.tanh(x @ w1 + b1) @ w2 + b2, y, reduction="sum")
        return loss + 0.5 * values["w"].square().sum()

    torch.manual_seed(0)
    kernel = (
        HMC(potential_fn=potential, num_steps=LEAPFROG // 2, target_accept_prob=0.8)
        if name == "HMC"
        else NUTS(potential_fn=potential)
    )
    start = {"w": 0.1 * torch.randn(NUM_WEIGHTS)}
    MCMC(kernel, num_samples=SAMPLES, warmup_steps=WARMUP, initial_params=start, disable_progbar=True).run()
    return calls[0]


def jax_potential(x: Tensor, y: Tensor) -> Callable[[Any], Any]:
    """Returns the potential as a function of JAX."""
    import jax
    import jax.numpy as jnp

    inputs, targets = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def potential(vector: Any) -> Any:
        w1, b1, w2, b2 = split_weights(vector)
        logs = jax.nn.log_softmax(jnp.tanh(inputs @ w1 + b1) @ w2 + b2)
        return 0.5 * (vector**2).sum() - jnp.take_along_axis(logs, targets[:, None], 1).sum()

    return potential


def numpyro_chains(name: str, x: Tensor, y: Tensor) -> int:
    """Samples with numpyro, all chains at once."""
    import jax
    from numpyro.infer import HMC, MCMC, NUTS

    if name not in _COMPILED:
        potential = jax_potential(x, y)
        kernel = (
            HMC(potential_fn=potential, num_steps=LEAPFROG // 2, trajectory_length=None)
            if name == "HMC"
            else NUTS(potential_fn=potential)
        )
        settings = {"num_warmup": WARMUP, "num_samples": SAMPLES, "num_chains": CHAINS}
        _COMPILED[name] = MCMC(kernel, chain_method="vectorized", progress_bar=False, **settings)
    starts = 0.1 * jax.random.normal(jax.random.PRNGKey(1), (CHAINS, NUM_WEIGHTS))
    sampler = _COMPILED[name]
    sampler.run(jax.random.PRNGKey(0), init_params=starts, extra_fields=("num_steps",))
    # the steps of the warm-up are not recorded and are taken as equally many
    return int(sampler.get_extra_fields()["num_steps"].sum()) * (WARMUP + SAMPLES) // SAMPLES


_COMPILED: dict[str, Any] = {}


def blackjax_chains(name: str, x: Tensor, y: Tensor) -> int:
    """Samples with blackjax, all chains at once, with its window adaptation."""
    import blackjax
    import jax

    if ("blackjax", name) not in _COMPILED:
        potential = jax_potential(x, y)
        extra = {"num_integration_steps": LEAPFROG // 2} if name == "HMC" else {}
        algorithm = blackjax.hmc if name == "HMC" else blackjax.nuts

        def log_density(vector: Any) -> Any:
            return -potential(vector)

        def run(key: Any, start: Any) -> Any:
            warmup_key, sample_key = jax.random.split(key)
            warmup = blackjax.window_adaptation(algorithm, log_density, target_acceptance_rate=0.8, **extra)
            (state, parameters), info = warmup.run(warmup_key, start, WARMUP)
            kernel = algorithm(log_density, **parameters).step

            def step(state: Any, key: Any) -> Any:
                state, info = kernel(key, state)
                return state, (state.position, info.num_integration_steps)

            _, (positions, steps) = jax.lax.scan(step, state, jax.random.split(sample_key, SAMPLES))
            return positions, steps.sum() + info.info.num_integration_steps.sum()

        _COMPILED["blackjax", name] = jax.jit(jax.vmap(run))
    starts = 0.1 * jax.random.normal(jax.random.PRNGKey(1), (CHAINS, NUM_WEIGHTS))
    _, steps = _COMPILED["blackjax", name](jax.random.split(jax.random.PRNGKey(0), CHAINS), starts)
    return int(steps.sum())


METHODS: dict[str, Callable[[Problem, list[str]], list[Group]]] = {
    "laplace": laplace,
    "bayes-by-backprop": bayes_by_backprop,
    "dropout": dropout,
    "swag": swag,
    "sgld": sgld,
    "hmc": partial(chains, "HMC"),
    "nuts": partial(chains, "NUTS"),
}


def measure(title: str, runs: Runs, steps: dict[str, int], arguments: Any) -> dict[str, Any]:
    """Returns the times and ratios of one comparison."""
    rounds = max(3, arguments.rounds // 5) if steps else arguments.rounds
    times = interleave(runs, rounds, "cpu", warm=0 if steps else 1, clock=CLOCKS[arguments.clock])
    for package, count in steps.items():
        times[package] = [seconds / count for seconds in times[package]]
    row: dict[str, Any] = {"title": title, "leapfrog_steps": steps, "ratios": {}, "quartiles": {}}
    row["milliseconds"] = {package: 1e3 * statistics.median(values) for package, values in times.items()}
    for package in times:
        if package == "flowbnn":
            continue
        ratios = sorted(a / b for a, b in zip(times["flowbnn"], times[package], strict=True))
        row["ratios"][package] = statistics.median(ratios)
        row["quartiles"][package] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    return row


def main() -> None:
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    parser = make_parser(__doc__, rounds=15, samples=32, images=256, threads=1)
    parser.add_argument("--only", choices=tuple(METHODS), nargs="*", default=tuple(METHODS))
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="cpu: CPU time")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.set_defaults(device="cpu")
    arguments = parse_with(parser)
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    arguments.versions = {
        name: version(DISTRIBUTIONS.get(name, name)) for name in PEERS if name not in missing
    }
    problem, rows = Problem(arguments.images, arguments.samples), []
    for name in arguments.only:
        for title, runs, steps in METHODS[name](problem, missing):
            row = measure(title, runs, steps, arguments)
            rows.append(row)
            write_results(arguments, "method_peers", rows)
            ratios = "  ".join(f"{package} {ratio:.2f}" for package, ratio in row["ratios"].items())
            print(f"{title:40} {row['milliseconds']['flowbnn']:10.4f} ms   ratio to {ratios}", flush=True)


if __name__ == "__main__":
    main()
