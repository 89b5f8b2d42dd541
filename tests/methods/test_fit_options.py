"""What is given in the wrong place or of the wrong kind is refused in one line that names it, by every method alike."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from method_cases import NAMES, case_of
from torch import Tensor, nn

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.methods import FitOptions, Method
from flowbnn.options import Count, accepts_options_of, options

QUIET: dict[str, Any] = {"progress": False, "accelerator": "cpu"}
BATCHES = [(torch.linspace(-1.0, 1.0, 32).reshape(8, 4), torch.arange(8) % 3)] * 2
NUMBERS = [(inputs, inputs[:, :1] * 2 - 0.3) for inputs, _ in BATCHES]


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def noisy(outputs: int = 3) -> nn.Module:
    return fb.to_stochastic(network(outputs), {"*": fb.noise.NormalAffine()})


def refused(call: Callable[[], Any]) -> FlowBNNError:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_method_are_not_options_of_fit(name: str) -> None:
    method = case_of(name).make()
    inner = method.method if isinstance(method, fb.Temperature) and method.method else method
    for option, value in {"epochs": 5, "lr": 0.1, "prior_scale": 2.0}.items():
        error = refused(lambda o=option, v=value: method.fit(network(), BATCHES, **{o: v}, **QUIET))
        assert error.argument == option
        assert f"{type(inner).__name__}({option}={value})" in str(error)
    assert (
        refused(lambda: method.fit(network(), BATCHES, weight_decay=1e-3, **QUIET)).argument == "weight_decay"
    )


def test_settings_of_one_method_alone_and_of_the_method_within() -> None:
    assert "SGLD(cycles=2)" in str(refused(lambda: fb.SGLD().fit(network(), BATCHES, cycles=2)))
    assert "Temperature(lr=0.5)" in str(refused(lambda: fb.Temperature().fit(network(), BATCHES, lr=0.5)))
    within = fb.Temperature(fb.MCDropout(0.1))
    assert "MCDropout(rate=0.2)" in str(refused(lambda: within.fit(network(), BATCHES, rate=0.2, **QUIET)))
    assert (
        refused(lambda: within.fit(network(), BATCHES, validation_fraction=0.2)).argument
        == "validation_fraction"
    )
    assert refused(lambda: fb.Temperature(fb.MAP(), lr=0.5)).argument == "lr"
    assert str(refused(lambda: within.fit(network(), BATCHES, seed=-1))).startswith("fit(seed=...)")


def test_a_method_of_the_users_own() -> None:
    @options(kw_only=True, repr=False)
    class MyOwnMLP(Method):
        depth: Count = 1

        @accepts_options_of(FitOptions)
        def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> Any:
            """Returns what it was given."""
            return self.setup(network, loader, given)[1]

    assert MyOwnMLP.name == "my-own-mlp"
    assert MyOwnMLP(epochs=3).fit(network(), BATCHES, seed=1) == FitOptions(epochs=3, seed=1)
    assert MyOwnMLP.fit.__doc__ == "Returns what it was given."
    assert "MyOwnMLP(depth=2)" in str(refused(lambda: MyOwnMLP().fit(network(), BATCHES, depth=2)))
    assert refused(lambda: MyOwnMLP(depth=0)).argument == "depth"
    assert repr(MyOwnMLP(depth=2)) == "MyOwnMLP(depth=2)"


WRONG: tuple[dict[str, Any], ...] = (
    {"likelihood": fb.likelihoods.Gaussian},
    {"likelihood": ["gaussian"]},
    {"early_stop": 3},
    {"early_stop": True},
    {"early_stop": fb.training.EarlyStop},
    {"checkpoint": 5},
    {"tensorboard": True},
    {"num_data": 3.5},
    {"num_data": 0},
    {"seed": "a"},
    {"clip_gradient": "a"},
    {"no_option": 1},
)


@pytest.mark.parametrize("name", [*NAMES, "fb.fit"])
def test_options_of_the_wrong_kind(name: str) -> None:
    for given in WRONG:
        if name == "fb.fit":
            error = refused(lambda g=given: fb.fit(noisy(), BATCHES, epochs=1, **QUIET | g))
        else:
            error = refused(lambda g=given: case_of(name).make().fit(network(), BATCHES, **QUIET | g))
        assert error.argument in given, (given, error)


@pytest.mark.parametrize(
    "given",
    [
        {"noise_lr": "a"},
        {"noise_lr": float("nan")},
        {"weight_lr": "a"},
        {"weight_lr": -1.0},
        {"weight_lr": float("nan")},
        {"weight_decay": None},
        {"beta": "a"},
        {"gamma": [1]},
        {"warmup": "a"},
        {"warmup": 2.0},
        {"samples": "a"},
        {"samples": 0},
        {"epochs": 0},
        {"optimizer": "adam"},
        {"optimizer": torch.optim.Adam([torch.ones(1)])},
        {"optimizer": lambda groups: None},
        {"schedule": 5},
        {"validation_samples": 0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_fit_that_cannot_be(given: dict[str, Any]) -> None:
    assert refused(lambda: fb.fit(noisy(), BATCHES, **{"epochs": 1, **QUIET, **given})).argument in given


@pytest.mark.parametrize("rule", [0, (0, 1), None])
def test_rules_that_name_no_layer(rule: Any) -> None:
    error = refused(lambda: fb.to_stochastic(network(), {rule: fb.noise.NormalAffine()}))
    assert error.argument == "rules"
    assert "(rules=...) must hold a string, a type or a function (from layers to recipes" in str(error)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fb.noise.NormalAffine(prior_scale="a"), "prior_scale"),  # type: ignore[arg-type]
        (lambda: fb.noise.NormalPlanar(base_loc=None), "base_loc"),  # type: ignore[arg-type]
        (lambda: fb.noise.NormalAffine(components="a"), "components"),  # type: ignore[arg-type]
        (lambda: fb.noise.Dropout("a"), "rate"),  # type: ignore[arg-type]
        (lambda: fb.noise.FlowNoise(3), "FlowNoise"),  # type: ignore[arg-type]
    ],
)
def test_recipes_of_the_wrong_kind(make: Callable[[], Any], words: str) -> None:
    assert words in str(refused(lambda: fb.to_stochastic(network(), {"*": make()})))


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_seed_of_a_prediction_that_is_none(seed: Any) -> None:
    posterior = fb.fit(noisy(), BATCHES, epochs=1, **QUIET)
    assert "seed" in str(refused(lambda: posterior.predict(BATCHES[0][0], seed=seed)))


def test_an_early_stop_of_the_wrong_kind() -> None:
    assert "patience" in str(refused(lambda: fb.training.EarlyStop(patience="a")))  # type: ignore[arg-type]
    assert "monitor" in str(refused(lambda: fb.training.EarlyStop(3)))  # type: ignore[arg-type]


def test_a_likelihood_as_an_instance_is_taken() -> None:
    posterior = fb.MAP(epochs=1).fit(
        network(1), NUMBERS, likelihood=fb.likelihoods.Gaussian(), num_data=16, **QUIET
    )
    assert isinstance(posterior.predict(NUMBERS[0][0]).mean, Tensor)
