"""Corruptions against scipy, the colour system's definition, and values worked out by hand."""

import colorsys

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import CORRUPTIONS, corrupt, novel_noise

STRENGTHS = range(1, 6)


@pytest.fixture
def images():
    return torch.rand(5, 3, 9, 8, dtype=torch.float64)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_blur_is_scipys_gaussian_filter(images, strength):
    deviation = CORRUPTIONS["blur"][strength - 1]
    wanted = gaussian_filter(images.numpy(), deviation, axes=(2, 3), mode="nearest", truncate=4.0)
    np.testing.assert_allclose(corrupt(images, "blur", strength).numpy(), wanted, atol=1e-14)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_brightness_raises_the_value_of_a_colour(images, strength):
    amount = CORRUPTIONS["brightness"][strength - 1]
    images[0, :, 0, 0] = 0.0  # black has no hue
    found = corrupt(images, "brightness", strength)
    for index, row, column in ((0, 0, 0), (1, 2, 3), (2, 8, 7), (4, 5, 5)):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[index, :, row, column].tolist())
        wanted = colorsys.hsv_to_rgb(hue, saturation, min(value + amount, 1.0))
        assert found[index, :, row, column].tolist() == pytest.approx(wanted, abs=1e-12)


def test_brightness_of_grey_images_is_a_sum():
    grey = torch.rand(4, 1, 5, 5)
    torch.testing.assert_close(corrupt(grey, "brightness", 3), (grey + 0.15).clamp(max=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_contrast_shrinks_towards_the_mean(images, strength):
    amount = CORRUPTIONS["contrast"][strength - 1]
    found = corrupt(images, "contrast", strength)
    torch.testing.assert_close(found.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(found.std((2, 3)), amount * images.std((2, 3)))


@pytest.mark.parametrize("strength", STRENGTHS)
def test_noise_has_the_stated_deviation(strength):
    grey = torch.full((100, 1, 50, 50), 0.5, dtype=torch.float64)
    found = corrupt(grey, "noise", strength, torch.Generator().manual_seed(0))
    amount = CORRUPTIONS["noise"][strength - 1]
    # 250,000 draws: the deviation is known to 0.14 %, and 0.5 is five deviations from the cut
    assert float(found.std()) == pytest.approx(amount, rel=5 * 0.0015)
    assert abs(float(found.mean()) - 0.5) < 5 * amount / 500


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_results_stay_images_and_stronger_is_further(kind):
    images = torch.rand(20, 3, 16, 16)
    before = images.clone()
    away = []
    for strength in STRENGTHS:
        found = corrupt(images, kind, strength, torch.Generator().manual_seed(0))
        assert found.shape == images.shape
        assert found.dtype == images.dtype
        assert found.min() >= 0
        assert found.max() <= 1
        away.append(float((found - images).square().mean()))
    assert away == sorted(away)
    assert away[0] > 0
    assert torch.equal(images, before)


def test_noise_comes_from_the_generator():
    images = torch.rand(2, 3, 4, 4)
    one, two = (corrupt(images, "noise", 1, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, corrupt(images, "noise", 1, torch.Generator().manual_seed(4)))


def test_one_image_and_many_axes_are_taken():
    assert corrupt(torch.rand(3, 8, 8), "blur", 5).shape == (3, 8, 8)
    assert corrupt(torch.rand(2, 4, 3, 8, 8), "blur", 5).shape == (2, 4, 3, 8, 8)
    assert corrupt(torch.rand(0, 3, 8, 8), "blur", 5).shape == (0, 3, 8, 8)


def test_novel_noise_is_uniform():
    noise = novel_noise(1000, (1, 10, 10), torch.Generator().manual_seed(0))
    assert noise.shape == (1000, 1, 10, 10)
    counts = torch.histc(noise, 10, 0, 1)
    # 10,000 in each tenth, standard deviation 95
    assert (counts - 10_000).abs().max() < 5 * 95
    assert torch.equal(noise, novel_noise(1000, (1, 10, 10), torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "bluer", 1), "did you mean 'blur'"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 0), "from 1 to 5, got 0"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 6), "from 1 to 5, got 6"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 2.5), "from 1 to 5, got 2.5"),
        (lambda: corrupt(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), "blur", 1), "to_unit"),
        (lambda: corrupt(torch.rand(4, 4), "blur", 1), "shape"),
        (lambda: corrupt(torch.randn(1, 1, 40, 40), "blur", 1), "corrupt first and normalize then"),
        (lambda: corrupt(torch.full((1, 1, 4, 4), torch.nan), "blur", 1), "in [0, 1]"),
        (lambda: novel_noise(0, (1, 4, 4)), "integer of at least 1, got 0"),
        (lambda: novel_noise(2.5, (1, 4, 4)), "integer of at least 1, got 2.5"),
    ],
)
def test_bad_requests_are_told_in_a_line(call, words):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
