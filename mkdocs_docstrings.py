"""Docstrings as the site shows them: examples become blocks of code, references plain names."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Plain(griffe.Extension):
    """For mkdocstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """Blocks that begin with a prompt in fences, and :meth:`names` in backquotes alone."""
    text = re.sub(r":(?:class|meth|func|attr|mod):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    blocks = []
    for block in re.split(r"\n[ \t]*\n", text):
        indent = re.match(r"[ \t]*", block)[0]
        if block.lstrip().startswith(">>>"):
            block = f"{indent}```pycon\n{block}\n{indent}```"
        blocks.append(block)
    return "\n\n".join(blocks)
