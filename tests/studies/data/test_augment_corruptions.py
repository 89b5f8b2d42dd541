"""Tests of corruptions against scipy, the definition of colour systems, and exact values."""

import colorsys
import math

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn
from scipy.ndimage import gaussian_filter

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import CORRUPTIONS, corrupt, novel_noise
from flowbnn_studies.data.augment import STEPS

STRENGTHS = range(1, 6)


@pytest.fixture
def images():
    return torch.rand(5, 3, 9, 8, dtype=torch.float64)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_blur_equals_scipy_gaussian_filter(images, strength):
    deviation = CORRUPTIONS["blur"][strength - 1]
    expected = gaussian_filter(images.numpy(), deviation, axes=(2, 3), mode="nearest", truncate=4.0)
    np.testing.assert_allclose(corrupt(images, "blur", strength).numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_brightness_raises_the_value_of_hsv(images, strength):
    amount = CORRUPTIONS["brightness"][strength - 1]
    images[0, :, 0, 0] = 0.0  # black has no hue
    result = corrupt(images, "brightness", strength)
    for index, row, column in ((0, 0, 0), (1, 2, 3), (2, 8, 7), (4, 5, 5)):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[index, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + amount, 1.0))
        assert result[index, :, row, column].tolist() == pytest.approx(expected, abs=1e-12)


def test_brightness_of_grey_images_is_additive():
    grey = torch.rand(4, 1, 5, 5)
    torch.testing.assert_close(corrupt(grey, "brightness", 3), (grey + 0.15).clamp(max=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_contrast_shrinks_towards_the_mean(images, strength):
    amount = CORRUPTIONS["contrast"][strength - 1]
    result = corrupt(images, "contrast", strength)
    torch.testing.assert_close(result.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(result.std((2, 3)), amount * images.std((2, 3)))


@pytest.mark.parametrize("strength", STRENGTHS)
def test_noise_has_the_documented_standard_deviation(strength):
    grey = torch.full((100, 1, 50, 50), 0.5, dtype=torch.float64)
    result = corrupt(grey, "noise", strength, torch.Generator().manual_seed(0))
    amount = CORRUPTIONS["noise"][strength - 1]
    # 250,000 draws: the deviation is known to 0.14 %, and 0.5 is five deviations from the cut
    assert float(result.std()) == pytest.approx(amount, rel=5 * 0.0015)
    assert abs(float(result.mean()) - 0.5) < 5 * amount / 500


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_results_are_images_and_distance_grows_with_strength(kind):
    images = corrupt(torch.rand(20, 3, 16, 16), "blur", 5)  # neighbours are alike, as in pictures
    before = images.clone()
    distances = []
    for strength in STRENGTHS:
        result = corrupt(images, kind, strength, torch.Generator().manual_seed(0))
        assert result.shape == images.shape
        assert result.dtype == images.dtype
        assert result.min() >= 0
        assert result.max() <= 1
        distances.append(float((result - images).square().mean()))
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert torch.equal(images, before)


RANDOM = ("noise", "shot", "impulse", "speckle", "motion", "fog", "elastic")


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_random_kinds_use_the_generator(kind):
    images = torch.rand(8, 3, 8, 8)
    first, second = (corrupt(images, kind, 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    other = corrupt(images, kind, 5, torch.Generator().manual_seed(4))
    assert torch.equal(first, other) is (kind not in RANDOM)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_shot_and_speckle_noise_have_the_documented_variance(strength):
    grey = torch.full((100, 1, 50, 50), 0.25, dtype=torch.float64)
    variances = {
        "shot": 0.25 / CORRUPTIONS["shot"][strength - 1],
        "speckle": (0.25 * CORRUPTIONS["speckle"][strength - 1]) ** 2,
    }
    for kind, expected in variances.items():
        result = corrupt(grey, kind, strength, torch.Generator().manual_seed(0))
        assert float(result.var()) == pytest.approx(expected, rel=5 * 0.003)  # 250,000 draws
        assert abs(float(result.mean()) - 0.25) < 5 * expected**0.5 / 500


@pytest.mark.parametrize("strength", STRENGTHS)
def test_impulse_noise_hits_the_documented_fraction(strength):
    share = CORRUPTIONS["impulse"][strength - 1]
    result = corrupt(torch.full((100, 1, 50, 50), 0.5), "impulse", strength, torch.Generator().manual_seed(0))
    for value in (0.0, 1.0):
        assert float((result == value).double().mean()) == pytest.approx(
            share / 2, abs=5 * (share / 2 / 250_000) ** 0.5
        )


@pytest.mark.parametrize("kind", ["blur", "defocus", "motion", "zoom", "elastic", "pixelate", "contrast"])
def test_spatial_kinds_keep_constant_images(kind):
    even = torch.full((2, 3, 9, 8), 0.3, dtype=torch.float64)
    torch.testing.assert_close(corrupt(even, kind, 5), even)


def test_defocus_spreads_a_point_over_a_disk():
    point = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    point[..., 4, 4] = 1.0
    # radius 0.6: segments of the circle beyond half a pixel, and no corner
    result = corrupt(point, "defocus", 1)[0, 0]
    segment = 0.36 * math.acos(0.5 / 0.6) - 0.5 * math.sqrt(0.36 - 0.25)
    assert float(result[4, 5]) == pytest.approx(segment / (math.pi * 0.36), rel=0.02)
    assert float(result.sum()) == pytest.approx(1.0)


def test_motion_and_zoom_of_a_ramp():
    ramp = torch.linspace(0.2, 0.8, 21, dtype=torch.float64).expand(4, 1, 21, 21)
    inner = (slice(None), slice(None), slice(4, -4), slice(4, -4))  # a mean of a plane is its middle
    torch.testing.assert_close(
        corrupt(ramp, "motion", 5, torch.Generator().manual_seed(0))[inner], ramp[inner]
    )
    assert float(corrupt(ramp, "zoom", 5)[0, 0, 10, 10]) == pytest.approx(0.5)
    factors = [1 + 0.01 * step for step in range(27)]
    expected = 0.5 + 0.03 * 5 * sum(1 / factor for factor in factors) / 27
    assert float(corrupt(ramp, "zoom", 5)[0, 0, 10, 15]) == pytest.approx(expected)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_jpeg_rounds_cosine_coefficients(strength):
    quality = CORRUPTIONS["jpeg"][strength - 1]
    block = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    scale = 50 / quality if quality < 50 else 2 - quality / 50
    steps = np.clip(np.floor(np.array(STEPS) * scale + 0.5), 1, 255)
    rounded = np.round(dctn(255 * block[0, 0].numpy() - 128, norm="ortho") / steps) * steps
    expected = np.clip(np.round(idctn(rounded, norm="ortho") + 128) / 255, 0, 1)
    np.testing.assert_allclose(corrupt(block, "jpeg", strength)[0, 0].numpy(), expected, atol=1e-12)
    image = torch.rand(2, 3, 28, 20, dtype=torch.float64)
    torch.testing.assert_close(
        corrupt(image, "jpeg", strength)[:, :, 8:16, :8], corrupt(image[:, :, 8:16, :8], "jpeg", strength)
    )


def test_elastic_moves_by_the_documented_distance():
    # a large image: at the border, whose pixels are repeated, the field is wilder than within
    ramp = torch.linspace(0.0, 1.0, 401, dtype=torch.float64).expand(3, 1, 401, 401)
    result = corrupt(ramp, "elastic", 5, torch.Generator().manual_seed(0))
    across = (400 * (result - ramp)[..., 5:-5]).square().mean().sqrt()  # half of the square is along the ramp
    assert float(across) == pytest.approx(1.2 / 2**0.5, rel=0.02)


def test_fog_is_the_documented_mixture():
    even = torch.full((3, 1, 16, 16), 0.5, dtype=torch.float64)
    result = corrupt(even, "fog", 4, torch.Generator().manual_seed(0))  # clouds from 0 to 1, c = 1
    torch.testing.assert_close(result.amin((1, 2, 3)), torch.full((3,), 0.5 * 0.5 / 1.5, dtype=torch.float64))
    torch.testing.assert_close(result.amax((1, 2, 3)), torch.full((3,), 1.5 * 0.5 / 1.5, dtype=torch.float64))


def test_any_number_of_leading_axes():
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
    ("call", "argument"),
    [
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "bluer", 1), "kind"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 0), "strength"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 6), "strength"),
        (lambda: corrupt(torch.rand(1, 1, 4, 4), "blur", 2.5), "strength"),
        (lambda: corrupt(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), "blur", 1), "images"),
        (lambda: corrupt(torch.rand(4, 4), "blur", 1), "images"),
        (lambda: corrupt(torch.randn(1, 1, 40, 40), "blur", 1), "images"),
        (lambda: corrupt(torch.full((1, 1, 4, 4), torch.nan), "blur", 1), "images"),
        (lambda: novel_noise(0, (1, 4, 4)), "number"),
        (lambda: novel_noise(2.5, (1, 4, 4)), "number"),
    ],
)
def test_invalid_arguments_are_refused(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
