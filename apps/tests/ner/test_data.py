import gzip
import io
import json
import re
import zipfile

import numpy as np
import pytest
import torch

from bellmax_apps import files
from bellmax_apps.ner.data import Corpus, Sentence, Vocabulary, as_iobes, find, read, read_vectors

from . import corpus


def test_reads_columns(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n  \nPeter NNP I-NP I-PER\n")
    assert read(path) == [Sentence(["EU", "rejects"], ["I-ORG", "O"]), Sentence(["Peter"], ["I-PER"])]
    assert read(path, tag_column=2)[1] == Sentence(["Peter"], ["I-NP"])
    assert read(path, token_column=-1, tag_column=-2)[1] == Sentence(["I-PER"], ["I-NP"])
    assert as_iobes(read(path))[0].tags == ["S-ORG", "O"]
    packed = tmp_path / "dev.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tO\nb\tO\tO\n", r"line 2: expected 2 columns, got 3: 'b\\tO\\tO'"),
        ("a\tO\nb\n", r"line 2: expected 2 columns, got 1: 'b'"),
        ("a\tPER\n", r"line 1: expected a token and a tag \(O, or B-, I-, E- or S- and a type\), got 'a\\tPER'"),
        ("a\n", "line 1: expected a token and a tag"),
        ("\n\n", "holds no sentence"),
        ("a\tBI-PER\n", r"line 1: expected a token and a tag .*, got 'a\\tBI-PER'"),
        ("a\t-PER\n", r"line 1: expected a token and a tag .*, got 'a\\t-PER'"),
        ("a\t" + 999 * "b" + "\n", r"line 1: expected a token and a tag .*, got 'a\\tb{58}'$"),
        ("a\tO\n" + 999 * "b" + "\n", r"line 2: expected 2 columns, got 1: 'b{60}'$"),
    ],
)
def test_malformed_lines_are_reported(tmp_path, text, message):
    path = tmp_path / "train.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_missing_column_is_reported(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("a\tO\n")
    with pytest.raises(ValueError, match="line 1: expected 4 columns, got 2"):
        read(path, tag_column=3)


def test_other_encodings_are_reported(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes("é\tO\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train.tsv cannot be read as UTF-8 text"):
        read(path)


def test_finds_files(tmp_path):
    for name in ("eng.train", "eng.testa", "eng.testb", ".hidden.train"):
        (tmp_path / name).touch()
    assert [find(tmp_path, split).name for split in ("train", "dev", "test")] == ["eng.train", "eng.testa", "eng.testb"]
    (tmp_path / "more.train").touch()
    with pytest.raises(ValueError, match=r"has 2 files for train: eng.train, more.train"):
        find(tmp_path, "train")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"must hold a file with 'dev' or 'valid' or 'testa' in its name, got \[\]"):
        find(tmp_path / "other", "dev")
    with pytest.raises(ValueError, match=r"split must be train, dev or test, got 'all'"):
        find(tmp_path, "all")


def test_reads_vectors(tmp_path):
    text, arrays = tmp_path / "some.vec", tmp_path / "some.npz"
    text.write_text("2 3\nthe 1 2 3\né 4 5 6\n", encoding="utf-8")
    np.savez(arrays, words=np.array(["the", "é"]), vectors=np.arange(1.0, 7).reshape(2, 3))
    for path in (text, arrays):
        words, vectors = read_vectors(path)
        assert words == ["the", "é"]
        assert vectors.dtype == np.float32
        assert vectors.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert read_vectors(path, most=1)[0] == ["the"]
    text.write_text("the 1 2\nof 1\n")
    with pytest.raises(ValueError, match=r"line 2: expected a word and 2 numbers, got 'of 1"):
        read_vectors(text)
    np.savez(arrays, other=np.zeros(1))
    with pytest.raises(ValueError, match=r"must hold the arrays 'words' and 'vectors', got \['other'\]"):
        read_vectors(arrays)
    arrays.write_bytes(arrays.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"some.npz cannot be read as an .npz of word vectors: "):
        read_vectors(arrays)
    np.savez(arrays, words=np.array(["the", "é"]), vectors=np.array([[1.0], [np.nan]]))
    text.write_text("the 1\né inf\n", encoding="utf-8")
    for path in (text, arrays):
        with pytest.raises(
            ValueError, match=r"must hold finite numbers, got others for 1 words, the first of them 'é'"
        ):
            read_vectors(path)


def npz(path, words, vectors):
    """Write an .npz of two arrays. Bytes are written as they are, to damage the archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("words.npy", words), ("vectors.npy", vectors)):
            file = io.BytesIO()
            np.save(file, content)
            archive.writestr(name, content if isinstance(content, bytes) else file.getvalue())
    return path


TWO, ROWS = np.array(["a", "b"]), np.ones((2, 3))


@pytest.mark.parametrize(
    ("words", "vectors", "message"),
    [
        (b"no array", ROWS, "text and numbers, got |S8 and float64"),
        (TWO, b"no array", "text and numbers, got <U1 and |S8"),
        (np.array([b"a", b"b"]), ROWS, "text and numbers, got |S1 and float64"),
        (TWO, ROWS * 1j, "text and numbers, got <U1 and complex128"),
        (TWO, ROWS[:1], r"a vector for each word, got (2,) and (1, 3)"),
        (np.array([0x110000, 1], "<u4").view("<U1"), ROWS, ""),
        (np.array([0xD800, 1], "<u4").view("<U1"), ROWS, "surrogates not allowed"),
        (TWO, ROWS * 1e39, "must hold finite numbers, got others for 2 words, the first of them 'a'"),
    ],
)
def test_arrays_of_wrong_types_or_shapes_are_reported(tmp_path, words, vectors, message):
    path = npz(tmp_path / "a.npz", words, vectors)
    with pytest.raises(ValueError, match=rf"a\.npz .*{re.escape(message)}"):
        read_vectors(path)


def test_arrays_that_expand_too_far_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, words=np.array(["a"] * 1000), vectors=np.zeros((1000, 50), np.float32))
    assert len(read_vectors(path)[0]) == 1000
    monkeypatch.setattr(files, "EXPANDED", 100_000)
    monkeypatch.setattr(np.lib.format, "read_array", None)  # fails if an array is read before the check
    with pytest.raises(ValueError, match=r"a.npz cannot be read as an .npz of word vectors: it expands to more than"):
        read_vectors(path)


def test_arrays_of_python_2_are_read_without_a_warning(tmp_path):
    file = io.BytesIO()
    np.save(file, ROWS)
    path = npz(tmp_path / "a.npz", TWO, file.getvalue().replace(b"(2, 3), }  ", b"(2L, 3L), }"))
    with pytest.warns(UserWarning, match="created on Python 2"):
        np.load(path)["vectors"]
    assert read_vectors(path)[1].tolist() == ROWS.tolist()


def test_numbers_that_overflow_float32_are_reported(tmp_path):
    path = tmp_path / "a.vec"
    path.write_text("a 1 2\nb 1e39 1\n")
    with pytest.raises(ValueError, match=r"must hold finite numbers, got others for 1 words, the first of them 'b'"):
        read_vectors(path)


def test_a_nonbreaking_space_belongs_to_a_token(tmp_path):
    path = tmp_path / "train.txt"
    for separator in (" ", "\t"):
        path.write_text(f"10\u00a0000{separator}O\nRome{separator}B-LOC\n", encoding="utf-8")
        assert read(path) == [Sentence(["10\u00a0000", "Rome"], ["O", "B-LOC"])]
    path.write_text("\tO\n")
    with pytest.raises(ValueError, match=r"train.txt, line 1: expected a token and a tag"):
        read(path)


def test_unknown_types_are_reported_with_file_and_line(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text("Ann\tB-PER\n\nit\tO\nfilm\tB-NEW\n")
    with pytest.raises(ValueError, match=r"dev.tsv, line 4: the tag 'B-NEW' has a type .* whose types are LOC, PER"):
        read(path, kinds={"PER", "LOC"})


def test_long_words_are_spelled_by_both_ends():
    long = "a" * 150 + "b" * 300_000 + "c" * 150
    vocabulary = Vocabulary.of([Sentence([long, "abc"], ["O", "O"])])
    batch = Corpus([Sentence([long, "abc"], [])], vocabulary).batch([0])
    assert batch.letter_lengths.tolist() == [200, 3]
    assert batch.letters[0].tolist() == [1] * 100 + [3] * 100


def test_corpus_converts_words_letters_and_tags_to_indices(tmp_path):
    sentences = as_iobes([Sentence(["Ann", "sees", "sees"], ["B-PER", "O", "O"])])
    vocabulary = Vocabulary.of(sentences, more_words=["rome"])
    assert vocabulary.words == ("Ann", "sees", "rome")
    assert vocabulary.labels == ("O", "B-PER", "I-PER", "E-PER", "S-PER")
    assert vocabulary.rare == {"Ann"}
    vocabulary.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json") == vocabulary
    batch = Corpus([Sentence(["ROME", "zoo"], []), *sentences], vocabulary).batch([0, 1])
    assert batch.words.tolist() == [[3, 0, 0], [1, 2, 2]]  # in lower case, unknown, padding
    assert batch.lengths.tolist() == [2, 3]
    assert batch.tags is None
    spellings = [batch.letters[form, : batch.letter_lengths[form]].tolist() for form in batch.forms[1].tolist()]
    assert spellings == [[1 + vocabulary.letters.index(letter) for letter in token] for token in sentences[0].tokens]
    with pytest.raises(ValueError, match=r"tags must occur in the training data, which has .*, got 'B-LOC'"):
        Corpus([Sentence(["a"], ["B-LOC"])], vocabulary)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": "abc"}, "words must be a list of strings"),
        ({"letters": [1]}, "letters must be a list of strings"),
        ({"words": ["\ud800"]}, "surrogates not allowed"),
        ({"labels": []}, "labels must be O, and B-, I-, E- and S- of each type, got []"),
        ({"labels": ["O", "B-A", "I-A", "0-A", "S-A"]}, "labels must be O, and B-, I-, E- and S- of each type"),
        ({"labels": ["O", "B-", "I-", "E-", "S-"]}, "labels must be O, and B-, I-, E- and S- of each type"),
        ({"labels": ["O", *2 * ["B-A", "I-A", "E-A", "S-A"]]}, "labels must be O, and B-, I-, E- and S- of each type"),
    ],
)
def test_damaged_vocabularies_are_reported(tmp_path, change, message):
    path = tmp_path / "v.json"
    Vocabulary.of([Sentence(["Ann"], ["S-PER"])]).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"v.json cannot be read as the vocabulary of a run: .*{re.escape(message)}"):
        Vocabulary.load(path)


def test_rare_words_are_unknown_half_of_the_time():
    sentences = [Sentence([f"w{n}", "the"], ["O", "O"]) for n in range(200)]
    corpus_ = Corpus(sentences, Vocabulary.of(sentences))
    words = corpus_.batch(range(200), generator=torch.Generator().manual_seed(0)).words
    assert 70 < int((words[:, 0] == 0).sum()) < 130
    assert (words[:, 1] > 0).all()
    assert (corpus_.batch(range(200)).words > 0).all()


def test_batches_contain_every_sentence_once_within_the_limits():
    lengths = [1, 5, 9, 300, 4, 4, 7, 2, 30, 30, 31]
    sentences = [Sentence(["a"] * n, ["O"] * n) for n in lengths]
    corpus_ = Corpus(sentences, Vocabulary.of(sentences))
    for generator in (None, torch.Generator().manual_seed(1)):
        batches = corpus_.buckets(4, 64, generator)
        assert sorted(n for members in batches for n in members) == list(range(len(lengths)))
        for members in batches:
            assert len(members) <= 4
            assert len(members) == 1 or len(members) * max(lengths[n] for n in members) <= 64
    shuffled = [corpus_.buckets(4, 64, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]


def test_toy_corpus_has_both_types_of_entities(tmp_path):
    corpus.write(tmp_path)
    assert {tag for s in read(find(tmp_path, "train")) for tag in s.tags} == {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}
