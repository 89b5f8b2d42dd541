"""Features of inputs for densities: the inputs themselves or the outputs of a layer, reduced to their principal components."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, move, rows, split_batch, take
from flowbnn.errors import FlowBNNError, check_shape, nearest
from flowbnn.networks import evaluation_mode


class Features(nn.Module):
    r"""Features of inputs, as vectors in single precision.

    More than ``components`` features are reduced to their principal components, and the logarithm of the distance to the plane of the
    components is one more feature. An input that differs from the data in another direction therefore has unusual features as well.

    Args:
        layer: Name of the layer whose outputs are the features, or None for the inputs themselves.
        center: Mean of the features, ``[F]``, or None without principal components.
        directions: Principal directions ``[F, components]``, or None.

    >>> features = Features.fit([torch.randn(50, 8)], components=2)
    >>> features(torch.randn(5, 8)).shape  # two components and the distance
    torch.Size([5, 3])
    """

    center: Tensor | None
    directions: Tensor | None

    def __init__(
        self, layer: str | None = None, center: Tensor | None = None, directions: Tensor | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("center", center)
        self.register_buffer("directions", directions)

    @classmethod
    def fit(
        cls,
        batches: Iterable[Any],
        components: int,
        layer: str | None = None,
        network: nn.Module | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> "Features":
        """Computes the principal components of the first 5,000 rows.

        Args:
            batches: Batches of inputs, or of inputs and targets.
            components: Largest number of features without principal components, and the number of components.
            layer: Name of the layer, or None for the inputs.
            network: Network of the layer.
            context: Function that returns a context manager in which the network runs.
        """
        if layer is not None and (network is None or layer not in dict(network.named_modules())):
            names = [] if network is None else [name for name, _ in network.named_modules() if name]
            text = f"unknown layer '{layer}'{nearest(layer, names)}"
            raise FlowBNNError(text, argument="features")
        plain, collected, count = cls(layer), list[Tensor](), 0
        hint = "use inputs of one size, and the tuple (inputs, targets) instead of a list of both"
        for batch in batches:
            collected.append(plain(split_batch(batch)[0], network, context))
            check_shape("features", collected[-1], ("batch", collected[0].shape[1]), hint, argument="loader")
            count += len(collected[-1])
            if count >= 5000:  # far more than 16 principal components need
                break
        if not count:
            raise FlowBNNError("loader is empty", kind="data", argument="loader")
        values = torch.cat(collected).double()
        if values.shape[1] <= components:
            return plain
        center = values.mean(0)
        _, _, directions = torch.linalg.svd(values - center, full_matrices=False)
        return cls(layer, center.float(), directions[:components].mT.float().contiguous())

    @property
    def dim(self) -> int | None:
        """Number of features, or None if it is that of the inputs or of the layer."""
        return None if self.directions is None else self.directions.shape[1] + 1

    @torch.no_grad()
    def forward(
        self,
        inputs: Any,
        network: nn.Module | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Returns the features of inputs, ``[B, F]``, on the CPU or the device of the buffers.

        Args:
            inputs: Inputs of the network. Without a layer they must be one tensor.
            network: Network of the layer.
            context: Function that returns a context manager in which the network runs.
        """
        return self.reduce(self._raw(inputs, network, context))

    def reduce(self, values: Tensor) -> Tensor:
        """Returns the principal components of vectors and the distance to their plane, or the vectors if there are no components.

        Args:
            values: Inputs or outputs of the layer as vectors, ``[B, F]``.
        """
        if self.center is None or self.directions is None:
            return values
        difference = values.to(self.center.device) - self.center
        components = difference @ self.directions
        distance = difference - components @ self.directions.mT
        return torch.cat([components, distance.norm(dim=-1, keepdim=True).clamp_min(1e-12).log()], -1)

    def _raw(
        self, inputs: Any, network: nn.Module | None, context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        """Returns the inputs, or the outputs of the layer, as vectors ``[B, F]``."""
        if self.layer is None or network is None:
            if not isinstance(inputs, Tensor):
                text = "a density of inputs needs one tensor of inputs; set features= to the name of a layer"
                raise FlowBNNError(text, kind="inputs", argument="features")
            return inputs.reshape(len(inputs), -1).float().cpu()
        captured, chunk = list[Tensor](), 512  # rows that the network reads at a time
        module = network.get_submodule(self.layer)
        handle = module.register_forward_hook(lambda _, args, outputs: captured.append(outputs))
        device, dtype = device_of(network), dtype_of(network)
        try:
            with evaluation_mode(network), context():
                for start in range(0, rows(inputs), chunk):
                    call(network, move(take(inputs, start, start + chunk), device, dtype))
        finally:
            handle.remove()
        if len(captured) != -(-rows(inputs) // chunk) or not isinstance(captured[0], Tensor):
            text = f"layer '{self.layer}' must return one tensor and run once in a forward pass"
            raise FlowBNNError(text, kind="layer", argument="features", layer=self.layer)
        return torch.cat([value.reshape(len(value), -1).float().cpu() for value in captured])
