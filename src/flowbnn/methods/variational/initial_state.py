"""State of a network before a fit of its noise, to which the finished fit is compared and may return."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions import MixtureBase
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.schedule import PlateauRun
from flowbnn.networks import evaluation_mode
from flowbnn.noise import noise_layers, noise_mode
from flowbnn.noise.base import Noise
from flowbnn.noise.contexts import Mode
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.objectives import ELBO
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.weights import state_of
from flowbnn.regression import LOC, SCALE, NoiseScale, outputs_and_targets, set_noise_scale
from flowbnn.transforms import BlockTriangular, Compose


@dataclass(frozen=True)
class InitialState:
    """Copy of the weights and the noise of a network, taken before a fit.

    Args:
        tensors: Parameters and buffers by name, on the CPU.
        mode: Mode of the noise when a single network is needed: ``"mean"`` if the noise was fitted before, otherwise ``"off"``.
    """

    tensors: Mapping[str, Tensor]
    mode: Mode

    @classmethod
    def of(cls, model: nn.Module) -> "InitialState":
        """Returns the state of a network."""
        fitted = any(layer.fitted for layer in noise_layers(model).values())
        return cls(
            {name: value.cpu() for name, value in state_of(model).items()}, "mean" if fitted else "off"
        )

    @contextmanager
    def restored(self, model: nn.Module, likelihood: Likelihood, batches: Sequence[Any]) -> Iterator[None]:
        """Context manager that restores the initial network, with its output scale and the noise scale of its residuals.

        Args:
            model: Network after the fit. Its weights and noise are restored at the end of the block.
            likelihood: Likelihood after the fit. Its learned noise is restored, too.
            batches: Batches from which the noise scale of the initial network is estimated.
        """
        weights, noise = state_of(model), state_of(likelihood)
        self.restore(model)
        try:
            if learns_noise(likelihood):
                with evaluation_mode(model), noise_mode(model, self.mode):
                    set_noise_scale(likelihood, outputs_and_targets(model, batches))
            yield
        finally:
            copy_into(model, weights)
            copy_into(likelihood, noise)

    def restore(self, model: nn.Module) -> None:
        """Restores the initial network in place, with its output scale."""
        state, initial = state_of(model), dict(self.tensors)
        if SCALE in state and SCALE not in initial:
            initial |= {LOC: torch.zeros_like(state[LOC]), SCALE: torch.ones_like(state[SCALE])}
        copy_into(model, initial)

    @torch.no_grad()
    def restore_without_noise(self, model: nn.Module) -> None:
        """Restores the initial network in place. Noise that was not fitted before becomes too narrow to matter."""
        self.restore(model)
        if self.mode == "off":
            for noise in joint_noises(model):
                narrow(noise)


def joint_noises(model: nn.Module) -> list[Noise]:
    """Returns the noise modules of a network, joint noise once."""
    return list(dict.fromkeys(layer.joint_noise for layer in noise_layers(model).values()))


def can_narrow(noise: Noise) -> bool:
    """Returns True if :func:`narrow` supports the noise, which is not the case for dropout."""
    return isinstance(noise, InputNoise) and (
        isinstance(noise.base, MixtureBase) or isinstance(getattr(noise.base, "scale", None), Tensor)
    )


def narrow(noise: Noise, factor: float = 0.01) -> None:
    """Multiplies the standard deviation of noise in its initial state, where it has no flow, by a factor.

    Args:
        noise: Noise to change in place.
        factor: Factor of the standard deviation. The default leaves a thousandth, which changes no prediction visibly.

    >>> import flowbnn as fb
    >>> layer = fb.to_stochastic(nn.Linear(2, 3), {"*": fb.noise.NormalAffine(base_scale=0.1)})
    >>> noise = noise_layers(layer)[""]
    >>> with torch.no_grad():
    ...     narrow(noise)
    >>> float(noise.posterior().sample((1000,)).std()) < 0.002
    True
    """
    assert isinstance(noise, InputNoise)
    steps = list(noise.transform) if isinstance(noise.transform, Compose) else [noise.transform]
    if isinstance(steps[-1], BlockTriangular):
        steps[-1].scale.mul_(factor)
        for link in steps[-1].links:
            link.mul_(factor)
    elif isinstance(noise.base, MixtureBase):
        noise.base.log_scale.add_(math.log(factor))
        noise.base.loc.sub_(1.0).mul_(factor).add_(1.0)
    else:
        noise.base.get_buffer("scale").mul_(factor)


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies values into the parameters and buffers of a module. Buffers that were resized, such as caches, are left out."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in tensors.items():
        if name in state and state[name].shape == value.shape:
            state[name].copy_(value)


@dataclass(frozen=True)
class FinishedFit:
    """Finished fit of the noise of a network, with the data that its report needs.

    Args:
        posterior: Fitted posterior.
        initial: Network before the fit.
        elbo: ELBO that was maximized.
        plateau: State of the schedule.
        idle_layers: Layers with noise that the network never calls.
        log_scale: Logarithm of the noise scale that maximizes the ELBO, before the fit to the predictions. None if no noise is learned.
        noise_scale: Observation noise of a regression, after the fit to the predictions. None for other likelihoods.
        batches: Batches of training data, spread evenly over the loader.
        held_out: Loader of held-out data, or None.
    """

    posterior: NoisePosterior
    initial: InitialState
    elbo: ELBO
    plateau: PlateauRun
    idle_layers: Sequence[str]
    log_scale: Tensor | None
    noise_scale: NoiseScale | None
    batches: Sequence[Any]
    held_out: Iterable[Any] | None

    def initial_network(self) -> AbstractContextManager[None]:
        """Context manager that restores the initial network."""
        return self.initial.restored(self.posterior.model, self.posterior.likelihood, self.batches)
