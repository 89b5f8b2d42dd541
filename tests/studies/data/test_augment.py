"""Tests of crop, flip and cutout against a loop over the images."""

import numpy as np
import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import CropAndFlip, Translate


def reference(images, draws, padding, flip, cutout):
    """Mirrors, pads, crops and cuts one image at a time."""
    number, _, height, width = images.shape
    result = []
    for index in range(number):
        image = images[index].numpy()
        down, right, mirrored, hole_row, hole_column = draws[:, index].tolist()
        if flip and mirrored < 0.5:
            image = image[:, :, ::-1]
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
        top, left = int(down * (2 * padding + 1)), int(right * (2 * padding + 1))
        image = padded[:, top : top + height, left : left + width].copy()
        if cutout:
            row, column = int(hole_row * height) - cutout // 2, int(hole_column * width) - cutout // 2
            image[:, max(row, 0) : max(row + cutout, 0), max(column, 0) : max(column + cutout, 0)] = 0
        result.append(torch.from_numpy(image))
    return torch.stack(result)


CASES = [
    {"padding": 4, "flip": True, "cutout": 0},
    {"padding": 2, "flip": False, "cutout": 3},
    {"padding": 3, "flip": True, "cutout": 4},
    {"padding": 0, "flip": True, "cutout": 30},
    {"padding": 8, "flip": True, "cutout": 1},
    {"padding": 0, "flip": False, "cutout": 0},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_batch_equals_loop_over_images(options, dtype, channels):
    images = torch.randint(0, 256, (64, channels, 11, 9)).to(dtype)
    augment = CropAndFlip(**options)
    draws = augment.draw(64, images.device)
    expected = reference(images, draws, **options)
    result = augment.apply(images, draws)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    last = augment.apply(images.contiguous(memory_format=torch.channels_last), draws)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, expected)


def test_contiguous_memory_format_is_kept():
    images = torch.rand(4, 3, 8, 8)
    for options in CASES[:4]:
        padding = min(options["padding"], 7)
        assert CropAndFlip(**(options | {"padding": padding}))(images).is_contiguous()


def test_all_translations_and_flips_are_equally_likely():
    width = 9
    images = torch.arange(width).view(1, 1, 1, width).expand(9000, 1, width, width).float()
    translated = CropAndFlip(padding=1, flip=True)(images, torch.Generator().manual_seed(0))
    kinds = translated[:, 0, 4, 3:5]  # two neighbours identify translation and direction
    _, counts = kinds.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    # 1500 of each expected, standard deviation 35
    assert (counts - 1500).abs().max() < 5 * 35


def test_generator_determines_the_result():
    images = torch.rand(32, 3, 12, 12)
    augment = CropAndFlip(cutout=4)
    first_result, second_result = (augment(images, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first_result, second_result)
    assert not torch.equal(first_result, augment(images, torch.Generator().manual_seed(6)))
    torch.manual_seed(1)
    first = augment(images)
    torch.manual_seed(1)
    assert torch.equal(first, augment(images))


def test_largest_draws_stay_inside():
    images = torch.rand(3, 1, 5, 5)
    draws = torch.full((5, 3), 1 - 2**-24)
    assert CropAndFlip(padding=4, cutout=3).apply(images, draws).isfinite().all()


def test_input_is_not_changed():
    images = torch.rand(8, 3, 8, 8)
    before = images.clone()
    CropAndFlip(cutout=8)(images)
    assert torch.equal(images, before)


def test_apply_compiles_to_one_graph():
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    augment = CropAndFlip(padding=2, cutout=3)
    draws = augment.draw(8, images.device)
    compiled = torch.compile(augment.apply, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images, draws), augment.apply(images, draws))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_apply_does_not_synchronize_on_gpu():
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, device="cuda")
    for options in CASES:
        augment = CropAndFlip(**options)
        draws = augment.draw(64, images.device, torch.Generator("cuda").manual_seed(0))
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = augment.apply(images, draws)
            augment(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(result.cpu(), reference(images.cpu(), draws.cpu(), **options))


@pytest.mark.parametrize(
    "call",
    [
        lambda: CropAndFlip(padding=-1),
        lambda: CropAndFlip(padding=1.5),
        lambda: CropAndFlip(cutout=-1),
        lambda: CropAndFlip()(torch.zeros(3, 8, 8)),
        lambda: CropAndFlip(padding=8)(torch.zeros(1, 3, 8, 8)),
        lambda: Translate(8, 0)(torch.zeros(1, 3, 8, 8)),
        lambda: Translate(0, -8)(torch.zeros(1, 3, 8, 8)),
        lambda: Translate(1.5, 0),
        lambda: Translate(True, 0),
        lambda: Translate(1, 0)(torch.zeros(4, 8)),
    ],
)
def test_invalid_arguments_are_refused(call):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument in ("padding", "cutout", "images", "down")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("down", "right"), [(0, 0), (1, 1), (-1, -1), (2, -3)])
def test_translated_view_equals_training_augmentation(down, right):
    images = torch.rand(2, 3, 8, 10)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4), mode="reflect")
    assert torch.equal(
        Translate(down, right)(images), padded[..., 4 - down : 12 - down, 4 - right : 14 - right]
    )
    bytes_ = torch.randint(0, 256, (2, 1, 8, 10), dtype=torch.uint8)
    augmented = CropAndFlip(padding=4, flip=False).apply(
        bytes_,
        torch.tensor([[(4 - down + 0.5) / 9], [(4 - right + 0.5) / 9], [0.9], [0.0], [0.0]]).expand(5, 2),
    )
    assert torch.equal(Translate(down, right)(bytes_), augmented)
