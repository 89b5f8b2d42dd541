"""Checks the sources of the documentation: links, pages of methods and flows, versions, and code of the first pages."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import flowbnn as fb

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")] if "generated" not in path.parts)


@pytest.fixture(scope="module")
def site():
    """Modules of the Sphinx extension that need no Sphinx."""
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        from flowbnn_site import api, flows, methods, studies

        yield {"api": api, "flows": flows, "methods": methods, "studies": studies}
    finally:
        sys.path.remove(str(DOCS / "_ext"))


def anchors(path: Path) -> set[str]:
    """Returns the anchors of the headings of a Markdown file, as code hosts write them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_have_targets(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    problems = []
    for match in LINK.finditer(text):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if "://" in target or target.startswith(("generated/", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            problems.append(match[0])
    assert not problems


def test_every_public_name_has_a_page(site):
    api = site["api"]
    names = api.canonical_names()
    for package in api.packages():
        for name in api.public_names(package):
            assert api.canonical(name, names).path
    documented = {name.path for name in names.values()}
    public = {f"flowbnn.{name}" for name in fb.__all__ if not isinstance(getattr(fb, name), type(fb))}
    assert public <= documented
    files = [api.page_of(name).lower() for name in names.values()]
    assert len(set(files)) == len(files), "two pages would share a file on a file system without case"


def test_every_method_has_a_page_with_its_costs(site):
    pages, text = site["methods"].PAGES, (DOCS / "methods.md").read_text(encoding="utf-8")
    public = {name for name in fb.__all__ if isinstance(getattr(fb, name), type)}
    assert set(pages) == {name for name in public if issubclass(getattr(fb, name), fb.methods.base.Method)}
    for name in pages:
        assert site["methods"].table_row(text, name)["training"]


def test_every_flow_and_transform_belongs_to_a_family(site):
    families = site["flows"].FAMILIES.values()
    flows = {name for family in families for name in family.flows}
    transforms = {name for family in families for name in family.transforms}
    assert flows == set(fb.flows.__all__) - {"FlowModel"}
    assert transforms == set(fb.transforms.__all__) - {"Transform", "Univariate", "Amortized"}


def test_overview_of_the_studies_is_current(site):
    assert (DOCS / "results.md").read_text(encoding="utf-8") == site["studies"].overview(DOCS / "results")


def test_versions_agree():
    assert json.loads((DOCS / "versions.json").read_text(encoding="utf-8"))[0]["name"] == fb.__version__
    for name, line in {
        "CITATION.cff": f"version: {fb.__version__}\n",
        "docs/citing.md": f"version = {{{fb.__version__}}}",
        "CHANGELOG.md": f"## {fb.__version__}\n",
    }.items():
        assert line in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_first_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / "get-started.md").read_text(encoding="utf-8"), re.DOTALL
    )
    code = "\n".join(blocks).replace("epochs=30", "epochs=3").replace("samples=64", "samples=8")
    code = code.replace("held_out, progress", 'held_out, candidates=["plain", "temperature"], progress')
    names: dict = {}
    exec(code, names)
    assert isinstance(names["posterior"], fb.Posterior)
    assert names["decision"].abstained.shape == (174,)
    assert torch.is_tensor(names["prediction"].epistemic)
    assert "temperature" in capsys.readouterr().out


def test_every_page_is_in_the_contents():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if DOCS in path.parents}
    pages -= {"index", *(page for page in pages if page.startswith("results/"))}
    contents = "\n".join(
        (DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "explanation/index.md")
    )
    lines = set(contents.splitlines())
    assert not {
        page for page in pages if page.removeprefix("explanation/") not in lines and page not in lines
    }


def test_pictures_of_the_gallery_have_the_order_of_the_pages(site):
    methods = (ROOT / "examples" / "plot_15_method_maps.py").read_text(encoding="utf-8")
    assert re.findall(r'^    "(\w+)": fb\.', methods, re.MULTILINE) == list(site["methods"].PAGES)
    flows = (ROOT / "examples" / "plot_16_flow_families.py").read_text(encoding="utf-8")
    drawn = re.findall(r'^    "(\w+)": \(fb\.', flows, re.MULTILINE)
    assert drawn == list(site["flows"].FAMILIES)[: site["flows"].PICTURES["plot_16_flow_families"]]
    assert sum(site["flows"].PICTURES.values()) == len(site["flows"].FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_documents_exist(page):
    if page.name == "CHANGELOG.md":  # older entries have the names of their time
        return
    missing = []
    for path in re.findall(r"`fb\.([A-Za-z_][\w.]*\w)", page.read_text(encoding="utf-8")):
        value = fb
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is None:
            missing.append(f"fb.{path}")
    assert not missing


def test_summaries_end_after_the_reference(site):
    api = site["api"]
    assert api.first_sentence("Flow (Ho et al. 2019). More.\n\nFormula.") == "Flow (Ho et al. 2019)."
    assert api.first_sentence("Densities:\n\n>>> 1") == "Densities."
    assert not [name.path for name in api.canonical_names().values() if name.summary.endswith(" al.")]


def test_figures_of_studies_are_not_folded(site, tmp_path, monkeypatch):
    studies = site["studies"]
    monkeypatch.setattr(studies, "_figures", lambda *_: ["![figure](figure.png)"])
    for path in studies.find_results(DOCS / "results"):
        before, _, after = studies._page(studies.load_results(path), path, tmp_path).partition("![figure]")
        assert before.count("<details>") == before.count("</details>"), path
        assert after, path
