"""Measure automata over frames against the unrolled graph, a PyTorch loop and a dense chain, and decoders of CTC."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import decoder
import torch
from measuring import (
    SECONDS,
    Row,
    cell,
    collect,
    command_line,
    factor,
    forget_peak,
    heading,
    in_own_process,
    machine,
    measure,
    nanoseconds,
    peak,
    ratio,
    report,
    table,
)
from torch import Tensor

import bellmax as bx
from bellmax import Automaton

BATCH, FRAMES, VOCABULARY = 8, 300, 32
OMEGAS = "negentropy", "hard", "sparsemax", "entmax"
LONG = 3000, 500, 30_000  # frames, vocabulary, arcs
UNITS = "Times are in milliseconds: the minimum / the median over repeated calls. Inputs are float32."


def bigram(words: list[str]) -> Automaton:
    """A bigram with random scores for half of all pairs of words."""
    with TemporaryDirectory() as folder:
        decoder.write_bigram(Path(folder) / "bigram.arpa", words)
        return Automaton.ngram(Path(folder) / "bigram.arpa", words)


def of_labels(count: int) -> Automaton:
    """A bigram of labels and blanks: label k leads to state k."""
    arcs = [(state, label, label) for state in range(count) for label in range(count)]
    return Automaton(arcs, scores=torch.randn(len(arcs)), start={0: 0.0}, final=dict.fromkeys(range(count), 0.0))


def of_words(count: int) -> Automaton:
    """CTC alignments of sentences of a lexicon, under a bigram with back-off."""
    words = sorted({"".join(random.choices(decoder.LETTERS, k=random.randint(3, 8))) for _ in range(count)})
    spellings = {word: [1 + decoder.LETTERS.index(letter) for letter in word] for word in words}
    return (Automaton.ctc(vocab=VOCABULARY) @ Automaton.lexicon(spellings) @ bigram(words)).trim()


def graphs() -> dict[str, Automaton]:
    """The automata of the benchmark, by name."""
    random.seed(0)
    torch.manual_seed(0)
    target = [random.randint(1, VOCABULARY - 1) for _ in range(20)]
    return {
        "CTC of 20 labels": Automaton.ctc(target),
        "bigram of 32 labels": of_labels(VOCABULARY),
        "CTC, 50 words, bigram": of_words(50),
    }


def loop(automaton: Automaton, log_probs: Tensor) -> Tensor:
    """The log-partition function in PyTorch: one logsumexp over the arcs into each state, for each frame."""
    source, target, label, _ = automaton.arcs.unbind(1)
    scores, count = automaton.scores.to(log_probs), automaton.num_states
    values = automaton.start.to(log_probs).expand(len(log_probs), count)
    for frame in log_probs.unbind(1):
        terms = values[:, source] + frame[:, label] + scores
        index = target.expand_as(terms)
        top = terms.new_full((len(terms), count), -torch.inf).scatter_reduce(1, index, terms, "amax").detach()
        safe = top.clamp(min=torch.finfo(top.dtype).min)
        sums = torch.zeros_like(top).scatter_add(1, index, (terms - safe.gather(1, index)).exp())
        values = torch.where(sums > 0, sums.clamp(min=torch.finfo(top.dtype).tiny).log() + safe, -torch.inf)
    return (values + automaton.final.to(log_probs)).logsumexp(1)


def dense_chain(automaton: Automaton, log_probs: Tensor) -> Tensor | None:
    """The same as a chain over all pairs of states; None unless all arcs into a state have one label."""
    source, target, label, _ = automaton.arcs.unbind(1)
    labels = torch.zeros(automaton.num_states, dtype=torch.int64)
    labels[target] = label
    if not torch.equal(labels[target], label) or automaton.num_states > 100:
        return None
    transitions = torch.full((automaton.num_states,) * 2, -torch.inf)
    transitions[target, source] = automaton.scores.float()
    start = torch.logsumexp(transitions + automaton.start.float(), 1)
    final = automaton.final.float()
    return bx.Chain.from_scores(log_probs[..., labels], transitions, start=start, end=final).value


def gradient(value: Callable[[Tensor], Tensor | None], log_probs: Tensor) -> Callable[[], Tensor | None]:
    def run() -> Tensor | None:
        leaf = log_probs.detach().requires_grad_()
        result = value(leaf)
        return None if result is None else torch.autograd.grad(result.sum(), leaf)[0]

    return run


def unrolled(automaton: Automaton, frames: int) -> Callable[[Tensor], Tensor]:
    """The value by ``bx.DAG``, with an edge for each arc and frame. The automaton must have no ε-arcs."""
    source, target, label, _ = automaton.arcs.unbind(1)
    count, frame = automaton.num_states, torch.arange(frames).unsqueeze(1)
    begin, finish = ((score > -torch.inf).nonzero() for score in (automaton.start, automaton.final))
    end = 1 + (frames + 1) * count  # the start is node 0
    arcs = torch.stack((1 + frame * count + source, 1 + (frame + 1) * count + target), -1).flatten(0, 1)
    first = torch.cat((torch.zeros_like(begin), 1 + begin), 1)
    last = torch.cat((1 + frames * count + finish, torch.full_like(finish, end)), 1)
    graph = bx.DAG(torch.cat((first, arcs, last)), start=0, end=end)
    entry = (frame * VOCABULARY + label).flatten()
    ends = [score[index.squeeze(1)].float() for score, index in ((automaton.start, begin), (automaton.final, finish))]
    scores = automaton.scores.float().repeat(frames)

    def value(log_probs: Tensor) -> Tensor:
        batch = len(log_probs)
        weights = log_probs.flatten(1).index_select(1, entry) + scores
        return graph.paths(torch.cat((ends[0].expand(batch, -1), weights, ends[1].expand(batch, -1)), 1)).value

    return value


def engines(repeats: int) -> list[Row]:
    rows = []
    log_probs = torch.randn(BATCH, FRAMES, VOCABULARY).log_softmax(-1)
    for name, automaton in graphs().items():
        runs = {
            "bellmax": gradient(lambda x, a=automaton: a.paths(x).value, log_probs),
            "unrolled": gradient(unrolled(automaton, FRAMES), log_probs),
            "loop": gradient(lambda x, a=automaton: loop(a, x), log_probs),
            "chain": gradient(lambda x, a=automaton: dense_chain(a, x), log_probs),
        }
        wanted = runs["bellmax"]()
        for peer in list(runs):
            got = runs[peer]()
            if got is None:
                del runs[peer]
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
        size = {"states": automaton.num_states, "arcs": automaton.num_arcs}
        rows.append({"name": name, **size, **measure(runs, repeats, SECONDS)})
    return rows


def regularizers(repeats: int) -> list[Row]:
    rows = []
    log_probs = torch.randn(BATCH, FRAMES, VOCABULARY).log_softmax(-1)
    for name, automaton in graphs().items():
        runs = {
            omega: gradient(lambda x, a=automaton, o=omega: a.paths(x, omega=o).value, log_probs) for omega in OMEGAS
        }
        rows.append({"name": name, "arcs": automaton.num_arcs, **measure(runs, repeats, SECONDS)})
    return rows


def long_memory() -> None:
    """Print the peak memory in MB of value and gradient for a long recording and a large automaton."""
    frames, vocabulary, arcs = LONG
    torch.manual_seed(0)
    torch.set_num_threads(1)
    states = arcs // 10
    rows = torch.stack([torch.randint(n, (arcs,)) for n in (states, states, vocabulary)], 1)
    automaton = Automaton(rows, start={0: 0.0}, final=dict.fromkeys(range(states), 0.0))
    gradient(lambda x: automaton.paths(x).value, torch.randn(1, 4, vocabulary))()
    log_probs = torch.randn(1, frames, vocabulary).log_softmax(-1)
    before = forget_peak()
    gradient(lambda x: automaton.paths(x).value, log_probs)()
    print((peak() - before) / 1000)


def decoders() -> list[Row]:
    """Time decoders, and compare the scores of their texts."""
    return decoder.compare()


def markdown(results: Row) -> list[str]:
    count = BATCH * FRAMES
    engine = [
        [
            r["name"],
            str(r["states"]),
            str(r["arcs"]),
            cell(r["bellmax"]),
            nanoseconds(r["bellmax"], count * r["arcs"]),
            *(
                f"{cell(r[n])} ({factor(ratio(r[n], r['bellmax']))})" if n in r else "–"
                for n in ("unrolled", "loop", "chain")
            ),
        ]
        for r in results["engines"]
    ]
    omegas = [
        [r["name"], *(f"{cell(r[o])} ({nanoseconds(r[o], count * r['arcs'])} ns)" for o in OMEGAS)]
        for r in results["regularizers"]
    ]
    texts = [
        [
            r["name"],
            f"{r['seconds']:.2f}",
            "–" if r["lower"] is None else str(r["lower"]),
            "–" if r["higher"] is None else str(r["higher"]),
        ]
        for r in results["decoders"]
    ]
    frames, vocabulary, arcs = LONG
    return [
        *heading("automata", results["machine"], units=UNITS),
        "",
        "### Value and gradient",
        "",
        f"The scores are a batch of {BATCH} members with {FRAMES} frames and {VOCABULARY} labels, under negentropy. A",
        "number in brackets is the time of the other implementation divided by the time of bellmax (medians). *Per arc",
        "and frame* is the median time divided by the number of arcs, frames and members, in nanoseconds. All",
        "implementations compute the same gradient.",
        "",
        "- *`bx.DAG`* is the same problem as a graph with an edge for each arc and frame.",
        "- *PyTorch* is a loop over the frames with one logsumexp over the arcs into each state.",
        "- *Dense chain* is `bx.Chain` over all pairs of states. A dash means that a state has arcs with several",
        "  labels, or that there are more than 100 states.",
        *table(
            "automaton | states: | arcs: | bellmax: | per arc and frame, ns: | `bx.DAG`: | PyTorch: | dense chain:",
            engine,
        ),
        "",
        "### Regularizers",
        "",
        "Value and gradient as above, with the median time per arc and frame in brackets.",
        *table("automaton | " + " | ".join(f"{omega}:" for omega in OMEGAS), omegas),
        "",
        "### Memory",
        "",
        f"Value and gradient for one recording of {frames} frames with {vocabulary} labels, and a random automaton",
        f"of {arcs} arcs, need {results['memory']:.0f} MB more than the process used before. A tensor with a float32",
        f"number for each arc and frame would have {4e-6 * frames * arcs:.0f} MB.",
        "",
        "### Decoding",
        "",
        "The decoders find texts for 20 synthetic utterances of 300 frames, with a lexicon of 50 words and a bigram",
        "with back-off. *Seconds* is the time for all utterances, without building the decoder. Each text is scored by",
        "the logarithm of the sum over its alignments, plus the weighted score of the bigram. *Lower* and *higher*",
        "count the texts with a lower and a higher score than the text of `bx.CTCDecoder`.",
        *table("decoder | seconds: | lower: | higher:", texts),
    ]


def main() -> None:
    parser = command_line(__doc__, "automata", repeats=20)
    arguments = parser.parse_args()
    if arguments.memory:
        return long_memory()
    torch.set_num_threads(1)
    results = collect(
        {
            "machine": machine,
            "engines": lambda: engines(arguments.repeats),
            "regularizers": lambda: regularizers(arguments.repeats),
            "memory": lambda: float(in_own_process(__file__, "--memory", "long")),
            "decoders": decoders,
        }
    )
    report(arguments.output, "automata", results, markdown(results))


if __name__ == "__main__":
    sys.exit(main())
