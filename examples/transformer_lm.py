"""The Transformer language model of the Mesh-TensorFlow paper, small, on a real text.

    python examples/transformer_lm.py --mesh "all:8" --layout "batch:all"
    python examples/transformer_lm.py --mesh "rows:4;cols:2" \\
        --layout "batch:rows;vocab:cols;d_ff:cols;heads:cols"

Mesh and layout are the only difference between runs: the losses are the same. Runs on virtual CPU
devices. Trains for some minutes, and ends by writing a text with beam search.

The text is Python's own manual, the topics that ``help()`` shows, which every Python ships
(``pydoc_data.topics``; about 460,000 characters; © Python Software Foundation, PSF License
Version 2). The paper trained up to five billion parameters on Wikipedia and on the
billion-word benchmark; neither is reproduced here.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics

import jax
import numpy as np

import meshwright as mw
import meshwright.named as mn

# The text, as tokens: frequent words with what stands before them, and signs for all else.

VOCAB = 2048


class Words:
    """Words and signs as numbers, and back again without loss."""

    def __init__(self, text: str) -> None:
        signs = sorted(set(text))
        frequent = Counter(word for word in self._split(text) if len(word) > 1)
        words = [word for word, _ in frequent.most_common(VOCAB - len(signs))]
        self.tokens = [*signs, *words]
        self._numbers = {token: number for number, token in enumerate(self.tokens)}

    def encode(self, text: str) -> np.ndarray:
        known = self._numbers
        words = ([word] if word in known else list(word) for word in self._split(text))
        return np.array([known[token] for tokens in words for token in tokens], "int32")

    def decode(self, numbers: np.ndarray) -> str:
        return "".join(self.tokens[number] for number in numbers)

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r" ?[A-Za-z]+|_+|\n+ *|[^\w\s]+|.|\s", text)


def batches(tokens: np.ndarray, steps: int, batch: int, length: int) -> Iterator[dict]:
    draw = np.random.default_rng(0)
    for _ in range(steps):
        starts = draw.integers(len(tokens) - length, size=[batch, 1])
        yield {"tokens": tokens[starts + np.arange(length)]}


# The model: nothing in it says where it runs.


def language_model(size: str) -> mn.models.Transformer:
    return mn.models.Transformer(f"vocab:{VOCAB} {size}", z_loss=1e-4)


def main() -> None:
    options = arguments()
    axes = {axis.name: axis.size for axis in mn.as_dims(options.mesh)}
    mw.virtual_devices(math.prod(axes.values()))  # leave it out where there are real ones
    text = "\n\n".join(topics[name] for name in sorted(topics))
    words = Words(text)
    tokens = words.encode(text)
    held_out, tokens = tokens[: len(tokens) // 20], tokens[len(tokens) // 20 :]
    model = language_model(options.size)
    length = next(dim.size for dim in mn.as_dims(options.size) if dim.name == "length")

    def forward(params, inputs):
        if "tokens" in inputs:
            return model.loss(params, inputs["tokens"])
        return model.beam_search(params, inputs["prompt"], options.sample, f"beam:{options.beam}")

    program = mw.named_program(
        lambda params, batch: model.loss(params, batch["tokens"]),
        lambda: model.init(jax.random.key(0)),
        mn.adafactor(lambda step: 0.05 * (1 - step / options.steps)),
        batch={"tokens": "batch length"},
        forward=forward,
        name="language model",
    )
    placement = mw.Placement.of(mw.create_mesh(axes or {"all": 1}), rules=options.layout)
    trainer = mw.Trainer(program, placement)
    print(f"{sum(info.nbytes for info in program.params) // 4:,} parameters, of which each device")
    print(f"holds {trainer.explain().parameter_bytes_per_device // 4:,}; {len(tokens):,} tokens")

    state = trainer.init()
    for info in trainer.steps(state, batches(tokens, options.steps, options.batch, length)):
        state = info.state
        if (info.number + 1) % options.every == 0 or info.number == 0:
            print(f"step {info.number + 1:4d}  loss {float(info.logs['loss']):.4f}", flush=True)

    count = len(held_out) // length // placement.mesh.size * placement.mesh.size
    unseen = mn.named(
        held_out[: count * length].reshape(count, length), f"batch:{count} length:{length}"
    )
    loss = float(trainer.forward(state, {"tokens": unseen}))
    print(f"on {unseen.size:,} tokens that it never saw: loss {loss:.4f}")

    prompt = words.encode(options.prompt)
    ids, scores = trainer.forward(state, {"prompt": mn.named(prompt, f"length:{len(prompt)}")})
    for tokens, score in zip(np.asarray(ids), np.asarray(scores), strict=True):
        print(f"\nscore {score:.2f}: {words.decode(tokens)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="rows:4;cols:2", help="axes and their sizes")
    parser.add_argument(
        "--layout",
        default="batch:rows;vocab:cols;d_ff:cols;heads:cols",
        help="which dims lie along which axis",
    )
    parser.add_argument(
        "--size",
        default="length:64 d_model:128 d_ff:512 heads:8 d_kv:16 layers:2",
        help="the dims of the model",
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--every", type=int, default=50, help="print the loss so often")
    parser.add_argument("--prompt", default="When an exception")
    parser.add_argument("--sample", type=int, default=48, help="tokens to write, prompt included")
    parser.add_argument("--beam", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
