"""Checks a built site: every link has a target, nothing loads from the network, and every public name has a page.

``python docs/_ext/check_site.py build/docs``
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flowbnn_site.api import canonical_names
from sphinx.util.inventory import InventoryFile

RESOURCES = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Anchors, links and resources of a page.

    Args:
        path: File of the page.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.resources: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects what a tag refers to and how it can be referred to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in RESOURCES and value:
                self.resources.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def link_problems(root: Path) -> list[str]:
    """Returns one line for every link without a target and every resource from the network."""
    pages = {path.resolve(): Page(path) for path in root.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(root.resolve())
        problems += [f"{where}: loads {url}" for url in page.resources if urlsplit(url).netloc]
        for url in page.links | page.resources:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                problems.append(f"{where}: {url} has no target")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{where}: {url} has no anchor")
    return problems


def missing_names(root: Path) -> list[str]:
    """Returns one line for every public name that the inventory of the site does not list."""
    inventory = InventoryFile.loads((root / "objects.inv").read_bytes(), uri="")
    listed = {name for kind, entries in inventory.data.items() if kind.startswith("py:") for name in entries}
    return [f"{name.path} has no page" for name in canonical_names().values() if name.path not in listed]


def main() -> int:
    """Prints all problems. Returns 1 if there are any."""
    root = Path(sys.argv[1])
    problems = [*link_problems(root), *missing_names(root)]
    sys.stdout.write("".join(f"{problem}\n" for problem in sorted(problems)))
    sys.stdout.write(f"{len(problems)} problems\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
