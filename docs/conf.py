"""Configuration of the documentation. ``make docs`` builds it without a network into ``build/docs``, with warnings as errors."""

import json
import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))
sys.path.insert(0, str(DOCS.parent / "src"))
os.environ.setdefault("MPLBACKEND", "agg")

import flowbnn  # noqa: E402

project, author, copyright = "flowbnn", "the flowbnn authors", "the flowbnn authors"
version = release = flowbnn.__version__

extensions = [
    "flowbnn_site",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["generated/gallery/**/*.md5", "results/**", "_static/**", "_ext/**"]
root_doc = "index"
templates_path = ["_templates"]
suppress_warnings = [
    "ref.python",
    "config.cache",
    "myst.strikethrough",
]  # short names of types may mean several classes

# Python
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False

# Markdown
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4

# HTML
html_theme = "furo"
html_title = f"flowbnn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "katex"
html_copy_source = False
html_show_sourcelink = False
html_context = {"versions": json.loads((DOCS / "versions.json").read_text()), "current_version": release}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "sidebar/versions.html",
    ]
}
pygments_style, pygments_dark_style = "default", "monokai"

# Gallery
sphinx_gallery_conf = {
    "examples_dirs": [str(DOCS.parent / "examples")],
    "gallery_dirs": ["generated/gallery"],
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "plot_gallery": not os.environ.get("FLOWBNN_DOCS_SKIP_GALLERY"),  # scripts are shown, but not executed
    "min_reported_time": 0,
}
