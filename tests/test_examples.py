"""The examples run, as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstart.py", "over 2 device(s): every byte equal"),
        ("multihost.py", "restored 2,097,152 bytes in one process, step 1000: every byte equal"),
        ("train_nnx.py", "stopped and resumed at step 10: after 20 steps every bit as without a stop"),
        ("train_equinox.py", "stopped and resumed at step 10: after 20 steps every bit as without a stop"),
        ("resume_after_kill.py", "after 40 steps every bit as in the undisturbed run"),
        ("lora.py", "the first save wrote 17,039,360 bytes, the second 262,144; each step is complete"),
    ],
)
def test_an_example_does_what_it_says(name: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
