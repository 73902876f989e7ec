import pytest
import torch

from bellmax_apps.ner.data import Corpus, Sentence, Vocabulary, as_iobes
from bellmax_apps.ner.model import Tagger
from bellmax_apps.ner.tagging import tag

SENTENCES = as_iobes(
    [
        Sentence(["Ann", "sees", "Bob", "Lee"], ["B-PER", "O", "B-PER", "I-PER"]),
        Sentence(["in", "Rome"], ["O", "B-LOC"]),
        Sentence(["walks"], ["O"]),
    ]
)


def tagger(**more):
    torch.manual_seed(0)
    vocabulary = Vocabulary.of(SENTENCES)
    return Tagger(vocabulary, word_size=6, letter_size=4, hidden_size=5, **more), Corpus(SENTENCES, vocabulary)


@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_a_batch_gives_the_results_of_its_sentences(omega):
    model, corpus = tagger(omega=omega)
    model.eval()
    scores = model.emissions(corpus.batch([0, 1, 2]))
    for n, sentence in enumerate(SENTENCES):
        expected = model.emissions(corpus.batch([n]))[0]
        torch.testing.assert_close(scores[n, : len(sentence.tokens)], expected)
    losses = [model(corpus.batch([n])) for n in range(3)]
    torch.testing.assert_close(model(corpus.batch([0, 1, 2])), torch.stack(losses).sum())


@pytest.mark.parametrize("loss", ["surrogate", "relaxed"])
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_overfits_three_sentences(omega, loss):
    model, corpus = tagger(omega=omega, loss=loss, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        model(corpus.batch([0, 1, 2])).backward()
        optimizer.step()
    sequences = model.distribution(corpus.batch([0, 1, 2])).decode()
    for row, sentence in zip(sequences.tolist(), SENTENCES, strict=True):
        assert [model.labels[tag] for tag in row if tag >= 0] == sentence.tags


@pytest.mark.parametrize("sparse", [False, True])
def test_the_embedding_of_unknown_words_stays_zero(sparse):
    model, _ = tagger(sparse=sparse)
    corpus = Corpus([Sentence(["zzz", "Ann"], ["O", "S-PER"])], Vocabulary.of(SENTENCES))
    batch = corpus.batch([0])
    assert batch.words[0, 0] == 0
    model(batch).backward()
    gradient = model.words.weight.grad
    assert gradient.is_sparse == sparse
    assert not model.words.weight[0].any()
    assert not gradient.to_dense()[0].any()
    assert gradient.to_dense()[1].any()


def test_use_vectors_sets_rows_of_the_embedding():
    model, _ = tagger()
    model.use_vectors({2: torch.arange(6.0)})
    assert model.words.weight[2].tolist() == list(range(6))


def test_probabilities_are_at_most_1_for_huge_scores():
    model, _ = tagger()
    with torch.no_grad():
        model.to_emissions.bias[[model.labels.index(label) for label in ("O", "B-PER")]] = torch.tensor([1e16, 1e37])
    (tagged,) = tag(model.eval(), Vocabulary.of(SENTENCES), [["walks"]])
    assert all(0 <= reading.probability <= 1 for reading in tagged.readings)
