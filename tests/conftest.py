"""Eight CPU devices for every test, and the helpers that more than one file of tests needs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# A store that stalls is noticed soon. Read when jaxckpt is imported.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "3")

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("jaxckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxckpt")


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python text in a process of its own, in the test's directory."""

    def run(text: str, *args: str, devices: int = 8) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        flags = f"--xla_force_host_platform_device_count={devices}"
        return subprocess.run(
            [sys.executable, str(script), *args],
            cwd=tmp_path,
            env=os.environ | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long form of the tests that inject faults")


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the long form of a test was asked for."""
    return bool(request.config.getoption("--long"))
