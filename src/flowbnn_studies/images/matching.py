r"""NLL at matched entropy: what is left of a method's NLL under corruption once it may not gain by being less certain.

Corrupted images are harder than any validation image, so whatever spreads the probabilities lowers the NLL there. To compare methods at
the same certainty, the predictive of each is tempered, :math:`p_T \propto \bar p^{1/T}`, for each kind and strength of corruption, with
the one temperature at which its mean entropy over the images is that of the plain network of the same seed:

.. math:: \mathrm{NLL}_\mathrm{matched} = -\frac1n \sum_i \log p_T(y_i \mid x_i), \qquad
          \frac1n \sum_i H[p_T(\cdot \mid x_i)] = \frac1n \sum_i H[p_\mathrm{plain}(\cdot \mid x_i)] .

The temperature sees no label. Trinh et al. 2022 (https://arxiv.org/abs/2206.02435) relate the NLL to the entropy of the latent noise;
only noise has that one, while SWAG, an ensemble and the plain network have a predictive entropy as well.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowbnn.results import Parts
from flowbnn_studies.runner.study import Variant

TEMPERATURES = tuple(2.0 ** (step / 4) for step in range(-24, 25))  # from 1/64 to 64; 1 is among them
Curve = dict[str, list[float]]


def tempered(log_probabilities: Tensor, labels: Tensor) -> Curve:
    """Mean entropy and NLL of log-probabilities ``[B, C]`` at each of the :data:`TEMPERATURES`.

    >>> curve = tempered(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    >>> round(curve["nll"][24], 4), round(curve["nll"][28], 4)  # as it is: -log 0.8; at 2: -log 2/3
    (0.2231, 0.4055)
    """
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64)[:, None, None]
    log_p = torch.log_softmax(log_probabilities.cpu().double() / temperatures, -1)
    chosen = log_p[:, torch.arange(len(labels)), labels.cpu()]
    return {
        "entropy": torch.special.entr(log_p.exp()).sum(-1).mean(-1).tolist(),
        "nll": chosen.mean(-1).neg().tolist(),
    }


def nll_at(curve: Curve, entropy: float) -> float | None:
    """The NLL at a mean entropy, by cubic splines over the logarithm of the temperature; None where the grid does not come to it."""
    from scipy.interpolate import CubicSpline  # not above: every command would wait for it
    from scipy.optimize import brentq

    entropies = CubicSpline(np.log(TEMPERATURES), curve["entropy"])
    low, high = np.log(TEMPERATURES[0]), np.log(TEMPERATURES[-1])
    if not entropies(low) <= entropy <= entropies(high):
        return None
    place = brentq(lambda x: float(entropies(x)) - entropy, low, high)
    return float(CubicSpline(np.log(TEMPERATURES), curve["nll"])(place))


def matched(parts: Parts, variants: Sequence[Variant], plain: dict[str, str]) -> Parts:
    """The parts with ``shift_matched_nll``, the mean over kinds and strengths, where the plain network of that seed is there.

    Args:
        plain: key of the plain network for each recipe, the first word of a variant's key.
    """
    content = dict(parts.content)
    own = TEMPERATURES.index(1.0)
    for variant in variants:
        for seed in parts.seeds:
            part = parts.content.get((variant.key, seed), {})
            other = parts.content.get((plain.get(variant.key.partition("-")[0], ""), seed), {})
            if "tempered" not in part or set(other.get("tempered", ())) != set(part["tempered"]):
                continue
            values = [
                nll_at(curve, reference["entropy"][own])
                for kind, curves in part["tempered"].items()
                for curve, reference in zip(curves, other["tempered"][kind], strict=True)
            ]
            if None not in values:
                mean = float(np.mean(values))  # type: ignore[arg-type]
                content[variant.key, seed] = {**part, "values": {**part["values"], "shift_matched_nll": mean}}
    return Parts(parts.seeds, content)
