"""Tests of misplaced and invalid options of fits, which all methods refuse with the name of the argument."""

from collections.abc import Callable, Iterable
from inspect import signature
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
REGRESSION = [(inputs, inputs[:, :1] * 2 - 0.3) for inputs, _ in BATCHES]


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def noisy(outputs: int = 3) -> nn.Module:
    return fb.to_stochastic(network(outputs), {"*": fb.noise.NormalAffine()})


def error_of(call: Callable[[], Any]) -> FlowBNNError:
    """Returns the one-line error that a call raises."""
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_method_are_not_options_of_fit(name: str) -> None:
    method = case_of(name).make()
    inner = method.method if isinstance(method, fb.Temperature) and method.method else method
    for option, value in {"epochs": 5, "lr": 0.1, "prior_scale": 2.0}.items():
        error = error_of(lambda o=option, v=value: method.fit(network(), BATCHES, **{o: v}, **QUIET))
        assert error.argument == option
        assert f"{type(inner).__name__}({option}={value})" in str(error)
    assert (
        error_of(lambda: method.fit(network(), BATCHES, weight_decay=1e-3, **QUIET)).argument
        == "weight_decay"
    )


def test_errors_name_the_method_of_a_misplaced_setting() -> None:
    assert "SGLD(cycles=2)" in str(error_of(lambda: fb.SGLD().fit(network(), BATCHES, cycles=2)))
    assert error_of(lambda: fb.Temperature().fit(network(), BATCHES, lr=0.5)).argument == "lr"
    assert error_of(lambda: fb.Temperature(lr=0.5)).argument == "lr"
    tempered = fb.Temperature(fb.MCDropout(0.1))
    assert "MCDropout(rate=0.2)" in str(error_of(lambda: tempered.fit(network(), BATCHES, rate=0.2, **QUIET)))
    assert (
        error_of(lambda: tempered.fit(network(), BATCHES, validation_fraction=0.2)).argument
        == "validation_fraction"
    )
    assert error_of(lambda: fb.Temperature(fb.MAP(), lr=0.5)).argument == "lr"
    assert str(error_of(lambda: tempered.fit(network(), BATCHES, seed=-1))).startswith("fit(seed=...)")


def test_custom_method() -> None:
    @options(kw_only=True, repr=False)
    class MyMLPMethod(Method):
        depth: Count = 1

        @accepts_options_of(FitOptions)
        def fit(self, network: nn.Module, loader: Iterable[Any], **kwargs: Any) -> Any:
            """Returns the options."""
            return self.setup(network, loader, kwargs)[2]

    assert MyMLPMethod.name == "my-mlp-method"
    assert MyMLPMethod(epochs=3).fit(network(), BATCHES, seed=1) == FitOptions(epochs=3, seed=1)
    assert MyMLPMethod.fit.__doc__ == "Returns the options."
    assert "MyMLPMethod(depth=2)" in str(error_of(lambda: MyMLPMethod().fit(network(), BATCHES, depth=2)))
    assert error_of(lambda: MyMLPMethod(depth=0)).argument == "depth"
    assert repr(MyMLPMethod(depth=2)) == "MyMLPMethod(depth=2)"


INVALID_OPTIONS: tuple[dict[str, Any], ...] = (
    {"likelihood": fb.likelihoods.Gaussian},
    {"likelihood": ["gaussian"]},
    {"early_stop": 3},
    {"early_stop": True},
    {"early_stop": fb.training.EarlyStop},
    {"checkpoint": 5},
    {"log": True},
    {"callbacks": 3},
    {"callbacks": ["print"]},
    {"num_data": 3.5},
    {"num_data": 0},
    {"seed": "a"},
    {"clip_gradient": "a"},
    {"no_option": 1},
)


@pytest.mark.parametrize("name", [*NAMES, "fb.fit"])
def test_invalid_options_are_refused(name: str) -> None:
    for invalid in INVALID_OPTIONS:
        if name == "fb.fit":
            error = error_of(
                lambda o=invalid: fb.fit(noisy(), BATCHES, epochs=1, **QUIET | o, validation=None)
            )
        else:
            error = error_of(lambda o=invalid: case_of(name).make().fit(network(), BATCHES, **QUIET | o))
        assert error.argument in invalid, (invalid, error)


@pytest.mark.parametrize(
    "invalid",
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
    ids=lambda invalid: next(iter(invalid)),
)
def test_invalid_arguments_of_fit_are_refused(invalid: dict[str, Any]) -> None:
    error = error_of(lambda: fb.fit(noisy(), BATCHES, **{"epochs": 1, **QUIET, **invalid}, validation=None))
    assert error.argument in invalid


@pytest.mark.parametrize("rule", [0, (0, 1), None])
def test_invalid_rules_are_refused(rule: Any) -> None:
    error = error_of(lambda: fb.to_stochastic(network(), {rule: fb.noise.NormalAffine()}))
    assert error.argument == "rules"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: fb.noise.NormalAffine(prior_scale="a"), "prior_scale"),  # type: ignore[arg-type]
        (lambda: fb.noise.NormalPlanar(base_loc=None), "base_loc"),  # type: ignore[arg-type]
        (lambda: fb.noise.NormalAffine(components="a"), "components"),  # type: ignore[arg-type]
        (lambda: fb.noise.Dropout("a"), "rate"),  # type: ignore[arg-type]
        (lambda: fb.noise.FlowNoise(3), "FlowNoise"),  # type: ignore[arg-type]
    ],
)
def test_invalid_recipes_are_refused(make: Callable[[], Any], name: str) -> None:
    assert name in str(error_of(lambda: fb.to_stochastic(network(), {"*": make()})))


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("seed", ["a", 1.5])
def test_invalid_seeds_of_predictions_are_refused(seed: Any) -> None:
    posterior = fb.fit(noisy(), BATCHES, epochs=1, **QUIET, validation=None)
    assert error_of(lambda: posterior.predict(BATCHES[0][0], seed=seed)).argument == "seed"


def test_invalid_early_stop_is_refused() -> None:
    assert error_of(lambda: fb.training.EarlyStop(patience="a")).argument == "patience"  # type: ignore[arg-type]
    assert error_of(lambda: fb.training.EarlyStop(3)).argument == "monitor"  # type: ignore[arg-type]


def test_likelihood_instance_is_accepted() -> None:
    posterior = fb.MAP(epochs=1).fit(
        network(1), REGRESSION, likelihood=fb.likelihoods.Gaussian(), num_data=16, **QUIET
    )
    assert isinstance(posterior.predict(REGRESSION[0][0]).mean, Tensor)


@pytest.mark.parametrize(
    "function", [fb.fit, fb.fit_density, fb.to_stochastic, fb.NodeNoise, fb.MAP.fit, fb.vae.VAE]
)
def test_signatures_show_plain_types(function):
    text = str(signature(function))
    assert "Annotated" not in text
    assert "Bounds" not in text
    assert "=" in text


def test_conditions_of_the_types_are_still_checked():
    assert signature(fb.MAP).parameters["epochs"].annotation == int | None
    with pytest.raises(FlowBNNError) as error:
        fb.MAP(epochs=-1)
    assert error.value.argument == "epochs"
