"""What HMC and NUTS share: the start, the data, the estimate of the time, the chains and the posterior."""

import time
import warnings
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Likelihood
from flowbnn.methods.base import FitOptions, Method
from flowbnn.methods.fitting import prepare
from flowbnn.methods.mcmc.chains import Chains, Kernel
from flowbnn.methods.mcmc.hamiltonian import normals
from flowbnn.methods.mcmc.posterior import ChainPosterior, NoiseChainPosterior
from flowbnn.methods.mcmc.potential import Data, NoisePotential, WeightPotential, gather, noise_sites
from flowbnn.options import Count, Ge, Positive, Probability, options, takes
from flowbnn.posterior.weights import generator_of
from flowbnn.training import TrainingOptions

__all__ = ["ChainMethod"]

MANY_WEIGHTS = 1_000_000
LONG = 600.0  # seconds


@options(kw_only=True, repr=False)
class ChainMethod(Method):
    r"""Hamiltonian sampling of the exact posterior of the weights, or of the noise on the layers, under all training data.

    The network is copied, trained for ``epochs`` by maximum a posteriori, and held in evaluation mode from there on: the running
    statistics of BatchNorm, and the noise of a Gaussian likelihood that is learned, stay at what that training found. A loader is
    gone through once; with augmentation, what that pass gives is the data.

    Args:
        samples: draws of each chain that are kept.
        warmup: transitions of each chain before, in which step size and mass are found.
        chains: run beside each other, by ``torch.func.vmap`` where the network allows it.
        thin: keep every so many draws.
        target_accept: mean acceptance probability that the step size is tuned to.
        over: ``"weights"``, or ``"noise"``: one vector for every layer multiplies its input, with the prior
            :math:`\mathcal N(1, s^2)`, ``noise_scale`` being :math:`s`, and the weights are held. That makes a large network a
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
                "layers chooses where noise lies, with over='noise'; to hold weights, freeze them (requires_grad_(False))",
                argument="layers",
            )

    def kernel(self, potential: Any) -> Kernel:
        """One transition."""
        raise NotImplementedError(f"{type(self).__name__} must define kernel(potential)")

    def work(self) -> float:
        """Gradients that a transition takes, more or less."""
        raise NotImplementedError(f"{type(self).__name__} must define work()")

    @takes(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> ChainPosterior:
        """As :meth:`Method.fit`.

        With ``checkpoint=folder`` the chains are written there every half minute (or after ``checkpoint_every`` transitions), and
        ``resume=True`` goes on to the same draws as if nothing had happened.
        """
        kind = type(self).__name__
        model, settings = self.setup(network, loader, given, f"training the start of {kind}")
        if settings.devices not in (1, "1", "auto"):
            raise FlowBNNError(f"{kind} runs on one device; leave devices=1")
        number = settings.count(loader)
        seed = int(torch.randint(2**31 - 1, ())) if settings.seed is None else settings.seed
        trial, _, check = prepare(model, loader, settings.likelihood)
        data = gather(loader, check, seed, kind)
        self.estimate(self.potential(model, trial, data, number), model, data, settings)
        point = self.start(deepcopy(network), loader, settings)
        potential = self.potential(point.model, point.likelihood, data, number)
        potential.check(kind)
        sources = [generator_of(seed, chain) for chain in range(self.chains)]
        scale = self.spread * potential.prior_scale
        starts = potential.start.expand(self.chains, -1)
        starts = starts + scale * normals(sources, starts)
        told = {
            "method": kind,
            "seed": settings.seed,
            "dim": potential.start.numel(),
            "num_data": number,
            **{name: getattr(self, name) for name in self.remembered()},
        }
        chains = Chains(
            potential,
            self.kernel(potential),
            starts,
            sources,
            warmup=self.warmup,
            samples=self.samples,
            thin=self.thin,
            target=self.target_accept,
            path=_beside(settings.checkpoint_path),
            every=settings.checkpoint_every,
            settings=told,
        )
        record = chains.run(settings.resume, settings.progress, f"sampling by {kind}")
        position = record.pop("position")
        record["outputs"] = potential.function_values(position)
        members = potential.unpack(position.flatten(0, 1).to(potential.start.device))
        shape = NoiseChainPosterior if self.over == "noise" else ChainPosterior
        posterior = shape(point.model, point.likelihood, members, point.history, record=record, sampler=told)
        posterior.warn()
        return posterior

    def remembered(self) -> tuple[str, ...]:
        """Settings that a run must keep when it is taken up again; ``samples`` may grow."""
        return (
            "warmup",
            "chains",
            "thin",
            "target_accept",
            "over",
            "layers",
            "noise_scale",
            "spread",
            "prior_scale",
            "epochs",
        )

    def potential(
        self, model: nn.Module, likelihood: Likelihood, data: Data, number: int
    ) -> WeightPotential | NoisePotential:
        given = data.to(model)
        if self.over == "weights":
            return WeightPotential(model, likelihood, given, number, self.prior_scale)
        sites = noise_sites(model, self.layers, type(self).__name__)
        return NoisePotential(model, likelihood, given, number, self.noise_scale, sites)

    def estimate(
        self,
        potential: WeightPotential | NoisePotential,
        model: nn.Module,
        data: Data,
        settings: TrainingOptions,
    ) -> None:
        """Time one gradient and warn, before anything begins, of what will take long."""
        size = potential.start.numel()
        few = self.potential(model, potential.bundle.likelihood, data.first(256), 256)
        starts = few.start.expand(self.chains, -1)
        few(starts)
        begun = time.perf_counter()
        few(starts)
        seconds = (time.perf_counter() - begun) * max(1.0, len(data.targets) / len(few.data.targets))
        total = seconds * self.work() * (self.warmup + self.samples * self.thin)
        if size > MANY_WEIGHTS or total > LONG:
            memory = 4e-9 * size * self.chains * self.samples
            elsewhere = (
                "; the network goes to the GPU first, which will be faster"
                if self.epochs
                and settings.accelerator in ("auto", "gpu", "cuda")
                and torch.cuda.is_available()
                else ""
            )
            what = "weights" if self.over == "weights" else "noise variables"
            smaller = (
                " over='noise' samples a few thousand variables instead;" if self.over == "weights" else ""
            )
            warnings.warn(
                f"{type(self).__name__} of {size:,} {what}: about {_words(total)} ({seconds:.3g} s for one gradient of all "
                f"{self.chains} chains) and {memory:.2g} GB of draws{elsewhere};{smaller} fb.SGLD goes by minibatches",
                FlowBNNWarning,
            )


def _words(seconds: float) -> str:
    """A length of time for people.

    >>> _words(90), _words(5000), _words(400000)
    ('2 minutes', '1.4 hours', '4.6 days')
    """
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} minutes"
    return f"{seconds / 3600:.2g} hours" if seconds < 100_000 else f"{seconds / 86_400:.2g} days"


def _beside(path: Path | None) -> Path | None:
    """The file of the chains beside that of the training."""
    if path is None:
        return None
    return path.with_name("chains.safetensors" if path.stem == "last" else f"{path.stem}-chains.safetensors")
