"""Types of arguments as a reader writes them: without bounds, module paths and aliases."""

import re

from docutils import nodes
from sphinx.application import Sphinx


def simplify(annotation: str) -> str:
    """Returns an annotation without bounds and without paths.

    >>> simplify("~typing.Annotated[float, Bounds(ge=0, le=1)] | None")
    'float | None'
    >>> simplify("~collections.abc.Mapping[str, ~typing.Literal['a', 'b']]")
    "Mapping[str, 'a' | 'b']"
    """
    text = re.sub(r"~(?!flowbnn)(?:\w+\.)*(?=\w)", "", annotation)
    text = re.sub(r"\bAnnotated\[([^,\[\]]+(?:\[[^\]]*\])?), [^\]]*?\)\]", r"\1", text)
    return re.sub(r"\bLiteral\[([^\]]*)\]", lambda match: " | ".join(match[1].split(", ")), text)


def simplify_all(app: Sphinx, domain: str, objtype: str, content: nodes.Element) -> None:
    """Simplifies the annotations that autodoc has recorded for this page, before it adds them to the arguments."""
    for arguments in app.env.current_document.autodoc_annotations.values():
        for name, annotation in arguments.items():
            arguments[name] = simplify(annotation)


def setup(app: Sphinx) -> None:
    """Registers the simplification ahead of autodoc's own step."""
    app.connect("object-description-transform", simplify_all, priority=100)
