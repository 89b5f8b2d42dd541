r"""Ensembles of modes of the noise, whose members share the weights of one network.

.. math:: \hat z_m = \arg\max_z \sum_i \log p(y_i \mid x_i, z) + \log \mathcal N(z; 1, s^2), \qquad z_m \sim \mathcal N(1, s^2)

Every member is optimized from its own draw of the prior. With a narrow prior all members may converge to one mode. With a wide
prior every member may have its own mode. The ensemble stores only one noise vector per member.
"""

from copy import deepcopy
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move_data, pick, take
from flowbnn.convert import to_stochastic
from flowbnn.errors import pluralize
from flowbnn.likelihoods import Gaussian, Likelihood, learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.data_summary import first_batch
from flowbnn.methods.fitting import likelihood_not_finite
from flowbnn.methods.laplace.derivatives import check_likelihood
from flowbnn.methods.mcmc.potential import gather_data
from flowbnn.methods.modes.mode_mixture import Covariance, ModeBase, ModeNoise
from flowbnn.methods.preparation import prepare
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.noise import noise_layers
from flowbnn.noise.inspection import check_called, remove_noise_without_gradient
from flowbnn.noise.joint import independent_vectors
from flowbnn.noise.modes import align_batch_axes, warn_constant_inputs
from flowbnn.options import Count, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.regression import set_noise_scale
from flowbnn.training import track


@register_method
@options(repr=False)
class ModeEnsemble(Method):
    r"""Modes of the posterior density of the noise on all layers, found by optimization from prior draws.

    The network is trained for ``epochs`` by maximum a posteriori, or used as it is with ``epochs=0``. Its weights are then fixed. All
    members are optimized together, by Adam with a rate that falls to zero. They are weighted equally, as in a deep ensemble, regardless
    of the density at their modes (``posterior.energy``). Fit it with ``epochs=0`` on data that the weights have not seen.

    Args:
        members: Number of members. Several may converge to the same mode; ``posterior.num_modes`` counts the distinct ones.
        width: ``"point"`` for members at their modes; ``"laplace"`` for the Gaussian
            :math:`\mathcal N(\hat z_m, (G_m + s^{-2})^{-1})` around each mode. :math:`G_m` is the generalized Gauss-Newton matrix of
            the log-likelihood, or its diagonal above 1,000 dimensions.
        steps: Number of optimization steps. With minibatches, more steps end nearer to the mode.
        batch_size: Number of examples of a step. If the data have at most twice as many, every step uses all of them.
        side: Side of the layers with noise, as in :class:`~flowbnn.NodeNoise`.
        layers: Glob of the layers with noise; None for all layers that support it.
        prior_scale: Standard deviation :math:`s` of the prior of the noise, whose mean is one. None
            chooses 0.25, 0.5, 1 or 2 by the NLL on the validation data (``posterior.validation_nll``), or 0.5 without validation data.

    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = ModeEnsemble(4, steps=20, epochs=2).fit(nn.Linear(2, 3), loader, progress=False)
    >>> posterior, posterior.predict(torch.zeros(1, 2)).num_samples
    (ModePosterior(Linear, 4 members at 1 mode, Categorical()), 4)
    """

    supports_weights: ClassVar[bool] = False
    max_full_dim: ClassVar[int] = 1000  # above, one covariance matrix per mode would take too much memory

    members: Count = 16
    width: Literal["point", "laplace"] = field(default="point", kw_only=True)
    steps: Count = field(default=300, kw_only=True)
    batch_size: Count = field(default=256, kw_only=True)
    side: Literal["input", "output"] = field(default="input", kw_only=True)
    layers: str | None = field(default=None, kw_only=True)
    prior_scale: Positive | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.trains

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "ModePosterior":
        """Fits the ensemble; see :meth:`Method.fit`."""
        model, loader, options = self.setup(network, loader, kwargs)
        seed = options.resolve_seed()
        prepared = prepare(model, loader, options, self.trains)
        first_inputs = prepared.inputs
        if self.width == "laplace":
            check_likelihood(prepared.likelihood, "sampled")
        if options.validation_loader is not None:
            first_batch(options.validation_loader, "validation")
        num_data = options.num_examples(loader)
        data = gather_data(loader, prepared.check_batch, seed)
        point = self.fit_point(model, loader, options, weight_decay=1.0 / num_data, prepared=prepared)
        model, likelihood = point.model.eval(), point.likelihood
        inputs, targets = move_data(data, model)
        default_scale = 0.5  # as in NodeNoise
        noisy_model = self._noisy_model(model, first_inputs, default_scale)
        search = _ModeSearch(noisy_model, likelihood, inputs, targets, num_data, seed)
        scales: tuple[float, ...] = (self.prior_scale or default_scale,)
        if self.prior_scale is None and options.validation_loader is not None:
            scales = (0.25, 0.5, 1.0, 2.0)
        best: ModePosterior | None = None
        validation_nll: dict[float, float] = {}
        for scale in scales:
            modes, energy = search.run(
                self.members, scale, self.steps, self.batch_size, progress=options.progress
            )
            posterior = self._posterior(search, first_inputs, model, scale, modes, energy)
            posterior.history = point.history
            if options.validation_loader is not None:
                predictive, validation_targets = posterior.predict_with_targets(
                    options.validation_loader, seed=0, progress=False
                )
                validation_nll[scale] = float(predictive.nll(validation_targets).mean())
            if best is None or validation_nll[scale] < min(list(validation_nll.values())[:-1]):
                best = posterior
        assert best is not None
        best.validation_nll = validation_nll
        return best

    def _posterior(
        self,
        search: "_ModeSearch",
        first_inputs: Any,
        model: nn.Module,
        scale: float,
        modes: Tensor,
        energy: Tensor,
    ) -> "ModePosterior":
        """Returns the posterior of the modes that were found under a prior."""
        covariance: Covariance = "none"
        if self.width == "laplace":
            covariance = "full" if modes.shape[1] <= self.max_full_dim else "diagonal"
        noisy_model = self._noisy_model(model, first_inputs, scale, covariance)
        roots = None if covariance == "none" else search.covariance_roots(modes, scale, covariance == "full")
        likelihood = deepcopy(search.network.likelihood)
        if learns_noise(likelihood):
            search.set_noise_scale(likelihood, modes)
        posterior = ModePosterior(noisy_model, likelihood)
        posterior.base.assign(modes, energy, roots)
        return posterior

    def _noisy_model(
        self, model: nn.Module, first_inputs: Any, scale: float, covariance: Covariance = "none"
    ) -> nn.Module:
        """Returns a copy of the network with noise whose distribution can hold the modes."""
        recipe = ModeNoise(modes=self.members, covariance=covariance, prior_scale=scale, side=self.side)
        noisy_model = to_stochastic(model, {self.layers or "*": recipe})
        remove_noise_without_gradient(noisy_model, first_inputs)
        calls = align_batch_axes(noisy_model, first_inputs)
        warn_constant_inputs(calls.constant)
        check_called(noisy_model, calls.idle)
        for layer in noise_layers(noisy_model).values():
            layer.fitted = True
        return noisy_model.eval()


class _ModeSearch:
    """Optimization of the posterior density of the noise, from draws of the prior."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, inputs: Any, targets: Tensor, num_data: int, seed: int
    ) -> None:
        self.network = NoisyNetwork(model, likelihood)
        self.inputs, self.targets, self.num_data, self.seed = inputs, targets, num_data, seed
        self.dim = sum(self.network.sizes)
        self.rows = 4096  # rows of one forward pass, summed over all members

    def run(
        self, members: int, scale: float, steps: int, batch_size: int, *, progress: bool
    ) -> tuple[Tensor, Tensor]:
        """Finds modes ``[M, D]`` and their energies ``[M]`` under a prior of this standard deviation.

        Adam takes ``steps`` steps with a rate of 0.1 prior standard deviations. L-BFGS follows if every step uses all data.
        """
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randn(members, self.dim, generator=generator).to(device_of(self.network.model))
        # deviations from the prior mean, in units of its standard deviation
        deviation = nn.Parameter(start.to(dtype_of(self.network.model) or start.dtype))
        num_examples, full_batch = len(self.targets), len(self.targets) <= 2 * batch_size

        def energies(index: Tensor | None = None) -> Tensor:
            """Returns energies and stores their gradients in ``deviation.grad``."""
            log_likelihood, gradient = self.log_likelihood(1.0 + scale * deviation.detach(), index)
            deviation.grad = deviation.detach() - scale * gradient
            return 0.5 * deviation.detach().square().sum(1, dtype=torch.float64) - log_likelihood

        optimizer = torch.optim.Adam([deviation], 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in track(range(steps), f"modes, prior {scale:g}", progress):
            index = None if full_batch else torch.randint(num_examples, (batch_size,), generator=generator)
            energies(None if index is None else index.to(self.targets.device))
            optimizer.step()
            schedule.step()
        if full_batch:
            lbfgs = torch.optim.LBFGS(
                [deviation],
                max_iter=steps,
                tolerance_grad=1e-5,
                tolerance_change=1e-12,
                line_search_fn="strong_wolfe",
            )
            lbfgs.step(lambda: float(energies().sum()))
        energy, modes = energies(), 1.0 + scale * deviation.detach()
        if not bool(torch.isfinite(energy).all()):
            place = f"for prior_scale={scale:g}; decrease prior_scale"
            raise likelihood_not_finite(place, "prior_scale")
        return modes, energy

    def log_likelihood(self, vectors: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns log-likelihoods ``[M]`` of all data and their gradients ``[M, D]``, or estimates from some examples."""
        data = self.inputs, self.targets
        inputs, targets = data if index is None else pick(data, index)
        values, gradients = self.network.gradients(vectors, inputs, targets, self.rows)
        weight = self.num_data / len(targets)
        return values * weight, gradients.to(vectors) * weight

    def covariance_roots(self, modes: Tensor, scale: float, full: bool) -> Tensor:
        """Returns lower triangular roots ``[M, D, D]`` of the covariances at the modes, or standard deviations ``[M, D]``."""
        roots, generator = [], torch.Generator().manual_seed(self.seed)
        for mode in modes:
            precision = torch.zeros(mode.shape * 2 if full else mode.shape).double().to(mode.device)
            for low in range(0, len(self.targets), 256):
                inputs, targets = take((self.inputs, self.targets), low, low + 256)
                vectors = mode.expand(len(targets), -1).clone()
                # above 32 outputs the Gauss-Newton matrix is estimated from 32 drawn labels
                rows = self.network.derivatives(inputs, targets, vectors, generator, exact=32)[3].double()
                precision += rows.mT @ rows if full else rows.square().sum(0)
            precision *= self.num_data / len(self.targets)
            if full:
                precision.diagonal().add_(1.0 / scale**2)
                covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
                roots.append(torch.linalg.cholesky(covariance))
            else:
                roots.append((precision + 1.0 / scale**2).rsqrt())
        return torch.stack(roots)

    @torch.no_grad()
    def set_noise_scale(self, likelihood: Gaussian, modes: Tensor) -> None:
        """Sets the observation noise to the size of the residuals of all members."""
        passes = self.network.passes(modes, self.inputs, self.targets, self.rows)
        pairs = ((self.network.outputs(inputs, noise), targets) for _, inputs, targets, noise in passes)
        set_noise_scale(likelihood, pairs)


class ModePosterior(NoisePosterior):
    """Equally weighted modes of the noise, or Gaussians around them.

    The first samples of a prediction use each mode once, for up to 32 modes.

    Attributes:
        validation_nll: Mean negative log-likelihood of the validation data by standard deviation of the prior.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)]
    >>> posterior = fb.ModeEnsemble(4, steps=20, epochs=0).fit(nn.Sequential(nn.Linear(2, 3)), loader, progress=False)
    >>> posterior.modes["0"].shape, posterior.energy.shape
    (torch.Size([4, 2]), torch.Size([4]))
    """

    kind: ClassVar[str] = "modes"
    validation_nll: dict[float, float]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.validation_nll = {}
        self.default_samples = len(self) * (1 if self.base.root is None else 4)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "validation_nll": list(self.validation_nll.items())}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        posterior = super().from_state(point, state, settings)
        posterior.validation_nll = dict(settings.get("validation_nll", ()))
        return posterior

    @property
    def base(self) -> ModeBase:
        """Distribution that holds the modes."""
        (vector, _), *_ = independent_vectors(self.model)
        assert isinstance(vector.base, ModeBase)
        return vector.base

    @property
    def energy(self) -> Tensor:
        r"""Energies :math:`-\log p(D \mid \hat z_m) - \log p(\hat z_m)` of all members, up to a constant."""
        return self.base.energy.detach()

    @property
    def modes(self) -> dict[str, Tensor]:
        """Noise of every layer at the modes, ``{layer: [M, dim]}``."""
        (_, names), *_ = independent_vectors(self.model)
        layers = noise_layers(self.model)
        vectors = self.base.loc.detach().split([layers[name].layout.dim for name in names], -1)
        return dict(zip(names, vectors, strict=True))

    @property
    def num_modes(self) -> int:
        """Number of distinct modes, which differ in some entry by more than 0.1 prior standard deviations."""
        (vector, _), *_ = independent_vectors(self.model)
        positions = self.base.loc.detach() / vector.prior.distribution().stddev.detach()
        return len((torch.cdist(positions, positions, p=torch.inf) < 0.1).int().argmax(1).unique())

    def __len__(self) -> int:
        return len(self.base.loc)

    def __repr__(self) -> str:
        size = f"{pluralize(len(self), 'member')} at {pluralize(self.num_modes, 'mode')}"
        return f"ModePosterior({type(self.model).__name__}, {size}, {self.likelihood!r})"
