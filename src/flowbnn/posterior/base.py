r"""The contract of a posterior: what every method's ``fit`` returns, and all that evaluation needs.

A posterior gives samples of outputs, ``[S, B, ...]``; everything else (the predictive, the uncertainties, the metrics) is made
of those samples by the same code for every method. To write one, subclass :class:`Posterior` and define ``outputs``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.noise import noise_layers
from flowbnn.posterior.adaptive import Adaptive, adaptive_outputs, as_adaptive
from flowbnn.posterior.batches import (
    call,
    check_finite,
    checked_batch,
    failure,
    is_batch,
    move,
    rows,
    split_batch,
)
from flowbnn.posterior.collect import Gathering, Sharded, Store, expected_rows, gathering, in_groups
from flowbnn.posterior.forward import Compile, Passes, casting, device_of, dtype_of, evaluating, half_of
from flowbnn.posterior.views import View, Viewed, check_views
from flowbnn.predictive.base import NotFinite
from flowbnn.training import (
    History,
    check_architecture,
    first_nonfinite_layer,
    is_main_process,
    load_tensors,
    save_tensors,
    track,
)
from flowbnn.training.checkpoint import kinds_of, warn_of_other_kinds
from flowbnn.training.finite import first_nonfinite_tensor

__all__ = ["Posterior", "Stored", "load_posterior"]

# -------------------- stored.py


class Stored:
    """What one posterior saved, where it is a part of another's file."""

    def __init__(self, path: Any, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
        self.path, self.contents = path, (tensors, document)

    def __str__(self) -> str:
        return str(self.path)


TOGETHER = 4096  # inputs that adaptive sampling takes through its rounds together


class Posterior:
    """Networks that agree with the data, and how their outputs speak of targets.

    Args:
        model: the network.
        likelihood: categorical, Bernoulli or Gaussian.
        history: the training record.
    """

    kind: ClassVar[str] = "posterior"
    default_samples: int = 128
    parts: ClassVar[tuple[str, ...]] = ("likelihood", "history")

    def __init__(self, model: nn.Module, likelihood: Likelihood, history: History | None = None) -> None:
        self.model, self.likelihood, self.history = model, likelihood, history or History()

    def __repr__(self) -> str:
        noisy = len(noise_layers(self.model))
        layers = f", {noisy} layers with noise" if noisy else ""
        return f"{type(self).__name__}({type(self.model).__name__}{layers}, {self.likelihood!r}, {self.history.epochs} epochs)"

    def outputs(
        self, inputs: Any, samples: int, *, shared: bool, seed: int | None, max_batch: int | None
    ) -> Tensor:
        """Raw outputs ``[samples, batch, ...]`` for one batch of inputs: a posterior defines this, or :meth:`drawing`."""
        if type(self).drawing is Posterior.drawing:
            raise NotImplementedError(f"{type(self).__name__} must define outputs(inputs, samples, ...)")
        with self.drawing(samples, shared=shared, seed=seed, max_batch=max_batch) as draw:
            return draw(inputs)

    def drawing(
        self,
        samples: int,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        precision: str | None = None,
        compile: Compile = "auto",
    ) -> AbstractContextManager[Any]:
        """What a prediction draws from: ``draw(inputs, low, high, out)`` gives outputs of the samples from ``low`` to ``high``.

        A posterior that defines ``outputs`` alone has all its samples made at every call, batch by batch.
        """
        if precision is not None or compile is True:
            raise FlowBNNError(
                f"a {type(self).__name__} predicts in its own way; leave precision and compile as they are"
            )

        def draw(inputs: Any, low: int = 0, high: int | None = None, out: Tensor | None = None) -> Tensor:
            found = self.outputs(inputs, samples, shared=shared, seed=seed, max_batch=max_batch)
            return found[low : samples if high is None else high]

        return nullcontext(draw)

    def predict(
        self,
        inputs: Any,
        samples: int | None = None,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        adaptive: Adaptive | float | None = None,
        views: Sequence[View] = (),
        precision: str | None = None,
        compile: Compile = "auto",
        sharded: Sharded = "auto",
        progress: bool = True,
    ) -> Any:
        """The predictive distribution for a tensor of inputs, or for everything a loader gives.

        Args:
            inputs: a tensor (or tuple or mapping of tensors) with the examples first, or a loader of ``(inputs, targets)``
                or of bare inputs.
            samples: networks to average.
            shared: the same draws for all inputs, which are then functions: cheaper, and a prediction does not depend on what
                else is in its batch. False draws anew for every example, as document 000 does.
            seed: of the draws; the same seed gives the same numbers.
            max_batch: rows in one pass; None measures what the device holds.
            adaptive: stop sampling an input when the standard error of its probabilities is at most this number or its decision is
                certain; an :class:`~flowbnn.Adaptive` says more. ``samples`` is then the most that an input gets, and
                ``samples_spent`` of the result tells what each had.
            views: functions from a batch of inputs to as many others that mean the same, such as :func:`flowbnn.data.mirrored`: every
                sampled network answers by the mean of its predictions for the input and for its views (test-time
                augmentation), at the price of as many more passes.
            precision: ``"bf16"`` lets layers compute in bfloat16 (autocast), while noise and flows stay in float32.
            compile: run the network through ``torch.compile``, in passes of constant shape. It takes the better part of a minute
                once per network, so ``"auto"`` does it on CUDA devices for jobs of minutes, and never on a CPU.
            sharded: where several processes are connected (torchrun, ``devices``), all call this with the same loader; each
                predicts a share of it and all get the whole, in the loader's order. False lets this process predict all of it.
            progress: show a bar over a loader, on a terminal.

        Returns:
            A :class:`~flowbnn.predictive.CategoricalPredictive` or :class:`~flowbnn.predictive.GaussianPredictive`.
        """
        return self.predict_with_targets(
            inputs,
            samples,
            shared=shared,
            seed=seed,
            max_batch=max_batch,
            adaptive=adaptive,
            views=views,
            precision=precision,
            compile=compile,
            sharded=sharded,
            progress=progress,
        )[0]

    def predict_with_targets(
        self,
        inputs: Any,
        samples: int | None = None,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: int | None = None,
        adaptive: Adaptive | float | None = None,
        views: Sequence[View] = (),
        precision: str | None = None,
        compile: Compile = "auto",
        sharded: Sharded = "auto",
        progress: bool = True,
    ) -> tuple[Any, Tensor | None]:
        """As :meth:`predict`, with the targets the loader gave, in the same order."""
        if is_batch(inputs):
            sharded = False  # one batch is this process's own affair
        try:
            with gathering(inputs, sharded, shared) as together:
                return self._predict(
                    inputs,
                    samples,
                    together,
                    shared,
                    seed,
                    max_batch,
                    adaptive,
                    check_views(views),
                    precision,
                    compile,
                    progress,
                )
        except NotFinite as error:
            raise FlowBNNError(error.told + self._why_not_finite(inputs, precision)) from None

    def _why_not_finite(self, inputs: Any, precision: str | None) -> str:
        """Which parameter or layer spoils the samples, and what to do about it."""
        broken = first_nonfinite_tensor(self.model.named_parameters())
        if broken is not None:
            return f"parameter '{broken}' holds NaN or infinity: load or train the posterior again"
        half = half_of(precision)
        whole = self._first_overflow(inputs, None)
        if half is not None and whole is None:
            where = self._first_overflow(inputs, half) or "a layer"
            return f"{where} overflows in {precision}: predict in float32 (precision=None)"
        where = whole or "a layer"
        return f"{where} makes NaN or infinity of them: look for huge or zero weights there, and for inputs far from the training data"

    def _first_overflow(self, inputs: Any, half: torch.dtype | None) -> str | None:
        """The layer that first makes numbers that are none, as far as the first batches tell."""
        device = device_of(self.model)
        batches = [inputs] if is_batch(inputs) else (split_batch(batch)[0] for batch in islice(inputs, 8))
        for some in batches:
            moved = move(some, device, dtype_of(self.model))
            with evaluating(self.model), casting(device, half):
                name = first_nonfinite_layer(self.model, lambda moved=moved: call(self.model, moved))  # type: ignore[misc]
            if name:
                return f"layer '{name}'"
        return None

    def _predict(
        self,
        inputs: Any,
        samples: int | None,
        together: Gathering | None,
        shared: bool,
        seed: int | None,
        max_batch: int | None,
        adaptive: Adaptive | float | None,
        views: tuple[View, ...],
        precision: str | None,
        compile: Compile,
        progress: bool,
    ) -> tuple[Any, Tensor | None]:
        samples = self.default_samples if samples is None else samples
        if not isinstance(samples, int) or samples < 1:
            raise FlowBNNError(f"samples is a whole number of at least 1, not {samples!r}")
        if seed is not None and not hasattr(seed, "__index__"):
            raise FlowBNNError(f"seed is a whole number, or None for new draws, not {seed!r:.60}")
        rule = as_adaptive(adaptive)
        if rule is not None and not shared:
            raise FlowBNNError("adaptive sampling needs the same draws for all inputs; leave shared=True")
        if views and not shared:
            raise FlowBNNError("views need the same draws for all inputs; leave shared=True")
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed

        def drawing(index: int = 0) -> AbstractContextManager[Any]:
            own = seed if shared else seed + index  # every batch its own draws
            drawn = self.drawing(
                samples, shared=shared, seed=own, max_batch=max_batch, precision=precision, compile=compile
            )
            return Viewed(drawn, views, self.likelihood) if views else drawn

        if is_batch(inputs):
            check_finite(inputs)
            with drawing() as draw:
                outputs, spent = self._draw_all(draw, inputs, samples, rule)
            return self._predictive(outputs, spent), None
        if not hasattr(inputs, "__iter__"):
            raise FlowBNNError(f"predict takes a tensor of inputs or a loader, not a {type(inputs).__name__}")
        inputs = inputs if together is None else together
        batches = map(checked_batch, track(inputs, "predicting", progress and is_main_process()))
        store = Store(expected_rows(inputs))
        counts: list[Tensor] = []
        targets: list[Tensor] = []

        def add(draw: Any, some: Any, truth: list[Tensor]) -> None:
            place = store.room(rows(some))
            outputs, spent = self._draw_all(draw, some, samples, rule, place)
            store.add(outputs, place)
            targets.extend(part.cpu() for part in truth)
            if spent is not None:
                counts.append(spent)

        if shared:
            with drawing() as draw:
                for some, truth in in_groups(batches, _enough(draw, store.expected, rule)):
                    add(draw, some, truth)
        else:
            for index, (some, truth) in enumerate(in_groups(batches, rows)):
                with drawing(index if together is None else together.numbers[index]) as draw:
                    add(draw, some, truth)
        spent = torch.cat(counts) if counts else None
        truths = torch.cat(targets) if targets else None
        if together is None:
            outputs = store.outputs
        else:
            mine = None if store.tensor is None else store.outputs
            outputs, truths, spent = together.gather(mine, truths, spent)
        return self._predictive(outputs, spent), None if truths is None else self.likelihood.canonical(truths)

    def _draw_all(
        self, draw: Any, inputs: Any, samples: int, rule: Adaptive | None, place: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs ``[samples, batch, ...]``, written to ``place`` where that is given, and what each input had of them."""
        try:
            if rule is None:
                return draw(inputs, 0, samples, place), None
            return adaptive_outputs(draw, inputs, samples, rule, self._predictive)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, FlowBNNError | torch.OutOfMemoryError):
                raise
            raise FlowBNNError(f"the network fails on inputs of {failure(inputs, error)}") from error

    def _predictive(self, outputs: Tensor, spent: Tensor | None = None) -> Any:
        home = next((parameter.device for parameter in self.likelihood.parameters()), outputs.device)
        likelihood = (
            self.likelihood if home == outputs.device else deepcopy(self.likelihood).to(outputs.device)
        )
        with evaluating(self.likelihood):
            if spent is None:
                return likelihood.predictive(outputs)
            return likelihood.predictive(outputs[: int(spent.max())], spent.to(outputs.device))

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior, to be used as any network is."""
        raise FlowBNNError(f"a {type(self).__name__} has no single network to hand out; it can predict")

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """What differs from sample to sample, ``{name: [samples, ...]}``: weights, or noise."""
        raise FlowBNNError(f"a {type(self).__name__} has no draws to hand out; it can predict")

    def log_prob(self, values: Any) -> Tensor:
        """Log-density of weights, where the method has one."""
        raise FlowBNNError(f"a {type(self).__name__} has no density that could be computed; it can predict")

    def document(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {
            "kind": self.kind,
            "likelihood": self.likelihood.to_dict(),
            "history": self.history.to_dict(),
            "modules": kinds_of(self.model),
        }

    def save(self, path: str | Path) -> Path:
        """Write the posterior to one safetensors file, atomically; plain tensors and JSON, nothing that can run code."""
        return save_tensors(path, self.tensors(), self.document())

    def tensors(self) -> dict[str, Tensor]:
        """What is saved: the network, the likelihood, and what more the posterior has."""
        tensors = {f"network.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"likelihood.{name}": value for name, value in self.likelihood.state_dict().items()}
        return tensors | self.extra_tensors()

    def extra_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the network and the likelihood."""
        return {}

    @classmethod
    def read(cls, path: str | Path | Stored) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and document of a saved posterior of this kind."""
        tensors, document = path.contents if isinstance(path, Stored) else load_tensors(path)
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind != cls.kind:
            raise FlowBNNError(f"'{path}' holds a {kind or 'file of another kind'}, not a {cls.kind}")
        for name in cls.parts:
            if not isinstance(document.get(name), dict):
                raise FlowBNNError(f"'{path}' is damaged: it has no {name}")
        for name, value in tensors.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FlowBNNError(f"'{path}' is damaged: '{name}' holds NaN or infinity")
        return tensors, document

    @classmethod
    def restore(
        cls, model: nn.Module, tensors: dict[str, Tensor], document: dict[str, Any], path: Any
    ) -> "Posterior":
        """Fill ``model`` with stored tensors; it stays untouched if they do not fit."""
        try:
            likelihood = make_likelihood(document["likelihood"])
            history = History.from_dict(document["history"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FlowBNNError(f"'{path}' is damaged: {error}") from None
        for prefix, target in (("network.", model), ("likelihood.", likelihood)):
            given = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            check_architecture(target, given, path)
        warn_of_other_kinds(model, document.get("modules"), path)
        for prefix, target in (("network.", model), ("likelihood.", likelihood)):
            target.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )
        return cls(model, likelihood, history)


def _enough(draw: Any, total: int, rule: Adaptive | None) -> Callable[[Any], int]:
    """How many rows to put through together: full passes, and several of them where the settled ones leave gaps."""
    draw = draw.passes if isinstance(draw, Viewed) else draw
    if not isinstance(draw, Passes):
        return rows
    draw.total = total
    return lambda inputs: draw.full_pass(inputs) if rule is None else max(draw.full_pass(inputs), TOGETHER)


# -------------------- loading.py


def load_posterior(path: str | Path | Stored, network: nn.Module) -> Posterior:
    """Read what ``posterior.save(path)`` wrote, of whatever method, into a copy of ``network``, the plain network it was made from.

    Raises:
        FlowBNNError: where the file is damaged or was made from another architecture.
    """
    if not isinstance(network, nn.Module):
        raise FlowBNNError(
            f"a posterior is loaded into a network (nn.Module) like the one it was made from, not into a {type(network).__name__}"
        )
    _, document = path.contents if isinstance(path, Stored) else load_tensors(path)
    kind = document.get("kind") if isinstance(document, dict) else None
    kinds: dict[str, Any] = {found.kind: found for found in _descendants(Posterior)}
    if not isinstance(kind, str) or kind not in kinds or not hasattr(kinds[kind], "load"):
        raise FlowBNNError(
            f"'{path}' holds a {kind or 'file of another kind'}, which is no posterior of this version"
        )
    # a copy, as fit makes one: a second posterior read into the same network must not change the first
    return kinds[kind].load(path, deepcopy(network))


def _descendants(kind: type[Posterior]) -> Iterator[type[Posterior]]:
    for below in kind.__subclasses__():
        yield below
        yield from _descendants(below)
