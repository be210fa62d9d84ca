"""What every contract makes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Request:
    """Arrays for a model, and how the answer is to be written.

    ``form`` is a word of the contract, such as ``"instances"``; ``outputs`` are the outputs wanted,
    with whether each is wanted as bytes, all of them if it is empty.
    """

    inputs: Mapping[str, np.ndarray]
    form: str = ""
    id: str = ""
    outputs: Mapping[str, bool] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True)
class Reply:
    """The bytes of an answer, and the headers that belong to them."""

    body: bytes
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
