"""Density gates as modules that ``torch.export`` can trace."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.posterior.gated import DensityGate
from flowbnn.regression import noise_at_mean


class GateGraph(nn.Module):
    """Module that replaces the prediction for unfamiliar inputs, and adds the log-density of each input.

    Args:
        gate: Density gate.
        network: Network in evaluation mode, whose layer may have the features.
        fallback: Prediction for an unfamiliar input, whose tensors have one row.
    """

    def __init__(self, gate: DensityGate, network: nn.Module, fallback: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.gate, self.network = gate, network
        self.names = list(fallback)
        for name, value in fallback.items():
            self.register_buffer(f"fallback_{name}", value.clone())

    def features(self, inputs: Any) -> Tensor:
        """Returns the features of inputs. A layer runs once more, with noise at its mean."""
        layer, captured = self.gate.features.layer, list[Tensor]()
        if layer is None:
            captured.append(inputs)
        else:
            module = self.network.get_submodule(layer)
            hook = module.register_forward_hook(lambda _, args, outputs: captured.append(outputs))
            with hook, noise_at_mean(self.network):
                call(self.network, inputs)
        return self.gate.features.reduce(captured[0].flatten(1).float())

    def forward(self, inputs: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the prediction of the gated posterior.

        Args:
            inputs: Inputs of the network.
            values: Prediction of the inner posterior.
        """
        lowest = torch.finfo(torch.float32).min
        scores = self.gate.density.log_prob(self.features(inputs))
        scores = scores.nan_to_num(lowest, lowest, lowest).clamp_min(lowest)
        held_out = self.gate.held_out_scores
        below = (held_out <= scores.unsqueeze(-1)).sum(-1)
        unfamiliar = (1.0 + below) / (1.0 + len(held_out)) <= self.gate.false_alarm
        result = {}
        for name in self.names:
            value = values[name]
            rows = unfamiliar.reshape(-1, *(1,) * (value.ndim - 1))
            result[name] = torch.where(rows, self.get_buffer(f"fallback_{name}").to(value), value)
        return {**result, "log_density": scores}
