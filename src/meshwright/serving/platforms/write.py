"""Manifests, container files and small programs for platforms, from the options of ``serve``.

Each platform is a list of templates; what they have in common is a :class:`Deployment`. Existing
files are never replaced.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ...errors import ServingError
from ...files import write

_SERVER = ("Containerfile", "Containerfile.dockerignore", "requirements.txt", "DEPLOY.md")
PLATFORMS: dict[str, tuple[str, ...]] = {  # platform -> its templates
    "compose": ("compose.yaml", *_SERVER),
    "kserve": ("inference_service.yaml", *_SERVER),
    "kubeflow": ("inference_service.yaml", *_SERVER),
    "knative": ("service.yaml", *_SERVER),
    "sagemaker": ("serve", *_SERVER),
    "bentoml": ("service.py", "bentofile.yaml", "requirements.txt", "DEPLOY.md"),
    "ray": ("app.py", "serve_config.yaml", "requirements.txt", "DEPLOY.md"),
    "mlflow": ("MLmodel", "python_env.yaml", "requirements.txt", "DEPLOY.md"),
}
_PROGRAM_GIB = 2  # of JAX, Keras and compiled programs
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Deployment:
    """What is deployed: ``arguments`` are those of ``meshwright serve`` beside host and port.

    ``devices`` are those of the mesh, and ``memory_gib`` is what an instance asks for of its host:
    :func:`memory_for`. ``name`` follows the rules of Kubernetes.
    Raises ServingError for another name.
    """

    name: str
    arguments: tuple[str, ...]
    version: str  # of Meshwright
    image: str = ""
    port: int = 8080
    devices: int = 1
    memory_gib: int = 4  # of the host
    max_replicas: int = 4
    start_s: int = 600  # until the server must be ready
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ServingError(
                f"{self.name!r} is not a name for a platform: expected at most 63 lowercase "
                "letters, digits and hyphens, with a letter first. Set --name."
            )

    @property
    def built_image(self) -> str:
        """The image, by its name or the model's."""
        return self.image or f"{self.name}:latest"


def memory_for(weight_bytes: int) -> int:
    """GiB of a host that serves weights of this size: twice, for newer ones come beside them.

    >>> memory_for(0), memory_for(3 << 30)
    (4, 9)
    """
    return max(4, _PROGRAM_GIB + math.ceil(2.1 * weight_bytes / (1 << 30)))


def files_for(platform: str, deployment: Deployment) -> dict[str, str]:
    """The text of each file, by its name. Raises ServingError for an unknown platform.

    >>> found = files_for("compose", Deployment("mnist", ("runs/mnist",), "0.1.0"))
    >>> sorted(found)
    ['Containerfile', 'Containerfile.dockerignore', 'DEPLOY.md', 'compose.yaml', 'requirements.txt']
    """
    if platform not in PLATFORMS:
        raise ServingError(f"unknown platform {platform!r}. Known: {', '.join(PLATFORMS)}.")
    return {
        name: _templates().get_template(f"{name}.j2").render(it=deployment, platform=platform)
        for name in PLATFORMS[platform]
    }


def write_files(platform: str, deployment: Deployment, folder: Path) -> tuple[Path, ...]:
    """Write the files of a platform into a folder and return their paths.

    Raises ServingError where one of them exists, and DataError where one cannot be written.
    """
    texts = {folder / name: text for name, text in files_for(platform, deployment).items()}
    if there := [str(path) for path in texts if path.exists()]:
        raise ServingError(
            f"{', '.join(there)} exists already and is not replaced. Remove it, or name another "
            "folder by --to."
        )
    for path, text in texts.items():
        write(path, text, f"the files for {platform}")
        if path.name == "serve":
            path.chmod(0o755)
    return tuple(texts)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meshwright.serving.platforms"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # none of the files is HTML; values are quoted by the filters below
    )
    environment.filters |= {
        "quoted": json.dumps,  # YAML reads JSON, and so does Python for strings
        "words": _words,
        "shell": shlex.join,
    }
    return environment


def _words(values: Sequence[str]) -> str:
    """A list of strings as JSON, which is YAML and Python, too.

    >>> _words(("a", 'b"'))
    '["a", "b\\\\""]'
    """
    return json.dumps(list(values))
