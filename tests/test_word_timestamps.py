"""The recipes of docs/guide/word-timestamps.md: words in seconds, the star, label priors, windows and subtitles."""

from __future__ import annotations

import doctest
import itertools
import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import close
from support.ctc import collapse, listed
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import pad

import bellmax as bx

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "word-timestamps.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not run from a checkout")

LETTERS = "-|'abcdehlot"  # the blank is class 0
VOCABULARY = {letter: label for label, letter in enumerate(LETTERS)}
STAR = len(LETTERS)
FRAME = 0.02  # seconds


def defined_on_the_page() -> SimpleNamespace:
    """Run the imports and definitions of the page, without transformers."""
    names: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8")):
        source = example.source
        if source.startswith(("import ", "from ", "def ", "class ", "@")) and "transformers" not in source:
            exec(source, names)
    return SimpleNamespace(**names, names=names)


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    return defined_on_the_page()


@pytest.fixture(params=["page", "example"])
def recipe(request: pytest.FixtureRequest, page: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a namespace with `spell`, `word_times` and `long_word_times`, from the page and from the script."""
    if request.param == "page":
        return page
    for package in ("librosa", "soundfile", "matplotlib", "rich.progress"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "examples")
    return import_module("word_times")


def output_for(frames: str, margin: float = 6.0, noise: float = 1.0, seed: int = 0) -> Tensor:
    """Return logits (T, V) with the character at frame t as the most likely class of frame t."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([VOCABULARY[letter] for letter in frames])
    return noise * torch.randn(len(frames), STAR, generator=generator).clamp(-2, 2) + margin * torch.eye(STAR)[labels]


def speech(words: list[str], separator: str, rng: np.random.Generator) -> tuple[str, list[tuple[int, int]]]:
    """Return the best class of each frame, and the first frame of each word and the frame after its last."""
    frames, spans = "-" * rng.integers(4), []
    for place, word in enumerate(words):
        if place:
            frames += separator * rng.integers(1, 3) + "-" * rng.integers(1, 4)
        start = len(frames)
        for letter, following in zip(word, [*word[1:], ""], strict=True):
            end = len(frames) + rng.integers(1, 4)
            frames = frames.ljust(end, letter) + "-" * (
                int(letter == following) or (rng.integers(3) if following else 0)
            )
        spans.append((start, len(frames)))
    return frames + "-" * rng.integers(4), spans


def times_in_frames(words: list[Any]) -> list[tuple[int, int]]:
    return [(round(word.start / FRAME), round(word.end / FRAME)) for word in words]


# --- words in seconds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("separator", ["|", ""])
def test_words_have_the_times_of_their_letters(recipe: Any, separator: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list(LETTERS[3:]), rng.integers(1, 6))) for _ in range(rng.integers(1, 6))]
    frames, spans = speech([*words, "hello"], separator, rng)
    vocabulary = {letter: label for letter, label in VOCABULARY.items() if separator or letter != "|"}
    log_probs = output_for(frames, seed=seed).log_softmax(-1)
    found = recipe.word_times(log_probs, " ".join([*words, "hello"]), vocabulary, FRAME)
    assert [word.text for word in found] == [*words, "hello"]
    assert times_in_frames(found) == spans
    for word, (start, end) in zip(found, spans, strict=True):
        assert math.isclose(word.score, log_probs[start:end].amax(-1).mean().exp(), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("Hello,", "hello"),
        ("Átha", "atha"),
        ("don’t", "do*'t"),  # there is no n
        ("1984", "*"),
        ("a1b22c", "a*b*c"),
        ("*", "*"),
        ("co-ed", "coed"),  # the hyphen is the blank of this vocabulary
        ("–", ""),
        ("?!", ""),
        ("ﬂ", "*l"),  # a ligature of f and l
        ("字", "*"),
    ],
)
def test_words_are_spelled_by_the_vocabulary(recipe: Any, word: str, spelled: str) -> None:
    labels = [STAR if letter == "*" else VOCABULARY[letter] for letter in spelled]
    assert recipe.spell(word, VOCABULARY, 0, STAR) == labels


def test_an_accent_of_the_vocabulary_is_kept(recipe: Any) -> None:
    composed, decomposed = "\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}"
    for word in (composed, decomposed, composed.upper()):
        assert recipe.spell(word, {composed: 1, "e": 2}, 0, 3) == [1]


def test_unknown_words_keep_their_place(recipe: Any) -> None:
    frames = "-h-oo-t-|--cc-o-l-|-b-a-d-"
    words = recipe.word_times(output_for(frames).log_softmax(-1), "Hot – 2026 BAD?", VOCABULARY, FRAME)
    assert [word.text for word in words] == ["Hot", "2026", "BAD?"]
    hot, number, bad = times_in_frames(words)
    assert hot == (1, 7)
    assert 9 <= number[0] <= 11
    assert 16 <= number[1] <= 17
    assert bad == (20, 25)


@pytest.mark.parametrize("text", ["", "  ", "– …"])
def test_a_text_without_words(recipe: Any, text: str) -> None:
    assert recipe.word_times(output_for("--a--").log_softmax(-1), text, VOCABULARY, FRAME) == []


def test_one_word_of_one_frame(recipe: Any) -> None:
    (word,) = recipe.word_times(output_for("a").log_softmax(-1), "a", VOCABULARY, FRAME)
    assert (word.text, word.start, word.end) == ("a", 0, FRAME)


@pytest.mark.parametrize(("text", "labels", "frames"), [("hello", 5, 5), ("all all", 7, 8), ("a b c d", 7, 6)])
def test_a_text_that_does_not_fit(recipe: Any, text: str, labels: int, frames: int) -> None:
    log_probs = output_for("-" * (frames + 1)).log_softmax(-1)
    assert recipe.word_times(log_probs, text, VOCABULARY, FRAME)
    with pytest.raises(ValueError, match=f"text must fit into {frames} frames, got {labels} labels: '{text}'"):
        recipe.word_times(log_probs[:frames], text, VOCABULARY, FRAME)


def test_the_blank_and_the_separator_can_be_any_class(recipe: Any) -> None:
    frames = "-h-oo-t-|--cc-o-l-d--"
    log_probs = output_for(frames).log_softmax(-1)
    expected = recipe.word_times(log_probs, "hot cold", VOCABULARY, FRAME)
    vocabulary = {"<pad>" if letter == "-" else letter: STAR - 1 - label for letter, label in VOCABULARY.items()}
    vocabulary[" "] = vocabulary.pop("|")
    options = {"blank": STAR - 1, "separator": " "}
    assert recipe.word_times(log_probs.flip(-1), "hot cold", vocabulary, FRAME, **options) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_find_the_same_times(recipe: Any, dtype: torch.dtype) -> None:
    logits = output_for("-h-oo-t-|--cc-o-l-d--|-b-a-a-")
    log_probs = logits.to(dtype).log_softmax(-1)
    exact, rounded, words = (
        recipe.word_times(scores, "hot cold 7 baa", VOCABULARY, FRAME)
        for scores in (logits.log_softmax(-1), log_probs.float(), log_probs)
    )
    assert words == rounded
    assert times_in_frames(words) == times_in_frames(exact)


# --- the star


TARGETS = [[3], [3, 1, 2, 3], [3, 1], [1, 3], [1, 3, 1], [1, 1, 3], [3, 2, 3, 1]]  # 3 is the star, 1 and 2 are labels


def with_star(log_probs: Tensor, score: float) -> Tensor:
    return pad(log_probs, (0, 1), value=score)


def expanded(labels: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Replace each star by every class."""
    return set(itertools.product(*((0, 1, 2) if label == 3 else (label,) for label in labels)))


def matches(labels: tuple[int, ...], target: list[int]) -> bool:
    """True if frames (T,) match a target whose stars take at least one frame each and any labels."""
    parts = "".join(map(str, target)).split("3")

    def rest(start: int, place: int) -> bool:
        last = place == len(parts) - 1
        for end in [len(labels)] if last else range(start, len(labels)):
            if "".join(map(str, collapse(labels[start:end]))) == parts[place]:
                if last:
                    return True
                if any(rest(after, place + 1) for after in range(end + 1, len(labels) + 1)):
                    return True
        return False

    return rest(0, 0)


@pytest.mark.parametrize("frames", [4, 6])
@pytest.mark.parametrize("target", TARGETS)
def test_a_star_accepts_any_labels(target: list[int], frames: int) -> None:
    p = bx.CTC(torch.zeros(frames, 4), torch.tensor(target))
    paths, probabilities = p.support_paths()
    kept = paths[probabilities > 0].argmax(-1)
    accepted = set().union(*(expanded(tuple(path)) for path in kept.tolist()))
    assert accepted == {each for each in itertools.product(range(3), repeat=frames) if matches(each, target)}


def test_label_sequences_between_two_stars() -> None:
    """With stars around it, a target is accepted if it is a part of the spoken labels."""
    p, spoken = bx.CTC(torch.zeros(7, 4), torch.tensor([3, 1, 2, 3])), set()
    paths, _ = p.support_paths()
    for path in paths.argmax(-1).tolist():
        spoken |= {tuple(collapse(each)) for each in expanded(tuple(path))}
    assert spoken >= {(1, 2), (2, 1, 2), (1, 2, 2), (2, 1, 1, 2, 2), (1, 2, 1, 2, 1, 2)}
    assert all("12" in "".join(map(str, labels)) for labels in spoken)


@pytest.mark.parametrize("score", [0.0, -1.0])
@pytest.mark.parametrize("target", TARGETS)
def test_the_value_with_stars_equals_enumeration(target: list[int], score: float) -> None:
    log_probs = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1)
    scores = with_star(log_probs, score)
    close(bx.CTC(scores, torch.tensor(target)).value, listed(scores.numpy(), target), 1e-10)


def test_a_star_alone_has_the_probability_of_everything() -> None:
    log_probs = torch.randn(5, 3, dtype=torch.float64).log_softmax(-1)
    p = bx.CTC(with_star(log_probs, 0.0), torch.tensor([3]))
    only_stars = torch.full((5,), 3)
    close(p.value + p.log_prob(only_stars), 0.0, 1e-10)


def test_stars_in_a_batch_at_different_places() -> None:
    targets = torch.tensor([[STAR, 3, 4, 5], [6, STAR, 6, -7], [3, STAR, 99, 99]])
    frames, counts = torch.tensor([9, 7, 4]), torch.tensor([4, 3, 2])
    log_probs = torch.randn(3, 9, STAR, dtype=torch.float64).log_softmax(-1)
    log_probs[torch.arange(9) >= frames.unsqueeze(-1)] = math.nan
    log_probs.requires_grad_()
    p = bx.CTC(with_star(log_probs, -1.0), targets, lengths=(frames, counts))
    spans, (gradient,) = p.spans(), torch.autograd.grad(p.value.sum(), log_probs)
    assert gradient.isfinite().all()
    for n, (num_frames, count) in enumerate(zip(frames.tolist(), counts.tolist(), strict=True)):
        one = bx.CTC(with_star(log_probs[n, :num_frames], -1.0), targets[n, :count])
        close(p.value[n], one.value, 1e-10)
        assert spans[n, :count].equal(one.spans())
        assert (spans[n, count:] == -1).all()
        assert not gradient[n, num_frames:].any()
        posterior = one.expected_path
        close(gradient[n, :num_frames], posterior[:, :-1], 1e-10)
        close(posterior.sum(-1), torch.ones(num_frames, dtype=torch.float64), 1e-10)


def test_derivatives_with_a_star() -> None:
    def value(logits: Tensor) -> Tensor:
        return bx.CTC(with_star(logits.log_softmax(-1), -1.0), torch.tensor([3, 1, 1, 3])).value

    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(value, logits)
    assert gradgradcheck(value, logits, fast_mode=True)


# --- label priors


def test_label_priors_divide_the_probabilities() -> None:
    """The value is the log of the sum, over alignments, of the products of p(v | x_t) / p(v)^α."""
    alpha, priors = 0.3, torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    probabilities = torch.randn(5, 3, dtype=torch.float64).softmax(-1)
    expected = listed((probabilities / priors**alpha).log().numpy(), [1, 2, 2])
    value = bx.CTC(probabilities.log() - alpha * priors.log(), torch.tensor([1, 2, 2])).value
    close(value, expected, 1e-10)


def test_gradients_with_label_priors() -> None:
    log_priors = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()

    def loss(logits: Tensor) -> Tensor:
        return -bx.CTC(logits.log_softmax(-1) - 0.3 * log_priors, torch.tensor([1, 2])).value

    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(loss, logits)
    assert gradgradcheck(loss, logits, fast_mode=True)


def test_label_priors_widen_a_peaky_alignment() -> None:
    """Next to its peak, each label is slightly less likely than the blank."""
    probabilities = torch.tensor([[0.9, 0.05, 0.05], [0.6, 0.35, 0.05], [0.1, 0.85, 0.05], [0.6, 0.35, 0.05]])
    log_probs = torch.cat((probabilities, probabilities[:, [0, 2, 1]])).log()
    priors = log_probs.exp().mean(0)
    lengths = [
        bx.CTC(log_probs - alpha * priors.log(), torch.tensor([1, 2])).spans().diff().flatten().tolist()
        for alpha in (0.0, 0.3, 1.0)
    ]
    assert lengths == [[1, 1], [1, 1], [3, 3]]


def linear_network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def features_and_targets() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return (
        torch.randn(3, 9, 4),
        torch.tensor([[1, 2], [3, 3], [2, 0]]),
        (torch.tensor([9, 6, 7]), torch.tensor([2, 2, 1])),
    )


def test_new_priors_are_the_average_probabilities_of_the_frames(page: SimpleNamespace) -> None:
    model, batch = linear_network(), features_and_targets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log_priors = page.train_epoch(model, optimizer, [batch, batch], torch.zeros(4))
    probabilities = model(batch[0]).softmax(-1).detach()
    frames = [row[:count] for row, count in zip(probabilities, batch[2][0].tolist(), strict=True)]
    close(log_priors.exp(), torch.cat(frames).mean(0), 1e-6)


def test_a_step_with_priors_makes_frequent_classes_less_probable(page: SimpleNamespace) -> None:
    batch, blanks = features_and_targets(), []
    for prior in (0.25, 0.97):
        model = linear_network()
        log_priors = torch.tensor([prior, *3 * [(1 - prior) / 3]]).log()
        page.train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch], log_priors, 1.0)
        blanks.append(model(batch[0]).softmax(-1)[..., 0].mean())
    assert blanks[1] < blanks[0]


def test_priors_of_unused_classes_are_finite(page: SimpleNamespace) -> None:
    model, batch = linear_network(), features_and_targets()
    with torch.no_grad():
        model.bias[1:] -= torch.tensor([0.0, 0.0, 200.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch[1][batch[1] == 3] = 1
    log_priors = page.train_epoch(model, optimizer, [batch], torch.zeros(4))
    assert log_priors[3] == pytest.approx(math.log(1e-8))
    assert page.train_epoch(model, optimizer, [batch], log_priors).isfinite().all()


def test_uniform_priors_train_as_ctc_loss(page: SimpleNamespace) -> None:
    models, batch = (linear_network(), linear_network()), features_and_targets()
    page.train_epoch(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1), [batch], torch.full((4,), -1.4), 0.5)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    bx.nn.CTCLoss()(models[1](batch[0]), batch[1], lengths=batch[2]).backward()
    optimizer.step()
    for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        close(parameter, other, 1e-6)


# --- long recordings, subtitles


@pytest.mark.parametrize("window", [60, 150, 10_000])
def test_windows_find_the_times_of_the_whole_recording(recipe: Any, window: int) -> None:
    rng = np.random.default_rng(0)
    words = [str(rng.choice(["hello", "hot", "cold", "bad", "tall"])) for _ in range(60)]
    frames, spans = speech(words, "|", rng)
    log_probs = output_for(frames).log_softmax(-1)
    words[7] += " –"
    found = recipe.long_word_times(log_probs, " ".join(words), VOCABULARY, FRAME, window=window)
    assert times_in_frames(found) == spans
    assert recipe.long_word_times(log_probs, "", VOCABULARY, FRAME, window=window) == []


@pytest.mark.parametrize("samples", [400, 719, 720, 32_000, 32_080, 32_081, 32_399, 70_000])
def test_chunks_give_the_frames_of_the_whole_recording(page: SimpleNamespace, samples: int) -> None:
    weight = torch.randn(3, 1, 400)

    def network(wave: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(wave.view(1, 1, -1), weight, stride=320).mT

    class Inputs(dict[str, Tensor]):
        def to(self, device: str) -> Inputs:
            return self

    class Model:
        device = "cpu"

        def __call__(self, input_values: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=network(input_values))

    processor = lambda wave, **options: Inputs(input_values=torch.as_tensor(wave))  # noqa: E731
    page.names.update(processor=processor, model=Model(), samples_per_frame=320)
    wave = torch.randn(samples)
    found = page.log_probs_of(wave.numpy(), step=100, margin=2)
    torch.testing.assert_close(found, network(wave)[0].log_softmax(-1))


def test_subtitles(page: SimpleNamespace) -> None:
    times = [page.Word(f"w{n}", 59.9996 * n, 60 * n + 0.5, 1.0) for n in range(62)]
    blocks = page.subtitles(times, size=61).strip().split("\n\n")
    assert len(blocks) == 2
    number, clock, text = blocks[1].split("\n")
    assert (number, clock, text) == ("2", "01:00:59,976 --> 01:01:00,500", "w61")
    assert page.clock(59.9996) == "00:01:00,000"
    assert page.subtitles([]) == ""
