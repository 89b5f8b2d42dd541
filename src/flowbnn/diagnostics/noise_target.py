r"""The density that a posterior of noise approximates: :math:`p(z \mid D) \propto p(D \mid z)\, p(z)` over the noise of all layers.

The weights are fixed, the data are all that the loader gives, and the prior is that of the posterior's own noise. Several noise vectors
go through the network at once, as blocks of the batch, in chunks that fit the memory.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flowbnn.batches import (
    as_loader,
    device_of,
    dtype_of,
    halve_rows_on_oom,
    has_row_axis,
    move,
    rewrap_forward_errors,
    split_batch,
    take,
    tensors_of,
)
from flowbnn.errors import FlowBNNError
from flowbnn.methods.fitting import check_loader
from flowbnn.methods.mcmc.hamiltonian import make_potential
from flowbnn.methods.mcmc.potential import gather_data
from flowbnn.methods.variational.natural import NoisyNetwork
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import DENSE, independent_vectors
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior

ROWS = {"cpu": 4096, "cuda": 8192}  # in one pass


class NoiseTarget:
    """All the noise of a posterior as one vector ``[D]``, in the order of the layers, with its density given the data.

    Args:
        posterior: of noise with a density.
        loader: of the data; they must be the same in every pass, in any order.
        seed: of draws, and of the loader's generators.
    """

    def __init__(self, posterior: Posterior, loader: Iterable[Any], seed: int = 0) -> None:
        _check_density(posterior)
        self.posterior, self.seed = posterior, seed
        model = deepcopy(posterior.model).requires_grad_(False).eval()
        self.likelihood = deepcopy(posterior.likelihood).requires_grad_(False).eval()
        self.network = NoisyNetwork(model, self.likelihood)
        self.device, self.dtype = device_of(model), self.network.dtype
        self.names, self.sizes = list(self.network.layers), self.network.sizes
        self.dim = sum(self.sizes)
        self.vectors = independent_vectors(model)
        self.rows = ROWS.get(self.device.type, ROWS["cpu"])
        self.inputs, self.targets = self.read(loader, "diagnostics")
        self.count = len(self.targets)

    def read(self, loader: Iterable[Any], use: str) -> tuple[Any, Tensor]:
        """All inputs and targets of a loader, on the network's device; what does not fit the network is refused."""
        inputs, targets = move(fixed_data(loader, self.seed, use), self.device, dtype_of(self.network.model))
        with rewrap_forward_errors(inputs), torch.no_grad():
            two = self.network.outputs(take(inputs, 0, 2), self.draw(min(2, len(targets)))[0].to(self.dtype))
        self.likelihood.check(two[:1].expand(len(targets), *two.shape[1:]), targets)
        check_rows(self.network, inputs)
        return inputs, self.likelihood.canonical(targets).to(self.device)

    @property
    def data(self) -> tuple[Any, Tensor]:
        return self.inputs, self.targets

    # -------------------- vectors and layers

    def by_layer(self, vectors: Tensor) -> dict[str, Tensor]:
        """``{layer: [..., dim]}`` of vectors ``[..., D]``."""
        return dict(zip(self.names, vectors.split(self.sizes, -1), strict=True))

    @torch.no_grad()
    def draw(self, samples: int, number: int = 0) -> tuple[Tensor, Tensor]:
        """Vectors ``[S, D]`` of the posterior and their log-density ``[S]``, in float64; another ``number``, other ones."""
        source = torch.Generator(self.device).manual_seed(self.seed + 7919 * number)
        drawn = [vector.posterior().rsample_and_log_prob((samples,), source) for vector, _ in self.vectors]
        densities = torch.stack([density.double() for _, density in drawn])
        return self.joined([value for value, _ in drawn]), densities.sum(0)

    def draw_prior(self, samples: int) -> Tensor:
        """Vectors of the prior."""
        source = torch.Generator(self.device).manual_seed(self.seed + 1)
        return self._of_priors(lambda prior: prior.sample((samples,), generator=source))

    @cached_property
    def prior_variance(self) -> Tensor:
        return self._of_priors(lambda prior: prior.variance)

    def _of_priors(self, make: Callable[[Any], Tensor]) -> Tensor:
        """What ``make`` gives of the prior of each vector, ``[..., D]`` in the order of the layers."""
        return self.joined([make(vector.prior.distribution()).detach() for vector, _ in self.vectors])

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """What belongs to each vector, ``[..., dim]``, as one of ``[..., D]`` in the order of the layers, in float64."""
        parts: dict[str, Tensor] = {}
        for (_, names), value in zip(self.vectors, values, strict=True):
            sizes = [self.network.layers[name].layout.dim for name in names]
            parts |= dict(zip(names, value.double().split(sizes, -1), strict=True))
        return torch.cat([parts[name] for name in self.names], -1)

    # -------------------- the density

    def log_prior(self, vectors: Tensor) -> Tensor:
        """``[S]``."""
        parts = self.by_layer(vectors)
        each = [
            vector.prior.distribution().log_prob(torch.cat([parts[name] for name in names], -1))
            for vector, names in self.vectors
        ]
        return torch.stack(each).sum(0)

    @torch.no_grad()
    def log_likelihood(self, vectors: Tensor) -> Tensor:
        r""":math:`\log p(D \mid z)` of vectors ``[S, D]``, ``[S]`` in float64."""

        def run() -> Tensor:
            total = torch.zeros(len(vectors), dtype=torch.float64, device=self.device)
            for some, inputs, targets, noise in self.network.passes(vectors, *self.data, self.rows):
                fitted = self.likelihood.log_prob(self.network.outputs(inputs, noise), targets)
                total[some] += fitted.reshape(some.stop - some.start, -1).sum(1, dtype=torch.float64)
            return total

        return halve_rows_on_oom(self, run)

    @torch.no_grad()
    def outputs(self, vectors: Tensor, data: tuple[Any, Tensor] | None = None) -> Tensor:
        """The network's outputs for all inputs, or those of other data, ``[S, N, ...]``."""
        parts: dict[int, list[Tensor]] = {}
        for some, inputs, _, noise in self.network.passes(vectors, *(data or self.data), self.rows):
            outputs = self.network.outputs(inputs, noise)
            parts.setdefault(some.start, []).append(outputs.unflatten(0, (some.stop - some.start, -1)))
        return torch.cat([torch.cat(row, 1) for row in parts.values()])

    def log_joint(self, vectors: Tensor) -> Tensor:
        r""":math:`\log p(D, z)`, ``[S]``."""
        with torch.no_grad():
            return self.log_prior(vectors) + self.log_likelihood(vectors)

    def gradient(self, vectors: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        r""":math:`\log p(z) + \beta \log p(D \mid z)`, ``[S]``, and its gradient, ``[S, D]``; :math:`\beta` is the temperature."""
        prior, slope = make_potential(self.log_prior)(vectors)
        fitted, own = halve_rows_on_oom(self, lambda: self.network.gradients(vectors, *self.data, self.rows))
        return prior + temperature * fitted, slope + temperature * own

    # -------------------- coordinates in which the density is nearly a standard normal

    def precision(self, vectors: Tensor) -> Tensor:
        r""":math:`E[G(z)] + V^{-1}`, ``[D, D]``, at draws ``[S, D]``; :math:`G`: Gauss-Newton matrix of the negative log-likelihood."""
        return self._gauss_newton(vectors) + (1.0 / self.prior_variance).diag()

    def _gauss_newton(self, vectors: Tensor) -> Tensor:
        """Every example has draws of its own, more than one where there are few."""
        if self.dim > DENSE:
            raise FlowBNNError(
                f"{self.dim:,} numbers of noise are too many: chains, climbs and tempering need dense matrices of "
                f"{8e-9 * self.dim**2:.1f} GB each, and run up to {DENSE:,}; pareto_k and evidence(method='psis') need none",
                kind="size",
                size=self.dim,
            )
        total = torch.zeros(self.dim, self.dim, dtype=torch.float64, device=self.device)
        labels = torch.Generator().manual_seed(self.seed)
        times = max(1, 512 // self.count)
        for _ in range(times):
            index = torch.randint(len(vectors), (self.count,), generator=labels).to(self.device)
            for low in range(0, self.count, 256):
                inputs, targets = take(self.data, low, low + 256)
                noise = vectors[index[low : low + 256]].to(self.dtype)
                roots = self.network.derivatives(inputs, targets, noise, labels)[3].double()
                total += roots.T @ roots / times
        return total

    @cached_property
    def curvature(self) -> Tensor:
        """The Gauss-Newton matrix at draws of the posterior."""
        return self._gauss_newton(self.draw(max(512, self.count), 100)[0])

    @cached_property
    def center(self) -> Tensor:
        """The posterior's mean."""
        return self.draw(2048, 99)[0].mean(0)

    def whitening(self, temperature: float = 1.0) -> "Whitened":
        r"""Coordinates :math:`z = m + A u`, :math:`A A^\top = (\beta\, E_q[G] + V^{-1})^{-1}`; :math:`V` is the prior's variance."""
        precision = temperature * self.curvature + (1.0 / self.prior_variance).diag()
        root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(precision)))
        return Whitened(self, self.center, root, temperature)


class Whitened:
    r"""The density :math:`p(z)\, p(D \mid z)^\beta` in coordinates :math:`z = m + A u`; the energy leaves out :math:`\log|A|`."""

    def __init__(self, target: NoiseTarget, center: Tensor, root: Tensor, temperature: float = 1.0) -> None:
        self.target, self.center, self.root, self.temperature = target, center, root, temperature
        self.log_det = float(root.diagonal().log().sum())

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Energies ``[C]`` and gradients ``[C, D]``, as chains take them."""
        density, slope = self.target.gradient(self.vectors(position), self.temperature)
        return -density, -(slope @ self.root)

    def vectors(self, position: Tensor) -> Tensor:
        """The noise at positions ``[..., D]``."""
        return self.center + position @ self.root.T

    def position(self, vectors: Tensor) -> Tensor:
        """Where the noise ``[..., D]`` lies."""
        away = (vectors - self.center).reshape(-1, len(self.center))
        return torch.linalg.solve_triangular(self.root, away.T, upper=False).T.reshape(vectors.shape)


def _check_density(posterior: Any) -> None:
    trouble = ""
    inner = getattr(posterior, "posterior", None)  # of temperature scaling
    if isinstance(inner, NoisePosterior):
        trouble = (
            "this takes a posterior of noise, and not one whose predictions are tempered: give its .posterior"
        )
    elif not isinstance(posterior, NoisePosterior):
        trouble = (
            "this takes a posterior of noise (of fb.NodeNoise or fb.calibrate), not one of kind "
            f"'{getattr(posterior, 'kind', type(posterior).__name__)}': weights have copies of every mode, which make "
            "densities hard to compare, but agreement() takes chains over weights for predictions of any posterior"
        )
    else:
        for name, layer in noise_layers(posterior.model).items():
            if not trouble and not isinstance(layer.whole, InputNoise):
                trouble = (
                    f"the noise of layer '{name}' is {layer.label}, which has no density to be compared with; take noise that has "
                    "one, such as fb.noise.NormalAffine()"
                )
    if trouble:
        raise FlowBNNError(trouble, kind="unsupported", argument="posterior")


@torch.no_grad()
def check_rows(network: NoisyNetwork, inputs: Any) -> None:
    """Refuse a network whose output is NaN, or depends on what else is in the batch: an example has no likelihood of its own."""
    many, few = take(inputs, 0, 8), take(inputs, 0, 2)
    ones = torch.ones(8, sum(network.sizes), dtype=network.dtype, device=device_of(network.model))
    together, alone = (network.outputs(some, ones[: len(tensors_of(some)[0])]) for some in (many, few))
    if together.isnan().any():
        raise FlowBNNError(
            "the network gives NaN for the first examples: look for NaN or infinity in its weights",
            kind="not finite",
        )
    tolerance = max(1e-3, 10.0 * torch.finfo(together.dtype).eps) * float(together.abs().max())
    if not torch.allclose(together[: len(alone)], alone, rtol=0.0, atol=tolerance):
        raise FlowBNNError(
            "the network's output for an example depends on the other examples of its batch, as BatchNorm with "
            "track_running_stats=False makes it: an example has no likelihood of its own; give layers that see one example at a time",
            kind="network",
        )


def fixed_data(loader: Iterable[Any], seed: int, use: str) -> tuple[Any, Tensor]:
    """All inputs and targets of a loader or one pair; a loader whose passes differ in more than order is refused."""
    loader = as_loader(loader)
    check_loader(loader, use)

    def check(batch: Any) -> None:
        check_loader([batch], use)
        inputs, targets = split_batch(batch)
        if not has_row_axis((inputs, targets)):
            given = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(inputs))
            raise FlowBNNError(
                f"inputs of shape {given} and targets of shape {tuple(targets.shape)} do not have the same examples on their first "
                "axis; give one target for each",
                kind="targets",
                argument="loader",
            )

    def once(number: int) -> tuple[Any, Tensor]:
        try:
            return gather_data(loader, check, number)
        except IndexError:
            raise FlowBNNError(
                f"the loader gives no examples: there is nothing for {use}", kind="loader", argument="loader"
            ) from None

    data = once(seed)
    if not isinstance(loader, list | tuple) and _rows_of(data) != _rows_of(once(seed + 1)):
        raise FlowBNNError(
            f"two passes over the loader for {use} give different examples: the likelihood must be that of fixed data, so leave out "
            "random augmentation and drop_last (a shuffled order is fine)",
            kind="loader",
            argument="loader",
        )
    return data


def _rows_of(data: tuple[Any, Tensor]) -> list[tuple[int, ...]]:
    """Checksums of every example, sorted."""
    dense = [tensor.cpu() for tensor in tensors_of(data) if tensor.layout == torch.strided]
    raw = [tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy() for tensor in dense]
    return sorted(zip(*([crc32(row) for row in rows] for rows in raw), strict=True))
