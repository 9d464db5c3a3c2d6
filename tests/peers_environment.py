"""Scripts that the peers' own code runs in: their environment, which `make test-peers` makes."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def run_peers(script: str, *arguments: str | Path) -> None:
    """Run tests/serve_export/peers/SCRIPT; skips where the environment is not there."""
    if not PYTHON.exists():
        pytest.skip("no environment of the peers: run `make test-peers`")
    path = ROOT / "tests" / "serve_export" / "peers" / script
    argv = [str(PYTHON), str(path), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
