r"""Base class for methods: ``method.fit(network, loader)`` returns a :class:`~flowbnn.posterior.base.Posterior`.

A method is a frozen dataclass of its settings, so methods with equal settings are equal. All methods have the same interface:

>>> import torch, flowbnn as fb
>>> network = torch.nn.Linear(2, 3)
>>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
>>> for method in (fb.MLE(epochs=2), fb.MAP(epochs=2)):
...     print(method.name, method.fit(network, loader, progress=False).predict(torch.zeros(1, 2)).probabilities.shape)
mle torch.Size([1, 3])
map torch.Size([1, 3])

To write a method, subclass :class:`Method`, declare its settings with their constraints (:mod:`flowbnn.options`), and define ``fit``::

    @register_method
    @options(kw_only=True, repr=False)
    class MyMethod(Method):
        members: Count = 5

        @accepts_options_of(FitOptions)
        def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> MemberPosterior:
            model, loader, options = self.setup(network, loader, kwargs)
            ...

Its name in ``compare`` and on the command line is then ``my-method``. One test suite checks these rules for all methods:

* The network of the caller is copied and never changed. Methods that start from a trained network use its weights with ``epochs=0``.
* ``seed`` makes everything reproducible. Without it, the global generator of torch is used.
* An error names the layers that the method does not support.
* The posterior can be saved and loaded as plain tensors, and the loaded posterior gives the same predictions.

Every file of a method has the same order: the method with its formula, paper and settings, its ``fit``, then its posterior.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from flowbnn.data import Columns
from flowbnn.data.formats import columns_of
from flowbnn.errors import FlowBNNError, close_words, requirement_error
from flowbnn.methods.fit_options import FitOptions
from flowbnn.methods.fitting import (
    NOISE_LR,
    LossAndLogs,
    Objective,
    hold_out,
    make_optimizer,
    make_training_run,
    negative_log_likelihood,
    plan_fit,
)
from flowbnn.methods.preparation import PreparedFit, prepare
from flowbnn.methods.schedule import (
    WEIGHT_SCHEDULE,
    Monitor,
    PlateauSchedule,
    SchedulerFactory,
    TrainingPlan,
)
from flowbnn.networks import copy_network, select_output, set_input_columns
from flowbnn.noise.base import check_without_noise
from flowbnn.options import Ge, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import PointPosterior
from flowbnn.regression import check_noise_scale, fit_residual_scale
from flowbnn.training.randomness import preserve_rng_state

METHODS: dict[str, type["Method"]] = {}


def misplaced_setting(name: str, owner: str, value: Any, argument: str = "") -> FlowBNNError:
    """Returns the error for a setting that belongs to another object.

    Args:
        name: Name of the setting.
        owner: Name of the class that has the setting.
        value: Value of the setting, to show in the message.
        argument: Argument at fault, if it has another name.

    >>> print(misplaced_setting("members", "DeepEnsemble", 3))
    members is a setting of DeepEnsemble; use DeepEnsemble(members=3)
    """
    text = " ".join(repr(value).split())[:60]
    message = f"{name} is a setting of {owner}; use {owner}({name}={text})"
    return FlowBNNError(message, kind="unknown setting", argument=argument or name)


def register_method(method_cls: type["Method"]) -> type["Method"]:
    """Class decorator that registers a method by its name, the name of its class in kebab-case."""
    METHODS[method_cls.name] = method_cls
    return method_cls


@options(kw_only=True, repr=False)
class Method(ABC):
    """Base class for methods that turn a network into a posterior.

    Args:
        epochs: Number of passes over the data when weights are trained by gradients. 0 uses the network as it is. By default, a tenth
            of the data is held out. Training ends when its log-likelihood has reached a plateau, and the best epoch is used; see
            :class:`~flowbnn.methods.schedule.PlateauSchedule`.
        lr: Learning rate of this training.
        optimizer: Function from parameter groups to an optimizer, such as ``torch.optim.AdamW``. Adam by default.
        schedule: Function from ``(optimizer, number of steps)`` to a learning-rate scheduler, which is stepped at every batch, or rules
            for the plateau (:class:`~flowbnn.methods.schedule.PlateauSchedule`).
        prior_scale: Standard deviation of the Gaussian prior of every weight, if the method has one.
    """

    name: ClassVar[str] = "method"
    needs_weights: ClassVar[bool] = True  # True if the network must have trainable weights
    supports_weights: ClassVar[bool] = True  # True if weights of examples are used, see flowbnn.data.Columns
    has_prior: ClassVar[bool] = True  # True if training by gradients includes a prior of the weights

    epochs: Annotated[int, Ge(0)] | None = None
    lr: Positive = 1e-3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: SchedulerFactory | PlateauSchedule | None = None
    prior_scale: Positive = 1.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Sets the name: ``deep-ensemble`` for ``DeepEnsemble``, ``mc-dropout`` for ``MCDropout``."""
        super().__init_subclass__(**kwargs)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()

    def __repr__(self) -> str:
        """Returns the settings that differ from the defaults."""
        changed = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.repr and (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @abstractmethod
    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> Posterior:
        """Fits the posterior of a copy of the network.

        Args:
            network: Any module, fresh or trained.
            loader: Training data: a loader of ``(inputs, targets)``, a ``Dataset``, or a pair of tensors or arrays.
            kwargs: Options of :class:`FitOptions`, such as ``batch_size``, ``likelihood``, ``num_data``, ``validation``, ``seed``,
                ``checkpoint``, ``resume``, ``precision`` and ``progress``.
        """

    def setup(
        self, network: nn.Module, data: Any, kwargs: dict[str, Any], description: str = "training"
    ) -> tuple[nn.Module, Iterable[Any], FitOptions]:
        """Checks the arguments of ``fit`` and returns a copy of the network, the loader of the data, and the options.

        Args:
            network: Network of the caller.
            data: Training data of any format, see :func:`~flowbnn.data.formats.as_loader`.
            kwargs: Keyword arguments of ``fit``.
            description: Name of the training in the progress bar.

        Raises:
            FlowBNNError: If a setting of the method is passed to ``fit``, or if network or loader cannot be used.
        """
        name = type(self).__name__
        settings, names = ({field.name for field in fields(cls)} for cls in (type(self), FitOptions))
        for key, value in kwargs.items():
            # settings of the method are searched as well, because options of a fit would be poor suggestions for their typos
            close = [key] if key in settings | names else close_words(key, [*settings, *names])[:1]
            if close and close[0] in settings:
                raise misplaced_setting(close[0], name, value, key)
        check_without_noise(network, name)
        if self.needs_weights and not any(parameter.requires_grad for parameter in network.parameters()):
            hint = "use network.requires_grad_()"
            raise requirement_error(name, "trainable weights", hint=hint, kind="network", argument="network")
        options = FitOptions(**{"epochs": self.epochs or 1, "description": description, **kwargs})
        loader = options.training_loader(data)
        if not self.supports_weights and isinstance(loader, Columns) and loader.has_weights:
            hint = "remove weights= of flowbnn.data.Columns"
            raise requirement_error(name, "unweighted examples", hint=hint, kind="weights", argument="loader")
        model = select_output(copy_network(network), options.output)
        return set_input_columns(model, columns_of(loader)), loader, options

    def fit_point(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        options: FitOptions,
        weight_decay: float | None = None,
        prepared: PreparedFit | None = None,
        fold: int = 0,
    ) -> PointPosterior:
        r"""Trains a network by maximum a posteriori, in place. With ``epochs=0`` the network is used as it is.

        .. math:: \max_w \frac1N \sum_i \log p(y_i \mid x_i, w) - \frac{\lambda}{2} \|w\|^2

        At the end, learned noise of a Gaussian likelihood is the maximum-likelihood value for these weights. If held-out data have
        larger residuals, it is the value for the held-out data.

        Args:
            model: Network to train.
            loader: Batches of ``(inputs, targets)``.
            options: Options of the fit.
            weight_decay: Weight decay :math:`\lambda`. The default is :math:`1 / \sigma^2 N` for methods with a Gaussian prior, and 0
                otherwise.
            prepared: Result of :func:`~flowbnn.methods.preparation.prepare`, if the method has called it already.
            fold: Index of the block of data that is held out if ``epochs`` is None.
        """
        prepared = prepared or prepare(model, loader, options, self.trains)
        likelihood = prepared.likelihood
        posterior = PointPosterior(model.eval(), likelihood)
        if self.trains:
            if weight_decay is None:
                weight_decay = 0.0
                if self.has_prior:
                    weight_decay = 1.0 / (self.prior_scale**2 * prepared.data.require_num_examples())
            weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
            groups = [
                {"params": weights, "lr": self.lr, "weight_decay": weight_decay},
                {"params": list(likelihood.parameters()), "lr": self.likelihood_lr, "weight_decay": 0.0},
            ]
            loss = partial(self._loss(model), likelihood)
            training, options, plan = self.plan_training(loader, options, fold)
            posterior.history = make_training_run(
                posterior,
                Objective(model, likelihood, loss, prepared.check_batch),
                make_optimizer(groups, self.optimizer),
                training,
                options,
                plan.scheduler,
                num_epochs=plan.num_epochs,
            ).train()
        with preserve_rng_state(loader, options.seed or 0):
            fit_residual_scale(model, likelihood, loader, options.validation_loader)
        return posterior

    def plan_training(
        self, loader: Iterable[Any], options: FitOptions, fold: int = 0
    ) -> tuple[Iterable[Any], FitOptions, TrainingPlan]:
        """Returns the training data, the options and the schedule of a training.

        Args:
            loader: Batches of ``(inputs, targets)``.
            options: Options of the fit.
            fold: Index of the block of data that is held out if ``epochs`` is None.
        """
        if self.epochs is not None:
            plan, options = plan_fit(options.epochs, self.schedule, loader, options)
            return loader, options, plan
        loader, options = hold_out(loader, options, fold)
        monitor: Monitor = "log_likelihood" if options.validation_loader is None else "validation_nll"
        plan, options = plan_fit(None, self.schedule or WEIGHT_SCHEDULE, loader, options, monitor)
        return loader, options, plan

    @property
    def trains(self) -> bool:
        """True unless ``epochs`` is 0."""
        return self.epochs != 0

    def _loss(self, model: nn.Module) -> Callable[..., LossAndLogs]:
        """Returns the loss of :meth:`fit_point`, whose first argument is the likelihood."""
        return negative_log_likelihood

    @property
    def likelihood_lr(self) -> float:
        """Learning rate of a learned noise scale. With the rate of the weights, Adam may not converge within the run."""
        return max(self.lr, NOISE_LR) if self.optimizer is None else self.lr


@options(kw_only=True, repr=False)
class PointMethod(Method):
    """Base class for methods that return a single network, see :meth:`Method.fit_point`."""

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> PointPosterior:
        """Fits the network; see :meth:`Method.fit`."""
        model, loader, options = self.setup(network, loader, kwargs)
        posterior = self.fit_point(model, loader, options)
        check_noise_scale(posterior, loader, options.seed)
        return posterior
