"""Corruptions against scipy, the colour system's definition, and values worked out by hand."""

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
    images = corrupt(torch.rand(20, 3, 16, 16), "blur", 5)  # neighbours are alike, as in pictures
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


RANDOM = ("noise", "shot", "impulse", "speckle", "motion", "fog", "elastic")


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_what_is_random_comes_from_the_generator(kind):
    images = torch.rand(8, 3, 8, 8)
    one, two = (corrupt(images, kind, 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    other = corrupt(images, kind, 5, torch.Generator().manual_seed(4))
    assert torch.equal(one, other) is (kind not in RANDOM)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_shot_and_speckle_noise_have_the_stated_variance(strength):
    grey = torch.full((100, 1, 50, 50), 0.25, dtype=torch.float64)
    variances = {
        "shot": 0.25 / CORRUPTIONS["shot"][strength - 1],
        "speckle": (0.25 * CORRUPTIONS["speckle"][strength - 1]) ** 2,
    }
    for kind, wanted in variances.items():
        found = corrupt(grey, kind, strength, torch.Generator().manual_seed(0))
        assert float(found.var()) == pytest.approx(wanted, rel=5 * 0.003)  # 250,000 draws
        assert abs(float(found.mean()) - 0.25) < 5 * wanted**0.5 / 500


@pytest.mark.parametrize("strength", STRENGTHS)
def test_impulses_hit_the_stated_share(strength):
    share = CORRUPTIONS["impulse"][strength - 1]
    found = corrupt(torch.full((100, 1, 50, 50), 0.5), "impulse", strength, torch.Generator().manual_seed(0))
    for value in (0.0, 1.0):
        assert float((found == value).double().mean()) == pytest.approx(
            share / 2, abs=5 * (share / 2 / 250_000) ** 0.5
        )


@pytest.mark.parametrize("kind", ["blur", "defocus", "motion", "zoom", "elastic", "pixelate", "contrast"])
def test_what_only_moves_light_leaves_an_even_image_alone(kind):
    even = torch.full((2, 3, 9, 8), 0.3, dtype=torch.float64)
    torch.testing.assert_close(corrupt(even, kind, 5), even)


def test_a_disk_spreads_a_point_by_the_areas_it_covers():
    point = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    point[..., 4, 4] = 1.0
    found = corrupt(point, "defocus", 1)[
        0, 0
    ]  # radius .6: segments of the circle beyond half a pixel, and no corner
    segment = 0.36 * math.acos(0.5 / 0.6) - 0.5 * math.sqrt(0.36 - 0.25)
    assert float(found[4, 5]) == pytest.approx(segment / (math.pi * 0.36), rel=0.02)
    assert float(found.sum()) == pytest.approx(1.0)


def test_motion_is_a_mean_along_a_line_and_zoom_keeps_the_centre():
    ramp = torch.linspace(0.2, 0.8, 21, dtype=torch.float64).expand(4, 1, 21, 21)
    inner = (slice(None), slice(None), slice(4, -4), slice(4, -4))  # a mean of a plane is its middle
    torch.testing.assert_close(
        corrupt(ramp, "motion", 5, torch.Generator().manual_seed(0))[inner], ramp[inner]
    )
    assert float(corrupt(ramp, "zoom", 5)[0, 0, 10, 10]) == pytest.approx(0.5)
    factors = [1 + 0.01 * step for step in range(27)]
    wanted = 0.5 + 0.03 * 5 * sum(1 / factor for factor in factors) / 27
    assert float(corrupt(ramp, "zoom", 5)[0, 0, 10, 15]) == pytest.approx(wanted)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_jpeg_rounds_cosine_coefficients(strength):
    quality = CORRUPTIONS["jpeg"][strength - 1]
    block = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    scale = 50 / quality if quality < 50 else 2 - quality / 50
    steps = np.clip(np.floor(np.array(STEPS) * scale + 0.5), 1, 255)
    rounded = np.round(dctn(255 * block[0, 0].numpy() - 128, norm="ortho") / steps) * steps
    wanted = np.clip(np.round(idctn(rounded, norm="ortho") + 128) / 255, 0, 1)
    np.testing.assert_allclose(corrupt(block, "jpeg", strength)[0, 0].numpy(), wanted, atol=1e-12)
    whole = torch.rand(2, 3, 28, 20, dtype=torch.float64)
    torch.testing.assert_close(
        corrupt(whole, "jpeg", strength)[:, :, 8:16, :8], corrupt(whole[:, :, 8:16, :8], "jpeg", strength)
    )


def test_elastic_moves_by_the_stated_distance():
    # a large image: at the border, whose pixels are repeated, the field is wilder than within
    ramp = torch.linspace(0.0, 1.0, 401, dtype=torch.float64).expand(3, 1, 401, 401)
    found = corrupt(ramp, "elastic", 5, torch.Generator().manual_seed(0))
    across = (400 * (found - ramp)[..., 5:-5]).square().mean().sqrt()  # half of the square is along the ramp
    assert float(across) == pytest.approx(1.2 / 2**0.5, rel=0.02)


def test_fog_is_the_stated_mixture():
    even = torch.full((3, 1, 16, 16), 0.5, dtype=torch.float64)
    found = corrupt(even, "fog", 4, torch.Generator().manual_seed(0))  # clouds from 0 to 1, c = 1
    torch.testing.assert_close(found.amin((1, 2, 3)), torch.full((3,), 0.5 * 0.5 / 1.5, dtype=torch.float64))
    torch.testing.assert_close(found.amax((1, 2, 3)), torch.full((3,), 1.5 * 0.5 / 1.5, dtype=torch.float64))


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
