import pytest
from hypothesis import given
from hypothesis import strategies as st

from bellmax_apps.ner.schemes import Entity, entities, to_iob2, to_iobes


@st.composite
def annotated(draw):
    """A length, and entities that do not overlap."""
    found, place = [], 0
    for _ in range(draw(st.integers(0, 5))):
        start = place + draw(st.integers(0, 2))
        place = start + draw(st.integers(1, 4))
        found.append(Entity(draw(st.sampled_from(["PER", "creative-work"])), start, place))
    return place + draw(st.integers(0, 2)), found


@given(annotated())
def test_entities_survive_a_round_trip_through_each_scheme(case):
    length, found = case
    assert entities(to_iob2(found, length)) == found
    assert entities(to_iobes(found, length)) == found


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),  # IOB1
        ("I-A B-A I-A", [("A", 0, 1), ("A", 1, 3)]),
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
        ("E-A I-A", [("A", 0, 1), ("A", 1, 2)]),
        ("B-A B-A E-A S-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
        ("", []),
    ],
)
def test_any_sequence_of_tags_has_entities(tags, found):
    assert entities(tags.split()) == [Entity(*entity) for entity in found]
