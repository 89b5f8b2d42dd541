r"""Potential of the weights of a network, or of the noise on its layers, under all training data.

.. math:: U(w) = -\sum_i \log p(y_i \mid x_i, w) - \log p(w)

Energies and gradients of several chains come from one vectorized pass (``torch.func.vmap``) if the network supports it, else from one
pass per chain. The results are equal up to rounding. The network is in evaluation mode: BatchNorm uses its running statistics and
dropout is off.
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
    check_selectable,
    join,
    move_data,
    shapes,
    split_batch,
    take,
)
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    append_log_variance,
    learns_noise,
)
from flowbnn.methods.mcmc.hamiltonian import make_potential
from flowbnn.methods.network_layers import check_real_weights, no_layer_selected, unsupported_layer
from flowbnn.noise.layout import absorbs, layout_of, weight_scale, wrappable_layers
from flowbnn.posterior.weights import named_parts
from flowbnn.training.randomness import preserve_rng_state

LOG_NOISE = "log_noise"  # name of the learned noise of a regression among the sampled variables
TrainingData = tuple[Any, Tensor]  # inputs and targets of all training examples
NoiseSites = dict[str, tuple[nn.Module, Tensor]]  # layers with noise, and their weights


def gather_data(loader: Iterable[Any], check: Callable[[Any], None], seed: int) -> TrainingData:
    """Concatenates the batches of one pass over the loader; all generators are restored.

    Args:
        loader: Batches of inputs and targets.
        check: Function that checks the targets of a batch.
        seed: Seed of a shuffled loader.
    """
    batches = []
    with preserve_rng_state(loader, seed):
        for number, batch in enumerate(loader):
            check_finite_batch(batch, None, number)
            check(batch)
            batches.append(split_batch(batch))
            check_selectable(batches[-1][0], "this method")
    if len({shapes(batch) for batch in batches}) > 1:
        text = "batches of different shapes or dtypes cannot be concatenated; pad them to one length"
        raise FlowBNNError(text, kind="lengths", argument="loader")
    return join(batches)


def noisy_weights(sites: NoiseSites, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""Returns the weights :math:`W \mathrm{diag}\, z`, which are equivalent to inputs :math:`z \circ x`, by parameter name."""
    return {
        f"{name}.weight" if name else "weight": weight * weight_scale(module, noise[name].to(weight))
        for name, (module, weight) in sites.items()
    }


class NetworkPotential:
    r"""Potential of all trainable weights, tied ones once, or of noise with fixed weights.

    The logarithm of the learned noise of a Gaussian likelihood is one more variable per target. Its prior is normal with standard
    deviation 1 around the current value of the likelihood, the size of the residuals at the start.

    Args:
        model: Network; it is set to evaluation mode.
        likelihood: Observation model of the targets.
        data: All training examples.
        num_data: Number of examples that the data represent; the log-likelihood is scaled to it.
        prior_scale: Standard deviation of the prior :math:`\mathcal N(0, \sigma^2)` of the weights, or
            :math:`\mathcal N(1, \sigma^2)` of the noise.
        sites: Layers with one noise vector each; None to sample the weights.
        rows_per_pass: Maximum number of examples in one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: TrainingData,
        num_data: int,
        prior_scale: float,
        sites: NoiseSites | None = None,
        rows_per_pass: int = 4096,
    ) -> None:
        self.model, self.likelihood = NetworkCaller(model.eval()), likelihood.eval()
        self.inputs, self.targets = move_data(data, model)
        self.scale = num_data / len(self.targets)
        self.sites, self.rows_per_pass = sites, rows_per_pass
        values = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
        check_real_weights(values)
        if sites is not None:
            values = {
                name: weight.new_ones(layout_of(module).dim) for name, (module, weight) in sites.items()
            }
        self.start = torch.cat([value.flatten() for value in values.values()])
        self.prior_loc = torch.full_like(self.start, 0.0 if sites is None else 1.0)
        self.prior_scale = torch.full_like(self.start, prior_scale)
        if learns_noise(likelihood):
            values[LOG_NOISE] = log_noise = likelihood.log_scale.detach().to(self.start)
            self.likelihood = Gaussian("predicted")  # with one more output per target
            self.start = torch.cat([self.start, log_noise])
            self.prior_loc = torch.cat([self.prior_loc, log_noise])
            self.prior_scale = torch.cat([self.prior_scale, torch.ones_like(log_noise)])
        self.shapes = {name: value.shape for name, value in values.items()}
        self.vectorized: bool | None = None  # None until the first call

    def outputs(self, vector: Tensor, inputs: Any) -> Tensor:
        """Returns the outputs of the network with the variables of a vector ``[D]``."""
        values = named_parts(vector, self.shapes)
        log_noise = values.pop(LOG_NOISE, None)
        weights = values if self.sites is None else noisy_weights(self.sites, values)
        parameters = {f"network.{name}": value for name, value in weights.items()}
        outputs = functional_call(self.model, parameters, (inputs,))
        return outputs if log_noise is None else append_log_variance(outputs, log_noise)

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns energies ``[C]`` in float64 and gradients ``[C, D]`` at positions ``[C, D]``."""
        deviation = (position - self.prior_loc) / self.prior_scale
        energy = 0.5 * deviation.square().sum(-1, dtype=torch.float64)
        gradient = deviation / self.prior_scale
        if self.vectorized is None and len(position) > 1:
            self.vectorized = self._supports_vmap(position[:2])
        for low in range(0, len(self.targets), self.rows_per_pass):
            inputs, targets = take((self.inputs, self.targets), low, low + self.rows_per_pass)
            loss, loss_gradient = self._data_energy(position, inputs, targets, bool(self.vectorized))
            energy, gradient = energy + loss, gradient + loss_gradient
        return energy, gradient

    def _supports_vmap(self, position: Tensor) -> bool:
        """Returns True if vmap runs the network without a warning about a slow fallback."""
        inputs, targets = take((self.inputs, self.targets), 0, 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self._data_energy(position, inputs, targets, vectorized=True)
        except Exception:  # any layer may raise anything; a real error is raised again without vmap
            return False
        return True

    def _data_energy(
        self, position: Tensor, inputs: Any, targets: Tensor, vectorized: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the negative log-likelihood of some examples for each chain, and its gradient."""

        def energy(vector: Tensor) -> Tensor:
            log_likelihood = self.likelihood.log_prob(self.outputs(vector, inputs), targets)
            return -self.scale * log_likelihood.sum(dtype=torch.float64)

        if vectorized and len(position) > 1:
            return make_potential(lambda leaf: vmap(energy)(leaf))(position)
        results = [make_potential(lambda leaf: energy(leaf[0])[None])(vector[None]) for vector in position]
        return torch.cat([result[0] for result in results]), torch.cat([result[1] for result in results])

    def function_values(self, positions: Tensor, num_inputs: int = 32) -> Tensor:
        """Returns log-probabilities, or outputs of a regression, at training inputs, as ``[C, S, K]``.

        Unlike weights, they do not depend on the order of hidden units.

        Args:
            positions: Positions of the chains ``[C, S, D]``.
            num_inputs: Number of training inputs.
        """
        inputs, likelihood = take(self.inputs, 0, num_inputs), self.likelihood
        values = []
        with torch.no_grad():
            for vector in positions.flatten(0, 1):
                outputs = self.outputs(vector.to(self.start.device), inputs)
                if isinstance(likelihood, Categorical):
                    outputs = outputs.log_softmax(-1)
                elif isinstance(likelihood, Bernoulli):
                    outputs = nn.functional.logsigmoid(outputs)
                values.append(outputs.flatten()[: 4 * num_inputs].cpu())
        return torch.stack(values).unflatten(0, positions.shape[:2])


def noise_sites(model: nn.Module, layers: str | None) -> NoiseSites:
    """Returns the layers that match a glob, or all that support noise for None.

    Raises:
        FlowBNNError: If no layer matches, or if a layer cannot absorb noise into its weights.
    """
    candidates = wrappable_layers(model)
    selected = {
        name: module for name, module in candidates.items() if layers is None or fnmatchcase(name, layers)
    }
    if not selected:
        raise no_layer_selected(layers, candidates, "layer for noise")
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for name, module in selected.items():
        if not absorbs(module) or uses[id(module.weight)] > 1:
            reason = "shared weight" if absorbs(module) else "cannot absorb noise"
            raise unsupported_layer(model, name, "variables='noise'", "fb.NodeNoise", reason)
    return {name: (module, module.weight.detach()) for name, module in selected.items()}
