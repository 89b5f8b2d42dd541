r"""The potential of a network's weights, or of the noise on its layers, under all training data.

.. math:: U(w) = -\sum_i \log p(y_i \mid x_i, w) - \log p(w)

Energies and gradients of several chains come from one vectorised pass (``torch.func.vmap``) where the network allows it, else from
one pass for each chain, with the same results up to rounding. The network is in evaluation mode: BatchNorm uses its running statistics
and dropout is off.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flowbnn.batches import (
    NetworkCaller,
    check_finite_batch,
    device_of,
    dtype_of,
    join,
    move,
    shapes,
    split_batch,
    take,
)
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, learns_noise, with_level
from flowbnn.methods.mcmc.hamiltonian import with_gradient
from flowbnn.noise.layout import absorbs, layout_of, weight_scale, wrappable_layers
from flowbnn.posterior.weights import named_parts
from flowbnn.training.randomness import preserve_rng_state

ROWS = 4096  # examples in one pass
SEEN = 32  # at which chains are compared by what their networks give
LOG_NOISE = "log_noise"  # of a regression, where it is learned
Data = tuple[Any, Tensor]  # the inputs and targets of all training examples
Sites = dict[str, tuple[nn.Module, Tensor]]  # layers that get noise, with their weights


def gather(loader: Iterable[Any], check: Callable[[Any], None], seed: int) -> Data:
    """Everything that one pass over the loader gives; all generators are restored."""
    batches = []
    with preserve_rng_state(loader, seed):
        for number, batch in enumerate(loader):
            check_finite_batch(batch, None, number)
            check(batch)
            batches.append(split_batch(batch))
    if len({shapes(batch) for batch in batches}) > 1:
        raise FlowBNNError(
            "batches of different shapes or dtypes cannot be joined, and all examples are needed together; pad them to one length",
            kind="loader",
            argument="loader",
        )
    return join(batches)


def noisy_weights(sites: Sites, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""The weights :math:`W \mathrm{diag}\, z` of layers that compute what theirs do for inputs :math:`z \circ x`."""
    return {
        f"{name}.weight" if name else "weight": weight * weight_scale(module, noise[name].to(weight))
        for name, (module, weight) in sites.items()
    }


class NetworkPotential:
    r"""The potential of all weights that can be trained, tied ones once, or of noise with the weights fixed.

    The logarithm of a Gaussian likelihood's learned noise is one more variable for each target, with a normal prior of standard
    deviation 1 around the value that the likelihood has, which is the size of the residuals at the start.

    Args:
        model: the network; it is put into evaluation mode.
        likelihood: observation model of the targets given the outputs.
        data: all training examples.
        num_data: number of examples that the data stand for; their log-likelihood is scaled to it.
        prior_scale: of the prior :math:`\mathcal N(0, \sigma^2)` of the weights, or :math:`\mathcal N(1, \sigma^2)` of the noise.
        sites: the layers that get one vector of noise each; None samples the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: Data,
        num_data: int,
        prior_scale: float,
        sites: Sites | None = None,
    ) -> None:
        self.model, self.likelihood = NetworkCaller(model.eval()), likelihood.eval()
        self.inputs, self.targets = move(data, device_of(model), dtype_of(model))
        self.scale = num_data / len(self.targets)
        self.sites = sites
        values = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
        if sites is not None:
            values = {name: weight.new_ones(layout_of(part).dim) for name, (part, weight) in sites.items()}
        self.start = torch.cat([value.flatten() for value in values.values()])
        self.prior_loc = torch.full_like(self.start, 0.0 if sites is None else 1.0)
        self.prior_scale = torch.full_like(self.start, prior_scale)
        if learns_noise(likelihood):
            values[LOG_NOISE] = level = likelihood.log_scale.detach().to(self.start)
            self.likelihood = Gaussian("predicted")  # by one more output for each target
            self.start, self.prior_loc = torch.cat([self.start, level]), torch.cat([self.prior_loc, level])
            self.prior_scale = torch.cat([self.prior_scale, torch.ones_like(level)])
        self.shapes = {name: value.shape for name, value in values.items()}
        self.vectorised: bool | None = None  # not known yet

    def outputs(self, vector: Tensor, inputs: Any) -> Tensor:
        """What the network gives with the weights that a vector determines."""
        values = named_parts(vector, self.shapes)
        level = values.pop(LOG_NOISE, None)
        weights = values if self.sites is None else noisy_weights(self.sites, values)
        named = {f"network.{name}": value for name, value in weights.items()}
        outputs = functional_call(self.model, named, (inputs,))
        return outputs if level is None else with_level(outputs, level)

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``[C]`` in float64 and gradients ``[C, D]``."""
        away = (position - self.prior_loc) / self.prior_scale
        energy = 0.5 * away.square().sum(-1, dtype=torch.float64)
        gradient = away / self.prior_scale
        if self.vectorised is None and len(position) > 1:
            self.vectorised = self._can_be_vectorised(position[:2])
        for low in range(0, len(self.targets), ROWS):
            inputs, targets = take((self.inputs, self.targets), low, low + ROWS)
            more, slope = self._log_likelihood(position, inputs, targets, bool(self.vectorised))
            energy, gradient = energy + more, gradient + slope
        return energy, gradient

    def _can_be_vectorised(self, position: Tensor) -> bool:
        """Whether vmap runs the network, without a loop of its own that it would warn of."""
        inputs, targets = take((self.inputs, self.targets), 0, 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self._log_likelihood(position, inputs, targets, vectorised=True)
        except Exception:  # any layer may raise anything here; what is really wrong is raised again by one chain after the other
            return False
        return True

    def _log_likelihood(
        self, position: Tensor, inputs: Any, targets: Tensor, vectorised: bool
    ) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood of some examples for each chain, and its gradient."""

        def energy(vector: Tensor) -> Tensor:
            fitted = self.likelihood.log_prob(self.outputs(vector, inputs), targets)
            return -self.scale * fitted.sum(dtype=torch.float64)

        if vectorised and len(position) > 1:
            return with_gradient(lambda leaf: vmap(energy)(leaf))(position)
        parts = [with_gradient(lambda leaf: energy(leaf[0])[None])(one[None]) for one in position]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def function_values(self, positions: Tensor) -> Tensor:
        """Log-probabilities, or outputs of a regression, at some training inputs for positions ``[C, S, D]``, as ``[C, S, K]``.

        Unlike weights, they do not depend on the order of hidden units.
        """
        inputs, likelihood = take(self.inputs, 0, SEEN), self.likelihood
        values = []
        with torch.no_grad():
            for vector in positions.flatten(0, 1):
                outputs = self.outputs(vector.to(self.start.device), inputs)
                if isinstance(likelihood, Categorical):
                    outputs = outputs.log_softmax(-1)
                elif isinstance(likelihood, Bernoulli):
                    outputs = nn.functional.logsigmoid(outputs)
                values.append(outputs.flatten()[: 4 * SEEN].cpu())
        return torch.stack(values).unflatten(0, positions.shape[:2])


def noise_sites(model: nn.Module, layers: str | None, name: str) -> Sites:
    """The layers that get noise; one that cannot take it into its weights is refused by name."""
    known = wrappable_layers(model)
    chosen = {key: part for key, part in known.items() if layers is None or fnmatchcase(key, layers)}
    uses = Counter(id(own) for part in model.modules() for own in part._parameters.values())
    unfit = (key for key, part in chosen.items() if not absorbs(part) or uses[id(part.weight)] > 1)
    problem, layer = "", next(unfit, None)
    if layer is not None:
        problem = (
            f"{name}(over='noise') cannot serve layer '{layer}', a {type(chosen[layer]).__name__} that shares its weight or cannot "
            "take noise into it; leave it out with layers=..., or use fb.NodeNoise"
        )
    elif not chosen:
        problem = f"layers={layers!r} matches no layer that can carry noise{nearest(layers or '', known)}"
    if problem:
        raise FlowBNNError(problem, kind="layer", layer=layer, argument="layers")
    return {key: (part, part.weight.detach()) for key, part in chosen.items()}
