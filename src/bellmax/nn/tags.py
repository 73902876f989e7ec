"""Tagging schemes, which write segments as one tag per token: which tag may follow which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TagConstraints(NamedTuple):
    """Constraints on sequences of S tags: bool, True where allowed."""

    transitions: Tensor
    """(S, S) ``[current, previous]``: whether a tag may follow another."""
    starts: Tensor
    """(S,): whether a sequence may start with a tag."""
    ends: Tensor
    """(S,): whether a sequence may end with a tag."""


class SchemeConstraints(TagConstraints):
    """Constraints of a scheme, which know the labels of their tags."""

    labels: tuple[str, ...]
    scheme: str

    def _replace(self, **changed: Any) -> SchemeConstraints:
        other = super()._replace(**changed)
        other.labels, other.scheme = self.labels, self.scheme
        return other


class TagNames:
    """Names of tags for messages, and advice about a sequence that the constraints forbid."""

    def __init__(self, constraints: object) -> None:
        self.labels: tuple[str, ...] = getattr(constraints, "labels", ())
        self.scheme: str | None = getattr(constraints, "scheme", None)

    def show(self, tag: int) -> str:
        return f'tag {tag} ("{self.labels[tag]}")' if self.labels else f"tag {tag}"

    def advice(self, tags: Sequence[int] | None, rule: str) -> str:
        """Return advice for a sequence that a rule forbids.

        Args:
            tags: The gold tags, or None if not all of them are known.
            rule: The field of the constraints that forbids them: "starts", "transitions" or "ends".

        """
        known = () if tags is None or not self.labels else tags
        others = [scheme for scheme in _SCHEMES if known and scheme != self.scheme and self._fits(known, scheme)]
        advice = "Check the tagging scheme of the data."
        if others:
            advice = (
                f'The sequence is valid in the scheme "{others[0]}": pass scheme="{others[0]}" to tag_constraints, or '
                f'convert the data to "{self.scheme}".'
            )
        if rule != "transitions":
            free = f"constraints._replace({rule}=torch.ones_like(constraints.{rule}))"
            advice += f" If it is a window of a longer text that {rule} inside an entity, pass {free}."
        return advice

    def _fits(self, tags: Sequence[int], scheme: str) -> bool:
        try:
            allowed = tag_constraints(self.labels, scheme)
        except ValueError:  # labels that the scheme does not have
            return False
        follows = all(bool(allowed.transitions[b, a]) for a, b in pairwise(tags))
        return follows and bool(allowed.starts[tags[0]]) and bool(allowed.ends[tags[-1]])


class _Prefix(NamedTuple):
    """The place of a tag in its segment."""

    opens: bool = False  # may begin a segment
    joins: bool = False  # may follow a tag of the same type with goes_on (IOB1's B begins a segment this way)
    goes_on: bool = False  # may be followed by a tag with joins
    closes: bool = False  # may be the last tag of its segment


_OUTSIDE = _Prefix(opens=True, closes=True)
_FIRST = _Prefix(opens=True, goes_on=True)
_MIDDLE = _Prefix(joins=True, goes_on=True)
_LAST = _Prefix(joins=True, closes=True)
_ANY_END = _Prefix(joins=True, goes_on=True, closes=True)
_SCHEMES = {
    "IOB1": {"I": _Prefix(True, True, True, True), "B": _ANY_END},
    "IOB2": {"B": _Prefix(opens=True, goes_on=True, closes=True), "I": _ANY_END},
    "IOBES": {"B": _FIRST, "I": _MIDDLE, "E": _LAST, "S": _OUTSIDE},
    "BILOU": {"B": _FIRST, "I": _MIDDLE, "L": _LAST, "U": _OUTSIDE},
    "BMES": {"B": _FIRST, "M": _MIDDLE, "E": _LAST, "S": _OUTSIDE},
}


def tag_constraints(labels: Sequence[str], scheme: str = "IOB2") -> TagConstraints:
    """The constraints of a tagging scheme on sequences of ``labels``, for :class:`bellmax.nn.CRF`.

    Args:
        labels: the tags in the order of their indices: "O", outside of every segment, or a prefix of the scheme and
            a type, such as "B-PER". If all segments are of one type, the prefix alone is enough.
        scheme: the meaning of the prefixes, which is strict:

            - "IOB2": B at the first token of a segment, I at the others;
            - "IOB1": I at every token, but B at the first of a segment that directly follows one of its type;
            - "IOBES": B, I and E at the first, the middle and the last tokens, S at the only one;
            - "BILOU": the same with L for E and U for S;
            - "BMES": the same with M for I.

    Returns:
        transitions (S, S) ``[current, previous]``, starts (S,) and ends (S,), bool, True where allowed.

    >>> allowed = tag_constraints(["O", "B-PER", "I-PER"], scheme="IOB2")
    >>> allowed.transitions[2]  # I-PER after O, B-PER, I-PER
    tensor([False,  True,  True])
    >>> allowed.starts
    tensor([ True,  True, False])
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(map(repr, _SCHEMES))}, got {scheme!r}")
    if not labels:
        raise ValueError("labels must hold at least one label, got none")
    if len(set(labels)) < len(labels):
        twice = next(label for n, label in enumerate(labels) if label in labels[:n])
        raise ValueError(f"labels must differ from each other, got {twice!r} twice")
    prefixes = _SCHEMES[scheme]
    tags = []
    for label in labels:
        prefix, dash, kind = label.partition("-")
        if label != "O" and (prefix not in prefixes or (dash and not kind)):
            known = ", ".join(repr(f"{p}-…") for p in prefixes)
            raise ValueError(f"labels of scheme {scheme!r} must be 'O', {known} or a prefix alone, got {label!r}")
        tags.append((_OUTSIDE if label == "O" else prefixes[prefix], kind))
    # Explicitly on the CPU: a model that is built on the meta device needs their values too.
    constraints = SchemeConstraints(
        torch.tensor([[_may_follow(tag, previous) for previous in tags] for tag in tags], device="cpu"),
        torch.tensor([tag.opens for tag, _ in tags], device="cpu"),
        torch.tensor([tag.closes for tag, _ in tags], device="cpu"),
    )
    constraints.labels, constraints.scheme = tuple(labels), scheme
    return constraints


def _may_follow(current: tuple[_Prefix, str], previous: tuple[_Prefix, str]) -> bool:
    (tag, kind), (before, kind_before) = current, previous
    return (before.goes_on and tag.joins and kind == kind_before) or (before.closes and tag.opens)
