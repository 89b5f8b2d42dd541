"""What HMC and NUTS share: the start, the data, the estimate of the time, the chains and the posterior."""

import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.mcmc.chains import Chains
from flowbnn.methods.mcmc.hamiltonian import Potential, State, Transition, normals
from flowbnn.methods.mcmc.posterior import ChainPosterior, NoiseChainPosterior
from flowbnn.methods.mcmc.potential import (
    Data,
    NetworkPotential,
    NoisePotential,
    WeightPotential,
    gather,
    noise_sites,
)
from flowbnn.options import Count, Ge, Positive, Probability, options, takes
from flowbnn.posterior.weights import generator_of

__all__ = ["ChainMethod"]

MANY_WEIGHTS = 1_000_000
LONG = 600.0  # seconds


@options(kw_only=True, repr=False)
class ChainMethod(Method):
    r"""Hamiltonian sampling of the exact posterior of the weights, or of the noise on the layers, under all training data.

    The network is copied, trained for ``epochs`` by maximum a posteriori, and kept in evaluation mode from then on: the running
    statistics of BatchNorm, and the learned noise of a Gaussian likelihood, stay as that training left them. The chains use the data
    of one pass over the loader, augmented as they are there.

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
                kind="value",
                argument="layers",
            )

    @abstractmethod
    def transition(
        self,
        potential: Potential,
        state: State,
        step_size: Tensor,
        inverse_mass: Tensor,
        sources: Sequence[torch.Generator],
    ) -> tuple[State, Transition]:
        """One transition of all chains."""

    @abstractmethod
    def gradients_per_transition(self) -> float:
        """A rough number, for the estimate of the time."""

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> ChainPosterior:
        """As :meth:`Method.fit`.

        With ``checkpoint=folder`` the chains are written there every half minute (or after ``checkpoint_every`` transitions), and
        ``resume=True`` continues to the same draws as an uninterrupted run.
        """
        kind = type(self).__name__
        model, run = self.setup(network, loader, given, f"training the start of {kind}")
        if run.devices not in (1, "1", "auto"):
            raise FlowBNNError(f"{kind} runs on one device; leave devices=1", argument="devices")
        seed = int(torch.randint(2**31 - 1, ())) if run.seed is None else run.seed
        trial, _, check = prepare(model, loader, run.likelihood)
        data, number = gather(loader, check, seed, kind), run.count(loader)
        self._estimate(self.potential(model, trial, data.first(256), 256), len(data.targets))
        point = self.start(deepcopy(network), loader, run)
        potential = self.potential(point.model, point.likelihood, data, number)
        potential.check(kind)
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
            partial(self.transition, potential),
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
        members = potential.unpack(position.flatten(0, 1).to(potential.start.device))
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
        data = data.to(model)
        if self.over == "weights":
            return WeightPotential(model, likelihood, data, number, self.prior_scale)
        sites = noise_sites(model, self.layers, type(self).__name__)
        return NoisePotential(model, likelihood, data, number, self.noise_scale, sites)

    def _estimate(self, potential: NetworkPotential, examples: int) -> None:
        """Time one gradient on a few examples and warn, before anything begins, of what will take long."""
        starts, size = potential.start.expand(self.chains, -1), potential.start.numel()
        potential(starts)
        begun = time.perf_counter()
        potential(starts)
        seconds = (time.perf_counter() - begun) * max(1.0, examples / len(potential.data.targets))
        total = seconds * self.gradients_per_transition() * (self.warmup + self.samples * self.thin)
        if size > MANY_WEIGHTS or total > LONG:
            hours, memory = total / 3600, 4e-9 * size * self.chains * self.samples
            what, smaller = "noise variables", ""
            if self.over == "weights":
                what, smaller = "weights", " over='noise' samples a few thousand variables instead;"
            line = (
                f"{type(self).__name__} of {size:,} {what}: about {hours:.2g} hours ({seconds:.3g} s for one gradient of all "
                f"{self.chains} chains) and {memory:.2g} GB of draws;{smaller} fb.SGLD takes minibatches"
            )
            warnings.warn(FlowBNNWarning(line, kind="time", seconds=total, size=size))
