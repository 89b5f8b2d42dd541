"""One colour for one method on the whole page, and colours that can be seen and told apart."""

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


def test_every_method_of_every_study_has_its_colour() -> None:
    expected = {
        "plain": "slate",
        "longer": "brown",
        "dropout": "green",
        "gaussian": "blue",
        "flow": "vermillion",
        "mixture": "purple",
    }
    variants = [one for one in image_variants("LeNet", (1, 1)) if one.in_table]
    variants += [one for one in get_study("digits").variants(None) if one.in_table]
    variants += get_study("two-clusters").variants(None)
    for variant in variants:
        (name,) = [name for name in expected if name in variant.key.split("-")]
        kind = family_of(variant.method)
        assert kind is not None, variant.label
        assert kind.colour == expected[name], variant.label
    kinds: dict[str, set[str]] = {}
    assert all(family_of(method) is not None for method in METHODS)
    for rival in CANDIDATES:
        kind = family_of(rival.method_name)
        assert kind is not None, rival.label
        kinds.setdefault(rival.method.name, set()).add(kind.name)
    assert kinds.pop("node-noise") == {"Gaussian noise", "mixture noise", "flow noise"}
    alike = [
        {"mle", "map", "damp", "temperature"},
        {"mc-dropout"},
        {"deep-ensemble", "mode-ensemble", "swag"},
        {"laplace"},
    ]
    alike += [{"bayes-by-backprop", "mnf"}, {"sgld", "hmc", "nuts"}]
    together = [{one for one in kinds if kinds[one] == kinds[other]} for other in kinds]
    assert all(len(names) == 1 for names in kinds.values())
    assert all(group in alike for group in together)
    assert set().union(*alike) == set(kinds)


def test_no_two_kinds_share_a_colour_and_no_class_has_that_of_a_method() -> None:
    colours = {kind.colour for kind in METHOD_FAMILIES}
    assert len(colours) == len(METHOD_FAMILIES)
    assert not colours & {*CLASSES, "sky", "teal"}
    assert len({light_colour(name) for name in COLOURS}) == len(COLOURS)
    for count in range(3, 9):
        rows = [{"label": f"length {number}", "method": "node-noise-planar"} for number in range(count)]
        assert len(set(assign_colours(rows).values())) == count


def test_a_label_has_one_colour_on_the_whole_page(
    digits: dict[str, Any], rivals: dict[str, Any], flow_length: dict[str, Any]
) -> None:
    for study in (rivals, digits):
        study["rows"][0] |= {"label": "Of my own", "method": ""}
    colours = page_colours([digits, rivals, flow_length])
    assert colours["Of my own"] == "teal"
    assert [colours[row["label"]] for row in rivals["rows"][1:]] == ["green", "olive", "vermillion"]
    assert [colours[row["label"]] for row in flow_length["rows"]] == ["step1", "step4", "step6"]
    keys = {
        key.label: key.colour for key in make_plot(rivals["figures"][3], colours).keys if key.mark == "dot"
    }
    assert keys == {
        "ensembles": "olive",
        "dropout": "green",
        "flow noise": "vermillion",
        "one network": "slate",
    }


def contrast(first: str, second: str) -> float:
    """The contrast ratio of WCAG 2, from relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast(scheme: int) -> None:
    """Text at 4.5 to 1 on both grounds, the colours of figures at nearly 3 to 1, in light and in dark."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for ground in ("surface", "page"):
        for text in ("ink", "muted", "accent"):
            assert contrast(COLOURS[text][scheme], COLOURS[ground][scheme]) >= 4.5, text
    for name in {*(kind.colour for kind in METHOD_FAMILIES), *CLASSES}:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 2.9, name
    for name in STEPS:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 1.9, name
