"""Makes pages of the site. Their files are also read on a code host."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "zh/index.md": "README.zh-CN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "model-card.md": "demo/MODEL_CARD.md",
    "records.md": "bench/results/README.md",
}
"""Page of the site -> file outside of docs/."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(\s*```\w+) .+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for target, source in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links into links between pages. Remove the tests' marks from code fences."""
    target = page.file.src_uri
    folder = (ROOT / PAGES[target]).parent if target in PAGES else (ROOT / "docs" / target).parent

    def link(match: re.Match[str]) -> str:
        picture, text, path, heading = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        file = (folder / path).resolve()
        if not file.exists():
            return match.group(0)  # mkdocs reports it
        name = file.relative_to(ROOT).as_posix()
        pages = {source: page for page, source in PAGES.items()}
        uri = pages.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else "")
        if not uri:
            return f"{text} (`{name}`)"  # a file of the repository that is no page
        up = "../" * target.count("/")
        return f"{picture}[{text}]({up}{uri}{heading})"

    return _FENCE.sub(r"\1", _LINK.sub(link, markdown))
