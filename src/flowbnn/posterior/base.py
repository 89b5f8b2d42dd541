r"""The contract of a posterior: what every method's ``fit`` returns, and how it predicts.

A posterior stands for many networks that agree with the data. It implements one method, :meth:`Posterior.outputs`: the outputs of
some of these networks, its samples, for a batch of inputs. Everything else is done here, for every method alike. ``predict``

1. checks its options (:class:`PredictOptions`) and opens a :class:`Prediction`, the one object that lives as long as the call: it
   holds the number of samples, the seed, device and precision, and what the posterior draws once for the whole prediction;
2. goes through the batches of a loader (a tensor of inputs is a loader of one batch), several small ones at a time;
3. asks ``outputs`` for the samples of these inputs: all of them, or in rounds until the answer has settled
   (:mod:`flowbnn.posterior.adaptive`), averaged over views of the inputs where there are any;
4. collects the outputs ``[samples, rows, ...]`` in the loader's order, gathered from all processes if there are several
   (:mod:`flowbnn.posterior.loaders`), and lets the likelihood make a predictive distribution of them.

``outputs`` itself mostly calls ``prediction.run``, which runs a network over the rows in chunks that fit the device's memory
(:mod:`flowbnn.posterior.prediction`). A posterior of one network is three lines:

>>> class One(Posterior):
...     def outputs(self, inputs, samples, prediction):
...         return prediction.run(inputs).expand(len(samples), -1, -1)
>>> One(nn.Linear(2, 3), make_likelihood("categorical")).predict(torch.zeros(5, 2), 4).probabilities.shape
torch.Size([5, 3])
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    check_finite,
    copy_network,
    device_of,
    dtype_of,
    evaluation_mode,
    first_nonfinite_tensor,
    is_batch,
    move,
    rewrap_forward_errors,
    split_batch,
)
from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.noise import noise_layers
from flowbnn.options import accepts_options_of, all_subclasses, checked
from flowbnn.posterior.adaptive import Adaptive, adaptive_outputs
from flowbnn.posterior.loaders import OutputCollector, group_batches, shard_loader
from flowbnn.posterior.prediction import (
    Prediction,
    PredictionCache,
    PredictOptions,
    autocast_to,
    average_views,
    clone_sharing_tensors,
)
from flowbnn.predictive.base import NonFiniteSamplesError
from flowbnn.regression import LOC, SCALE, set_output_scale
from flowbnn.training import (
    History,
    check_weights,
    first_nonfinite_layer,
    is_main_process,
    save_tensors,
    track,
)
from flowbnn.training.checkpoint import layer_classes, warn_changed_layers
from flowbnn.training.device import AUTOCAST_DTYPES
from flowbnn.training.storage import TensorFile

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that a run may have


class Posterior:
    """Networks that agree with the data, and the observation model of their outputs.

    To write one, define :meth:`outputs`, and for saving :meth:`state`, :meth:`settings` and :meth:`from_state` where it has more than a
    network, a likelihood and a history.

    Predictions are thread-safe: concurrent calls are serialized by the lock that :class:`Prediction` holds, and return the same results
    as sequential calls. They run in a clone of the network, so that ``model`` may be called, copied and saved meanwhile.

    Args:
        model: the network.
        likelihood: categorical, Bernoulli or Gaussian.
        history: the training record.
    """

    kind: ClassVar[str] = "posterior"
    default_samples: int = 128
    compiles: bool = False  # whether predictions may pass the network through torch.compile
    only_shared: bool = False  # whether a draw always serves all inputs

    def __init__(self, model: nn.Module, likelihood: Likelihood, history: History | None = None) -> None:
        self.model, self.likelihood, self.history = model, likelihood, history or History()
        self.cache = PredictionCache()

    def __repr__(self) -> str:
        noisy = len(noise_layers(self.model))
        layers = f", {pluralize(noisy, 'layer')} with noise" if noisy else ""
        trained = pluralize(self.history.epochs, "epoch")
        return f"{type(self).__name__}({type(self.model).__name__}{layers}, {self.likelihood!r}, {trained})"

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Outputs ``[len(samples), batch, ...]`` of these samples, for one batch of inputs: what a posterior defines.

        Sample ``s`` is the same network in every call of one prediction, and in every prediction with the same seed.
        """
        return self._without("outputs(inputs, samples, prediction), which it must define")

    @accepts_options_of(PredictOptions)
    def predict(self, inputs: Any, samples: int | None = None, **options: Any) -> Any:
        """The predictive distribution for a tensor of inputs, or for everything a loader gives.

        Args:
            inputs: a tensor (or tuple or mapping of tensors) with the examples first, or a loader of ``(inputs, targets)``
                or of bare inputs.
            samples: networks to average.
            options: as in :class:`PredictOptions`.

        Returns:
            A :class:`~flowbnn.predictive.CategoricalPredictive` or :class:`~flowbnn.predictive.GaussianPredictive`.
        """
        chosen = PredictOptions(samples, **options)
        outputs, sample_counts, _ = self.collect(inputs, chosen)
        return self._explained(outputs, sample_counts, inputs, chosen)

    @accepts_options_of(PredictOptions)
    def predict_with_targets(
        self, inputs: Any, samples: int | None = None, **options: Any
    ) -> tuple[Any, Tensor | None]:
        """As :meth:`predict`, with the targets the loader gave, in the same order."""
        chosen = PredictOptions(samples, **options)
        outputs, sample_counts, targets = self.collect(inputs, chosen)
        predictive = self._explained(outputs, sample_counts, inputs, chosen)
        return predictive, None if targets is None else self.likelihood.canonical_targets(targets)

    def collect(self, inputs: Any, options: PredictOptions) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Outputs ``[samples, rows, ...]`` for all inputs, the samples that each had (if adaptive), and the targets (if any)."""
        self._refuse(inputs, options)
        if is_batch(inputs):  # one batch, which is this process's own affair
            check_finite(inputs)
            with Prediction(self.model, options, self.default_samples, self.cache) as prediction:
                return *self._sampled(inputs, prediction), None
        with shard_loader(inputs, bool(options.sharded), options.shared) as share:
            collected, shown = OutputCollector(share), options.progress and is_main_process()
            with Prediction(self.model, options, self.default_samples, self.cache) as prediction:
                prediction.total_rows = collected.expected
                batches = track(share, "predicting") if shown else share
                for number, (some, targets) in enumerate(group_batches(batches, prediction.rows_per_group)):
                    prediction.batch_index = collected.number(number)
                    collected.add(*self._sampled(some, prediction), targets)
            return collected.result()

    def _refuse(self, inputs: Any, options: PredictOptions) -> None:
        """Refuse what this posterior cannot do."""
        kind, trouble = type(self).__name__, {}
        if not hasattr(inputs, "__iter__"):
            trouble["inputs"] = f"predict takes a tensor of inputs or a loader, not a {type(inputs).__name__}"
        if not options.shared and (options.views or options.adaptive is not None):
            argument = "views" if options.views else "adaptive"
            trouble[argument] = f"{argument} needs the same draws for all inputs; leave shared=True"
        if not options.shared and self.only_shared:
            trouble["shared"] = f"a draw of a {kind} serves all inputs; leave shared=True"
        if options.compile is True and not self.compiles:
            trouble["compile"] = f"a {kind} does not compile for prediction; leave compile as it is"
        for argument, message in trouble.items():
            raise FlowBNNError(message, kind="unsupported", argument=argument)

    def _sampled(self, inputs: Any, prediction: Prediction) -> tuple[Tensor, Tensor | None]:
        """Outputs ``[samples, batch, ...]`` and, where sampling is adaptive, the samples that each input had."""
        draw = average_views(self.outputs, self.likelihood) if prediction.options.views else self.outputs
        rule, samples = prediction.options.adaptive, prediction.samples
        with rewrap_forward_errors(inputs):
            if rule is None:
                return draw(inputs, range(samples), prediction), None
            rule = rule if isinstance(rule, Adaptive) else Adaptive(tolerance=rule)
            return adaptive_outputs(
                lambda some, part: draw(some, part, prediction), inputs, samples, rule, self._predictive
            )

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        """The predictive distribution that the likelihood makes of outputs."""
        likelihood = self._observation_model()
        for value in likelihood.parameters():
            if value.device != outputs.device:
                likelihood = deepcopy(likelihood).to(outputs.device)
                break
        with torch.no_grad():
            if sample_counts is None:
                return likelihood.predictive(outputs)
            return likelihood.predictive(
                outputs[: int(sample_counts.max())], sample_counts.to(outputs.device)
            )

    def _observation_model(self) -> Likelihood:
        """The likelihood that makes a predictive distribution of outputs."""
        return self.likelihood

    def _explained(
        self, outputs: Tensor, sample_counts: Tensor | None, inputs: Any, options: PredictOptions
    ) -> Any:
        """The predictive distribution; where outputs are not finite, an error that names what spoils them."""
        try:
            return self._predictive(outputs, sample_counts)
        except NonFiniteSamplesError as error:
            with self.cache.lock:
                why, bad = self._why_not_finite(inputs, options), error.fields
            message = f"samples are not finite for {bad['inputs']} of {bad['total']} inputs: {why}"
            raise FlowBNNError(message, **bad) from None

    def _why_not_finite(self, inputs: Any, options: PredictOptions) -> str:
        """Which parameter or layer spoils the samples, as far as the first batches show, and what to do about it."""
        broken = first_nonfinite_tensor(self.model.named_parameters())
        if broken is not None:
            return f"parameter '{broken}' holds NaN or infinity: load or train the posterior again"
        network, device, half = (
            clone_sharing_tensors(self.model),
            device_of(self.model),
            AUTOCAST_DTYPES.get(options.precision),
        )
        where = {}
        for precision in {None, half}:
            for batch in [inputs] if is_batch(inputs) else islice(inputs, 8):
                some = move(
                    batch if is_batch(inputs) else split_batch(batch)[0], device, dtype_of(self.model)
                )
                with evaluation_mode(network), autocast_to(device, precision):
                    name = first_nonfinite_layer(network, partial(call, network, some))
                if name:
                    where[precision] = f"layer '{name}'"
                    break
        if half is not None and None not in where:
            layer = where.get(half, "a layer")
            return f"{layer} overflows in {options.precision}: predict in float32 (precision='32-true')"
        return (
            f"{where.get(None, 'a layer')} makes NaN or infinity of them: look for huge or zero weights there, "
            "and for inputs far from the training data"
        )

    def sample(self, seed: int | None = None) -> nn.Module:
        """One network of the posterior, to be used as any network is."""
        return self._without("single network to hand out")

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """What differs from sample to sample, ``{name: [samples, ...]}``: weights, or noise."""
        return self._without("draws to hand out")

    def log_prob(self, values: Any) -> Tensor:
        """Log-density of weights, where the method has one."""
        return self._without("density that could be computed")

    def _without(self, what: str) -> Any:
        raise FlowBNNError(f"a {type(self).__name__} has no {what}", kind="unsupported")

    def state(self) -> dict[str, Tensor]:
        """The tensors of the posterior besides the network's and the likelihood's, for saving."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Plain values of the posterior besides its tensors, for saving."""
        return {}

    @classmethod
    def from_state(
        cls, point: "Posterior", state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "Posterior":
        """The posterior again, from one with its network, likelihood and history, and from what ``state`` and ``settings`` gave.

        Whatever it raises says that the file cannot be loaded.
        """
        return cls(point.model, point.likelihood, point.history)

    def document(self) -> dict[str, Any]:
        """What is saved beside the tensors."""
        return {
            "kind": self.kind,
            "likelihood": self.likelihood.to_dict(),
            "history": self.history.to_dict(),
            "modules": layer_classes(self.model),
            "settings": self.settings(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """What is saved: the network, the likelihood, and what more the posterior has."""
        parts = {
            "network": self.model.state_dict(),
            "likelihood": self.likelihood.state_dict(),
            "posterior": self.state(),
        }
        return {f"{part}.{name}": value for part, tensors in parts.items() for name, value in tensors.items()}

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the posterior to one safetensors file, atomically; plain tensors and JSON, nothing that can run code."""
        with self.cache.lock:
            return save_tensors(path, self.tensors(), self.document())

    @classmethod
    @checked
    def load(cls, path: "str | Path | TensorFile", network: nn.Module) -> "Posterior":
        """Read a saved posterior of this kind into a copy of ``network``, the plain network it was made from."""
        file = open_posterior_file(path, network, [cls.kind])
        device = device_of(network)
        with rewrap_load_errors(file):
            settings = dict(file.document["settings"])
        point = Posterior.read_point(copy_network(network).cpu(), file, read=False)
        with rewrap_load_errors(file):  # what does not fit is refused before it is read
            known = cls.from_state(point, select_prefix(file.views, "posterior"), settings).tensors()
        file.check_names(known)
        point = Posterior.read_point(copy_network(network), file)
        state = {name: value.to(device) for name, value in select_prefix(file.tensors, "posterior").items()}
        with rewrap_load_errors(file):
            return cls.from_state(point, state, settings)

    @classmethod
    def read_point(cls, model: nn.Module, file: TensorFile, read: bool = True) -> "Posterior":
        """Network, likelihood and history of a file; ``model`` stays untouched if its tensors do not fit.

        Unless the file is to be ``read``, only shapes are looked at, and the weights stay those of ``model``.
        """
        with rewrap_load_errors(file):
            likelihood = make_likelihood(file.document["likelihood"])
            for view in select_prefix(file.views, "likelihood").values():
                if view.dtype in PRECISIONS:
                    likelihood.to(view.dtype)
            history = History.from_dict(file.document["history"])
        filled = {"network": model, "likelihood": likelihood}
        units = [view for name, view in select_prefix(file.views, "network").items() if name in (LOC, SCALE)]
        if len(units) == 2:
            set_output_scale(
                model, *(torch.zeros(view.shape, dtype=view.dtype, device=device_of(model)) for view in units)
            )
        for part, target in filled.items():
            check_weights(target, select_prefix(file.views, part), file.path)
        if not read:
            return cls(model, likelihood, history)
        bad = first_nonfinite_tensor(iter(file.tensors.items()))
        if bad:
            raise FlowBNNError(f"'{file}' is damaged: '{bad}' holds NaN or infinity", kind="file")
        warn_changed_layers(model, file.document.get("modules") or {}, file)
        for part, target in filled.items():
            target.load_state_dict(select_prefix(file.tensors, part))
        return cls(model, likelihood, history)


def select_prefix(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors whose names begin with this part."""
    return {
        name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")
    }


@contextmanager
def rewrap_load_errors(path: Any) -> Iterator[None]:
    """Whatever goes wrong inside says that the file cannot be loaded."""
    try:
        yield
    except Exception as error:
        why = (
            f"it has no {error}"
            if isinstance(error, KeyError)
            else " ".join(str(error).split()) or type(error).__name__
        )
        raise FlowBNNError(f"'{path}' cannot be loaded: {why}", kind="file") from None


def open_posterior_file(
    path: "str | Path | TensorFile", network: nn.Module, kinds: Sequence[str]
) -> TensorFile:
    """The file of a posterior of one of these kinds, of which only the header has been read."""
    weights = sum(value.numel() for value in network.state_dict().values())
    file = path if isinstance(path, TensorFile) else TensorFile(path, weights)
    kind = file.document.get("kind")
    if kind not in kinds:
        wanted = f"a {kinds[0]}" if len(kinds) == 1 else "a posterior of this version"
        trouble = f"holds a {kind or 'file of another kind'}, not {wanted}"
        raise FlowBNNError(f"'{path}' {trouble}", kind="file")
    return file


@checked
def load_posterior(path: "str | Path | TensorFile", network: nn.Module) -> Posterior:
    """Read what ``posterior.save(path)`` wrote, of whatever method, into a copy of ``network``, the plain network it was made from.

    Raises:
        FlowBNNError: where the file is damaged or was made from another architecture.
    """
    kinds = {kind.kind: kind for kind in all_subclasses(Posterior)}
    file = open_posterior_file(path, network, list(kinds))
    return kinds[file.document["kind"]].load(file, network)
