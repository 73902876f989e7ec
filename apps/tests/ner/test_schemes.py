import pytest
from hypothesis import given
from hypothesis import strategies as st

from bellmax_apps.ner.schemes import Entity, entities, to_iob2, to_iobes


@st.composite
def sentences(draw):
    """The length of a sentence, and entities that do not overlap."""
    spans, stop = [], 0
    for _ in range(draw(st.integers(0, 5))):
        start = stop + draw(st.integers(0, 2))
        stop = start + draw(st.integers(1, 4))
        spans.append(Entity(draw(st.sampled_from(["PER", "creative-work"])), start, stop))
    return stop + draw(st.integers(0, 2)), spans


@given(sentences())
def test_entities_survive_a_round_trip_through_each_scheme(sentence):
    length, spans = sentence
    assert entities(to_iob2(spans, length)) == spans
    assert entities(to_iobes(spans, length)) == spans


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),  # IOB1
        ("I-A B-A I-A", [("A", 0, 1), ("A", 1, 3)]),
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
        ("E-A I-A", [("A", 0, 1), ("A", 1, 2)]),
        ("B-A B-A E-A S-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
        ("", []),
    ],
)
def test_any_sequence_of_tags_has_entities(tags, spans):
    assert entities(tags.split()) == [Entity(*span) for span in spans]
