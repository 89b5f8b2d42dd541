r"""The potential of a network's weights, or of the noise on its layers, under all training data.

.. math:: U(w) = -\sum_i \log p(y_i \mid x_i, w) - \log p(w)

Energies and gradients of several chains come from one vectorised pass (``torch.func.vmap``) where the network allows it, else from
one pass for each chain, with the same results up to rounding. The network is in evaluation mode: BatchNorm uses its running statistics
and dropout is off.
"""

import math
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flowbnn.batches import device_of, dtype_of, split_batch
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods import Bernoulli, Categorical, Likelihood
from flowbnn.methods.fitting import Called, undisturbed
from flowbnn.methods.mcmc.hamiltonian import with_gradient
from flowbnn.noise import absorbs, layout_of, weight_scale, wrappable
from flowbnn.posterior.batches import join, move, take, tensors_of
from flowbnn.training import check_finite_batch

__all__ = ["Data", "NetworkPotential", "NoisePotential", "WeightPotential", "gather", "noise_sites"]

MOST_BYTES = 4 * 2**30
ROWS = 4096  # examples in one pass


class Data(NamedTuple):
    """All training examples."""

    inputs: Any
    targets: Tensor

    def first(self, count: int) -> "Data":
        return Data(take(self.inputs, 0, count), self.targets[:count])

    def to(self, model: nn.Module) -> "Data":
        """On the network's device and in its precision."""
        device = device_of(model)
        return Data(move(self.inputs, device, dtype_of(model)), self.targets.to(device))


def gather(loader: Iterable[Any], check: Callable[[Any], None], seed: int, name: str) -> Data:
    """Everything that one pass over the loader gives; torch's generator and the loader's own are restored."""
    inputs, targets, size = [], [], 0
    with undisturbed(loader, seed):
        for number, batch in enumerate(loader):
            check_finite_batch(batch, 0, number)
            check(batch)
            inputs.append(split_batch(batch)[0])
            targets.append(split_batch(batch)[1])
            size += sum(part.nbytes for part in (*tensors_of(inputs[-1]), targets[-1]))
            if size > MOST_BYTES:
                raise FlowBNNError(
                    f"{name} keeps all training data in memory, and these take more than {MOST_BYTES // 2**30} GiB; "
                    "fb.SGLD takes minibatches",
                    kind="memory",
                )
    return Data(join(inputs), torch.cat(targets))


class NetworkPotential:
    """The potential of a vector that determines a network.

    Subclasses set ``start`` and ``shapes``, the named parts of the vector, and define ``weights``.

    Args:
        model: the network; it is put into evaluation mode.
        likelihood: observation model of the targets given the outputs.
        data: all training examples, on the network's device.
        num_data: number of examples that the data stand for; their log-likelihood is scaled to it.
        prior_loc, prior_scale: of the Gaussian prior on the vector.
    """

    start: Tensor
    shapes: Mapping[str, Sequence[int]]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: Data,
        num_data: int,
        prior_loc: float,
        prior_scale: float,
    ) -> None:
        self.model, self.likelihood, self.data = Called(model.eval()), likelihood.eval(), data
        self.scale = num_data / len(data.targets)
        self.prior_loc, self.prior_scale = prior_loc, prior_scale
        self.vectorised: bool | None = None  # not known yet

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """The named parts ``{name: [..., *shape]}`` of vectors ``[..., D]``."""
        parts = vectors.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {
            name: part.reshape(*vectors.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    @abstractmethod
    def weights(self, vector: Tensor) -> dict[str, Tensor]:
        """The weights of the network that a vector determines."""

    def outputs(self, vector: Tensor, inputs: Any) -> Tensor:
        """What that network gives."""
        values = {f"network.{name}": value for name, value in self.weights(vector).items()}
        return functional_call(self.model, values, (inputs,))

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``[C]`` in float64 and gradients ``[C, D]``."""
        away = (position - self.prior_loc) / self.prior_scale
        energy = 0.5 * away.square().sum(-1, dtype=torch.float64)
        gradient = away / self.prior_scale
        if self.vectorised is None and len(position) > 1:
            self.vectorised = self._can_be_vectorised(position[:2])
        for low in range(0, len(self.data.targets), ROWS):
            inputs, targets = take(self.data.inputs, low, low + ROWS), self.data.targets[low : low + ROWS]
            more, slope = self._log_likelihood(position, inputs, targets, bool(self.vectorised))
            energy, gradient = energy + more, gradient + slope
        return energy, gradient

    def _can_be_vectorised(self, position: Tensor) -> bool:
        """Whether vmap runs the network, without a loop of its own that it would warn of."""
        inputs, targets = self.data.first(2)
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

    def function_values(self, positions: Tensor, most: int = 32) -> Tensor:
        """Log-probabilities, or outputs of a regression, at some training inputs for positions ``[C, S, D]``, as ``[C, S, K]``.

        Unlike weights, they do not depend on the order of hidden units.
        """
        inputs, likelihood = self.data.first(most).inputs, self.likelihood
        values = []
        with torch.no_grad():
            for vector in positions.flatten(0, 1):
                outputs = self.outputs(vector.to(self.start.device), inputs)
                if isinstance(likelihood, Categorical):
                    outputs = outputs.log_softmax(-1)
                elif isinstance(likelihood, Bernoulli):
                    outputs = nn.functional.logsigmoid(outputs)
                values.append(outputs.flatten()[: 4 * most].cpu())
        return torch.stack(values).unflatten(0, positions.shape[:2])

    def check(self, name: str) -> None:
        """Refuse a network whose potential is not a smooth function of its weights."""
        vector = self.start.detach()[None]
        first, slope = self(vector)
        again, _ = self(vector)
        kind, reason = "", ""
        if not bool(torch.isfinite(first).all() and torch.isfinite(slope).all()):
            kind, reason = "finite", "its log-likelihood or the gradient is not finite"
        elif not torch.allclose(first, again, rtol=1e-4, atol=1e-3):
            kind, reason = (
                "random",
                "it gives other outputs at every pass (dropout that stays on?); fb.MCDropout can",
            )
        if kind:
            raise FlowBNNError(f"{name} cannot sample this network: {reason}", kind=kind)


class WeightPotential(NetworkPotential):
    """The potential of all weights that can be trained, tied ones once."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, data: Data, num_data: int, prior_scale: float
    ) -> None:
        super().__init__(model, likelihood, data, num_data, 0.0, prior_scale)
        own = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        if len({tensor.dtype for tensor in own.values()}) != 1:
            raise FlowBNNError(
                "the weights are of several precisions; bring the network to one (.float())", kind="dtype"
            )
        self.shapes = {name: tensor.shape for name, tensor in own.items()}
        self.start = torch.cat([tensor.detach().flatten() for tensor in own.values()])

    def weights(self, vector: Tensor) -> dict[str, Tensor]:
        return self.unpack(vector)


class NoisePotential(NetworkPotential):
    r"""The potential of one vector of noise for every layer, multiplied with its input, with the weights fixed.

    :math:`\mathrm{layer}_W(z \circ x) = \mathrm{layer}_{W \mathrm{diag}\, z}(x)`, and :math:`z \sim \mathcal N(1, \sigma^2)`.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: Data,
        num_data: int,
        noise_scale: float,
        sites: Mapping[str, nn.Module],
    ) -> None:
        super().__init__(model, likelihood, data, num_data, 1.0, noise_scale)
        self.sites = dict(sites)
        self.shapes = {name: (layout_of(module).dim,) for name, module in self.sites.items()}
        weight: Any = next(iter(self.sites.values())).weight
        self.start = torch.ones(sum(size for (size,) in self.shapes.values())).to(weight.detach())

    def weights(self, vector: Tensor) -> dict[str, Tensor]:
        scaled = {}
        for name, noise in self.unpack(vector).items():
            module: Any = self.sites[name]
            weight = module.weight.detach() * weight_scale(module, noise)
            scaled[f"{name}.weight" if name else "weight"] = weight
        return scaled


def noise_sites(model: nn.Module, layers: str | None, name: str) -> dict[str, nn.Module]:
    """The layers that get noise; one that cannot take it into its weights is refused by name."""
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    sites = {key: part for key, part in model.named_modules() if wrappable(part) and id(part) not in inner}
    chosen = {key: part for key, part in sites.items() if layers is None or fnmatchcase(key, layers)}
    uses = Counter(id(own) for part in model.modules() for own in part._parameters.values())
    reason, fields = "", {"kind": "layers", "argument": "layers"}
    if not chosen and layers is not None:
        reason = f"layers={layers!r} matches no layer{nearest(layers, sites)}"
    elif not chosen:
        reason = f"this network has no layer that could carry noise; sample its weights with {name}(over='weights')"
    for key, part in chosen.items():
        shared = absorbs(part) and uses[id(part.weight)] > 1
        if shared or not absorbs(part):
            why = "whose weight another layer shares" if shared else "that cannot take it into its weight"
            reason, fields = (
                f"{name}(over='noise') cannot serve layer '{key}', a {type(part).__name__} {why}; leave it out with layers=..., "
                "or use fb.NodeNoise",
                {"kind": "layer", "layer": key},
            )
            break
    if reason:
        raise FlowBNNError(reason, **fields)
    return chosen
