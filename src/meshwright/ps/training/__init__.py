"""Training on parameter servers: unchanged Keras models, whose steps run on workers.

What needs Keras is imported when it is first asked for: a worker loads this package too, and needs
JAX alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazily
from ...step.local import DiLoCo as DiLoCo
from ...step.local import LocalSGD as LocalSGD
from .compression import Half as Half
from .compression import TopK as TopK

if TYPE_CHECKING:
    from .data import InputContext as InputContext
    from .embeddings import Embedding as Embedding
    from .evaluator import SidecarEvaluator as SidecarEvaluator
    from .keras_export import plain_model as plain_model
    from .model_cache import table_of as table_of

_LAZY = {
    "InputContext": "data",
    "Embedding": "embeddings",
    "plain_model": "keras_export",
    "SidecarEvaluator": "evaluator",
    "table_of": "model_cache",
}


__getattr__ = lazily(__name__, _LAZY)
