"""Preparation of a fit: one reading of the loader, one batch through the network, and the likelihood that fits both."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import (
    call,
    clone_inputs_of,
    clone_tensors,
    device_of,
    dtype_of,
    has_row_axis,
    move,
    rewrap_forward_errors,
    rows,
    split_weighted_batch,
    tensors_of,
)
from flowbnn.errors import FlowBNNError, requirement_error, value_error, warn
from flowbnn.flattening import flatten_as_targets
from flowbnn.likelihoods import (
    ConditionalDensity,
    Heads,
    Likelihood,
    Quantiles,
    RealLikelihood,
    learns_noise,
    make_likelihood,
)
from flowbnn.likelihoods.factory import check_heads, check_serializable
from flowbnn.likelihoods.probabilities import SigmoidRecorder, warn_probabilities
from flowbnn.methods.data_summary import DataSummary
from flowbnn.methods.fit_options import FitOptions
from flowbnn.networks import evaluation_mode, watch_modules
from flowbnn.noise import noise_layers, weight_parameters
from flowbnn.noise.inspection import ProbePass, inspect_noise, probe_rows
from flowbnn.noise.modes import record_noise_inputs, share_draws_in_batches
from flowbnn.posterior.prediction import check_rows
from flowbnn.posterior.trace import examples_interact, rows_differ
from flowbnn.regression import (
    SCALE,
    noise_at_mean,
    set_noise_scale,
    standardize_targets,
    warn_repeated_targets,
)


@dataclass(frozen=True)
class PreparedFit:
    """Result of :func:`prepare`.

    Args:
        likelihood: Likelihood on the device of the network, checked against outputs and targets.
        inputs: Inputs of the first batch, on the device of the network.
        outputs: Outputs of the network for the sample of the data, with its noise held at the mean.
        check_batch: Function that checks the targets of a batch.
        data: Summary of the training data.
        idle_layers: Layers with noise that the network never calls.
        rows_interact: True if outputs depend on other examples of the batch. One draw of the noise then serves a whole batch.
    """

    likelihood: Likelihood
    inputs: Any
    outputs: Tensor
    check_batch: Callable[[Any], None]
    data: DataSummary
    idle_layers: list[str]
    rows_interact: bool


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    options: FitOptions,
    trained: bool = True,
) -> PreparedFit:
    """Reads the loader once, runs one batch through the network, and returns the likelihood that fits both.

    One pass over two rows inspects the layers with noise (:func:`~flowbnn.noise.inspection.probe_rows`). A likelihood in the
    options is copied, because its noise is learned. If the weights will be trained, a fresh network is rescaled to the units of
    real-valued targets (:func:`~flowbnn.regression.standardize_targets`).

    Args:
        model: Network. Only the scale of its outputs may change.
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
        trained: If True, the weights will be trained.
    """
    refuse_inference_mode()
    trained = trained and any(weight.requires_grad for weight in weight_parameters(model))
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and trained:
            module.sparse = False  # Adam needs dense gradients
    data = DataSummary.read(loader, options.likelihood, options.seed, options.num_data)
    check_heads(options.likelihood, data.targets)
    device, dtype = device_of(model), dtype_of(model)
    if isinstance(options.likelihood, Likelihood):
        options.likelihood.attach(model)
    first = try_first_batch(model, move(data.sample[0], device, dtype))
    outputs, targets = first.outputs, data.sample[1]
    likelihood = deepcopy(make_likelihood(options.likelihood, outputs, targets)).to(device)
    likelihood.attach(model)
    check_serializable(likelihood)
    if isinstance(likelihood, RealLikelihood):
        outputs = flatten_as_targets(model, likelihood, outputs, targets)
    likelihood.check(outputs, targets)
    warn_probabilities(likelihood, outputs, first.from_sigmoid)
    if isinstance(likelihood, RealLikelihood) and data.statistics is not None:
        values = likelihood.link(targets)
        # the columns of several heads cannot be told from each other again
        trained = trained and not (isinstance(likelihood, Heads) and SCALE in model._buffers)
        outputs = standardize_targets(model, likelihood, outputs, values, data.statistics, trained)
        if isinstance(likelihood, ConditionalDensity) and not isinstance(likelihood, Quantiles):
            # members of an ensemble copy the likelihood of the options, which remembers the warning
            source = options.likelihood if isinstance(options.likelihood, ConditionalDensity) else likelihood
            warn_repeated_targets(source, data.statistics)
    likelihood.initialize(outputs, targets.to(outputs.device))
    if learns_noise(likelihood) and not bool(likelihood.log_scale.any()):
        set_noise_scale(likelihood, [(outputs, targets)])
    row = outputs[:1].detach()

    def check_batch(batch: Any) -> None:
        batch_targets = split_weighted_batch(batch).targets
        likelihood.check(likelihood.outputs_like(row, batch_targets), batch_targets)

    idle_layers, rows_interact = list[str](), False
    if noise_layers(model):
        idle_layers = inspect_noise(model, first.inputs, first.noise_inputs, first.probe)
        rows_interact = first.may_interact() and examples_interact(model, first.inputs)
        share_draws_in_batches(model, rows_interact)
    inputs = move(data.inputs, device, dtype)
    return PreparedFit(likelihood, inputs, outputs, check_batch, data, idle_layers, rows_interact)


def refuse_inference_mode() -> None:
    """Raises FlowBNNError in ``torch.inference_mode()``, where no gradients can be computed, now or later with the fitted tensors."""
    if torch.is_inference_mode_enabled():
        raise requirement_error("a fit", "gradients", hint="leave torch.inference_mode()")


class FirstBatch(NamedTuple):
    """First batch of a network.

    Args:
        inputs: Inputs on the device of the network.
        outputs: Outputs of the network, with its noise held at the mean.
        noise_inputs: Inputs of the layers with noise, by layer name.
        from_sigmoid: If True, the outputs are the result of a sigmoid.
        probe: Pass over a few rows of the batch, if the network has noise and does not fail on them.
    """

    inputs: Any
    outputs: Tensor
    noise_inputs: Mapping[str, Tensor]
    from_sigmoid: bool
    probe: ProbePass | None

    def may_interact(self) -> bool:
        """Returns False if a few rows have the same outputs alone and in the batch."""
        return self.probe is None or rows_differ(self.outputs, self.probe.outputs, self.probe.rows)


def try_first_batch(model: nn.Module, inputs: Any) -> FirstBatch:
    """Runs the first batch through a network in evaluation mode, and restores torch's generators.

    A network that changes the batch in place gets clones of its inputs from now on. Dropout in place changes it in training mode only.
    """
    copies = clone_tensors(inputs)
    versions = [tensor._version for tensor in tensors_of(copies)]
    with ExitStack() as stack:
        for context in (
            evaluation_mode(model),
            noise_at_mean(model),
            torch.random.fork_rng(cuda_devices(device_of(model))),
        ):
            stack.enter_context(context)
        noise_inputs = stack.enter_context(record_noise_inputs(model))
        sigmoids = stack.enter_context(SigmoidRecorder())
        stack.enter_context(watch_modules({"": model}, None, _warn_several_outputs))
        outputs = run_first_batch(model, copies, "first batch")
    drops_inplace = any(
        getattr(module, "inplace", False) and "p" in vars(module) for module in model.modules()
    )
    if drops_inplace or versions != [tensor._version for tensor in tensors_of(copies)]:
        clone_inputs_of(model)
    probe = probe_rows(model, inputs) if noise_layers(model) else None
    return FirstBatch(inputs, outputs, noise_inputs, sigmoids.recorded(outputs), probe)


def _warn_several_outputs(name: str, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
    """Warns if a network returns a tuple of tensors that all have one row for each example, because only the first is used."""
    if not isinstance(outputs, list | tuple) or hasattr(outputs, "logits"):
        return
    tensors = [value for value in outputs if isinstance(value, Tensor) and value.ndim]
    shapes = [list(value.shape) for value in tensors if value.shape[0] == tensors[0].shape[0]]
    if len(shapes) > 1:
        text = ", ".join(str(shape) for shape in shapes)
        choice = "use fb.select_output(network, 1) for the second one, or 0 to confirm the first"
        warn(
            f"the network returns several outputs, {text}; the first one is used; {choice}",
            kind="outputs",
            argument="network",
            shapes=shapes,
        )


def cuda_devices(device: torch.device) -> list[torch.device]:
    """Returns the devices whose generators ``torch.random.fork_rng`` restores besides that of the CPU."""
    return [device] if device.type == "cuda" else []


def run_first_batch(
    model: nn.Module, inputs: Any, name: str, check: Callable[[Tensor], Any] | None = None
) -> Tensor:
    """Returns the outputs of a network for its first batch.

    Args:
        model: Network.
        inputs: Inputs on the device of the network.
        name: Name of the batch, for messages.
        check: Function that raises FlowBNNError if the outputs do not fit.

    Raises:
        FlowBNNError: If the network or the check fails.
    """
    with rewrap_forward_errors(inputs, f"the network fails on the {name}, of"):
        try:
            outputs = call(model, inputs)
            if not outputs.is_floating_point():
                hint = "return logits or real numbers"
                raise value_error("outputs", "floating-point numbers", str(outputs.dtype), hint, kind="dtype")
            if has_row_axis(inputs):
                if isinstance(inputs, list | tuple) and len(inputs) == len(outputs) != rows(inputs):
                    value, hint = f"a list of {len(inputs)} examples", "pad them to one tensor"
                    raise requirement_error(
                        "a fit", "tensors with the examples on the first axis", value, hint
                    )
                check_rows(outputs, rows(inputs))
            if check is not None:
                check(outputs)
            return outputs
        except FlowBNNError as error:
            raise FlowBNNError(f"the {name} does not fit: {error}", **error.fields) from error.__cause__
