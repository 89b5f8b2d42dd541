r"""Modes of the noise as members of an ensemble, which share the weights of one network.

.. math:: \hat z_m = \arg\max_z \sum_i \log p(y_i \mid x_i, z) + \log \mathcal N(z; 1, s^2), \qquad z_m \sim \mathcal N(1, s^2)

Every member climbs from a prior draw of its own. With a narrow prior all may end at one mode, with a wide one each at its
own; the ensemble then costs as many numbers as its noise vectors have.
"""

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from flowbnn.batches import device_of, dtype_of, move, pick, take
from flowbnn.convert import to_stochastic
from flowbnn.distributions import Base, NormalBase
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.likelihoods import Gaussian, Likelihood, learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import first_batch, prepare
from flowbnn.methods.laplace.derivatives import check_likelihood
from flowbnn.methods.mcmc.potential import gather_data
from flowbnn.methods.variational.natural import NoisyNetwork
from flowbnn.noise import Layout, Noise, Recipe, noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import independent_vectors, join
from flowbnn.noise.modes import align_batch_axes
from flowbnn.options import Count, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.regression import set_noise_scale
from flowbnn.training import track
from flowbnn.transforms import Compose

USUAL, WIDTHS = 0.5, (0.25, 0.5, 1.0, 2.0)  # of the prior
ROWS = 4096  # in one pass, those of all members together
RATE = 0.1  # of Adam, in standard deviations of the prior
FULL = 1000  # dimensions up to which the Gaussian at a mode has a full covariance
EXACT = 32  # outputs up to which the Gauss-Newton matrix is exact; beyond, as many labels are drawn
Covariance = Literal["none", "diagonal", "full"]


@register_method
@options(repr=False)
class ModeEnsemble(Method):
    r"""Maxima of the posterior density of the noise on all layers, found by climbs from prior draws; the weights are shared.

    The network is trained for ``epochs`` by maximum a posteriori, or taken as it is with ``epochs=0``; then its weights are fixed.
    All members climb at once, by Adam with a rate that falls to zero. They count alike, however high their modes are, as those of a
    deep ensemble do; ``posterior.energy`` has the heights. Best fitted, with ``epochs=0``, on data that the weights have not seen.

    Args:
        members: how many climbs; some may end at the same mode (``posterior.distinct`` counts those that do not).
        width: ``"point"``: a member is its mode. ``"laplace"``: the Gaussian :math:`\mathcal N(\hat z_m, (G_m + s^{-2})^{-1})` around
            it, :math:`G_m` being the generalized Gauss-Newton matrix of the log-likelihood there; above 1,000 dimensions its diagonal.
        steps: of a climb; by minibatches more of them end nearer to the mode.
        batch_size: examples in a step; all where there are at most twice as many.
        side: of the layers that the noise is on, as in :class:`~flowbnn.NodeNoise`.
        layers: a glob of the layers that get noise; all that can unless given.
        prior_scale: standard deviation :math:`s` of the prior of the noise, which is around one. None: of 0.25, 0.5, 1 and 2 the one
            with the best likelihood on the validation data (``posterior.held_out``); 0.5 where there are none.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = ModeEnsemble(4, steps=20, epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior, posterior.predict(torch.zeros(1, 2)).num_samples
    (ModePosterior(4 climbs to 1 mode of the noise of Linear, Categorical()), 4)
    """

    members: Count = 16
    width: Literal["point", "laplace"] = field(default="point", kw_only=True)
    steps: Count = field(default=300, kw_only=True)
    batch_size: Count = field(default=256, kw_only=True)
    side: Literal["input", "output"] = field(default="input", kw_only=True)
    layers: str | None = field(default=None, kw_only=True)
    prior_scale: Positive | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.epochs > 0

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "ModePosterior":
        """As :meth:`Method.fit`."""
        plain, run = self.setup(network, loader, given)
        seed = run.resolve_seed()
        trial, first, check = prepare(plain, loader, run.likelihood, seed, self.epochs > 0)
        if self.width == "laplace":
            check_likelihood(trial, "sampled")
        if run.validation is not None:
            first_batch(run.validation, use="validation")
        number = run.num_examples(loader)
        data = gather_data(loader, check, seed)
        point = self.start(plain, loader, run, weight_decay=1.0 / number)
        model, likelihood = point.model.eval(), point.likelihood
        inputs, targets = move(data, device_of(model), dtype_of(model))
        climb = _Climb(self._noisy(model, first, USUAL), likelihood, inputs, targets, number, seed)
        scales: Sequence[float] = WIDTHS if run.validation is not None else (USUAL,)
        best: ModePosterior | None = None
        held_out: dict[float, float] = {}
        for scale in scales if self.prior_scale is None else (self.prior_scale,):
            shown = track(range(self.steps), f"climbing, prior {scale:g}", run.progress)
            modes, energy = climb(self.members, scale, shown, self.steps, self.batch_size)
            covariance: Covariance = "none"
            if self.width == "laplace":
                covariance = "full" if modes.shape[1] <= FULL else "diagonal"
            noisy = self._noisy(model, first, scale, covariance)
            roots = None if covariance == "none" else climb.roots(modes, scale, covariance == "full")
            level = deepcopy(likelihood)
            if learns_noise(level):
                climb.settle(level, modes)
            posterior = ModePosterior(noisy, level, point.history)
            posterior.base.assign(modes, energy, roots)
            if run.validation is not None:
                predictive, truth = posterior.predict_with_targets(run.validation, seed=0, progress=False)
                held_out[scale] = float(predictive.nll(truth).mean())
            if best is None or held_out[scale] < min(list(held_out.values())[:-1]):
                best = posterior
        assert best is not None
        best.held_out = held_out
        return best

    def _noisy(
        self, model: nn.Module, first: Any, scale: float, covariance: Covariance = "none"
    ) -> nn.Module:
        """A copy of the network with room for the modes."""
        recipe = ModeNoise(modes=self.members, covariance=covariance, prior_scale=scale, side=self.side)
        noisy = to_stochastic(model, {self.layers or "*": recipe})
        align_batch_axes(noisy, first)
        for layer in noise_layers(noisy).values():
            layer.fitted = True
        return noisy.eval()


class _Climb:
    """The log-likelihood of the data as a function of the noise, climbed from prior draws."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, inputs: Any, targets: Tensor, number: int, seed: int
    ) -> None:
        self.network = NoisyNetwork(model, likelihood)
        self.inputs, self.targets, self.number, self.seed = inputs, targets, number, seed
        self.dim = sum(self.network.sizes)

    def __call__(
        self, members: int, scale: float, steps: Iterable[int], total: int, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Modes ``[M, D]``, and their energies ``[M]``, for a prior of this width."""
        source = torch.Generator().manual_seed(self.seed)
        start = torch.randn(members, self.dim, generator=source).to(device_of(self.network.model))
        # in deviations of the prior
        away = nn.Parameter(start.to(dtype_of(self.network.model) or start.dtype))
        count, few = len(self.targets), len(self.targets) <= 2 * batch_size

        def energies(index: Tensor | None = None) -> Tensor:
            """Energies, with their gradients in ``away.grad``."""
            value, slope = self.fitted(1.0 + scale * away.detach(), index)
            away.grad = away.detach() - scale * slope
            return 0.5 * away.detach().square().sum(1, dtype=torch.float64) - value

        engine = torch.optim.Adam([away], RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine, total)
        for _ in steps:
            some = None if few else torch.randint(count, (batch_size,), generator=source)
            energies(None if some is None else some.to(self.targets.device))
            engine.step()
            schedule.step()
        if few:  # to the very top, also along ridges
            newton = torch.optim.LBFGS(
                [away],
                max_iter=total,
                tolerance_grad=1e-5,
                tolerance_change=1e-12,
                line_search_fn="strong_wolfe",
            )
            newton.step(lambda: float(energies().sum()))
        energy, modes = energies(), 1.0 + scale * away.detach()
        if not bool(torch.isfinite(energy).all()):
            raise FlowBNNError(
                f"climbs from a prior of width {scale:g} ended where the likelihood is not finite; take a smaller prior_scale",
                kind="nonfinite",
                argument="prior_scale",
            )
        return modes, energy

    def fitted(self, vectors: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``[M]`` of all the data, or as estimated from some, and their gradients in the noise ``[M, D]``."""
        data = self.inputs, self.targets
        inputs, targets = data if index is None else pick(data, index)
        value, slope = self.network.gradients(vectors, inputs, targets, ROWS)
        share = self.number / len(targets)
        return value * share, slope.to(vectors) * share

    def roots(self, modes: Tensor, scale: float, full: bool) -> Tensor:
        """Lower triangular roots ``[M, D, D]`` of the covariances, or deviations ``[M, D]``."""
        found, labels = [], torch.Generator().manual_seed(self.seed)
        for mode in modes:
            precision = torch.zeros(mode.shape * 2 if full else mode.shape).double().to(mode.device)
            for low in range(0, len(self.targets), 256):
                inputs, targets = take((self.inputs, self.targets), low, low + 256)
                each = mode.expand(len(targets), -1).clone()
                rows = self.network.derivatives(inputs, targets, each, labels, exact=EXACT)[3].double()
                precision += rows.mT @ rows if full else rows.square().sum(0)
            precision *= self.number / len(self.targets)
            if full:
                precision.diagonal().add_(1.0 / scale**2)
                inverse = torch.cholesky_inverse(torch.linalg.cholesky(precision))
                found.append(torch.linalg.cholesky(inverse))
            else:
                found.append((precision + 1.0 / scale**2).rsqrt())
        return torch.stack(found)

    @torch.no_grad()
    def settle(self, likelihood: Gaussian, modes: Tensor) -> None:
        """Let the noise level be the size of the members' residuals."""
        passes = self.network.passes(modes, self.inputs, self.targets, ROWS)
        pairs = ((self.network.outputs(inputs, noise), targets) for _, inputs, targets, noise in passes)
        set_noise_scale(likelihood, pairs)


class ModePosterior(NoisePosterior):
    """Modes of the noise, or Gaussians around them, that count alike.

    The first draws of a prediction, as many as there are modes (at most 32), are of one mode each.
    """

    kind: ClassVar[str] = "modes"
    # mean negative log-likelihood of validation data by the width of the prior, where it was given any
    held_out: dict[float, float]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held_out = {}
        self.default_samples = len(self) * (1 if self.base.root is None else 4)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "held_out": list(self.held_out.items())}

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        made = super().restored(point, state, settings)
        made.held_out = dict(settings.get("held_out", ()))
        return made

    @property
    def base(self) -> "ModeBase":
        (vector, _), *_ = independent_vectors(self.model)
        assert isinstance(vector.base, ModeBase)
        return vector.base

    @property
    def energy(self) -> Tensor:
        r""":math:`-\log p(D \mid \hat z_m) - \log p(\hat z_m)` of every member, up to a constant."""
        return self.base.energy.detach()

    @property
    def modes(self) -> dict[str, Tensor]:
        """The noise of every layer at the modes, ``{layer: [M, dim]}``."""
        (_, names), *_ = independent_vectors(self.model)
        layers = noise_layers(self.model)
        parts = self.base.loc.detach().split([layers[name].layout.dim for name in names], -1)
        return dict(zip(names, parts, strict=True))

    @property
    def distinct(self) -> int:
        """How many of the modes are different ones: apart, in some entry, by more than a tenth of the prior's standard deviation."""
        (vector, _), *_ = independent_vectors(self.model)
        places = self.base.loc.detach() / vector.prior.distribution().stddev.detach()
        return len((torch.cdist(places, places, p=torch.inf) < 0.1).int().argmax(1).unique())

    def __len__(self) -> int:
        return len(self.base.loc)

    def __repr__(self) -> str:
        found = f"{pluralize(len(self), 'climb')} to {pluralize(self.distinct, 'mode')}"
        return f"ModePosterior({found} of the noise of {type(self.model).__name__}, {self.likelihood!r})"


# -------------------- the mixture


@options
class ModeNoise(Recipe):
    """A mixture of points, or of Gaussians, over the noise of all layers at once: what :class:`ModeEnsemble` fills."""

    modes: Count = field(default=16, kw_only=True)
    covariance: Covariance = field(default="none", kw_only=True)
    joint: Literal["full"] = field(default="full", kw_only=True)

    def build_joint(self, layouts: Sequence[Layout]) -> list[Noise]:
        dim = sum(layout.dim for layout in layouts)
        base, prior = (
            ModeBase(dim, self.modes, self.covariance),
            NormalBase(dim, self.prior_loc, self.prior_scale),
        )
        return join(
            InputNoise(base, Compose(), prior, Layout(dim), kl_samples=self.kl_samples, label=str(self)),
            layouts,
        )


class ModeBase(Base):
    """The owner of the modes, their energies, and the roots of their covariances; none of them is trained."""

    def __init__(self, dim: int, modes: int, covariance: Covariance) -> None:
        super().__init__()
        self.dim = dim
        self.loc = nn.Parameter(torch.ones(modes, dim), requires_grad=False)
        self.energy = nn.Parameter(torch.zeros(modes, dtype=torch.float64), requires_grad=False)
        shape = {"none": None, "diagonal": (modes, dim), "full": (modes, dim, dim)}[covariance]
        self.root = None if shape is None else nn.Parameter(torch.zeros(shape), requires_grad=False)

    @torch.no_grad()
    def assign(self, modes: Tensor, energy: Tensor, roots: Tensor | None) -> None:
        self.loc.copy_(modes)
        self.energy.copy_(energy)
        if self.root is not None and roots is not None:
            self.root.copy_(roots)

    def distribution(self) -> "ModeMixture":
        return ModeMixture(self.loc, self.root)


class ModeMixture(Distribution):
    r"""An equal mixture of :math:`\mathcal N(\mu_k, L_k L_k^T)`, or of points; draws take every component once before one comes again.

    Args:
        loc: ``[K, D]``.
        root: lower triangular, ``[K, D, D]``; diagonals, ``[K, D]``; None: points.
    """

    has_rsample = True
    support = constraints.independent(constraints.real, 1)
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, loc: Tensor, root: Tensor | None = None) -> None:
        self.loc, self.root = loc, root
        super().__init__(torch.Size(), loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc.mean(0)

    @property
    def variance(self) -> Tensor:
        between = self.loc.var(0, correction=0)
        if self.root is None:
            return between
        own = self.root.square()
        return between + (own if own.ndim == 2 else own.sum(-1)).mean(0)

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        shape, device = torch.Size(sample_shape), self.loc.device
        number, count = shape.numel(), len(self.loc)
        orders = [
            torch.randperm(count, generator=generator, device=device) for _ in range(-(-number // count))
        ]
        which = torch.cat(orders)[:number]
        chosen = self.loc[which]
        if self.root is not None:
            normal = standard_normal(chosen.shape, chosen.dtype, device, generator)
            if self.root.ndim == 2:
                chosen = torch.addcmul(chosen, self.root[which], normal)
            else:
                for component in which.unique().tolist():  # a root for every draw would be large
                    own = which == component
                    chosen[own] += normal[own] @ self.root[component].mT
        return chosen.view(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        if self.root is None:
            raise FlowBNNError(
                "modes without a width have no density; take ModeEnsemble(width='laplace')",
                kind="unsupported",
            )
        away = value.unsqueeze(-2) - self.loc
        if self.root.ndim == 2:
            scaled, log_det = away / self.root, self.root.log().sum(-1)
        else:
            scaled = torch.linalg.solve_triangular(self.root, away.unsqueeze(-1), upper=False).squeeze(-1)
            log_det = self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        each = -0.5 * (scaled.square().sum(-1) + self.loc.shape[-1] * math.log(2.0 * math.pi)) - log_det
        return torch.logsumexp(each, -1) - math.log(len(self.loc))
