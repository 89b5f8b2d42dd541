"""Choice of an observation model by its name or by the targets."""

import json
import math
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNError, requirement_error
from flowbnn.likelihoods.base import Likelihood, build_likelihood
from flowbnn.likelihoods.classes import squeeze_channel
from flowbnn.metrics.checks import are_binary, are_probabilities
from flowbnn.options import checked
from flowbnn.packing import read_layout


@checked
def make_likelihood(
    likelihood: Likelihood | str | dict[str, Any],
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
) -> Likelihood:
    """Returns a likelihood by its name, or by the targets.

    Args:
        likelihood: Likelihood, which is returned unchanged, its name, or the result of its ``to_dict``. ``"auto"`` chooses by the
            targets: integers are classes, rows of probabilities are soft labels of classes, and other real numbers are a regression.
            Targets 0 and 1 with one output each are labels of a Bernoulli likelihood: several labels, a mask, or one logit.
        outputs: Outputs of the network, ``[B, ...]``. They determine the dimension of a Gaussian. One output per integer target means
            two classes with one logit.
        targets: Targets, ``[B, ...]``, needed for ``"auto"``.

    Raises:
        FlowBNNError: If the name is unknown, or if the targets are ambiguous.

    >>> import torch
    >>> make_likelihood("auto", torch.zeros(2, 3), torch.tensor([0, 1]))
    Categorical()
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    settings: dict[str, Any] = (
        dict(likelihood) if isinstance(likelihood, dict) else {"likelihood": likelihood}
    )
    name = str(settings.pop("likelihood", None)).lower().replace("_", "")
    if name == "auto":
        name = _choose_name(outputs, targets)
    if name == "gaussian" and outputs is not None and settings.get("noise", "learned") == "learned":
        settings.setdefault("dim", math.prod(outputs.shape[1:]))
    return build_likelihood(
        {"likelihood": name, **settings} if isinstance(likelihood, dict) or settings else name
    )


def check_heads(likelihood: Likelihood | str, targets: Tensor) -> None:
    """Raises FlowBNNError if there are targets of several heads, but no likelihood for each.

    Args:
        likelihood: Likelihood or its name.
        targets: Targets, of several heads if they are packed (:mod:`flowbnn.packing`).
    """
    if likelihood == "auto" and read_layout(targets) is not None:
        hint = "use likelihood=flowbnn.likelihoods.Heads(...), or pass the targets of one head"
        words = "a tuple or dictionary of targets", "a likelihood for each head"
        raise requirement_error(*words, hint=hint, kind="targets", argument="likelihood")


def check_serializable(likelihood: Likelihood) -> None:
    """Raises FlowBNNError if a saved likelihood could not be loaded, so that a fit fails before it has trained.

    Args:
        likelihood: Likelihood whose settings are checked.
    """
    settings = likelihood.to_dict()
    try:
        json.dumps(settings)
    except (TypeError, ValueError) as error:
        text = f"{type(likelihood).__name__}.to_dict(): {error}; use numbers and strings"
        raise FlowBNNError(text, kind="unsupported", argument="likelihood") from None


def _choose_name(outputs: Tensor | None, targets: Tensor | None) -> str:
    """Returns the name of the likelihood for some targets.

    Raises:
        FlowBNNError: If there are no targets, or if floating point targets look like class labels.
    """
    if targets is None:
        hint, fields = (
            "set 'categorical', 'bernoulli' or 'gaussian'",
            {"kind": "targets", "argument": "likelihood"},
        )
        raise requirement_error("likelihood='auto'", "targets", hint=hint, **fields)
    check_heads("auto", targets)
    if outputs is not None and _are_logits_of_labels(outputs, targets):
        return "bernoulli"
    if not targets.is_floating_point():
        if targets.ndim == 2 and _are_soft(targets.float(), outputs):
            raise _ambiguity_error("one-hot labels", "targets.argmax(1)", "bernoulli")
        return "categorical"
    _check_real(targets, outputs)
    return "categorical" if _are_soft(targets, outputs) else "gaussian"


def _are_logits_of_labels(outputs: Tensor, targets: Tensor) -> bool:
    """Returns True if each target is a label 0 or 1 that has one output."""
    if outputs.numel() == len(outputs) and not targets.is_floating_point():
        return True
    same_shape = squeeze_channel(outputs).shape == squeeze_channel(targets).shape
    return same_shape and are_binary(targets) and not _are_soft(targets.float(), outputs)


def _are_soft(targets: Tensor, outputs: Tensor | None) -> bool:
    """Returns True if targets are probabilities ``[B, C]``, or probabilities at positions on the axis 1 or -1 of the outputs."""
    if targets.ndim <= 2 or outputs is None or targets.shape != outputs.shape:
        return are_probabilities(targets)
    rows = (targets.movedim(axis, -1).flatten(0, -2) for axis in (1, -1))
    return any(are_probabilities(values) for values in rows)


def _check_real(targets: Tensor, outputs: Tensor | None) -> None:
    """Raises FlowBNNError if floating point targets look like class labels.

    A batch of zeros looks like labels, because positive examples may be rare.
    """
    if not targets.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return
    if _are_soft(targets, outputs):
        raise _ambiguity_error("one-hot labels", "targets.argmax(1)", "categorical", "gaussian")
    if targets.numel() == len(targets):
        one_output = outputs is None or outputs.numel() <= len(outputs)
        name = "bernoulli" if one_output else "categorical"
        raise _ambiguity_error("labels of type float", "targets.long()", name, "gaussian")
    if bool((targets == 0).any()) and bool((targets == 1).any()):
        raise _ambiguity_error("several labels", "one output for each", "gaussian")


def _ambiguity_error(noun: str, remedy: str, *names: str) -> FlowBNNError:
    """Returns the error for targets of which several likelihoods are possible.

    Args:
        noun: Words for the targets.
        remedy: What to use if these words are right.
        names: Names of possible likelihoods.
    """
    choices = " or ".join(f"'{name}'" for name in names)
    text = f"targets look like {noun}; use {remedy}, or set likelihood={choices}"
    return FlowBNNError(text, kind="targets", argument="likelihood")
