"""The applications as subcommands of ``bellmax``."""

from __future__ import annotations

import pytest
from support.commands import modules_after, run

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


def test_help_imports_neither_torch_nor_the_applications() -> None:
    shown, modules = modules_after(["--help"])
    assert all(name in shown for name in ("ner", "audio", "translation", "gpu", "Named entity recognition"))
    assert "pip install" not in shown
    assert not modules & {"torch", "bellmax", *SLOW}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ner", "--help"], "Named entity recognition"),
        (["ner", "train", "--help"], "--embeddings"),
        (["audio", "align", "--help"], "--audio-clicks"),
        (["translation", "--help"], "Translation: train on parallel text"),
    ],
    ids=str,
)
def test_help_of_an_application_imports_none_of_its_libraries(arguments: list[str], expected: str) -> None:
    shown, modules = modules_after(arguments)
    assert expected in shown
    assert not modules & set(SLOW)


@pytest.mark.parametrize("arguments", [["ner"], ["ner", "train", "data"], ["ner", "--help"]], ids=" ".join)
def test_a_library_that_is_missing_is_reported(arguments: list[str]) -> None:
    done = run(arguments, "sys.modules['seqeval'] = None", "main()")
    assert done.returncode == 1
    assert done.stderr == "bellmax ner cannot be loaded: seqeval is not installed: try pip install bellmax-apps\n"


def test_help_names_a_library_that_is_missing() -> None:
    shown = run(["--help"], "sys.modules['seqeval'] = None", "main()").stdout
    assert "seqeval is not installed: try pip install bellmax-apps" in " ".join(shown.replace("│", " ").split())
