"""The command ``bellmax`` in a new process."""

from __future__ import annotations

import subprocess
import sys


def run(arguments: list[str], *lines: str) -> subprocess.CompletedProcess[str]:
    """Run lines of code in a new process, in which ``main()`` is the command with these arguments."""
    code = f"import sys\nfrom bellmax_command import main\nsys.argv = {['bellmax', *arguments]}\n"
    return subprocess.run([sys.executable, "-c", "\n".join([code, *lines])], capture_output=True, text=True)


def modules_after(arguments: list[str]) -> tuple[str, set[str]]:
    """The output of the command, and the modules that it has imported."""
    done = run(
        arguments, "try: main()", "except SystemExit as end: assert not end.code, end.code", "print(*sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    shown, _, modules = done.stdout.rstrip().rpartition("\n")
    return shown, set(modules.split())
