"""Math renderer that writes formulas as TeX for the vendored KaTeX, so that no page loads anything from the network."""

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

ALIGNED = r"\begin{{aligned}}{}\end{{aligned}}"


def visit_inline(self: Any, node: nodes.math) -> None:
    """Writes a formula within a line."""
    self.body.append(f'<span class="tex">{escape(node.astext())}</span>')
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    """Writes a formula on lines of its own. Several lines are aligned, as in Sphinx's own renderers."""
    text = node.astext().strip()
    text = ALIGNED.format(text) if r"\\" in text and r"\begin" not in text else text
    self.body.append(self.starttag(node, "div", CLASS="tex-block"))
    self.body.append(f'<div class="tex tex-display">{escape(text)}</div></div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Registers the renderer and its files."""
    app.add_html_math_renderer("katex", (visit_inline, None), (visit_block, None))
    app.add_css_file("katex/katex.min.css")
    app.add_js_file("katex/katex.min.js")
    app.add_js_file("render-math.js")
