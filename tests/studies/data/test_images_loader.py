"""Tests of loaders of image sets: augmentation and preparation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.methods.data_summary import count_examples
from flowbnn_studies.data import CropAndFlip, ImageSet, Normalize, device_loader


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image_set(number: int = 22) -> ImageSet:
    images = torch.randint(0, 256, (number, 3, 8, 8), dtype=torch.uint8)
    return ImageSet(
        images, torch.arange(number), tuple(map(str, range(number))), "made", "train", (0.5,) * 3, (0.2,) * 3
    )


@pytest.mark.parametrize("group_size", [2, 3, 9])
@pytest.mark.parametrize("augment", [None, CropAndFlip(padding=2, cutout=3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_prepared_together_equal_single_batches(group_size, augment, shuffle):
    data = image_set(23)

    def loader(number: int | None) -> TensorLoader:
        normalize = data.normalizer()
        return TensorLoader(
            data.images, data.labels, batch_size=4, shuffle=shuffle, augment=augment, prepare=normalize,
            generator=seeded(), group_size=number,
        )  # fmt: skip

    single, several = loader(None), loader(group_size)
    for _ in range(2):
        for first, second in zip(single, several, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(single.generator.get_state(), several.generator.get_state())


def test_user_functions_receive_one_batch_at_a_time():
    sizes = []

    def prepare(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images

    list(TensorLoader(torch.arange(10), batch_size=4, prepare=prepare, group_size=5))
    list(TensorLoader(torch.arange(10), batch_size=4, augment=lambda x, _: prepare(x), group_size=5))
    assert sizes == 2 * [4, 4, 2]
    with pytest.raises(FlowBNNError) as caught:
        TensorLoader(torch.arange(10), batch_size=4, group_size=0)
    assert caught.value.argument == "group_size"


def test_subclasses_of_augmentation_and_normalization_are_called():
    class Inverted(CropAndFlip):
        def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return 255 - super().__call__(images, generator)

    class Centred(Normalize):
        def __call__(self, images: Tensor) -> Tensor:
            return super().__call__(images) - len(images)

    data = image_set(6)
    ((inverted, _), _) = device_loader(data, 3, augment=Inverted(0, False))
    assert torch.equal(inverted, data.normalizer()(255 - data.images[:3]))
    centred = Centred(data.mean, data.std)
    batches = [
        batch
        for batch, _ in TensorLoader(data.images, data.labels, batch_size=3, prepare=centred, group_size=2)
    ]
    assert torch.equal(batches[0], data.normalized()[:3] - 3)


def test_drop_last_omits_the_incomplete_batch():
    loader = TensorLoader(torch.arange(10), batch_size=4, shuffle=True, generator=seeded(), drop_last=True)
    rows_by_pass = [{row for (rows,) in loader for row in rows.tolist()} for _ in range(20)]
    assert all(len(rows) == 8 for rows in rows_by_pass)
    assert set().union(*rows_by_pass) == set(range(10))  # each pass omits other rows
    assert (len(loader), loader.num_data, count_examples(loader)) == (2, 8, 8)
    with pytest.raises(FlowBNNError) as caught:
        TensorLoader(torch.arange(3), batch_size=4, drop_last=True)
    assert caught.value.kind == "loader"


def test_augmentation_precedes_preparation_and_keeps_labels():
    dtypes = []

    def watch(images: Tensor, generator: torch.Generator | None) -> Tensor:
        dtypes.append(images.dtype)
        return images + 1

    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    loader = TensorLoader(
        images, torch.zeros(4), batch_size=4, augment=watch, prepare=lambda batch: batch.double() * 10
    )
    ((batch, labels),) = loader
    assert dtypes == [torch.uint8]
    assert batch.dtype == torch.float64
    assert batch.unique().tolist() == [10.0]
    assert labels.unique().tolist() == [0.0]


def test_device_loader_normalizes_by_its_own_or_another_set():
    data, other = image_set(), image_set()
    images = torch.cat([batch for batch, _ in device_loader(data, 5, "cpu")])
    assert torch.equal(images, data.normalized())
    images = torch.cat([batch for batch, _ in device_loader(data, 5, prepare=other.normalizer())])
    assert torch.equal(images, other.normalizer()(data.images))


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_keep_channels_last(shuffle):
    data = image_set()
    options = {"shuffle": shuffle, "augment": CropAndFlip(padding=2)}
    channels_last = replace(data, images=data.images.contiguous(memory_format=torch.channels_last))
    channels_last_batches = list(device_loader(channels_last, 8, generator=seeded(), **options))
    batches = list(device_loader(data, 8, generator=seeded(), **options))
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch, _ in channels_last_batches)
    assert all(batch.is_contiguous() for batch, _ in batches)
    assert all(
        torch.equal(first[0], second[0]) for first, second in zip(channels_last_batches, batches, strict=True)
    )


def test_global_generator_is_the_default():
    def order() -> list[int]:
        torch.manual_seed(4)
        return torch.cat(
            [rows for (rows,) in TensorLoader(torch.arange(30), batch_size=7, shuffle=True)]
        ).tolist()

    torch.manual_seed(4)
    assert order() == torch.randperm(30, generator=seeded(4)).tolist()
    assert order() == order()


def test_tensors_of_several_devices_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        TensorLoader(torch.zeros(3), torch.zeros(3, device="meta"), batch_size=1)
    assert caught.value.kind == "loader"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batches_on_gpu_do_not_synchronize():
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
