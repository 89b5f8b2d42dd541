"""References in docstrings: private paths and other spellings of a public name lead to its page."""

import importlib
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from flowbnn_site.api import canonical_names


def find(target: str) -> tuple[Any, list[str]] | None:
    """Returns the object of the longest prefix of a dotted path that is a module attribute, and the remaining attributes.

    Args:
        target: Dotted path such as ``flowbnn.posterior.base.Posterior.predict``.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        if hasattr(module, parts[length]):
            return getattr(module, parts[length]), parts[length + 1 :]
    return None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Returns a link to the page of the public name that a reference means; None if it means a private one."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("flowbnn."):
        return None
    domain = env.domains["py"]
    if package := f"module-{target}" if target in app.config.flowbnn_packages else "":
        room = target.removeprefix("flowbnn").lstrip(".").replace(".", "-") or "flowbnn"
        uri = app.builder.get_relative_uri(node["refdoc"], f"generated/api/{room}/index")
        return nodes.reference("", "", content, internal=True, refuri=uri, reftitle=package)
    found = find(target)
    name = found and app.config.flowbnn_names.get(id(found[0]))
    if not found or not name:
        return None
    path = ".".join([name.path, *found[1]])
    if path not in domain.objects:
        path = name.path
    entry = domain.objects.get(path)
    if entry is None:
        return None
    uri = f"{app.builder.get_relative_uri(node['refdoc'], entry.docname)}#{entry.node_id}"
    return nodes.reference("", "", content, internal=True, refuri=uri, reftitle=path)


def setup(app: Sphinx) -> None:
    """Registers the resolver."""
    from flowbnn_site.api import packages

    app.add_config_value("flowbnn_names", canonical_names(), "")
    app.add_config_value("flowbnn_packages", packages(), "")
    app.connect("missing-reference", resolve)
