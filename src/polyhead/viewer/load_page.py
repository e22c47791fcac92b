"""The page of a server's load: markup, style, scripts and texts; the figures come from the server.

It holds nothing about the server. Where the server has a key the page asks for it, keeps it in the
tab's session, and sends it with each request; it may reach no other address.
"""

from __future__ import annotations

import re
from importlib import resources

from polyhead.viewer.page import asset, policy, texts_json

_PARTS = resources.files(__package__) / "load"


def render() -> str:
    """The page as one HTML string, in the browser's language."""
    style, theme = asset("page.css") + _own("load.css"), asset("theme.js")
    scripts = [asset("dom.js"), asset("texts.js"), _own("load.js")]
    script = '(() => {\n"use strict";\n' + "\n".join(scripts) + "})();\n"
    parts = {
        "policy": policy(style, theme, script, connect=True),
        "style": style,
        "theme": theme,
        "texts": texts_json(None, "load"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _own("load.html"))


def _own(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
