r"""A fitted density in the units of the data, and the detection of novel examples by it.

The flow :math:`p_f` sees standardized examples: :math:`\log p(x) = \log p_f\big((x - \mu) / \sigma\big) - \sum_i \log \sigma_i`.
"""

import math
from copy import deepcopy
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn import plots
from flowbnn.batches import device_of, dtype_of, move
from flowbnn.density.examples import as_tensor, iterate_batches
from flowbnn.errors import check_entries, check_shape, pluralize, warn
from flowbnn.memory import check_memory
from flowbnn.networks import evaluation_mode
from flowbnn.options import Count, File, Probability, Seed, check, checked, options
from flowbnn.training import History
from flowbnn.training.compatibility import count_weights, read_module, save_module
from flowbnn.training.randomness import sampling_context
from flowbnn.training.storage import TensorFile
from flowbnn.transforms.base import check_tensor

CHUNK_NUMBERS = (
    2**20
)  # numbers that are drawn at once, because the layers of a flow need much more memory than its draws
Data = Any  # a tensor or an array with the examples on its first axis, or a loader


class Density(nn.Module):
    r"""Density of examples, given by a flow of standardized examples.

    .. math:: \log p(x) = \log p_f\big((x - \mu) / \sigma\big) - \sum_i \log \sigma_i

    Args:
        flow: Module that returns the distribution :math:`p_f` when it is called with a context or None.
        loc: Means :math:`\mu` of the data, or None if the flow has the units of the data. In double precision if the data are, so that
            numbers far from zero keep their digits.
        scale: Standard deviations :math:`\sigma` of the data, or None.
        history: History of the training.

    >>> import flowbnn as fb
    >>> density = Density(fb.flows.RealNVP(2), loc=torch.tensor([5.0, 0.0]), scale=torch.tensor([0.1, 10.0]))
    >>> density.log_prob(torch.zeros(3, 2)).shape, density.sample(4, seed=0).shape
    (torch.Size([3]), torch.Size([4, 2]))
    >>> density
    Density(RealNVP, 0 epochs)
    """

    loc: Tensor | None
    scale: Tensor | None

    @checked
    def __init__(
        self,
        flow: nn.Module,
        loc: Tensor | None = None,
        scale: Tensor | None = None,
        history: History | None = None,
    ) -> None:
        super().__init__()
        self.flow, self.history = flow, history or History()
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)

    def __repr__(self) -> str:
        best = -1 if self.history.best_epoch is None else self.history.best_epoch
        nll = self.history[best].get("validation_nll") if self.history.epochs else None
        quality = "" if nll is None else f", validation NLL {nll:.4g} nats"
        return f"{type(self).__name__}({type(self.flow).__name__}, {pluralize(self.history.epochs, 'epoch')}{quality})"

    @property
    def lower_bound(self) -> bool:
        """True if ``log_prob`` is a lower bound on the log-density, estimated from one draw."""
        return gives_lower_bound(self.flow)

    def log_prob(self, x: Any, context: Any = None) -> Tensor:
        """Returns the log-density of each example.

        Args:
            x: Examples. The log-density of a tensor has gradients, that of an array (numpy, pandas) or of a list has none.
            context: Contexts of the examples, or None.

        >>> import numpy as np, flowbnn as fb
        >>> Density(fb.flows.RealNVP(2)).log_prob(np.zeros((3, 2))).numpy().shape
        (3,)
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and isinstance(x, Tensor)):
            log_prob: Tensor = self._distribution(context).log_prob(self.standardize(x))
            return log_prob if self.scale is None else log_prob - self.scale.log().sum()

    def _distribution(self, context: Any) -> Any:
        """Returns the distribution of the flow for a context, which is moved to the device and precision of the flow."""
        check("context", context := as_tensor(context), Tensor | None, "Density")
        return self.flow(None if context is None else move(context, device_of(self), dtype_of(self.flow)))

    def standardize(self, x: Any) -> Tensor:
        """Returns examples in the units and the precision of the flow."""
        check("x", x := as_tensor(x), Tensor, "Density")
        if self.loc is None or self.scale is None:
            return move(x, device_of(self), dtype_of(self.flow))
        check_tensor(x, self)
        check_shape("x", x, ("...", *self.loc.shape))  # otherwise the subtraction would broadcast
        return ((x.to(self.loc.device) - self.loc) / self.scale).to(dtype_of(self.flow))

    @checked
    def sample(self, count: Count, context: Any = None, seed: Seed | None = None) -> Tensor:
        """Draws examples.

        Args:
            count: Number of examples, for each row of the context if there is one.
            context: Contexts, or None.
            seed: Seed of the draws. None draws from the global generator of torch.

        Returns:
            Examples, ``[count, ...]``, or ``[count, rows, ...]`` with a context.
        """
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            distribution = self._distribution(context)
            shapes = (getattr(distribution, name, ()) for name in ("batch_shape", "event_shape"))
            size = max(1, math.prod([length for shape in shapes for length in shape]))
            check_memory("count", count, 8 * count * size, device_of(self))
            chunk = max(1, CHUNK_NUMBERS // size)
            draws = torch.cat(
                [distribution.sample((min(chunk, count - start),)) for start in range(0, count, chunk)]
            )
        return draws if self.loc is None or self.scale is None else self.loc + self.scale * draws

    @checked
    def score(self, data: Data, context: Any = None, seed: Seed = 0) -> Tensor:
        """Returns the log-density of every example of a data set, computed in batches without gradients.

        Args:
            data: Examples, or a loader of them.
            context: Contexts of examples in memory, or None.
            seed: Seed of densities that are estimated from draws.
        """
        scores = [torch.zeros(0, dtype=dtype_of(self.flow))]
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            for x, rows in iterate_batches(data, context, self.flow):
                scores.append(self.log_prob(x, rows).cpu())
                event = x.shape[scores[-1].ndim :]
                check_shape("data", x, (scores[-1].numel(), *event))  # examples on the first axis only
        return torch.cat(scores)

    @checked
    def bits_per_dimension(self, data: Data, context: Any = None, seed: Seed = 0) -> float:
        r"""Returns the mean of :math:`-\log_2 p(x) / D` over examples of :math:`D` numbers.

        If the flow dequantizes integers itself, such as images of bytes, this is the code length of one integer in bits.

        Args:
            data: Examples, or a loader of them.
            context: Contexts of examples in memory, or None.
            seed: Seed of densities that are estimated from draws.
        """
        scores = self.score(data, context, seed)
        check_shape("data", scores, ("examples >= 1",), kind="data")
        size = math.prod(next(iterate_batches(data, context, self.flow))[0].shape[1:])
        return -float(scores.double().mean()) / (math.log(2.0) * size)

    @checked
    def novelty(
        self,
        held_out: Data,
        rate: Probability = 0.05,
        criterion: Literal["density", "typicality"] = "density",
        context: Any = None,
    ) -> "NoveltyDetector":
        r"""Returns a detector of examples that differ from the data, with a given rate of false alarms.

        Args:
            held_out: Familiar examples that the flow was not fitted to. They set the threshold.
            rate: False alarm rate, the share of familiar examples that are called novel.
            criterion: ``"density"`` calls examples with a small :math:`\log p(x)` novel. ``"typicality"`` calls those with a large one
                novel as well, by the distance to its mean (Nalisnick et al. 2019, https://arxiv.org/abs/1906.02994). In many dimensions
                a flow can give images of another kind a *higher* density than its own (Nalisnick et al. 2018,
                https://arxiv.org/abs/1810.09136).
            context: Contexts of the held-out examples, or None.
        """
        scores = self.score(held_out, context)
        check_shape("held_out", scores, ("examples >= 1",), kind="data")
        check_entries("held_out", scores, ~scores.isnan(), "in the support", "remove these examples", "data")
        minimum = math.ceil(1 / rate) - 1  # the smallest p-value of fewer examples exceeds the rate
        if len(scores) < minimum:
            text = f"rate={rate:g} needs at least {pluralize(minimum, 'held-out example')}, got {len(scores)}; none will be novel"
            warn(text, kind="data", argument="held_out", minimum=minimum)
        return NoveltyDetector(self, rate, criterion, finite_scores(scores).sort().values)

    plot, plot_history = plots.plot_density, plots.plot_history

    def save(self, path: File) -> Path:
        """Writes the fitted flow to one safetensors file, atomically."""
        return save_module(path, self, "density", self.history)


@options
class NoveltyDetector:
    r"""Detector of novel examples: those that are stranger than all but a share ``rate`` of held-out familiar examples.

    With :math:`n` held-out examples, of which :math:`m` have at least the novelty score of :math:`x`, the p-value of :math:`x` is
    :math:`(1 + m) / (1 + n)`. For a familiar example it is at most :math:`\alpha` with probability at most :math:`\alpha`, for any flow
    (Vovk, Gammerman and Shafer 2005; Bates et al. 2023, https://arxiv.org/abs/2104.08279). Typicality measures the distance to the
    mean log-density of all :math:`n + 1` examples, so that this holds for few held-out examples as well.

    Args:
        density: Fitted density.
        rate: False alarm rate.
        criterion: ``"density"`` or ``"typicality"``, as in :meth:`Density.novelty`.
        held_out_scores: Log-densities of the held-out examples, in ascending order.

    >>> import flowbnn as fb
    >>> density = Density(fb.flows.RealNVP(2))
    >>> detector = density.novelty(torch.randn(99, 2, generator=torch.Generator().manual_seed(0)), rate=0.05)
    >>> detector.is_novel(torch.tensor([[0.0, 0.0], [9.0, 9.0]])).tolist()
    [False, True]
    """

    density: Density = field(repr=False)
    rate: Probability
    criterion: Literal["density", "typicality"]
    held_out_scores: Tensor = field(repr=False)

    def novelty_score(self, data: Any, context: Any = None) -> Tensor:
        """Returns the negative log-density of each example, or its distance to the held-out mean; large values are novel."""
        scores = finite_scores(self.density.score(data, context))
        return -scores if self.criterion == "density" else (scores - self.held_out_scores.mean()).abs()

    def p_value(self, data: Any, context: Any = None) -> Tensor:
        """Returns the p-value of each example under the hypothesis that it is familiar."""
        return self.p_value_of(self.density.score(data, context))

    @checked
    def p_value_of(self, log_densities: Tensor) -> Tensor:
        """Returns the p-values of examples with these log-densities.

        Args:
            log_densities: Log-densities of the examples, from :meth:`Density.score`.
        """
        low = high = finite_scores(log_densities)
        number, above = len(self.held_out_scores), torch.zeros((), dtype=torch.long)
        if self.criterion == "typicality":
            opposite = 2.0 * (self.held_out_scores.sum() + low) / (1 + number) - low
            low, high = torch.minimum(low, opposite), torch.maximum(low, opposite)
            above = number - torch.searchsorted(self.held_out_scores, high)
        stranger = torch.searchsorted(self.held_out_scores, low, right=True) + above
        return (1.0 + stranger.clamp(max=number)) / (1.0 + number)

    def is_novel(self, data: Any, context: Any = None) -> Tensor:
        """Returns True for each example whose p-value is at most the rate."""
        return self.p_value(data, context) <= self.rate


@checked
def load_density(path: File, flow: nn.Module) -> Density:
    """Loads a density that :meth:`Density.save` wrote.

    Args:
        path: File to read.
        flow: Flow with the architecture of the fitted one. It is copied.

    Raises:
        FlowBNNError: If the file holds no density, or one of another architecture, base or spline bound.
    """
    file = TensorFile(path, count_weights(flow))
    # a file with one of them alone is incomplete, so both are expected then
    units = next(
        (torch.empty_like(file.views[name]) for name in ("loc", "scale") if name in file.views), None
    )
    density = Density(deepcopy(flow), units, None if units is None else units.clone())
    density.history = read_module(file, density, "density")
    return density.to(device_of(flow)).eval()


def gives_lower_bound(flow: nn.Module) -> bool:
    """Returns whether the ``log_prob`` of a flow is a lower bound on the log-density."""
    return bool(getattr(flow, "lower_bound", getattr(getattr(flow, "transform", None), "lower_bound", False)))


def finite_scores(scores: Tensor) -> Tensor:
    """Returns log-densities as finite numbers. NaN becomes the lowest number, so that such an example is the strangest."""
    return scores.double().nan_to_num(nan=-1e300, neginf=-1e300, posinf=1e300)
