"""Checks of output files that several subcommands share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("typer")
from bellmax_command.errors import check_outputs


def test_outputs_are_checked(tmp_path: Path) -> None:
    recording, link, old = tmp_path / "rec.wav", tmp_path / "link.wav", tmp_path / "old.csv"
    recording.touch()
    old.touch()
    os.link(recording, link)

    def refused(outputs: dict[str, Path | None], *, force: bool = False) -> str:
        with pytest.raises(ValueError, match="--") as caught:
            check_outputs(outputs, [recording], force=force, endings={"--plot": {".png", ".svg"}})
        return str(caught.value)

    new = tmp_path / "new.png"
    check_outputs({"--output": new, "--plot": None}, [recording], force=False)
    check_outputs({"--output": old}, [recording], force=True)
    for same in (recording, link, tmp_path / "x/../rec.wav"):
        assert refused({"--output": same}, force=True).endswith("which is an input")
    assert refused({"--output": new, "--plot": new}).endswith("which is the file of --output")
    message = "exists: add --force to replace it, or choose another file with --output"
    assert refused({"--output": old}) == f"{old} {message}"
    assert refused({"--output": tmp_path / "no/x.csv"}).startswith("--output must be in a folder that exists, got ")
    assert refused({"--output": tmp_path}).startswith("--output must name a file, got the folder")
    assert refused({"--plot": tmp_path / "x.pgn"}).startswith("--plot must end in .png, .svg, got ")
