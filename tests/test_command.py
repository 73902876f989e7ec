"""The command ``bellmax``: which modules it imports, and how it finds the subcommands of other distributions."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import modules_after, run

pytest.importorskip("typer")

WORKING = """
from bellmax_command import Subcommand
HELLO = Subcommand("Say hello.", "hello:app", (), "hello")
NEEDY = Subcommand("Say more.", "hello:app", ("typer", "no_such_module"), "hello[more]")
"""
COMMANDS = """
import typer
app = typer.Typer()

@app.callback(invoke_without_command=True)
def hello():
    print("hello from another distribution")
"""
ENTRY_POINTS = {
    "hello": "hello_subcommands:HELLO",
    "needy": "hello_subcommands:NEEDY",
    "no-module": "no_such_module:HELLO",
    "no-attribute": "hello_subcommands:NONE",
    "raises": "raises:HELLO",
    "gpu": "no_such_module:GPU",
}


@pytest.fixture
def site(tmp_path: Path) -> str:
    """A line of code that installs a distribution in which most entry points are broken, and no other one."""
    (tmp_path / "hello_subcommands.py").write_text(WORKING)
    (tmp_path / "hello.py").write_text(COMMANDS)
    (tmp_path / "raises.py").write_text("1 / 0")
    info = tmp_path / "hello-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n")
    lines = (f"{name} = {value}\n" for name, value in ENTRY_POINTS.items())
    (info / "entry_points.txt").write_text("[bellmax.commands]\n" + "".join(lines))
    return _only(tmp_path)


def _only(folder: Path) -> str:
    """A line of code after which only the entry points of distributions in this folder exist."""
    return (
        f"sys.path.append({str(folder)!r})\n"
        "import importlib.metadata as metadata, bellmax_command\n"
        "bellmax_command.entry_points = lambda group: [\n"
        f"    entry for distribution in metadata.distributions(path=[{str(folder)!r}])\n"
        "    for entry in distribution.entry_points if entry.group == group\n"
        "]"
    )


def test_help_imports_neither_torch_nor_the_library() -> None:
    shown, modules = modules_after(["--help"])
    assert "gpu" in shown
    assert not modules & {"torch", "bellmax"}


def test_help_of_gpu_imports_none_of_the_optional_libraries() -> None:
    shown, modules = modules_after(["gpu", "--help"])
    assert "Verify and benchmark" in shown
    assert not modules & {"sklearn", "scipy", "matplotlib", "transformers"}


@pytest.mark.parametrize("arguments", [["gpu"], ["gpu", "--output", "a.json"], ["gpu", "--help"]], ids=" ".join)
def test_a_module_that_is_missing_is_named(arguments: list[str]) -> None:
    done = run(arguments, "sys.modules['rich'] = None", "main()")
    assert done.returncode == 1
    assert done.stderr == "bellmax gpu cannot be loaded: rich is not installed: try pip install 'bellmax[gpu]'\n"


def test_typer_that_is_missing_is_named() -> None:
    done = run(["gpu"], "sys.modules['typer'] = None", "main()")
    assert done.returncode == 1
    assert done.stderr == "typer is not installed: try pip install 'bellmax[gpu]'\n"


@pytest.mark.parametrize("name", ["ner", "audio", "translation"])
@pytest.mark.parametrize("options", [[], ["train", "data"], ["--help"]], ids=" ".join)
def test_applications_that_are_not_installed_are_named(tmp_path: Path, name: str, options: list[str]) -> None:
    done = run([name, *options], _only(tmp_path), "main()")
    assert done.returncode == 1
    assert done.stderr == (
        f"bellmax {name} is not installed: try pip install bellmax-apps (in a clone: pip install ./apps)\n"
    )


def test_help_without_the_applications_says_how_to_install_them(tmp_path: Path) -> None:
    done = run(["--help"], _only(tmp_path), "main()")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "gpu Verify and benchmark the GPU kernels" in shown
    assert "For ner, audio, translation: pip install bellmax-apps" in shown


def test_a_subcommand_of_another_distribution_runs(site: str) -> None:
    done = run(["hello"], site, "main()")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello from another distribution\n"


@pytest.mark.parametrize("name", ["hello", "gpu"])
def test_help_before_a_subcommand_lists_all_subcommands(site: str, name: str) -> None:
    done = run(["--help", name], site, "main()")
    assert done.returncode == 0, done.stderr
    assert "Say hello." in done.stdout
    assert "Verify and benchmark" in done.stdout


def test_help_lists_broken_subcommands_with_the_reason(site: str) -> None:
    done = run(["--help"], site, "main()")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "hello Say hello." in shown
    assert "no_such_module is not installed: try pip install hello[more]" in shown
    assert "no-module Cannot be loaded: No module named 'no_such_module'" in shown
    assert "raises Cannot be loaded: division by zero" in shown
    assert "gpu Verify and benchmark the GPU kernels" in shown


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("needy", "no_such_module is not installed: try pip install hello[more]"),
        ("no-module", "No module named 'no_such_module'"),
        ("no-attribute", "module 'hello_subcommands' has no attribute 'NONE'"),
    ],
)
def test_a_broken_subcommand_that_is_used_gives_one_line(site: str, name: str, reason: str) -> None:
    done = run([name], site, "main()")
    assert done.returncode == 1
    assert done.stderr == f"bellmax {name} cannot be loaded: {reason}\n"


def test_broken_entry_points_do_not_break_gpu(site: str) -> None:
    done = run(["gpu", "--help"], site, "main()")
    assert done.returncode == 0, done.stderr
    assert "Verify and benchmark" in done.stdout
    unreadable = "def broken(group): raise TypeError(group)", "bellmax_command.entry_points = broken"
    done = run(["gpu", "--help"], "import bellmax_command", *unreadable, "main()")
    assert done.returncode == 0, done.stderr


def test_completion_survives_broken_entry_points(site: str) -> None:
    words = "import os\nos.environ |= dict(_BELLMAX_COMPLETE='complete_bash', COMP_WORDS='bellmax he', COMP_CWORD='1')"
    done = run([], words, site, "main()")
    assert done.stdout.split() == ["hello"], done.stderr
