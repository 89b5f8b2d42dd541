r"""DAMP: training under multiplicative perturbations of the weights (Trinh et al. 2024, https://arxiv.org/abs/2406.16540).

.. math:: w \leftarrow w - \eta \Big( \nabla L(w \circ \xi) + \lambda w \Big), \qquad \xi \sim \mathcal N(1, \sigma^2)

The perturbed weights stand for corrupted inputs. The result is one plain network: noise without a posterior, which shows what of the
robustness of node noise is a matter of training alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, split_batch, take
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import PointMethod, register_method
from flowbnn.methods.fitting import Forward, LossAndLogs, negative_log_likelihood
from flowbnn.options import Count, Positive, options
from flowbnn.posterior.weights import StandIns
from flowbnn.training import Clock


@register_method
@options(kw_only=True, repr=False)
class DAMP(PointMethod):
    r"""Maximum a posteriori with weights that are multiplied by fresh Gaussian noise at every step; the plain network at the end.

    As in the paper's algorithm, the gradient is taken at the perturbed weights and applied to the unperturbed ones. Biases have no
    noise.

    Args:
        scale: standard deviation :math:`\sigma` of the noise, which is around one.
        parts: of a batch, each with noise of its own; the paper has 8, and BatchNorm statistics of the whole batch.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> DAMP(epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    PointPosterior(Linear, Categorical(), 2 epochs)
    """

    scale: Positive = 0.2
    parts: Count = 1

    def _loss(self, model: nn.Module) -> Callable[..., LossAndLogs]:
        return partial(_perturbed, model, self.scale, self.parts)


def _perturbed(
    model: nn.Module,
    scale: float,
    parts: int,
    likelihood: Likelihood,
    forward: Forward,
    batch: Any,
    clock: Clock,
) -> LossAndLogs:
    """The loss of a batch at perturbed weights, whose gradients in these go to the weights themselves."""
    held = [part._parameters for part in model.modules()]
    places = [
        (each, key, own)
        for each in held
        for key, own in each.items()
        if own is not None and own.requires_grad and "bias" not in key
    ]
    total, rows = torch.zeros((), device=device_of(model)), len(split_batch(batch)[1])
    for low, high in ((rows * part // parts, rows * (part + 1) // parts) for part in range(parts)):
        if low == high:
            continue
        moved: dict[int, Tensor] = {}  # tied weights move together
        for _, _, own in places:
            if id(own) not in moved:
                moved[id(own)] = own + scale * own.detach() * torch.randn_like(own)
        with StandIns((each, key, moved[id(own)]) for each, key, own in places):
            loss, _ = negative_log_likelihood(likelihood, forward, take(split_batch(batch), low, high), clock)
        total = total + loss * ((high - low) / rows)
    return total, {"log_likelihood": -total.detach()}
