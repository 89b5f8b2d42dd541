r"""Exact posterior density of the noise of all layers, :math:`p(z \mid D) \propto p(D \mid z)\, p(z)`.

The weights are fixed, the data are all examples of the loader, and the prior is the prior of the noise. One forward pass evaluates
several noise vectors, as blocks of the batch, in chunks that fit into memory.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowbnn.batches import device_of, halve_rows_on_oom, move_data, rewrap_forward_errors, take
from flowbnn.diagnostics.fixed_data import check_row_independence, read_fixed_data
from flowbnn.errors import FlowBNNError
from flowbnn.methods.mcmc.hamiltonian import make_potential
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.networks import deepcopy_network, input_columns
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import MAX_DENSE_DIM, independent_vectors
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior


class NoiseTarget:
    """Posterior density of the noise of all layers, concatenated to one vector ``[D]`` in the order of the layers.

    Args:
        posterior: Posterior of noise with a density.
        loader: Loader of the data. Every pass must give the same examples, in any order.
        seed: Seed of draws, and of the generators of the loader.
    """

    def __init__(self, posterior: Posterior, loader: Iterable[Any], seed: int = 0) -> None:
        _check_density(posterior)
        self.posterior, self.seed = posterior, seed
        model = deepcopy_network(posterior.model).requires_grad_(False).eval()
        self.likelihood = deepcopy(posterior.likelihood).requires_grad_(False).eval()
        self.network = NoisyNetwork(model, self.likelihood)
        self.device, self.dtype = device_of(model), self.network.dtype
        self.names, self.sizes = list(self.network.layers), self.network.sizes
        self.dim = sum(self.sizes)
        self.vectors = independent_vectors(model)
        # rows of a forward pass, large enough for full speed on each device
        self.rows = 8192 if self.device.type == "cuda" else 4096
        self.inputs, self.targets = self.read(loader)
        self.count = len(self.targets)

    def read(self, loader: Iterable[Any], purpose: str = "diagnostics") -> tuple[Any, Tensor]:
        """Returns all inputs and targets of a loader on the device of the network.

        Args:
            loader: Loader of batches, or one pair of inputs and targets.
            purpose: Purpose of the data, for error messages.

        Raises:
            FlowBNNError: If the network or the likelihood does not accept the data.
        """
        data = read_fixed_data(loader, self.seed, purpose, input_columns(self.network.model))
        inputs, targets = move_data(data, self.network.model)
        with rewrap_forward_errors(inputs), torch.no_grad():
            noise = self.draw(min(2, len(targets)))[0].to(self.dtype)
            outputs = self.network.outputs(take(inputs, 0, 2), noise)
        self.likelihood.check(self.likelihood.outputs_like(outputs[:1], targets), targets)
        check_row_independence(self.network, inputs)
        return inputs, self.likelihood.canonical_targets(targets).to(self.device)

    @property
    def data(self) -> tuple[Any, Tensor]:
        """All inputs and targets."""
        return self.inputs, self.targets

    # -------------------- vectors and layers

    def by_layer(self, vectors: Tensor) -> dict[str, Tensor]:
        """Returns the noise of each layer, ``{layer: [..., dim]}``, from vectors ``[..., D]``."""
        return dict(zip(self.names, vectors.split(self.sizes, -1), strict=True))

    @torch.no_grad()
    def draw(self, samples: int, stream: int = 0) -> tuple[Tensor, Tensor]:
        """Returns draws ``[S, D]`` of the posterior and their log-densities ``[S]``, in float64.

        Args:
            samples: Number of draws.
            stream: Number of the random stream. Different numbers give independent draws.
        """
        generator = torch.Generator(self.device).manual_seed(self.seed + 7919 * stream)
        draws = [vector.posterior().rsample_and_log_prob((samples,), generator) for vector, _ in self.vectors]
        densities = torch.stack([density.double() for _, density in draws])
        return self.join([value for value, _ in draws]), densities.sum(0)

    def draw_prior(self, samples: int) -> Tensor:
        """Returns draws ``[S, D]`` of the prior."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        return self._map_priors(lambda prior: prior.sample((samples,), generator=generator))

    @cached_property
    def prior_variance(self) -> Tensor:
        """Variance of the prior, ``[D]``."""
        return self._map_priors(lambda prior: prior.variance)

    def _map_priors(self, function: Callable[[Any], Tensor]) -> Tensor:
        """Applies a function to the prior of each vector and concatenates the results ``[..., D]``."""
        return self.join([function(vector.prior.distribution()).detach() for vector, _ in self.vectors])

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenates the values ``[..., dim]`` of all vectors to ``[..., D]`` in the order of the layers, in float64."""
        layers: dict[str, Tensor] = {}
        for (_, names), value in zip(self.vectors, values, strict=True):
            sizes = [self.network.layers[name].layout.dim for name in names]
            layers |= dict(zip(names, value.double().split(sizes, -1), strict=True))
        return torch.cat([layers[name] for name in self.names], -1)

    # -------------------- density

    def log_prior(self, vectors: Tensor) -> Tensor:
        r"""Returns :math:`\log p(z)`, ``[S]``."""
        layers = self.by_layer(vectors)
        densities = [
            vector.prior.distribution().log_prob(torch.cat([layers[name] for name in names], -1))
            for vector, names in self.vectors
        ]
        return torch.stack(densities).sum(0)

    @torch.no_grad()
    def log_likelihood(self, vectors: Tensor) -> Tensor:
        r"""Returns :math:`\log p(D \mid z)`, ``[S]`` in float64, for vectors ``[S, D]``."""

        def compute() -> Tensor:
            total = torch.zeros(len(vectors), dtype=torch.float64, device=self.device)
            for block, inputs, targets, noise in self.network.passes(vectors, *self.data, self.rows):
                log_prob = self.likelihood.log_prob(self.network.outputs(inputs, noise), targets)
                total[block] += log_prob.reshape(block.stop - block.start, -1).sum(1, dtype=torch.float64)
            return total

        return halve_rows_on_oom(self, compute)

    @torch.no_grad()
    def outputs(self, vectors: Tensor, data: tuple[Any, Tensor] | None = None) -> Tensor:
        """Returns the outputs of the network, ``[S, N, ...]``.

        Args:
            vectors: Noise ``[S, D]``.
            data: Inputs and targets. The default is the data of the density.
        """
        blocks: dict[int, list[Tensor]] = {}
        for block, inputs, _, noise in self.network.passes(vectors, *(data or self.data), self.rows):
            outputs = self.network.outputs(inputs, noise)
            blocks.setdefault(block.start, []).append(outputs.unflatten(0, (block.stop - block.start, -1)))
        return torch.cat([torch.cat(chunks, 1) for chunks in blocks.values()])

    def log_joint(self, vectors: Tensor) -> Tensor:
        r"""Returns :math:`\log p(D, z)`, ``[S]``."""
        with torch.no_grad():
            return self.log_prior(vectors) + self.log_likelihood(vectors)

    def gradient(self, vectors: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        r"""Returns :math:`\log p(z) + \beta \log p(D \mid z)`, ``[S]``, and its gradient, ``[S, D]``.

        Args:
            vectors: Noise ``[S, D]``.
            temperature: Exponent :math:`\beta` of the likelihood.
        """
        log_prior, prior_slope = make_potential(self.log_prior)(vectors)
        log_likelihood, slope = halve_rows_on_oom(
            self, lambda: self.network.gradients(vectors, *self.data, self.rows)
        )
        return log_prior + temperature * log_likelihood, prior_slope + temperature * slope

    # -------------------- coordinates in which the density is nearly a standard normal

    def precision(self, vectors: Tensor) -> Tensor:
        r"""Returns :math:`E[G(z)] + V^{-1}`, ``[D, D]``, at draws ``[S, D]``.

        :math:`G` is the Gauss-Newton matrix of the negative log-likelihood, and :math:`V` the variance of the prior.
        """
        return self._gauss_newton(vectors) + (1.0 / self.prior_variance).diag()

    def _gauss_newton(self, vectors: Tensor) -> Tensor:
        """Returns the mean Gauss-Newton matrix over draws. Every example has its own draws, several if there are few examples."""
        if self.dim > MAX_DENSE_DIM:
            text = f"chains, modes and tempering support {MAX_DENSE_DIM:,} dimensions, got {self.dim:,}; use evidence(method='psis')"
            raise FlowBNNError(text, kind="size", size=self.dim)
        total = torch.zeros(self.dim, self.dim, dtype=torch.float64, device=self.device)
        generator = torch.Generator().manual_seed(self.seed)
        repeats = max(1, 512 // self.count)
        for _ in range(repeats):
            index = torch.randint(len(vectors), (self.count,), generator=generator).to(self.device)
            for low in range(0, self.count, 256):
                inputs, targets = take(self.data, low, low + 256)
                noise = vectors[index[low : low + 256]].to(self.dtype)
                roots = self.network.derivatives(inputs, targets, noise, generator)[3].double()
                total += roots.T @ roots / repeats
        return total

    @cached_property
    def curvature(self) -> Tensor:
        """Mean Gauss-Newton matrix at draws of the posterior, ``[D, D]``."""
        return self._gauss_newton(self.draw(max(512, self.count), 100)[0])

    @cached_property
    def center(self) -> Tensor:
        """Mean of the posterior, ``[D]``."""
        return self.draw(2048, 99)[0].mean(0)

    def whitening(self, temperature: float = 1.0) -> "WhitenedDensity":
        r"""Returns coordinates :math:`z = m + A u` with :math:`A A^\top = (\beta\, E_q[G] + V^{-1})^{-1}`.

        :math:`V` is the variance of the prior.

        Args:
            temperature: Exponent :math:`\beta` of the likelihood.
        """
        precision = temperature * self.curvature + (1.0 / self.prior_variance).diag()
        root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(precision)))
        return WhitenedDensity(self, self.center, root, temperature)


class WhitenedDensity:
    r"""Density :math:`p(z)\, p(D \mid z)^\beta` in the coordinates :math:`z = m + A u`.

    The energy leaves out the constant :math:`\log|A|`.

    Args:
        target: Density of the noise given the data.
        center: Mean :math:`m`, ``[D]``.
        root: Lower triangular matrix :math:`A`, ``[D, D]``.
        temperature: Exponent :math:`\beta` of the likelihood.
    """

    def __init__(self, target: NoiseTarget, center: Tensor, root: Tensor, temperature: float = 1.0) -> None:
        self.target, self.center, self.root, self.temperature = target, center, root, temperature
        self.log_det = float(root.diagonal().log().sum())

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the energies ``[C]`` and their gradients ``[C, D]``, as samplers take them."""
        density, slope = self.target.gradient(self.vectors(position), self.temperature)
        return -density, -(slope @ self.root)

    def vectors(self, position: Tensor) -> Tensor:
        """Returns the noise at positions ``[..., D]``."""
        return self.center + position @ self.root.T

    def position(self, vectors: Tensor) -> Tensor:
        """Returns the positions of noise ``[..., D]``."""
        offset = (vectors - self.center).reshape(-1, len(self.center))
        return torch.linalg.solve_triangular(self.root, offset.T, upper=False).T.reshape(vectors.shape)


def _check_density(posterior: Any) -> None:
    """Raises FlowBNNError if a posterior is not a posterior of noise, or has no density."""
    message = ""
    if not isinstance(posterior, NoisePosterior):
        kind = getattr(posterior, "kind", type(posterior).__name__)
        scaled = isinstance(getattr(posterior, "posterior", None), NoisePosterior)  # temperature scaling
        hint = "pass its .posterior" if scaled else "use fb.NodeNoise, or diagnostics.agreement"
        message = f"diagnostics need a posterior of noise, got one of kind '{kind}'; {hint}"
    else:
        for name, layer in noise_layers(posterior.model).items():
            if not isinstance(layer.joint_noise, InputNoise):
                message = (
                    f"layer '{name}' has {layer.label}, noise without a density; use fb.noise.NormalAffine()"
                )
                break
    if message:
        raise FlowBNNError(message, kind="unsupported", argument="posterior")
