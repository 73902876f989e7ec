from itertools import product

import pytest
import torch

from bellmax_apps.translation.data import BEGIN, END, PADDING, Batch, Corpus, Vocabulary
from bellmax_apps.translation.model import ATTENTIONS, FORMER, OMEGAS, Translator, beam_search, greedy

from . import language

KINDS = list(product(ATTENTIONS, OMEGAS))


def translator(attention="dot", omega="negentropy"):
    torch.manual_seed(0)
    return Translator(12, 7, attention=attention, omega=omega, size=8).eval()


SOURCE, LENGTHS = torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0], [8, 9, 2, 0]]), torch.tensor([4, 2, 3])


@pytest.mark.parametrize(("attention", "omega"), KINDS)
def test_a_batch_gives_the_loss_of_its_pairs(attention, omega):
    model = translator(attention, omega)
    target = torch.tensor([[1, 4, 5, 2], [1, 6, 2, 0], [1, 4, 4, 2]])
    loss = model(Batch(SOURCE, LENGTHS, target))
    expected = sum(
        model(Batch(SOURCE[n : n + 1, : LENGTHS[n]], LENGTHS[n : n + 1], target[n : n + 1])) for n in range(3)
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("attention", "omega"), KINDS)
def test_masked_words_have_no_weight_and_get_no_gradient(attention, omega):
    model = translator(attention, omega)
    target = torch.tensor([[1, 4, 5, 2]] * 3)
    _, weights = model.states(Batch(SOURCE, LENGTHS, target))
    masked = (SOURCE == PADDING).unsqueeze(1).expand_as(weights)
    assert not weights[masked].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 3))
    keys, mask, state = model.read(SOURCE, LENGTHS)
    keys = keys.detach().masked_fill(~mask.unsqueeze(-1), torch.nan if attention == "structured" else 3.0)
    keys.requires_grad_()
    step, _ = model.step(model.target(torch.full((3,), 4)), state, keys, mask)
    (gradient,) = torch.autograd.grad(step.fed.sum(), keys)
    assert not gradient[~mask].any()
    assert gradient[mask].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("attention", "omega"), [kind for kind in KINDS if kind[1] != "softmax" and kind != ("dot", "l2")]
)
def test_learns_to_reverse_sentences(attention, omega):
    pairs = language.pairs(24)
    source, target = (Vocabulary.of("en", [p[side] for p in pairs], least=1) for side in (0, 1))
    corpus = Corpus(pairs, source, target)
    torch.manual_seed(1)
    model = Translator(len(source), len(target), attention=attention, omega=omega, size=48, dropout=0.0, smoothing=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = corpus.batch(range(24))
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(batch) / 24
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if loss < 0.02:
            break
    translations = greedy(model.eval(), batch.source, batch.lengths, 10)
    assert [target.decode(translation.words) for translation in translations] == [pair[1] for pair in pairs]


def log_probability(model, source, words):
    """Log-probability of a translation, with the end, by teacher forcing."""
    target = torch.tensor([[BEGIN, *words, END]])
    return -model(Batch(source.unsqueeze(0), torch.tensor([len(source)]), target)).item()


def all_translations(words, most):
    """All sequences of fewer than ``most`` words."""
    return [list(sequence) for length in range(most) for sequence in product(words, repeat=length)]


def spread_out(model):
    """Change the weights of a model, so that translations differ in probability."""
    with torch.no_grad():
        model.write.bias[:END] = -1e4  # padding and begin have no probability
        model.write.bias[END:].normal_(generator=torch.Generator().manual_seed(3))
        model.combine.weight.mul_(8)
    return model


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_beam_search_finds_the_best_translation(penalty):
    model, source = spread_out(translator("structured", "l2")), SOURCE[0]
    most = 4
    candidates = all_translations(range(END + 1, 7), most)
    scores = [log_probability(model, source, words) / (len(words) + 1) ** penalty for words in candidates]
    best = max(range(len(candidates)), key=scores.__getitem__)
    result = beam_search(model, source, 200, most, penalty)
    # A translation of the maximum length is cut: its probability has no end, and may be higher.
    if len(result.words) < most:
        assert result.words == candidates[best]
        assert result.log_probability == pytest.approx(log_probability(model, source, result.words), rel=1e-4)
        assert result.weights.shape == (len(result.words), len(source))
    else:
        assert result.log_probability / most**penalty >= scores[best] - 1e-5


def test_beam_search_is_at_least_as_good_as_greedy():
    model = spread_out(translator("structured"))
    for n in range(3):
        source = SOURCE[n, : LENGTHS[n]]
        (baseline,) = greedy(model, source.unsqueeze(0), LENGTHS[n : n + 1], 6)
        result = beam_search(model, source, 1, 6, penalty=0.0)
        assert result.log_probability >= baseline.log_probability - 1e-4


def test_unknown_attention_and_odd_sizes_are_refused():
    with pytest.raises(ValueError, match=r"attention must be one of 'dot', 'structured', got 'max'$"):
        Translator(5, 5, attention="max")
    with pytest.raises(ValueError, match=r"omega must be one of 'negentropy', .*, got 'hard'$"):
        Translator(5, 5, omega="hard")
    with pytest.raises(ValueError, match="size must be even and above 0, got 7"):
        Translator(5, 5, size=7)


@pytest.mark.parametrize(("name", "kind"), FORMER.items())
def test_a_former_attention_says_the_present_options(name, kind):
    options = "--attention {} --omega {}".format(*kind)
    with pytest.raises(
        ValueError, match=f"attention must be one of 'dot', 'structured', got '{name}': write {options}$"
    ):
        Translator(5, 5, attention=name)


def test_softmax_is_another_name_of_negentropy():
    for attention in ATTENTIONS:
        a, b = (translator(attention, omega) for omega in ("negentropy", "softmax"))
        assert a.attention.omega == b.attention.omega
