r"""Monte Carlo dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142): dropout that stays on at prediction.

Training with dropout of rate :math:`p` and an L2 penalty :math:`\lambda \|w\|^2` maximizes a variational bound under a Gaussian
prior, with

.. math:: \lambda = \frac{1 - p}{2 \sigma^2 N}

per example. Here :math:`\sigma` is the standard deviation of the prior, the inverse of the length scale in the paper. The weight decay
of torch is :math:`2\lambda`, because its penalty is half of the squared norm. The loss is the negative log-likelihood (NLL). In the
paper, :math:`\lambda` for regression belongs to the squared error and is divided by the precision :math:`\tau` of the noise.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    device_of,
    has_row_axis,
    move,
    repeat,
    repeat_each,
    split_weighted_batch,
    take,
)
from flowbnn.convert import to_stochastic
from flowbnn.errors import quote_names, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import LossAndLogs, NetworkFunction, hold_out, negative_log_likelihood
from flowbnn.methods.network_layers import (
    disable_nested_tensors,
    dropout_layers,
    layers_with_inner_dropout,
)
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import WEIGHT_SCHEDULE
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_unverified
from flowbnn.networks import check_copies, deepcopy_network, evaluation_mode, record_calls
from flowbnn.noise import Dropout
from flowbnn.noise.layout import wrappable_layers
from flowbnn.numerics import constant
from flowbnn.options import Count, Probability, SampleCount, accepts_options_of, checked, options
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.prediction import new_seed
from flowbnn.posterior.trace import try_call
from flowbnn.posterior.weights import generator_of
from flowbnn.regression import fit_noise_scale, widen_noise_scale
from flowbnn.training import Clock, History


@register_method
@options(repr=False)
class MCDropout(Method):
    r"""Monte Carlo dropout: dropout that stays on at prediction.

    A network with dropout layers keeps them on. Other networks get dropout before their layers. In both cases all inputs share the
    masks of a sample, so that a sample is one network. Dropout inside torch's attention and recurrent layers, and of functions
    (``F.dropout``), is not sampled. A warning names such layers if they can be detected.

    The fixed rate determines the spread of the networks, which may be too wide for a precise regression. A warning is raised in this
    case. Use a smaller rate or :class:`~flowbnn.Temperature`.

    Args:
        rate: Dropout rate. If it is set, dropout is added even to a network with dropout layers. Networks without dropout layers get
            0.1 by default.
        layers: Glob of the layers before which dropout is added. By default, all layers except the first, which reads the data.
        prior_scale: Standard deviation :math:`\sigma` of the prior, which gives a weight decay of :math:`(1 - p) / \sigma^2 N`.
        repeats: Number of copies of each example in a batch, each with a mask of its own. It reduces the variance of the gradient, at
            ``repeats`` times the cost of a step (Nado et al. 2021, https://arxiv.org/abs/2106.04015).

    >>> import torch
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))
    >>> MCDropout(epochs=2).fit(network, loader, progress=False)
    DropoutPosterior(Sequential, Categorical(), 2 epochs)
    """

    rate: Probability | None = None
    layers: str | None = field(default=None, kw_only=True)
    repeats: Count = field(default=1, kw_only=True)

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> Posterior:
        """Fits the posterior; see :meth:`Method.fit`. With ``epochs=0``, dropout of a trained network is switched on."""
        model, loader, options = self.setup(network, loader, kwargs)
        rates = [layer.p for layer in dropout_layers(model)]
        if rates and self.rate is None and self.layers is None:
            weight_decay = self._weight_decay(sum(rates) / len(rates), loader, options)
            return self._fit_own_dropout(model, loader, options, weight_decay)
        if self.rate is None and self.layers is None:
            warn_unsampled(layers_with_inner_dropout(model))
        rate = 0.1 if self.rate is None else self.rate
        if not self.trains:
            likelihood = self.fit_point(deepcopy_network(model), loader, options).likelihood
            posterior = NoisePosterior(self._add_dropout(model, rate).eval(), likelihood)
            fit_noise_scale(posterior, loader, options.seed)
            return posterior
        settings = {name: getattr(self, name) for name in ("epochs", "optimizer", "schedule", "repeats")}
        if self.epochs is None:
            settings["schedule"] = self.schedule or WEIGHT_SCHEDULE
        settings["weight_decay"] = self._weight_decay(rate, loader, options)
        fit_options = NoiseFitOptions(weight_lr=self.lr, **settings, **kwargs)
        return fit_unverified(self._add_dropout(model, rate), loader, fit_options)

    def _loss(self, model: nn.Module) -> Callable[..., LossAndLogs]:
        """Returns the loss of :meth:`fit_point`, with ``repeats`` copies of each example."""
        if self.repeats == 1:
            return negative_log_likelihood

        def loss(likelihood: Likelihood, forward: NetworkFunction, batch: Any, clock: Clock) -> LossAndLogs:
            copies = repeat_each(split_weighted_batch(batch), self.repeats)
            return negative_log_likelihood(likelihood, forward, copies, clock)

        return loss

    def _weight_decay(self, rate: float, loader: Iterable[Any], options: FitOptions) -> float:
        return (1.0 - rate) / (self.prior_scale**2 * options.num_examples(loader))

    def _add_dropout(self, model: nn.Module, rate: float) -> nn.Module:
        """Adds dropout before layers of a network, in place."""
        names = list(wrappable_layers(model))
        patterns = [self.layers] if self.layers is not None else names[1:] or names or ["*"]
        return to_stochastic(model, {name: Dropout(rate) for name in patterns}, inplace=True)

    def _fit_own_dropout(
        self, model: nn.Module, loader: Iterable[Any], options: FitOptions, weight_decay: float
    ) -> "DropoutPosterior":
        """Trains a network with dropout layers."""
        prepared = prepare(disable_nested_tensors(model), loader, options, self.trains)
        if self.trains and self.epochs is None:
            loader, options = hold_out(loader, options)
        point = self.fit_point(model, loader, options, weight_decay, prepared)
        axes = example_axes(model, move(prepared.inputs, device_of(model)))
        uncalled = [name for name, calls in axes.items() if not calls]
        warn_unsampled([*layers_with_inner_dropout(model), *uncalled])
        posterior = DropoutPosterior(model, point.likelihood, point.history, axes)
        fit_noise_scale(posterior, loader, options.seed)
        widen_noise_scale(posterior, options.validation_loader)
        return posterior


def warn_unsampled(layers: Iterable[str]) -> None:
    """Warns if the dropout of some layers is not sampled in predictions."""
    if names := list(layers):
        text = f"dropout of {quote_names(names, 3)} is not sampled in predictions; only dropout layers that the network calls are"
        warn(text, kind="dropout", layers=names)


class DropoutPosterior(Posterior):
    """Posterior of a network whose dropout layers stay on. All inputs share the masks of a sample.

    Args:
        model: Network with dropout layers.
        likelihood: Likelihood of the targets.
        history: Training history.
        axes: Axis of the examples at each call of each dropout layer, from :func:`example_axes`. By default, it is determined at the
            first prediction.
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
        """Returns the outputs of the network with the masks of each sample."""
        if self.axes is None:
            self.axes = example_axes(prediction.clone, move(inputs, prediction.device, prediction.dtype))
        masks = prediction.state.get("masks", lambda: DropoutMasks(prediction.clone, self.axes or {}))

        def networks() -> Iterator[Callable[[Any], Tensor]]:
            for index in samples:
                masks.select(prediction.seed, index, None if prediction.shared else prediction.batch_index)
                yield partial(call, prediction.clone)

        with masks:
            return prediction.run(inputs, networks(), len(samples))

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns copies of the network with fixed masks, those of a prediction with this seed."""
        check_copies(self.model, samples)
        seed, networks = new_seed() if seed is None else seed, []
        for index in range(samples):
            network = deepcopy_network(self.model).eval()
            masks = DropoutMasks(network, self.axes or {})
            masks.select(seed, index)
            masks.__enter__()
            for layer in dropout_layers(network):
                layer.p = 0.0  # the masks replace torch's dropout in training mode, too
            networks.append(network)
        return networks

    def settings(self) -> dict[str, Any]:
        return {"axes": self.axes}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        return cls(point.model, point.likelihood, point.history, settings["axes"])


# -------------------- masks that all inputs of a sample share


def example_axes(model: nn.Module, inputs: Any) -> dict[str, list[int | None]]:
    """Returns the axis of the examples at each call of each dropout layer: the axis that grows with the batch.

    It is None at a call without such an axis. A layer that is never called has an empty list. The dictionary is empty if the network
    fails on two or three copies of the first example.
    """
    modules = {id(layer) for layer in dropout_layers(model)}
    layers = {name: module for name, module in model.named_modules() if id(module) in modules}
    shapes: list[dict[str, list[torch.Size]]] = []
    for size in (2, 3):
        with record_calls(layers) as calls, evaluation_mode(model):
            if not has_row_axis(inputs) or isinstance(
                try_call(partial(call, model, repeat(take(inputs, 0, 1), size))), Exception
            ):
                return {}
        shapes.append(
            {
                name: [layer_call.inputs.shape for layer_call in calls if layer_call.name == name]
                for name in layers
            }
        )
    return {
        name: [_growing_axis(*pair) for pair in zip(shapes[0][name], shapes[1][name], strict=False)]
        for name in layers
    }


def _growing_axis(two: torch.Size, three: torch.Size) -> int | None:
    """Returns the first axis whose size grows with the number of examples, from the shapes for two and for three examples."""
    axes = (axis for axis, (a, b) in enumerate(zip(two, three, strict=False)) if a * 3 == b * 2)
    return next(axes, None)


class MaskedDropout:
    """Forward hook that applies the masks of one sample to a dropout layer. A mask is drawn at the first input of its size.

    In evaluation mode the layer itself changes nothing. The hook also disables the fast path of torch's transformer layers, which calls
    no dropout layer.

    Args:
        layer: Dropout layer.
        axes: Axis of the examples at each call in a forward pass. The first axis by default.
    """

    def __init__(self, layer: Any, axes: Sequence[int | None]) -> None:
        self.rate, self.axes = float(layer.p), axes
        self.alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
        types = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        self.map_axes = next((axes for axes, kind in enumerate(types, start=1) if isinstance(layer, kind)), 0)
        self.drops_features = isinstance(layer, nn.FeatureAlphaDropout)
        self.seed = 0
        self.generator: torch.Generator | None = None  # set if every example has its own mask
        self.masks: dict[Any, Tensor] = {}

    def __call__(self, layer: nn.Module | None, args: Any, x: Tensor) -> Tensor:
        number, axis = self.next_call()
        shape = list(x.shape)
        if axis is not None and self.generator is None:
            shape[axis] = 1
        for shared in range(2, x.ndim) if self.drops_features else range(x.ndim - self.map_axes, x.ndim):
            shape[shared] = 1
        return self.apply_mask(x, self._mask(number, tuple(shape), x))

    def next_call(self) -> tuple[int, int | None]:
        """Counts a call in the forward pass. Returns the number of earlier calls and the axis of the examples."""
        number = _call_counts.counts.get(self, 0)
        _call_counts.counts[self] = number + 1
        return number, self.axes[number] if number < len(self.axes) else 0

    def apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns a tensor without the entries where the mask is zero, scaled as in training."""
        keep = max(1.0 - self.rate, 1e-9)
        if not self.alpha:
            return x * (mask / keep)
        limit = -1.7580993408473766  # limit of SELU, which alpha dropout uses instead of dropped values
        scale = (keep * (1.0 + self.rate * limit**2)) ** -0.5
        return scale * (x * mask + limit * (1.0 - mask)) - scale * limit * self.rate

    def _mask(self, number: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
        """Returns the mask for a call, by its number in the forward pass."""
        if self.generator is not None:
            return (torch.rand(shape, generator=self.generator) >= self.rate).to(x)
        key = (number, shape, x.dtype, x.device)
        if key in self.masks:
            return self.masks[key]
        generator = torch.Generator().manual_seed((self.seed * 10_007 + number) % 2**63)
        mask = constant(lambda: (torch.rand(shape, generator=generator) >= self.rate).to(x))
        if not torch.compiler.is_exporting():
            self.masks[key] = mask
        return mask


class DropoutMasks:
    """Context manager that applies masks to all dropout layers of a network.

    Args:
        model: Network with dropout layers.
        axes: Axes of the examples, from :func:`example_axes`.
    """

    def __init__(self, model: nn.Module, axes: Mapping[str, list[int | None]]) -> None:
        modules = {id(layer) for layer in dropout_layers(model)}
        self.model, self.stack = model, ExitStack()
        self.layers = {
            module: MaskedDropout(module, axes.get(name, []))
            for name, module in model.named_modules()
            if id(module) in modules
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            reset = partial(_reset_call_counts, list(self.layers.values()))
            stack.enter_context(self.model.register_forward_pre_hook(reset))
            for layer, masked in self.layers.items():
                stack.enter_context(layer.register_forward_hook(masked))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def select(self, seed: int, index: int, batch: int | None = None) -> None:
        """Selects the masks of a sample.

        Args:
            seed: Seed of the prediction.
            index: Index of the sample.
            batch: Index of the batch, if every example has its own mask.
        """
        first = generator_of(seed, index).initial_seed()
        for number, masked in enumerate(self.layers.values()):
            masked.seed, masked.masks = first * 10_007 + number, {}
            if batch is not None:
                masked.generator = torch.Generator().manual_seed((masked.seed * 10_007 + batch) % 2**63)


def _reset_call_counts(layers: list[MaskedDropout], model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the network that resets the call counts of a new forward pass."""
    for layer in layers:
        _call_counts.counts[layer] = 0


class _CallCounts(threading.local):
    """Number of calls of each dropout layer in the current forward pass of this thread."""

    def __init__(self) -> None:
        self.counts: WeakKeyDictionary[MaskedDropout, int] = WeakKeyDictionary()


_call_counts = _CallCounts()
