"""Sphinx extension of the documentation: generated pages, formulas by KaTeX, references and ``llms.txt``."""

import re
from pathlib import Path

from sphinx.application import Sphinx

from flowbnn_site import api, flows, katex, methods, references, studies, typehints
from flowbnn_site.llms import write_llms

LINKS = {  # links that work on a code host, and the pages of the site that they mean
    r"\]\(\.\./CONTRIBUTING\.md": "](/generated/contributing.md",
    r"\]\(\.\./CHANGELOG\.md": "](/generated/changelog.md",
    r"\]\(\.\./SECURITY\.md": "](/generated/security.md",
    r"\]\(\.\./RELEASING\.md": "](/generated/releasing.md",
    r"\]\(\.\./src/flowbnn/(\w+)/__init__\.py": r"](/generated/api/\1/index.rst",
    r"\]\(results/([\w-]+)/results\.json": r"](/generated/studies/\1.md",
    r"\]\(\.\./examples/README\.rst": "](/generated/gallery/index.rst",
    r"\]\(\.\./examples/plot_(\w+)\.py": r"](/generated/gallery/plot_\1.rst",
}
DOCUMENTS = ("CONTRIBUTING", "CHANGELOG", "SECURITY", "RELEASING")  # of the root of the repository


def generate(app: Sphinx) -> None:
    """Writes all generated pages before Sphinx looks for its sources."""
    root, folder = Path(app.srcdir), Path(app.srcdir) / "generated"
    api.write_pages(folder / "api")
    methods.write_pages(root, folder / "methods")
    flows.write_pages(folder / "flows")
    studies.write_pages(root / "results", folder / "studies")
    for name in DOCUMENTS:
        text = (root.parent / f"{name}.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](/", text)
        text = re.sub(
            r"\]\((CONTRIBUTING|CHANGELOG|SECURITY|RELEASING)\.md", lambda m: f"]({m[1].lower()}.md", text
        )
        api.write(folder / f"{name.lower()}.md", re.sub(r"\[([^]]+)\]\(README\.md\)", r"\1", text))


def rewrite_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replaces links to files of the repository by links to pages."""
    for pattern, page in LINKS.items():
        source[0] = re.sub(pattern, page, source[0])


def skip_member(app: Sphinx, kind: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Skips methods that scikit-learn adds to its estimators, whose docstrings refer to its own pages."""
    return True if (getattr(value, "__module__", None) or "").startswith("sklearn.") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.setup_extension("sphinx.ext.autodoc")
    katex.setup(app)
    typehints.setup(app)
    references.setup(app)
    app.connect("builder-inited", generate, priority=100)  # before the gallery, which runs at 500
    app.connect("autodoc-skip-member", skip_member)
    app.connect("source-read", rewrite_links)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
