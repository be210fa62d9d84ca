"""The interpreter of each side; a peer that brings its own stack gets a virtual environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from settings import TENSORFLOW_PACKAGES

VENV = Path(__file__).parent / ".venv-tensorflow"
VARIABLE = "MESHWRIGHT_TENSORFLOW_PYTHON"

_PACKAGES = "import importlib.metadata as m; print(m.version('tensorflow'), m.version('tf_keras'))"
_FOREIGN = ("JAX_", "XLA_", "KERAS_", "TF_", "DTENSOR_", "OMP_", "MKL_")


def clean_environment() -> dict[str, str]:
    """This process' environment without what would change one side and not the other."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "NPROC" and not name.startswith(_FOREIGN)
    }


def tensorflow_python(given: str | None) -> Path | None:
    """The interpreter that has TensorFlow: given, there already, or made now; else ``None``."""
    if given is not None:
        if _versions(Path(given)) is None:
            sys.exit(f"{given} has no tensorflow and tf_keras to import.")
        return Path(given)
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if python.exists() and _versions(python) is not None:
        return python
    return python if _make(python) else None


def _versions(python: Path) -> str | None:
    try:
        asked = subprocess.run([python, "-c", _PACKAGES], capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def _make(python: Path) -> bool:
    print(f"making {VENV.name} with {', '.join(TENSORFLOW_PACKAGES)} (about 2 GB) ...", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)  # a half-made one is not to be trusted
    try:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *TENSORFLOW_PACKAGES], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"TensorFlow could not be installed ({error}); its comparisons are left out.")
        return False
    return True
