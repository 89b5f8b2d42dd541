r"""Monte Carlo dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142): dropout that stays on at prediction.

Training with dropout of rate :math:`p` and an L2 penalty :math:`\lambda \|w\|^2` maximises a variational bound under a Gaussian
prior, with

.. math:: \lambda = \frac{1 - p}{2 \sigma^2 N}

per example, where :math:`\sigma` is the standard deviation of the prior, the inverse of the paper's length scale. torch's weight decay
is :math:`2\lambda`, its penalty being half of the squared norm times it. The loss is the negative log-likelihood; the paper's
:math:`\lambda` for regression goes with the squared error and is divided by the precision :math:`\tau` of the noise, by which the two
differ.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import field
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    device_of,
    evaluation_mode,
    has_row_axis,
    move,
    repeat,
    take,
    watch_modules,
)
from flowbnn.convert import to_stochastic
from flowbnn.errors import quote_names, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.network_layers import disable_nested_tensors, dropout_layers, layers_with_inner_dropout
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_noise
from flowbnn.noise import Dropout
from flowbnn.noise.layout import wrappable_layers
from flowbnn.numerics import constant
from flowbnn.options import Probability, accepts_options_of, checked, options
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.prediction import new_seed
from flowbnn.posterior.trace import try_call
from flowbnn.posterior.weights import generator_of
from flowbnn.regression import fit_noise_scale
from flowbnn.training import History


@register_method
@options(repr=False)
class MCDropout(Method):
    r"""Dropout kept on at prediction.

    A network with dropout layers of its own keeps these on. One without gets dropout before its layers. Either way the masks of a
    sample are shared by all inputs, so that it is one network. Dropout inside of torch's attention and recurrent layers, and that of
    functions (``F.dropout``), is not sampled; a warning names it where it can be seen.

    The rate is given, not fitted, and with it the spread of the networks, which may be far too wide for a precise regression. Such a
    spread is warned of; take a smaller rate, or :class:`~flowbnn.Temperature`.

    Args:
        rate: the share that is dropped; where it is given, dropout is added whatever the network has. 0.1 for networks without dropout.
        layers: a glob of the layers before which to drop; all that can but the first, which reads the data, unless given.
        prior_scale: standard deviation :math:`\sigma` of the prior: a weight decay of :math:`(1 - p) / \sigma^2 N`.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))
    >>> MCDropout(epochs=2).fit(network, loader, progress=False)
    DropoutPosterior(Sequential, Categorical(), 2 epochs)
    """

    rate: Probability | None = None
    layers: str | None = field(default=None, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> Posterior:
        """As :meth:`Method.fit`. With ``epochs=0`` the dropout of a trained network is turned on and nothing is learned."""
        model, run = self.setup(network, loader, given)
        rates = [part.p for part in dropout_layers(model)]
        own = bool(rates) and self.rate is None and self.layers is None
        rate = sum(rates) / len(rates) if own else 0.1 if self.rate is None else self.rate
        decay = (1.0 - rate) / (self.prior_scale**2 * run.num_examples(loader))
        if own:
            prepared = prepare(disable_nested_tensors(model), loader, run, self.epochs > 0)
            point = self.fit_point(model, loader, run, decay, prepared)
            axes = example_axes(point.model, move(prepared.inputs, device_of(point.model)))
            warn_of_unsampled(point.model, [name for name, calls in axes.items() if not calls])
            posterior: Posterior = DropoutPosterior(point.model, point.likelihood, point.history, axes)
            fit_noise_scale(posterior, loader, run.seed)
            return posterior
        if self.rate is None and self.layers is None:
            warn_of_unsampled(model)
        if not self.epochs:
            likelihood = self.fit_point(deepcopy(model), loader, run).likelihood
            posterior = NoisePosterior(self._with_dropout(model, rate).eval(), likelihood)
            fit_noise_scale(posterior, loader, run.seed)
            return posterior
        noisy = self._with_dropout(model, rate)
        settings = {name: getattr(self, name) for name in ("epochs", "optimizer", "schedule")}
        options = NoiseFitOptions(weight_lr=self.lr, weight_decay=decay, **settings, **given)
        return fit_noise(noisy, loader, options)

    def _with_dropout(self, model: nn.Module, rate: float) -> nn.Module:
        names = list(wrappable_layers(model))
        chosen = [self.layers] if self.layers is not None else names[1:] or names or ["*"]
        return to_stochastic(model, {name: Dropout(rate) for name in chosen}, inplace=True)


def warn_of_unsampled(model: nn.Module, uncalled: Sequence[str] = ()) -> None:
    """Name the dropout that predictions do not sample: that inside of layers, and layers that the network does not call."""
    names = [*layers_with_inner_dropout(model), *uncalled]
    if names:
        line = (
            f"dropout of {quote_names(names, 3)} is not sampled in predictions: only that of layers such as nn.Dropout, which the "
            "network calls, is"
        )
        warn(line, kind="dropout", layers=names)


class DropoutPosterior(Posterior):
    """A network whose own dropout is on. A sample is one network: its masks are the same for all inputs.

    Args:
        model, likelihood, history: as in :class:`~flowbnn.methods.Posterior`.
        axes: the axis of the examples at each call of each dropout, by its name; found at the first prediction unless given.
    """

    kind = "dropout"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        history: History | None = None,
        axes: Mapping[str, list[int | None]] | None = None,
    ) -> None:
        super().__init__(disable_nested_tensors(model), likelihood, history)
        self.axes = axes

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs of the network with the masks of one sample after the other."""
        if self.axes is None:
            self.axes = example_axes(prediction.model, move(inputs, prediction.device, prediction.dtype))
        masks = prediction.state.get("masks", lambda: Masks(prediction.model, self.axes or {}))

        def networks() -> Iterator[Callable[[Any], Tensor]]:
            for index in samples:
                masks.hold(prediction.seed, index, None if prediction.shared else prediction.batch_index)
                yield partial(call, prediction.model)

        with masks:
            return prediction.run(inputs, networks(), len(samples))

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """The first network of a prediction with this seed: a copy whose masks stay as they are."""
        network = deepcopy(self.model).eval()
        masks = Masks(network, self.axes or {})
        masks.hold(new_seed() if seed is None else seed, 0)
        masks.__enter__()
        for part in dropout_layers(network):
            part.p = 0.0  # nothing more is dropped in training mode
        return network

    def settings(self) -> dict[str, Any]:
        return {"axes": self.axes}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, point.history, settings["axes"])


# -------------------- masks

NEGATIVE = -1.7580993408473766  # what alpha dropout puts in the place of what it drops: the limit of SELU


def example_axes(model: nn.Module, inputs: Any) -> dict[str, list[int | None]]:
    """The axis of the examples at each call of each dropout: the one that grows with the batch.

    It is None where none does, and a dropout that is not called has no calls; nothing is known of a network that fails on one input,
    or takes no single ones.
    """
    own = {id(part) for part in dropout_layers(model)}
    parts = {name: part for name, part in model.named_modules() if id(part) in own}
    seen: list[dict[str, list[torch.Size]]] = [{}, {}]
    for count, shapes in enumerate(seen, start=2):

        def note(name: str, part: nn.Module, args: Any, kwargs: Any, shapes: Any = shapes) -> None:
            shapes.setdefault(name, []).append(args[0].shape)

        with watch_modules(parts, note, None), evaluation_mode(model):
            if not has_row_axis(inputs) or isinstance(
                try_call(partial(call, model, repeat(take(inputs, 0, 1), count))), Exception
            ):
                return {}
    axes: dict[str, list[int | None]] = {name: [] for name in parts}
    for name, first in seen[0].items():
        for two, three in zip(first, seen[1].get(name, []), strict=False):
            growing = [axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a * 3 == b * 2]
            axes[name].append(growing[0] if growing else None)
    return axes


class MaskedDropout:
    """The masks of one sample for one dropout, each drawn at the first input of its size.

    It is a forward hook of the dropout, which lets everything through where it is not training. A hook also keeps torch's transformer
    layers from their fast path, which calls no dropout: they look for hooks of all their modules.

    Args:
        part: the dropout.
        axes: of the examples, at each of its calls in a pass; the first axis where that is not known.
    """

    def __init__(self, part: Any, axes: Sequence[int | None]) -> None:
        self.rate, self.axes = float(part.p), axes
        self.alpha = isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout)
        maps = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        self.spatial = next((axes for axes, kind in enumerate(maps, start=1) if isinstance(part, kind)), 0)
        self.features = isinstance(part, nn.FeatureAlphaDropout)
        self.seed = 0
        self.source: torch.Generator | None = None  # where every example has a mask of its own
        self.masks: dict[Any, Tensor] = {}

    def __call__(self, part: nn.Module | None, args: Any, x: Tensor) -> Tensor:
        number = _calls.of.get(self, 0)
        _calls.of[self] = number + 1
        axis = self.axes[number] if number < len(self.axes) else 0
        shape = list(x.shape)
        if axis is not None and self.source is None:
            shape[axis] = 1
        flat = range(2, x.ndim) if self.features else range(x.ndim - self.spatial, x.ndim)
        for place in flat:
            shape[place] = 1
        kept = self._mask(number, tuple(shape), x)
        if not self.alpha:
            return x * (kept / max(1.0 - self.rate, 1e-9))
        scale = (max(1.0 - self.rate, 1e-9) * (1.0 + self.rate * NEGATIVE**2)) ** -0.5
        return scale * (x * kept + NEGATIVE * (1.0 - kept)) - scale * NEGATIVE * self.rate

    def _mask(self, number: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
        if self.source is not None:
            return (torch.rand(shape, generator=self.source) >= self.rate).to(x)
        key = (number, shape, x.dtype, x.device)
        if key in self.masks:
            return self.masks[key]
        source = torch.Generator().manual_seed((self.seed * 10_007 + number) % 2**63)
        mask = constant(lambda: (torch.rand(shape, generator=source) >= self.rate).to(x))
        if not torch.compiler.is_exporting():
            self.masks[key] = mask
        return mask


class Masks:
    """Masks on a network's own dropout, for the length of a ``with`` block.

    Args:
        model: the network.
        axes: as :func:`example_axes` gives them.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, list[int | None]]) -> None:
        own = {id(part) for part in dropout_layers(model)}
        self.model, self.stack = model, ExitStack()
        self.parts = {
            part: MaskedDropout(part, axes.get(name, []))
            for name, part in model.named_modules()
            if id(part) in own
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(
                self.model.register_forward_pre_hook(partial(_begin, list(self.parts.values())))
            )
            for part, masked in self.parts.items():
                stack.enter_context(part.register_forward_hook(masked))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def hold(self, seed: int, index: int, batch: int | None = None) -> None:
        """Take the masks of a sample; those of a batch are drawn for each of its examples."""
        first = generator_of(seed, index).initial_seed()
        for number, part in enumerate(self.parts.values()):
            part.seed, part.masks = first * 10_007 + number, {}
            if batch is not None:
                part.source = torch.Generator().manual_seed((part.seed * 10_007 + batch) % 2**63)


def _begin(parts: list[MaskedDropout], model: nn.Module, args: Any) -> None:
    """A hook of the network: where a pass begins, the next call of each dropout is its first."""
    for part in parts:
        _calls.of[part] = 0


class _Calls(threading.local):
    def __init__(self) -> None:
        # how often a dropout has been called in the pass of this thread
        self.of: WeakKeyDictionary[MaskedDropout, int] = WeakKeyDictionary()


_calls = _Calls()
