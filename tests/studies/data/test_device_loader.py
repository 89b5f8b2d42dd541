"""Loaders of image sets: augmented and prepared."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowbnn.batches import count_data
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import CropAndFlip, ImageSet, Normalize, device_loader


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image_set(number: int = 22) -> ImageSet:
    images = torch.randint(0, 256, (number, 3, 8, 8), dtype=torch.uint8)
    return ImageSet(
        images, torch.arange(number), tuple(map(str, range(number))), "made", "train", (0.5,) * 3, (0.2,) * 3
    )


@pytest.mark.parametrize("together", [2, 3, 9])
@pytest.mark.parametrize("augment", [None, CropAndFlip(padding=2, cutout=3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_made_together_are_those_made_one_by_one(together, augment, shuffle):
    data = image_set(23)

    def loader(number: int | None) -> TensorLoader:
        normal = data.normalizer()
        return TensorLoader(
            data.images, data.labels, batch_size=4, shuffle=shuffle, augment=augment, prepare=normal,
            generator=seeded(), together=number,
        )  # fmt: skip

    one, several = loader(None), loader(together)
    for _ in range(2):
        for first, second in zip(one, several, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(one.generator.get_state(), several.generator.get_state())


def test_a_function_of_the_users_sees_one_batch_at_a_time():
    seen = []

    def prepare(images: Tensor) -> Tensor:
        seen.append(len(images))
        return images

    list(TensorLoader(torch.arange(10), batch_size=4, prepare=prepare, together=5))
    list(TensorLoader(torch.arange(10), batch_size=4, augment=lambda x, _: prepare(x), together=5))
    assert seen == 2 * [4, 4, 2]
    with pytest.raises(FlowBNNError, match="together=.* must be an integer of at least 1"):
        TensorLoader(torch.arange(10), batch_size=4, together=0)


def test_what_is_derived_from_our_augmentation_is_called_itself():
    class Inverted(CropAndFlip):
        def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return 255 - super().__call__(images, generator)

    class Centred(Normalize):
        def __call__(self, images: Tensor) -> Tensor:
            return super().__call__(images) - len(images)

    data = image_set(6)
    ((inverted, _), _) = device_loader(data, 3, augment=Inverted(0, False))
    assert torch.equal(inverted, data.normalizer()(255 - data.images[:3]))
    centred = Centred(data.mean, data.deviation)
    batches = [
        batch
        for batch, _ in TensorLoader(data.images, data.labels, batch_size=3, prepare=centred, together=2)
    ]
    assert torch.equal(batches[0], data.normalized()[:3] - 3)


def test_drop_last_leaves_out_the_rest():
    loader = TensorLoader(torch.arange(10), batch_size=4, shuffle=True, generator=seeded(), drop_last=True)
    seen = [{row for (rows,) in loader for row in rows.tolist()} for _ in range(20)]
    assert all(len(rows) == 8 for rows in seen)
    assert set().union(*seen) == set(range(10))  # another rest at every pass
    assert (len(loader), loader.num_data, count_data(loader)) == (2, 8, 8)
    with pytest.raises(FlowBNNError, match="leaves nothing of 3 examples"):
        TensorLoader(torch.arange(3), batch_size=4, drop_last=True)


def test_augmentation_comes_before_preparation_and_spares_the_labels():
    seen = []

    def watch(images: Tensor, generator: torch.Generator | None) -> Tensor:
        seen.append(images.dtype)
        return images + 1

    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    loader = TensorLoader(
        images, torch.zeros(4), batch_size=4, augment=watch, prepare=lambda batch: batch.double() * 10
    )
    ((batch, labels),) = loader
    assert seen == [torch.uint8]
    assert batch.dtype == torch.float64
    assert batch.unique().tolist() == [10.0]
    assert labels.unique().tolist() == [0.0]


def test_a_device_loader_normalizes_by_its_own_set_or_another():
    data, other = image_set(), image_set()
    images = torch.cat([batch for batch, _ in device_loader(data, 5, "cpu")])
    assert torch.equal(images, data.normalized())
    images = torch.cat([batch for batch, _ in device_loader(data, 5, prepare=other.normalizer())])
    assert torch.equal(images, other.normalizer()(data.images))


@pytest.mark.parametrize("shuffle", [False, True])
def test_channels_last_reaches_the_batches(shuffle):
    data = image_set()
    options = {"shuffle": shuffle, "augment": CropAndFlip(padding=2)}
    other = replace(data, images=data.images.contiguous(memory_format=torch.channels_last))
    last = list(device_loader(other, 8, generator=seeded(), **options))
    plain = list(device_loader(data, 8, generator=seeded(), **options))
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch, _ in last)
    assert all(batch.is_contiguous() for batch, _ in plain)
    assert all(torch.equal(one[0], two[0]) for one, two in zip(last, plain, strict=True))


def test_the_global_generator_serves_where_none_is_given():
    def order() -> list[int]:
        torch.manual_seed(4)
        return torch.cat(
            [rows for (rows,) in TensorLoader(torch.arange(30), batch_size=7, shuffle=True)]
        ).tolist()

    torch.manual_seed(4)
    assert order() == torch.randperm(30, generator=seeded(4)).tolist()
    assert order() == order()


def test_tensors_of_several_devices_are_refused():
    with pytest.raises(FlowBNNError, match="on one device, not cpu, meta"):
        TensorLoader(torch.zeros(3), torch.zeros(3, device="meta"), batch_size=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_batches_are_made_without_waiting():
    data = image_set(64)
    for generator in (None, torch.Generator("cuda").manual_seed(0), seeded()):
        loader = device_loader(data, 16, "cuda", shuffle=True, augment=CropAndFlip(), generator=generator)
        list(loader)
        if generator is None or generator.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            batches = list(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(batch.is_cuda and labels.is_cuda for batch, labels in batches)
        assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(64))
