"""Contexts with draws that are made together with the KL."""

from flowbnn.noise.batched import draw_with_kl
from flowbnn.noise.contexts import NoiseContext, current_modes


def prepared_context(layers, rows, shapes=None):
    """Returns a context with draws for a pass over ``rows`` rows, and the divergences, which are None if nothing was drawn."""
    modes, shapes = current_modes(layers.values()), {} if shapes is None else shapes
    prepared, divergence = draw_with_kl(layers, rows, modes, shapes) or (None, None)
    return NoiseContext(modes, prepared=prepared, recorded_shapes=shapes), divergence
