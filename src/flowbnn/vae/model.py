r"""Autoencoders and variational autoencoders.

.. math:: \log p(x) \ge E_{q(z \mid x)}\left[\log p(x \mid z) + \log p(z) - \log q(z \mid x)\right]

(Kingma and Welling 2014, https://arxiv.org/abs/1312.6114; Rezende, Mohamed and Wierstra 2014). The posterior is a Gaussian that the
encoder predicts, followed by a flow conditioned on the features of the encoder: :math:`z_0 \sim \mathcal N(\mu(x), \sigma(x)^2)`,
:math:`z = f(z_0; h(x))`, :math:`\log q(z \mid x) = \log q(z_0 \mid x) - \log|\det \partial f / \partial z_0|`.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from flowbnn.batches import device_of
from flowbnn.density import DensityOptions, fit_density
from flowbnn.distributions import DiagonalNormal, Flow
from flowbnn.errors import FlowBNNError, check_shape, nearest
from flowbnn.flows import FlowModel, make_posterior_transform, named_flows
from flowbnn.nets.mlp import check_context
from flowbnn.networks import evaluation_mode
from flowbnn.numerics import full_precision, is_concrete, soft_clamp
from flowbnn.options import (
    Count,
    Depth,
    File,
    Ge,
    Hint,
    NonEmpty,
    NonNegative,
    Seed,
    UnitInterval,
    accepts_options_of,
    call_factory,
    check,
    checked,
)
from flowbnn.training import Clock, History
from flowbnn.training.compatibility import count_weights, read_module, save_module
from flowbnn.training.randomness import sampling_context
from flowbnn.training.storage import TensorFile
from flowbnn.transforms import Compose, Transform
from flowbnn.transforms.base import warn_slow_sampling
from flowbnn.vae.decoders import BernoulliDecoder, Decoder, GaussianDecoder, LogisticDecoder
from flowbnn.vae.nets import make_mlp_decoder, make_mlp_encoder

Shape = Annotated[Sequence[Count], NonEmpty(), Hint("such as (64,) or (1, 28, 28)")]


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
        latent_dim: Count,
        *,
        hidden: Sequence[Count] = (400, 400),
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
        return self.decoder_net(self._append_context(z, context)).to(z.dtype)

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
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            outputs = self.decode(self.sample_codes(count, context), context)
            return self.decoder.mean(outputs) if mean else self.decoder.sample(outputs)


class VAE(Autoencoder):
    r"""Variational autoencoder, whose posterior and prior may be flows.

    Args:
        shape: Shape of an example, such as ``(1, 28, 28)``.
        latent_dim: Length of the code.
        posterior: ``"gaussian"``, or a flow after that Gaussian, conditioned on the encoder: ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"householder"``, ``"iaf"``, ``"coupling"``, ``"nsf"``, or another flow of :mod:`flowbnn.flows`, in lower
            case. Or a function of ``(dim, context_dim)`` that returns a transform.
        length: Number of layers of the flow.
        prior: Flow of codes that is trained with the rest. None is a standard normal.
        beta: Weight of the KL divergence. 0 trains the reconstruction only. Higgins et al. 2017 use more than 1.
        reconstruction: Weight of the reconstruction.
        warmup: Share of the training over which the weight of the KL divergence grows from zero, to avoid an early collapse.
        kwargs: Arguments of :class:`Autoencoder`.

    >>> vae = VAE((1, 8, 8), latent_dim=2, hidden=(16,), posterior="planar", length=3)
    >>> vae.log_prob(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3])
    """

    lower_bound = True
    outputs_per_code = 2

    @checked
    @accepts_options_of(Autoencoder)
    def __init__(
        self,
        shape: Sequence[Count],
        latent_dim: Count,
        *,
        posterior: str | Callable[[int, int], Transform] = "gaussian",
        length: Depth = 4,
        prior: Annotated[FlowModel | None, Hint("such as fb.flows.NSF(latent_dim)")] = None,
        beta: NonNegative = 1.0,
        reconstruction: NonNegative = 1.0,
        warmup: UnitInterval = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(shape, latent_dim, **kwargs)
        self.beta, self.reconstruction, self.warmup = beta, reconstruction, warmup
        self.prior = prior
        if prior is not None:
            size, numbers = tuple(prior.transform.forward_shape([prior.base.dim])), prior.base.value_kind
            if size != (latent_dim,) or numbers != "real numbers":
                text = f"prior must be a flow of ({latent_dim},) real numbers, got {size} {numbers}"
                raise FlowBNNError(text, kind="shape", argument="prior")
        context = self.features + self.context_dim
        if callable(posterior):
            self.flow: Transform = call_factory(
                posterior, latent_dim, context, name="posterior", kind=Transform
            )
        elif posterior == "gaussian":
            self.flow = Compose()
        else:
            names = {name: name for name in named_flows()} | {"coupling": "realnvp"}
            if posterior not in names:
                text = f"unknown posterior {posterior!r}{nearest(posterior, ['gaussian', *names])}"
                raise FlowBNNError(text, kind="name", argument="posterior")
            self.flow = make_posterior_transform(names[posterior], latent_dim, context, length=length)
        warn_slow_sampling(self.flow, "VAE.posterior")

    def posterior(self, x: Tensor, context: Tensor | None = None) -> Flow:
        r"""Returns the distribution :math:`q(z \mid x)` of the code of each example."""
        features = self.extract_features(x, context)
        with full_precision(features):
            loc, raw = self.code(features).chunk(2, -1)
        return Flow(DiagonalNormal(loc, soft_clamp(raw, 8.0).exp()), self.flow, features)

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.posterior(x, context)
        with full_precision(q.base.loc):
            return self.flow(q.base.loc, q.context)[0]

    @property
    def capturable(self) -> bool:
        deterministic = self.flow.solver in ("none", "inverse") and self.flow.log_det_kind == "exact"
        return deterministic and (self.prior is None or self.prior.capturable)

    def prior_log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the log-density of codes under the prior."""
        if self.prior is None:
            return -0.5 * (z.square() + math.log(2.0 * math.pi)).sum(-1)
        return self.prior(context if self.prior.context_dim else None).log_prob(z)

    def terms(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Returns :math:`\log p(x \mid z)` and :math:`\log q(z \mid x) - \log p(z)` for one draw of :math:`z` per example, ``[B]``.

        If posterior and prior are Gaussians, the second term is their KL divergence in closed form.
        """
        q = self.posterior(x, context)
        if self.prior is None and isinstance(self.flow, Compose) and not len(self.flow):
            z, scale = q.base.rsample(), q.base.scale
            kl = 0.5 * (scale.square() + q.base.loc.square() - 1.0).sum(-1) - scale.log().sum(-1)
        else:
            z, log_q = q.rsample_and_log_prob()
            kl = log_q - self.prior_log_prob(z, context)
        return self.decoder.log_prob(self.decode(z, context), x), kl

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the ELBO of each example, estimated from one draw. It is a lower bound on the log-density."""
        self.check(x)
        likelihood, kl = self.terms(x, context)
        return likelihood - kl

    def training_loss(
        self, x: Tensor, context: Tensor | None, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        likelihood, kl = (term.mean() for term in self.terms(x, context))
        weight: float | Tensor = self.beta
        if self.warmup:  # progress is a tensor while a CUDA graph is recorded
            weight = self.beta * torch.as_tensor(clock.progress / self.warmup).clamp(max=1.0)
        loss = weight * kl - self.reconstruction * likelihood
        logs = {"elbo": likelihood - kl, "reconstruction": likelihood, "kl": kl}
        return loss, {name: value.detach() for name, value in logs.items()}

    @checked
    def log_likelihood(
        self,
        x: Tensor,
        samples: Count = 1000,
        context: Tensor | None = None,
        seed: Seed = 0,
        rows: Count = 5000,
    ) -> Tensor:
        r"""Estimates the log-likelihood of each example by importance sampling (Burda et al. 2016).

        It is a lower bound that tightens with ``samples``.

        .. math:: \log \frac1S \sum_s \frac{p(x \mid z_s)\, p(z_s)}{q(z_s \mid x)}, \qquad z_s \sim q(z \mid x)

        Args:
            x: Examples.
            samples: Number of draws from the posterior for each example.
            context: Contexts, one row for each example, or None.
            seed: Seed of the draws.
            rows: Number of examples times samples that are evaluated at a time. The draws of a seed depend on it.
        """
        device = device_of(self)
        self.check(x)
        results = [torch.zeros(0, dtype=self.code.weight.dtype)]
        with evaluation_mode(self), sampling_context(device, seed):
            for start in range(0, len(x), rows):
                batch = x[start : start + rows].to(device)
                contexts = None if context is None else context[start : start + rows].to(device)
                draws_per_pass = max(1, rows // len(batch))
                results.append(self._importance_sampling(batch, contexts, samples, draws_per_pass).cpu())
        return torch.cat(results)

    def _importance_sampling(
        self, x: Tensor, context: Tensor | None, samples: int, draws_per_pass: int
    ) -> Tensor:
        """Returns the log of the mean importance weight of each example of one batch."""
        q = self.posterior(x, context)
        total = torch.full_like(q.base.loc[:, 0], -torch.inf)
        for first in range(0, samples, draws_per_pass):
            count = min(draws_per_pass, samples - first)
            z, log_q = (tensor.flatten(0, 1) for tensor in q.rsample_and_log_prob((count,)))
            examples = x.repeat(count, *(1,) * (x.ndim - 1))
            contexts = None if context is None else context.repeat(count, 1)
            likelihood = self.decoder.log_prob(self.decode(z, contexts), examples)
            weights = likelihood + self.prior_log_prob(z, contexts) - log_q
            total = torch.logaddexp(total, weights.reshape(count, len(x)).logsumexp(0))
        return total - math.log(samples)

    def sample_codes(self, count: int, context: Tensor | None = None) -> Tensor:
        """Draws codes from the prior."""
        if self.prior is None:
            return torch.randn(count, self.latent_dim, device=device_of(self), dtype=self.code.weight.dtype)
        if self.prior.context_dim and context is not None:
            return self.prior(context).sample()
        return self.prior().sample((count,))


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
    >>> vae = VAE((1, 8, 8), latent_dim=2, hidden=(16,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = load_autoencoder(vae.save(f"{folder}/vae.safetensors"), VAE((1, 8, 8), latent_dim=2, hidden=(16,)))
    >>> torch.equal(loaded.code.weight, vae.code.weight)
    True
    """
    loaded = deepcopy(model)
    loaded.history = read_module(TensorFile(path, count_weights(loaded)), loaded, "autoencoder")
    return loaded.eval()
