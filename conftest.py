"""A strict room: eight virtual devices, warnings as errors, a fixed seed."""

from __future__ import annotations

import meshwright as mw

mw.virtual_devices(8)
