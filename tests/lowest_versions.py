"""Prints the lowest supported version of every dependency in pyproject.toml as a constraint file, for ``make test-lowest``.

Tools of developers are not constrained. A dependency whose lowest release has no wheel for the running Python is raised in ``NEWER``.
"""

import re
import sys
import tomllib
from pathlib import Path

NEWER: dict[str, str] = {}  # packages whose lowest release has no wheel for the running Python
TOOLS = ("dev", "docs")  # extras of developers, who may use the newest
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<version>[0-9.]+)$")


def constraints(project: dict) -> dict[str, str]:
    """Returns the lowest version of each dependency and of each dependency of an extra, by name.

    Args:
        project: Table ``project`` of pyproject.toml.
    """
    extras = [group for name, group in project["optional-dependencies"].items() if name not in TOOLS]
    groups = [project["dependencies"], *extras]
    matches = [REQUIREMENT.match(line) for group in groups for line in group]
    lowest = {match["name"]: match["version"] for match in matches if match}
    return lowest | {name: version for name, version in NEWER.items() if name in lowest}


def main() -> None:
    """Prints one constraint a line. ``2`` becomes ``2.0.*``, the newest release of that series with all of its fixes."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    for name, version in sorted(
        constraints(tomllib.loads(path.read_text(encoding="utf-8"))["project"]).items()
    ):
        series = version if "." in version else f"{version}.0"
        sys.stdout.write(f"{name}=={series}.*\n")


if __name__ == "__main__":
    main()
