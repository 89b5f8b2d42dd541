"""Observation model of networks with several heads."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, quote_names, requirement_error
from flowbnn.likelihoods.base import Likelihood, build_likelihood
from flowbnn.likelihoods.regression import RealLikelihood, learns_noise
from flowbnn.numerics import at_least_single
from flowbnn.options import NonEmpty, checked
from flowbnn.packing import checksum_of, pack_targets, read_layout, unpack_targets
from flowbnn.predictive.heads import HeadsPredictive


class Heads(RealLikelihood):
    r"""Likelihood of several targets, each predicted by a head of the network: :math:`\log p(y \mid x) = \sum_h \log p_h(y_h \mid x)`.

    The network returns a dictionary with the names of the heads, or a tuple in their order. So are the targets of a batch. A forward
    hook of the fitted copy of the network concatenates its outputs, so that ``posterior.networks`` return one tensor ``[B, K]``.

    Args:
        heads: Likelihood of each head, or its name, as a dictionary or a sequence.
        output_shapes: Shape of one row of the outputs of each head. By default it is taken from the first batch.

    >>> likelihood = Heads({"class": "categorical", "value": "gaussian"})
    >>> class Network(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.labels, self.values = nn.Linear(2, 3), nn.Linear(2, 1)
    ...
    ...     def forward(self, x):
    ...         return {"class": self.labels(x), "value": self.values(x)}
    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), {"class": torch.arange(8) % 3, "value": torch.randn(8)})]
    >>> posterior = fb.MLE(epochs=1).fit(Network(), loader, likelihood=likelihood, progress=False)
    >>> prediction = posterior.predict(torch.zeros(5, 2))
    >>> prediction["class"].probabilities.shape, prediction["value"].mean.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    @checked
    def __init__(
        self,
        heads: Annotated[Mapping[str, Any] | Sequence[Any], NonEmpty()],
        output_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(heads, Mapping):
            pairs = list(heads.items())
        elif heads and all(isinstance(head, list | tuple) and len(head) == 2 for head in heads):
            pairs = [(name, head) for name, head in heads]  # stored in files, because JSON may sort names
        else:
            pairs = [(str(index), head) for index, head in enumerate(heads)]
        self.names = tuple(name for name, _ in pairs)
        self.members = nn.ModuleList([build_likelihood(head) for _, head in pairs])
        self._packer: OutputPacker | None = None
        self._shapes = None if output_shapes is None else [tuple(map(int, shape)) for shape in output_shapes]

    def extra_repr(self) -> str:
        return quote_names(self.names)

    @property
    def heads(self) -> dict[str, Likelihood]:
        """Likelihood of each head, by name."""
        return dict(zip(self.names, self.members, strict=True))  # type: ignore[arg-type]

    @property
    def output_shapes(self) -> list[tuple[int, ...]] | None:
        """Shape of one row of the outputs of each head, or None before the first batch."""
        return self._shapes if self._shapes is not None or self._packer is None else self._packer.shapes

    # -------------------- outputs and targets as one tensor

    def attach(self, network: nn.Module) -> None:
        """Adds a forward hook to a network that concatenates the outputs of its heads to one tensor ``[B, K]``.

        Args:
            network: Network, which is changed in place. A network with such a hook is not changed.
        """
        packers = [hook for hook in network._forward_hooks.values() if isinstance(hook, OutputPacker)]
        if not packers:
            packers = [OutputPacker(self.names, self._shapes)]
            network.register_forward_hook(packers[0])
        self._packer = packers[0]

    def split_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the outputs of each head, ``[..., *shape]``, of concatenated outputs ``[..., K]``."""
        shapes = self._known_shapes()
        parts = outputs.split([int(torch.Size(shape).numel()) for shape in shapes], -1)
        return {
            name: part if _is_flat(head) else part.reshape(*part.shape[:-1], *shape)
            for (name, head), part, shape in zip(self.heads.items(), parts, shapes, strict=True)
        }

    def _known_shapes(self) -> list[tuple[int, ...]]:
        shapes = self.output_shapes
        if shapes is None:
            raise missing_heads("outputs", self.names)
        return shapes

    def split_targets(self, targets: Any) -> dict[str, Tensor]:
        """Returns the targets of each head in the form that its predictive expects.

        Args:
            targets: Dictionary, tuple in the order of the heads, or the tensor that the library makes of them.

        Raises:
            FlowBNNError: If a head has no targets.
        """
        parts = self._split_targets(targets)
        return {name: head.canonical_targets(parts[name]) for name, head in self.heads.items()}

    def _split_targets(self, targets: Any) -> dict[str, Tensor]:
        packed = targets if isinstance(targets, Tensor) else pack_targets(targets)
        layout = read_layout(packed)
        names = self.names if layout is None or not layout.checksum else tuple(sorted(self.names))
        by_name = layout is not None and layout.checksum == checksum_of(self.names)
        by_position = layout is not None and not layout.checksum and len(layout.shapes) == len(self.names)
        if layout is None or not (by_name or by_position):
            raise missing_heads("targets", self.names)
        parts = dict(zip(names, unpack_targets(packed, layout), strict=True))
        return {name: parts[name] for name in self.names}

    # -------------------- likelihood

    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        """Returns the sum of the log-likelihoods of the heads for each example, ``[B]``.

        Args:
            outputs: Concatenated outputs ``[B, K]``.
            targets: Targets of all heads.
        """
        parts, values = self.split_outputs(outputs), self._split_targets(targets)
        terms = [head.log_prob(parts[name], values[name]) for name, head in self.heads.items()]
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum(0)

    def check(self, outputs: Tensor, targets: Any) -> None:
        """Raises FlowBNNError if a head has no outputs or targets, or if they do not fit each other.

        Args:
            outputs: Concatenated outputs ``[B, K]``.
            targets: Targets of all heads.
        """
        parts, values = self.split_outputs(outputs), self._split_targets(targets)
        for name, head in self.heads.items():
            try:
                head.check(parts[name], values[name])
            except FlowBNNError as error:
                raise FlowBNNError(f"head '{name}': {error}", **{**error.fields, "head": name}) from None

    def initialize(self, outputs: Tensor, targets: Any) -> None:
        """Initializes all heads. A learned noise scale is set to the root mean square of the residuals."""
        parts, values = self.split_outputs(outputs), self._split_targets(targets)
        for name, head in self.heads.items():
            head.initialize(parts[name], values[name])
            if learns_noise(head) and not bool(head.log_scale.any()):
                residuals = values[name].to(parts[name]).reshape(parts[name].shape) - parts[name]
                square = residuals.detach().double().square().mean(0).clamp_min(1e-12)
                with torch.no_grad():
                    head.log_scale.copy_(0.5 * square.log())

    def canonical_targets(self, targets: Any) -> Tensor:
        """Returns targets as one tensor."""
        return targets if isinstance(targets, Tensor) else pack_targets(targets)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the outputs whose prediction is the mean of the predictions, for each head."""
        parts = [self.split_outputs(each) for each in outputs]
        means = [head.average_outputs([part[name] for part in parts]) for name, head in self.heads.items()]
        lead = outputs[0].shape[:-1]
        return torch.cat(
            [mean.reshape(*lead, -1).to(torch.promote_types(mean.dtype, torch.float32)) for mean in means], -1
        )

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> HeadsPredictive:
        """Returns the predictive distribution of samples of concatenated outputs ``[S, B, K]``."""
        parts = self.split_outputs(at_least_single(outputs))
        heads = {name: head.predictive(parts[name], sample_counts) for name, head in self.heads.items()}
        return HeadsPredictive(heads, self.split_targets)

    # -------------------- units of real-valued heads

    def link(self, targets: Any) -> Tensor:
        """Returns the targets of all real-valued heads on the scale of their outputs, ``[B, D]``."""
        values = self._split_targets(targets)
        columns = [
            head.link(values[name]).double().reshape(len(values[name]), -1)
            for name, head in self.heads.items()
            if isinstance(head, RealLikelihood)
        ]
        return torch.cat(columns, 1) if columns else torch.zeros(len(targets), 0, dtype=torch.float64)

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of :meth:`link`, ``[B, D]``."""
        parts = self.split_outputs(outputs)
        columns = [
            head.mean(parts[name]).double().reshape(len(outputs), -1)
            for name, head in self.heads.items()
            if isinstance(head, RealLikelihood)
        ]
        return torch.cat(columns, 1) if columns else outputs.new_zeros(len(outputs), 0)

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of the concatenated outputs. Outputs of heads that are not real-valued are not changed."""
        locs, scales, place = list[Tensor](), list[Tensor](), 0
        for head, shape in zip(self.members, self._known_shapes(), strict=True):
            width = int(torch.Size(shape).numel())
            head_loc, head_scale = torch.zeros(width, dtype=loc.dtype), torch.ones(width, dtype=loc.dtype)
            if isinstance(head, RealLikelihood):
                size = head.mean(torch.zeros(1, *((width,) if _is_flat(head) else shape))).numel()
                columns = slice(place, place + size)
                head_loc, head_scale = head.output_units(loc[columns], scale[columns])
                place += size
            locs.append(head_loc)
            scales.append(head_scale)
        return torch.cat(locs), torch.cat(scales)

    def to_dict(self) -> dict[str, Any]:
        """Returns the names and the settings of all heads as plain values."""
        heads = [[name, head.to_dict()] for name, head in self.heads.items()]
        shapes = self.output_shapes
        return {
            "likelihood": "Heads",
            "heads": heads,
            "output_shapes": None if shapes is None else [list(shape) for shape in shapes],
        }


def _is_flat(head: Likelihood) -> bool:
    """Returns True for a head whose outputs are one number for each target, such as those of pixels."""
    return isinstance(head, RealLikelihood) and head.outputs_per_target == 1


def missing_heads(noun: str, names: Sequence[str]) -> FlowBNNError:
    """Returns the error for a network without outputs, or a batch without targets, for some heads.

    Args:
        noun: ``"outputs"`` or ``"targets"``.
        names: Names of the heads.
    """
    hint = "use a dictionary of all heads, or a tuple in their order"
    return requirement_error("Heads", f"{noun} for {quote_names(names)}", hint=hint, kind=noun, argument=noun)


class OutputPacker:
    """Forward hook that concatenates the outputs of several heads to one tensor ``[B, K]``.

    Args:
        names: Names of the heads.
        shapes: Shape of one row of the outputs of each head. None takes them from the first call.
    """

    def __init__(self, names: Sequence[str], shapes: list[tuple[int, ...]] | None = None) -> None:
        self.names, self.shapes = tuple(names), shapes

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Tensor:
        if isinstance(outputs, Tensor):
            return outputs
        if isinstance(outputs, Mapping):
            missing = [name for name in self.names if name not in outputs]
            values = [outputs[name] for name in self.names if name in outputs]
        else:
            values = list(outputs)[: len(self.names)] if isinstance(outputs, list | tuple) else []
            missing = list(self.names[len(values) :])
        if missing or not all(isinstance(value, Tensor) for value in values):
            raise missing_heads("outputs", missing or self.names)
        if self.shapes is None:
            self.shapes = [tuple(value.shape[1:]) for value in values]
        return torch.cat([value.reshape(value.shape[0], -1) for value in values], 1)
