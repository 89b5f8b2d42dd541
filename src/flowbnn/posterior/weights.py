r"""Posteriors over weights: a sample is the same network with other weights.

Subclasses define how one set of weights is drawn (:meth:`WeightPosterior.weights`). The base class draws several sets, predicts
with them, returns them as networks, and saves and loads them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.errors import FlowBNNError, check_name, check_shape, pluralize, value_error
from flowbnn.likelihoods import Gaussian, Likelihood, append_log_variance
from flowbnn.networks import check_copies, deepcopy_network
from flowbnn.options import Bounds, SampleCount, check, checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import compiled_forward
from flowbnn.posterior.prediction import new_seed
from flowbnn.training import History


def generator_of(seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns the generator of one sample, so that samples can be drawn in any order."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + index) % 2**63)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a network. Tied tensors have an entry for each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def named_parts(vectors: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Splits vectors ``[..., D]`` of concatenated tensors into ``{name: [..., *shape]}``.

    Args:
        vectors: Concatenated tensors.
        shapes: Shape of each tensor, by name.

    >>> named_parts(torch.arange(3.0), {"weight": (1, 2), "bias": (1,)})
    {'weight': tensor([[0., 1.]]), 'bias': tensor([2.])}
    """
    pieces = vectors.split_with_sizes([math.prod(shape) for shape in shapes.values()], -1)
    named = zip(shapes.items(), pieces, strict=True)
    return {name: piece.reshape((*vectors.shape[:-1], *shape)) for (name, shape), piece in named}


class PointPosterior(Posterior):
    """Single network with the interface of a posterior.

    >>> import torch
    >>> from flowbnn.likelihoods import Categorical
    >>> posterior = PointPosterior(nn.Linear(2, 3), Categorical())
    >>> posterior.predict(torch.zeros(5, 2)).num_samples
    1
    """

    kind = "point"
    default_samples = 1
    supports_compile = True

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of the network, once per sample."""
        forward = partial(compiled_forward, prediction, {})
        outputs = prediction.run(inputs, [forward] if prediction.options.compile is True else None)
        return outputs.expand(len(samples), *(-1,) * (outputs.ndim - 1))

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns copies of the network."""
        check_copies(self.model, samples)
        return [deepcopy_network(self.model).eval() for _ in range(samples)]

    @checked
    def draws(self, samples: SampleCount, seed: int | None = None) -> dict[str, Tensor]:
        """Returns the weights of the network, ``samples`` times."""
        check_copies(self.model, samples)
        parameters = self.model.named_parameters()
        return {name: value.detach().expand(samples, *value.shape).clone() for name, value in parameters}


class SwappedTensors:
    """Context manager that replaces tensors (or modules) of a network, and restores them at the end of the ``with`` block.

    Args:
        replacements: Dictionary of a module that holds a tensor, the name of the tensor there, and its replacement.
    """

    def __init__(self, replacements: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        self.replacements = [(holder, key, holder[key], value) for holder, key, value in replacements]

    def __enter__(self) -> Self:
        for holder, key, _, value in self.replacements:
            holder[key] = value
        return self

    def __exit__(self, *error: object) -> None:
        for holder, key, original, _ in self.replacements:
            holder[key] = original


def empty_copy(tensor: Tensor) -> Tensor:
    """Returns an empty tensor of the same shape, strides and class."""
    empty = torch.empty_like(tensor.detach())
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class SwappedWeights(SwappedTensors):
    """Context manager that replaces parameters and buffers of a network by other values.

    Args:
        model: Network, which other threads must not use.
        names: Names of the tensors in ``state_dict``. Tied tensors may have any of their names.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        tensors = _named_tensors(model)
        self.values = {name: empty_copy(tensors[name]) for name in names}
        by_id = {id(tensors[name]): self.values[name] for name in names}
        holders = [holder for module in model.modules() for holder in (module._parameters, module._buffers)]
        super().__init__(
            (holder, key, by_id[id(tensor)])
            for holder in holders
            for key, tensor in holder.items()
            if tensor is not None and id(tensor) in by_id
        )

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copies values into the replacements."""
        for name, value in values.items():
            self.values[name].data.copy_(value)


class WeightPosterior(Posterior):
    """Base class for distributions over weights.

    Subclasses define ``names``, ``weights(index, seed)``, for saving ``state()`` and ``from_state(...)``, and ``log_density`` if they
    have one.
    """

    kind = "weights"
    supports_compile = True
    requires_shared = True

    @property
    def names(self) -> list[str]:
        """Names of the parameters and buffers that differ between samples."""
        return self._unsupported("names; define it")

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        """Returns the weights of one sample."""
        return self._unsupported("weights; define it")

    def stream(self, samples: range, prediction: Prediction) -> Iterator[dict[str, Tensor]]:
        """Yields the weights of some samples of a prediction.

        Subclasses may draw several samples at once. Each set of weights is used before the next set is requested.
        """
        for index in samples:
            yield self.weights(index, prediction.seed)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log-density of one set of weights."""
        return self._unsupported("density")

    @checked
    def draws(self, samples: SampleCount, seed: int | None = None) -> dict[str, Tensor]:
        """Returns the weights ``{name: [samples, ...]}`` of a prediction with the same seed."""
        check_copies(self.model, samples)
        seed = new_seed() if seed is None else seed
        with torch.no_grad():
            weights = [self.weights(index, seed) for index in range(samples)]
        return {name: torch.stack([values[name] for values in weights]) for name in weights[0]}

    @checked
    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log-density ``[S]`` of weights ``{name: [S, ...]}``, as :meth:`draws` returns them."""
        missing = [name for name in self.names if name not in values]
        counts = {len(value) for value in values.values()}
        if missing or len(counts) != 1:
            reason = f"'{missing[0]}' is missing" if missing else f"they have {sorted(counts)} samples"
            text = f"log_prob needs all weights: {reason}"
            raise FlowBNNError(text, argument="values", missing=missing)
        with torch.no_grad():
            densities = [self.log_density({k: v[i] for k, v in values.items()}) for i in range(counts.pop())]
        return torch.stack(densities)

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns the networks of a prediction with the same seed, as copies with weights drawn from the posterior."""
        check_copies(self.model, samples)
        seed = new_seed() if seed is None else seed
        with torch.no_grad():
            return [self.network_of(self.weights(index, seed)) for index in range(samples)]

    def network_of(self, values: Mapping[str, Tensor]) -> nn.Module:
        """Returns a copy of the network with these weights, in evaluation mode."""
        network = deepcopy_network(self.model).eval()
        tensors = _named_tensors(network)
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)
        return network

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of the network with the weights of one sample after the other."""
        if prediction.options.compile is True:
            compiled = (
                partial(compiled_forward, prediction, values) for values in self.stream(samples, prediction)
            )
            return prediction.run(inputs, compiled, len(samples))
        weights = prediction.state.get("weights", lambda: SwappedWeights(prediction.clone, self.names))

        def networks() -> Iterator[Callable[[Any], Tensor]]:
            for values in self.stream(samples, prediction):
                weights.fill(values)
                yield partial(call, prediction.clone)

        with weights:
            return prediction.run(inputs, networks(), len(samples))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of all weights and buffers of a network. Tied tensors have one entry."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


NOISE_KEY = "member noise"  # in files; names of weights have no spaces


class MemberPosterior(WeightPosterior):
    r"""Equally weighted networks of one architecture.

    A prediction with as many samples as there are members, which is the default, uses each once. With fewer samples it uses members
    spread evenly over the list. With more it repeats the list. A seed chooses the first member.

    Args:
        model: Network.
        likelihood: Observation model of the outputs.
        members: Weights (and buffers) ``{name: [M, ...]}``.
        history: Record of the training.
        log_noise: Logarithms ``[M, D]`` of the noise :math:`\sigma_m` of each member, if a Gaussian likelihood learns it. The
            predictive is the mixture :math:`\frac1M \sum_m \mathcal N(f_m(x), \sigma_m^2)`, and the noise of ``likelihood`` is set to
            the root of the mean variance.
    """

    kind: ClassVar[str] = "members"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        members: Mapping[str, Tensor],
        history: History | None = None,
        log_noise: Tensor | None = None,
    ) -> None:
        super().__init__(model, likelihood, history)
        self.check_members(members)
        if not members:
            raise value_error("members", "one or more", 0, kind="shape", argument=None)
        self.log_noise = log_noise
        if log_noise is not None and isinstance(likelihood, Gaussian):
            with torch.no_grad():
                likelihood.log_scale.copy_(log_noise.double().mul(2.0).exp().mean(0).log() / 2.0)
        self.members, self.size = dict(members), len(next(iter(members.values())))
        self.default_samples = self.size

    @classmethod
    def from_states(
        cls,
        model: nn.Module,
        likelihood: Likelihood,
        states: Sequence[Mapping[str, Tensor]],
        history: History | None = None,
        **options: Any,
    ) -> Self:
        """Returns the posterior of one dictionary of weights per member."""
        names = states[0] if states else {}
        members = {name: torch.stack([state[name] for state in states]) for name in names}
        return cls(model, likelihood, members, history, **options)

    def check_members(self, members: Mapping[str, Tensor]) -> None:
        """Raises FlowBNNError if the weights do not fit the network."""
        check_members(self.model, members)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({pluralize(self.size, 'network')} of {type(self.model).__name__}, {self.likelihood!r})"

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        return {name: value[index % self.size] for name, value in self.members.items()}

    @checked
    def member_indices(self, samples: SampleCount, seed: int | None = None) -> list[int]:
        """Returns the indices of the members that are the samples of a prediction.

        Fewer samples than members are spread over the list. A seed chooses the first member, and the others follow cyclically.

        Args:
            samples: Number of samples of the prediction.
            seed: Seed of the prediction.
        """
        first = 0
        if seed is not None:
            first = int(torch.randint(self.size, (), generator=torch.Generator().manual_seed(seed)))
        steps = range(samples)
        if samples < self.size:
            return [(first + step * self.size // samples) % self.size for step in steps]
        return [(first + step) % self.size for step in steps]

    @checked
    def draws(self, samples: SampleCount, seed: int | None = None) -> dict[str, Tensor]:
        """Returns the members ``{name: [samples, ...]}`` of a prediction with as many samples and the same seed."""
        check_copies(self.model, samples)
        indices = self.member_indices(samples, seed)
        return {name: value[indices] for name, value in self.members.items()}

    def stream(self, samples: range, prediction: Prediction) -> Iterator[dict[str, Tensor]]:
        for index in self.member_indices(prediction.samples, prediction.options.seed)[
            samples.start : samples.stop
        ]:
            yield self.weights(index, 0)

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs of the members, with the log-variance of their noise if they have their own."""
        means = super().outputs(inputs, samples, prediction)
        if self.log_noise is None:
            return means
        indices = self.member_indices(prediction.samples, prediction.options.seed)[
            samples.start : samples.stop
        ]
        return append_log_variance(means, self.log_noise[indices].to(means).unsqueeze(1))

    def _observation_model(self) -> Likelihood:
        if self.log_noise is None:
            return self.likelihood
        likelihood = Gaussian("predicted")  # the noise is part of the outputs
        likelihood.shape = getattr(self.likelihood, "shape", None)
        return likelihood

    @checked
    def networks(self, samples: SampleCount, seed: int | None = None) -> list[nn.Module]:
        """Returns the members of a prediction with as many samples and the same seed, as networks."""
        check_copies(self.model, samples)
        return [self.member(index) for index in self.member_indices(samples, seed)]

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """Returns one of the networks at random."""
        return self.networks(1, new_seed() if seed is None else seed)[0]

    @checked
    def member(self, index: int) -> nn.Module:
        """Returns the member with this index."""
        check("index", index, Annotated[int, Bounds(ge=0, lt=self.size)])
        return self.network_of(self.weights(index, 0))

    def state(self) -> dict[str, Tensor]:
        return self.members if self.log_noise is None else {**self.members, NOISE_KEY: self.log_noise}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        log_noise = state.pop(NOISE_KEY, None)
        return cls(point.model, point.likelihood, state, point.history, log_noise=log_noise)


def check_members(reference: nn.Module | Mapping[str, Tensor], members: Mapping[str, Tensor]) -> None:
    """Raises FlowBNNError if members ``{name: [M, ...]}`` do not fit a network or named tensors."""
    tensors = _named_tensors(reference) if isinstance(reference, nn.Module) else reference
    sizes = {len(value) for value in members.values()}
    if len(sizes) > 1 or 0 in sizes:
        raise value_error(
            "members", "equally many of each weight", sorted(sizes), kind="shape", argument=None
        )
    for name, value in members.items():
        check_name(name, tensors, "weight", kind="shape")
        check_shape(name, value, ("members", *tensors[name].shape), argument=None)
        if value.is_floating_point() != tensors[name].is_floating_point():
            expected, dtype = f"of dtype {tensors[name].dtype}", str(value.dtype)
            raise value_error(name, expected, dtype, kind="dtype", argument=None)
