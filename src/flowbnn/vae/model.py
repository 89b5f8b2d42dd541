r"""Autoencoders and variational autoencoders.

.. math:: \log p(x) \ge E_{q(z \mid x)}\left[\log p(x \mid z) + \log p(z) - \log q(z \mid x)\right]

(Kingma and Welling 2014, https://arxiv.org/abs/1312.6114; Rezende, Mohamed and Wierstra 2014). The posterior begins with a Gaussian
that the encoder gives, and goes on with a flow that is conditioned on the encoder: :math:`z_0 \sim \mathcal N(\mu(x), \sigma(x)^2)`,
:math:`z = f(z_0; h(x))`, :math:`\log q(z \mid x) = \log q(z_0 \mid x) - \log|\det \partial f / \partial z_0|`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from flowbnn.batches import device_of, evaluation_mode
from flowbnn.density import DensityOptions, fit_density
from flowbnn.distributions import DiagonalNormal, Flow
from flowbnn.errors import FlowBNNError, nearest, pluralize
from flowbnn.flows import FlowModel, make_posterior_transform, named_flows
from flowbnn.nets.mlp import check_context
from flowbnn.numerics import full_precision, is_concrete, soft_clamp
from flowbnn.options import (
    Count,
    Ge,
    Hint,
    NonNegative,
    Seed,
    UnitInterval,
    accepts_options_of,
    call_factory,
    check,
    checked,
)
from flowbnn.training import Clock, History
from flowbnn.training.randomness import sampling_context
from flowbnn.transforms import Compose, Transform
from flowbnn.transforms.base import warn_slow_sampling
from flowbnn.vae.decoders import BernoulliDecoder, Decoder, GaussianDecoder, LogisticDecoder
from flowbnn.vae.nets import decoder_of, encoder_of

DECODERS: dict[str, type[Decoder]] = {
    "bernoulli": BernoulliDecoder,
    "gaussian": GaussianDecoder,
    "logistic": LogisticDecoder,
}
POSTERIORS = {name: name for name in named_flows()} | {"coupling": "realnvp"}


class Autoencoder(nn.Module):
    r"""An encoder and a decoder with a narrow code between them: :math:`\max \log p(x \mid z),\; z = \mu(x)`.

    It has no density; its :meth:`log_prob` is the likelihood of the reconstruction.

    Args:
        shape: of an example, such as ``(1, 28, 28)``.
        latent_dim: length of the code.
        hidden: widths of the fully connected encoder and decoder that are made unless others are given.
        encoder: a network that makes a vector of any length of each example, which it gets in the units of the decoder; a linear
            layer reads the code off it.
        net: a network that makes of codes (with the context after them) the decoder's outputs, of the shape of an example with
            ``per_number`` times as many entries on its first axis.
        decoder: what the outputs mean: ``"bernoulli"``, ``"gaussian"``, ``"logistic"``, or a :class:`~flowbnn.vae.Decoder`.
        context_dim: length of the context, such as a one-hot label, that encoder and decoder get as well.

    >>> model = Autoencoder((1, 8, 8), latent_dim=2, hidden=(16,))
    >>> model.reconstruct(torch.zeros(3, 1, 8, 8)).shape, model.encode(torch.zeros(3, 1, 8, 8)).shape
    (torch.Size([3, 1, 8, 8]), torch.Size([3, 2]))
    """

    lower_bound = False  # what it gives bounds no density
    heads = 1  # numbers that the encoder gives for each entry of the code
    history: History

    @checked
    def __init__(
        self,
        shape: Sequence[Count],
        latent_dim: Count,
        *,
        hidden: Sequence[Count] = (400, 400),
        encoder: nn.Module | None = None,
        net: nn.Module | None = None,
        decoder: Literal["bernoulli", "gaussian", "logistic"] | Decoder = "bernoulli",
        context_dim: Annotated[int, Ge(0)] = 0,
    ) -> None:
        super().__init__()
        if not shape:
            text = "an example has at least one axis, as in shape=(64,) or shape=(1, 28, 28)"
            raise FlowBNNError(text, kind="shape", argument="shape")
        self.shape, self.latent_dim, self.context_dim = tuple(shape), latent_dim, context_dim
        self.decoder = DECODERS[decoder]() if isinstance(decoder, str) else decoder
        outputs = (shape[0] * self.decoder.per_number, *shape[1:])
        self.encoder = encoder or encoder_of(shape, hidden)
        with evaluation_mode(self.encoder):
            self.features = self.encoder(torch.zeros(1, *shape, device=device_of(self.encoder))).shape[-1]
        self.code = nn.Linear(self.features + context_dim, self.heads * latent_dim)
        self.net = net or decoder_of(latent_dim + context_dim, tuple(reversed(hidden)), outputs)
        self.history = History()

    def forward(self, context: Tensor | None = None) -> "Generator":
        """The distribution of examples, given the context."""
        return Generator(self, context)

    def features_of(self, x: Tensor, context: Tensor | None) -> Tensor:
        """What the encoder says, with the context."""
        check("x", x, Tensor, type(self).__name__)
        if x.shape[1:] != self.shape:
            given = "one example: write x[None]" if x.shape == self.shape else f"shape {tuple(x.shape)}"
            text = f"{type(self).__name__} takes a batch of examples of shape {self.shape}, not {given}"
            raise FlowBNNError(text, kind="shape", argument="x")
        features = self.encoder(self.decoder.read(x.to(self.code.weight.dtype))).to(self.code.weight.dtype)
        return self._beside(features, context)

    def _beside(self, value: Tensor, context: Tensor | None) -> Tensor:
        """The value with the context after it."""
        if self.context_dim == 0 and context is None:
            return value
        return torch.cat([value, self._rows(context, len(value))], -1)

    def _rows(self, context: Tensor | None, count: int) -> Tensor:
        """The context of so many examples."""
        context = check_context(context, self.context_dim, type(self).__name__)
        if context.shape[:-1] != (count,):
            text = f"the context of {pluralize(count, 'example')} has a row for each, not the shape {tuple(context.shape)}"
            raise FlowBNNError(text, kind="shape", argument="context")
        return context

    def decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """The decoder's outputs for codes ``[B, latent_dim]``."""
        check("z", z, Tensor, type(self).__name__)
        if z.ndim != 2 or z.shape[1] != self.latent_dim:
            raise FlowBNNError(
                f"{type(self).__name__} takes codes of shape (batch, {self.latent_dim}), not {tuple(z.shape)}",
                kind="shape",
                argument="z",
            )
        return self.net(self._beside(z, context)).to(z.dtype)

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The code of each example; of a variational autoencoder, where the middle of its posterior's base goes."""
        features = self.features_of(x, context)
        with full_precision(features):
            return self.code(features)

    @property
    def capturable(self) -> bool:
        """Whether a training step decides nothing on the host, so that it may be recorded as a CUDA graph."""
        return True

    def check(self, x: Tensor) -> None:
        """Refuse data that the decoder cannot give, where they can be looked at."""
        check("x", x, Tensor, type(self).__name__)
        if is_concrete(x):
            self.decoder.check(x)

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The log-likelihood of each reconstruction, ``[B]``."""
        self.check(x)
        return self._fidelity(x, context)

    def _fidelity(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self.decoder.log_prob(self.decode(self.encode(x, context), context), x)

    def training_loss(
        self, x: Tensor, context: Tensor | None, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What :func:`fit_autoencoder` minimises, and what is recorded."""
        value = self._fidelity(x, context).mean()
        return -value, {"reconstruction": value.detach()}

    @torch.no_grad()
    def reconstruct(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The mean of the decoder at the code of each example."""
        with evaluation_mode(self):
            return self.decoder.mean(self.decode(self.encode(x, context), context))

    @checked
    @torch.no_grad()
    def interpolate(
        self, first: Tensor, second: Tensor, steps: Annotated[int, Ge(2)] = 8, context: Tensor | None = None
    ) -> Tensor:
        """From each example of one batch to that of another along a line between their codes, ``[steps, B, ...]``."""
        if first.shape != second.shape:
            text = f"both batches have as many examples, not shapes {tuple(first.shape)} and {tuple(second.shape)}"
            raise FlowBNNError(text, kind="shape", argument="second")
        with evaluation_mode(self):
            ends = self.encode(first, context), self.encode(second, context)
            weights = torch.linspace(0.0, 1.0, steps, device=ends[0].device)
            return torch.stack(
                [self.decoder.mean(self.decode(torch.lerp(*ends, weight), context)) for weight in weights]
            )

    def draw(self, count: int, context: Tensor | None = None) -> Tensor:
        raise FlowBNNError(
            "a plain autoencoder has no distribution of codes to sample from; use VAE", kind="unsupported"
        )

    @checked
    def sample(
        self, count: Count, context: Tensor | None = None, seed: Seed | None = None, mean: bool = False
    ) -> Tensor:
        """New examples ``[count, ...]``: a code from the prior, and the decoder's draw, or its ``mean``, from that.

        A context has a row for each of them.
        """
        if context is not None:
            self._rows(context, count)
        with evaluation_mode(self), sampling_context(device_of(self), seed):
            outputs = self.decode(self.draw(count, context), context)
            return self.decoder.mean(outputs) if mean else self.decoder.sample(outputs)


class VAE(Autoencoder):
    r"""A variational autoencoder, whose posterior and prior may be flows.

    Args:
        posterior: ``"gaussian"``, or a flow after that Gaussian, conditioned on the encoder: ``"planar"``, ``"radial"``,
            ``"sylvester"``, ``"householder"``, ``"iaf"``, ``"coupling"``, ``"nsf"``, or another of :mod:`flowbnn.flows`, in small
            letters; or a function of ``(dim, context_dim)`` that gives a transform.
        length: of the flow, in layers.
        prior: a flow of codes, which is trained along; standard normal unless given.
        beta: the weight of the KL; 0 leaves reconstruction alone (Higgins et al. 2017 have it above 1).
        reconstruction: the weight of the reconstruction.
        warmup: the share of the training over which the KL's weight grows from zero, so that the code does not die early.
        more: as in :class:`Autoencoder`.

    >>> vae = VAE((1, 8, 8), latent_dim=2, hidden=(16,), posterior="planar", length=3)
    >>> vae.log_prob(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3])
    """

    lower_bound = True
    heads = 2

    @checked
    @accepts_options_of(Autoencoder)
    def __init__(
        self,
        shape: Sequence[Count],
        latent_dim: Count,
        *,
        posterior: str | Callable[[int, int], Transform] = "gaussian",
        length: Count = 4,
        prior: Annotated[FlowModel | None, Hint("such as fb.flows.NSF(latent_dim)")] = None,
        beta: NonNegative = 1.0,
        reconstruction: NonNegative = 1.0,
        warmup: UnitInterval = 0.0,
        **more: Any,
    ) -> None:
        super().__init__(shape, latent_dim, **more)
        self.beta, self.reconstruction, self.warmup = beta, reconstruction, warmup
        self.prior = prior
        if prior is not None:
            size, numbers = tuple(prior.transform.forward_shape([prior.base.dim])), prior.base.value_kind
            if size != (latent_dim,) or numbers != "real numbers":
                text = (
                    f"the prior of codes is a flow of ({latent_dim},) real numbers, not of {size} {numbers}"
                )
                raise FlowBNNError(text, kind="shape", argument="prior")
        context = self.features + self.context_dim
        if callable(posterior):
            self.flow: Transform = call_factory(
                posterior, latent_dim, context, name="posterior", kind=Transform
            )
        elif posterior in POSTERIORS:
            self.flow = make_posterior_transform(POSTERIORS[posterior], latent_dim, context, length=length)
        elif posterior == "gaussian":
            self.flow = Compose()
        else:
            raise FlowBNNError(
                f"there is no posterior {posterior!r}{nearest(posterior, ['gaussian', *POSTERIORS])}",
                argument="posterior",
            )
        warn_slow_sampling(self.flow, "the posterior of VAE")

    def posterior(self, x: Tensor, context: Tensor | None = None) -> Flow:
        r"""The distribution :math:`q(z \mid x)` of each example's code."""
        features = self.features_of(x, context)
        with full_precision(features):
            loc, raw = self.code(features).chunk(2, -1)
        return Flow(DiagonalNormal(loc, soft_clamp(raw, 8.0).exp()), self.flow, features)

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.posterior(x, context)
        with full_precision(q.base.loc):
            return self.flow(q.base.loc, q.context)[0]

    @property
    def capturable(self) -> bool:
        settled = self.flow.solver in ("none", "inverse") and self.flow.log_det_kind == "exact"
        return settled and (self.prior is None or self.prior.capturable)

    def prior_log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """The log-density of codes."""
        if self.prior is None:
            return -0.5 * (z.square() + math.log(2.0 * math.pi)).sum(-1)
        return self.prior(context if self.prior.context_dim else None).log_prob(z)

    def terms(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r""":math:`\log p(x \mid z)` and :math:`\log q(z \mid x) - \log p(z)` for one draw of :math:`z` each, ``[B]``.

        Where posterior and prior are Gaussians the second is their KL in closed form.
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
        """The ELBO of each example, of one draw: a lower bound on the log-density."""
        self.check(x)
        likelihood, kl = self.terms(x, context)
        return likelihood - kl

    def training_loss(
        self, x: Tensor, context: Tensor | None, clock: Clock
    ) -> tuple[Tensor, dict[str, Tensor]]:
        likelihood, kl = (term.mean() for term in self.terms(x, context))
        weight: float | Tensor = self.beta
        if self.warmup:  # by a tensor where the step is recorded
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
        r"""The log-likelihood of each example by importance sampling, a bound that tightens with ``samples`` (Burda et al. 2016).

        .. math:: \log \frac1S \sum_s \frac{p(x \mid z_s)\, p(z_s)}{q(z_s \mid x)}, \qquad z_s \sim q(z \mid x)

        Args:
            rows: examples times samples that are evaluated at a time; another number draws other samples from the same seed.
        """
        device = device_of(self)
        self.check(x)
        found = [torch.zeros(0, dtype=self.code.weight.dtype)]
        with evaluation_mode(self), sampling_context(device, seed):
            for start in range(0, len(x), rows):
                part = x[start : start + rows].to(device)
                beside = None if context is None else context[start : start + rows].to(device)
                found.append(self._weighted(part, beside, samples, max(1, rows // len(part))).cpu())
        return torch.cat(found)

    def _weighted(self, x: Tensor, context: Tensor | None, samples: int, together: int) -> Tensor:
        q = self.posterior(x, context)
        total = torch.full_like(q.base.loc[:, 0], -torch.inf)
        for first in range(0, samples, together):
            count = min(together, samples - first)
            z, log_q = (part.flatten(0, 1) for part in q.rsample_and_log_prob((count,)))
            wide = x.repeat(count, *(1,) * (x.ndim - 1))
            beside = None if context is None else context.repeat(count, 1)
            likelihood = self.decoder.log_prob(self.decode(z, beside), wide)
            weights = likelihood + self.prior_log_prob(z, beside) - log_q
            total = torch.logaddexp(total, weights.reshape(count, len(x)).logsumexp(0))
        return total - math.log(samples)

    def draw(self, count: int, context: Tensor | None = None) -> Tensor:
        """So many codes from the prior."""
        if self.prior is None:
            return torch.randn(count, self.latent_dim, device=device_of(self), dtype=self.code.weight.dtype)
        if self.prior.context_dim and context is not None:
            return self.prior(context).sample()
        return self.prior().sample((count,))


@dataclass(frozen=True)
class Generator:
    """An autoencoder with its context, as a distribution of examples."""

    support = constraints.dependent  # as the decoder has it
    model: Autoencoder
    context: Tensor | None = None

    def log_prob(self, x: Tensor) -> Tensor:
        """As :meth:`Autoencoder.log_prob`."""
        return self.model.log_prob(x, self.context)

    def sample(self, sample_shape: Any = (1,)) -> Tensor:
        """So many examples, ``[*sample_shape, ...]``; with a context, so many for each of its rows."""
        shape, context = torch.Size(sample_shape), self.context
        if context is not None:
            shape = shape + context.shape[:-1]
            context = context.expand(*shape, context.shape[-1]).reshape(shape.numel(), context.shape[-1])
        drawn = self.model.sample(shape.numel(), context)
        return drawn.reshape(*shape, *drawn.shape[1:])


@checked
@accepts_options_of(DensityOptions)
def fit_autoencoder(
    model: Autoencoder,
    data: Any,
    *,
    standardize: Literal[False] = False,
    objective: Literal["likelihood"] = "likelihood",
    **given: Any,
) -> Any:
    """Train a copy of an autoencoder; its record is its ``history``.

    Args:
        model: an :class:`Autoencoder` or a :class:`VAE`.
        data: a tensor of examples, or a loader, as in :func:`~flowbnn.fit_density`.
        standardize, objective: as they are: examples keep the units of the decoder, and the model has a loss of its own.
        given: as in :class:`~flowbnn.density.DensityOptions`: ``validation``, ``epochs``, ``lr``, ``seed``, ``checkpoint``,
            ``resume`` and the rest.
    """
    density = fit_density(model, data, standardize=standardize, objective=objective, **given)
    trained: Any = density.flow
    trained.history = density.history
    return trained
