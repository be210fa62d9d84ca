"""Mesh-TensorFlow 0.1.21 under TensorFlow 2.15, which keeps one function in another place."""

from __future__ import annotations

import importlib
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tensorflow.python.framework import ops, tensor_conversion_registry

ops.register_tensor_conversion_function = (
    tensor_conversion_registry.register_tensor_conversion_function
)

mtf: Any = importlib.import_module("mesh_tensorflow")
