r"""The potential of a network's weights, or of the noise on its layers, under all training data.

.. math:: U(w) = -\sum_i \log p(y_i \mid x_i, w) - \log p(w)

Energies and gradients of several chains come from one vectorised pass (``torch.func.vmap``) where the network allows that, else from
one after the other, with the same results up to rounding. The network is in evaluation mode: statistics of BatchNorm are held,
dropout is off.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.likelihoods import Bernoulli, Categorical, Likelihood
from flowbnn.methods.fitting import Bundle
from flowbnn.noise import absorbs, layout_of, weight_scale, wrappable
from flowbnn.posterior.batches import join, move, split_batch, take, tensors_of
from flowbnn.posterior.forward import device_of, dtype_of
from flowbnn.training import check_finite_batch

__all__ = ["Data", "NetworkPotential", "NoisePotential", "WeightPotential", "gather", "noise_sites"]

MOST_BYTES = 4 * 2**30
ROWS = 4096  # examples in one pass


class Data:
    """All training examples."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, model: nn.Module) -> "Data":
        """On the network's device and in its precision."""
        device = device_of(model)
        return Data(move(self.inputs, device, dtype_of(model)), self.targets.to(device))


def gather(loader: Iterable[Any], check: Callable[[Any], None], seed: int, name: str) -> Data:
    """Everything that one pass over the loader gives; neither torch's nor the loader's generator is moved."""
    own = getattr(loader, "generator", None)
    before = own.get_state() if isinstance(own, torch.Generator) else None
    inputs, targets, size = [], [], 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, batch in enumerate(loader):
            check_finite_batch(batch, 0, number)
            check(batch)
            some, truth = split_batch(batch)
            inputs.append(some)
            targets.append(truth)
            size += sum(part.numel() * part.element_size() for part in (*tensors_of(some), truth))
            if size > MOST_BYTES:
                raise FlowBNNError(
                    f"{name} keeps all training data in memory, and these take more than {MOST_BYTES // 2**30} GiB; "
                    "fb.SGLD goes by minibatches"
                )
    if before is not None:
        own.set_state(before)  # type: ignore[union-attr]
    return Data(join(inputs), torch.cat(targets))


class NetworkPotential:
    """The potential of a vector that stands for a network.

    Subclasses define ``values(vector)``, the weights that a vector stands for, and set ``start``.

    Args:
        model: the network; it is put into evaluation mode.
        likelihood: how outputs speak of targets.
        data: all of them, on the network's device.
        num_data: examples that the data stand for; their log-likelihood is scaled to that number.
        prior_loc, prior_scale: of the Gaussian prior on the vector.
    """

    start: Tensor

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: Data,
        num_data: int,
        prior_loc: float,
        prior_scale: float,
    ) -> None:
        self.bundle, self.data = Bundle(model, likelihood), data
        self.bundle.eval()
        self.scale = num_data / len(data)
        self.prior_loc, self.prior_scale = prior_loc, prior_scale
        self.vectorised: bool | None = None  # not known yet

    def values(self, vector: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must define values(vector)")

    def outputs(self, vector: Tensor, inputs: Any) -> Tensor:
        """What the network gives with the weights that a vector stands for."""
        values = {f"network.{name}": value for name, value in self.values(vector).items()}
        return functional_call(self.bundle, values, (inputs,))

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``[C]`` in float64 and gradients ``[C, D]``."""
        away = (position - self.prior_loc) / self.prior_scale
        energy = 0.5 * away.square().sum(-1, dtype=torch.float64)
        gradient = away / self.prior_scale
        if self.vectorised is None and len(position) > 1:
            self.try_out(position[:2])
        for low in range(0, len(self.data), ROWS):
            inputs = take(self.data.inputs, low, low + ROWS)
            more, slope = self.part(position, inputs, self.data.targets[low : low + ROWS])
            energy, gradient = energy + more, gradient + slope
        return energy, gradient

    def try_out(self, position: Tensor) -> None:
        """Find out whether torch can vectorise the network, without loops of its own that it warns of."""
        self.vectorised = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self.part(position, take(self.data.inputs, 0, 2), self.data.targets[:2])
        except Exception:  # whatever a stranger's layer raises there; one chain after the other raises it again if it is real
            self.vectorised = False

    def part(self, position: Tensor, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The share of some examples."""

        def energy(vector: Tensor) -> Tensor:
            fitted = self.bundle.likelihood.log_prob(self.outputs(vector, inputs), targets)
            return -self.scale * fitted.sum(dtype=torch.float64)

        if self.vectorised and len(position) > 1:
            return _differentiated(lambda leaf: vmap(energy)(leaf), position)
        parts = [_differentiated(lambda leaf: energy(leaf[0])[None], one[None]) for one in position]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def function_values(self, position: Tensor, most: int) -> Tensor:
        """What the networks ``[C, D]`` say of some training inputs, as numbers ``[C, K]`` that any labelling of hidden units shares."""
        inputs = take(self.data.inputs, 0, most)
        with torch.no_grad():
            outputs = torch.stack([self.outputs(one, inputs) for one in position])
        if isinstance(self.bundle.likelihood, Categorical):
            outputs = outputs.log_softmax(-1)
        elif isinstance(self.bundle.likelihood, Bernoulli):
            outputs = nn.functional.logsigmoid(outputs)
        return outputs.flatten(1)[:, : 4 * most]

    def check(self, name: str) -> None:
        """Refuse a network whose potential is not a smooth function of its weights."""
        vector = self.start.detach()[None]
        first, slope = self(vector)
        again, _ = self(vector)
        if not bool(torch.isfinite(first).all() and torch.isfinite(slope).all()):
            raise FlowBNNError(
                f"the log-likelihood of this network or its gradient is not finite, so {name} has nowhere to start"
            )
        if not torch.allclose(first, again, rtol=1e-4, atol=1e-3):
            raise FlowBNNError(
                f"this network gives other outputs at every pass in evaluation mode (dropout that stays on?), and {name} needs a "
                "deterministic one; fb.MCDropout serves networks with dropout"
            )


def _differentiated(function: Callable[[Tensor], Tensor], position: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = position.detach().requires_grad_()
        energy = function(leaf)
        (gradient,) = torch.autograd.grad(energy.sum(), leaf)
    return energy.detach(), gradient


class WeightPotential(NetworkPotential):
    """Of all weights that can be trained, tied ones once."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        data: Data,
        num_data: int,
        prior_scale: float,
    ) -> None:
        super().__init__(model, likelihood, data, num_data, 0.0, prior_scale)
        own = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        kinds = {tensor.dtype for tensor in own.values()}
        if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
            raise FlowBNNError("the weights are of several precisions; bring the network to one (.float())")
        self.shapes = {name: tensor.shape for name, tensor in own.items()}
        self.start = torch.cat([tensor.detach().flatten() for tensor in own.values()])

    def values(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """Weights ``{name: [M, ...]}`` of vectors ``[M, D]``."""
        parts = vectors.split([shape.numel() for shape in self.shapes.values()], -1)
        return {
            name: part.reshape(-1, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


class NoisePotential(NetworkPotential):
    r"""Of one vector of noise for every layer, multiplied with its input, the weights being held.

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
        self.sizes = {name: layout_of(module).dim for name, module in self.sites.items()}
        weight = next(iter(self.sites.values()))._parameters["weight"]
        assert weight is not None
        self.start = torch.ones(sum(self.sizes.values()), dtype=weight.dtype, device=weight.device)

    def values(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split(list(self.sizes.values()), -1)
        found = {}
        for (name, module), part in zip(self.sites.items(), parts, strict=True):
            weight: Any = module.weight
            found[f"{name}.weight" if name else "weight"] = weight.detach() * weight_scale(module, part)
        return found

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """Noise ``{layer: [M, dim]}`` of vectors ``[M, D]``."""
        parts = vectors.split(list(self.sizes.values()), -1)
        return dict(zip(self.sizes, parts, strict=True))


def noise_sites(model: nn.Module, layers: str | None, name: str) -> dict[str, nn.Module]:
    """The layers on which noise is to lie; one that cannot take it into its weights is refused by name."""
    inner = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    found = {
        label: part for label, part in model.named_modules() if wrappable(part) and id(part) not in inner
    }
    if layers is not None:
        chosen = {label: part for label, part in found.items() if fnmatchcase(label, layers)}
        if not chosen:
            raise FlowBNNError(f"layers={layers!r} matches no layer{nearest(layers, found)}")
        found = chosen
    if not found:
        raise FlowBNNError(
            f"this network has no layer that could carry noise; sample its weights with {name}(over='weights')"
        )
    uses: dict[int, int] = {}
    for part in model.modules():
        for own in part._parameters.values():
            uses[id(own)] = uses.get(id(own), 0) + 1
    for label, part in found.items():
        if not absorbs(part) or uses[id(part._parameters.get("weight"))] > 1:
            why = (
                "whose weight another layer shares"
                if absorbs(part)
                else "that cannot take it into its weight"
            )
            raise FlowBNNError(
                f"{name}(over='noise') cannot serve layer '{label}', a {type(part).__name__} {why}; leave it out with layers=..., "
                "or use fb.NodeNoise"
            )
    return found
