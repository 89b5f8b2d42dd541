"""Autoencoders: a network that maps examples to codes and back, its training and its files."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from flowbnn import plots
from flowbnn.batches import as_tensor, device_of, dtype_of, is_array
from flowbnn.density import DensityOptions, fit_density
from flowbnn.errors import FlowBNNError, check_shape
from flowbnn.memory import check_memory
from flowbnn.nets.mlp import check_context
from flowbnn.networks import evaluation_mode
from flowbnn.numerics import full_precision, is_concrete
from flowbnn.options import Count, Dim, File, Ge, Hint, NonEmpty, Seed, accepts_options_of, check, checked
from flowbnn.training import Clock, History
from flowbnn.training.compatibility import count_weights, read_module, save_module
from flowbnn.training.randomness import sampling_context
from flowbnn.training.storage import TensorFile
from flowbnn.vae.decoders import BernoulliDecoder, Decoder, GaussianDecoder, LogisticDecoder
from flowbnn.vae.nets import make_mlp_decoder, make_mlp_encoder

Shape = Annotated[Sequence[Count], NonEmpty(), Hint("such as (64,) or (1, 28, 28)")]


def takes_arrays(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a method of examples, which also takes arrays (numpy, pandas) and lists. Their results have no gradients."""

    @wraps(method)
    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor) or not is_array(x):
            return method(self, x, *args, **kwargs)
        with torch.no_grad():
            return method(self, as_tensor(x).to(device_of(self), dtype_of(self)), *args, **kwargs)

    call.__annotations__ = {**method.__annotations__, "x": Any}
    return call


class Autoencoder(nn.Module):
    r"""Autoencoder: an encoder and a decoder with a low-dimensional code between them, :math:`\max \log p(x \mid z),\; z = \mu(x)`.

    It has no density. Its :meth:`log_prob` is the log-likelihood of the reconstruction.

    Args:
        shape: Shape of an example, such as ``(1, 28, 28)``.
        latent_dim: Length of the code.
        hidden: Widths of the hidden layers of the default encoder and decoder, which are fully connected.
        encoder: Network that maps examples to feature vectors of any length. A linear layer computes the code from the features.
        decoder_net: Network that maps codes, concatenated with the context, to the outputs that ``decoder`` needs. The outputs have the
            shape of an example, with ``outputs_per_number`` times as many entries on the first axis.
        decoder: Distribution of examples given the outputs: ``"bernoulli"``, ``"gaussian"``, ``"logistic"``, or a
            :class:`~flowbnn.vae.Decoder`.
        context_dim: Length of the context, such as a one-hot label, that encoder and decoder also read.

    >>> model = Autoencoder((1, 8, 8), latent_dim=2, hidden=(16,))
    >>> model.reconstruct(torch.zeros(3, 1, 8, 8)).shape, model.encode(torch.zeros(3, 1, 8, 8)).shape
    (torch.Size([3, 1, 8, 8]), torch.Size([3, 2]))
    """

    lower_bound = False  # an autoencoder has no density
    outputs_per_code = 1  # numbers that the encoder predicts for each entry of the code
    history: History

    @checked
    def __init__(
        self,
        shape: Shape,
        latent_dim: Dim,
        *,
        hidden: Sequence[Dim] = (400, 400),
        encoder: nn.Module | None = None,
        decoder_net: nn.Module | None = None,
        decoder: Literal["bernoulli", "gaussian", "logistic"] | Decoder = "bernoulli",
        context_dim: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__()
        self.shape, self.latent_dim, self.context_dim = tuple(shape), latent_dim, context_dim
        decoders = {"bernoulli": BernoulliDecoder, "gaussian": GaussianDecoder, "logistic": LogisticDecoder}
        self.decoder: Decoder = decoders[decoder]() if isinstance(decoder, str) else decoder
        outputs = (shape[0] * self.decoder.outputs_per_number, *shape[1:])
        self.encoder = encoder or make_mlp_encoder(shape, hidden)
        with evaluation_mode(self.encoder):
            self.features = self.encoder(torch.zeros(1, *shape, device=device_of(self.encoder))).shape[-1]
        self.code = nn.Linear(self.features + context_dim, self.outputs_per_code * latent_dim)
        self.decoder_net = decoder_net or make_mlp_decoder(
            latent_dim + context_dim, tuple(reversed(hidden)), outputs
        )
        self.history = History()

    def forward(self, context: Tensor | None = None) -> "ExampleDistribution":
        """Returns the distribution of examples given the context."""
        return ExampleDistribution(self, context)

    def extract_features(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Returns the features of the encoder, concatenated with the context."""
        check("x", x, Tensor, type(self).__name__)
        hint = "use x[None] for one example" if x.shape == self.shape else ""
        check_shape("x", x, ("batch", *self.shape), hint, owner=type(self).__name__)
        features = self.encoder(self.decoder.encoder_input(x.to(self.code.weight.dtype))).to(
            self.code.weight.dtype
        )
        return self._append_context(features, context)

    def _append_context(self, value: Tensor, context: Tensor | None) -> Tensor:
        """Returns a value with the context appended."""
        if self.context_dim == 0 and context is None:
            return value
        return torch.cat([value, self._check_rows(context, len(value))], -1)

    def _check_rows(self, context: Tensor | None, count: int) -> Tensor:
        """Returns the context if it has one row for each of ``count`` examples."""
        context = check_context(context, self.context_dim, type(self).__name__)
        check_shape("context", context, (count, self.context_dim), owner=type(self).__name__)
        return context

    def decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the outputs of the decoder network for codes ``[B, latent_dim]``."""
        check("z", z, Tensor, type(self).__name__)
        check_shape("z", z, ("batch", self.latent_dim), owner=type(self).__name__)
        codes = z.to(self.code.weight.dtype)
        return self.decoder_net(self._append_context(codes, context)).to(z.dtype)

    @takes_arrays
    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the code of each example. For a variational autoencoder it is the image of the mean of the base under the flow."""
        features = self.extract_features(x, context)
        with full_precision(features):
            return self.code(features)

    @property
    def capturable(self) -> bool:
        """True if a training step has no control flow on the host, so that it can be recorded as a CUDA graph."""
        return True

    def check(self, x: Tensor) -> None:
        """Raises FlowBNNError if examples lie outside the support of the decoder. Does nothing while torch traces the call."""
        check("x", x, Tensor, type(self).__name__)
        if is_concrete(x):
            self.decoder.check(x)

    @takes_arrays
    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the log-likelihood of the reconstruction of each example, ``[B]``."""
        self.check(x)
        return self._reconstruction_log_prob(x, context)

    def _reconstruction_log_prob(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Returns the log-likelihoods without a check of the examples."""
        return self.decoder.log_prob(self.decode(self.encode(x, context), context), x)

    def training_loss(
        self, x: Tensor, context: Tensor | None, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss that :func:`fit_autoencoder` minimizes, and the values to log."""
        value = self._reconstruction_log_prob(x, context).mean()
        return -value, {"reconstruction": value.detach()}

    @takes_arrays
    @torch.no_grad()
    def reconstruct(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the mean of the decoder at the code of each example."""
        with evaluation_mode(self):
            return self.decoder.mean(self.decode(self.encode(x, context), context))

    @checked
    @torch.no_grad()
    def interpolate(
        self, first: Tensor, second: Tensor, steps: Annotated[int, Ge(2)] = 8, context: Tensor | None = None
    ) -> Tensor:
        """Decodes points on the lines between the codes of two batches.

        Args:
            first: Examples at the beginning of each line, ``[B, ...]``.
            second: Examples at the end of each line, ``[B, ...]``.
            steps: Number of points on each line, ends included.
            context: Contexts of both batches, or None.

        Returns:
            Means of the decoder, ``[steps, B, ...]``.
        """
        check_shape("second", second, first.shape)
        with evaluation_mode(self):
            ends = self.encode(first, context), self.encode(second, context)
            weights = torch.linspace(0.0, 1.0, steps, device=ends[0].device)
            return torch.stack(
                [self.decoder.mean(self.decode(torch.lerp(*ends, weight), context)) for weight in weights]
            )

    plot_reconstructions, plot_samples = plots.plot_reconstructions, plots.plot_samples
    plot_history = plots.plot_history

    @checked
    def save(self, path: File) -> Path:
        """Writes the weights and the history to one safetensors file, atomically. :func:`load_autoencoder` reads it."""
        return save_module(path, self, "autoencoder", self.history)

    def sample_codes(self, count: int, context: Tensor | None = None) -> Tensor:
        """Draws codes from the prior. An autoencoder has none and raises FlowBNNError."""
        raise FlowBNNError("Autoencoder has no prior; use VAE", kind="unsupported")

    @checked
    def sample(
        self, count: Count, context: Tensor | None = None, seed: Seed | None = None, mean: bool = False
    ) -> Tensor:
        """Draws new examples: codes from the prior, then examples from the decoder.

        Args:
            count: Number of examples.
            context: Contexts, one row for each example, or None.
            seed: Seed of the draws. None draws from the global generator of torch.
            mean: Returns the means of the decoder instead of draws from it.

        Returns:
            Examples, ``[count, ...]``.
        """
        if context is not None:
            self._check_rows(context, count)
        check_memory("count", count, 8 * count * math.prod(self.shape), device_of(self))
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            outputs = self.decode(self.sample_codes(count, context), context)
            return self.decoder.mean(outputs) if mean else self.decoder.sample(outputs)


@dataclass(frozen=True)
class ExampleDistribution:
    """Distribution of examples that an autoencoder defines for a context.

    Args:
        model: Autoencoder.
        context: Contexts, or None.
    """

    support = constraints.dependent  # it is that of the decoder
    model: Autoencoder
    context: Tensor | None = None

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the contexts, without their last axis."""
        return torch.Size() if self.context is None else self.context.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        """Shape of an example."""
        return torch.Size(self.model.shape)

    def log_prob(self, x: Tensor) -> Tensor:
        """Returns the result of :meth:`Autoencoder.log_prob`."""
        return self.model.log_prob(x, self.context)

    def sample(self, sample_shape: Any = (1,)) -> Tensor:
        """Draws examples, ``[*sample_shape, ...]``. With a context, as many for each of its rows."""
        shape, context = torch.Size(sample_shape), self.context
        if context is not None:
            shape = shape + context.shape[:-1]
            context = context.expand(*shape, context.shape[-1]).reshape(shape.numel(), context.shape[-1])
        draws = self.model.sample(shape.numel(), context)
        return draws.reshape(*shape, *draws.shape[1:])


@checked
@accepts_options_of(DensityOptions)
def fit_autoencoder(
    model: Autoencoder,
    data: Any,
    *,
    standardize: Literal[False] = False,
    objective: Literal["likelihood"] = "likelihood",
    **kwargs: Any,
) -> Any:
    """Trains a copy of an autoencoder.

    Args:
        model: :class:`Autoencoder` or :class:`VAE`.
        data: Tensor of examples, or a loader, as in :func:`~flowbnn.fit_density`.
        standardize: False, because examples keep the units of the decoder.
        objective: ``"likelihood"``, because the model has its own training loss.
        kwargs: Options of :class:`~flowbnn.density.DensityOptions`, such as ``validation``, ``epochs``, ``lr``, ``seed``,
            ``checkpoint`` and ``resume``.

    Returns:
        The trained copy. Its attribute ``history`` holds the history of the training.
    """
    density = fit_density(model, data, standardize=standardize, objective=objective, **kwargs)
    trained: Any = density.flow
    trained.history = density.history
    return trained


@checked
def load_autoencoder(path: File, model: Autoencoder) -> Any:
    """Loads an autoencoder that :meth:`Autoencoder.save` wrote.

    Args:
        path: File to read.
        model: Autoencoder with the architecture of the saved one. It is copied.

    Returns:
        The copy with the weights and the history of the file, in evaluation mode.

    Raises:
        FlowBNNError: If the file holds no autoencoder, one of another architecture, or numbers that are not finite.

    >>> import tempfile
    >>> from flowbnn.vae import VAE
    >>> vae = VAE((1, 8, 8), latent_dim=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = load_autoencoder(vae.save(f"{folder}/vae.safetensors"), VAE((1, 8, 8), latent_dim=2, hidden=(16,)))
    >>> torch.equal(loaded.code.weight, vae.code.weight)
    True
    """
    loaded = deepcopy(model)
    loaded.history = read_module(TensorFile(path, count_weights(loaded)), loaded, "autoencoder")
    return loaded.eval()
