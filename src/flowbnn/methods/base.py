r"""The contract of a method: ``method.fit(network, loader)`` gives a :class:`~flowbnn.methods.Posterior`.

A method is a frozen dataclass of its settings, so that it prints, compares and hashes by them. Swapping methods is swapping one word:

>>> import torch, flowbnn as fb
>>> network = torch.nn.Linear(2, 3)
>>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
>>> for method in (fb.MLE(epochs=2), fb.MAP(epochs=2)):
...     print(method.name, method.fit(network, loader, progress=False).predict(torch.zeros(1, 2)).probabilities.shape)
mle torch.Size([1, 3])
map torch.Size([1, 3])

To write one, subclass :class:`Method`, give it ``name`` and ``label``, and define ``fit``, whose options are checked before it begins
(:func:`check_options`). The rules, which one suite checks for all:

* the caller's network is copied, never changed; ``epochs=0`` takes it as it is trained, for methods that start from a trained one;
* ``seed`` (an option of the run) makes everything repeatable; torch's global generator is used for nothing else;
* layers that the method cannot serve are refused by name, with a method that can;
* what is returned saves and loads as plain tensors and predicts the same before and after.
"""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, check_whole, nearest
from flowbnn.likelihoods import Gaussian, Likelihood
from flowbnn.methods.fitting import (
    check_loader,
    check_optimizer,
    check_schedule,
    fit_point,
    prepare,
    undisturbed,
)
from flowbnn.noise import noise_layers
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.batches import call, count_data, move, split_batch
from flowbnn.posterior.forward import device_of, dtype_of, evaluating
from flowbnn.posterior.point import PointPosterior
from flowbnn.training import TrainingOptions

__all__ = [
    "METHODS",
    "LikelihoodName",
    "Method",
    "check_options",
    "check_scale",
    "check_whole",
    "make_method",
    "register_method",
]

LikelihoodName = Likelihood | Literal["auto", "categorical", "bernoulli", "gaussian"]
METHODS: dict[str, type["Method"]] = {}


def register_method(kind: type["Method"]) -> type["Method"]:
    """Make a method known by its name, to the command line among others. Used as a decorator."""
    METHODS[kind.name] = kind
    return kind


def make_method(name: str, **settings: Any) -> "Method":
    """A method by its name.

    >>> make_method("map", epochs=5)
    MAP(epochs=5)
    """
    if name not in METHODS:
        raise FlowBNNError(f"there is no method '{name}'{nearest(name, METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    for setting in settings:
        if setting not in known:
            raise FlowBNNError(
                f"{METHODS[name].__name__} has no setting '{setting}'{nearest(setting, known)}"
            )
    return METHODS[name](**settings)


@dataclass(frozen=True, kw_only=True, repr=False)
class Method:
    """How a network becomes a posterior.

    Args:
        epochs: passes over the data in training by gradients; 0 takes the network as it is.
        lr: the learning rate of that training.
        optimizer: from parameter groups to an optimizer; Adam unless given.
        schedule: from ``(optimizer, total steps)`` to a learning-rate schedule, stepped at every batch.
        prior_scale: standard deviation of the Gaussian prior on every weight, where the method has one.
    """

    name: ClassVar[str] = "method"
    label: ClassVar[str] = "Method"

    epochs: int = 20
    lr: float = 1e-3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    prior_scale: float = 1.0

    def __init_subclass__(cls, **more: Any) -> None:
        """Every ``fit`` that a method defines has its options checked first."""
        super().__init_subclass__(**more)
        if "fit" in vars(cls):
            cls.fit = _checking(cls.fit)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, least=0)
        check_scale("lr", self.lr)
        check_scale("prior_scale", self.prior_scale)
        check_optimizer(self.optimizer)
        check_schedule(self.schedule)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        told = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.repr and (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(told)})"

    def with_setting(self, name: str, value: Any) -> str:
        """How a setting is given, as a message tells it."""
        return f"{type(self).__name__}({name}={' '.join(repr(value).split()):.60})"

    def fit(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: LikelihoodName = "auto",
        num_data: int | None = None,
        validation: Iterable[Any] | None = None,
        **options: Any,
    ) -> Posterior:
        """The posterior of a copy of ``network`` given the data.

        Args:
            network: any module, fresh or trained.
            loader: batches of ``(inputs, targets)``.
            likelihood: ``"auto"`` takes classes for integer targets, real numbers with learned noise for real ones.
            num_data: number of training examples; taken from the loader where it has a length.
            validation: a loader; what is measured on it is recorded at every epoch.
            options: of the run, as in :class:`~flowbnn.training.TrainingOptions`: ``seed``, ``checkpoint``, ``resume``,
                ``precision``, ``progress`` and the rest.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fit(network, loader, ...)")

    def start(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        likelihood: LikelihoodName,
        num_data: int,
        validation: Iterable[Any] | None,
        options: dict[str, Any],
        penalty: bool = True,
    ) -> PointPosterior:
        r"""A copy of the network, trained for ``epochs`` by maximum a posteriori (likelihood where ``penalty`` is False).

        The Gaussian prior's :math:`-\log p(w) = \|w\|^2 / 2\sigma^2` enters as a weight decay of :math:`1 / \sigma^2 N`.
        """
        model = self.copied(network)
        if not self.epochs:
            seed = options.get("seed")
            chosen, _, _ = prepare(model, loader, likelihood, seed)
            model.eval()
            if not isinstance(likelihood, Gaussian):  # one that is given brings its noise
                with undisturbed(loader, seed):
                    learn_noise(model, chosen, loader)
            return PointPosterior(model, chosen)
        return fit_point(
            model,
            loader,
            epochs=self.epochs,
            likelihood=likelihood,
            lr=self.lr,
            weight_decay=1.0 / (self.prior_scale**2 * num_data) if penalty else 0.0,
            optimizer=self.optimizer,
            schedule=self.schedule,
            validation=validation,
            **options,
        )

    def copied(self, network: nn.Module) -> nn.Module:
        """A copy of a plain network, to work on."""
        if not isinstance(network, nn.Module):
            raise FlowBNNError(
                f"{type(self).__name__} takes a network (nn.Module), not a {type(network).__name__}"
            )
        if noise_layers(network):
            raise FlowBNNError(
                f"this network has noise already; {type(self).__name__} takes the plain one, which fb.to_deterministic gives back"
            )
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise FlowBNNError(
                "this network has no weights to learn: it has no parameters, or all are frozen"
            )
        return deepcopy(network)

    def count(self, loader: Iterable[Any], num_data: int | None) -> int:
        """The number of training examples."""
        check_loader(loader)
        found = count_data(loader) if num_data is None else num_data
        return check_whole("num_data", found)


def _checking(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``fit``, with its options checked first; what it names itself is its own."""
    own = set(signature(fit).parameters)

    @wraps(fit)
    def checked(self: Method, *given: Any, **options: Any) -> Any:
        check_options(self, {name: value for name, value in options.items() if name not in own})
        if options.get("num_data") is not None:
            check_whole("num_data", options["num_data"])
        return fit(self, *given, **options)

    return checked


def check_options(method: Method, options: dict[str, Any]) -> None:
    """Refuse an option of ``fit`` that is a setting of the method, or one of the run that cannot be.

    >>> import flowbnn as fb
    >>> check_options(fb.MAP(), {"epochs": 5})
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: epochs is a setting of the method: MAP(epochs=5)
    """
    settings = {field.name for field in fields(method)}
    for name, value in options.items():
        if name in settings:
            raise FlowBNNError(f"{name} is a setting of the method: {method.with_setting(name, value)}")
    if "weight_decay" in options and "prior_scale" in settings:
        raise FlowBNNError(
            "the prior is the weight decay: give the method prior_scale; a decay of d is prior_scale=(d * num_data) ** -0.5"
        )
    known = TrainingOptions.__dataclass_fields__
    TrainingOptions(**{name: value for name, value in options.items() if name in known})


def learn_noise(model: nn.Module, likelihood: Likelihood, loader: Iterable[Any]) -> None:
    """The learned noise of a network that is taken as it is: the size of its residuals on all the data."""
    if not isinstance(likelihood, Gaussian) or likelihood.noise != "learned":
        return
    device, dtype = device_of(model), dtype_of(model)
    with evaluating(model):
        pairs = (split_batch(batch) for batch in loader)
        likelihood.settle((call(model, move(inputs, device, dtype)), targets) for inputs, targets in pairs)


def check_scale(name: str, value: Any) -> float:
    """A positive finite number, or one clear line.

    >>> check_scale("prior_scale", 0.0)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: prior_scale must be a number above 0, got 0.0
    """
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (value > 0 and math.isfinite(value))
    ):
        raise FlowBNNError(f"{name} must be a number above 0, got {value!r}")
    return value
