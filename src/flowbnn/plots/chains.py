"""Trace and rank plots of Markov chains."""

from typing import Annotated, Any

import numpy as np
from torch import Tensor

from flowbnn.errors import check_name, check_shape, value_error
from flowbnn.metrics.convergence import MIN_DRAWS, effective_sample_size, split_rhat
from flowbnn.options import Count, Ge, Probability, checked
from flowbnn.plots.style import add_legend, binomial_band, describe_axes, drawing, to_array

DENSITY = "log-density"


def chain_draws(chains: Any, name: str = DENSITY, unit: int = 0) -> Tensor:
    """Returns one quantity of Markov chains, ``[chains, draws]``.

    Args:
        chains: Posterior of Markov chains, chains of noise, or a tensor ``[chains, draws]``.
        name: Name of the quantity: ``"log-density"``, ``"outputs"`` (function values), or a weight or layer.
        unit: Index in a quantity of several numbers.

    Raises:
        FlowBNNError: If there is no such quantity.
    """
    if isinstance(chains, Tensor):
        check_shape("chains", chains, ("chains >= 1", "draws >= 1"))
        return chains
    record = getattr(chains, "record", {})
    quantities = {DENSITY: -(record["energy"] if record else chains.energy)}
    if "outputs" in record:
        quantities["outputs"] = record["outputs"]
    if name not in quantities:
        quantities |= chains.chains if record else chains.draws
    check_name(name, quantities, "quantity", kind="name", argument="name")
    values = quantities[name]
    values = values.reshape(*values.shape[:2], -1)
    if unit >= values.shape[-1]:
        raise value_error("unit", f"below {values.shape[-1]}", unit)
    return values[..., unit].detach().cpu().double()


def _describe(name: str, unit: int, chains: Any) -> str:
    """Returns the name of a quantity with its index or unit."""
    if isinstance(chains, Tensor):
        return "value"
    return "log-density (nats)" if name == DENSITY else f"{name}[{unit}]"


def _diagnostics(draws: Tensor) -> str:
    """Returns R-hat and effective sample size as text."""
    if draws.shape[1] < MIN_DRAWS:
        return ""
    return f"R-hat {float(split_rhat(draws)):.3f}, effective sample size {float(effective_sample_size(draws)):,.0f}"


@checked
def plot_trace(chains: Any, *, name: str = DENSITY, unit: Annotated[int, Ge(0)] = 0, ax: Any = None) -> Any:
    """Plots one quantity of Markov chains over their draws. Chains that have mixed look alike.

    Args:
        chains: Posterior of :class:`~flowbnn.HMC` or :class:`~flowbnn.NUTS`, result of ``fb.diagnostics.noise_chains``, or a tensor
            ``[chains, draws]``.
        name: Name of the quantity: ``"log-density"``, ``"outputs"`` (function values), or a weight or layer.
        unit: Index in a quantity of several numbers.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> ax = fb.plots.plot_trace(torch.randn(4, 100))
    >>> len(ax.lines)
    4
    >>> fb.plots.close(ax)
    """
    draws = chain_draws(chains, name, unit)
    with drawing(ax, (6.0, 3.4)) as (ax, palette):
        for chain, values in enumerate(to_array(draws)):
            style: dict[str, Any] = {"color": palette.colour(chain), "linewidth": 0.8, "alpha": 0.75}
            ax.plot(np.arange(1, len(values) + 1), values, label=f"chain {chain + 1}", **style)
        describe_axes(ax, palette, "draw", _describe(name, unit, chains), _diagnostics(draws))
        ax.set_xlim(1, max(2, draws.shape[1]))
        ax.locator_params(axis="x", integer=True)
        add_legend(ax, palette, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


@checked
def plot_ranks(
    chains: Any,
    *,
    name: str = DENSITY,
    unit: Annotated[int, Ge(0)] = 0,
    bins: Count = 20,
    level: Probability = 0.95,
    ax: Any = None,
) -> Any:
    r"""Plots a histogram of the ranks of each chain among the draws of all chains (Vehtari et al. 2021).

    The histograms of chains that have mixed are flat. The band is the central interval of :math:`\mathrm{Bin}(n, 1/b)`, for :math:`n`
    independent draws and :math:`b` bins. Draws that depend on each other vary more.

    Args:
        chains: Posterior of :class:`~flowbnn.HMC` or :class:`~flowbnn.NUTS`, result of ``fb.diagnostics.noise_chains``, or a tensor
            ``[chains, draws]``.
        name: Name of the quantity: ``"log-density"``, ``"outputs"`` (function values), or a weight or layer.
        unit: Index in a quantity of several numbers.
        bins: Number of bins.
        level: Probability of the band.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> ax = fb.plots.plot_ranks(torch.randn(4, 100), bins=10)
    >>> [text.get_text() for text in ax.get_yticklabels()]
    ['chain 1', 'chain 2', 'chain 3', 'chain 4']
    >>> fb.plots.close(ax)
    """
    draws = chain_draws(chains, name, unit)
    number = draws.shape[1]
    heights, edges = rank_histograms(draws, bins)
    low, high = (float(end) * bins for end in binomial_band(level, number, 1.0 / bins))
    step = 1.15 * max(float(heights.max()), high)
    with drawing(ax, (6.0, 0.75 * len(heights) + 1.4)) as (ax, palette):
        for chain, values in enumerate(heights):
            base = step * (len(heights) - 1 - chain)
            ax.bar(
                edges[:-1],
                values,
                0.94 * np.diff(edges),
                base,
                align="edge",
                color=palette.colour(chain),
                alpha=0.8,
                linewidth=0,
            )
            ax.axhspan(base + low, base + high, color=palette.ink, alpha=0.14, linewidth=0, zorder=3)
            ax.axhline(base + 1.0, color=palette.ink, linestyle="--", linewidth=0.9, zorder=3)
        places = [step * (len(heights) - 1 - chain) + 0.5 for chain in range(len(heights))]
        ax.set_yticks(places, [f"chain {chain + 1}" for chain in range(len(heights))])
        ax.grid(False)
        ax.set_xlim(0, 100)
        ax.set_ylim(0, step * len(heights))
        title = f"{_describe(name, unit, chains)}; band: {100 * level:.4g} % of independent draws"
        describe_axes(ax, palette, "rank (% of all draws)", "", title)
    return ax


def rank_histograms(draws: Tensor, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns histograms of the ranks of each chain, relative to the expected count, ``[chains, bins]``, and the edges in percent.

    Args:
        draws: Draws ``[chains, draws]``. Equal draws have their mean rank.
        bins: Number of bins.

    >>> import torch
    >>> heights, edges = rank_histograms(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2)
    >>> heights.tolist(), edges.tolist()
    ([[2.0, 0.0], [0.0, 2.0]], [0.0, 50.0, 100.0])
    """
    from scipy.stats import rankdata  # here, because importing scipy adds a warning filter

    values = to_array(draws)
    ranks = (rankdata(values.reshape(-1)).reshape(values.shape) - 0.5) / values.size
    edges = np.linspace(0.0, 1.0, bins + 1)
    counts = np.stack([np.histogram(chain, edges)[0] for chain in ranks])
    return counts * bins / values.shape[1], 100.0 * edges
