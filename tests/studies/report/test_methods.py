"""One colour for one method, whatever study it is in."""

from typing import Any

from flowbnn.candidates import CANDIDATES
from flowbnn_studies import digits as digits_study
from flowbnn_studies import two_clusters as clusters_study
from flowbnn_studies.images.variants import image_variants
from flowbnn_studies.report.figures import make_plot, study_colours
from flowbnn_studies.report.methods import METHODS, method_of


def test_every_method_of_every_study_has_its_colour() -> None:
    expected = {
        "plain": "slate",
        "longer": "brown",
        "dropout": "green",
        "gaussian": "blue",
        "flow": "vermillion",
        "mixture": "purple",
    }
    studies = (clusters_study.TwoClusters(), digits_study.DigitsStudy())
    variants = [v for study in studies for v in study.variants(study.make_settings())]
    seen = set()
    for variant in [*variants, *image_variants("LeNet", (1, 1))]:
        names = [name for name in expected if name in variant.key.split("-")]
        if variant.shown and names:
            kind = method_of(variant.label)
            assert kind is not None, variant.label
            assert kind.colour == expected[names[0]], variant.label
            seen.add(names[0])
    assert seen == set(expected)
    families: dict[str, set[str]] = {}
    for rival in CANDIDATES:
        kind = method_of(rival.label)
        assert kind is not None, rival.label
        families.setdefault(rival.family, set()).add(kind.name)
        assert rival.family == "noise" or rival.colour == kind.colour
    assert families.pop("noise") == {"Gaussian noise", "mixture noise", "flow noise"}
    assert all(len(kinds) == 1 for kinds in families.values())
    assert len(set().union(*families.values())) == len(families)


def test_no_two_methods_share_a_colour() -> None:
    assert len({kind.colour for kind in METHODS}) == len(METHODS)


def test_the_label_counts_more_than_the_colour_that_was_stored(rivals: dict[str, Any]) -> None:
    for row in rivals["rows"]:
        row["colour"] = "amber"
    colours = study_colours(rivals)
    assert list(colours.values()) == ["slate", "green", "olive", "vermillion"]
    (pareto,) = [figure for figure in rivals["figures"] if figure["kind"] == "pareto"]
    keys = {key.label: key.colour for key in make_plot(pareto, colours).keys}
    keys.pop("no other method is both cheaper and better")
    assert keys == {
        "ensembles": "olive",
        "dropout": "green",
        "flow noise": "vermillion",
        "one network": "slate",
    }
    rivals["rows"][0]["label"] = "Of my own"
    assert study_colours(rivals)["Of my own"] == "amber"
