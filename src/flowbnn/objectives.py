r"""Evidence lower bound (ELBO), the objective of variational inference. No other module sets the weight of the KL.

.. math::
    \frac{1}{N}\mathrm{ELBO} = \frac1B \sum_{i \in \mathrm{batch}} \log p(y_i \mid x_i, z)
    - \frac{\beta}{N} \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \frac{\gamma}{N} \sum_l H(q(z_l))

These are equations 14, 15 and 18 of Xiong's report, per example. :math:`N` is the number of training examples. The noise belongs to the
network, so its KL counts once for the whole data set, for any batch size and number of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    container_rows,
    is_container,
    output_tensor,
    repeat,
    repeat_each,
    tensors_of,
)
from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError, check_shape, describe_value, value_error
from flowbnn.likelihoods.base import Likelihood
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import Divergences, divergences, draw_with_kl
from flowbnn.noise.contexts import NoiseContext, ShapeRecord, current_modes, current_row_shard
from flowbnn.options import Count, NonNegative, checked
from flowbnn.packing import pack_targets


def warm_up(progress: Any, length: float) -> Any:
    """Returns the factor of linear annealing, which rises from 0 to 1 over the first part of the training.

    Args:
        progress: Completed fraction of the training, as a number or a tensor.
        length: Fraction of the training over which the factor rises.

    >>> [warm_up(t, 0.5) for t in (0.0, 0.25, 0.5, 1.0)], warm_up(0.0, 0.0)
    ([0.0, 0.5, 1.0, 1.0], 1.0)
    """
    if length <= 0.0:
        return 1.0
    return (progress / length).clamp(max=1.0) if isinstance(progress, Tensor) else min(1.0, progress / length)


def mean_log_prob(
    likelihood: Likelihood, outputs: Tensor, targets: Any, weights: Tensor | None = None
) -> Tensor:
    """Returns the mean log-likelihood over examples.

    Args:
        likelihood: Observation model.
        outputs: Outputs of the network, ``[B, ...]``.
        targets: Targets, ``[B, ...]``.
        weights: Weight of every example, ``[B]``, or None. They multiply the log-likelihoods and are not normalized.

    Raises:
        FlowBNNError: If the likelihood does not return one number per example. A mean over pixels, for example, would be too small
            relative to the KL divergence.
    """
    values = likelihood.log_prob(outputs, targets)
    if not isinstance(values, Tensor):
        name, value = f"the result of {type(likelihood).__name__}.log_prob", describe_value(values)
        raise value_error(name, "a tensor", value, kind="value", argument="likelihood")
    if values.shape != outputs.shape[:1]:
        name, hint = f"{type(likelihood).__name__}.log_prob", "sum over all other axes"
        check_shape(name, values, outputs.shape[:1], hint, argument="likelihood")
    return values.mean() if weights is None else (weights.to(values) * values).mean()


@dataclass(frozen=True)
class Terms:
    """Terms of the objective, in nats.

    Args:
        loss: Loss to minimize, the negative ELBO per example.
        log_likelihood: Mean log-likelihood of one example.
        kl: KL of the whole network, :math:`\\sum_l KL_l`.
        entropy: Entropy of the whole network, :math:`\\sum_l H_l`.
        layers: KL and entropy of each layer by name.
        outputs: Outputs of the network.
    """

    loss: Tensor
    log_likelihood: Tensor
    kl: Tensor
    entropy: Tensor
    layers: dict[str, Divergence]
    outputs: Tensor

    @property
    def elbo(self) -> Tensor:
        """ELBO per example, weighted by :math:`\\beta` and :math:`\\gamma`."""
        return -self.loss

    def logs(self) -> dict[str, Tensor]:
        """Returns scalars for the training log. ``kl/name`` and ``entropy/name`` are the values of a layer."""
        result = {
            "elbo": -self.loss.detach(),
            "log_likelihood": self.log_likelihood.detach(),
            "kl": self.kl.detach(),
            "entropy": self.entropy.detach(),
        }
        for name, (kl, entropy) in self.layers.items():
            result |= {f"kl/{name}": kl.detach(), f"entropy/{name}": entropy.detach()}
        return result


class ELBO:
    r"""Evidence lower bound (ELBO) of a stochastic network.

    Args:
        likelihood: Observation model of the targets given the outputs.
        num_data: Number :math:`N` of training examples.
        beta: Weight of the KL. 1 gives the bound itself, smaller values a colder posterior.
        gamma: Weight of the entropy (equation 18). Positive values keep the posterior from contracting to a point.

    >>> import torch
    >>> from flowbnn.likelihoods import Categorical
    >>> from flowbnn.noise import NormalAffine
    >>> from flowbnn import to_stochastic
    >>> network = to_stochastic(nn.Linear(3, 2), {"*": NormalAffine(base_scale=0.5)})
    >>> elbo = ELBO(Categorical(), num_data=100)
    >>> terms = elbo(network, torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))
    >>> terms.loss.backward()
    >>> terms.kl.item()
    0.0
    """

    @checked
    def __init__(
        self, likelihood: Likelihood, num_data: Count, beta: NonNegative = 1.0, gamma: NonNegative = 0.0
    ) -> None:
        self.likelihood, self.num_data, self.beta, self.gamma = likelihood, num_data, beta, gamma
        # shapes of the noise of layers with site ``position``, by the number of rows
        self._shapes: dict[int, ShapeRecord] = {}

    def __call__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        scale: Any = 1.0,
        samples: int = 1,
        forward: Callable[[Any], Any] | None = None,
        check: bool = False,
        weights: Tensor | None = None,
    ) -> Terms:
        """Runs the network on a batch and returns the terms of its ELBO. Every example has its own draw.

        The same draws serve the forward pass and the KL, which halves the cost of the noise in a step.

        Args:
            model: Stochastic network.
            inputs: Tensor, or tuple or mapping of tensors, with the examples on the first axis.
            targets: Targets of the batch.
            scale: Factor of beta, for warm-up.
            samples: Number of draws per example, or per batch if the examples interact.
            forward: Function that runs the network, if that is a wrapper around ``model`` (torch's DDP).
            check: If True, checks that the targets fit the outputs. The check synchronizes with the device.
            weights: Weight of the log-likelihood of every example, ``[B]``, or None.

        Returns:
            The terms of the ELBO.
        """
        if forward is None:
            self.likelihood.attach(model)
            forward = model if isinstance(inputs, Tensor) else partial(call, model)
        targets = targets if isinstance(targets, Tensor) else pack_targets(targets)
        layers, shard = noise_layers(model), current_row_shard()
        one_draw = any(layer.layout.one_draw for layer in layers.values())
        if samples > 1 and not one_draw:
            inputs, targets, weights = repeat_each((inputs, targets, weights), samples)
        modes, tensors = current_modes(layers.values()), tensors_of(inputs)
        rows = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
        if not isinstance(inputs, Tensor) and is_container(inputs):
            rows = container_rows(inputs)
        rows = min(rows, 1) if one_draw else rows
        # shapes of the global batch, so that all processes draw the same noise
        shapes = self._shapes_for(rows if shard is None else shard.global_rows(rows))
        prepared, divergence = (draw_with_kl(layers, rows, modes, shapes) if rows else None) or (None, None)
        with NoiseContext(modes, prepared=prepared, recorded_shapes=shapes):
            outputs = output_tensor(forward(inputs))
            if divergence is None:
                divergence = divergences(layers)
            if samples > 1 and one_draw:  # examples that interact cannot be repeated in one batch
                passes = [output_tensor(forward(inputs)) for _ in range(samples - 1)]
                outputs = torch.cat([outputs, *passes])
                targets, weights = repeat((targets, weights), samples)
        if isinstance(targets, Tensor) and targets.shape[:1] != outputs.shape[:1]:
            check_shape("targets", targets, (len(outputs), "..."))
        if not len(outputs) and shard is None:
            raise FlowBNNError("batch is empty", kind="shape")
        if check:
            self.likelihood.check(outputs, targets)
        return self.terms(outputs, targets, divergence, scale, weights)

    def _shapes_for(self, rows: int) -> ShapeRecord:
        """Returns the shapes that earlier passes over this number of rows recorded. The next pass adds to them."""
        shapes = self._shapes.get(rows)
        if shapes is None:
            shapes = {}
            if not torch.compiler.is_compiling():
                self._shapes[rows] = shapes
        return shapes

    def terms(
        self,
        outputs: Tensor,
        targets: Any,
        divergence: Divergences,
        scale: Any = 1.0,
        weights: Tensor | None = None,
    ) -> Terms:
        """Returns the terms for given outputs and divergences.

        Args:
            outputs: Outputs of the network.
            targets: Targets of the batch.
            divergence: KL and entropy of the layers.
            scale: Factor of beta, for warm-up.
            weights: Weight of the log-likelihood of every example, ``[B]``, or None.
        """
        log_likelihood = mean_log_prob(self.likelihood, outputs, targets, weights)
        zero = log_likelihood.new_zeros(())
        kl, entropy = divergence.total or Divergence(zero, zero)
        penalty = self.beta * scale * kl - self.gamma * entropy if self.gamma else self.beta * scale * kl
        return Terms(
            penalty / self.num_data - log_likelihood, log_likelihood, kl, entropy, divergence, outputs
        )
