"""The page of ``make demo``: its numbers, and its controls if a browser is installed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo.py", "--output", str(folder)])
        runpy.run_path(str(DEMO), run_name="__main__")
    return (folder / "index.html").read_text(encoding="utf-8")


def test_the_page_is_self_contained(page: str) -> None:
    assert not re.search(r"""(src|href)=["']|@import|url\(""", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_page_has_each_section_once(page: str) -> None:
    long = [line for line in page.splitlines() if len(line) > 60]
    assert len(long) > 50
    assert [line for line in long if long.count(line) > 1] == []
    assert page.count("<h2>") == page.count("<section>") == 7


def test_the_page_holds_the_results_of_the_library(page: str) -> None:
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1].replace("<\\/", "</"))
    sparse, dense = data["tag"]["models"]["sparsemax"], data["tag"]["models"]["negentropy"]
    assert [reading["probability"] for reading in sparse["readings"]] == pytest.approx([0.6, 0.4], abs=0.02)
    assert len(dense["readings"]) == 5
    for name in ("negentropy", "sparsemax"):
        assert len(data["align"]["frames"][name]) == len(data["gammas"])
        for frame in data["follow"]["frames"][name]:
            assert sum(
                p for p, (_, child) in zip(frame["edges"], data["follow"]["edges"], strict=True) if child == 6
            ) == (pytest.approx(1, abs=1e-5))
            for path in frame["best"]:
                nodes = [data["follow"]["edges"][edge] for edge in path["edges"]]
                assert all(before[1] == after[0] for before, after in pairwise(nodes))


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_the_controls_move_the_pictures(page: str, tmp_path: Path) -> None:
    check = """
    <script>
    const seen = [], names = ["align", "tag", "spell", "match", "parse", "attend", "follow"];
    const look = () => seen.push(names.map(name => document.getElementById(name).innerHTML.length));
    window.onerror = message => { document.body.dataset.error = message; };
    look();
    const slider = document.getElementById("gamma");
    slider.value = 2; slider.dispatchEvent(new Event("input")); look();
    document.querySelector("input[value=sparsemax]").click(); look();
    document.body.dataset.seen = JSON.stringify(seen);
    document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    </script>
    """
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"{check}</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [*command, "--window-size=500,900", "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "data-error" not in done.stdout
    seen = json.loads(re.search(r'data-seen="([^"]*)"', done.stdout)[1])
    first, other_gamma, other_omega = seen
    assert all(size > 500 for size in first)
    assert other_gamma[0] != first[0] and other_gamma[2:] != first[2:]  # noqa: PT018
    assert all(a != b for a, b in zip(other_gamma, other_omega, strict=True) if a)
    assert re.search(r'data-wide="0"', done.stdout)
