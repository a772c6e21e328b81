"""The README for a package index, which has neither the repository's files nor its pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)]*)\)")


class IndexReadme(MetadataHookInterface):
    """Sets project.readme when a wheel or an sdist is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the text into the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(text)}


def index_readme(text: str) -> str:
    """Return Markdown without relative pictures, and with the path in brackets in place of each relative link."""
    return _LINK.sub(r"\1 (`\2`)", _PICTURE.sub("", text))
