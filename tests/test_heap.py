"""What a process has freed stays with it: runs of a program do not wait for the system's pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the limits are those of glibc"
)

# The piece at the end of the heap is larger than what glibc would keep, and smaller than the limit.
PAGE_FAULTS = """
import ctypes, resource, sys, threading
import meshwright as mw
mw.virtual_devices(1)
if sys.argv[1] == "mesh":
    mw.create_mesh({"batch": 1})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use():
    piece = libc.malloc(16 << 20)
    ctypes.memset(piece, 1, 16 << 20)
    libc.free(piece)

for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
    held = [libc.malloc(8 << 20) for _ in range(12)]
    for piece in held:
        ctypes.memset(piece, 1, 8 << 20)
    for piece in held:
        libc.free(piece)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

# A thread has heaps of 64 MiB: next to these pieces a larger one needs a heap of its own.
def use_in_thread():
    held = [libc.malloc(8 << 20) for _ in range(5)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        piece = libc.malloc(28 << 20)
        ctypes.memset(piece, 1, 28 << 20)
        libc.free(piece)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=use_in_thread)
thread.start()
thread.join()
"""
PAGES_OF_THREAD = 28 << 20 >> 12
PAGES = (16 + 12 * 8) << 20 >> 12  # of one round


def page_faults(mode: str, **variables: str) -> list[int]:
    """Of the main thread, and of another one."""
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS, mode],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


def test_memory_that_was_freed_is_used_again():
    of_main, of_thread = page_faults("mesh")
    assert of_main < 2 * PAGES  # the first round's, of ten
    assert of_thread < 2 * PAGES_OF_THREAD
    of_main, of_thread = page_faults("none")  # glibc's own limits
    assert of_main > 5 * PAGES
    assert of_thread > 5 * PAGES_OF_THREAD


def test_variables_of_the_user_count():
    assert page_faults("mesh", MALLOC_TRIM_THRESHOLD_="131072")[0] > 5 * PAGES
