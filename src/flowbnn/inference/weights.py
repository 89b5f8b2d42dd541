r"""Posteriors over weights: a sample is the same network with other weights, run as the plain network is.

Subclasses say how one set of weights is drawn (:meth:`WeightPosterior.weights`); drawing many, predicting with them, handing one out as
a network, saving and loading are done here.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import rows
from flowbnn.inference.passes import Compile, compiled
from flowbnn.inference.posterior import Posterior
from flowbnn.inference.running import Passes, Result, even

__all__ = ["Exchange", "WeightPasses", "WeightPosterior", "generator_of"]


def generator_of(seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one sample, so that samples can be drawn in any order and in parts."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + index) % 2**63)


class Exchange:
    """Other weights in the place of a network's own, which come back at the end of the ``with`` block.

    Args:
        model: the network.
        names: of the parameters and buffers that will be exchanged, as ``state_dict`` has them; tied ones under any of their names.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        missing = [name for name in names if name not in own]
        if missing:
            raise FlowBNNError(f"the network has no weight '{missing[0]}'")
        wanted = {id(own[name]): name for name in names}
        self.places: list[tuple[dict[str, Any], str, Any, str]] = []
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and id(tensor) in wanted:
                        self.places.append((held, key, tensor, wanted[id(tensor)]))
        self.stands: dict[str, Tensor] = {}
        for name in names:
            like = own[name]
            stand = torch.empty_like(like.detach())
            self.stands[name] = (
                nn.Parameter(stand, requires_grad=False) if isinstance(like, nn.Parameter) else stand
            )

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Make the network the one with these weights."""
        for name, value in values.items():
            self.stands[name].data.copy_(value)

    def __enter__(self) -> "Exchange":
        for held, key, _, name in self.places:
            held[key] = self.stands[name]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for held, key, tensor, _ in self.places:
            held[key] = tensor


class WeightPosterior(Posterior):
    """A distribution of weights.

    Subclasses define ``names``, ``weights(index, seed)``, and for saving ``state()`` and ``restored(...)``; ``log_density`` where
    they have one.
    """

    kind = "weights"

    @property
    def names(self) -> list[str]:
        """The parameters and buffers that differ from sample to sample."""
        raise NotImplementedError(f"{type(self).__name__} must define names")

    def weights(self, index: int, seed: int) -> dict[str, Tensor]:
        """The weights of the sample of this number under this seed."""
        raise NotImplementedError(f"{type(self).__name__} must define weights(index, seed)")

    def stream(self, low: int, high: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """The weights of the samples from ``low`` up to ``high``, one after the other: those of :meth:`weights`.

        Subclasses may draw several at once; what is handed out is read before the next is asked for.
        """
        for index in range(low, high):
            yield self.weights(index, seed)

    def log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density of one set of weights."""
        raise FlowBNNError(
            f"a {type(self).__name__} has no density that could be computed; it can be sampled"
        )

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Weights ``{name: [samples, ...]}``; the same seed gives those that a prediction with it uses."""
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples}")
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        with torch.no_grad():
            found = [self.weights(index, seed) for index in range(samples)]
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log-density ``[S]`` of weights ``{name: [S, ...]}``, as :meth:`draws` gives them."""
        count = {len(value) for value in values.values()}
        if len(count) != 1:
            raise FlowBNNError(
                "log_prob takes the same number of samples of every weight, as draws gives them"
            )
        with torch.no_grad():
            each = [self.log_density({k: v[i] for k, v in values.items()}) for i in range(count.pop())]
        return torch.stack(each)

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior: a copy with weights drawn from it."""
        return self.network_of({name: value[0] for name, value in self.draws(1, seed).items()})

    def network_of(self, values: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the network with these weights, ready to predict."""
        network = deepcopy(self.model).eval()
        own = dict(network.named_parameters(remove_duplicate=False)) | dict(
            network.named_buffers(remove_duplicate=False)
        )
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        return network

    def drawing(
        self,
        samples: int,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
    ) -> "WeightPasses":
        if not shared:
            raise FlowBNNError("a draw of weights serves all inputs; leave shared=True")
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        return WeightPasses(self, samples, seed, max_batch, precision, compile)

    def state(self) -> dict[str, Tensor]:
        """The tensors of the posterior besides the network's own."""
        raise NotImplementedError(f"{type(self).__name__} must define state()")

    def settings(self) -> dict[str, Any]:
        """Plain values of the posterior besides its tensors."""
        return {}

    @classmethod
    def restored(
        cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "WeightPosterior":
        """The posterior of a network that has its weights back, from what :meth:`state` and :meth:`settings` gave.

        Raises KeyError, ValueError or TypeError where these are not such.
        """
        raise NotImplementedError(f"{cls.__name__} must define restored(point, state, settings)")

    def document(self) -> dict[str, Any]:
        return {**super().document(), "settings": self.settings()}

    def extra_tensors(self) -> dict[str, Tensor]:
        return {f"posterior.{name}": value for name, value in self.state().items()}

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> "Posterior":
        """Read a saved posterior into ``network``, which stays untouched if it does not fit."""
        tensors, document = cls.read(path)
        state = {k.removeprefix("posterior."): v for k, v in tensors.items() if k.startswith("posterior.")}
        settings = document.get("settings", {})
        own = dict(network.named_parameters(remove_duplicate=False))
        device = next((tensor.device for tensor in own.values()), torch.device("cpu"))
        before = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        point = Posterior.restore(network, tensors, document, path)
        try:
            return cls.restored(point, {k: v.to(device) for k, v in state.items()}, settings)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            network.load_state_dict(before)
            raise FlowBNNError(f"'{path}' is damaged: {error}") from None


class WeightPasses(Passes):
    """Outputs of networks with the weights of one sample after the other."""

    def __init__(
        self,
        posterior: WeightPosterior,
        samples: int,
        seed: int,
        max_batch: int | None,
        precision: str | None,
        compile: Compile,
    ) -> None:
        super().__init__(posterior.model, max_batch, precision, compile)
        self.source: Any = posterior  # whatever has weights(index, seed)
        self.samples, self.seed = samples, seed
        self.exchange = Exchange(posterior.model, posterior.names)

    def drawn(self, low: int, high: int) -> Iterator[dict[str, Tensor]]:
        """The weights of these samples, one after the other."""
        stream = getattr(self.source, "stream", None)
        if stream is not None:
            return stream(low, high, self.seed)
        return (self.source.weights(index, self.seed) for index in range(low, high))

    def __call__(
        self, inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        inputs, high = self.ready(inputs), self.samples if high is None else high
        assert self.limit is not None
        result = Result(out, high - low, rows(inputs))
        graphs = self.device.type == "cuda" and even(rows(inputs), self.limit.rows) <= 1024
        fast = compiled(self.model, graphs=graphs) if self.compile is True else None
        with self.exchange as exchange:
            for at, values in enumerate(self.drawn(low, high)):
                exchange.fill(values)

                def write(outputs: Tensor, start: int, stop: int, at: int = at) -> None:
                    result.write(outputs.unsqueeze(0), at, at + 1, start, stop)

                self.through(inputs, write, fast)
        return result.tensor
