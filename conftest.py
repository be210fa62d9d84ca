"""A strict room: eight virtual devices, warnings as errors, a fixed seed."""

from __future__ import annotations

import os

import meshwright as mw

os.environ["MESHWRIGHT_CACHE"] = "off"  # what is compiled here is not kept for anybody
mw.virtual_devices(8)
