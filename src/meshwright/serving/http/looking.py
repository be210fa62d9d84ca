"""Models by name, for those who only look at them, which takes no share of the traffic."""

from __future__ import annotations

from ...errors import UnknownModelError
from ..api import Answer, Models, ServedModel

_LOOKS = 5  # at most, at versions that are swapped meanwhile


def looked_at(models: Models, name: str, version: str | None = None) -> ServedModel:
    """A version of a model; without ``version`` the one with most of the traffic.

    Raises UnknownModelError.
    """
    if version is not None or name not in models.names():
        return models.model(name, version)
    for _ in range(_LOOKS):
        try:
            return models.model(name, models.versions(name)[0])
        except UnknownModelError:  # its weights were swapped in between
            continue
    return models.model(name, models.versions(name)[0])


def all_of(models: Models, name: str) -> list[ServedModel]:
    """Every version of a model, at one moment."""
    for _ in range(_LOOKS):
        try:
            return [models.model(name, version) for version in models.versions(name)]
        except UnknownModelError:
            continue
    return [models.model(name, version) for version in models.versions(name)]


def every(models: Models) -> list[ServedModel]:
    """Every version of every model."""
    return [model for name in models.names() for model in all_of(models, name)]


def check_version(name: str, version: str | None, answer: Answer) -> None:
    """Raise UnknownModelError where a request for one version was answered by the next one."""
    if version is not None and answer.version != version:
        raise UnknownModelError(
            f"version {version} of model {name!r} has just been replaced by {answer.version}. Ask "
            "for that one, or for none."
        )
