"""The GPT that pipelines train, and how its batches are cut, on every side."""

from __future__ import annotations

WORDS, WIDTH, HEADS, BLOCKS, TOKENS = 256, 256, 4, 8, 64
MICRO_BATCHES, ROWS_PER_MICRO_BATCH = 8, 2
ROWS = MICRO_BATCHES * ROWS_PER_MICRO_BATCH
LEARNING_RATE = 0.05
STAGES = 2
WHAT = (
    f"GPT of {BLOCKS} blocks of {WIDTH}, {TOKENS} tokens, {MICRO_BATCHES} micro-batches of "
    f"{ROWS_PER_MICRO_BATCH} rows, SGD"
)
