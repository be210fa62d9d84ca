"""A strict room: eight virtual devices, warnings as errors, a fixed seed."""

from __future__ import annotations

import os
import signal

import hypothesis

import meshwright as mw

os.environ["MESHWRIGHT_CACHE"] = "off"  # what is compiled here is not kept for anybody
mw.virtual_devices(8)

# A shell ignores interrupts for what it starts in the background; tests of Ctrl-C need them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast an example is says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
