"""What is given in the wrong place or of the wrong kind is refused in one line, by every method alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from method_cases import NAMES, case_of
from torch import Tensor, nn

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.methods import Method

QUIET: dict[str, Any] = {"progress": False, "accelerator": "cpu"}
BATCHES = [(torch.linspace(-1.0, 1.0, 32).reshape(8, 4), torch.arange(8) % 3)] * 2
NUMBERS = [(inputs, inputs[:, :1] * 2 - 0.3) for inputs, _ in BATCHES]


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def noisy(outputs: int = 3) -> nn.Module:
    return fb.to_stochastic(network(outputs), {"*": fb.NormalAffine()})


def told(call: Callable[[], Any]) -> str:
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("epochs", 5), ("lr", 0.1), ("prior_scale", 2.0)])
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_given_to_fit_is_refused_alike(name: str, option: str, value: float) -> None:
    method = case_of(name).make()
    written = f"{type(method).__name__}({option}={value})"
    if isinstance(method, fb.Temperature):
        written = f"Temperature(MAP({option}={value}))"
    words = told(lambda: method.fit(network(), BATCHES, **{option: value}, **QUIET))
    assert words == f"{option} is a setting of the method: {written}"


def test_settings_of_one_method_alone_and_of_the_method_within() -> None:
    assert told(lambda: fb.SGLD().fit(network(), BATCHES, cycles=2)).endswith("SGLD(cycles=2)")
    assert told(lambda: fb.Temperature().fit(network(), BATCHES, lr=0.5)).endswith("Temperature(lr=0.5)")
    within = fb.Temperature(fb.MCDropout(0.1))
    assert told(lambda: within.fit(network(), BATCHES, share=0.2)).endswith("Temperature(share=0.2)")
    assert told(lambda: within.fit(network(), BATCHES, rate=0.2, **QUIET)).endswith("MCDropout(rate=0.2)")


def test_a_method_of_the_users_has_its_options_checked_and_keeps_what_its_fit_names() -> None:
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Mine(Method):
        depth: int = 1

        def fit(self, network: nn.Module, loader: Any, *, lr: float = 0.1, **options: Any) -> Any:  # type: ignore[override]
            """Gives back what it was given."""
            return lr, options

    assert Mine().fit(network(), BATCHES, lr=0.3, seed=1) == (0.3, {"seed": 1})
    assert Mine().fit(network=network(), loader=BATCHES, own=2) == (0.1, {"own": 2})
    assert told(lambda: Mine().fit(network(), BATCHES, depth=2)).endswith("the method: Mine(depth=2)")
    assert Mine.fit.__doc__ == "Gives back what it was given."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"likelihood": fb.Gaussian}, "give an instance: Gaussian()"),
        (
            {"likelihood": ["gaussian"]},
            "a name such as 'gaussian', or an instance such as Gaussian(), not a list",
        ),
        (
            {"early_stop": 3},
            "early_stop=...) must be an EarlyStop or None (such as EarlyStop(patience=5)), got 3",
        ),
        ({"early_stop": True}, "such as EarlyStop(patience=5)), got True"),
        ({"early_stop": fb.EarlyStop}, "got the class EarlyStop"),
        ({"checkpoint": 5}, "(a file or a folder, such as 'runs/first'), got 5"),
        ({"tensorboard": True}, "(a folder, such as 'logs'), got True"),
        ({"num_data": 3.5}, "a whole number of at least 1, "),
        ({"seed": "a"}, "seed=...) must be an integer"),
        ({"clip_gradient": "a"}, "clip_gradient=...) must be a number above 0"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
@pytest.mark.parametrize("name", [*NAMES, "fb.fit"])
def test_options_of_the_wrong_kind(name: str, options: dict[str, Any], words: str) -> None:
    def fit() -> Any:
        if name == "fb.fit":
            return fb.fit(noisy(), BATCHES, epochs=1, **QUIET | options)
        return case_of(name).make().fit(network(), BATCHES, **QUIET | options)

    assert words in told(fit)


OPTIMIZER = "optimizer is a function from parameter groups to an optimizer, such as torch.optim.Adam, not "
SCHEDULE = "schedule is a function from (optimizer, total steps) to a learning-rate schedule"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, OPTIMIZER + "'adam'"),
        ({"optimizer": torch.optim.Adam([torch.ones(1)])}, OPTIMIZER + "a Adam"),
        ({"schedule": 5}, SCHEDULE),
    ],
)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "sgld"])
def test_optimizers_and_schedules_that_are_none(name: str, options: dict[str, Any], words: str) -> None:
    assert words in told(lambda: case_of(name).make(**options))
    assert words in told(lambda: fb.fit(noisy(), BATCHES, epochs=1, **QUIET, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_lr": "a"}, "noise_lr is a number of at least 0, not 'a'"),
        ({"weight_lr": "a"}, "weight_lr is a number of at least 0, not 'a'"),
        ({"weight_lr": float("nan")}, "weight_lr is a number of at least 0, not nan"),
        ({"weight_decay": None}, "weight_decay is a number of at least 0, not a NoneType"),
        ({"beta": "a"}, "beta is a number of at least 0, not 'a'"),
        ({"gamma": [1]}, "gamma is a number of at least 0, not a list"),
        ({"warmup": "a"}, "warmup is a share of the run, between 0 and 1, not a"),
        ({"samples": "a"}, "samples is at least 1, not 'a'"),
        (
            {"optimizer": lambda groups: None},
            "optimizer must give a torch.optim.Optimizer, but gave a NoneType",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_numbers_of_fit_that_are_none(options: dict[str, Any], words: str) -> None:
    assert words in told(lambda: fb.fit(noisy(), BATCHES, epochs=1, **QUIET, **options))


def test_a_plain_fit_says_the_same_of_its_rates() -> None:
    from flowbnn.methods.fitting import fit_point

    assert (
        told(lambda: fit_point(network(), BATCHES, lr="a", **QUIET))
        == "lr is a number of at least 0, not 'a'"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (0, "rule 0: layers are named by text: '0'"),
        ((0, 1), "rule (0, 1) is no layer's name, glob, module class or function of (name, module)"),
        (None, "rule None is no layer's name"),
    ],
)
def test_rules_that_name_no_layer(rule: Any, words: str) -> None:
    assert words in told(lambda: fb.to_stochastic(network(), {rule: fb.NormalAffine()}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fb.NormalAffine(prior_scale="a"), "NormalAffine takes a number as prior_scale, not 'a'"),  # type: ignore[arg-type]
        (lambda: fb.NormalPlanar(base_loc=None), "NormalPlanar takes a number as base_loc, not None"),  # type: ignore[arg-type]
        (lambda: fb.NormalAffine(components="a"), "NormalAffine takes a number as components"),  # type: ignore[arg-type]
        (lambda: fb.Dropout("a"), "Dropout takes a number as rate, not 'a'"),  # type: ignore[arg-type]
        (lambda: fb.FlowNoise(3), "FlowNoise needs a function of the dimension"),  # type: ignore[arg-type]
    ],
)
def test_recipes_of_the_wrong_kind(make: Callable[[], Any], words: str) -> None:
    assert words in told(lambda: fb.to_stochastic(network(), {"*": make()}))


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_seed_that_is_none(seed: Any) -> None:
    posterior = fb.fit(noisy(), BATCHES, epochs=1, **QUIET)
    words = told(lambda: posterior.predict(BATCHES[0][0], seed=seed))
    assert f"seed=...) must be an integer or None, got {seed!r}" in words


def test_an_early_stop_of_the_wrong_kind() -> None:
    assert told(lambda: fb.EarlyStop(patience="a")).endswith("at least 1 epoch, got 'a'")  # type: ignore[arg-type]
    assert told(lambda: fb.EarlyStop(3)).endswith("a name in the epoch's record, got 3")  # type: ignore[arg-type]


def test_a_likelihood_as_an_instance_is_taken() -> None:
    posterior = fb.MAP(epochs=1).fit(network(1), NUMBERS, likelihood=fb.Gaussian(), num_data=16, **QUIET)
    assert isinstance(posterior.predict(NUMBERS[0][0]).mean, Tensor)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_decay_is_told_to_be_the_prior(name: str) -> None:
    method = case_of(name).make()
    words = told(lambda: method.fit(network(), BATCHES, weight_decay=1e-3, **QUIET))
    assert words.startswith("the prior is the weight decay")
