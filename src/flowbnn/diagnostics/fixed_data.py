"""Reading of data whose likelihood is evaluated as a whole, and checks of networks that evaluate it."""

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flowbnn.batches import (
    ColumnNames,
    check_selectable,
    device_of,
    has_row_axis,
    rewrap_forward_errors,
    split_batch,
    take,
    tensors_of,
)
from flowbnn.data.formats import as_loader
from flowbnn.errors import FlowBNNError
from flowbnn.methods.data_summary import check_loader
from flowbnn.methods.mcmc.potential import gather_data
from flowbnn.methods.variational.noisy_network import NoisyNetwork


@torch.no_grad()
def check_row_independence(network: NoisyNetwork, inputs: Any) -> None:
    """Checks that the output of an example is finite and does not depend on the other examples of its batch.

    Otherwise the likelihood is not a product over examples.

    Args:
        network: Network with noise.
        inputs: Inputs of the network.

    Raises:
        FlowBNNError: If the output is NaN, or depends on other examples.
    """
    large, small = take(inputs, 0, 8), take(inputs, 0, 2)
    ones = torch.ones(8, sum(network.sizes), dtype=network.dtype, device=device_of(network.model))
    with rewrap_forward_errors(small):
        batched, single = (
            network.outputs(batch, ones[: len(tensors_of(batch)[0])]) for batch in (large, small)
        )
    if batched.isnan().any():
        raise FlowBNNError("outputs are NaN; look for NaN in the inputs and weights", kind="not finite")
    tolerance = max(1e-3, 10.0 * torch.finfo(batched.dtype).eps) * float(batched.abs().max())
    if batched.shape[1:] != single.shape[1:]:
        shapes = f"{tuple(single.shape)} for 2 examples, {tuple(batched.shape)} for 8"
        text = f"the shape of the outputs is {shapes}; return one shape per example, or use fb.fit"
        raise FlowBNNError(text, kind="network")
    if not torch.allclose(batched[: len(single)], single, rtol=0.0, atol=tolerance):
        repeated = network.outputs(small, ones[: len(tensors_of(small)[0])])
        if not torch.allclose(repeated, single, rtol=0.0, atol=tolerance):
            text = "outputs are random in evaluation mode; disable dropout that is always on"
            raise FlowBNNError(text, kind="random", argument="network")
        text = "outputs depend on the other examples of a batch; replace layers such as BatchNorm(track_running_stats=False)"
        raise FlowBNNError(text, kind="network")


def read_fixed_data(
    loader: Any, seed: int, purpose: str = "diagnostics", columns: ColumnNames | None = None
) -> tuple[Any, Tensor]:
    """Returns all inputs and targets of a loader.

    Args:
        loader: Loader of batches, or one pair of inputs and targets.
        seed: Seed of the generators of the loader.
        purpose: Purpose of the data, for error messages.
        columns: Names of the columns of the inputs at the fit.

    Raises:
        FlowBNNError: If the loader is empty, or if two passes over it give different examples. The order may differ.
    """
    stage: Any = "validation" if purpose == "calibration" else "train"
    loader = as_loader(loader, stage=stage, columns=columns)
    check_loader(loader, purpose)

    def check_batch(batch: Any) -> None:
        check_loader([batch], purpose)
        inputs, targets = split_batch(batch)
        check_selectable(inputs, purpose)
        if not has_row_axis((inputs, targets)):
            if not has_row_axis(inputs):
                sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(inputs))
                text = f"{purpose} selects rows of the inputs, which is not possible for tensors of the shapes {sizes}; "
                raise FlowBNNError(f"{text}use fb.Temperature or fb.fit", kind="rows", argument="inputs")
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of((inputs, targets)))
            hint = "" if targets.ndim else "; use DataLoader(examples)"
            text = f"inputs and targets {shapes} differ in length{hint}"
            raise FlowBNNError(text, kind="targets", argument="loader")

    def read(seed: int) -> tuple[Any, Tensor]:
        try:
            return gather_data(loader, check_batch, seed)
        except IndexError:
            text = f"the loader for {purpose} has no examples"
            raise FlowBNNError(text, kind="loader", argument="loader") from None

    data = read(seed)
    if not isinstance(loader, list | tuple) and _row_checksums(data) != _row_checksums(read(seed + 1)):
        text = f"two passes over the loader for {purpose} differ; disable random augmentation and drop_last (shuffling is allowed)"
        raise FlowBNNError(text, kind="loader", argument="loader")
    return data


def _row_checksums(data: tuple[Any, Tensor]) -> list[tuple[int, ...]]:
    """Returns the sorted checksums of all examples."""
    dense = [tensor.cpu() for tensor in tensors_of(data) if tensor.layout == torch.strided]
    raw = [tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy() for tensor in dense]
    return sorted(zip(*([crc32(row) for row in rows] for rows in raw), strict=True))
