r"""Initial positions of Markov chains.

The draws of a network's posterior are far from its mode: a weight that the data do not determine is near zero at the mode, and as large
as the prior in a draw. Chains that start at the mode spend most of their transitions on the way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.methods.mcmc.hamiltonian import draw_normals
from flowbnn.methods.mcmc.potential import LOG_NOISE, NetworkPotential
from flowbnn.training import cosine


def anchored_starts(
    potential: NetworkPotential, generators: Sequence[torch.Generator], steps: int, lr: float = 0.02
) -> Tensor:
    r"""Returns one initial position for every chain: a draw of the prior that gradient descent has moved to the data.

    .. math:: \min_w -\sum_i \log p(y_i \mid x_i, w) + \frac{\|w - a\|^2}{2 \sigma^2}, \qquad a \sim \mathcal N(\mu, \sigma^2)

    The anchor :math:`a` is a draw of the prior. Directions that the data do not determine keep its values, and so have the spread of
    the posterior from the beginning (Pearce et al. 2020, https://arxiv.org/abs/1810.05546). The starts are independent. An R-hat near
    one therefore shows that the chains have forgotten them. The learned noise of a regression keeps the value of the trained network.

    A chain starts at the trained network if the descent has not reached the data. This is the case if its energy exceeds that of the
    trained network by more than the number of variables, twice the expected excess of a draw of a Gaussian posterior.

    Args:
        potential: Potential of the target.
        generators: Generator of each chain.
        steps: Number of steps of Adam, on all data.
        lr: Initial learning rate, in units of the prior standard deviation.
    """
    start, scale = potential.start.expand(len(generators), -1), potential.prior_scale
    draws = draw_normals(generators, start)
    anchors = potential.prior_loc + scale * draws
    if LOG_NOISE in potential.shapes:
        size = potential.shapes[LOG_NOISE].numel()
        anchors[:, -size:] = start[:, -size:]
    else:
        size = 0
    # positions in units of the prior
    variables = ((anchors - potential.prior_loc) / scale).requires_grad_()
    optimizer = torch.optim.Adam([variables], lr=lr)
    schedule = cosine(optimizer, max(1, steps))
    for _ in range(steps):
        position = potential.prior_loc + scale * variables.detach()
        gradient = potential(position)[1] * scale - (anchors - potential.prior_loc) / scale
        if size:
            gradient[:, -size:] = 0.0
        variables.grad = gradient
        optimizer.step()
        schedule.step()
    position = potential.prior_loc + scale * variables.detach()
    reached = potential(position)[0] - potential(start)[0] <= start.shape[1]  # False for NaN
    return torch.where(reached.to(position.device)[:, None], position, start)
