r"""Hamiltonian Monte Carlo, the No-U-Turn sampler and random-walk Metropolis, over weights or over the noise on layers.

Exact as the chains grow: without minibatches and with an accept step, the only error is that of a finite number of draws, for which see
``posterior.diagnostics()``. Approximate methods are measured against it. Neal 2012, https://arxiv.org/abs/1206.1901; Hoffman and
Gelman 2014, https://arxiv.org/abs/1111.4246.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import take
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.mcmc.hamiltonian import (
    Potential,
    State,
    hmc_kernel,
    metropolis_kernel,
    normals,
    nuts_kernel,
    uniforms,
)
from flowbnn.methods.mcmc.posterior import ChainPosterior, NoiseChainPosterior
from flowbnn.methods.mcmc.potential import LOG_NOISE, Data, NetworkPotential, gather, noise_sites
from flowbnn.methods.mcmc.warmup import Chains, Kernel
from flowbnn.options import Bounds, Count, Ge, Positive, Probability, accepts_options_of, options
from flowbnn.posterior.weights import generator_of, named_parts

MANY = 1_000_000  # weights


@options(kw_only=True, repr=False)
class ChainMethod(Method):
    r"""Hamiltonian sampling of the exact posterior of the weights, or of the noise on the layers, under all training data.

    The network is copied, trained for ``epochs`` by maximum a posteriori, and kept in evaluation mode from then on: the running
    statistics of BatchNorm stay as that training left them. The learned noise of a Gaussian likelihood is sampled along: its
    logarithm has a normal prior of standard deviation 1 around that of the residuals there, and predictions use each draw's own
    (``posterior.record["log_noise"]``). The chains use the data of one pass over the loader, augmented as they are there. Step size
    and mass are one for all chains.

    A density that is much narrower in its tails than in its middle, such as a banana, is told by divergences: a step size tuned in the
    middle seldom enters the tails, whose draws are missing until the chains are long or ``target_accept`` is high.

    Args:
        samples: draws of each chain that are kept.
        warmup: transitions of each chain before, in which step size and mass are tuned.
        chains: run beside each other, by ``torch.func.vmap`` where the network allows it.
        thin: keep every so many transitions.
        target_accept: mean acceptance probability that the step size is tuned to.
        over: ``"weights"``, or ``"noise"``: one vector for every layer multiplies its input, with the prior
            :math:`\mathcal N(1, s^2)`, ``noise_scale`` being :math:`s`, and the weights are fixed. That makes a large network a
            problem of a few thousand dimensions.
        layers: a glob of the layers that get noise; all that can unless given.
        noise_scale: standard deviation of the prior of the noise.
        spread: standard deviation of the chains' starts around the trained network, as a share of the prior's.
        prior_scale: standard deviation of the prior of the weights.
        epochs: of the training before; 0 starts from the network as it is.
    """

    samples: Count = 200
    warmup: Annotated[int, Ge(0)] = 200
    chains: Count = 4
    thin: Count = 1
    target_accept: Probability = 0.8
    over: Literal["weights", "noise"] = "weights"
    layers: str | None = None
    noise_scale: Positive = 0.5
    spread: Positive = 0.1

    def __post_init__(self) -> None:
        if self.layers is not None and self.over == "weights":
            raise FlowBNNError(
                "layers chooses where noise lies, with over='noise'; to fix weights, freeze them (requires_grad_(False))",
                argument="layers",
            )

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.over == "weights"

    @abstractmethod
    def kernel(self, potential: Potential) -> Kernel:
        """One transition of all chains, from ``(state, step size, inverse mass, generators)``."""

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> ChainPosterior:
        """As :meth:`Method.fit`.

        With ``checkpoint=folder`` the chains are written there every half minute (or after ``checkpoint_every`` transitions), and
        ``resume=True`` continues to the same draws as an uninterrupted run.
        """
        kind = type(self).__name__
        model, run = self.setup(network, loader, given, f"training the start of {kind}")
        seed = run.resolve_seed()
        trains = self.over == "weights" or self.epochs > 0
        trial, _, check = prepare(model, loader, run.likelihood, seed, trains)
        data, number = gather(loader, check, seed), run.num_examples(loader)
        self._try_out(self.potential(model, trial, take(data, 0, 256), 256), run)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        point = (self if trained else replace(self, epochs=0)).start(model, loader, run)
        potential = self.potential(point.model, point.likelihood, data, number)
        sources = [generator_of(seed, chain) for chain in range(self.chains)]
        starts = potential.start.expand(self.chains, -1)
        starts = starts + self.spread * potential.prior_scale * normals(sources, starts)
        not_sampling = ("samples", "lr", "optimizer", "schedule")  # a resumed run may draw more samples
        settings = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in not_sampling}
        sampler = {"method": kind, "seed": run.seed, "dim": starts.shape[1], "num_data": number, **settings}
        path = run.checkpoint_path  # the file of the training; that of the chains lies beside it
        name = "" if path is None or path.stem == "last" else f"{path.stem}-"
        chains = Chains(
            potential,
            self.kernel(potential),
            starts,
            sources,
            warmup=self.warmup,
            samples=self.samples,
            thin=self.thin,
            target=self.target_accept,
            path=path and path.with_name(f"{name}chains.safetensors"),
            every=run.checkpoint_every,
            settings=sampler,
        )
        record = chains.run(run.resume, run.progress, f"sampling by {kind}")
        position = record.pop("position")
        record["outputs"] = potential.function_values(position)
        members = named_parts(position.flatten(0, 1).to(potential.start.device), potential.shapes)
        if LOG_NOISE in members:
            record[LOG_NOISE] = members.pop(LOG_NOISE).unflatten(0, position.shape[:2]).cpu()
        shape = NoiseChainPosterior if self.over == "noise" else ChainPosterior
        posterior = shape(
            point.model, point.likelihood, members, point.history, record=record, sampler=sampler
        )
        posterior.warn()
        return posterior

    def potential(
        self, model: nn.Module, likelihood: Likelihood, data: Data, number: int
    ) -> NetworkPotential:
        """The potential of what is sampled."""
        if self.over == "weights":
            return NetworkPotential(model, likelihood, data, number, self.prior_scale)
        sites = noise_sites(model, self.layers, type(self).__name__)
        return NetworkPotential(model, likelihood, data, number, self.noise_scale, sites)

    def _try_out(self, potential: NetworkPotential, run: FitOptions) -> None:
        """Refuse what cannot be sampled, and warn of what will take long, before anything begins."""
        kind, start = type(self).__name__, potential.start[None]
        (first, slope), (again, _) = potential(start), potential(start)
        problem, argument = "", "network"
        if run.devices not in (1, "1", "auto"):
            problem, argument = "runs on one device; leave devices=1", "devices"
        elif not bool(torch.isfinite(first).all() and torch.isfinite(slope).all()):
            problem = "cannot sample this network: its log-likelihood or the gradient is not finite"
        elif not torch.allclose(first, again, rtol=1e-4, atol=1e-3):
            problem = "cannot sample a network that gives other outputs at every pass (dropout that stays on?); fb.MCDropout can"
        if problem:
            raise FlowBNNError(f"{kind} {problem}", argument=argument)
        size, draws = potential.start.numel(), self.chains * self.samples
        if size > MANY:
            line = (
                f"{kind} of {size:,} {self.over} keeps {4e-9 * size * draws:.2g} GB of draws, and needs hours or days; over='noise' "
                "samples a few thousand variables instead, fb.SGLD takes minibatches"
            )
            warn(line, kind="size", size=size)


@register_method
@options(kw_only=True, repr=False)
class HMC(ChainMethod):
    """Hamiltonian Monte Carlo with dual averaging, a learned diagonal mass and several chains; see :class:`ChainMethod`.

    Args:
        steps: leapfrog steps of a transition at most. Their number is uniform from 1 to this for every transition and chain, so that
            trajectories do not end where they began.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.HMC(samples=25, warmup=25, chains=2, steps=5, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False)
    >>> len(posterior), bool((posterior.draws(50)["weight"].mean() - 2).abs() < 0.1)
    (50, True)
    """

    steps: Count = 32

    def kernel(self, potential: Potential) -> Kernel:
        def transition(state: State, size: Tensor, mass: Tensor, sources: Sequence[torch.Generator]) -> Any:
            counts = (uniforms(sources, 1, size.device)[:, 0] * self.steps).floor().long() + 1
            return hmc_kernel(potential, state, size, mass, counts, sources)

        return transition


@register_method
@options(kw_only=True, repr=False)
class NUTS(ChainMethod):
    """The No-U-Turn sampler with multinomial weights; see :class:`ChainMethod`.

    Args:
        max_depth: doublings of a trajectory at most, which then has ``2 ** max_depth - 1`` steps.

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
    """Random-walk Metropolis: the first of all Markov chains, to measure the others by; see :class:`ChainMethod`.

    A draw is of use for about a handful of weights: what moves by chance needs a number of evaluations that grows with their number.
    So it is neither among the methods that :func:`~flowbnn.compare` tries nor a name of its own in :mod:`flowbnn`.

    Args:
        target_accept: 0.234 is best where there are many weights (Roberts, Gelman and Gilks 1997,
            https://doi.org/10.1214/aoap/1034625254).
        thin: transitions for each draw that is kept, a handful at least.

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
