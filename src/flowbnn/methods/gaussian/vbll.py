r"""VBLL, variational Bayesian last layers (Harrison, Willes and Snoek 2024, https://arxiv.org/abs/2404.11599).

The last layer :math:`z_k = w_k^\top \phi(x)` has the posterior :math:`q(w_k) = \mathcal N(\bar w_k, S_k)`, and the features
:math:`\phi` are deterministic. Both are trained together on a lower bound of the ELBO that needs no samples:

.. math:: \frac1N \mathrm{ELBO} \ge \frac1B \sum_i \big( \log p(y_i \mid \bar z_i) - \Delta_i \big) - \frac{\beta}{N} \mathrm{KL}

With the variances :math:`v_k = \phi^\top S_k \phi`, the penalty :math:`\Delta` is exact for a Gaussian likelihood and an upper bound
by Jensen's inequality for classes:

.. math::
    \Delta = \tfrac12 \sum_k v_k / \sigma_k^2 \;\text{(regression)}, \qquad
    \Delta = \mathrm{lse}_k(\bar z_k + \tfrac12 v_k) - \mathrm{lse}_k(\bar z_k) \;\text{(classes)}

For a linear regression with known noise, the optimum is the exact posterior.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.batches import call, output_tensor, split_weighted_batch
from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError, check_shape, requirement_error
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from flowbnn.methods.base import FitOptions, register_method
from flowbnn.methods.fitting import (
    LossAndLogs,
    NetworkFunction,
    Objective,
    hold_out,
    make_optimizer,
    make_training_run,
    plan_fit,
    should_check_targets,
)
from flowbnn.methods.laplace.layer_selection import computes_torch_layer, shares_weights
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import WEIGHT_SCHEDULE
from flowbnn.methods.variational.base import Variational
from flowbnn.networks import evaluation_mode
from flowbnn.noise.batched import Divergences
from flowbnn.noise.layout import is_unmodified
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, accepts_options_of, options
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.weights import WeightPosterior, generator_of
from flowbnn.regression import SCALE, fit_noise_scale, rescale_outputs, widen_noise_scale
from flowbnn.training import Clock, History


@register_method
@options(repr=False)
class VBLL(Variational):
    r"""Gaussian posterior of the last layer, trained together with deterministic features on a bound without samples.

    A prediction costs one pass, because only the last layer is sampled. The features have the weight decay of a Gaussian prior. The
    last layer must be an ``nn.Linear`` whose output is the output of the network. Likelihoods are Gaussian with fixed or learned
    noise, categorical and Bernoulli. The noise that the paper adds to logits is left out.

    Args:
        structure: ``"full"`` for a full covariance of the weights of each output, ``"diag"`` for independent weights.
        lr: Learning rate of the weights.
        noise_lr: Learning rate of the covariances.
        base_scale: Initial standard deviation, relative to the root mean square of the weights of the last layer.
        prior_scale: Standard deviation of the prior of every weight of the last layer.
        repeats: 1, because the bound needs no samples.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> posterior = VBLL(epochs=2).fit(network, loader, progress=False)
    >>> posterior.names, posterior.draws(5)["2.weight"].shape
    (['2.weight', '2.bias'], torch.Size([5, 3, 4]))
    """

    structure: Literal["full", "diag"] = "full"
    repeats: Literal[1] = field(default=1, kw_only=True)
    epochs: Count | None = field(default=None, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "VBLLPosterior":
        """Fits features and posterior together; see :meth:`Method.fit`."""
        model, loader, options = self.setup(network, loader, kwargs)
        prepared = prepare(model, loader, options)
        check_likelihood(prepared.likelihood, prepared.outputs)
        layer = find_output_layer(model, prepared.inputs)
        posterior = VBLLPosterior(model, prepared.likelihood, layer, self._initial_covariance(model, layer))
        training, schedule = loader, self.schedule
        if self.epochs is None:
            training, options = hold_out(loader, options)
            schedule = schedule or WEIGHT_SCHEDULE
        plan, options = plan_fit(self.epochs, schedule, training, options, warmup=self.warmup)
        num_data = options.num_examples(training)
        module = LastLayerNetwork(model, layer, posterior.covariance)
        loss = partial(self._bound, posterior, ELBO(prepared.likelihood, num_data, self.beta))
        settings = {"beta": self.beta, "warmup": self.warmup, "num_data": num_data}
        posterior.history = make_training_run(
            posterior,
            Objective(module, prepared.likelihood, loss),
            make_optimizer(self._groups(posterior, num_data), self.optimizer),
            training,
            options,
            plan.scheduler,
            samples=8,
            settings=settings,
            num_epochs=plan.num_epochs,
        ).train()
        module.hook.remove()
        fit_noise_scale(posterior, training, options.seed)
        widen_noise_scale(posterior, options.validation_loader)
        return posterior

    def _initial_covariance(self, model: nn.Module, layer: str) -> "RowCovariance":
        """Returns the covariance at the start of the training."""
        linear: Any = model.get_submodule(layer)
        rows, columns = linear.out_features, linear.in_features + (linear.bias is not None)
        gibibytes = 4 * rows * columns**2 / 2**30  # in single precision
        if self.structure == "full" and gibibytes > 0.5:
            text = f"VBLL('full') needs {gibibytes:.2g} GiB for layer '{layer}'; use VBLL('diag')"
            raise FlowBNNError(text, kind="memory", argument="structure", layer=layer)
        scale = self.base_scale * float(linear.weight.detach().square().mean().sqrt().clamp_min(1e-3))
        covariance = RowCovariance(rows, columns, min(scale, self.prior_scale), self.structure)
        return covariance.to(linear.weight.device, linear.weight.dtype)

    def _groups(self, posterior: "VBLLPosterior", num_data: int) -> list[dict[str, Any]]:
        """Returns the parameter groups of the optimizer."""
        names, features, mean = set(posterior.names), list[Tensor](), list[Tensor]()
        for name, value in posterior.model.named_parameters():
            if name in names or value.requires_grad:
                (mean if name in names else features).append(value.requires_grad_())
        noise = [value for value in posterior.likelihood.parameters() if value.requires_grad]
        decay = 1.0 / (self.prior_scale**2 * num_data)
        return [
            {"name": "features", "params": features, "lr": self.lr, "weight_decay": decay},
            {"name": "means", "params": mean, "lr": self.lr},
            {"name": "covariances", "params": list(posterior.covariance.parameters()), "lr": self.noise_lr},
            {"name": "likelihood", "params": noise, "lr": max(self.noise_lr, self.likelihood_lr)},
        ]

    def _bound(
        self, posterior: "VBLLPosterior", elbo: ELBO, forward: NetworkFunction, batch: Any, clock: Clock
    ) -> LossAndLogs:
        """Returns the negative bound of a batch per example, and its logs."""
        inputs, targets, weights = split_weighted_batch(batch)
        outputs, variance = forward(inputs).chunk(2, -1)
        if should_check_targets(targets, clock):
            elbo.likelihood.check(outputs, targets)
        penalty = variance_penalty(elbo.likelihood, outputs, variance)
        penalty = (penalty if weights is None else penalty * weights.to(penalty)).mean()
        divergence = posterior.covariance.divergence(posterior.mean, self.prior_scale)
        scale = warm_up(clock.progress, self.warmup)
        terms = elbo.terms(outputs, targets, Divergences({}, divergence), scale, weights)
        loss = terms.loss + penalty
        log_likelihood = terms.log_likelihood - penalty
        return loss, {
            "elbo": -loss.detach(),
            "log_likelihood": log_likelihood.detach(),
            "kl": terms.kl.detach(),
        }


def check_likelihood(likelihood: Likelihood, outputs: Tensor) -> None:
    """Raises FlowBNNError if the bound does not hold for a likelihood."""
    problem = ""
    if outputs.ndim != 2:
        problem = f"outputs of shape {tuple(outputs.shape)}"
    elif not isinstance(likelihood, Gaussian | Categorical | Bernoulli):
        problem = f"the likelihood {type(likelihood).__name__}"
    elif isinstance(likelihood, Gaussian) and likelihood.noise == "predicted":
        problem = "predicted noise"
    elif getattr(likelihood, "class_weights", None) or getattr(likelihood, "pos_weight", None):
        problem = "weights of classes"
    if problem:
        text = f"VBLL does not support {problem}; use Laplace or BayesByBackprop"
        raise FlowBNNError(text, kind="likelihood", argument="likelihood")


def variance_penalty(likelihood: Likelihood, outputs: Tensor, variance: Tensor) -> Tensor:
    r"""Returns the penalty :math:`\Delta` of the variance of the outputs for each example, ``[B]``.

    Args:
        likelihood: Observation model of the targets.
        outputs: Means of the outputs, ``[B, K]``.
        variance: Variances of the outputs, ``[B, K]``.

    >>> variance_penalty(Gaussian(0.5), torch.zeros(1, 2), torch.tensor([[0.1, 0.2]]))
    tensor([0.6000])
    """
    if isinstance(likelihood, Gaussian):
        return 0.5 * (variance / likelihood.moments(outputs)[1]).sum(-1)
    shifted = outputs + 0.5 * variance
    if isinstance(likelihood, Bernoulli):
        return (F.softplus(shifted) - F.softplus(outputs)).sum(-1)
    return shifted.logsumexp(-1) - outputs.logsumexp(-1)


def find_output_layer(model: nn.Module, inputs: Any) -> str:
    """Returns the name of the linear layer whose output is the output of the network.

    Args:
        model: Network.
        inputs: Batch of inputs on the device of the network.

    Raises:
        FlowBNNError: If there is no such layer, or if it shares its weights with another layer.
    """
    results: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    other: list[str] = []  # layers that compute something else

    def record(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if not is_unmodified(module, nn.Linear) and not (
            args and computes_torch_layer(module, args[0], output)
        ):
            other.append(name)
            return
        results.pop(name, None)  # the last call comes last
        results[name] = output

    hooks = [
        module.register_forward_hook(partial(record, name), prepend=True) for name, module in layers.items()
    ]
    try:
        with evaluation_mode(model), torch.random.fork_rng([]):
            outputs = call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    name = next(reversed(results), None)
    if name is not None:
        expected = results[name]
        if SCALE in model._buffers:
            expected = rescale_outputs(model, None, expected)
        if torch.equal(expected, outputs) and shares_weights(model, name) is None:
            return name
    value = f"'{other[-1]}' with a forward of its own" if other else None
    hint = "use Laplace or BayesByBackprop"
    requirement = "a final, unshared nn.Linear layer"
    raise requirement_error("VBLL", requirement, value, hint, kind="layer", argument="network")


class RowCovariance(nn.Module):
    """Covariances of the rows of a matrix, by the Cholesky factor of each.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        scale: Standard deviation of every entry at the start.
        structure: ``"full"`` or ``"diag"``.

    >>> covariance = RowCovariance(3, 2, 0.1, "full")
    >>> covariance.variance(torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(self, rows: int, columns: int, scale: float, structure: str) -> None:
        super().__init__()
        self.log_diagonal = nn.Parameter(torch.full((rows, columns), math.log(scale)))
        factor = nn.Parameter(torch.zeros(rows, columns, columns)) if structure == "full" else None
        self.off_diagonal = factor

    @property
    def root(self) -> Tensor:
        """Cholesky factors ``[rows, columns, columns]``."""
        diagonal = torch.diag_embed(self.log_diagonal.exp())
        return diagonal if self.off_diagonal is None else self.off_diagonal.tril(-1) + diagonal

    def multiply(self, values: Tensor) -> Tensor:
        """Returns the products of the Cholesky factors with vectors ``[rows, columns]``."""
        if self.off_diagonal is None:
            return self.log_diagonal.exp() * values
        return (self.root @ values.unsqueeze(-1)).squeeze(-1)

    def variance(self, features: Tensor) -> Tensor:
        """Returns the variances ``[B, rows]`` of the products of the matrix with features ``[B, columns]``."""
        if self.off_diagonal is None:
            return features.square() @ (2.0 * self.log_diagonal).exp().T
        return torch.einsum("bd,kde->bke", features, self.root).square().sum(-1)

    def divergence(self, mean: Tensor, prior_scale: float) -> Divergence:
        """Returns the KL divergence from a Gaussian prior, and the entropy.

        Args:
            mean: Mean of the matrix, ``[rows, columns]``.
            prior_scale: Standard deviation of the prior of every entry.
        """
        squares = (2.0 * self.log_diagonal).exp().sum() + mean.square().sum()
        if self.off_diagonal is not None:
            squares = squares + self.off_diagonal.tril(-1).square().sum()
        log_det, size = self.log_diagonal.sum(), mean.numel()
        kl = 0.5 * squares / prior_scale**2 - log_det + size * (math.log(prior_scale) - 0.5)
        return Divergence(kl, log_det + 0.5 * size * (1.0 + math.log(2.0 * math.pi)))


class LastLayerNetwork(nn.Module):
    """Network that returns the means of its outputs and their variances, concatenated.

    Args:
        network: Network.
        layer: Name of its last layer.
        covariance: Covariances of the weights of each output.
    """

    def __init__(self, network: nn.Module, layer: str, covariance: RowCovariance) -> None:
        super().__init__()
        self.network, self.covariance, self.features = network, covariance, list[Tensor]()
        linear: Any = network.get_submodule(layer)
        self.has_bias = linear.bias is not None
        self.hook = linear.register_forward_pre_hook(lambda _, args: self.features.append(args[0]))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.features.clear()
        outputs = output_tensor(self.network(*args, **kwargs))
        features = add_ones(self.features[-1]) if self.has_bias else self.features[-1]
        self.features.clear()
        variance = self.covariance.variance(features).to(outputs.dtype)
        if SCALE in self.network._buffers:
            variance = variance * self.network.get_buffer(SCALE).square()
        return torch.cat([outputs, variance], -1)


def add_ones(features: Tensor) -> Tensor:
    """Returns features with a column of ones, which the bias multiplies."""
    return torch.cat([features, torch.ones_like(features[..., :1])], -1)


class VBLLPosterior(WeightPosterior):
    r"""Gaussian posterior of the last layer, :math:`w_k \sim \mathcal N(\bar w_k, S_k)`.

    Args:
        model: Network with the last layer at its mean.
        likelihood: Observation model of the targets.
        layer: Name of the last layer.
        covariance: Covariances of the weights and the bias of each output.
        history: Training record.

    >>> layer, covariance = nn.Linear(2, 3), RowCovariance(3, 3, 0.1, "full")
    >>> VBLLPosterior(nn.Sequential(layer), Categorical(), "0", covariance).predict(torch.zeros(4, 2), 8).samples.shape
    torch.Size([8, 4, 3])
    """

    kind: ClassVar[str] = "vbll"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        layer: str,
        covariance: RowCovariance,
        history: History | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.layer, self.covariance = layer, covariance
        check_shape("covariance", covariance.log_diagonal, self.mean.shape)

    @property
    def linear(self) -> Any:
        """Last layer of the network."""
        return self.model.get_submodule(self.layer)

    @property
    def names(self) -> list[str]:
        prefix = f"{self.layer}." if self.layer else ""
        return [prefix + name for name in ("weight", "bias") if getattr(self.linear, name) is not None]

    @property
    def mean(self) -> Tensor:
        """Weights of the last layer with the bias as the last column, ``[K, D]``."""
        weight, bias = self.linear.weight, self.linear.bias
        return weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)

    def _matrix(self, index: int, seed: int) -> Tensor:
        """Returns the deviation of one sample from the mean, ``[K, D]``."""
        mean = self.mean
        normal = torch.randn(mean.shape, generator=generator_of(seed, index), dtype=mean.dtype)
        return self.covariance.multiply(normal.to(mean.device)).detach()

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        values = (self.mean + self._matrix(index, seed)).detach()
        width = self.linear.in_features
        return dict(zip(self.names, (values[:, :width], values[:, width:].squeeze(1)), strict=False))

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        columns = [values[name].reshape(len(self.mean), -1) for name in self.names]
        deviation = torch.cat(columns, 1).to(self.mean) - self.mean
        roots = self.covariance.root.detach()
        white = torch.linalg.solve_triangular(roots, deviation.unsqueeze(-1), upper=False)
        log_det = self.covariance.log_diagonal.sum()
        return -0.5 * white.square().sum() - log_det - 0.5 * deviation.numel() * math.log(2.0 * math.pi)

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of some samples, with one pass of the network for all of them."""
        if prediction.options.compile is True:
            return super().outputs(inputs, samples, prediction)
        features: list[Tensor] = []

        def network(rows: Any) -> Tensor:
            features.clear()
            layer = prediction.clone.get_submodule(self.layer)
            with layer.register_forward_pre_hook(lambda _, args: features.append(args[0])):
                outputs = call(prediction.clone, rows)
            return torch.cat([outputs, features[-1].to(outputs.dtype)], -1)

        joined = prediction.run(inputs, [network])[0]
        outputs = joined[..., : len(self.mean)]
        columns = joined[..., len(self.mean) :]
        columns = columns if self.linear.bias is None else add_ones(columns)
        scale = self.model.get_buffer(SCALE).to(outputs) if SCALE in self.model._buffers else 1.0
        result = outputs.new_empty(len(samples), *outputs.shape)
        for position, index in enumerate(samples):
            deviation = self._matrix(index, prediction.seed).to(outputs)
            result[position] = outputs + scale * (columns @ deviation.T)
        return result

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.covariance.named_parameters()}

    def settings(self) -> dict[str, Any]:
        return {"layer": self.layer, "structure": "diag" if self.covariance.off_diagonal is None else "full"}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        diagonal = state["log_diagonal"]
        rows, columns = diagonal.shape
        covariance = RowCovariance(rows, columns, 1.0, settings["structure"]).to(diagonal)
        covariance.load_state_dict(state)
        return cls(point.model, point.likelihood, settings["layer"], covariance, point.history)
