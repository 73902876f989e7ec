"""The overview page of the benchmarks: figures of all ratios, growth, memory, the machine and the peers.

It is made from the results of the other benchmarks. It also fills the table of the README.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from measuring import Row, Times, factor, ratio, shown, table

NAMES = "dag", "chain", "dtw", "ctc", "lattices", "trees", "attention", "ner", "translation", "overhead", "limits"
COLOURS = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
PLAIN = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 8, "svg.hashsalt": "bellmax"}
Panels = dict[str, dict[str, dict[str, float]]]  # title, row, peer: how many times slower the peer is

TITLES = {
    "chain-dense": "Chains from dense potentials, negentropy",
    "chain-scores": "Chains from scores, negentropy",
    "chain-l2": "Chains from dense potentials, l2",
    "dtw-costs": "DTW from costs, negentropy",
    "dtw-series": "DTW from series, values",
    "ctc": "CTC, negentropy",
    "layers": "Layers, and steps of training with them",
    "dag": "Any graph: kernels against the reference backend in plain torch",
}
README = (  # label in the README, file, table, shape, task, peer
    ("pytorch-crf, likelihood from scores", "chain", "scores", (64, 128, 32), "value and gradient", "pytorch-crf"),
    ("torch-struct, dense potentials", "chain", "dense", (64, 128, 32), "value and gradient", "torch-struct"),
    ("a good loop in plain torch, the same", "chain", "dense", (64, 128, 32), "value and gradient", "good loop"),
    ("entmax's sparsemax in that loop, l2", "chain", "l2", (64, 128, 32), "value and gradient", "entmax"),
    ("tslearn, soft-DTW from costs", "dtw", "costs", (32, 256, 256), "value and gradient", "tslearn"),
    ("pysdtw, soft-DTW from costs", "dtw", "costs", (8, 1024, 1024), "value and gradient", "pysdtw"),
    ("torch's ctc_loss", "ctc", "torch", (32, 400, 32, 60), "value and gradient", "torch"),
    (
        "dtaidistance in C, hard DTW of all pairs of series, one thread",
        "dtw",
        "collections",
        (128, 128),
        None,
        "dtaidistance",
    ),
    ("the same, of series of eight steps", "dtw", "collections", (128, 8), None, "dtaidistance"),
)
DOCS = "https://github.com/bellmax/bellmax/blob/main/docs/benchmarks"  # a package index shows the README, too
BETWEEN = re.compile(r"(?<=<!-- ratios -->\n).*?(?=<!-- end of ratios -->)", re.DOTALL)


# --- ratios


def panels(results: dict[str, Any]) -> dict[str, Panels]:
    """All ratios, by figure."""
    chain, dtw = results["chain"], results["dtw"]
    spread = [{**row, "shape": f"{shown(row['shape'])}, spread 100"} for row in chain["spread"]]
    return {
        "chain-dense": by_task(chain["dense"]),
        "chain-scores": by_task([*chain["scores"], *spread]),
        "chain-l2": by_task(chain["l2"]),
        "dtw-costs": by_task(dtw["costs"]),
        "dtw-series": of_series(dtw["series"], dtw["aeon"]["rows"]) | of_collections(dtw["collections"]),
        "ctc": by_task(results["ctc"]["torch"]),
        "layers": of_layers(results),
        "dag": of_graphs(results["dag"]["against_reference"]),
    }


def by_task(rows: Iterable[Row]) -> Panels:
    found: Panels = {}
    for row in rows:
        label = row["shape"] if isinstance(row["shape"], str) else shown(row["shape"])
        found.setdefault(row["task"], {})[label] = {
            name: ratio(times, row["bellmax"])
            for name, times in row.items()
            if isinstance(times, dict) and not name.startswith("bellmax")
        }
    return found


def of_series(rows: Iterable[Row], aeon: Iterable[Row]) -> Panels:
    alone = {tuple(row["shape"]): row["aeon"] for row in aeon}
    found: Panels = {}
    for row in rows:
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        if row["threads"] == 1 and tuple(row["shape"]) in alone:
            row = {**row, "aeon": alone[tuple(row["shape"])]}
        for kind, peers in {"soft": ("tslearn", "aeon"), "hard": ("dtaidistance", "librosa")}.items():
            own = {name: ratio(row[name], row[f"bellmax, {kind}"]) for name in peers if name in row}
            if own:
                found.setdefault(f"{kind}, {threads}", {})[shown(row["shape"])] = own
    return found


def of_collections(rows: Iterable[Row]) -> Panels:
    found: Panels = {}
    for row in rows:
        title = f"all pairs, hard, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        found.setdefault(title, {})[shown(row["shape"])] = {"dtaidistance": ratio(row["dtaidistance"], row["bellmax"])}
    return found


def of_layers(results: dict[str, Any]) -> Panels:
    found: Panels = {}
    for part, title in {"step": "attention, scores to weights", "module": "attention, whole module"}.items():
        for row in results["attention"][part]:
            if row["layer"] == "softmax":
                plain: Times = row["both"]
            else:
                label = f"{row['layer']}, {shown(row['shape'])}{', mask' if row['masked'] else ''}"
                found.setdefault(f"{title}, and back", {})[label] = {"softmax": ratio(plain, row["both"])}
    for row in results["ner"]["rows"]:
        if row["crf"] == "pytorch-crf":
            peer: Times = row["step"]
        else:
            label = f"{row['crf'].removeprefix('bellmax, ')}, {row['loss']}, {row['size']} sentences"
            found.setdefault("step of a tagger", {})[label] = {"pytorch-crf": ratio(peer, row["step"])}
    for row in results["translation"]["rows"]:
        if row["attention"] == "dot-negentropy":
            softmax: Times = row["step"]
        else:
            label = f"{row['attention']}, size {row['size']}"
            found.setdefault("step of a translator", {})[label] = {"softmax": ratio(softmax, row["step"])}
    return found


def of_graphs(rows: Iterable[Row]) -> Panels:
    found: Panels = {}
    for row in rows:
        label = f"{row['omega']}, {row['task']}"
        found.setdefault(f"batch of {row['batch']}", {})[label] = {"reference": row["ratio"]}
    return found


# --- figures


def draw_ratios(panels: Panels) -> Figure:
    """A bar for each ratio, starting at 1×: to the right if the peer is slower, to the left if it is faster."""
    peers = list(dict.fromkeys(peer for rows in panels.values() for own in rows.values() for peer in own))
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
    handles = [figure.axes[0].barh(0, 0, color=COLOURS[n], label=peer) for n, peer in enumerate(peers)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(peers), frameon=False)
    return figure


def _height(rows: dict[str, dict[str, float]]) -> float:
    return 0.6 + 0.16 * sum(max(len(own), 1.4) for own in rows.values())


def _bars(ax: Axes, rows: dict[str, dict[str, float]], peers: Sequence[str]) -> None:
    place, ticks = 0.0, []
    for label, own in rows.items():
        ticks.append((place + (len(own) - 1) / 2, label))
        for peer, times in own.items():
            ax.barh(place, times - 1, left=1, height=0.9, color=COLOURS[peers.index(peer)])
            ax.annotate(
                f" {factor(times)} ", (max(times, 1), place), ha="left", va="center", fontsize=6, annotation_clip=False
            )
            place += 1
        place += 0.6
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
    """Time against size; grey lines show linear growth."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    graph, chain, dtw = (results[name]["growth"] for name in ("dag", "chain", "dtw"))
    for task in ("value", "gradient", "Hessian product"):
        _curve(axes[0], task, [(row["edges"], row[task]) for row in graph])
    for axis in dict.fromkeys(row["axis"] for row in chain):
        for form in ("dense", "scores"):
            own = [(row["edges"], row[form]) for row in chain if row["axis"] == axis]
            _curve(axes[1], f"{form}, {axis} grows", own)
    for task in ("value", "value and gradient", "Hessian product"):
        _curve(axes[2], task, [(row["shape"][0] * row["shape"][1] ** 2, row[task]) for row in dtw])
    for ax, title, what in zip(
        axes,
        ("Any graph", "Chains, value and gradient", "DTW"),
        ("edges", "edges", "cells of costs"),
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


def _curve(ax: Axes, label: str, points: Sequence[tuple[int, Times]]) -> None:
    number = len(ax.get_legend_handles_labels()[0])
    xs, ys = [size for size, _ in points], [times["median"] for _, times in points]
    ax.plot(xs, ys, "o-", markersize=3, linewidth=1.2, color=COLOURS[number], label=label)


def draw_memory(results: dict[str, Any]) -> Figure:
    """Memory of one call in a separate process, in MB."""
    rows = {}
    for row in results["chain"]["memory"]:
        rows[f"chain, {row['form']}, {shown(row['shape'])}"] = row
    for row in results["dtw"]["memory"]:
        band = f", band {row['band']}" if row["band"] else ""
        rows[f"DTW, {row['form']}, N = M = {row['length']}{band}"] = row
    figure = Figure(figsize=(7, 0.5 * len(rows) + 1), layout="constrained")
    ax = figure.subplots()
    for place, row in enumerate(rows.values()):
        for n, what in enumerate(("inputs", "outputs", "beyond")):
            if what in row:
                label = what if not place else None
                ax.barh(place + 0.27 * (n - 1), max(row[what], 0.1), height=0.25, color=COLOURS[n], label=label)
                ax.text(
                    max(row[what], 0.1),
                    place + 0.27 * (n - 1),
                    f" {row[what]:.{1 if row[what] < 10 else 0}f}",
                    va="center",
                    fontsize=6,
                )
    ax.set(xscale="log", xlabel="MB")
    ax.set_xlim(0.1, 10 * max(row["inputs"] for row in rows.values()))
    ax.set_yticks(range(len(rows)), list(rows), fontsize=7)
    ax.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


# --- texts


def markdown(results: dict[str, Any]) -> list[str]:
    m = results["chain"]["machine"]
    peers = {**results["chain"]["peers"], **results["dtw"]["peers"], "aeon": results["dtw"]["aeon"]["version"]}
    lines = [
        "# Benchmarks",
        "",
        "    make bench",
        "",
        "installs the peers, measures everything on these pages and writes them. Run it on an otherwise idle machine.",
        "Each page names its machine; for chains it is",
        f"{m['processor']}, {m['threads']} threads, {m['instructions']}; Python {m['python']}, torch {m['torch']};",
        ", ".join(f"{name} {version}" for name, version in peers.items() if version) + ".",
        "",
        "A ratio says how many times slower a peer is, by the medians of whole Python calls in float32, interleaved in",
        "one process. Bars to the left of 1×: bellmax is slower. All times: " + ", ".join(_pages()) + ".",
        "",
        "## Overview",
        "",
        "Ratios over all shapes and tasks. The last column counts the cases in which the peer is faster than bellmax.",
        *table("benchmark | peer | minimum: | median: | maximum: | faster:", list(summary(panels(results)))),
    ]
    for name, title in TITLES.items():
        lines += ["", f"## {title}", "", f"![How many times slower the others are]({name}.svg)"]
    lines += [
        "",
        "## Growth",
        "",
        "Grey lines show linear growth.",
        "",
        "![Time against size](growth.svg)",
        "",
        "## Memory",
        "",
        "One call in a separate process: value and gradient, or the value only in the last row. *Beyond* is the peak",
        "minus inputs and outputs. DTW from series does not build the cost matrix.",
        "",
        "![Memory of inputs, outputs and beyond](memory.svg)",
    ]
    return lines


def _pages() -> Iterable[str]:
    titles = {"dag": "any graph", "chain": "chains", "dtw": "DTW", "ctc": "CTC"}
    titles |= {"ner": "a tagger", "translation": "a translator"}
    return (f"[{titles.get(name, name)}]({name}.md)" for name in NAMES)


def summary(figures: dict[str, Panels]) -> Iterable[list[str]]:
    for name, own in figures.items():
        found: dict[str, list[float]] = {}
        for rows in own.values():
            for entry in rows.values():
                for peer, times in entry.items():
                    found.setdefault(peer, []).append(times)
        for peer, ratios in found.items():
            slower = f"{sum(times < 1 for times in ratios)} of {len(ratios)}"
            numbers = (factor(of(ratios)) for of in (min, statistics.median, max))
            yield [TITLES[name], peer, *numbers, slower]


def readme_table(results: dict[str, Any]) -> str:
    lines = []
    for what, name, part, shape, task, peer in README:
        row = next(r for r in results[name][part] if tuple(r["shape"]) == shape and r.get("task") == task)
        ours = row["bellmax" if "bellmax" in row else "bellmax, hard"]
        lines.append([what, shown(shape), factor(ratio(row[peer], ours)), f"[{name}]({DOCS}/{name}.md)"])
    return "\n".join(table("| shape | slower by: | page", lines)[1:]) + "\n"


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
