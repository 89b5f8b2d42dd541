r"""Noise on the input of a linear map is a scale on its weights: :math:`W (z \circ x) = (W \, \mathrm{diag}\, z) \, x`.

It holds for linear layers and convolutions, grouped and transposed ones too, and for one vector ``z`` at every position.
"""

from typing import Any

from torch import Tensor, nn

from flowbnn.layers.layout import untouched

__all__ = ["absorbs", "weight_scale"]

FORWARD: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def absorbs(module: nn.Module) -> bool:
    """Whether noise on the layer's input can be multiplied into its weight: a torch layer as it is, with a weight of its own.

    >>> absorbs(nn.Conv2d(4, 8, 3, groups=2)), absorbs(nn.GRU(4, 8))
    (True, False)
    """
    kind = next((kind for kind in (*FORWARD, *TRANSPOSED) if isinstance(module, kind)), None)
    return kind is not None and module._parameters.get("weight") is not None and untouched(module, kind)


def weight_scale(module: nn.Module, vector: Tensor) -> Tensor:
    """What to multiply the weight by so that the layer computes ``layer(vector * x)``; it broadcasts against the weight.

    >>> import torch
    >>> layer, x, z = nn.Linear(3, 2, bias=False), torch.randn(5, 3), torch.rand(3)
    >>> torch.allclose(x @ (layer.weight * weight_scale(layer, z)).T, layer(x * z))
    True
    """
    weight: Any = module.weight
    ones = (1,) * (weight.ndim - 2)
    if isinstance(module, TRANSPOSED):
        return vector.view(-1, 1, *ones)
    groups: Any = getattr(module, "groups", 1)
    if groups == 1:
        return vector.view(1, -1, *ones)
    return (
        vector.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0).view(*weight.shape[:2], *ones)
    )
