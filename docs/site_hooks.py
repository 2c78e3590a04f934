"""For mkdocs: pages and pictures that stand elsewhere in the repository become part of the site.

Pages link to them as files of the repository (`../CHANGELOG.md`), so that the links work where the repository is read.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# File of the repository: its place in the site, and its title in the menu.
PAGES = {
    "ARCHITECTURE.md": ("project/architecture.md", "Architecture"),
    "CONTRIBUTING.md": ("project/contributing.md", "Contributing"),
    "CHANGELOG.md": ("project/changelog.md", "Changes"),
    "SECURITY.md": ("project/security.md", "Security"),
    "bench/README.md": ("project/benchmarks.md", "Benchmarks"),
    "diffscore_fast/backbones/mini/MODEL_CARD.md": ("project/model-card.md", "Model card of mini"),
}
PICTURES = ("bench/results/bounds.png", "bench/results/scaling.png")
PLACES = {name: place for name, (place, _) in PAGES.items()} | {name: name for name in PICTURES}
SOURCES = {place: name for name, place in PLACES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the pages that exist to the menu."""
    there = [{title: place} for name, (place, title) in PAGES.items() if (ROOT / name).is_file()]
    config.nav = [*config.nav, {"Project": there}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures to the site."""
    for name, place in PLACES.items():
        if (ROOT / name).is_file():
            content = (ROOT / name).read_bytes()
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Point links between files of the repository to their places in the site; drop those that are not in it."""
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        target, separator, heading = link.partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PLACES.get(name, name.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            if name.startswith("docs/"):
                return match[0]  # a mistake, which mkdocs names
            return text
        return f"{mark}[{text}]({posixpath.relpath(found, posixpath.dirname(place) or '.')}{separator}{heading})"

    return LINK.sub(moved, markdown)
