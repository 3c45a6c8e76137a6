"""The page as one file: its parts and the payload inside, nothing outside.

``page.html`` names its parts; each is put in place of its name. The policy in the page's head lets exactly these
scripts run, by their hashes, and no address be reached.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent
LANGUAGES = ("en", "ja")
MOST_CODE = 150_000  # bytes of all but the payload; the tests hold it

_PART = re.compile(r'<link rel="stylesheet" href="([\w./-]+)">|<script src="([\w./-]+)"></script>')
_DATA = re.compile(r'(<script type="application/json" id="payload">).*?(</script>)', re.DOTALL)
_COMMENTS = re.compile(r"^\s*/\*.*?\*/[ \t]*$|^\s*//[^\n]*$", re.DOTALL | re.MULTILINE)
_HEAD = '<meta charset="utf-8">\n'


@dataclass(frozen=True)
class Page:
    """A page with its data; a notebook shows it in a frame that can reach nothing of the notebook."""

    payload: Mapping[str, Any]

    def html(self) -> str:
        """The whole file."""
        hashes: dict[str, list[str]] = {"script": [], "style": []}

        def inlined(match: re.Match[str]) -> str:
            tag, name = ("style", match[1]) if match[1] else ("script", match[2])
            content = without_comments((PARTS / name).read_text(encoding="utf-8"))
            assert not re.search(r"</(script|style)|<!--", content, re.IGNORECASE), f"{name} would end its own tag"
            hashes[tag].append(_hash(content))
            return f"<{tag}>{content}</{tag}>"

        page = _PART.sub(inlined, (PARTS / "page.html").read_text(encoding="utf-8"))
        page = page.replace(_HEAD, f"{_HEAD}{self._policy(hashes)}\n", 1)
        data = as_script({**self.payload, "strings": {language: strings(language) for language in LANGUAGES}})
        return _DATA.sub(lambda match: match[1] + data + match[2], page, count=1)

    def _policy(self, hashes: Mapping[str, list[str]]) -> str:
        source = "'self'" if self.payload.get("server") else "'none'"
        allowed = {tag: " ".join(hashes[tag]) or "'none'" for tag in ("script", "style")}
        rules = [
            "default-src 'none'",
            f"script-src {allowed['script']}",
            f"style-src {allowed['style']}",
            "img-src data: blob:",
            f"connect-src {source}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
        return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'

    def _repr_html_(self) -> str:
        page = html.escape(self.html(), quote=True).encode("ascii", "xmlcharrefreplace").decode("ascii")
        return (
            '<iframe sandbox="allow-scripts allow-downloads" style="width: 100%; height: 800px; border: 0" '
            f'srcdoc="{page}"></iframe>'
        )


def strings(language: str) -> dict[str, str]:
    """Every sentence of the page in one of LANGUAGES, by its key."""
    return json.loads((Path(__file__).parent / f"strings.{language}.json").read_text(encoding="utf-8"))


def without_comments(part: str) -> str:
    """A script or style without the comments that fill lines, indents and empty lines; all else stays as it is."""
    return "".join(f"{line.strip()}\n" for line in _COMMENTS.sub("", part).splitlines() if line.strip())


def as_script(payload: Mapping[str, Any]) -> str:
    r"""JSON that ends no tag, whatever text is in it: ``<`` is ``\u003c``, all beyond ASCII is escaped too."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"
