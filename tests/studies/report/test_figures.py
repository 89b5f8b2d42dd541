"""Every figure kind draws, from its data alone, without a warning and without touching matplotlib's settings."""

import copy
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report import load_results, save_figures, write_report
from flowbnn_studies.report.canvas import Panel, to_png, to_svg
from flowbnn_studies.report.figures import KINDS, make_plot, study_colours
from flowbnn_studies.report.figures_density import mass_levels
from flowbnn_studies.report.schema import FIGURES
from flowbnn_studies.report.style import COLOURS, GROUPS, MODELS, STEPS, assign_colours, light


def every_panel(results: dict[str, Any], most: int = 99) -> list[tuple[Panel, tuple[int, int]]]:
    colours = study_colours(load_results(results))
    plots = [make_plot(figure, colours) for figure in results["figures"]]
    return [(panel, plot.size) for plot in plots for group in plot.groups for panel in group.panels[:most]]


def pictures(results: dict[str, Any], most: int = 99) -> list[str]:
    chosen = every_panel(results, most)
    return [to_svg(panel, size, f"p{index}", panel.title) for index, (panel, size) in enumerate(chosen)]


def test_every_kind_has_a_shape_a_drawing_and_an_example(
    two_clusters: dict[str, Any],
    digits: dict[str, Any],
    flow_length: dict[str, Any],
    lenet: dict[str, Any],
    rivals: dict[str, Any],
) -> None:
    studies = (two_clusters, digits, flow_length, lenet, rivals)
    shown = {figure["kind"] for study in studies for figure in study["figures"]}
    assert set(KINDS) == set(FIGURES) == shown


@pytest.mark.parametrize("study", ["two_clusters", "digits", "flow_length", "lenet", "rivals"])
def test_svg(study: str, request: pytest.FixtureRequest) -> None:
    for svg in pictures(request.getfixturevalue(study)):
        assert svg.startswith("<svg viewBox=")
        assert "http" not in svg
        assert not re.search(r"[\s\",](nan|inf)\b", svg, re.IGNORECASE)
        # Each colour of ours has become a name of the page.
        assert not re.search("|".join(pair[0] for pair in COLOURS.values()), svg)
        identifiers = re.findall(r' id="([^"]*)"', svg)
        assert len(identifiers) == len(set(identifiers))
        assert all(identifier.startswith("p") for identifier in identifiers)
        for used in re.findall(r'(?:href="#|url\(#)([^")]*)', svg):
            assert used in identifiers


def test_same_data_same_picture(flow_length: dict[str, Any]) -> None:
    assert pictures(flow_length) == pictures(copy.deepcopy(flow_length))


def test_settings_of_the_user_neither_change_nor_matter(flow_length: dict[str, Any]) -> None:
    before = pictures(flow_length)
    with matplotlib.rc_context({"font.size": 30, "text.usetex": False, "axes.facecolor": "red"}):
        mine = dict(matplotlib.rcParams)
        assert pictures(flow_length) == before
        assert dict(matplotlib.rcParams) == mine


def test_dense_dots_are_one_image(two_clusters: dict[str, Any]) -> None:
    panel, size = every_panel(two_clusters)[0]
    svg = to_svg(panel, size, "p", "")
    assert svg.count("data:image/png;base64") >= 1
    assert len(svg) < 300_000
    assert svg.count("<use") < 100


def strip_numbers(value: Any, other: Any) -> Any:
    """The data with every number of a list replaced."""
    if isinstance(value, dict):
        return {key: strip_numbers(item, other) for key, item in value.items()}
    if isinstance(value, list):
        return [other if isinstance(item, int | float) else strip_numbers(item, other) for item in value]
    return value


# A grid of a pair must increase, and no class can be counted as nothing: those stay.
@pytest.mark.parametrize("other", [None, float("inf"), 0.0, -1.0])
def test_gaps_and_flat_data(
    two_clusters: dict[str, Any],
    digits: dict[str, Any],
    flow_length: dict[str, Any],
    rivals: dict[str, Any],
    other: float | None,
) -> None:
    for results in (two_clusters, digits, flow_length, rivals):
        for figure in results["figures"]:
            pairs = figure["data"].pop("pairs", [])
            figure["data"] = strip_numbers(figure["data"], other)
            for pair in pairs:
                pair["density"] = strip_numbers(pair["density"], other)
            if pairs:
                figure["data"]["pairs"] = pairs
        shown = pictures(results, most=1)
        assert len(shown) >= 1
        for svg in shown:
            assert not re.search(r"[\s,\"](nan|inf)\b", svg, re.IGNORECASE)


def test_no_panels(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    for kind in FIGURES:
        empty = {"kind": kind, "title": kind, "caption": "", "data": {"panels": [], "models": []}}
        two_clusters["figures"] = [empty]
        assert pictures(two_clusters) == []
        assert "<svg viewBox" not in write_report([two_clusters], tmp_path / "page.html").read_text()
        assert len(to_png(make_plot(empty, {}), kind)) > 100


def test_text_is_text(flow_length: dict[str, Any]) -> None:
    """Neither mathematics, nor markup, nor a label that matplotlib would hide, nor letters its font lacks."""
    panel = flow_length["figures"][0]["data"]["panels"][0]
    labels = ["$\\frac{1}{", "<b>&amp;", "_hidden", "日本語", "x" * 200]
    for line, label in zip(panel["lines"], labels, strict=False):
        line["label"] = label
    panel["y_label"] = "$\\undefined{ <script>alert(1)</script>"
    svg = pictures(flow_length)[0]
    assert "$\\undefined{ &lt;script&gt;" in svg
    plot = make_plot(flow_length["figures"][0], study_colours(flow_length))
    assert [key.label for key in plot.keys][:5] == labels
    assert len(to_png(plot, "$\\frac{日本語")) > 1000


def test_colours_agree_between_figures(digits: dict[str, Any]) -> None:
    colours = study_colours(digits)
    assert list(colours.values()) == ["slate", "green", "blue", "vermillion"]
    digits["figures"] = [digits["figures"][0], digits["figures"][2]]
    drawn = pictures(digits)
    for index, name in enumerate(colours.values()):
        # The reliability diagram and the confidence histogram of the same model.
        assert f"var(--{name})" in drawn[index]
        assert f"var(--{name})" in drawn[index + 4]


def test_bins_of_few_inputs_are_faint_and_dots_are_whole() -> None:
    shares = [0.0, 1 / 1218, 30 / 1218, 1187 / 1218]
    bins = [
        {"low": low, "high": low + 0.25, "confidence": low + 0.2, "accuracy": 1.0, "fraction": share}
        for low, share in zip((0.0, 0.25, 0.5, 0.75), shares, strict=True)
    ]
    bins[0]["confidence"] = bins[0]["accuracy"] = None
    figure = {"kind": "reliability", "title": "r", "data": {"models": [{"label": "Plain", "bins": bins}]}}
    plot = make_plot(figure, {})
    assert "fewer inputs" in plot.remark
    assert plot.keys[-1].alpha == 0.3
    # all in one bin, or two halves: nothing is known of the counts, and nothing is faint
    for share in (1.0, 0.5):
        firm = {
            "models": [
                {
                    "label": "Plain",
                    "bins": [{**one, "fraction": share} for one in bins[2:][: round(1 / share)]],
                }
            ]
        }
        assert make_plot({**figure, "data": firm}, {}).remark == ""
    drawn = Figure()
    plot.groups[0].panels[0].draw(drawn)
    upper = drawn.axes[0]
    dots = [line for line in upper.lines if line.get_marker() == "o"]
    assert [dot.get_alpha() for dot in dots] == pytest.approx([(1 / 30) ** 0.5, 1.0, 1.0])
    assert not any(dot.get_clip_on() for dot in dots)
    one, *others = [bar.get_alpha() for bar in upper.patches]
    assert one < 0.3 * min(others)


def test_curves_of_other_things_keep_their_own_colours(
    digits: dict[str, Any], flow_length: dict[str, Any]
) -> None:
    digits["figures"] += flow_length["figures"]
    assert list(study_colours(digits)) == [row["label"] for row in digits["rows"]]
    keys = make_plot(digits["figures"][-1], study_colours(digits)).keys
    assert [key.colour for key in keys] == ["step1", "step2", "step3", "step4", "step5", "step6"]


def test_one_curve_in_one_panel(flow_length: dict[str, Any]) -> None:
    figure = flow_length["figures"][0]
    figure["data"]["panels"] = figure["data"]["panels"][:1]
    figure["data"]["panels"][0]["lines"] = [{"label": "one", "x": [1], "mean": [0.5], "std": None}]
    assert make_plot(figure, {}).columns == 1
    assert len(pictures(flow_length)) == 1


def test_more_lines_than_hues_differ_in_dashes(flow_length: dict[str, Any]) -> None:
    figure = flow_length["figures"][0]
    line = figure["data"]["panels"][0]["lines"][0]
    figure["data"]["panels"][0]["lines"] = [{**line, "label": chr(97 + index)} for index in range(12)]
    keys = make_plot(figure, {}).keys
    assert len({(key.colour, key.dashes) for key in keys}) == len(keys) == 18


def test_modes_are_stated(two_clusters: dict[str, Any]) -> None:
    notes = [panel.note for panel, _ in every_panel(two_clusters)]
    assert {"1 mode", "2 modes", "3 modes"} <= set(notes)


def test_labels_of_a_front_do_not_cover_each_other(rivals: dict[str, Any]) -> None:
    """Four methods that nearly coincide: every label is drawn, and no two of them overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    rivals["figures"] = rivals["figures"][3:]
    (panel, size), *_ = every_panel(rivals)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
    panel.draw(figure)
    boxes = []

    canvas = FigureCanvasAgg(figure)
    drawn = Text.draw

    def watch(self: Text, renderer: Any, *given: Any, **options: Any) -> None:
        if self.get_text() in {row["label"] for row in rivals["rows"]}:
            boxes.append(self.get_window_extent(renderer))
        drawn(self, renderer, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", watch)
        canvas.draw()
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])


def test_names_of_a_front_lie_on_a_ground_above_its_lines(rivals: dict[str, Any]) -> None:
    rivals["figures"] = rivals["figures"][3:]
    svg = pictures(rivals)[0]
    line, name = svg.index("stroke: var(--accent)"), svg.index(">MC dropout</text>")
    ground = svg.index("fill: var(--surface)")
    assert line < ground < name


def test_an_empty_map_says_why(rivals: dict[str, Any]) -> None:
    rivals["figures"] = rivals["figures"][1:2]
    data = rivals["figures"][0]["data"]
    for panel in data["panels"]:
        panel["values"] = [[0.5] * len(data["x"]) for _ in data["y"]]
    assert not any("nowhere above" in svg for svg in pictures(rivals))
    data["panels"][1]["values"] = [[0.004] * len(data["x"]) for _ in data["y"]]
    first, second, *_ = pictures(rivals)
    assert "nowhere above" not in first
    assert "nowhere above 0.004" in second


def test_the_numbers_of_one_seed_are_told_as_such(two_clusters: dict[str, Any]) -> None:
    figure = two_clusters["figures"][0]
    data = {name: part for name, part in figure["data"].items() if name != "seed"}
    notes = [group.note for group in make_plot({**figure, "data": data}, {}).groups]
    assert all("ECE" in note and "seed" not in note for note in notes)
    notes = [group.note for group in make_plot({**figure, "data": {**data, "seed": 0}}, {}).groups]
    assert all(note.startswith("seed 0: ") for note in notes)


def test_titles_of_noise_dimensions_are_short(two_clusters: dict[str, Any]) -> None:
    (density,) = [figure for figure in two_clusters["figures"] if figure["kind"] == "density"]
    density["data"]["panels"][0]["title"] = "conv2, noise dimension 11"
    assert make_plot(density, {}).groups[0].panels[0].title == "conv2, dimension 11"


def test_a_map_of_another_shape_is_refused(rivals: dict[str, Any]) -> None:
    rivals["figures"][1]["data"]["panels"][0]["values"] = [[0.1, 0.2]]
    with pytest.raises(FlowBNNError, match="a row for each y and a column for each x"):
        load_results(rivals)


def test_mass_levels_of_a_normal() -> None:
    """The region that holds a share m of a 2-d normal ends where the density is (1 - m) of its peak."""
    axis = np.linspace(-6, 6, 601)
    height = np.exp(-0.5 * (axis[:, None] ** 2 + axis**2))
    np.testing.assert_allclose(mass_levels(height, (0.5, 0.9)), [0.1, 0.5], rtol=2e-3)
    assert mass_levels(np.zeros((2, 2)), (0.5,)) == []


def test_png(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    paths = save_figures([two_clusters], tmp_path / "made")
    assert [path.name for path in paths] == [
        "two-clusters-1-field.png",
        "two-clusters-2-reliability.png",
        "two-clusters-3-histogram.png",
        "two-clusters-4-density.png",
    ]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [path.name for path in paths]
    for path in paths:
        image = imread(io.BytesIO(path.read_bytes()))
        assert image.shape[0] > 400
        assert image.shape[1] > 1200
        assert float(image[..., :3].min()) < 0.3
        np.testing.assert_array_equal(image[0, 0, :3], 1.0)


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
    """Text at 4.5 to 1 on both grounds, the colours of models at nearly 3 to 1, in light and in dark."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for ground in ("surface", "page"):
        for text in ("ink", "muted", "accent"):
            assert contrast(COLOURS[text][scheme], COLOURS[ground][scheme]) >= 4.5, text
    for name in {*MODELS, *GROUPS}:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 2.9, name
    for name in STEPS:
        assert contrast(COLOURS[name][scheme], COLOURS["surface"][scheme]) >= 1.9, name


def test_colours_are_told_apart() -> None:
    assert len({light(name) for name in COLOURS}) == len(COLOURS)
    for count in range(3, 9):
        labels = [f"length {number}" for number in range(count)]
        assert len(set(assign_colours(labels).values())) == count
