r"""Base class for posteriors, which every method's ``fit`` returns.

A posterior is a distribution over networks together with a likelihood. It implements one method, :meth:`Posterior.outputs`, which
returns the outputs of some of its samples for a batch of inputs. The base class does everything else. The steps of ``predict`` are:

1. It checks its options (:class:`PredictOptions`) and opens a :class:`Prediction`. This object holds the lock of the posterior
   during the call, the number of samples, the seed, the device and the precision.
2. It reads the batches of a loader, and joins small ones. A tensor of inputs is one batch.
3. It calls ``outputs`` for all samples, or in rounds until the prediction has converged (:mod:`flowbnn.posterior.adaptive`). If there
   are views of the inputs, the outputs are averaged over them.
4. It collects the outputs ``[samples, rows, ...]`` of all processes in the order of the loader (:mod:`flowbnn.posterior.loaders`). The
   likelihood turns them into a predictive distribution.

``outputs`` usually calls ``prediction.run``, which runs a network over the rows in chunks that fit the memory of the device
(:mod:`flowbnn.posterior.prediction`). A posterior of one network has three lines:

>>> from flowbnn.likelihoods import Categorical
>>> class SingleNetwork(Posterior):
...     def outputs(self, inputs, samples, prediction):
...         return prediction.run(inputs).expand(len(samples), -1, -1)
>>> SingleNetwork(nn.Linear(2, 3), Categorical()).predict(torch.zeros(5, 2), 4).probabilities.shape
torch.Size([5, 3])
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flowbnn import plots
from flowbnn.batches import (
    check_finite,
    clones_inputs,
    device_of,
    is_batch,
    join_padded,
    rewrap_forward_errors,
)
from flowbnn.data.collation import explain_lists
from flowbnn.data.formats import as_inputs
from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.flattening import flattening_of
from flowbnn.likelihoods import Likelihood
from flowbnn.metrics.checks import IGNORED
from flowbnn.networks import copy_network, input_columns, output_selection
from flowbnn.noise import noise_layers
from flowbnn.options import Count, File, Positive, SampleCount, accepts_options_of, all_subclasses, checked
from flowbnn.posterior.adaptive import Adaptive, adaptive_outputs
from flowbnn.posterior.files import (
    list_tensors,
    model_card,
    open_posterior_file,
    read_network,
    rewrap_load_errors,
    select_prefix,
    upload,
)
from flowbnn.posterior.loaders import OutputCollector, shard_loader, split_rows
from flowbnn.posterior.prediction import (
    KEPT_BYTES,
    Prediction,
    PredictionCache,
    PredictOptions,
    View,
    average_views,
)
from flowbnn.posterior.report import Calibration
from flowbnn.predictive import SummaryCollector, summarize
from flowbnn.predictive.base import NonFiniteSamplesError
from flowbnn.records import restore
from flowbnn.training import (
    History,
    save_tensors,
)
from flowbnn.training.compatibility import describe_layers
from flowbnn.training.options import MixedPrecision
from flowbnn.training.storage import TensorFile


class Posterior:
    """Base class for posteriors: a distribution over networks together with a likelihood.

    Subclasses define :meth:`outputs`. For saving they define :meth:`state`, :meth:`settings` and :meth:`from_state` if they have more
    than a network, a likelihood and a history.

    ``predict`` is thread-safe: concurrent calls are serialized by the lock of :class:`Prediction` and return the same results as
    sequential calls. ``model`` is not changed, so that other threads may call, copy and save it at the same time.

    Args:
        model: Network.
        likelihood: Observation model of the outputs.
        history: Record of the training.
    """

    kind: ClassVar[str] = "posterior"
    default_samples: int = 128
    supports_compile: bool = False  # True if predictions support compile=True
    requires_shared: bool = False  # True if predictions do not support shared=False
    calibration: Calibration | None = None  # set by fb.calibrate

    @checked
    def __init__(self, model: nn.Module, likelihood: Likelihood, history: History | None = None) -> None:
        self.model, self.likelihood, self.history = model, likelihood, history or History()
        likelihood.attach(model)
        self.cache = PredictionCache()

    def __repr__(self) -> str:
        noisy = len(noise_layers(self.model))
        layers = f", {pluralize(noisy, 'layer')} with noise" if noisy else ""
        epochs = pluralize(self.history.epochs, "epoch")
        return f"{type(self).__name__}({type(self.model).__name__}{layers}, {self.likelihood!r}, {epochs})"

    @property
    def columns(self) -> dict[str, list[str]]:
        """Names of the columns of the inputs at the fit, by the path to a data frame, ``""`` if the inputs were one data frame."""
        return input_columns(self.model)

    def outputs(self, inputs: Any, samples: range, prediction: Prediction) -> Tensor:
        """Returns the outputs ``[len(samples), batch, ...]`` of some samples for one batch of inputs.

        Sample ``s`` must be the same network in every call of one prediction, and in every prediction with the same seed.

        Args:
            inputs: Batch of inputs.
            samples: Range of sample numbers.
            prediction: Current prediction.
        """
        return self._unsupported("outputs; define it")

    @checked
    def predict(
        self,
        inputs: Any,
        samples: SampleCount | None = None,
        *,
        shared: bool = True,
        seed: int | None = None,
        max_batch: Count | None = None,
        adaptive: Adaptive | Positive | None = None,
        views: Sequence[View] = (),
        precision: MixedPrecision = "32-true",
        compile: bool | Literal["auto"] = "auto",
        sharded: bool | Literal["auto"] = "auto",
        progress: bool = True,
        keep_samples: bool | Literal["auto"] = "auto",
    ) -> Any:
        """Returns the predictive distribution for inputs, or for all inputs of a loader.

        Args:
            inputs: Tensor or array (numpy, pandas) with the examples on the first axis, or a tuple or mapping of them. Or a loader or
                ``Dataset`` of ``(inputs, targets)`` or of inputs alone. A tuple holds the inputs of a network with several arguments.
            samples: Number of sampled networks to average. The default is ``default_samples``.
            shared: If True, all inputs share the same draws. If False, every example has its own draws.
            seed: Seed of the draws. The same seed gives the same numbers.
            max_batch: Maximum number of rows in one pass. None estimates it from the memory of the device.
            adaptive: Standard error at which sampling stops for an input, or an :class:`~flowbnn.posterior.Adaptive` rule.
            views: Functions from inputs to equivalent inputs, over which predictions are averaged.
            precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
            compile: If True, the network runs through ``torch.compile``. ``"auto"`` does so for long jobs on CUDA devices.
            sharded: If several processes are connected, each predicts a part of the loader. False predicts everything here.
            progress: If True, a progress bar is shown for loaders on a terminal.
            keep_samples: If True, the outputs of all samples are kept. If False, they are reduced to means and uncertainties, some
                rows at a time. ``"auto"`` keeps up to 128 MB of samples.

        Returns:
            The predictive distribution of the likelihood, such as :class:`~flowbnn.predictive.CategoricalPredictive` for classes, or a
            :class:`~flowbnn.predictive.PredictionSummary` if samples are not kept.
            :class:`PredictOptions` describes the options in detail.
        """
        options = PredictOptions(
            samples,
            shared,
            seed,
            max_batch,
            adaptive,
            views,
            precision,
            compile,
            sharded,
            progress,
            keep_samples,
        )
        if not isinstance(inputs, Tensor):
            inputs = as_inputs(inputs, columns=self.columns)
        if is_batch(inputs):
            check_finite(inputs)
            outputs = None
            with self._open_prediction(inputs, options) as prediction:
                keep = options.keep_samples
                if keep is not False and prediction.output_bytes(inputs) <= KEPT_BYTES[keep]:
                    outputs, counts = self._batch_outputs(inputs, prediction)
            if outputs is not None:
                return self._predictive_or_error(outputs, counts, inputs, options)
        return self._predict_groups(inputs, options)[0]

    @checked
    @accepts_options_of(PredictOptions)
    def predict_with_targets(
        self, inputs: Any, samples: SampleCount | None = None, **options: Any
    ) -> tuple[Any, Tensor | None]:
        """Returns the predictive distribution and the targets of the loader, in the same order.

        Args:
            inputs: Inputs or a loader, as in :meth:`predict`.
            samples: Number of sampled networks to average.
            options: Other options of :meth:`predict`.
        """
        predict_options = PredictOptions(samples, **options)
        loader = as_inputs(inputs, columns=self.columns)
        return self._predict_groups(loader, predict_options, score=True)

    def _predict_groups(
        self, inputs: Any, options: PredictOptions, score: bool = False
    ) -> tuple[Any, Tensor | None]:
        """Predicts groups of rows one after the other. Returns the predictive distribution, and the targets or None.

        Args:
            inputs: Loader, or a batch whose outputs need much memory.
            options: Options of the prediction.
            score: If True, summaries have the scores of the targets.
        """
        summaries, targets = SummaryCollector(), list[Tensor]()

        def summarize_rows(outputs: Tensor, sample_counts: Tensor | None, values: Tensor | None) -> bool:
            """Adds the summary of some rows. Returns False if their predictive distribution has none."""
            rows_targets = None if values is None else self.likelihood.canonical_targets(values)
            bytes_per_row = outputs[:, :1].numel() * outputs.element_size()
            size = max(1, int(KEPT_BYTES[False]) // max(1, bytes_per_row))
            for start in range(0, outputs.shape[1], size):
                chunk = slice(start, start + size)
                counts, chunk_targets = (
                    None if rows is None else rows[chunk] for rows in (sample_counts, rows_targets)
                )
                predictive = self._predictive_or_error(outputs[:, chunk], counts, inputs, options)
                summary = summarize(predictive, chunk_targets if score else None)
                if summary is None:
                    return False
                summaries.add(summary)
            targets.extend([] if rows_targets is None else [rows_targets])
            return True

        outputs, counts, values = self._collect_groups(inputs, options, summarize_rows)
        has_summaries, has_rows_left = summaries.num_rows > 0, outputs.shape[1] > 0
        if (has_summaries and not has_rows_left) or (
            (has_summaries or options.keep_samples is False) and summarize_rows(outputs, counts, values)
        ):
            return summaries.result(), join_padded(targets, fill=IGNORED) if targets else None
        predictive = self._predictive_or_error(outputs, counts, inputs, options)
        return predictive, None if values is None else self.likelihood.canonical_targets(values)

    def collect(self, inputs: Any, options: PredictOptions) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns outputs ``[samples, rows, ...]``, the number of samples of each row (if adaptive), and the targets (if any).

        Args:
            inputs: Inputs or a loader.
            options: Options of the prediction.
        """
        if not is_batch(inputs):
            return self._collect_groups(inputs, replace(options, keep_samples=True))
        check_finite(inputs)
        with self._open_prediction(inputs, options) as prediction:
            return *self._batch_outputs(inputs, prediction), None

    def _open_prediction(self, inputs: Any, options: PredictOptions) -> Prediction:
        """Returns a new prediction. Raises FlowBNNError for options that this posterior does not support."""
        name, argument, message = type(self).__name__, "", ""
        if not hasattr(inputs, "__iter__"):
            argument, message = "inputs", f"predict needs inputs, got a {type(inputs).__name__}"
        elif options.compile is True and not self.supports_compile:
            argument, message = "compile", f"{name} cannot use compile=True"
        elif not options.shared and self.requires_shared:
            argument, message = "shared", f"{name} cannot use shared=False"
        elif not options.shared and (options.views or options.adaptive is not None):
            argument = "views" if options.views else "adaptive"
            message = f"{argument} requires shared=True"
        if argument:
            raise FlowBNNError(message, kind="unsupported", argument=argument)
        return Prediction(self.model, options, self.default_samples, self.cache)

    def _collect_groups(
        self,
        inputs: Any,
        options: PredictOptions,
        consume: Callable[[Tensor, Tensor | None, Tensor | None], bool] = lambda *_: False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns outputs, numbers of samples and targets of all groups of rows.

        Args:
            inputs: Loader, or a batch whose outputs need much memory.
            options: Options of the prediction.
            consume: Function that is called with the results for the last rows whenever these have the bytes that are kept in memory.
                If it returns True, these rows are left out of the result.
        """
        one_batch = is_batch(inputs)
        max_bytes = KEPT_BYTES[options.keep_samples]
        loaders = (
            nullcontext([]) if one_batch else shard_loader(inputs, bool(options.sharded), options.shared)
        )
        with (
            explain_lists(inputs),
            self._open_prediction(inputs, options) as prediction,
            loaders as loader,
        ):
            collector = OutputCollector(loader, max_bytes, self.likelihood)
            groups = collector.groups(prediction)
            if one_batch:
                check_finite(inputs)
                divisible = prediction.output_bytes(inputs) > 0
                groups = split_rows(inputs, max(1, prediction.rows_per_group(inputs)) if divisible else 0)
            for batch, batch_targets in groups:
                collector.add(*self._batch_outputs(batch, prediction), batch_targets)
                if not collector.is_full:
                    continue
                if consume(*collector.result()):
                    collector.clear()
                    collector.max_bytes = min(collector.max_bytes, KEPT_BYTES[False])
                else:
                    collector.max_bytes = math.inf
            return collector.result()

    def _batch_outputs(self, inputs: Any, prediction: Prediction) -> tuple[Tensor, Tensor | None]:
        """Returns outputs ``[samples, rows, ...]`` of one batch, and the number of samples of each row (if adaptive)."""
        options, counts = prediction.options, None
        compute = average_views(self.outputs, self.likelihood) if options.views else self.outputs
        with rewrap_forward_errors(inputs):
            if options.adaptive is None:
                prediction.check_outputs(inputs)
                outputs = compute(inputs, range(prediction.samples), prediction)
            else:
                outputs, counts = adaptive_outputs(
                    lambda rows, numbers: compute(rows, numbers, prediction),
                    inputs,
                    prediction.samples,
                    options.adaptive,
                    self._round_predictive,
                )
        return self._finish_batch(inputs, outputs, prediction), counts

    def _finish_batch(self, inputs: Any, outputs: Tensor, prediction: Prediction) -> Tensor:
        """Returns the outputs of a batch. A subclass may append columns that :meth:`_predictive` reads."""
        return outputs

    def _round_predictive(self, outputs: Tensor) -> Any:
        """Returns the predictive distribution after a round of adaptive sampling, of outputs before :meth:`_finish_batch`."""
        return self._predictive(outputs)

    def _predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> Any:
        """Returns the predictive distribution of outputs under the likelihood."""
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
        """Returns the likelihood of the predictive distribution."""
        return self.likelihood

    def _predictive_or_error(
        self, outputs: Tensor, sample_counts: Tensor | None, inputs: Any, options: PredictOptions
    ) -> Any:
        """Returns the predictive distribution. Raises FlowBNNError with the cause if outputs are not finite."""
        try:
            return self._predictive(outputs, sample_counts)
        except NonFiniteSamplesError as error:
            with Prediction(self.model, replace(options, precision="32-true"), 1, self.cache) as prediction:
                cause = prediction.find_nonfinite(inputs, options.precision)
            raise FlowBNNError(f"{str(error).partition(';')[0]}; {cause}", **error.fields) from None

    def networks(self, samples: int, seed: int | None = None) -> list[nn.Module]:
        """Returns the networks of ``predict(inputs, samples, seed=seed)`` in evaluation mode, each an independent plain network.

        Linearized and probit predictions of :class:`flowbnn.Laplace` are not outputs of networks. Its networks are those of
        ``predictive="sampled"``.

        Args:
            samples: Number of networks.
            seed: Seed of the draws.
        """
        return self._unsupported("single networks")

    @checked
    def sample(self, seed: int | None = None) -> nn.Module:
        """Returns one network of the posterior, the first of :meth:`networks` with this seed."""
        return self.networks(1, seed)[0]

    def draws(self, samples: int, seed: int | None = None) -> dict[str, Tensor]:
        """Returns weights or noise that differ between samples, ``{name: [samples, ...]}``."""
        return self._unsupported("draws")

    def log_prob(self, values: Any) -> Tensor:
        """Returns the log-density of weights or noise."""
        return self._unsupported("density")

    def _unsupported(self, feature: str) -> Any:
        raise FlowBNNError(f"a {type(self).__name__} has no {feature}", kind="unsupported")

    plot_history, plot_kl = plots.plot_history, plots.plot_kl
    plot_class_map, plot_pairs = plots.plot_class_map, plots.plot_pairs

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors to save in addition to the network and the likelihood."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Returns the settings to save in addition to the tensors."""
        return {}

    @classmethod
    def from_state(
        cls, point: "Posterior", state: dict[str, Tensor], settings: dict[str, Any]
    ) -> "Posterior":
        """Returns the posterior that was saved in a file. It may raise any exception if the file is invalid.

        Args:
            point: Posterior with the network, likelihood and history of the file.
            state: Tensors that :meth:`state` returned.
            settings: Values that :meth:`settings` returned.
        """
        return cls(point.model, point.likelihood, point.history)

    def document(self) -> dict[str, Any]:
        """Returns the JSON document of a saved file, with everything except the tensors."""
        output = output_selection(self.model)
        return {
            "kind": self.kind,
            "likelihood": self.likelihood.to_dict(),
            "history": self.history.to_dict(),
            "layers": describe_layers(self.model),
            "output": output if isinstance(output, str | int) else None,
            "output_function": getattr(output, "__name__", "a function") if callable(output) else None,
            "flattening": flattening_of(self.model),
            "clones_inputs": clones_inputs(self.model),
            "columns": self.columns,
            "settings": self.settings(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
        }

    def read_calibration(self, file: TensorFile) -> None:
        """Reads the report of a calibration from a file, if it has one."""
        with rewrap_load_errors(file):
            self.calibration = restore(Calibration | None, file.document["calibration"], "calibration")

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors to save, from the network, the likelihood and the posterior."""
        groups = {
            "network": self.model.state_dict(),
            "likelihood": self.likelihood.state_dict(),
            "posterior": self.state(),
        }
        return {
            f"{prefix}.{name}": value for prefix, tensors in groups.items() for name, value in tensors.items()
        }

    @checked
    def save(self, path: File, metrics: Mapping[str, float] | None = None) -> Path:
        """Writes the posterior to one safetensors file, atomically. The file holds tensors and JSON, and no code.

        Args:
            path: Path of the file.
            metrics: Metrics on held-out data, from :func:`~flowbnn.evaluate`, for the model card in the file. The function
                :func:`~flowbnn.posterior.read_card` returns the card.
        """
        tensors = self.tensors()
        document = {**self.document(), "tensors": list_tensors(tensors), "card": self.card(metrics)}
        return save_tensors(path, tensors, document)

    @checked
    def card(self, metrics: Mapping[str, float] | None = None) -> str:
        """Returns a model card in Markdown: method, likelihood, metrics, versions, and how to load the posterior.

        Args:
            metrics: Metrics on held-out data, from :func:`~flowbnn.evaluate`.
        """
        return model_card(self, metrics)

    @checked
    def push_to_hub(
        self,
        repository: str,
        metrics: Mapping[str, float] | None = None,
        *,
        private: bool = False,
        api: Any = None,
    ) -> str:
        """Uploads the posterior, with its model card as README, to the Hugging Face Hub.

        Args:
            repository: Name of the repository, ``"user/name"``. It is created if it does not exist.
            metrics: Metrics on held-out data for the model card.
            private: If True, a new repository is private.
            api: Client of the Hub. None uses ``huggingface_hub.HfApi()``, with the credentials of this machine.

        Returns:
            Address of the repository.
        """
        return upload(self, repository, metrics, private, api)

    @classmethod
    @checked
    def load(cls, path: "str | Path | TensorFile", network: nn.Module) -> "Posterior":
        """Reads a saved posterior of this kind into a copy of a network.

        Args:
            path: Path of the file.
            network: Plain network that the posterior was made from.
        """
        file = open_posterior_file(path, network, [cls.kind])
        device = device_of(network)
        with rewrap_load_errors(file):
            settings = dict(file.document["settings"])
        point = Posterior(*read_network(copy_network(network).cpu(), file, read=False))
        with rewrap_load_errors(file):  # shapes are checked before tensors are read
            tensors = cls.from_state(point, select_prefix(file.views, "posterior"), settings).tensors()
        file.check_tensors(tensors)
        point = Posterior(*read_network(copy_network(network), file))
        state = {name: value.to(device) for name, value in select_prefix(file.tensors, "posterior").items()}
        with rewrap_load_errors(file):
            posterior = cls.from_state(point, state, settings)
        posterior.read_calibration(file)
        return posterior


@checked
def load_posterior(
    path: "str | Path | TensorFile",
    network: nn.Module,
    likelihood: type[Likelihood] | Likelihood | None = None,
) -> Posterior:
    """Reads a posterior of any method that ``posterior.save(path)`` wrote.

    Args:
        path: Path of the file.
        network: Plain network that the posterior was made from. It is copied.
        likelihood: Class of a likelihood of your own, or an instance. The file has its name and settings, and finds the class by its
            name. Passing the class makes sure that it has been imported.

    Returns:
        The posterior.

    Raises:
        FlowBNNError: If the file is damaged, was made from another architecture, or has another likelihood.
    """
    classes = {posterior_class.kind: posterior_class for posterior_class in all_subclasses(Posterior)}
    file = open_posterior_file(path, network, list(classes))
    likelihood_document = file.document.get("likelihood")
    if likelihood is not None and isinstance(likelihood_document, Mapping):
        cls = likelihood if isinstance(likelihood, type) else type(likelihood)
        if likelihood_document.get("likelihood") != cls.__name__:
            text = f"'{path}' has the likelihood {likelihood_document.get('likelihood')}, not {cls.__name__}"
            raise FlowBNNError(text, kind="file", argument="likelihood")
    return classes[file.document["kind"]].load(file, network)
