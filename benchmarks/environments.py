"""The interpreter of each side; a peer that brings its own stack gets a virtual environment."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FOREIGN = ("JAX_", "XLA_", "KERAS_", "TF_", "DTENSOR_", "OMP_", "MKL_")


def clean_environment() -> dict[str, str]:
    """This process' environment without what would change one side and not the other."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "NPROC" and not name.startswith(_FOREIGN)
    }


@dataclass(frozen=True)
class Environment:
    """A peer's virtual environment: its folder beside this file and what is installed there.

    ``variable`` is the environment variable that may name another interpreter.
    """

    folder: str
    variable: str
    packages: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The packages without versions, extras and where they come from."""
        return tuple(re.split(r"[=<>\[ ]", package)[0] for package in self.packages)

    def add_option(self, parser: argparse.ArgumentParser) -> None:
        """An option ``--tensorflow-python`` or the like, for :meth:`python`, as ``peer_python``."""
        parser.add_argument(
            f"--{self.folder.removeprefix('.venv-')}-python",
            dest="peer_python",
            help=f"an interpreter with {' and '.join(self.packages)} (or set {self.variable}); "
            "otherwise one is made beside this file",
        )

    def python(self, given: str | None = None) -> Path | None:
        """The interpreter that has them: given, there already, or made now; else ``None``."""
        given = given or os.environ.get(self.variable)
        if given is not None:
            if not self._is_there(Path(given)):
                sys.exit(f"{given} has no {' and '.join(self.names)} to import.")
            return Path(given)
        inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
        python = Path(__file__).parent / self.folder / inside
        return python if self._is_there(python) or self._make(python) else None

    def _is_there(self, python: Path) -> bool:
        versions = ", ".join(f"m.version({name!r})" for name in self.names)
        try:
            asked = subprocess.run(
                [python, "-c", f"import importlib.metadata as m; {versions}"], capture_output=True
            )
        except OSError:
            return False
        return asked.returncode == 0

    def _make(self, python: Path) -> bool:
        venv = Path(__file__).parent / self.folder
        print(f"making {self.folder} with {', '.join(self.packages)} (about 2 GB) ...", flush=True)
        shutil.rmtree(venv, ignore_errors=True)  # a half-made one is not to be trusted
        try:
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *self.packages], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"{self.names[0]} could not be installed ({error}); its comparisons are left out."
            )
            return False
        return True


TENSORFLOW = Environment(
    ".venv-tensorflow",
    "MESHWRIGHT_TENSORFLOW_PYTHON",
    ("tensorflow==2.21.*", "tf_keras==2.21.*"),
)
MESH_TENSORFLOW = Environment(
    ".venv-mesh-tensorflow",
    "MESHWRIGHT_MESH_TENSORFLOW_PYTHON",
    ("mesh-tensorflow==0.1.21", "tensorflow==2.15.*"),
)
TORCH = Environment(".venv-torch", "MESHWRIGHT_TORCH_PYTHON", ("torch==2.13.0", "numpy"))
