"""Compares predictions for unusual networks with networks that are built by hand and run one at a time.

The judge shares no code with the library. Noise is multiplied into the inputs of layers by hooks of its own. Sampled weights are
copied into a copy of the network. A trial is one network with one method, and passes if the outputs agree or if the network is
refused in one line.
"""

import random
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.fuzz import describe_error
from tests.stress.subjects import SUBJECTS
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.posterior import PredictOptions

__all__ = ["METHODS", "stress"]

NUM_SAMPLES = 3
TOLERANCE = 2e-4
QUIET: dict[str, Any] = {"seed": 0, "progress": False}


def fit_noise(network: nn.Module, batches: Any) -> Any:
    """Returns a posterior of noise on the inputs of all linear and convolutional layers."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    names = [name for name, module in network.named_modules() if type(module) in kinds]
    model = fb.to_stochastic(network, {name: fb.noise.NormalAffine() for name in names})
    return fb.fit(model, batches, epochs=1, report=False, **QUIET, validation=None)


def fit_and_load(network: nn.Module, batches: Any) -> Any:
    """Returns a posterior of weights that was saved and loaded into a copy of the network."""
    posterior = fb.SWAG(epochs=6).fit(network, batches, **QUIET)
    with tempfile.TemporaryDirectory() as folder:
        return fb.load_posterior(posterior.save(Path(folder) / "saved.safetensors"), network)


METHODS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "node noise": fit_noise,
    "mle": lambda network, batches: fb.MLE(epochs=1).fit(network, batches, **QUIET),
    "map": lambda network, batches: fb.MAP(epochs=1).fit(network, batches, **QUIET),
    "ensemble": lambda network, batches: fb.DeepEnsemble(2, epochs=1).fit(network, batches, **QUIET),
    "swag": lambda network, batches: fb.SWAG(epochs=6).fit(network, batches, **QUIET),
    "sgld": lambda network, batches: fb.SGLD(epochs=4, samples=2, cycles=1).fit(network, batches, **QUIET),
    "bayes by backprop": lambda network, batches: fb.BayesByBackprop(epochs=1).fit(network, batches, **QUIET),
    "mnf": lambda network, batches: fb.MNF(epochs=1).fit(network, batches, **QUIET),
    "laplace": lambda network, batches: fb.Laplace(
        "diag", layers="all", predictive="sampled", prior_scale=0.1, epochs=0
    ).fit(network, batches, **QUIET),
    "hmc": lambda network, batches: fb.HMC(samples=2, warmup=2, chains=1, epochs=1).fit(
        network, batches, **QUIET
    ),
    "dropout": lambda network, batches: fb.MCDropout(0.2, epochs=1).fit(network, batches, **QUIET),
    "saved swag": fit_and_load,
}


def call(network: nn.Module, inputs: Any) -> Tensor:
    """Calls a network with one input, several, or named ones."""
    dtype = next(parameter.dtype for parameter in network.parameters())

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(inputs, dict):
        return network(**{name: cast(value) for name, value in inputs.items()})
    return network(*map(cast, inputs)) if isinstance(inputs, tuple) else network(cast(inputs))


def have_one_mask(plain: nn.Module, layers: Collection[str], inputs: Any) -> bool:
    """Returns True if every layer is called once, with inputs ``[B, D]``. Dropout has other masks at each position and call."""
    sizes: list[int] = []
    handles = [
        plain.get_submodule(name).register_forward_pre_hook(lambda _, args: sizes.append(args[0].ndim))
        for name in layers
    ]
    with torch.no_grad():
        call(plain, inputs)
    for handle in handles:
        handle.remove()
    return sizes == [2] * len(layers)


def judge_noise(plain: nn.Module, draws: dict[str, Tensor], inputs: Any) -> Tensor:
    """Returns the outputs of the network for each draw of noise, which hooks multiply into the inputs of the layers."""
    results = []
    for number in range(NUM_SAMPLES):
        handles = []
        for name, vectors in draws.items():
            layer = plain.get_submodule(name)

            def multiply(layer: nn.Module, args: Any, vector: Tensor = vectors[number]) -> Any:
                axes = 0 if isinstance(layer, nn.Linear) else args[0].ndim - 2
                return args[0] * vector.reshape(-1, *(1,) * axes), *args[1:]

            handles.append(layer.register_forward_pre_hook(multiply))
        with torch.no_grad():
            results.append(call(plain, inputs))
        for handle in handles:
            handle.remove()
    return torch.stack(results)


def judge_weights(plain: nn.Module, draws: dict[str, Tensor], inputs: Any) -> Tensor:
    """Returns the outputs of the network with each set of weights, which are written into it."""
    tensors = dict(plain.named_parameters()) | dict(plain.named_buffers())
    results = []
    for number in range(NUM_SAMPLES):
        with torch.no_grad():
            for name, values in draws.items():
                tensors[name].copy_(values[number])
            results.append(call(plain, inputs))
    return torch.stack(results)


def judge(posterior: Any, network: nn.Module, inputs: Any, method: str) -> Tensor:
    """Returns the outputs of the sampled networks, run one at a time.

    Args:
        posterior: Posterior to judge.
        network: Fresh copy of the network that it was made from.
        inputs: Inputs of one batch.
        method: Name of the method.
    """
    noisy = method in ("node noise", "dropout")
    state = posterior.model.state_dict()
    plain = {name: state[name] for name in network.state_dict()}
    network.load_state_dict(plain)
    network.eval()
    try:
        draws = posterior.draws(NUM_SAMPLES, seed=1)
    except fb.FlowBNNError:
        draws = {}
    if not draws or (method == "dropout" and not have_one_mask(network, draws, inputs)):
        with torch.no_grad():  # the sampled networks themselves are run one at a time
            return torch.stack([call(sample, inputs) for sample in posterior.networks(NUM_SAMPLES, seed=1)])
    return judge_noise(network, draws, inputs) if noisy else judge_weights(network, draws, inputs)


def try_network(name: str, method: str, variant: int, seed: int) -> tuple[str, str]:
    """Returns the outcome of one network with one method, and a description of its failure.

    Args:
        name: Name of the subject.
        method: Name of the method.
        variant: Variant of the subject.
        seed: Seed of weights and data.
    """
    torch.manual_seed(seed)
    network, batches = SUBJECTS[name](variant)
    torch.manual_seed(seed)
    fresh, _ = SUBJECTS[name](variant)
    inputs = batches[0][0]
    try:
        posterior = METHODS[method](network, batches)
        outputs = posterior.collect(inputs, PredictOptions(NUM_SAMPLES, seed=1))[0]
    except fb.FlowBNNError as error:
        return ("failed", f"several lines: {error}") if "\n" in str(error) else ("refused", "")
    except Exception as error:
        return "failed", describe_error(error)
    try:
        expected = judge(posterior, fresh, inputs, method)
    except fb.FlowBNNError:
        return "unjudged", ""
    except Exception as error:
        return "failed", describe_error(error)
    outputs = outputs[..., : expected.shape[-1]]  # members may append the level of their noise
    if outputs.shape != expected.shape:
        return "failed", f"outputs {tuple(outputs.shape)}, expected {tuple(expected.shape)}"
    difference = float((outputs - expected).abs().max() / (1.0 + expected.abs().max()))
    return ("right", "") if difference < TOLERANCE else ("failed", f"outputs differ by {difference:.3g}")


def stress(
    seed: int,
    budget: Budget,
    names: tuple[str, ...] = tuple(SUBJECTS),
    methods: tuple[str, ...] = tuple(METHODS),
) -> StressResult:
    """Tries every subject with every method, in random order, then other variants of them. The first variant is that of the seed."""
    result, rng = StressResult("networks", seed), random.Random(seed)
    warnings.simplefilter("ignore")
    variant = seed
    while True:
        pairs = [(name, method) for name in names for method in methods]
        rng.shuffle(pairs)
        for name, method in pairs:
            if not budget.allows(result):
                return result
            outcome, failure = try_network(name, method, variant, seed)
            result.add(outcome, failure and f"{name}, {method}, variant {variant}: {failure}")
        variant += 1
