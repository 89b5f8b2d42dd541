"""Tests of colours: one colour for each method on the whole page, with sufficient contrast."""

from typing import Any

import pytest

from flowbnn.compare.candidates import CANDIDATES
from flowbnn.methods import METHODS
from flowbnn_studies import get_study
from flowbnn_studies.images.settings import image_variants
from flowbnn_studies.report.canvas import (
    CLASSES,
    COLOURS,
    METHOD_FAMILIES,
    STEPS,
    assign_colours,
    family_of,
    light_colour,
)
from flowbnn_studies.report.page import make_plot, page_colours


def test_every_method_has_the_colour_of_its_family() -> None:
    expected = {
        "plain": "slate",
        "longer": "brown",
        "dropout": "green",
        "gaussian": "blue",
        "flow": "vermillion",
        "mixture": "purple",
    }
    variants = [name for name in image_variants("LeNet", (1, 1)) if name.in_table]
    variants += [name for name in get_study("digits").variants(None) if name.in_table]
    variants += get_study("two-clusters").variants(None)
    for variant in variants:
        (name,) = [name for name in expected if name in variant.key.split("-")]
        family = family_of(variant.method)
        assert family is not None, variant.label
        assert family.colour == expected[name], variant.label
    families: dict[str, set[str]] = {}
    assert all(family_of(method) is not None for method in METHODS)
    for rival in CANDIDATES:
        family = family_of(rival.method_name)
        assert family is not None, rival.label
        families.setdefault(rival.method.name, set()).add(family.name)
    assert families.pop("node-noise") == {"Gaussian noise", "mixture noise", "flow noise"}
    expected_groups = [
        {"mle", "map", "damp", "temperature"},
        {"mc-dropout"},
        {"deep-ensemble", "mode-ensemble", "swag"},
        {"laplace"},
    ]
    expected_groups += [{"bayes-by-backprop", "mnf", "ivon", "vbll"}, {"sgld", "hmc", "nuts"}]
    groups = [
        {name for name in families if families[name] == families[other_name]} for other_name in families
    ]
    assert all(len(names) == 1 for names in families.values())
    assert all(group in expected_groups for group in groups)
    assert set().union(*expected_groups) == set(families)


def test_colours_of_families_and_classes_are_distinct() -> None:
    colours = {family.colour for family in METHOD_FAMILIES}
    assert len(colours) == len(METHOD_FAMILIES)
    assert not colours & {*CLASSES, "sky", "teal"}
    assert len({light_colour(name) for name in COLOURS}) == len(COLOURS)
    for count in range(3, 9):
        rows = [{"label": f"length {number}", "method": "node-noise-planar"} for number in range(count)]
        assert len(set(assign_colours(rows).values())) == count


def test_label_has_one_colour_on_the_whole_page(
    digits: dict[str, Any], rivals: dict[str, Any], flow_length: dict[str, Any]
) -> None:
    for study in (rivals, digits):
        study["rows"][0] |= {"label": "Custom", "method": ""}
    colours = page_colours([digits, rivals, flow_length])
    assert colours["Custom"] == "teal"
    assert [colours[row["label"]] for row in rivals["rows"][1:]] == ["green", "olive", "vermillion"]
    assert [colours[row["label"]] for row in flow_length["rows"]] == ["step1", "step4", "step6"]
    keys = {
        key.label: key.colour for key in make_plot(rivals["figures"][3], colours).keys if key.mark == "dot"
    }
    assert keys == {
        "ensembles": "olive",
        "dropout": "green",
        "flow noise": "vermillion",
        "deterministic network": "slate",
    }


def contrast(first: str, second: str) -> float:
    """Computes the contrast ratio of WCAG 2 from relative luminances."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [
            channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
            for channel in channels
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_sufficient(scheme: int) -> None:
    """Text has a contrast of 4.5 to 1 on both backgrounds, colours of figures of nearly 3 to 1, in light and in dark."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for background in ("surface", "page"):
        for text in ("ink", "muted", "accent"):
            assert contrast(COLOURS[text][scheme], COLOURS[background][scheme]) >= 4.5, text
    for name in {*(family.colour for family in METHOD_FAMILIES), *CLASSES}:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 2.9, name
    for name in STEPS:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 1.9, name
