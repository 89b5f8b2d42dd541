r"""Hamiltonian Monte Carlo, the No-U-Turn sampler and random-walk Metropolis, over weights or over the noise on layers.

These methods are exact in the limit of long chains. They use all data in every step and have an accept step. Their only error
comes from the finite number of draws; see ``posterior.diagnostics()``. They serve as a reference for approximate methods. Neal 2012,
https://arxiv.org/abs/1206.1901; Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import take
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import likelihood_not_finite
from flowbnn.methods.mcmc.chain_sampler import ChainSampler, Kernel
from flowbnn.methods.mcmc.hamiltonian import (
    ChainState,
    Potential,
    draw_normals,
    draw_uniforms,
    hmc_kernel,
    metropolis_kernel,
    nuts_kernel,
)
from flowbnn.methods.mcmc.posterior import (
    ChainPosterior,
    NoiseChainPosterior,
    outputs_rhat,
)
from flowbnn.methods.mcmc.potential import (
    LOG_NOISE,
    NetworkPotential,
    TrainingData,
    gather_data,
    noise_sites,
)
from flowbnn.methods.preparation import prepare
from flowbnn.options import Bounds, Count, Ge, Positive, Probability, SampleCount, accepts_options_of, options
from flowbnn.posterior.weights import generator_of, named_parts


@options(kw_only=True, repr=False)
class ChainMethod(Method):
    r"""Base class for Markov chains over the weights, or over the noise on the layers, under all training data.

    The network is copied, trained for ``epochs`` by maximum a posteriori, and then kept in evaluation mode. The running statistics of
    BatchNorm are fixed after this training. The chains use the data of one pass over the loader, with its augmentations. All chains
    share step size and mass.

    The learned noise of a Gaussian likelihood is sampled with the weights. Its logarithm has a normal prior of standard deviation 1
    around the logarithm of the residual standard deviation after training. Predictions use the noise of each draw
    (``posterior.record["log_noise"]``).

    Divergences indicate a density that is much narrower in its tails than at its center, such as a banana-shaped one. The tails are
    then undersampled unless the chains are long or ``target_accept`` is high.

    Args:
        samples: Number of draws of each chain. By default, 200 draws are taken. While the R-hat of the outputs exceeds 1.05, they are
            taken again with twice as many transitions per draw, up to 8. Before these draws, step size and mass are adapted again if
            the mean acceptance probability of a chain is below half of ``target_accept``. A warning is raised if the R-hat is still
            larger.
        warmup: Number of transitions of each chain before the draws, which adapt step size and mass.
        chains: Number of chains. They run together by ``torch.func.vmap`` if the network supports it.
        thin: Number of transitions per draw.
        target_accept: Target of the mean acceptance probability, to which the step size is adapted.
        variables: Sampled variables: ``"weights"``, or ``"noise"`` for one vector per layer that multiplies its input, with the prior
            :math:`\mathcal N(1, s^2)` and fixed weights. With noise, sampling a large network has only a few thousand dimensions.
        layers: Glob of the layers with noise; None for all layers that support it.
        noise_scale: Standard deviation :math:`s` of the prior of the noise.
        spread: Standard deviation of the initial positions around the trained network, in units of the prior standard deviation.
        prior_scale: Standard deviation of the prior of the weights.
        epochs: Number of epochs of the initial training; 0 to start from the network as it is. By default, training ends at a plateau.
    """

    supports_weights: ClassVar[bool] = False
    max_variables: ClassVar[int] = 1_000_000  # above, a run takes hours, and a warning is raised

    samples: SampleCount | None = None
    warmup: Annotated[int, Ge(0)] = 200
    chains: Count = 4
    thin: Count = 1
    target_accept: Probability = 0.8
    variables: Literal["weights", "noise"] = "weights"
    layers: str | None = None
    noise_scale: Positive = 0.5
    spread: Positive = 0.1

    def __post_init__(self) -> None:
        if self.layers is not None and self.variables == "weights":
            text = "layers needs variables='noise'; to fix weights, use requires_grad_(False)"
            raise FlowBNNError(text, argument="layers")

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.variables == "weights"

    @abstractmethod
    def kernel(self, potential: Potential) -> Kernel:
        """Returns the transition kernel: a function of state, step size, inverse mass and generators."""

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> ChainPosterior:
        """Samples the posterior; see :meth:`Method.fit`.

        With ``checkpoint=folder`` the chains are saved every 30 seconds (or after ``checkpoint_every`` transitions), and
        ``resume=True`` continues to the same draws as an uninterrupted run.
        """
        name = type(self).__name__
        model, loader, options = self.setup(network, loader, kwargs, f"{name} training")
        seed = options.resolve_seed()
        trains = self.variables == "weights" or self.trains
        prepared = prepare(model, loader, options, trains)
        data, num_data = gather_data(loader, prepared.check_batch, seed), options.num_examples(loader)
        self._check_problem(self.potential(model, prepared.likelihood, take(data, 0, 256), 256), options)
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        point = (self if trainable else replace(self, epochs=0)).fit_point(
            model, loader, options, prepared=prepared
        )
        potential = self.potential(point.model, point.likelihood, data, num_data)
        sampler = self._sampler(potential, num_data, seed, options)
        record = self._sample(sampler, potential, options)
        position = record.pop("position")
        members = named_parts(position.flatten(0, 1).to(potential.start.device), potential.shapes)
        if LOG_NOISE in members:
            record[LOG_NOISE] = members.pop(LOG_NOISE).unflatten(0, position.shape[:2]).cpu()
        posterior_cls = NoiseChainPosterior if self.variables == "noise" else ChainPosterior
        posterior = posterior_cls(
            point.model, point.likelihood, members, point.history, record=record, sampler=sampler.settings
        )
        posterior.warn_not_converged(sampler.thin)
        return posterior

    def _sample(
        self, sampler: ChainSampler, potential: NetworkPotential, options: FitOptions
    ) -> dict[str, Tensor]:
        """Runs the chains and returns their record. Without a number of samples, the run is extended until the chains agree."""
        resume, description = options.resume, f"sampling with {type(self).__name__}"
        while True:
            record = sampler.run(resume, options.progress, description)
            record["outputs"] = potential.function_values(record["position"])
            rhat = outputs_rhat(record["outputs"])
            longest = sampler.thin >= 8 * self.thin
            if self.samples is not None or longest or rhat is None or rhat <= ChainPosterior.max_rhat:
                return record
            sampler.extend()
            resume = False  # the state is in memory

    def _sampler(
        self, potential: NetworkPotential, num_data: int, seed: int, options: FitOptions
    ) -> ChainSampler:
        """Returns the sampler of the chains, at their initial positions."""
        generators = [generator_of(seed, chain) for chain in range(self.chains)]
        starts = potential.start.expand(self.chains, -1)
        starts = starts + self.spread * potential.prior_scale * draw_normals(generators, starts)
        # a resumed run may draw more samples, and training has its own checkpoint
        excluded = ("samples", "lr", "optimizer", "schedule")
        settings = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in excluded
        }
        settings |= {
            "method": type(self).__name__,
            "seed": options.seed,
            "dim": starts.shape[1],
            "num_data": num_data,
        }
        path = options.checkpoint_path  # the file of the training, next to which the chains are saved
        prefix = "" if path is None or path.stem == "last" else f"{path.stem}-"
        return ChainSampler(
            potential,
            self.kernel(potential),
            starts,
            generators,
            warmup=self.warmup,
            samples=self.samples or 200,
            thin=self.thin,
            target=self.target_accept,
            path=path and path.with_name(f"{prefix}chains.safetensors"),
            checkpoint_every=options.checkpoint_every,
            settings=settings,
        )

    def potential(
        self, model: nn.Module, likelihood: Likelihood, data: TrainingData, num_data: int
    ) -> NetworkPotential:
        """Returns the potential of the sampled variables."""
        if self.variables == "weights":
            return NetworkPotential(model, likelihood, data, num_data, self.prior_scale)
        sites = noise_sites(model, self.layers)
        return NetworkPotential(model, likelihood, data, num_data, self.noise_scale, sites)

    def _check_problem(self, potential: NetworkPotential, options: FitOptions) -> None:
        """Raises FlowBNNError for networks that cannot be sampled, and warns about long runs, before training."""
        name, start = type(self).__name__, potential.start[None]
        if options.devices not in (1, "1", "auto"):
            raise FlowBNNError(f"{name} needs devices=1, got {options.devices}", argument="devices")
        (energy, gradient), (second_energy, _) = potential(start), potential(start)
        if not bool(torch.isfinite(energy).all() and torch.isfinite(gradient).all()):
            raise likelihood_not_finite()
        if not torch.allclose(energy, second_energy, rtol=1e-4, atol=1e-3):
            text = f"{name} needs a deterministic network, but two passes differ; disable its dropout, or use fb.MCDropout"
            raise FlowBNNError(text, kind="random network", argument="network")
        size = potential.start.numel()
        if size > self.max_variables:
            gigabytes = 4e-9 * size * self.chains * (self.samples or 200)
            text = f"{name} samples {size:,} {self.variables}: {gigabytes:.2g} GB, and hours or days; use variables='noise', or fb.SGLD"
            warn(text, kind="size", size=size)


@register_method
@options(kw_only=True, repr=False)
class HMC(ChainMethod):
    """Hamiltonian Monte Carlo with dual averaging, an adapted diagonal mass and several chains; see :class:`ChainMethod`.

    Args:
        steps: Maximum number of leapfrog steps of a transition. Their number is uniform from 1 to ``steps`` for every transition and
            chain, so that trajectories do not return to their start.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.HMC(samples=25, warmup=25, chains=2, steps=5, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False)
    >>> len(posterior), bool((posterior.draws(50)["weight"].mean() - 2).abs() < 0.1)
    (50, True)
    """

    steps: Count = 32

    def kernel(self, potential: Potential) -> Kernel:
        def transition(
            state: ChainState, step_size: Tensor, inverse_mass: Tensor, generators: Sequence[torch.Generator]
        ) -> Any:
            uniforms = draw_uniforms(generators, 1, step_size.device)[:, 0]
            num_steps = (uniforms * self.steps).floor().long() + 1
            return hmc_kernel(potential, state, step_size, inverse_mass, num_steps, generators)

        return transition


@register_method
@options(kw_only=True, repr=False)
class NUTS(ChainMethod):
    """No-U-Turn sampler with multinomial weights; see :class:`ChainMethod`.

    Args:
        max_depth: Maximum number of doublings of a trajectory, which then has ``2 ** max_depth - 1`` steps.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.NUTS(samples=25, warmup=25, chains=2, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False)
    >>> posterior.diagnostics().divergences
    0
    """

    max_depth: Annotated[int, Bounds(ge=1, le=15)] = 10

    def kernel(self, potential: Potential) -> Kernel:
        return partial(nuts_kernel, potential, max_depth=self.max_depth)


@options(kw_only=True, repr=False)
class Metropolis(ChainMethod):
    """Random-walk Metropolis, the oldest Markov chain sampler, as a baseline for the others; see :class:`ChainMethod`.

    It is useful for at most ten or so weights, because the number of evaluations per independent draw grows with the number of weights.
    It is therefore not registered for :func:`~flowbnn.compare` and not exported from :mod:`flowbnn`.

    Args:
        target_accept: Target of the mean acceptance probability; 0.234 is optimal for many weights (Roberts, Gelman and Gilks 1997,
            https://doi.org/10.1214/aoap/1034625254).
        thin: Number of transitions per draw.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = Metropolis(samples=25, warmup=50, chains=4, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False)
    >>> posterior.diagnostics().gradients
    1.0
    """

    target_accept: Probability = 0.234
    thin: Count = 4

    def kernel(self, potential: Potential) -> Kernel:
        return partial(metropolis_kernel, potential)
