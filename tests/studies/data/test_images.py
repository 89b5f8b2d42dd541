"""Tests of image sets: normalization, subsets, and grey images in colour."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import ImageSet, Normalize, device_loader


def make(number=40, channels=3, height=6, width=5, classes=3):
    images = torch.randint(0, 256, (number, channels, height, width), dtype=torch.uint8)
    labels = torch.arange(number) % classes
    constants = tuple(0.1 * (c + 3) for c in range(channels)), tuple(0.2 + 0.1 * c for c in range(channels))
    return ImageSet(images, labels, tuple("abcdefgh"[:classes]), "made", "train", *constants)


def test_normalized_equals_the_formula():
    data = make()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    expected = (data.images.double() / 255 - mean) / std
    double = data.normalizer()(data.images.double() / 255)
    torch.testing.assert_close(double, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(data.normalized().double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(data.to_unit(), data.images.float() / 255, rtol=0, atol=0)


def test_bytes_and_unit_images_are_normalized_alike():
    data = make()
    normalize = data.normalizer()
    torch.testing.assert_close(normalize(data.to_unit()), normalize(data.images), rtol=0, atol=1e-6)
    assert normalize(data.images[0]).shape == (3, 6, 5)


def test_normalization_keeps_the_memory_format():
    images = make().images
    last = images.contiguous(memory_format=torch.channels_last)
    normalize = make().normalizer()
    assert normalize(last).is_contiguous(memory_format=torch.channels_last)
    assert normalize(images).is_contiguous()
    assert torch.equal(normalize(last), normalize(images))


def test_repr_and_immutability():
    data = make()
    assert len(data) == 40
    assert repr(data) == "ImageSet(made, train: 40 images of 3x6x5 in 3 classes)"
    with pytest.raises(AttributeError):
        data.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("indices", [[3, 1, 38], torch.tensor([3, 1, 38]), slice(3, 30, 7)])
def test_subset_keeps_labels_and_constants(indices):
    data = make()
    subset = data.subset(indices)
    assert torch.equal(subset.images, data.images[indices])
    assert torch.equal(subset.labels, data.labels[indices])
    assert (subset.mean, subset.partition) == (data.mean, "train")
    mask = data.labels == 2
    assert data.subset(mask).labels.unique().tolist() == [2]
    assert len(data.subset([])) == 0


def test_split_is_stratified_reproducible_and_complete():
    data = make(number=90)
    data = data.subset(torch.cat([torch.arange(60), torch.arange(60, 90, 3)]))  # 30, 20 and 20 of the classes
    train, validation = data.split(validation=14, seed=3)
    assert validation.labels.bincount().tolist() == [6, 4, 4]
    assert (len(train), len(validation), train.partition, validation.partition) == (
        56,
        14,
        "train",
        "validation",
    )
    key = lambda subset: sorted(subset.images.flatten(1).tolist())  # noqa: E731
    assert sorted(key(train) + key(validation)) == key(data)
    again = data.split(validation=14, seed=3)[1]
    assert torch.equal(again.images, validation.images)
    assert not torch.equal(data.split(validation=14, seed=4)[1].images, validation.images)


def test_class_counts_differ_from_proportion_by_less_than_one():
    data = make(number=100, classes=7)
    _, validation = data.split(validation=33)
    counts = data.labels.bincount() * 33 / 100
    assert len(validation) == 33
    assert ((validation.labels.bincount() - counts).abs() < 1).all()


def test_grey_images_in_colour_are_padded_and_repeated():
    data = make(channels=1)
    colour = data.to_color(8)
    assert colour.images.shape == (40, 3, 8, 8)
    for channel in range(3):
        assert torch.equal(colour.images[:, channel, 1:7, 1:6], data.images[:, 0])
    assert colour.images.sum() == 3 * data.images.sum()
    assert torch.equal(colour.labels, data.labels)


def test_moments_of_grey_images_in_colour_are_exact():
    data = make(channels=1)
    unit_images = data.images.double() / 255
    data = ImageSet(
        data.images,
        data.labels,
        data.classes,
        "made",
        "train",
        (float(unit_images.mean()),),
        (float(unit_images.std(correction=0)),),
    )
    colour = data.to_color(9)
    pixels = colour.images.double() / 255
    assert colour.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert colour.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-12)


def test_to_device_keeps_other_fields():
    data = make().to("cpu")
    assert data.images.device.type == "cpu"
    assert data.classes == ("a", "b", "c")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda data: data.to("cuda"),
        lambda data: data.to("cuda:1"),
        lambda data: device_loader(data, 4, "cuda"),
    ],
)
def test_missing_gpu_is_refused(call):
    with pytest.raises(FlowBNNError) as caught:
        call(make())
    assert caught.value.argument == "device"


@pytest.mark.parametrize(
    "call",
    [
        lambda: make().to("abacus"),
        lambda: make().split(validation=0),
        lambda: make().split(validation=40),
        lambda: make().subset([40]),
        lambda: make().subset([-41]),
        lambda: make().subset([0.5]),
        lambda: make().subset([[1]]),
        lambda: make().subset(torch.ones(3, dtype=torch.bool)),
        lambda: make().to_color(),
        lambda: make(channels=1).to_color(5),
        lambda: make().normalizer()(torch.zeros(2, 1, 4, 4)),
        lambda: make().normalizer()(torch.zeros(2, 3, 4, 4, dtype=torch.int64)),
        lambda: Normalize([0.5], [0.0]),
        lambda: Normalize([0.5, 0.5], [1.0]),
        lambda: ImageSet(
            torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), ("a",), "x", "train", (0.0,), (1.0,)
        ),
        lambda: ImageSet(
            torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2), ("a",), "x", "train", (0.0,), (1.0,)
        ),
        lambda: ImageSet(
            torch.zeros(2, 3, 3, 3).byte(), torch.zeros(2).long(), ("a",), "x", "train", (0.0,), (1.0,)
        ),
    ],
)
def test_invalid_arguments_are_refused(call):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument in ("device", "validation", "indices", "size", "images", "std")
    assert "\n" not in str(caught.value)
