"""The command ``bellmax``: imports of its help, and messages for missing extras."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer")
SLOW = [
    "sklearn",
    "scipy",
    "librosa",
    "soundfile",
    "pretty_midi",
    "sacremoses",
    "sacrebleu",
    "matplotlib",
    "transformers",
]


def run(arguments: list[str], *lines: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments in a new process, after some lines of code."""
    code = f"import sys\nfrom bellmax_command import main\nsys.argv = {['bellmax', *arguments]}\n"
    return subprocess.run([sys.executable, "-c", "\n".join([code, *lines])], capture_output=True, text=True)


def modules_after(arguments: list[str]) -> tuple[str, set[str]]:
    done = run(
        arguments, "try: main()", "except SystemExit as end: assert not end.code, end.code", "print(*sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    shown, _, modules = done.stdout.rstrip().rpartition("\n")
    return shown, set(modules.split())


def test_help_imports_neither_torch_nor_the_applications() -> None:
    shown, modules = modules_after(["--help"])
    assert all(name in shown for name in ("ner", "audio", "translation", "gpu", "Named entity recognition"))
    assert not modules & {"torch", "bellmax", *SLOW}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ner", "--help"], "Named entity recognition"),
        (["ner", "train", "--help"], "--embeddings"),
        (["audio", "align", "--help"], "--audio-clicks"),
        (["translation", "--help"], "Translation: train on parallel text"),
        (["gpu", "--help"], "Verify and benchmark"),
    ],
    ids=" ".join,
)
def test_help_of_an_application_imports_none_of_its_libraries(arguments: list[str], expected: str) -> None:
    shown, modules = modules_after(arguments)
    assert expected in shown
    assert not modules & set(SLOW)


@pytest.mark.parametrize("arguments", [["ner"], ["ner", "train", "data"], ["ner", "--help"]])
def test_a_missing_extra_is_named(arguments: list[str]) -> None:
    done = run(arguments, "sys.modules['seqeval'] = None", "main()")
    assert done.returncode == 1
    assert done.stderr.strip() == "seqeval is not installed: try pip install 'bellmax[ner]'"


def test_help_names_a_missing_extra() -> None:
    shown = run(["--help"], "sys.modules['seqeval'] = None", "main()").stdout
    assert "(needs the extra ner)" in " ".join(shown.replace("│", " ").split())
