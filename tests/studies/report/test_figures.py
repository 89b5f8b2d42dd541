"""Every figure kind draws, from its data alone, without a warning and without touching matplotlib's settings."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from flowbnn_studies.report import load_results, reading, save_figures, write_report
from flowbnn_studies.report.canvas import COLOURS, Panel, to_png, to_svg
from flowbnn_studies.report.galleries import mass_levels
from flowbnn_studies.report.page import PLOTS, make_plot, page_colours

STUDIES = ["two_clusters", "digits", "flow_length", "lenet", "rivals"]


def every_panel(results: dict[str, Any], most: int = 99) -> list[tuple[Panel, tuple[int, int]]]:
    colours = page_colours([load_results(results)])
    plots = [make_plot(figure, colours) for figure in results["figures"]]
    return [(panel, plot.size) for plot in plots for group in plot.groups for panel in group.panels[:most]]


def pictures(results: dict[str, Any], most: int = 99) -> list[str]:
    chosen = every_panel(results, most)
    return [to_svg(panel, size, f"p{index}", panel.title) for index, (panel, size) in enumerate(chosen)]


def axes_of(panel: Panel) -> Any:
    figure = Figure()
    panel.draw(figure)
    return figure.axes[0]


def test_every_kind_has_a_shape_a_drawing_and_an_example(request: pytest.FixtureRequest) -> None:
    studies = [request.getfixturevalue(name) for name in STUDIES]
    shown = {figure["kind"] for study in studies for figure in study["figures"]}
    assert set(PLOTS) == set(reading.FIGURES) == shown


def test_svg_has_the_names_of_the_page_and_identifiers_of_its_own(page: str) -> None:
    drawn = re.findall(r'<svg viewBox="0 0 \d+ \d+" role="img".*?</svg>', page, re.DOTALL)
    assert len(drawn) == 45
    identifiers = [re.findall(r' id="([^"]*)"', svg) for svg in drawn]
    flat = [one for some in identifiers for one in some]
    assert len(flat) == len(set(flat))
    for svg, own in zip(drawn, identifiers, strict=True):
        assert "http" not in svg
        assert not re.search(r"[\s\",](nan|inf)\b", svg, re.IGNORECASE)
        assert not re.search("|".join(pair[0] for pair in COLOURS.values()), svg)
        for used in re.findall(r'(?:href="#|url\(#)([^")]*)', svg):
            assert used in own


def test_settings_of_the_user_neither_change_nor_matter(flow_length: dict[str, Any]) -> None:
    before = pictures(flow_length, most=1)
    with matplotlib.rc_context({"font.size": 30, "text.usetex": False, "axes.facecolor": "red"}):
        mine = dict(matplotlib.rcParams)
        assert pictures(flow_length, most=1) == before
        assert dict(matplotlib.rcParams) == mine


def test_dense_dots_are_one_image(two_clusters: dict[str, Any]) -> None:
    panel, size = every_panel(two_clusters)[0]
    svg = to_svg(panel, size, "p", "")
    assert svg.count("data:image/png;base64") >= 1
    assert svg.count("<use") < 100


def strip_numbers(value: Any, other: Any) -> Any:
    """The data with every number of a list replaced."""
    if isinstance(value, dict):
        return {key: strip_numbers(item, other) for key, item in value.items()}
    if isinstance(value, list):
        return [other if isinstance(item, int | float) else strip_numbers(item, other) for item in value]
    return value


@pytest.mark.parametrize("other", [None, 0.0, -1.0])
def test_gaps_and_flat_data(request: pytest.FixtureRequest, other: float | None) -> None:
    drawn: set[str] = set()  # one figure of each kind
    for name in STUDIES:
        results = request.getfixturevalue(name)
        results["figures"] = [figure for figure in results["figures"] if figure["kind"] not in drawn]
        for figure in results["figures"]:
            drawn.add(figure["kind"])
            pairs = figure["data"].pop("pairs", [])  # their grid must increase
            figure["data"] = strip_numbers(figure["data"], other)
            if pairs:
                figure["data"]["pairs"] = [
                    {**pair, "density": strip_numbers(pair["density"], other)} for pair in pairs
                ]
        for svg in pictures(results, most=1):
            assert not re.search(r"[\s,\"](nan|inf)\b", svg, re.IGNORECASE)


def test_the_parts_of_a_bar_stand_on_each_other(rivals: dict[str, Any]) -> None:
    pictures, panel = make_plot(rivals["figures"][4], {}).groups[0].panels
    bars = axes_of(panel).patches  # class by class, each at 0 and 180 degrees
    assert [(bar.get_x() + bar.get_width() / 2, round(bar.get_y(), 9)) for bar in bars] == [
        (0.0, 0.0), (180.0, 0.0), (0.0, 0.9), (180.0, 0.2), (0.0, 1.0), (180.0, 0.5),
    ]  # fmt: skip
    assert [bar.get_height() for bar in bars] == pytest.approx([0.9, 0.2, 0.1, 0.3, 0.0, 0.5])
    assert pictures.title == "The images"


def test_no_panels(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = [
        {"kind": kind, "title": kind, "data": {"panels": [], "models": []}} for kind in PLOTS
    ]
    assert pictures(two_clusters) == []
    assert 'role="img"' not in write_report([two_clusters], tmp_path / "page.html").read_text()
    for empty in two_clusters["figures"]:
        assert make_plot(empty, {}).groups in ([], make_plot(empty, {}).groups)
    assert len(to_png(make_plot(two_clusters["figures"][0], {}), "none")) > 100


def test_text_is_text(flow_length: dict[str, Any]) -> None:
    """Neither mathematics, nor markup, nor a label that matplotlib would hide, nor letters its font lacks."""
    panel = flow_length["figures"][0]["data"]["panels"][0]
    labels = ["$\\frac{1}{", "<b>&amp;", "_hidden", "日本語", "x" * 200]
    panel["lines"] = [{**panel["lines"][0], "label": label} for label in labels]
    panel["y_label"] = "$\\undefined{ <script>alert(1)</script>"
    assert "$\\undefined{ &lt;script&gt;" in pictures(flow_length, most=1)[0]
    plot = make_plot(flow_length["figures"][0], {})
    assert [key.label for key in plot.keys][:5] == labels
    assert len(to_png(plot, "$\\frac{日本語", scale=0.5)) > 1000


def test_figures_say_what_their_symbols_mean(request: pytest.FixtureRequest) -> None:
    """Every figure has a key; the marks that it uses are in it."""
    for name in STUDIES:
        results = request.getfixturevalue(name)
        for figure in results["figures"]:
            assert make_plot(figure, page_colours([results])).keys, figure["kind"]


def words_of(figure: dict[str, Any]) -> str:
    return "; ".join(key.label for key in make_plot(figure, {}).keys)


def test_keys_of_single_kinds(
    two_clusters: dict[str, Any], rivals: dict[str, Any], lenet: dict[str, Any]
) -> None:
    assert "larger where sampled networks disagree" in words_of(two_clusters["figures"][0])
    assert "under 1 %" in words_of(two_clusters["figures"][1])
    assert "standard deviation over seeds" in words_of(rivals["figures"][3])
    assert "true curve" in words_of(rivals["figures"][0])
    assert "ring of far-away inputs" in words_of(rivals["figures"][1])
    assert "a dot for each sampled network" in words_of(rivals["figures"][2])
    assert words_of(rivals["figures"][4]) == "0; 1; 2"
    assert "of the plain network" in words_of(lenet["figures"][1])


def test_bins_of_few_inputs_are_faint_and_dots_are_whole(two_clusters: dict[str, Any]) -> None:
    plot = make_plot(two_clusters["figures"][1], {})
    assert plot.keys[-1].alpha == 0.3
    upper = axes_of(plot.groups[0].panels[0])
    dots = [line for line in upper.lines if line.get_marker() == "o"]
    assert [dot.get_alpha() for dot in dots] == pytest.approx([0.5**0.5, 1.0, 1.0])
    assert not any(dot.get_clip_on() for dot in dots)
    for model in two_clusters["figures"][1]["data"]["models"]:
        model["bins"] = model["bins"][2:]
    assert "faint" not in words_of(two_clusters["figures"][1])


def test_corruption_is_drawn_as_differences_to_the_plain_network(lenet: dict[str, Any]) -> None:
    panel = make_plot(lenet["figures"][1], {}).groups[0].panels[0]
    assert panel.note == "down is better"
    axes = axes_of(panel)
    assert axes.get_title(loc="left") or axes.get_title() == "difference to the plain network"
    plain, other = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(plain, 0)
    np.testing.assert_allclose(other, [0, 0, 1.0])
    assert len(axes.collections) == 1  # the band of the plain network alone


def test_a_published_line_has_the_colour_of_ours_and_dashes(lenet: dict[str, Any]) -> None:
    plot = make_plot(lenet["figures"][0], page_colours([lenet]))
    keys = {key.label: (key.colour, key.dashes) for key in plot.keys}
    assert keys["Flow noise"] == ("vermillion", "")
    assert keys["Xiong: flow"] == ("vermillion", "5 2")
    assert keys["Xiong: baseline"][0] == "muted"
    assert plot.columns == 4


def test_lines_of_few_points_and_more_lines_than_hues(flow_length: dict[str, Any]) -> None:
    figure = flow_length["figures"][0]
    first, second = figure["data"]["panels"]
    first["lines"] = [{**second["lines"][0], "label": chr(97 + index)} for index in range(16)]
    keys = [key for key in make_plot(figure, {}).keys if key.mark == "line"]
    assert len({(key.colour, key.dashes) for key in keys}) == len(keys) == 19
    figure["data"]["panels"] = [{**first, "lines": [{"label": "one", "x": [1], "mean": [0.5], "std": None}]}]
    plot = make_plot(figure, {})
    assert plot.columns == 1
    assert axes_of(plot.groups[0].panels[0]).lines[0].get_marker() == "o"


def test_modes_are_stated_and_titles_of_noise_dimensions_are_short(two_clusters: dict[str, Any]) -> None:
    panels = make_plot(two_clusters["figures"][3], {}).groups[0].panels
    assert [panel.note for panel in panels] == ["1 mode", "2 modes", ""]
    assert panels[0].title == "fc1, dimension 3"


def test_labels_of_a_front_do_not_cover_each_other_and_errors_are_drawn(rivals: dict[str, Any]) -> None:
    """Four methods that nearly coincide: every label is drawn on a ground above the line, and no two of them overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    rivals["figures"] = rivals["figures"][3:4]
    ((panel, size),) = every_panel(rivals)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
    panel.draw(figure)
    assert len(figure.axes[0].containers) == 4  # error bars
    boxes, drawn = [], Text.draw

    def watch(self: Text, renderer: Any, *given: Any, **options: Any) -> None:
        if self.get_text() in {row["label"] for row in rivals["rows"]}:
            boxes.append(self.get_window_extent(renderer))
        drawn(self, renderer, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", watch)
        FigureCanvasAgg(figure).draw()
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
    svg = to_svg(panel, size, "p", "")
    assert (
        svg.index("stroke: var(--accent)")
        < svg.index("fill: var(--surface)")
        < svg.index(">MC dropout</text>")
    )


def test_an_empty_map_says_why(rivals: dict[str, Any]) -> None:
    data = rivals["figures"][1]["data"]
    for panel, value in zip(data["panels"], (0.5, 0.004, 0.5, 0.5), strict=True):
        panel["values"] = [[value] * len(data["x"]) for _ in data["y"]]
    first, second = (axes_of(panel) for panel in make_plot(rivals["figures"][1], {}).groups[0].panels[:2])
    assert not first.texts
    assert second.texts[0].get_text() == "blank: nowhere above 0.004"


def test_mass_levels_of_a_normal() -> None:
    """The region that holds a share m of a 2-d normal ends where the density is (1 - m) of its peak."""
    axis = np.linspace(-6, 6, 601)
    height = np.exp(-0.5 * (axis[:, None] ** 2 + axis**2))
    np.testing.assert_allclose(mass_levels(height, (0.5, 0.9)), [0.1, 0.5], rtol=2e-3)
    assert mass_levels(np.zeros((2, 2)), (0.5,)) == []


def test_png(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = two_clusters["figures"][:2]
    two_clusters["study"] = "../../Two clusters"  # a name cannot leave the folder
    paths = save_figures([two_clusters], tmp_path / "made")
    assert [path.name for path in paths] == ["two-clusters-1-field.png", "two-clusters-2-reliability.png"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [path.name for path in paths]
    for path in paths:
        image = imread(io.BytesIO(path.read_bytes()))
        assert image.shape[0] > 400
        assert image.shape[1] > 1200
        assert float(image[..., :3].min()) < 0.3
        np.testing.assert_array_equal(image[0, 0, :3], 1.0)
