"""The README and the pages of benchmarks state the measured numbers."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import page

    return page


def measured(page: ModuleType) -> dict[str, object]:
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in page.NAMES}


def test_readme_states_the_measured_numbers(page: ModuleType) -> None:
    (written,) = page.BETWEEN.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert written == page.readme_table(measured(page))


def test_page_states_the_measured_numbers(page: ModuleType) -> None:
    text = (RESULTS / "index.md").read_text(encoding="utf-8")
    assert text == "\n".join(page.markdown(measured(page))) + "\n"
    for picture in (*page.TITLES, "growth", "memory"):
        assert f"({picture}.svg)" in text
        assert (RESULTS / f"{picture}.svg").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_tables_state_the_measured_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    text = (RESULTS / f"tables/{name}.md").read_text(encoding="utf-8")
    assert text == "\n".join(importlib.import_module(name).markdown(results)) + "\n"


def test_one_page_has_all_tables() -> None:
    text = (RESULTS / "tables.md").read_text(encoding="utf-8")
    included = re.findall(r'^    --8<-- "benchmarks/tables/(\w+)\.md"$', text, re.MULTILINE)
    tables = sorted(path.stem for path in (RESULTS / "tables").glob("*.md"))
    assert sorted(included) == tables == sorted(path.stem for path in RESULTS.glob("*.json"))


def test_every_peer_is_drawn_including_faster_ones(page: ModuleType) -> None:
    rows = {"(1,2)": {"fast": 0.5, "slow": 40.0}, "(3,4)": {"slow": 3.0}}
    figure = page.draw_ratios({"value": rows})
    widths = [bar.get_width() for bar in figure.axes[0].patches if bar.get_width()]
    assert widths == [-0.5, 39.0, 2.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fast", "slow"]
    (fast, slow) = page.summary({"dag": {"value": rows}})
    assert fast[1:] == ["fast", "0.50×", "0.50×", "0.50×", "1 of 1"]
    assert slow[1:] == ["slow", "3.0×", "22×", "40×", "0 of 2"]


def test_errors_of_peers_are_reported_as_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import mistakes

    mistakes.main()
    _, _, torchs, *_ = capsys.readouterr().out.splitlines()
    theirs, ours = (float(cell.strip(" %")) for cell in torchs.strip("|").split("|")[1:])
    assert theirs > 10
    assert ours < 1e-4
