"""The programs of the documentation of distributed training run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/guide/scaling.md"
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def test_trainings_run_and_resume(tmp_path: Path) -> None:
    """Run a program as the only process of ``torchrun``, without Lightning, which is not a test dependency."""
    assert set(PROGRAMS) == {"model.py", "train.py", "accelerated.py", "lightning_train.py"}
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    code = """
import os, runpy, torch
runpy.run_path("train.py")
saved = torch.load("last.pt", weights_only=True)
assert saved["epochs"] == 3
torch.save({**saved, "epochs": 2}, "last.pt")
os.environ["MASTER_PORT"] = "0"
runpy.run_path("train.py")
again = torch.load("last.pt", weights_only=True)
assert again["optimizer"]["state"][0]["step"] == 8 * 4
runpy.run_path("accelerated.py")
assert os.path.exists("state")
"""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **told, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
