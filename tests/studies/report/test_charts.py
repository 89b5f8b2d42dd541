"""Tests that every kind of figure is drawn from its data alone, without warnings or changes of matplotlib's settings."""

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
from flowbnn_studies.report.charts import comparison
from flowbnn_studies.report.figures import PLOTS, make_plot
from flowbnn_studies.report.galleries import mass_levels
from flowbnn_studies.report.page import page_colours

STUDIES = ["two_clusters", "digits", "flow_length", "lenet", "rivals"]


def all_panels(results: dict[str, Any], limit: int = 99) -> list[tuple[Panel, tuple[int, int]]]:
    colours = page_colours([load_results(results)])
    plots = [make_plot(figure, colours) for figure in results["figures"]]
    return [(panel, plot.size) for plot in plots for group in plot.groups for panel in group.panels[:limit]]


def pictures(results: dict[str, Any], limit: int = 99) -> list[str]:
    panels = all_panels(results, limit)
    return [to_svg(panel, size, f"p{index}", panel.title) for index, (panel, size) in enumerate(panels)]


def axes_of(panel: Panel) -> Any:
    figure = Figure()
    panel.draw(figure)
    return figure.axes[0]


def test_every_kind_has_a_schema_a_plot_and_an_example(request: pytest.FixtureRequest) -> None:
    studies = [request.getfixturevalue(name) for name in STUDIES]
    kinds = {figure["kind"] for study in studies for figure in study["figures"]}
    assert set(PLOTS) == set(reading.FIGURES) == kinds


def test_svg_has_named_colours_and_unique_identifiers(page: str) -> None:
    svgs = re.findall(r'<svg viewBox="0 0 \d+ \d+" role="img".*?</svg>', page, re.DOTALL)
    assert len(svgs) == 43
    identifiers = [re.findall(r' id="([^"]*)"', svg) for svg in svgs]
    flat = [identifier for group in identifiers for identifier in group]
    assert len(flat) == len(set(flat))
    for svg, names in zip(svgs, identifiers, strict=True):
        assert "http" not in svg
        assert not re.search(r"[\s\",](nan|inf)\b", svg, re.IGNORECASE)
        assert not re.search("|".join(pair[0] for pair in COLOURS.values()), svg)
        for reference in re.findall(r'(?:href="#|url\(#)([^")]*)', svg):
            assert reference in names


def test_user_settings_of_matplotlib_are_ignored_and_restored(flow_length: dict[str, Any]) -> None:
    before = pictures(flow_length, limit=1)
    with matplotlib.rc_context({"font.size": 30, "text.usetex": False, "axes.facecolor": "red"}):
        mine = dict(matplotlib.rcParams)
        assert pictures(flow_length, limit=1) == before
        assert dict(matplotlib.rcParams) == mine


def test_dense_dots_are_rasterized(two_clusters: dict[str, Any]) -> None:
    panel, size = all_panels(two_clusters)[0]
    svg = to_svg(panel, size, "p", "")
    assert svg.count("data:image/png;base64") >= 1
    assert svg.count("<use") < 100


def strip_numbers(value: Any, number: Any) -> Any:
    """Returns the data with every number of a list replaced."""
    if isinstance(value, dict):
        return {key: strip_numbers(item, number) for key, item in value.items()}
    if isinstance(value, list):
        return [number if isinstance(item, int | float) else strip_numbers(item, number) for item in value]
    return value


@pytest.mark.parametrize(
    "number", [None, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(-1.0, marks=pytest.mark.slow)]
)
def test_missing_and_constant_data_are_drawn(request: pytest.FixtureRequest, number: float | None) -> None:
    kinds: set[str] = set()  # one figure of each kind
    for name in STUDIES:
        results = request.getfixturevalue(name)
        results["figures"] = [figure for figure in results["figures"] if figure["kind"] not in kinds]
        for figure in results["figures"]:
            kinds.add(figure["kind"])
            pairs = figure["data"].pop("pairs", [])  # their grid must increase
            figure["data"] = strip_numbers(figure["data"], number)
            if pairs:
                figure["data"]["pairs"] = [
                    {**pair, "density": strip_numbers(pair["density"], number)} for pair in pairs
                ]
        for svg in pictures(results, limit=1):
            assert not re.search(r"[\s,\"](nan|inf)\b", svg, re.IGNORECASE)


def test_parts_of_a_bar_are_stacked(rivals: dict[str, Any]) -> None:
    pictures, panel = make_plot(rivals["figures"][4], {}).groups[0].panels
    bars = axes_of(panel).patches  # class by class, each at 0 and 180 degrees
    assert [(bar.get_x() + bar.get_width() / 2, round(bar.get_y(), 9)) for bar in bars] == [
        (0.0, 0.0), (180.0, 0.0), (0.0, 0.9), (180.0, 0.2), (0.0, 1.0), (180.0, 0.5),
    ]  # fmt: skip
    assert [bar.get_height() for bar in bars] == pytest.approx([0.9, 0.2, 0.1, 0.3, 0.0, 0.5])
    assert pictures.title == "Images"


def test_figures_without_panels(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = [
        {"kind": kind, "title": kind, "data": {"panels": [], "models": []}} for kind in PLOTS
    ]
    assert pictures(two_clusters) == []
    assert 'role="img"' not in write_report([two_clusters], tmp_path / "page.html").read_text()
    for empty in two_clusters["figures"]:
        assert make_plot(empty, {}).groups in ([], make_plot(empty, {}).groups)
    assert len(to_png(make_plot(two_clusters["figures"][0], {}), "none")) > 100


def test_labels_are_not_interpreted(flow_length: dict[str, Any]) -> None:
    """Labels with mathematics, markup, a leading underscore or characters missing in the font are shown as they are."""
    panel = flow_length["figures"][0]["data"]["panels"][0]
    labels = ["$\\frac{1}{", "<b>&amp;", "_hidden", "日本語", "x" * 200]
    panel["lines"] = [{**panel["lines"][0], "label": label} for label in labels]
    panel["y_label"] = "$\\undefined{ <script>alert(1)</script>"
    assert "$\\undefined{ &lt;script&gt;" in pictures(flow_length, limit=1)[0]
    plot = make_plot(flow_length["figures"][0], {})
    assert [key.label for key in plot.keys][:5] == labels
    assert len(to_png(plot, "$\\frac{日本語", scale=0.5)) > 1000


def test_every_figure_has_a_legend(request: pytest.FixtureRequest) -> None:
    """Every figure has a legend."""
    for name in STUDIES:
        results = request.getfixturevalue(name)
        for figure in results["figures"]:
            assert make_plot(figure, page_colours([results])).keys, figure["kind"]


def legend_of(figure: dict[str, Any]) -> str:
    return "; ".join(key.label for key in make_plot(figure, {}).keys)


def test_legends_of_single_kinds(
    two_clusters: dict[str, Any], rivals: dict[str, Any], lenet: dict[str, Any]
) -> None:
    assert "larger dots where sampled networks disagree" in legend_of(two_clusters["figures"][0])
    assert "larger dots have more inputs" in legend_of(two_clusters["figures"][1])
    assert "standard deviation over seeds" in legend_of(rivals["figures"][3])
    assert "true curve" in legend_of(rivals["figures"][0])
    assert "ring of out-of-distribution inputs" in legend_of(rivals["figures"][1])
    assert "dot: one sampled network" in legend_of(rivals["figures"][2])
    assert legend_of(rivals["figures"][4]) == "0; 1; 2"
    assert "of the deterministic network" in legend_of(lenet["figures"][1])


def test_area_of_a_bin_is_its_fraction_of_the_inputs(two_clusters: dict[str, Any]) -> None:
    figure = two_clusters["figures"][1]
    bins = [entry for entry in figure["data"]["models"][0]["bins"] if entry["confidence"] is not None]
    (dots,) = axes_of(make_plot(figure, {}).groups[0].panels[0]).collections
    np.testing.assert_allclose(
        dots.get_offsets(), [[entry["confidence"], entry["accuracy"]] for entry in bins]
    )
    np.testing.assert_allclose(dots.get_sizes(), [20 + 260 * entry["fraction"] for entry in bins])


def test_comparison_shows_the_chosen_rows_the_best_on_top(two_clusters: dict[str, Any]) -> None:
    keys = [row["key"] for row in two_clusters["rows"][:2]]
    plot = comparison(two_clusters, ["ece"], keys)
    (panel,) = plot.groups[0].panels
    axes = axes_of(panel)
    means = {row["label"]: row["values"]["ece"]["mean"] for row in two_clusters["rows"][:2]}
    labels = [text.get_text().replace("\n", " ") for text in axes.get_yticklabels()]
    assert labels == sorted(means, key=lambda label: means[label])
    assert axes.get_xlabel() == "lower is better"
    assert axes.get_legend() is None


def test_corruption_is_drawn_as_difference_to_the_baseline(lenet: dict[str, Any]) -> None:
    panel = make_plot(lenet["figures"][1], {}).groups[0].panels[0]
    assert panel.note == "down is better"
    axes = axes_of(panel)
    assert axes.get_title(loc="left") or axes.get_title() == "difference to the deterministic network"
    plain, other = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(plain, 0)
    np.testing.assert_allclose(other, [0, 0, 1.0])
    assert len(axes.collections) == 1  # only the band of the deterministic network


def test_published_line_is_dashed_in_the_colour_of_ours(lenet: dict[str, Any]) -> None:
    plot = make_plot(lenet["figures"][0], page_colours([lenet]))
    keys = {key.label: (key.colour, key.dashes) for key in plot.keys}
    assert keys["Flow noise"] == ("vermillion", "")
    assert keys["Xiong: flow"] == ("vermillion", "5 2")
    assert keys["Xiong: baseline"][0] == "muted"


def test_many_lines_differ_and_few_points_are_marked(flow_length: dict[str, Any]) -> None:
    figure = flow_length["figures"][0]
    first, second = figure["data"]["panels"]
    first["lines"] = [{**second["lines"][0], "label": chr(97 + index)} for index in range(16)]
    keys = [key for key in make_plot(figure, {}).keys if key.mark == "line"]
    assert len({(key.colour, key.dashes) for key in keys}) == len(keys) == 19
    figure["data"]["panels"] = [{**first, "lines": [{"label": "one", "x": [1], "mean": [0.5], "std": None}]}]
    plot = make_plot(figure, {})
    assert plot.columns == 1
    assert axes_of(plot.groups[0].panels[0]).lines[0].get_marker() == "o"


def test_density_panels_state_the_number_of_modes(two_clusters: dict[str, Any]) -> None:
    panels = make_plot(two_clusters["figures"][3], {}).groups[0].panels
    assert [panel.note for panel in panels] == ["1 mode", "2 modes", ""]
    assert panels[0].title == "fc1, dimension 3"


def test_labels_of_a_pareto_front_do_not_overlap(rivals: dict[str, Any]) -> None:
    """Labels of four methods that nearly coincide are drawn above the line and do not overlap. Error bars are drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    rivals["figures"] = rivals["figures"][3:4]
    ((panel, size),) = all_panels(rivals)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
    panel.draw(figure)
    assert len(figure.axes[0].containers) == 4  # error bars
    boxes, draw = [], Text.draw

    def watch(self: Text, renderer: Any, *arguments: Any, **options: Any) -> None:
        if self.get_text() in {row["label"] for row in rivals["rows"]}:
            boxes.append(self.get_window_extent(renderer))
        draw(self, renderer, *arguments, **options)

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


def test_blank_map_has_a_remark(rivals: dict[str, Any]) -> None:
    data = rivals["figures"][1]["data"]
    for panel, value in zip(data["panels"], (0.5, 0.004, 0.5, 0.5), strict=True):
        panel["values"] = [[value] * len(data["x"]) for _ in data["y"]]
    first, second = (axes_of(panel) for panel in make_plot(rivals["figures"][1], {}).groups[0].panels[:2])
    assert not first.texts
    assert second.texts[0].get_text() == "blank: maximum 0.004"


def test_mass_levels_of_a_normal() -> None:
    """The region that holds a fraction m of a 2-d normal ends where the density is (1 - m) of its maximum."""
    axis = np.linspace(-6, 6, 601)
    height = np.exp(-0.5 * (axis[:, None] ** 2 + axis**2))
    np.testing.assert_allclose(mass_levels(height, (0.5, 0.9)), [0.1, 0.5], rtol=2e-3)
    assert mass_levels(np.zeros((2, 2)), (0.5,)) == []


def test_figures_are_saved_as_png(two_clusters: dict[str, Any], tmp_path: Path) -> None:
    two_clusters["figures"] = two_clusters["figures"][:2]
    two_clusters["study"] = "../../Two clusters"  # the name must not leave the folder
    paths = save_figures([two_clusters], tmp_path / "figures")
    assert [path.name for path in paths] == ["two-clusters-1-field.png", "two-clusters-2-reliability.png"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [path.name for path in paths]
    for path in paths:
        image = imread(io.BytesIO(path.read_bytes()))
        assert image.shape[0] > 400
        assert image.shape[1] > 1200
        assert float(image[..., :3].min()) < 0.3
        np.testing.assert_array_equal(image[0, 0, :3], 1.0)
