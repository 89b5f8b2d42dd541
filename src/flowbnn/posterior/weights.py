r"""Posteriors over weights: a sample is the same network with other weights, run as the plain network is.

Subclasses say how one set of weights is drawn (:meth:`WeightPosterior.weights`); drawing many, predicting with them, handing one out as
a network, saving and loading are done here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.likelihoods import Gaussian, Likelihood, append_log_variance
from flowbnn.options import Bounds, Count, check, checked
from flowbnn.posterior.base import Posterior, Prediction
from flowbnn.posterior.compiled import compiled_forward
from flowbnn.posterior.prediction import new_seed
from flowbnn.training import History


def generator_of(seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one sample, so that samples can be drawn in any order and in parts."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + index) % 2**63)


def _own(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a network; tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def named_parts(vectors: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The parts ``{name: [..., *shape]}`` of vectors ``[..., D]`` in which they lie end to end.

    >>> named_parts(torch.arange(3.0), {"weight": (1, 2), "bias": (1,)})
    {'weight': tensor([[0., 1.]]), 'bias': tensor([2.])}
    """
    parts = vectors.split([math.prod(shape) for shape in shapes.values()], -1)
    both = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(*vectors.shape[:-1], *shape) for (name, shape), part in both}


class SwappedTensors:
    """Other tensors (or modules) in the place of a network's own, which come back at the end of the ``with`` block.

    Args:
        places: the dictionary of a module that holds a tensor, its name there, and what stands in for it.
    """

    def __init__(self, places: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        self.places = [(held, key, held[key], stand) for held, key, stand in places]

    def __enter__(self) -> Self:
        for held, key, _, stand in self.places:
            held[key] = stand
        return self

    def __exit__(self, *error: object) -> None:
        for held, key, own, _ in self.places:
            held[key] = own


def empty_copy(own: Tensor) -> Tensor:
    """An empty tensor that lies in memory as this one does, and is a parameter where it is one."""
    empty = torch.empty_like(own.detach())
    return nn.Parameter(empty, requires_grad=False) if isinstance(own, nn.Parameter) else empty


class SwappedWeights(SwappedTensors):
    """Stand-ins for some parameters and buffers, by their names in ``state_dict``; tied ones under any of their names."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        own = _own(model)
        self.stands = {name: empty_copy(own[name]) for name in names}
        wanted = {id(own[name]): self.stands[name] for name in names}
        held = [each for module in model.modules() for each in (module._parameters, module._buffers)]
        super().__init__(
            (each, key, wanted[id(tensor)])
            for each in held
            for key, tensor in each.items()
            if tensor is not None and id(tensor) in wanted
        )

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Make the network the one with these weights."""
        for name, value in values.items():
            self.stands[name].data.copy_(value)


class WeightPosterior(Posterior):
    """A distribution of weights.

    Subclasses define ``names``, ``weights(index, seed)``, and for saving ``state()`` and ``from_state(...)``; ``log_density`` where
    they have one.
    """

    kind = "weights"
    compiles = True
    only_shared = True

    @property
    def names(self) -> list[str]:
        """The parameters and buffers that differ from sample to sample."""
        return self._without("names of its weights, which it must define")

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        """The weights of the sample of this number under this seed."""
        return self._without("weights(index, seed), which it must define")

    def stream(self, samples: range, prediction: Prediction) -> Iterator[dict[str, Tensor]]:
        """The weights of these samples of a prediction, one after the other.

        Subclasses may draw several at once; what is handed out is read before the next is asked for.
        """
        for index in samples:
            yield self.weights(index, prediction.seed)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density of one set of weights."""
        return self._without("density that could be computed")

    @checked
    def draws(self, samples: Count, seed: int | None = None) -> dict[str, Tensor]:
        """Weights ``{name: [samples, ...]}``; the same seed gives those that a prediction with it uses."""
        seed = new_seed() if seed is None else seed
        with torch.no_grad():
            sets = [self.weights(index, seed) for index in range(samples)]
        return {name: torch.stack([one[name] for one in sets]) for name in sets[0]}

    @checked
    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density ``[S]`` of weights ``{name: [S, ...]}``, as :meth:`draws` gives them."""
        missing = [name for name in self.names if name not in values]
        counts = {len(value) for value in values.values()}
        if missing or len(counts) != 1:
            trouble = f"'{missing[0]}' is not given" if missing else f"they have {sorted(counts)} samples"
            raise FlowBNNError(f"log_prob takes all weights together, as draws gives them, but {trouble}")
        with torch.no_grad():
            each = [self.log_density({k: v[i] for k, v in values.items()}) for i in range(counts.pop())]
        return torch.stack(each)

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior: a copy with weights drawn from it."""
        return self.network_of({name: value[0] for name, value in self.draws(1, seed).items()})

    def network_of(self, values: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the network with these weights, ready to predict."""
        network = deepcopy(self.model).eval()
        own = _own(network)
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        return network

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs of the network with the weights of one sample after the other."""
        if prediction.options.compile is True:
            compiled = (
                partial(compiled_forward, prediction, values) for values in self.stream(samples, prediction)
            )
            return prediction.run(inputs, compiled, len(samples))
        weights = prediction.state.get("weights", lambda: SwappedWeights(prediction.model, self.names))

        def networks() -> Iterator[Callable[[Any], Tensor]]:
            for values in self.stream(samples, prediction):
                weights.fill(values)
                yield partial(call, prediction.model)

        with weights:
            return prediction.run(inputs, networks(), len(samples))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers of a network, each tied one once."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


ALIKE = "a list of networks needs the same number, at least one, of every weight"
NOISE = "noise of the members"  # in a file; no weight has spaces in its name


class MemberPosterior(WeightPosterior):
    r"""Networks of one architecture that count alike.

    A prediction with as many samples as there are members takes each once, which is the default; with fewer it takes members spread
    evenly over the list, with more it begins anew. Where it is given a seed, this chooses the member that comes first.

    Args:
        model: the network.
        likelihood: the observation model of the outputs.
        members: weights (and buffers) ``{name: [M, ...]}``.
        history: the training record.
        log_noise: logarithms ``[M, D]`` of the members' own noise :math:`\sigma_m`, where a Gaussian likelihood learns it: the
            predictive is the mixture :math:`\frac1M \sum_m \mathcal N(f_m(x), \sigma_m^2)`, and ``likelihood`` gets the noise of
            the mean variance.
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
            raise FlowBNNError(ALIKE, kind="shape")
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
        **more: Any,
    ) -> Self:
        """From one dictionary of weights for each member."""
        names = states[0] if states else {}
        members = {name: torch.stack([state[name] for state in states]) for name in names}
        return cls(model, likelihood, members, history, **more)

    def check_members(self, members: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not those of networks like this one."""
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

    def chosen(self, index: int, samples: int, seed: int | None = None) -> int:
        """Which member is sample ``index`` of so many: fewer than there are members are spread over the list.

        A seed chooses the first of them; the others follow in the list's order, round its end.
        """
        if seed is not None:
            first = int(torch.randint(self.size, (), generator=torch.Generator().manual_seed(seed)))
            return (first + self.chosen(index, samples)) % self.size
        return index * self.size // samples if samples < self.size else index % self.size

    @checked
    def draws(self, samples: Count, seed: int | None = None) -> dict[str, Tensor]:
        """Members ``{name: [samples, ...]}``, those that a prediction with so many samples and this seed takes."""
        taken = [self.chosen(index, samples, seed) for index in range(samples)]
        return {name: value[taken] for name, value in self.members.items()}

    def stream(self, samples: range, prediction: Prediction) -> Iterator[dict[str, Tensor]]:
        for index in samples:
            yield self.weights(self.chosen(index, prediction.samples, prediction.options.seed), 0)

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs of one member after the other, with the log-variance of each one's noise beside them where it has its own."""
        means = super().outputs(inputs, samples, prediction)
        if self.log_noise is None:
            return means
        taken = [self.chosen(index, prediction.samples, prediction.options.seed) for index in samples]
        return append_log_variance(means, self.log_noise[taken].to(means).unsqueeze(1))

    def _observation_model(self) -> Likelihood:
        if self.log_noise is None:
            return self.likelihood
        each = Gaussian("predicted")  # the noise comes with the outputs
        each.shape = getattr(self.likelihood, "shape", None)
        return each

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """One of the networks, at random."""
        return self.member(self.chosen(0, 1, new_seed() if seed is None else seed))

    @checked
    def member(self, index: int) -> nn.Module:
        """The network of this number."""
        check("index", index, Annotated[int, Bounds(ge=0, lt=self.size)])
        return self.network_of(self.weights(index, 0))

    def state(self) -> dict[str, Tensor]:
        return self.members if self.log_noise is None else {**self.members, NOISE: self.log_noise}

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        log_noise = state.pop(NOISE, None)
        return cls(point.model, point.likelihood, state, point.history, log_noise=log_noise)


def check_members(like: nn.Module | Mapping[str, Tensor], members: Mapping[str, Tensor]) -> None:
    """Refuse members ``{name: [M, ...]}`` that are not M like these tensors, or networks like this one."""
    own = _own(like) if isinstance(like, nn.Module) else like
    sizes = {len(value) for value in members.values()}
    wrong = [name for name, value in members.items() if name not in own or value.shape[1:] != own[name].shape]
    trouble = f"the members' weights '{wrong[0]}' do not fit the network" if wrong else ""
    if len(sizes) > 1 or 0 in sizes:
        trouble = ALIKE
    if trouble:
        raise FlowBNNError(trouble, kind="shape")
