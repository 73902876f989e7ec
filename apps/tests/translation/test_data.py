import pytest
import torch

from bellmax_apps.translation.data import BEGIN, END, UNKNOWN, Corpus, Vocabulary, find, read_pairs

from . import language


def test_reads_parallel_text(tmp_path):
    language.write(tmp_path)
    assert find(tmp_path, "test", "fr").name == "test_2016_flickr.fr"
    assert find(tmp_path, "train", "en").name == "train.en.gz"
    assert read_pairs(tmp_path, "train", ("fr", "en")) == language.pairs(60)


def test_unusable_files_are_reported(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a folder: it must hold parallel text, such as train.fr"):
        find(tmp_path / "nowhere", "train", "fr")
    with pytest.raises(ValueError, match=r"must hold a file for dev that ends in .fr or .fr.gz"):
        find(tmp_path, "dev", "fr")
    (tmp_path / "train.fr").write_text("un\ndeux\n")
    (tmp_path / "train.en").write_text("ONE\n")
    with pytest.raises(ValueError, match=r"as many lines as each other, got train.fr 2 and train.en 1"):
        read_pairs(tmp_path, "train", ("fr", "en"))
    for name in ("train.fr", "train.en"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"train.fr is empty"):
        read_pairs(tmp_path, "train", ("fr", "en"))
    (tmp_path / "train.fr").write_bytes("é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train.fr cannot be read as UTF-8 text"):
        read_pairs(tmp_path, "train", ("fr", "en"))
    (tmp_path / "more.train.fr").touch()
    with pytest.raises(ValueError, match=r"has 2 files for train: more.train.fr, train.fr"):
        find(tmp_path, "train", "fr")
    with pytest.raises(ValueError, match=r"split must be train, dev or test, got 'all'"):
        find(tmp_path, "all", "fr")


LINES = ["A man, in a blue shirt, isn't here.", "A man is here.", "A dog is here; a dog.", "A blue man's shirt."] * 3


@pytest.mark.parametrize("pieces", [0, 60])
def test_text_survives_a_round_trip_through_token_ids(tmp_path, pieces):
    vocabulary = Vocabulary.of("en", LINES, pieces=pieces)
    vocabulary.save(tmp_path / "v.json")
    for copy in (vocabulary, Vocabulary.load(tmp_path / "v.json")):
        for line in LINES[:4]:
            ids = copy.encode(line)
            assert len(copy.tokens(line)) == len(ids)
            assert copy.decode([*ids, END, 5, 5]) == line
            assert all(END < n < len(copy) and n != UNKNOWN for n in ids)
    assert vocabulary.encode("") == []
    assert vocabulary.decode([]) == ""
    assert UNKNOWN in vocabulary.encode("Ж")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"words": [', '"words": [0, ', "words must be a list of strings"),
        ('"words": [', '"words": ["a", ', "words must begin with <pad>, <s>, </s>, <unk>"),
        ('\\"unk_token\\":\\"<unk>', '\\"unk_token\\":\\"<no>', "pieces and words must have the same texts"),
        ('"dog</w>"', '"dig</w>"', "pieces and words must have the same texts"),
        ('"language": "en"', '"language": 1', "language must be text, got 1"),
    ],
)
def test_damaged_vocabularies_are_reported(tmp_path, old, new, message):
    path = tmp_path / "v.json"
    Vocabulary.of("en", LINES, pieces=60).save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"v.json cannot be read as the vocabulary of a run: {message}"):
        Vocabulary.load(path)


def test_rare_words_are_unknown():
    vocabulary = Vocabulary.of("en", ["a a b", "b c"])
    assert vocabulary.words[4:] == ["a", "b"]
    assert vocabulary.encode("a c") == [4, UNKNOWN]


def test_batches_contain_every_pair_once_within_the_limit():
    pairs = [*language.pairs(20), ("", "UN"), ("un " * 60, "UN " * 60)]
    source, target = (Vocabulary.of("en", [p[side] for p in pairs], least=1) for side in (0, 1))
    corpus = Corpus(pairs, source, target)
    members = corpus.within(50)
    assert members == list(range(20))
    for generator in (None, torch.Generator().manual_seed(0)):
        buckets = corpus.buckets(members, 30, generator)
        assert sorted(n for bucket in buckets for n in bucket) == members
        for bucket in buckets:
            batch = corpus.batch(bucket)
            assert batch.target.numel() <= 30 + len(bucket) or len(bucket) == 1
            assert (batch.target[:, 0] == BEGIN).all()
            for n, row, length in zip(bucket, batch.source, batch.lengths, strict=True):
                assert row[length - 1] == END
                assert source.decode(row.tolist()) == pairs[n][0]
