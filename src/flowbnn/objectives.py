r"""The ELBO. This is the one place where the KL gets its weight.

.. math::
    \frac{1}{N}\mathrm{ELBO} = \frac1B \sum_{i \in \mathrm{batch}} \log p(y_i \mid x_i, z)
    - \frac{\beta}{N} \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \frac{\gamma}{N} \sum_l H(q(z_l))

These are equations 14, 15 and 18 of Xiong's report, per example. :math:`N` is the number of training examples: the noise belongs
to the network, so its KL is paid once for the whole data set, whatever the batch size or the number of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, repeat_each, tensors_of
from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods.base import Likelihood, mean_log_prob
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import Divergences, divergences, draw_with_kl
from flowbnn.noise.contexts import NoiseContext, ShapeRecord, current_modes, current_row_shard
from flowbnn.options import Count, NonNegative, checked


def warm_up(progress: Any, length: float) -> Any:
    """Linear annealing: from 0 to 1 over the first ``length`` of the run; ``progress`` is a number or a tensor of one.

    >>> [warm_up(t, 0.5) for t in (0.0, 0.25, 0.5, 1.0)], warm_up(0.0, 0.0)
    ([0.0, 0.5, 1.0, 1.0], 1.0)
    """
    if length <= 0.0:
        return 1.0
    return (progress / length).clamp(max=1.0) if isinstance(progress, Tensor) else min(1.0, progress / length)


@dataclass(frozen=True)
class Terms:
    """The parts of the objective, in nats.

    Args:
        loss: what is minimised: minus the ELBO per example.
        log_likelihood: mean log-likelihood of one example.
        kl: :math:`\\sum_l KL_l` for the whole network.
        entropy: :math:`\\sum_l H_l` for the whole network.
        layers: KL and entropy of each layer by name.
        outputs: of the network.
        elbo: the ELBO per example with the weights :math:`\\beta` and :math:`\\gamma` as used.
    """

    loss: Tensor
    log_likelihood: Tensor
    kl: Tensor
    entropy: Tensor
    layers: dict[str, Divergence]
    outputs: Tensor

    @property
    def elbo(self) -> Tensor:
        return -self.loss

    def logs(self) -> dict[str, Tensor]:
        """Scalars for the training log, those of each layer as ``kl/name`` and ``entropy/name``."""
        result: dict[str, Tensor] = {}
        for name in ("elbo", "log_likelihood", "kl", "entropy"):
            result[name] = getattr(self, name).detach()
        for name, (kl, entropy) in self.layers.items():
            result |= {f"kl/{name}": kl.detach(), f"entropy/{name}": entropy.detach()}
        return result


class ELBO:
    r"""The evidence lower bound of a stochastic network.

    Args:
        likelihood: the observation model of the targets given the outputs.
        num_data: :math:`N`, the number of training examples.
        beta: weight of the KL; 1 is the bound itself, below 1 a colder posterior.
        gamma: weight of the entropy (equation 18), above 0 to keep the posterior from contracting to a point.

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
        # positions that layers of site ``position`` drew for, by the number of rows
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
    ) -> Terms:
        """Run the network on a batch and give the terms of its ELBO, each example with a draw of its own.

        The noise of the pass and the draws for the KL are made together, which halves what the noise costs in a step.

        Args:
            inputs: a tensor, or a tuple or mapping of tensors, the examples first.
            targets: of the batch.
            scale: multiplies beta, for warm-up.
            samples: draws per example.
            forward: what runs the network on the inputs, where that is a wrapper around ``model`` (torch's DDP, say).
            check: whether to check that the targets fit the outputs, which waits for the device.
        """
        if samples > 1:
            inputs, targets = repeat_each(inputs, samples), repeat_each(targets, samples)
        layers, tensors, shard = noise_layers(model), tensors_of(inputs), current_row_shard()
        modes = current_modes(layers.values())
        rows = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
        # of the global batch, so that all processes draw in the same way
        shapes = self._shapes_for(rows if shard is None else shard.global_rows(rows))
        prepared, divergence = (draw_with_kl(layers, rows, modes, shapes) if rows else None) or (None, None)
        with NoiseContext(modes, prepared=prepared, recorded_shapes=shapes):
            outputs = call(model, inputs) if forward is None else forward(inputs)
            if divergence is None:
                divergence = divergences(layers)
        if isinstance(targets, Tensor) and targets.shape[:1] != outputs.shape[:1]:
            sizes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
            line = f"{sizes} do not have the same number of examples on their first axis"
            raise FlowBNNError(line, kind="shape", argument="targets")
        if not len(outputs) and shard is None:
            raise FlowBNNError(
                "the batch has no examples, and their mean is no number: leave it out", kind="shape"
            )
        if check:
            self.likelihood.check(outputs, targets)
        return self.terms(outputs, targets, divergence, scale)

    def _shapes_for(self, rows: int) -> ShapeRecord:
        """Returns the positions recorded by earlier passes over as many rows, for the next pass to extend."""
        shapes = self._shapes.get(rows)
        if shapes is None:
            shapes = {}
            if not torch.compiler.is_compiling():
                self._shapes[rows] = shapes
        return shapes

    def terms(self, outputs: Tensor, targets: Any, divergence: Divergences, scale: Any = 1.0) -> Terms:
        """Returns the terms for given outputs and divergences.

        Args:
            outputs: Outputs of the network.
            targets: Targets of the batch.
            divergence: KL and entropy of the layers.
            scale: Factor of beta, for warm-up.
        """
        log_likelihood = mean_log_prob(self.likelihood, outputs, targets)
        zero = log_likelihood.new_zeros(())
        kl, entropy = divergence.total or Divergence(zero, zero)
        penalty = self.beta * scale * kl - self.gamma * entropy if self.gamma else self.beta * scale * kl
        return Terms(
            penalty / self.num_data - log_likelihood, log_likelihood, kl, entropy, divergence, outputs
        )
