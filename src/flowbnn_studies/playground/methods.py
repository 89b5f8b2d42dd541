"""Methods and settings that the page offers, their limits, and the objects of the library that they stand for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flowbnn as fb
from flowbnn.errors import FlowBNNError, describe_value, nearest
from flowbnn.methods import Method
from flowbnn.noise import Recipe

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """Number of a form, with its limits.

    Args:
        name: Name in requests.
        label: Name on the page, with its unit.
        help: One sentence for users.
        default: Default value.
        low: Smallest value.
        high: Largest value.
        step: Distance between two values of the slider.
        logarithmic: True if the slider moves by factors.
        only: Name of a choice and the values for which this setting has an effect, or None.
    """

    name: str
    label: str
    help: str
    default: float
    low: float
    high: float
    step: float
    logarithmic: bool = False
    only: tuple[str, tuple[str, ...]] | None = None

    def parse(self, value: Any) -> float:
        """Returns the checked value of a request."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not self.low <= value <= self.high:
            text = f"{self.name} must be a number from {self.low:g} to {self.high:g}, got {describe_value(value)}"
            raise FlowBNNError(text, argument=self.name)
        if self.is_integer and value != int(value):
            raise FlowBNNError(f"{self.name} must be an integer, got {value!r}", argument=self.name)
        return int(value) if self.is_integer else float(value)

    @property
    def is_integer(self) -> bool:
        """True if all values are integers."""
        return isinstance(self.default, int)


@dataclass(frozen=True)
class Choice:
    """Word of a form, chosen from a list.

    Args:
        name: Name in requests.
        label: Name on the page.
        help: One sentence for users.
        choices: Labels of the values, by value. The first one is the default.
    """

    name: str
    label: str
    help: str
    choices: Mapping[str, str]
    only: None = None

    @property
    def default(self) -> str:
        """Default value."""
        return next(iter(self.choices))

    def parse(self, value: Any) -> str:
        """Returns the checked value of a request."""
        if not isinstance(value, str) or value not in self.choices:
            text = f"unknown {self.name} {describe_value(value)}{nearest(str(value), self.choices)}"
            raise FlowBNNError(text, argument=self.name)
        return value


@dataclass(frozen=True)
class Entry:
    """Method in the list of the page.

    Args:
        name: Name in requests.
        label: Name on the page.
        summary: One sentence on what the method does.
        draws: Words for the variables whose posterior the page shows, such as ``"noise"``.
        make: Function from the values of all settings to the method.
        settings: Settings of this method.
        prior: Function from the values of all settings to mean and standard deviation of the prior of the variables, if there is one.
        last_stage: Words for what follows the training.
    """

    name: str
    label: str
    summary: str
    draws: str
    make: Callable[[Values], Method]
    settings: tuple[Setting | Choice, ...] = ()
    prior: Callable[[Values], tuple[float, float]] | None = None
    last_stage: str = "predicting"


def _flow(recipe: Callable[..., Recipe], values: Values) -> Recipe:
    return recipe(length=values["length"], prior_scale=values["noise_prior"])


NOISES: dict[str, tuple[str, Callable[[Values], Recipe]]] = {
    "planar": ("Planar flow (Xiong's report)", partial(_flow, fb.noise.NormalPlanar)),
    "gaussian": ("Gaussian", lambda values: fb.noise.NormalAffine(prior_scale=values["noise_prior"])),
    "joint": (
        "Gaussian, all layers correlated",
        lambda values: fb.noise.NormalAffine(prior_scale=values["noise_prior"], joint="full"),
    ),
    "mixture": (
        "Mixture of Gaussians",
        lambda values: fb.noise.NormalAffine(
            prior_scale=values["noise_prior"], components=values["components"]
        ),
    ),
    "radial": ("Radial flow", partial(_flow, fb.noise.NormalRadial)),
    "sylvester": ("Sylvester flow", partial(_flow, fb.noise.NormalSylvester)),
    "coupling": ("Coupling flow (RealNVP)", partial(_flow, fb.noise.NormalCoupling)),
}
FLOWS = ("planar", "radial", "sylvester", "coupling")

# fmt: off
TRAINING = (
    Setting("epochs", "Epochs", "Number of passes over the training points.", 200, 10, 3000, 10, logarithmic=True),
    Setting("lr", "Learning rate", "Step size of the optimizer.", 0.01, 0.001, 0.1, 0.001, logarithmic=True),
    Setting("depth", "Hidden layers", "Number of hidden layers of the network.", 2, 1, 3, 1),
    Setting("width", "Units per layer", "Number of units of each hidden layer.", 32, 4, 64, 4),
    Setting("seed", "Seed", "Seed of all random numbers. The same seed gives the same result.", 0, 0, 999, 1),
)
WEIGHT_PRIOR = Setting(
    "prior", "Prior of weights, standard deviation",
    "Width of the Gaussian prior of each weight. A wide prior allows steep functions.",
    1.0, 0.1, 5.0, 0.1, logarithmic=True)
NOISE_SETTINGS = (
    Choice("noise", "Noise", "Family of the learned distribution.", {name: label for name, (label, _) in NOISES.items()}),
    Setting("length", "Flow steps", "Number of transformations of the noise. More steps allow more complicated shapes.",
            2, 1, 8, 1, only=("noise", FLOWS)),
    Setting("components", "Components", "Number of Gaussians in the mixture.", 8, 2, 16, 1, only=("noise", ("mixture",))),
    Setting("noise_prior", "Prior of noise, standard deviation", "Width of the noise without any data. Its mean is 1.",
            0.5, 0.1, 1.5, 0.1),
    Setting("beta", "Weight of the KL divergence", "Strength of the pull towards the prior. 1 is Bayesian.", 1.0, 0.0, 3.0, 0.1),
)
CHAIN_SETTINGS = (
    Setting("draws", "Draws of each chain", "Number of networks of each chain, after as many transitions of warm-up.",
            50, 10, 150, 10),
    Setting("chains", "Chains", "Number of chains, each with its own start.", 2, 1, 4, 1),
    WEIGHT_PRIOR,
)
LAPLACE_SETTINGS = (
    Choice("layers", "Layers", "Layers with uncertain weights.", {"all": "All layers", "last": "Last layer"}),
    Choice("structure", "Covariance", "Structure of the covariance matrix.",
           {"kron": "Kronecker-factored", "full": "Full", "diag": "Diagonal"}),
)


def _training(values: Values) -> dict[str, Any]:
    """Returns the settings of a training under a prior of the weights."""
    return {"epochs": values["epochs"], "lr": values["lr"], "prior_scale": values["prior"]}


def _weight_prior(values: Values) -> tuple[float, float]:
    return 0.0, values["prior"]


ENTRIES = {entry.name: entry for entry in (
    Entry("noise", "Node noise",
          "Every unit is multiplied by random noise whose distribution is learned: the method of flowbnn.", "noise",
          lambda v: fb.NodeNoise(NOISES[v["noise"]][1](v), epochs=v["epochs"], lr=v["lr"], beta=v["beta"]),
          NOISE_SETTINGS, prior=lambda v: (1.0, v["noise_prior"])),
    Entry("hmc", "Hamiltonian Monte Carlo",
          "Draws networks from the exact posterior of the weights. Slow, and the reference for all others.", "weights",
          lambda v: fb.HMC(samples=v["draws"], warmup=v["draws"], chains=v["chains"], steps=16, **_training(v)),
          CHAIN_SETTINGS, prior=_weight_prior, last_stage="sampling networks"),
    Entry("ensemble", "Deep ensemble", "Trains several networks from different starts, and averages them.", "weights",
          lambda v: fb.DeepEnsemble(v["members"], **_training(v)),
          (Setting("members", "Networks of the ensemble", "Number of networks.", 5, 2, 10, 1), WEIGHT_PRIOR), prior=_weight_prior),
    Entry("dropout", "MC dropout", "Switches random units off, in training and in prediction.", "noise",
          lambda v: fb.MCDropout(v["rate"], **_training(v)),
          (Setting("rate", "Dropout rate", "Probability that a unit is switched off.", 0.1, 0.02, 0.5, 0.02), WEIGHT_PRIOR)),
    Entry("laplace", "Laplace", "A Gaussian around the weights of one trained network, from the curvature of its loss.", "weights",
          lambda v: fb.Laplace(v["structure"], layers=v["layers"], epochs=v["epochs"], lr=v["lr"]),
          LAPLACE_SETTINGS, last_stage="computing the curvature"),
    Entry("swag", "SWAG", "A Gaussian with the mean and the covariance of the last steps of training.", "weights",
          lambda v: fb.SWAG(swag_lr=v["swag_lr"], **_training(v)),
          (Setting("swag_lr", "Learning rate of SGD", "Step size after the first half of the epochs. Large steps explore more.",
                   0.05, 0.001, 0.5, 0.001, logarithmic=True), WEIGHT_PRIOR), prior=_weight_prior),
    Entry("bayes-by-backprop", "Bayes by backprop", "An independent Gaussian for each weight, trained by the ELBO.", "weights",
          lambda v: fb.BayesByBackprop(**_training(v)), (WEIGHT_PRIOR,), prior=_weight_prior),
    Entry("map", "Single network (MAP)", "One network with the most probable weights. All its samples are equal.", "weights",
          lambda v: fb.MAP(**_training(v)), (WEIGHT_PRIOR,), prior=_weight_prior),
    Entry("temperature", "Temperature scaling",
          "One network, whose confidence is scaled to fit a quarter of the training points.", "weights",
          lambda v: fb.Temperature(fb.MAP(**_training(v)), validation_fraction=0.25), (WEIGHT_PRIOR,), prior=_weight_prior),
)}
# fmt: on


@dataclass(frozen=True)
class FitSettings:
    """Checked settings of one fit.

    Args:
        entry: Method of the list.
        values: Value of every setting, by name.
    """

    entry: Entry
    values: Values

    @classmethod
    def parse(cls, document: Any) -> "FitSettings":
        """Returns the settings of a JSON document ``{"method": name, "values": {...}}``. Missing values are the defaults.

        Raises:
            FlowBNNError: If a name is unknown, or a value is outside its limits.

        >>> FitSettings.parse({"method": "map", "values": {"epochs": 20}}).method()
        MAP(epochs=20, lr=0.01)
        """
        valid = isinstance(document, dict) and isinstance(document.get("values", {}), dict)
        if not valid or not isinstance(document.get("method"), str):
            text = "settings must be an object with a method and an object of values"
            raise FlowBNNError(text, argument="settings")
        name, values = document["method"], document.get("values", {})
        if name not in ENTRIES:
            raise FlowBNNError(f"unknown method {name!r:.40}{nearest(name, ENTRIES)}", argument="method")
        settings = {setting.name: setting for setting in (*ENTRIES[name].settings, *TRAINING)}
        unknown = next((key for key in values if key not in settings), None)
        if unknown is not None:
            text = f"{ENTRIES[name].label} has no setting {unknown!r:.40}{nearest(unknown, settings)}"
            raise FlowBNNError(text, argument="values")
        checked = {key: setting.parse(values.get(key, setting.default)) for key, setting in settings.items()}
        return cls(ENTRIES[name], checked)

    def method(self) -> Method:
        """Returns the method of the library with these settings."""
        return self.entry.make(self.values)

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return (self.values["width"],) * self.values["depth"]

    @property
    def prior(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the prior of the variables that the page shows, or None."""
        return None if self.entry.prior is None else self.entry.prior(self.values)


def describe_entries() -> list[dict[str, Any]]:
    """Returns the list of methods with their settings, as the page needs it."""
    return [
        {
            "name": entry.name,
            "label": entry.label,
            "summary": entry.summary,
            "last_stage": entry.last_stage,
            "settings": [_describe(setting) for setting in (*entry.settings, *TRAINING)],
        }
        for entry in ENTRIES.values()
    ]


def _describe(setting: Setting | Choice) -> dict[str, Any]:
    """Returns one setting as plain values."""
    common = {"name": setting.name, "label": setting.label, "help": setting.help, "default": setting.default}
    if isinstance(setting, Choice):
        return {**common, "choices": dict(setting.choices)}
    limits = {name: getattr(setting, name) for name in ("low", "high", "step", "logarithmic", "only")}
    return {**common, **limits}
