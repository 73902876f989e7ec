"""Tagging schemes such as IOB2, and the constraints that they put on sequences of tags."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bellmax.names import answers_near_misses


class TagConstraints(NamedTuple):
    """The result of :func:`tag_constraints`: the tags that may start a sequence, follow each other, and end a sequence.

    >>> constraints = tag_constraints(["O", "B-PER", "I-PER"])
    >>> constraints.ends
    tensor([True, True, True])
    """

    transitions: Tensor
    """(S, S) ``[current, previous]``, True if the current tag may follow the previous tag."""
    starts: Tensor
    """(S,), True if a sequence may start with the tag."""
    ends: Tensor
    """(S,), True if a sequence may end with the tag."""

    def __repr__(self) -> str:
        forbidden = int((~self.transitions).sum())
        return f"TagConstraints(num_tags={len(self.starts)}, forbidden_transitions={forbidden})"


class SchemeConstraints(TagConstraints):
    """Constraints of a tagging scheme, with the names of scheme and labels for error messages."""

    labels: tuple[str, ...]
    scheme: str

    def _replace(self, **changes: Any) -> SchemeConstraints:
        """Return a copy with changed fields, as for any NamedTuple, that keeps the names."""
        copy = super()._replace(**changes)
        copy.labels, copy.scheme = self.labels, self.scheme
        return copy

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(scheme={self.scheme!r}, ", 1)


class TagNames:
    """Names of tags for error messages, and advice about a sequence that the constraints forbid."""

    def __init__(self, constraints: object) -> None:
        self.labels: tuple[str, ...] = getattr(constraints, "labels", ())
        self.scheme: str | None = getattr(constraints, "scheme", None)

    def show(self, tag: int) -> str:
        """Return a tag for a message: its index, and its label if known."""
        return f'tag {tag} ("{self.labels[tag]}")' if self.labels else f"tag {tag}"

    def advice(self, tags: Sequence[int] | None, rule: str) -> str:
        """Return advice for a sequence that a rule forbids.

        Args:
            tags: The gold tags, or None if not all of them are known.
            rule: The field of the constraints that forbids them: "starts", "transitions" or "ends".

        """
        known = () if tags is None or not self.labels else tags
        schemes = [scheme for scheme in _SCHEMES if known and scheme != self.scheme and self._is_valid(known, scheme)]
        advice = "Check the tagging scheme of the data."
        if schemes:
            advice = (
                f'The sequence is valid in the scheme "{schemes[0]}": pass scheme="{schemes[0]}" to tag_constraints, '
                f'or convert the data to "{self.scheme}".'
            )
        if rule != "transitions":
            free = f"constraints._replace({rule}=torch.ones_like(constraints.{rule}))"
            advice += f" If it is a window of a longer text that {rule} inside an entity, pass {free}."
        return advice

    def _is_valid(self, tags: Sequence[int], scheme: str) -> bool:
        """True if another tagging scheme has all labels and allows the sequence of tags."""
        try:
            allowed = _constraints(self.labels, scheme)
        except ValueError:  # the scheme does not have all labels
            return False
        is_valid_inside = all(bool(allowed.transitions[b, a]) for a, b in pairwise(tags))
        return is_valid_inside and bool(allowed.starts[tags[0]]) and bool(allowed.ends[tags[-1]])


class _Prefix(NamedTuple):
    """Rules for a prefix of a tagging scheme: where its tags may occur.

    A tag may follow another tag if the other closes and this one opens, or if the other continues, this one joins, and
    the types are equal.
    """

    opens: bool = False  # may begin a segment after any closed segment
    joins: bool = False  # may follow a tag of the same type (IOB1's B begins a segment this way)
    continues: bool = False  # may be followed by a tag of the same type that joins
    closes: bool = False  # may be the last tag of its segment


_OUTSIDE = _Prefix(opens=True, closes=True)
_FIRST = _Prefix(opens=True, continues=True)
_MIDDLE = _Prefix(joins=True, continues=True)
_LAST = _Prefix(joins=True, closes=True)
_ANY_END = _Prefix(joins=True, continues=True, closes=True)
_SCHEMES = {
    "IOB1": {"I": _Prefix(True, True, True, True), "B": _ANY_END},
    "IOB2": {"B": _Prefix(opens=True, continues=True, closes=True), "I": _ANY_END},
    "IOBES": {"B": _FIRST, "I": _MIDDLE, "E": _LAST, "S": _OUTSIDE},
    "BILOU": {"B": _FIRST, "I": _MIDDLE, "L": _LAST, "U": _OUTSIDE},
    "BMES": {"B": _FIRST, "M": _MIDDLE, "E": _LAST, "S": _OUTSIDE},
}


_OTHER_SCHEMES = {
    "BIO": "IOB2",
    "BIO2": "IOB2",
    "IOB": "IOB1 or IOB2",
    "BIOES": "IOBES",
    "BIOUL": "BILOU",
    "BILUO": "BILOU",
}


@answers_near_misses
def tag_constraints(labels: Sequence[str], scheme: str = "IOB2") -> TagConstraints:
    """Return the constraints of a tagging scheme such as IOB2: which tags may start, follow each other, and end.

    Pass the result to :class:`bellmax.nn.CRF`.

    Args:
        labels: The names of the tags, in the order of their indices. A name is "O" (outside of every segment), or a
            prefix and the type of the segment, such as "B-PER". If all segments have the same type, the prefix alone is
            enough.
        scheme: The scheme, which defines the meaning of the prefixes:

            - "IOB2" (the default): B marks the first token of a segment, I the other tokens of the segment.
            - "IOB1": I marks the tokens of a segment. If a segment directly follows another segment of the same type, B
              marks its first token.
            - "IOBES": B marks the first token, I the middle tokens, E the last token, and S a segment of one token.
            - "BILOU": as IOBES, with L instead of E and U instead of S.
            - "BMES": as IOBES, with M instead of I.

    Returns:
        A :class:`TagConstraints` for S tags with three bool tensors, True where allowed: ``transitions`` (S, S)
        ``[current, previous]``, ``starts`` (S,) for the first tag and ``ends`` (S,) for the last tag.

    >>> allowed = tag_constraints(["O", "B-PER", "I-PER"], scheme="IOB2")
    >>> allowed.transitions[2]  # I-PER after O, B-PER, I-PER
    tensor([False,  True,  True])
    >>> allowed.starts
    tensor([ True,  True, False])
    """
    if scheme not in _SCHEMES:
        upper = str(scheme).upper()
        name = _OTHER_SCHEMES.get(upper, upper if upper in _SCHEMES else None)
        hint = f"; {scheme} is called {name} here" if name else ""
        raise ValueError(f"scheme must be one of {', '.join(map(repr, _SCHEMES))}, got {scheme!r}{hint}")
    if len(labels) == 0:
        raise ValueError("labels must hold at least one label, got none")
    if not all(isinstance(label, str) for label in labels):
        raise ValueError(f"labels must be a sequence of strings, such as list(id2label.values()), got {labels!r}")
    if len(set(labels)) < len(labels):
        duplicate = next(label for n, label in enumerate(labels) if label in labels[:n])
        raise ValueError(f"labels must differ from each other, got {duplicate!r} twice")
    constraints = _constraints(labels, scheme)
    unused = [label for label, is_used in zip(labels, _are_used(constraints), strict=True) if not is_used]
    if unused:
        warnings.warn(
            f"no sequence of the scheme {scheme!r} can contain {unused[0]!r} with these labels: a label or the scheme "
            "may be wrong",
            stacklevel=3,
        )
    return constraints


def _constraints(labels: Sequence[str], scheme: str) -> SchemeConstraints:
    """Return the constraints of a scheme. Raises ``ValueError`` if a label has a prefix that the scheme lacks."""
    prefixes = _SCHEMES[scheme]
    tags = []
    for label in labels:
        prefix, dash, kind = label.partition("-")
        if label != "O" and (prefix not in prefixes or (dash and not kind)):
            valid = ", ".join(repr(f"{p}-…") for p in prefixes)
            hint = ". These are the default names in transformers: pass id2label" if label.startswith("LABEL_") else ""
            raise ValueError(f"labels of scheme {scheme!r} must be 'O', {valid} or a prefix alone, got {label!r}{hint}")
        tags.append((_OUTSIDE if label == "O" else prefixes[prefix], kind))
    # Explicitly on the CPU: a model that is built on the meta device needs these values, too.
    constraints = SchemeConstraints(
        torch.tensor([[_may_follow(tag, previous) for previous in tags] for tag in tags], device="cpu"),
        torch.tensor([tag.opens for tag, _ in tags], device="cpu"),
        torch.tensor([tag.closes for tag, _ in tags], device="cpu"),
    )
    constraints.labels, constraints.scheme = tuple(labels), scheme
    return constraints


def _are_used(constraints: TagConstraints) -> list[bool]:
    """Return for each label True if an allowed sequence contains it."""
    transitions, from_start, to_end = constraints
    for _ in from_start:
        from_start = from_start | (transitions & from_start).any(-1)
        to_end = to_end | (transitions.T & to_end).any(-1)
    used: list[bool] = (from_start & to_end).tolist()
    return used


def _may_follow(current: tuple[_Prefix, str], previous: tuple[_Prefix, str]) -> bool:
    """True if a tag may follow another one. A tag is given by its prefix and its type."""
    (prefix, kind), (previous_prefix, previous_kind) = current, previous
    stays_in_segment = previous_prefix.continues and prefix.joins and kind == previous_kind
    return stays_in_segment or (previous_prefix.closes and prefix.opens)
