r"""The contract of a method: ``method.fit(network, loader)`` gives a :class:`~flowbnn.posterior.base.Posterior`.

A method is a frozen dataclass of its settings, so that it prints, compares and hashes by them. Swapping methods is swapping one word:

>>> import torch, flowbnn as fb
>>> network = torch.nn.Linear(2, 3)
>>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
>>> for method in (fb.MLE(epochs=2), fb.MAP(epochs=2)):
...     print(method.name, method.fit(network, loader, progress=False).predict(torch.zeros(1, 2)).probabilities.shape)
mle torch.Size([1, 3])
map torch.Size([1, 3])

To write one, subclass :class:`Method`, declare its settings with their constraints (:mod:`flowbnn.options`), and define ``fit``::

    @register_method
    @options(kw_only=True, repr=False)
    class MyMethod(Method):
        members: Count = 5

        @takes(FitOptions)
        def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> MemberPosterior:
            model, run = self.setup(network, loader, given)
            ...

It is then known as ``my-method`` to ``compare`` and the command line. The rules, which one test suite checks for all methods:

* the caller's network is copied, never changed; ``epochs=0`` uses its weights as they are, for methods that start from a trained one;
* ``seed`` makes everything repeatable; torch's global generator is used for nothing else;
* layers that the method cannot handle are refused by name, with a method that can handle them;
* the posterior saves and loads as plain tensors and predicts the same before and after.

Every file of a method has the same order: the method with its formula, paper and settings, its ``fit``, then its posterior.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from flowbnn.batches import copy_network
from flowbnn.errors import FlowBNNError
from flowbnn.methods.data_summary import check_loader
from flowbnn.methods.fitting import (
    NOISE_LR,
    FitOptions,
    LossAndLogs,
    PreparedFit,
    SchedulerFactory,
    make_optimizer,
    negative_log_likelihood,
    prepare,
    train_posterior,
)
from flowbnn.noise import noise_layers
from flowbnn.options import Ge, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.regression import check_noise_scale, fit_residual_scale
from flowbnn.training.randomness import preserve_rng_state

METHODS: dict[str, type["Method"]] = {}


def register_method(kind: type["Method"]) -> type["Method"]:
    """Make a method known by its name, which is its class's in kebab-case. Used as a decorator."""
    METHODS[kind.name] = kind
    return kind


@options(kw_only=True, repr=False)
class Method:
    """How a network becomes a posterior.

    Args:
        epochs: passes over the data in training by gradients; 0 uses the network as it is.
        lr: the learning rate of that training.
        optimizer: a function from parameter groups to an optimizer, such as ``torch.optim.AdamW``; Adam unless given.
        schedule: a function from ``(optimizer, total steps)`` to a learning-rate schedule, stepped at every batch.
        prior_scale: standard deviation of the Gaussian prior on every weight, where the method has one.
    """

    name: ClassVar[str] = "method"
    needs_weights: ClassVar[bool] = True  # that can be trained
    has_prior: ClassVar[bool] = True  # on the weights, when they are trained by gradients

    epochs: Annotated[int, Ge(0)] = 20
    lr: Positive = 1e-3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: SchedulerFactory | None = None
    prior_scale: Positive = 1.0

    def __init_subclass__(cls, **more: Any) -> None:
        """``DeepEnsemble`` is called ``deep-ensemble``, ``MCDropout`` ``mc-dropout``."""
        super().__init_subclass__(**more)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.repr and (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> Posterior:
        """The posterior of a copy of ``network`` given the data.

        Args:
            network: any module, fresh or trained.
            loader: batches of ``(inputs, targets)``.
            given: as in :class:`FitOptions`: ``likelihood``, ``num_data``, ``validation``, ``seed``, ``checkpoint``, ``resume``,
                ``precision``, ``progress`` and the rest.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fit(network, loader, ...)")

    def setup(
        self, network: nn.Module, loader: Iterable[Any], given: dict[str, Any], description: str = "training"
    ) -> tuple[nn.Module, FitOptions]:
        """A copy of the network to work on, and the options of the run; what is wrong with either is said here."""
        kind = type(self).__name__
        misplaced = next((field.name for field in fields(self) if field.name in given), None)
        reason = None
        if misplaced is not None:
            shown = " ".join(repr(given[misplaced]).split())
            reason = f"{misplaced} is a setting of the method: {kind}({misplaced}={shown:.60})"
        elif not isinstance(network, nn.Module):
            reason = f"{kind} takes a network (nn.Module), not a {type(network).__name__}"
        elif noise_layers(network):
            reason = f"this network has noise already; {kind} takes the plain one, which fb.to_deterministic gives back"
        elif self.needs_weights and not any(parameter.requires_grad for parameter in network.parameters()):
            reason = (
                "this network has no weights to learn: it has no parameters, or all are frozen, and "
                "network.requires_grad_() has them learned again"
            )
        if reason is not None:
            problem = "unknown setting" if misplaced else "network"
            raise FlowBNNError(reason, kind=problem, argument=misplaced or "network")
        run = FitOptions(**{"epochs": max(1, self.epochs), "description": description, **given})
        check_loader(loader)
        return copy_network(network), run

    def start(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        options: FitOptions,
        weight_decay: float | None = None,
        prepared: PreparedFit | None = None,
    ) -> PointPosterior:
        r"""Trains a network for ``epochs`` by maximum a posteriori, in place. With ``epochs=0`` the network is used as it is.

        .. math:: \max_w \frac1N \sum_i \log p(y_i \mid x_i, w) - \frac{\lambda}{2} \|w\|^2

        At the end, learned noise of a Gaussian likelihood is the maximum-likelihood value for these weights.

        Args:
            model: Network to train.
            loader: Batches of ``(inputs, targets)``.
            options: Options of the fit.
            weight_decay: Weight decay :math:`\lambda`. The default is :math:`1 / \sigma^2 N` for methods with a Gaussian prior, and 0
                otherwise.
            prepared: Result of :func:`~flowbnn.methods.fitting.prepare`, if the method has called it already.
        """
        prepared = prepared or prepare(model, loader, options, self.epochs > 0)
        likelihood = prepared.likelihood
        posterior = PointPosterior(model.eval(), likelihood)
        if self.epochs:
            if weight_decay is None:
                weight_decay = 0.0
                if self.has_prior:
                    weight_decay = 1.0 / (self.prior_scale**2 * prepared.data.require_num_examples())
            weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
            groups = [
                {"params": weights, "lr": self.lr, "weight_decay": weight_decay},
                {"params": list(likelihood.parameters()), "lr": self.likelihood_lr, "weight_decay": 0.0},
            ]
            optimizer, loss = make_optimizer(groups, self.optimizer), partial(self._loss(model), likelihood)
            posterior.history = train_posterior(
                posterior, loss, optimizer, loader, options, self.schedule, check_batch=prepared.check_batch
            )
        with preserve_rng_state(loader, options.seed or 0):
            fit_residual_scale(model, likelihood, loader)
        return posterior

    def _loss(self, model: nn.Module) -> Callable[..., LossAndLogs]:
        """What :meth:`start` minimises: of the likelihood and what an :class:`Objective`'s loss takes."""
        return negative_log_likelihood

    @property
    def likelihood_lr(self) -> float:
        """The learning rate of a Gaussian's noise: at the weights' own, Adam may not get there within the run."""
        return max(self.lr, NOISE_LR) if self.optimizer is None else self.lr


@options(kw_only=True, repr=False)
class PointMethod(Method):
    """A method that gives one network, the one of :meth:`Method.start`."""

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> PointPosterior:
        """As :meth:`Method.fit`."""
        model, run = self.setup(network, loader, given)
        posterior = self.start(model, loader, run)
        check_noise_scale(posterior, loader, run.seed)
        return posterior
