"""Conditioners: the networks that give a transform its parameters."""

from flowbnn.nets.mlp import MLP

__all__ = ["MLP"]
