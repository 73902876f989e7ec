"""Write the overview page of the benchmarks, its figures, and the table of the README, from the other results."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from measuring import Row, Times, described, factor, label, ratio, shown, table

NAMES = (
    "dag",
    "chain",
    "dtw",
    "ctc",
    "lattices",
    "trees",
    "attention",
    "ner",
    "translation",
    "overhead",
    "limits",
    "hmm",
)
COLORS = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
PLAIN = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 8, "svg.hashsalt": "bellmax"}
HMM_PEERS = "hmmlearn, scaling", "hmmlearn, log", "pomegranate", "dynamax", "dynamax, float32"
Panels = dict[str, dict[str, dict[str, float]]]  # title, row, library: its time divided by the time of bellmax

TITLES = {
    "layers": "Training steps and attention layers",
    "chain-dense": "Chains from dense potentials, negentropy",
    "chain-scores": "Chains from emissions and transitions, negentropy",
    "chain-l2": "Chains from dense potentials, l2",
    "dtw-costs": "DTW from costs, negentropy",
    "dtw-series": "DTW from series, values",
    "ctc": "CTC, negentropy",
    "dag": "DAG, native kernels and reference backend",
}
WITHOUT_FIGURE = {
    "Sequence alignment, hard scores": ("lattices", "gaps"),
    "Monotonic alignment, best path": ("lattices", "monotone"),
    "Parsing, spans": ("trees", "spans"),
    "Parsing, dependencies": ("trees", "arcs"),
    "Hidden Markov models, EM iteration": ("hmm", "em"),
    "Hidden Markov models, posteriors and Viterbi": ("hmm", "inference"),
}
NOTES = {
    "layers": (
        "The first panel compares whole training steps of a tagger with pytorch-crf. The other panels compare"
        " structured or sparse attention with softmax attention. Softmax attention does the least work, so the bars of"
        " these panels point to the left. A training step consists of forward pass, backward pass, clipping and update."
    ),
    "chain-dense": (
        "A shape is (batch, steps, states). torch-struct is written for GPUs. Its parallel scan does more arithmetic"
        " than a loop over the steps."
    ),
    "chain-scores": (
        "A shape is (batch, steps, states). The value is the log-partition function. The public losses of pytorch-crf"
        " and TorchCRF also compute the score of the correct tags. To measure the log-partition function alone, we"
        " call a private method of these libraries. In the rows *large scores*, the transition scores differ by more"
        " than 100."
    ),
    "chain-l2": (
        "A shape is (batch, steps, states). The PyTorch loop calls `sparsemax` of the entmax package at each step."
    ),
    "dtw-costs": "A shape is (batch, length of the first series, length of the second series).",
    "dtw-series": (
        "In the panels *distance matrix*, a shape is (number of series, length). In the other panels, a shape is"
        " (number of pairs, length of the first series, length of the second series). bellmax computes in float32, and"
        " the other libraries compute in float64."
    ),
    "ctc": "A shape is (batch, frames, classes, labels).",
    "dag": (
        "The reference backend is written in PyTorch and runs if bellmax was installed without a compiler. The graph"
        " has 2000 layers of 4 nodes."
    ),
}
README = (  # task in the README, shape in the README, file, table, shape, task, library
    (
        "Chain, log-partition function and gradient: PyTorch loop",
        "(B,T,S) = (64,128,32)",
        ("chain", "dense", (64, 128, 32), "value and gradient", "good loop"),
    ),
    (
        "Soft-DTW from costs and gradient: tslearn",
        "(B,N,M) = (32,256,256)",
        ("dtw", "costs", (32, 256, 256), "value and gradient", "tslearn"),
    ),
    (
        "CTC loss and gradient: torch `ctc_loss`",
        "(B,T,V,L) = (32,400,32,60)",
        ("ctc", "torch", (32, 400, 32, 60), "value and gradient", "torch"),
    ),
    (
        "Distance matrix, hard DTW, one thread: dtaidistance (C, float64)",
        "128 series of length 128",
        ("dtw", "collections", (128, 128), None, "dtaidistance"),
    ),
    (
        "Distance matrix, hard DTW, one thread: dtaidistance (C, float64)",
        "128 series of length 8",
        ("dtw", "collections", (128, 8), None, "dtaidistance"),
    ),
)
BETWEEN = re.compile(r"(?<=<!-- ratios -->\n).*?(?=<!-- end of ratios -->)", re.DOTALL)


# --- ratios


def panels(results: dict[str, Any]) -> dict[str, Panels]:
    """All ratios, by figure."""
    chain, dtw = results["chain"], results["dtw"]
    spread = [{**row, "shape": f"{shown(row['shape'])}, large scores"} for row in chain["spread"]]
    return {
        "layers": of_layers(results),
        "chain-dense": by_task(chain["dense"]),
        "chain-scores": by_task([*chain["scores"], *spread]),
        "chain-l2": by_task(chain["l2"]),
        "dtw-costs": by_task(dtw["costs"]),
        "dtw-series": of_series(dtw["series"], dtw["aeon"]["rows"]) | of_collections(dtw["collections"]),
        "ctc": by_task(results["ctc"]["torch"]),
        "dag": of_graphs(results["dag"]["against_reference"]),
    }


def by_task(rows: Iterable[Row]) -> Panels:
    panels: Panels = {}
    for row in rows:
        shape = row["shape"] if isinstance(row["shape"], str) else shown(row["shape"])
        panels.setdefault(row["task"], {})[shape] = {
            name: ratio(times, row["bellmax"])
            for name, times in row.items()
            if isinstance(times, dict) and not name.startswith("bellmax")
        }
    return panels


def of_series(rows: Iterable[Row], aeon: Iterable[Row]) -> Panels:
    alone = {tuple(row["shape"]): row["aeon"] for row in aeon}
    panels: Panels = {}
    for row in rows:
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        if row["threads"] == 1 and tuple(row["shape"]) in alone:
            row = {**row, "aeon": alone[tuple(row["shape"])]}
        for kind, peers in {"soft": ("tslearn", "aeon"), "hard": ("dtaidistance", "librosa")}.items():
            ratios = {name: ratio(row[name], row[f"bellmax, {kind}"]) for name in peers if name in row}
            if ratios:
                panels.setdefault(f"{kind} DTW, {threads}", {})[shown(row["shape"])] = ratios
    return panels


def of_collections(rows: Iterable[Row]) -> Panels:
    panels: Panels = {}
    for row in rows:
        title = f"distance matrix, hard DTW, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        panels.setdefault(title, {})[shown(row["shape"])] = {"dtaidistance": ratio(row["dtaidistance"], row["bellmax"])}
    return panels


def of_layers(results: dict[str, Any]) -> Panels:
    panels: Panels = {}
    for row in results["ner"]["rows"]:
        if row["crf"] == "pytorch-crf":
            peer: Times = row["step"]
        else:
            name = f"{row['crf'].removeprefix('bellmax, ')}, {row['loss']}, {row['size']} sentences"
            panels.setdefault("training step of a tagger", {})[name] = {"pytorch-crf": ratio(peer, row["step"])}
    for row in results["translation"]["rows"]:
        if row["attention"] == "dot-negentropy":
            softmax: Times = row["step"]
        else:
            name = f"{row['attention']}, size {row['size']}"
            panels.setdefault("training step of a translator", {})[name] = {"softmax": ratio(softmax, row["step"])}
    for part, title in {"step": "attention, scores to weights", "module": "attention, whole module"}.items():
        for row in results["attention"][part]:
            if row["layer"] == "softmax":
                plain: Times = row["both"]
            else:
                name = f"{row['layer']}, {shown(row['shape'])}{', mask' if row['masked'] else ''}"
                panels.setdefault(f"{title}, with gradients", {})[name] = {"softmax": ratio(plain, row["both"])}
    return panels


def of_graphs(rows: Iterable[Row]) -> Panels:
    panels: Panels = {}
    for row in rows:
        name = f"{row['omega']}, {row['task']}"
        panels.setdefault(f"batch of {row['batch']}", {})[name] = {"reference": row["ratio"]}
    return panels


def without_figure(results: dict[str, Any]) -> dict[str, Panels]:
    """Return the ratios of benchmarks that have no figure, by title."""
    peers = "parasail", "monotonic_alignment_search", "good loop", "torch-struct", *HMM_PEERS
    return {
        title: {
            part: {
                f"{row['shape']}, {row['task']}": {
                    peer: ratio(row[peer], row["bellmax"]) for peer in peers if row.get(peer)
                }
                for row in results[name][part]
            }
        }
        for title, (name, part) in WITHOUT_FIGURE.items()
    }


# --- figures


def draw_ratios(panels: Panels) -> Figure:
    """A bar for each ratio, starting at 1×: to the right if bellmax is faster, to the left if it is slower."""
    peers = list(dict.fromkeys(peer for rows in panels.values() for ratios in rows.values() for peer in ratios))
    titles = list(panels)
    pairs = [titles[start : start + 2] for start in range(0, len(titles), 2)]
    heights = [max(_height(panels[title]) for title in pair) for pair in pairs]
    figure = Figure(figsize=(9, sum(heights) + 0.5 * len(pairs) + 0.4), layout="constrained")
    grid = figure.subplots(len(pairs), 2, squeeze=False, sharex=True, height_ratios=heights)
    for axes, pair in zip(grid, pairs, strict=True):
        for ax in axes[len(pair) :]:
            ax.axis("off")
        for ax, title in zip(axes, pair, strict=False):
            _bars(ax, panels[title], peers)
            ax.set_title(title, fontsize=9, loc="left")
    handles = [figure.axes[0].barh(0, 0, color=COLORS[n], label=label(peer)) for n, peer in enumerate(peers)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(peers), frameon=False)
    return figure


def _height(rows: dict[str, dict[str, float]]) -> float:
    return 0.6 + 0.16 * sum(max(len(ratios), 1.4) for ratios in rows.values())


def _bars(ax: Axes, rows: dict[str, dict[str, float]], peers: Sequence[str]) -> None:
    position, ticks = 0.0, []
    for name, ratios in rows.items():
        ticks.append((position + (len(ratios) - 1) / 2, name))
        for peer, times in ratios.items():
            ax.barh(position, times - 1, left=1, height=0.9, color=COLORS[peers.index(peer)])
            end = max(times, 1), position
            ax.annotate(f" {factor(times)} ", end, ha="left", va="center", fontsize=6, annotation_clip=False)
            position += 1
        position += 0.6
    ax.set_yticks(*zip(*ticks, strict=True), fontsize=7)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.axvline(1, color="0.2", linewidth=0.8)
    ax.margins(x=0.14)
    ax.tick_params(axis="x", labelbottom=True)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 3)))
    ax.xaxis.set_minor_locator(LogLocator(10, subs=()))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))


def draw_growth(results: dict[str, Any]) -> Figure:
    """Time against size. Gray lines show linear growth."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    graph, chain, dtw = (results[name]["growth"] for name in ("dag", "chain", "dtw"))
    for task in ("value", "gradient", "Hessian product"):
        _curve(axes[0], task, [(row["edges"], row[task]) for row in graph])
    for axis in dict.fromkeys(row["axis"] for row in chain):
        for form in ("dense", "scores"):
            points = [(row["edges"], row[form]) for row in chain if row["axis"] == axis]
            _curve(axes[1], f"{form}, {axis} grows", points)
    for task in ("value", "value and gradient", "Hessian product"):
        _curve(axes[2], task, [(row["shape"][0] * row["shape"][1] ** 2, row[task]) for row in dtw])
    for ax, title, what in zip(
        axes,
        ("DAG", "Chains, value and gradient", "DTW"),
        ("edges", "edges", "cells of the cost matrices"),
        strict=True,
    ):
        ax.set(xscale="log", yscale="log", xlabel=what)
        ax.set_title(title, fontsize=9, loc="left")
        x, y = ax.get_xlim(), ax.get_ylim()
        for power in range(-12, 3):
            ax.plot(x, [10.0**power * edge for edge in x], color="0.85", linewidth=0.7, zorder=0)
        ax.set(xlim=x, ylim=y)
        ax.legend(fontsize=6, frameon=False)
    axes[0].set_ylabel("milliseconds")
    return figure


def _curve(ax: Axes, name: str, points: Sequence[tuple[int, Times]]) -> None:
    number = len(ax.get_legend_handles_labels()[0])
    xs, ys = [size for size, _ in points], [times["median"] for _, times in points]
    ax.plot(xs, ys, "o-", markersize=3, linewidth=1.2, color=COLORS[number], label=name)


def draw_memory(results: dict[str, Any]) -> Figure:
    """Memory of one call in a new process, in MB."""
    rows = {}
    for row in results["chain"]["memory"]:
        rows[f"chain, {row['form']}, {shown(row['shape'])}"] = row
    for row in results["dtw"]["memory"]:
        band = f", band {row['band']}" if row["band"] else ""
        rows[f"DTW, {row['form']}, N = M = {row['length']}{band}"] = row
    figure = Figure(figsize=(7, 0.5 * len(rows) + 1), layout="constrained")
    ax = figure.subplots()
    for place, row in enumerate(rows.values()):
        for n, (what, name) in enumerate({"inputs": "inputs", "outputs": "outputs", "beyond": "workspace"}.items()):
            if what in row:
                length, position = max(row[what], 0.1), place + 0.27 * (n - 1)
                ax.barh(position, length, height=0.25, color=COLORS[n], label=None if place else name)
                number = f" {row[what]:.{1 if row[what] < 10 else 0}f}"
                ax.text(length, position, number, va="center", fontsize=6)
    ax.set(xscale="log", xlabel="MB")
    ax.set_xlim(0.1, 10 * max(row["inputs"] for row in rows.values()))
    ax.set_yticks(range(len(rows)), list(rows), fontsize=7)
    ax.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


# --- texts


def markdown(results: dict[str, Any]) -> list[str]:
    peers = {**results["chain"]["peers"], **results["dtw"]["peers"], "aeon": results["dtw"]["aeon"]["version"]}
    peers |= results["hmm"]["peers"]
    versions = ", ".join(f"{name} {version}" for name, version in peers.items() if version)
    steps = panels(results)["layers"]["training step of a tagger"]
    gains = [entry["pytorch-crf"] for entry in steps.values()]
    lines = [
        "# Benchmarks",
        "",
        "This page compares the time of bellmax with the time of other libraries on a CPU. [All",
        "measurements](tables.md) has the times in milliseconds, and more benchmarks.",
        "",
        "## How to read the numbers",
        "",
        "The figures and the table show ratios. A ratio is the time that another implementation needs for a task,",
        "divided by the time that bellmax needs for the same task. Above 1×, bellmax is faster. Below 1×, the other",
        "implementation is faster. In the figures, a bar starts at 1×. It points to the right if bellmax is faster,",
        "and to the left if bellmax is slower. The scale is logarithmic.",
        "",
        "- **Machine**: " + described(results["chain"]["machine"]) + ". No GPU was used.",
        *wrap(f"- **Versions**: {versions}.", 100, subsequent_indent="  ", break_on_hyphens=False),
        "- **Times** are medians of repeated calls. They include all Python code. The calls of all libraries are",
        "  interleaved in one process. The exceptions are aeon and dynamax, which need a separate environment.",
        "- **Precision** is float32, unless the text says otherwise. dtaidistance and hmmlearn compute in float64, and",
        "  so does bellmax in the benchmarks of hidden Markov models.",
        "- **Memory**: we set `mallopt` of glibc so that a process keeps freed memory and uses it again. A normal",
        "  process returns freed memory to the system. There, calls with large outputs take longer than here, because",
        "  the system must provide new memory for each call.",
        "- **torch-struct** is written for GPUs. Its parallel scan does more arithmetic than a loop over the steps,",
        "  which is a disadvantage on a CPU.",
        "- **pytorch-crf**: the benchmarks of chains measure the CRF alone. In the training step of a tagger, the CRF",
        "  is a small share of the time. So a whole training step is only",
        f"  {min(gains):.1f}–{max(gains):.1f} times faster with bellmax than with pytorch-crf.",
        "",
        "To repeat all measurements on an idle machine, clone the repository and run:",
        "",
        "```bash",
        "make bench",
        "```",
        "",
        "## Overview",
        "",
        "A row compares bellmax with one other implementation in one benchmark. A benchmark has several shapes and",
        "tasks, and each of them has a ratio. The table shows the minimum, median and maximum of these ratios. The",
        "last column counts the ratios below 1×, for which the other implementation is faster.",
        *table(
            "benchmark | compared with | minimum: | median: | maximum: | below 1×:",
            list(summary(panels(results) | without_figure(results))),
        ),
    ]
    for name, title in TITLES.items():
        alt = f"Bar chart, {title}: time of other implementations divided by the time of bellmax, by task and shape"
        note = wrap(NOTES[name], 100, break_on_hyphens=False)
        lines += ["", f"## {title}", "", *note, "", f"![{alt}]({name}.svg)"]
    lines += [
        "",
        "## Growth",
        "",
        "The figure shows how the time of bellmax grows with the size of the problem. Both axes are logarithmic. Along",
        "a gray line, the time grows in proportion to the size.",
        "",
        "![Three line charts: milliseconds against edges of DAGs, edges of chains, and cells of DTW](growth.svg)",
        "",
        "## Memory",
        "",
        "The figure shows the memory of a process that computes a value and its gradient once. The process of the last",
        "row computes only the value. *Workspace* is the peak memory minus the memory of inputs and outputs. If the",
        "inputs of DTW are series, bellmax does not build the cost matrix.",
        "",
        "![Bar chart: MB of inputs, outputs and workspace for chains and DTW](memory.svg)",
    ]
    return lines


def summary(figures: dict[str, Panels]) -> Iterable[list[str]]:
    for name, panels in figures.items():
        by_peer: dict[str, list[float]] = {}
        for rows in panels.values():
            for entry in rows.values():
                for peer, times in entry.items():
                    by_peer.setdefault(peer, []).append(times)
        for peer, ratios in by_peer.items():
            below = f"{sum(times < 1 for times in ratios)} of {len(ratios)}"
            numbers = (factor(of(ratios)) for of in (min, statistics.median, max))
            yield [TITLES.get(name, name), label(peer), *numbers, below]


def readme_table(results: dict[str, Any]) -> str:
    steps = panels(results)["layers"]["training step of a tagger"]
    sizes = [row["size"] for row in results["ner"]["rows"] if row["crf"] == "pytorch-crf"]
    gains = (factor(steps[f"negentropy, surrogate, {size} sentences"]["pytorch-crf"]) for size in sizes)
    lines = [
        [
            "Training step of a tagger (LSTMs and a CRF): pytorch-crf",
            " / ".join(map(str, sizes)) + " sentences",
            " / ".join(gains),
        ]
    ]
    for what, shown_shape, (name, part, shape, task, peer) in README:
        row = next(r for r in results[name][part] if tuple(r["shape"]) == shape and r.get("task") == task)
        lines.append([what, shown_shape, factor(ratio(row[peer], row["bellmax"]))])
    return "\n".join(table("task | shape | time of the other library ÷ time of bellmax:", lines)[1:]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("docs/benchmarks"), help="folder of the results and of the page"
    )
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file with the table to fill")
    args = parser.parse_args()
    results = {name: json.loads((args.results / f"{name}.json").read_text()) for name in NAMES}
    import matplotlib

    matplotlib.rcParams.update(PLAIN)
    pictures = {name: draw_ratios(own) for name, own in panels(results).items()}
    pictures |= {"growth": draw_growth(results), "memory": draw_memory(results)}
    for name, figure in pictures.items():
        figure.savefig(args.results / f"{name}.svg", metadata={"Date": None})
    (args.results / "index.md").write_text("\n".join(markdown(results)) + "\n")
    readme = args.readme.read_text()
    args.readme.write_text(BETWEEN.sub(lambda _: readme_table(results), readme))


if __name__ == "__main__":
    main()
