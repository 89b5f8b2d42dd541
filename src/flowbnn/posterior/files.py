"""Files of posteriors: the header, the tensors of each prefix, and the network, likelihood and history that every file has."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, first_nonfinite_tensor
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.networks import select_output
from flowbnn.regression import LOC, SCALE, set_output_scale
from flowbnn.training import History, check_weights
from flowbnn.training.compatibility import count_weights, warn_changed_layers
from flowbnn.training.storage import TensorFile

# dtypes of weights and noise in files
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with a prefix and a dot, without the prefix."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


@contextmanager
def rewrap_load_errors(path: Any) -> Iterator[None]:
    """Context manager that re-raises any error as a FlowBNNError about a file that cannot be loaded."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        raise FlowBNNError(f"'{path}' cannot be loaded: {reason}", kind="file") from None


def open_posterior_file(
    path: str | Path | TensorFile, network: nn.Module, kinds: Sequence[str]
) -> TensorFile:
    """Opens the file of a posterior and reads only its header.

    Args:
        path: Path of the file, or an open file.
        network: Network that the posterior was made from.
        kinds: Kinds of posteriors that are accepted.
    """
    file = path if isinstance(path, TensorFile) else TensorFile(path, count_weights(network))
    kind = file.document.get("kind")
    if kind not in kinds:
        expected = f"'{kinds[0]}'" if len(kinds) == 1 else "a posterior"
        raise FlowBNNError(f"'{path}' has the kind '{kind}', expected {expected}", kind="file")
    return file


def read_network(
    model: nn.Module, file: TensorFile, read: bool = True
) -> tuple[nn.Module, Likelihood, History]:
    """Returns the network, the likelihood and the history of a file.

    Args:
        model: Network to read the weights into. It is not changed if they do not fit.
        file: File of a posterior.
        read: If False, only shapes are checked, and the weights of ``model`` are not changed.
    """
    with rewrap_load_errors(file):
        likelihood = make_likelihood(file.document["likelihood"])
        for view in select_prefix(file.views, "likelihood").values():
            if view.dtype in PRECISIONS:
                likelihood.to(view.dtype)
        history = History.from_dict(file.document["history"])
    if isinstance(output := file.document.get("output"), str | int):
        select_output(model, output)
    modules = {"network": model, "likelihood": likelihood}
    units = [view for name, view in select_prefix(file.views, "network").items() if name in (LOC, SCALE)]
    if len(units) == 2:
        device = device_of(model)
        set_output_scale(model, *(torch.zeros(view.shape, dtype=view.dtype, device=device) for view in units))
    for prefix, module in modules.items():
        check_weights(module, select_prefix(file.views, prefix), file.path)
    if not read:
        return model, likelihood, history
    bad = first_nonfinite_tensor(iter(file.tensors.items()))
    if bad:
        raise FlowBNNError(f"'{file}' is damaged: '{bad}' holds NaN or infinity", kind="file")
    warn_changed_layers(model, file.document.get("layers") or {}, file)
    for prefix, module in modules.items():
        module.load_state_dict(select_prefix(file.tensors, prefix))
    return model, likelihood, history
