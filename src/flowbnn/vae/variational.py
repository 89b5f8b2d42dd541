r"""Variational autoencoders.

.. math:: \log p(x) \ge E_{q(z \mid x)}\left[\log p(x \mid z) + \log p(z) - \log q(z \mid x)\right]

(Kingma and Welling 2014, https://arxiv.org/abs/1312.6114; Rezende, Mohamed and Wierstra 2014). The posterior is a Gaussian that the
encoder predicts, followed by a flow conditioned on the features of the encoder: :math:`z_0 \sim \mathcal N(\mu(x), \sigma(x)^2)`,
:math:`z = f(z_0; h(x))`, :math:`\log q(z \mid x) = \log q(z_0 \mid x) - \log|\det \partial f / \partial z_0|`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from flowbnn.batches import device_of
from flowbnn.distributions import DiagonalNormal, Flow
from flowbnn.errors import FlowBNNError, check_shape, nearest
from flowbnn.flows import FlowModel, make_posterior_transform, named_flows
from flowbnn.networks import evaluation_mode
from flowbnn.numerics import full_precision, soft_clamp
from flowbnn.options import (
    Count,
    Depth,
    Hint,
    NonNegative,
    Seed,
    UnitInterval,
    accepts_options_of,
    call_factory,
    checked,
)
from flowbnn.training import Clock
from flowbnn.training.randomness import sampling_context
from flowbnn.transforms import Compose, Transform
from flowbnn.transforms.base import warn_slow_sampling
from flowbnn.vae.autoencoder import Autoencoder, takes_arrays


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

    @takes_arrays
    def posterior(self, x: Tensor, context: Tensor | None = None) -> Flow:
        r"""Returns the distribution :math:`q(z \mid x)` of the code of each example."""
        features = self.extract_features(x, context)
        with full_precision(features):
            loc, raw = self.code(features).chunk(2, -1)
        return Flow(DiagonalNormal(loc, soft_clamp(raw, 8.0).exp()), self.flow, features)

    @takes_arrays
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

    @takes_arrays
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

    @takes_arrays
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
        check_shape("x", x, ("batch", *self.shape), owner=type(self).__name__)
        if context is not None:
            self._check_rows(context, len(x))
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
