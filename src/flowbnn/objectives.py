r"""The ELBO, and the likelihoods it is made of. This is the one place where the KL gets its weight.

.. math::
    \frac{1}{N}\mathrm{ELBO} = \frac1B \sum_{i \in \mathrm{batch}} \log p(y_i \mid x_i, z)
    - \frac{\beta}{N} \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \frac{\gamma}{N} \sum_l H(q(z_l))

These are equations 14, 15 and 18 of document 000, per example. :math:`N` is the number of training examples: the noise belongs
to the network, so its KL is paid once for the whole data set, whatever the batch size or the number of layers.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood
from flowbnn.noise import Divergences, ahead, divergences, noise_layers

__all__ = ["ELBO", "Terms", "warm_up"]


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
        elbo: the ELBO per example with the weights :math:`\\beta` and :math:`\\gamma` as used.
    """

    loss: Tensor
    log_likelihood: Tensor
    kl: Tensor
    entropy: Tensor
    layers: dict[str, Divergence]

    @property
    def elbo(self) -> Tensor:
        return -self.loss

    def logs(self) -> dict[str, Tensor]:
        """Scalars for the training log, those of each layer as ``kl/name`` and ``entropy/name``."""
        result = {
            "elbo": self.elbo.detach(),
            "log_likelihood": self.log_likelihood.detach(),
            "kl": self.kl.detach(),
            "entropy": self.entropy.detach(),
        }
        for name, (kl, entropy) in self.layers.items():
            result[f"kl/{name}"] = kl.detach()
            result[f"entropy/{name}"] = entropy.detach()
        return result


class ELBO:
    r"""The evidence lower bound of a stochastic network.

    Args:
        likelihood: how outputs speak of targets.
        num_data: :math:`N`, the number of training examples.
        beta: weight of the KL; 1 is the bound itself, below 1 a colder posterior.
        gamma: weight of the entropy (equation 18), above 0 to keep the posterior from contracting to a point.

    >>> import torch
    >>> from flowbnn import Categorical, NormalAffine, to_stochastic
    >>> network = to_stochastic(nn.Linear(3, 2), {"*": NormalAffine()})
    >>> terms = ELBO(Categorical(), num_data=100)(network, network(torch.ones(4, 3)), torch.tensor([0, 1, 1, 0]))
    >>> terms.kl.item()
    0.0
    """

    def __init__(self, likelihood: Likelihood, num_data: int, beta: float = 1.0, gamma: float = 0.0) -> None:
        if num_data < 1:
            raise FlowBNNError(f"num_data is the number of training examples, at least 1, not {num_data}")
        if beta < 0 or gamma < 0:
            raise FlowBNNError(
                f"beta and gamma weigh the KL and the entropy and are at least 0, not {beta} and {gamma}"
            )
        self.likelihood, self.num_data, self.beta, self.gamma = likelihood, num_data, beta, gamma

    def ahead(self, model: nn.Module, rows: int) -> Divergences | None:
        """The KL for the coming step, computed together with the noise of its pass over ``rows`` rows; hand it to the call.

        This saves half of what the noise costs in a step and changes nothing else. None where it cannot be done, which the call takes
        as well.
        """
        return ahead(noise_layers(model), rows)

    def __call__(
        self,
        model: nn.Module,
        outputs: Tensor,
        targets: Any,
        scale: Any = 1.0,
        known: Divergences | None = None,
    ) -> Terms:
        """Terms for one batch of outputs.

        With several samples per example, ``outputs`` has a row for each and ``targets`` is repeated to match.

        Args:
            scale: multiplies beta, for warm-up.
            known: from :meth:`ahead`, called before the pass that gave the outputs.
        """
        log_likelihood = self.likelihood.log_prob(outputs, targets).mean()
        layers = divergences(noise_layers(model)) if known is None else known
        nought = log_likelihood.new_zeros(())
        kl, entropy = layers.total or Divergence(nought, nought)
        penalty = self.beta * scale * kl - self.gamma * entropy if self.gamma else self.beta * scale * kl
        return Terms(penalty / self.num_data - log_likelihood, log_likelihood, kl, entropy, layers)
