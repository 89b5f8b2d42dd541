"""Batches of tensors that lie in memory or on a GPU, without the cost of fetching them one example at a time."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flowbnn.data.augment import CropAndFlip
from flowbnn.data.images import ImageSet
from flowbnn.data.normalize import Normalize, usable_device
from flowbnn.errors import FlowBNNError, check_whole

__all__ = ["Augment", "TensorLoader", "device_loader"]

Augment = Callable[[Tensor, torch.Generator | None], Tensor]

_BLOCK, _MOST = 2**24, 64  # bytes, and batches, that are made together on a GPU


class TensorLoader:
    """Shuffled batches of tensors in memory: one index operation for a batch, where a ``DataLoader`` has one for an example.

    The tensors may lie on a GPU, as bytes for instance; ``augment`` and ``prepare`` then make of each batch's first
    tensor what the network takes, on that device.

    Args:
        tensors: with the examples on their first axis, all of one length and on one device.
        batch_size: examples in a batch; the last batch may be smaller.
        shuffle: a new order at every pass.
        generator: source of the orders and of the augmentation, kept in checkpoints; None takes torch's global one.
        augment: ``(images, generator) -> images`` on the first tensor of a batch, :class:`CropAndFlip` for instance.
        prepare: ``images -> images`` after that, such as :meth:`ImageSet.normalizer`.
        drop_last: leave out a last batch that is smaller; ``num_data`` counts what one pass gives.
        together: batches that are gathered, augmented and prepared in one go, which spares a GPU some thirty launches a batch. With
            a ``generator`` of the loader's own and whole passes the batches are the same as one by one. None is as many as make
            16 MiB on a GPU and one elsewhere; one also where ``augment`` or ``prepare`` is of your own making (anything but
            :class:`CropAndFlip` and :class:`Normalize` themselves), since it may look at its whole batch.

    >>> loader = TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=2)
    >>> len(loader), loader.num_data, [targets.tolist() for _, targets in loader]
    (3, 5, [[0, 1], [2, 3], [4]])
    >>> [targets.tolist() for _, targets in TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=4, drop_last=True)]
    [[0, 1, 2, 3]]
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        together: int | None = None,
    ) -> None:
        if not tensors or any(tensor.ndim == 0 for tensor in tensors):
            raise FlowBNNError("a TensorLoader needs tensors with the examples on their first axis")
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise FlowBNNError(f"the tensors of a TensorLoader are of one length, not {lengths}")
        if len({tensor.device for tensor in tensors}) > 1:
            places = ", ".join(str(tensor.device) for tensor in tensors)
            raise FlowBNNError(f"the tensors of a TensorLoader are on one device, not {places}")
        check_whole("batch_size", batch_size)
        if drop_last and lengths[0] < batch_size:
            raise FlowBNNError(
                f"drop_last leaves nothing of {lengths[0]} examples in batches of {batch_size}"
            )
        self.tensors, self.batch_size = tensors, batch_size
        self.shuffle, self.generator = shuffle, generator
        self.augment, self.prepare, self.drop_last = augment, prepare, drop_last
        self.num_data = lengths[0] // batch_size * batch_size if drop_last else lengths[0]
        self.rank, self.world = 0, 1
        self.together = None if together is None else check_whole("together", together)

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = self._order() if self.shuffle else None
        if self._separable:
            yield from self._in_blocks(order)
            return
        for start in range(0, self.num_data, self.batch_size):
            number = min(self.batch_size, self.num_data - start)
            rows = self.share(number)
            taken = rows if self.augment is None else slice(0, number)
            places = slice(start + taken.start, start + taken.stop)
            batch = self._taken(places if order is None else order[places])
            if self.augment is not None:
                batch[0] = self.augment(batch[0], self.generator)[rows]
                batch[1:] = [tensor[rows] for tensor in batch[1:]]
            if self.prepare is not None:
                batch[0] = self.prepare(batch[0])
            yield tuple(batch)

    @property
    def _separable(self) -> bool:
        """Whether an example comes out the same whatever else is in its batch."""
        return type(self.augment) in (type(None), CropAndFlip) and type(self.prepare) in (
            type(None),
            Normalize,
        )

    def _in_blocks(self, order: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
        """Several batches at once, cut apart; what is random is drawn batch by batch, so that their number does not matter."""
        device, each = self.tensors[0].device, self._block()
        for begin in range(0, self.num_data, self.batch_size * each):
            end = min(begin + self.batch_size * each, self.num_data)
            starts = range(begin, end, self.batch_size)
            numbers = [min(self.batch_size, end - start) for start in starts]
            shares = [self.share(number) for number in numbers]
            if self.world == 1:
                places: slice | Tensor = slice(begin, end) if order is None else order[begin:end]
            else:
                own = [torch.arange(s + r.start, s + r.stop) for s, r in zip(starts, shares, strict=True)]
                places = torch.cat(own).to(device)
                places = places if order is None else order[places]
            block = self._taken(places)
            if isinstance(self.augment, CropAndFlip):
                draws = [
                    self.augment.draw(number, device, self.generator)[..., rows]
                    for number, rows in zip(numbers, shares, strict=True)
                ]
                block[0] = self.augment.apply(block[0], draws[0] if len(draws) == 1 else torch.cat(draws, -1))
            if self.prepare is not None:
                block[0] = self.prepare(block[0])
            lengths = [rows.stop - rows.start for rows in shares]
            yield from zip(*(tensor.split(lengths) for tensor in block), strict=True)

    def _block(self) -> int:
        """How many batches are made together."""
        if self.together is not None:
            return self.together
        first = self.tensors[0]
        if first.device.type != "cuda":
            return 1
        size = first[:1].numel() * self.batch_size * (4 if self.prepare is not None else first.element_size())
        return max(1, min(_MOST, _BLOCK // max(1, size)))

    def _taken(self, places: slice | Tensor) -> list[Tensor]:
        return [tensor[places] for tensor in self.tensors]

    def _order(self) -> Tensor:
        device = self.tensors[0].device
        source = device if self.generator is None else self.generator.device
        order = torch.randperm(len(self.tensors[0]), generator=self.generator, device=source)
        return order if source == device else order.to(device, non_blocking=True)

    def share(self, number: int) -> slice:
        """This worker's rows of a global batch of ``number``; shares differ by at most one row.

        >>> loader = TensorLoader(torch.arange(7), batch_size=7)
        >>> [loader.sharded(rank, 3).share(7) for rank in range(3)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
        """
        return slice(self.rank * number // self.world, (self.rank + 1) * number // self.world)

    def sharded(self, rank: int, world: int) -> "TensorLoader":
        """The loader of one of ``world`` workers: its contiguous share of every global batch.

        ``batch_size``, ``num_data`` and the number of batches stay those of the whole. Orders and augmentation are drawn
        for the whole batch, alike on every worker, so results do not depend on how many there are.

        >>> loader = TensorLoader(torch.arange(6), batch_size=4)
        >>> [[rows.tolist() for (rows,) in loader.sharded(rank, 2)] for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [5]]]
        """
        if not 0 <= rank < world:
            raise FlowBNNError(
                f"a worker's rank is from 0 to {world - 1}, one less than their number, not {rank}"
            )
        last = self.num_data % self.batch_size or self.batch_size
        if min(last, self.batch_size) < world:
            which = "a batch" if self.batch_size < world or self.num_data <= last else "the last batch"
            raise FlowBNNError(
                f"{which} of {min(last, self.batch_size)} cannot be shared by {world} workers: "
                "take another batch_size, or drop_last=True"
            )
        if world > 1 and self.generator is None and (self.shuffle or self.augment is not None):
            raise FlowBNNError(
                "workers that share a shuffled or augmented TensorLoader need generator=, seeded alike on each, "
                "so that they draw the same order"
            )
        shared = copy.copy(self)
        shared.rank, shared.world = rank, world
        return shared


def device_loader(
    data: ImageSet,
    batch_size: int,
    device: torch.device | str | None = None,
    *,
    shuffle: bool = False,
    augment: Augment | None = None,
    generator: torch.Generator | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    drop_last: bool = False,
    channels_last: bool = False,
) -> TensorLoader:
    """A whole image set on a device, in bytes, and batches of it that are augmented and normalized there.

    Args:
        data: the set; CIFAR-10's training images take 154 MB on the device.
        batch_size: images in a batch.
        device: None leaves the set where it is.
        shuffle, augment, generator, drop_last: as in :class:`TensorLoader`.
        prepare: bytes to what the network takes; None is the set's own :meth:`~ImageSet.normalizer`. Images of a
            set that the network was not trained on go through the normalizer of the one it was.
        channels_last: keep images and batches in the channels-last memory format.

    >>> images = torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)
    >>> data = ImageSet(images, torch.arange(4), tuple("abcd"), "white", "train", (0.5,), (0.25,))
    >>> [(len(labels), round(batch.mean().item(), 4)) for batch, labels in device_loader(data, 3, "cpu")]
    [(3, 2.0), (1, 2.0)]
    """
    place = data.images.device if device is None else usable_device(device)
    images = data.images.to(place)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return TensorLoader(
        images,
        data.labels.to(place),
        batch_size=batch_size,
        shuffle=shuffle,
        generator=generator,
        augment=augment,
        prepare=data.normalizer() if prepare is None else prepare,
        drop_last=drop_last,
    )
