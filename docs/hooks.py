"""MkDocs hooks: links that leave docs/ for a file of the repository.

The pages are read on a code host and as a site. On a code host `../examples/tune_grid.py` is a link; the site has no
such page. There the link becomes the file's name, or a link to the code host where mkdocs.yml has a `repo_url`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((\.\.?/[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with links to files outside of docs/ rewritten. Raises PluginError for a file that does not exist."""
    here = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(here, target))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {target} does not exist in the repository")
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(rewritten, markdown)
