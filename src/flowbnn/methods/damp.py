r"""DAMP: training under multiplicative perturbations of the weights (Trinh et al. 2024, https://arxiv.org/abs/2406.16540).

.. math:: w \leftarrow w - \eta \Big( \nabla L(w \circ \xi) + \lambda w \Big), \qquad \xi \sim \mathcal N(1, \sigma^2)

Perturbed weights simulate corrupted inputs. The result is one deterministic network. As a baseline it shows how much of the robustness
of node noise comes from training alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, has_row_axis, rows, split_weighted_batch, take
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import PointMethod, register_method
from flowbnn.methods.fitting import LossAndLogs, NetworkFunction, negative_log_likelihood
from flowbnn.methods.network_layers import refuse_checkpointing
from flowbnn.options import Count, Positive, options
from flowbnn.posterior.weights import PointPosterior, SwappedTensors
from flowbnn.training import Clock


@register_method
@options(kw_only=True, repr=False)
class DAMP(PointMethod):
    r"""Maximum a posteriori with weights multiplied by fresh Gaussian noise at every step.

    As in the paper, the gradient is taken at the perturbed weights and applied to the unperturbed ones. Biases have no noise.

    Args:
        scale: Standard deviation :math:`\sigma` of the noise, whose mean is one.
        sub_batches: Number of parts of a batch with independent noise. The paper uses 8, with BatchNorm statistics of the full batch.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> DAMP(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    PointPosterior(Linear, Categorical(), 2 epochs)
    """

    scale: Positive = 0.2
    sub_batches: Count = 1

    def fit_point(self, model: nn.Module, *args: Any, **kwargs: Any) -> PointPosterior:
        """Trains the network; see :meth:`Method.fit_point`."""
        with refuse_checkpointing(model):
            return super().fit_point(model, *args, **kwargs)

    def _loss(self, model: nn.Module) -> Callable[..., LossAndLogs]:
        return partial(_perturbed_loss, model, self.scale, self.sub_batches)


def _perturbed_loss(
    model: nn.Module,
    scale: float,
    sub_batches: int,
    likelihood: Likelihood,
    forward: NetworkFunction,
    batch: Any,
    clock: Clock,
) -> LossAndLogs:
    """Returns the loss of a batch at perturbed weights, whose gradients reach the unperturbed weights."""
    locations = [
        (parameters, key, parameter)
        for parameters in (module._parameters for module in model.modules())
        for key, parameter in parameters.items()
        if parameter is not None and parameter.requires_grad and "bias" not in key
    ]
    full_batch = split_weighted_batch(batch)
    total, num_rows = torch.zeros((), device=device_of(model)), rows(full_batch.targets)
    sub_batches = sub_batches if has_row_axis(full_batch.inputs) else 1  # a graph cannot be cut
    for index in range(sub_batches):
        low, high = num_rows * index // sub_batches, num_rows * (index + 1) // sub_batches
        if low == high:
            continue
        perturbed: dict[int, Tensor] = {}  # by id, so that tied weights have the same noise
        for _, _, parameter in locations:
            if id(parameter) not in perturbed:
                noise = torch.randn_like(parameter)
                perturbed[id(parameter)] = parameter + scale * parameter.detach() * noise
        with SwappedTensors((parameters, key, perturbed[id(p)]) for parameters, key, p in locations):
            sub_batch = full_batch if sub_batches == 1 else take(full_batch, low, high)
            loss, _ = negative_log_likelihood(likelihood, forward, sub_batch, clock)
        total = total + loss * ((high - low) / num_rows)
    return total, {"log_likelihood": -total.detach()}
