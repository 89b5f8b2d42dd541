r"""IVON, improved variational online Newton (Shen et al. 2024, https://arxiv.org/abs/2402.17641).

The posterior is a factorized Gaussian, :math:`q(w) = \prod_j \mathcal N(w_j \mid m_j, 1 / (\lambda (h_j + \delta)))`, with
:math:`\lambda = N / \beta` and the prior :math:`\mathcal N(0, 1 / (\lambda \delta))`. A step draws :math:`w = m + \sigma \epsilon`,
computes the gradient :math:`\hat g` of the mean loss there, and estimates the diagonal of the Hessian without second derivatives:

.. math::
    \hat h = \hat g \, \epsilon / \sigma, \qquad
    g \leftarrow \beta_1 g + (1 - \beta_1) \hat g, \qquad
    h \leftarrow \beta_2 h + (1 - \beta_2) \hat h + \tfrac12 (1 - \beta_2)^2 (h - \hat h)^2 / (h + \delta)

.. math:: m \leftarrow m - \alpha \frac{g / (1 - \beta_1^t) + \delta m}{h + \delta}

At the optimum of a linear regression with known noise, the mean is exact and the variances are the inverse diagonal of the precision.
"""

import math
from dataclasses import KW_ONLY
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import NOISE_LR, Objective, hold_out, make_training_run, plan_fit
from flowbnn.methods.gaussian.weights import GaussianNetwork, GaussianWeightPosterior, GaussianWeights
from flowbnn.methods.network_layers import refuse_checkpointing
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import WEIGHT_SCHEDULE, TrainingPlan
from flowbnn.methods.variational.base import make_weight_loss
from flowbnn.methods.variational.weight_noise import gaussian_kl
from flowbnn.methods.variational.weight_selection import LayerChoice, select_weights
from flowbnn.objectives import ELBO
from flowbnn.options import Bounds, Count, Positive, accepts_options_of, options
from flowbnn.regression import fit_noise_scale, widen_noise_scale
from flowbnn.training.options import length_of


@register_method
@options(repr=False)
class IVON(Method):
    r"""Independent Gaussians over all weights, fitted by natural gradients at the cost of Adam.

    The learning rate is in units of SGD: the step is multiplied by :math:`h_0 + \delta`, so that the first step is that of SGD.
    The posterior has the same form as that of :class:`~flowbnn.BayesByBackprop`, whose standard deviations are trained by Adam.

    Args:
        lr: Learning rate :math:`\alpha`.
        momentum: Momentum :math:`\beta_1` of the gradients.
        hessian_momentum: Momentum :math:`\beta_2` of the Hessian. The paper uses 0.99999 for runs of 100,000 steps. By default, it is
            one minus 10 divided by the number of steps, and at least 0.9975. With smaller values a noisy estimate close to zero makes
            the weights diverge on small data sets.
        hessian_init: Initial Hessian :math:`h_0` of the mean loss. A larger value makes early draws narrower.
        clip_radius: Largest absolute value of the ratio :math:`(g + \delta m) / (h + \delta)` of a step. With the defaults, a mean
            moves by at most about the learning rate in a step. None takes the steps of the formula.
        beta: Weight :math:`\beta` of the KL divergence. Smaller values give a colder posterior.
        repeats: Number of draws of the weights per step.
        layers: Layers with random weights, as in :class:`~flowbnn.BayesByBackprop`. None for all layers, normalization layers included.
        epochs: Number of passes over the data, at least 1. By default, training ends at a plateau of the ELBO.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = IVON(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior.std["weight"].shape
    torch.Size([3, 2])
    """

    _: KW_ONLY
    epochs: Count | None = None
    lr: Positive = 0.1
    optimizer: None = None  # IVON is the optimizer
    momentum: Annotated[float, Bounds(ge=0, lt=1)] = 0.9
    hessian_momentum: Annotated[float, Bounds(ge=0, lt=1)] | None = None
    hessian_init: Positive = 1.0
    clip_radius: Positive | None = 1.0
    beta: Positive = 1.0
    repeats: Count = 1
    layers: LayerChoice = None

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> GaussianWeightPosterior:
        """Fits the posterior; see :meth:`Method.fit`. The means start at the weights of the network."""
        model, loader, options = self.setup(network, loader, kwargs)
        names = select_weights(model, self.layers or (lambda name, module: True))
        prepared = prepare(model, loader, options)
        training, options, plan = self._plan(loader, options)
        num_data = options.num_examples(training)
        optimized = self._settings(num_data, options.epochs * (length_of(training) or 0))
        mean = {name: value.detach() for name, value in model.named_parameters() if name in names}
        scale = (optimized["ess"] * (self.hessian_init + optimized["weight_decay"])) ** -0.5
        std = {name: torch.full_like(value, scale) for name, value in mean.items()}
        weights = GaussianWeights(mean, std)
        posterior = GaussianWeightPosterior(model, prepared.likelihood, std)
        posterior.training_weights = weights

        @torch.no_grad()
        def divergence() -> Divergence:  # the optimizer adds the gradient of the KL itself
            return Divergence(gaussian_kl(weights.mean, weights.log_std, self.prior_scale), weights.entropy())

        elbo = ELBO(prepared.likelihood, num_data, self.beta)
        loss = make_weight_loss(elbo, divergence, self.repeats)
        run = make_training_run(
            posterior,
            Objective(GaussianNetwork(model, weights, {}), prepared.likelihood, loss),
            self._optimizer(posterior, weights, optimized),
            training,
            options,
            plan.scheduler,
            samples=8,
            settings=optimized,
            num_epochs=plan.num_epochs,
        )
        with refuse_checkpointing(model):
            posterior.history = run.train()
        posterior.update_from_training()
        posterior.training_weights = None
        with torch.no_grad():
            for name, value in posterior.mean.items():
                model.get_parameter(name).copy_(value)
        fit_noise_scale(posterior, training, options.seed)
        widen_noise_scale(posterior, options.validation_loader)
        return posterior

    def _plan(self, loader: Any, options: FitOptions) -> tuple[Any, FitOptions, TrainingPlan]:
        """Returns the training data, the options and the schedule of the training."""
        schedule = self.schedule
        if self.epochs is None:
            loader, options = hold_out(loader, options)
            schedule = schedule or WEIGHT_SCHEDULE
        plan, options = plan_fit(self.epochs, schedule, loader, options)
        return loader, options, plan

    def _settings(self, num_data: int, num_steps: int) -> dict[str, float]:
        """Returns the settings of the optimizer for this number of examples and steps."""
        ess = num_data / self.beta
        momentum = self.hessian_momentum
        if momentum is None:
            momentum = 1.0 - min(0.0025, 10.0 / num_steps) if num_steps else 0.999
        weight_decay = 1.0 / (ess * self.prior_scale**2)
        return {
            "ess": ess,
            "weight_decay": weight_decay,
            "momentum": self.momentum,
            "hessian_momentum": momentum,
            "hessian_init": self.hessian_init,
            "clip_radius": math.inf if self.clip_radius is None else self.clip_radius,
        }

    def _optimizer(
        self, posterior: GaussianWeightPosterior, weights: GaussianWeights, settings: dict[str, float]
    ) -> "OnlineNewton":
        """Returns the optimizer of the means and deviations, and of weights and noise scales without a posterior."""
        names = set(posterior.names)
        points = [p for name, p in posterior.model.named_parameters() if name not in names]
        points = [p for p in (*points, *posterior.likelihood.parameters()) if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": [weights.mean, weights.log_std], "lr": self.lr}]
        if points:
            groups.append({"params": points, "lr": NOISE_LR, "adam": True})
        return OnlineNewton(groups, **settings)


class OnlineNewton(torch.optim.Optimizer):
    r"""Optimizer of IVON for a vector of means and the vector of their log standard deviations.

    The gradient in :math:`\log\sigma` is :math:`\hat g \epsilon \sigma`, so that autograd returns
    :math:`\hat h = \hat g \epsilon / \sigma` for any number of draws. Groups with ``adam=True`` are trained by Adam.

    Args:
        groups: Parameter groups. The parameters of a group without ``adam`` are means and log standard deviations.
        ess: Effective sample size :math:`\lambda`, the number of examples.
        weight_decay: Precision :math:`\delta` of the prior, divided by ``ess``.
        momentum: Momentum :math:`\beta_1` of the gradients.
        hessian_momentum: Momentum :math:`\beta_2` of the Hessian.
        hessian_init: Initial Hessian :math:`h_0`.
        clip_radius: Largest absolute value of the ratio of gradient and Hessian. By default it is not limited.

    >>> mean, log_std = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    >>> settings = {"momentum": 0.0, "hessian_momentum": 0.5, "hessian_init": 1.0}
    >>> optimizer = OnlineNewton([{"params": [mean, log_std], "lr": 1.0}], ess=1.0, weight_decay=0.0, **settings)
    >>> (0.5 * mean.square()).sum().backward()  # the gradient is 1, and log_std has none
    >>> optimizer.step()
    >>> round(mean.item(), 3), round(log_std.exp().item() ** -2, 3)
    (-0.6, 0.625)
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        ess: float,
        weight_decay: float,
        momentum: float,
        hessian_momentum: float,
        hessian_init: float,
        clip_radius: float = math.inf,
    ) -> None:
        defaults = {
            "lr": 0.1,
            "ess": ess,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "hessian_momentum": hessian_momentum,
            "hessian_init": hessian_init,
            "clip_radius": clip_radius,
            "adam": False,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            if not group["adam"]:
                mean, log_std = group["params"]
                self.state[mean] = {"step": torch.zeros(()), "gradient": torch.zeros_like(mean)}
                self.state[log_std] = {"hessian": torch.full_like(log_std, hessian_init)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all groups from the gradients of the last backward pass."""
        for group in self.param_groups:
            if not group["adam"]:
                self._newton_step(group, *group["params"])
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._adam_step(group, parameter, parameter.grad)

    def _newton_step(self, group: dict[str, Any], mean: Tensor, log_std: Tensor) -> None:
        """Updates the Hessian, the means and the standard deviations."""
        if mean.grad is None:
            return
        state, hessian = self.state[mean], self.state[log_std]["hessian"]
        beta1, beta2, decay = group["momentum"], group["hessian_momentum"], group["weight_decay"]
        state["step"] += 1
        state["gradient"].lerp_(mean.grad, 1.0 - beta1)
        slope = torch.zeros_like(mean) if log_std.grad is None else log_std.grad
        difference = slope * (-2.0 * log_std).exp() - hessian
        correction = 0.5 * (1.0 - beta2) ** 2 * difference.square() / (hessian + decay)
        hessian.add_((1.0 - beta2) * difference + correction)
        gradient = state["gradient"] / (1.0 - beta1 ** float(state["step"]))
        radius = group["clip_radius"]
        direction = ((gradient + decay * mean) / (hessian + decay)).clamp_(-radius, radius)
        mean.sub_(group["lr"] * (group["hessian_init"] + decay) * direction)
        log_std.copy_(-0.5 * (group["ess"] * (hessian + decay)).log())

    def _adam_step(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Updates a parameter without a posterior by Adam."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.square(), 0.001)
        root = (state["square"] / (1.0 - math.pow(0.999, step))).sqrt_().add_(1e-8)
        parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1.0 - math.pow(0.9, step)))
