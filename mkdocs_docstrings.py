"""Docstrings as the site shows them: examples become code blocks, and references become links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|attr|mod):`~?([\w.]+)`")
BASE = "bellmax.distribution.PathDistribution"  # its members are documented once, and not in every structure


class Plain(griffe.Extension):
    """For mkdocstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        pkg.set_member("dtw", pkg["series.pairs.dtw"])  # in Python, the function hides the module of the same name
        for obj in objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = plain(obj.docstring.value, obj)


def objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from objects(member)


def plain(text: str, obj: griffe.Object) -> str:
    """Put blocks that begin with a prompt into fences, and convert :meth:`names` to links."""
    text = ROLE.sub(lambda m: link(m[1], obj), text)
    blocks = []
    for block in re.split(r"\n[ \t]*\n", text):
        indent = re.match(r"[ \t]*", block)[0]
        if block.lstrip().startswith(">>>"):
            block = f"{indent}```pycon\n{block}\n{indent}```"
        blocks.append(block)
    return "\n\n".join(blocks)


def link(name: str, obj: griffe.Object) -> str:
    """A link to the place of ``name`` in the API reference, or plain code if there is none."""
    return f'<autoref identifier="{path_of(name, obj)}" optional><code>{name.rpartition(".")[2]}</code></autoref>'


def path_of(name: str, obj: griffe.Object) -> str:
    """The full path of a name that a docstring mentions: in its scope, in the base class, or in the package."""
    for scope in (obj, obj.package[BASE.removeprefix("bellmax.")], obj.package):
        with suppress(griffe.NameResolutionError):
            return scope.resolve(name)
    return name
