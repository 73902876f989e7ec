"""A new Ω with kernels: a class in Python, a header in ``native/omega/`` and its entry in ``native/omega/list.h``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import support.cubic
from support.builds import build, copy_native, needs_compiler, run_tests
from support.cubic import Cubic
from support.kernels import needs_kernels

import bellmax as bx


def add_line(file: Path, after: str, line: str) -> None:
    text = file.read_text()
    assert text.count(after) == 1
    file.write_text(text.replace(after, f"{after}\n{line}"))


def test_its_class_is_a_regularizer() -> None:
    bx.check_regularizer(Cubic(0.7))


@pytest.mark.slow
@needs_compiler
@needs_kernels
def test_its_kernels_need_a_header_and_an_entry_in_a_list(tmp_path: Path) -> None:
    native = copy_native(tmp_path)
    shutil.copy(Path(support.cubic.__file__).with_suffix(".h"), native / "omega")
    add_line(native / "omega" / "list.h", '#include "hard.h"', '#include "cubic.h"')
    add_line(native / "omega" / "list.h", "#define BELLMAX_OTHER_OMEGAS(OMEGA) \\", "    OMEGA(cubic, 1, Cubic) \\")
    run_tests(build(native), Path(__file__).with_name("new_omega.py"))
