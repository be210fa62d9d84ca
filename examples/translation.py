"""The encoder-decoder of the Mesh-TensorFlow paper, small, on a translation with a known answer.

    python examples/translation.py --mesh "rows:4;cols:2" \\
        --layout "batch:rows;vocab:cols;d_ff:cols;heads:cols"

Numbers in English words become digits: "seven hundred twelve thousand forty-two" is 712042. Both
sides are generated, so every answer can be judged. The model is asked numbers of four to six digits
that it was never shown, and gets at least 99 of 100 of them right, digit for digit.

The paper translated WMT'14 English to French and to German; neither is reproduced here.
"""

import argparse
import math
from collections.abc import Iterator

import jax
import numpy as np

import meshwright as mw
import meshwright.named as mn

# The task.

NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ONES, TENS = NAMES.split()[:20], NAMES.split()[20:]
TOKENS = ["<padding>", "<end>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
NUMBER = {token: number for number, token in enumerate(TOKENS)}
END, VOCAB = NUMBER["<end>"], 64  # more than there are, so that it divides over many devices
SOURCE, TARGET = 12, 8  # most tokens on either side


def in_words(number: int) -> list[str]:
    if number >= 1000:
        rest = number % 1000
        return [*in_words(number // 1000), "thousand", *(in_words(rest) if rest else [])]
    if number >= 100:
        rest = number % 100
        return [ONES[number // 100], "hundred", *(in_words(rest) if rest else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *(in_words(number % 10) if number % 10 else [])]
    return [ONES[number]]


def encoded(tokens: list[str], length: int) -> list[int]:
    numbers = [NUMBER[token] for token in [*tokens, "<end>"]]
    return numbers + [0] * (length - len(numbers))


def pairs(numbers: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "source": np.array([encoded(in_words(n), SOURCE) for n in numbers], "int32"),
        "target": np.array([encoded(list(str(n)), TARGET) for n in numbers], "int32"),
    }


def read(tokens: np.ndarray) -> str:
    before_end = list(tokens).index(END) if END in tokens else 0
    return "".join(TOKENS[token] for token in tokens[:before_end])


def batches(draw: np.random.Generator, asked: set[int], steps: int, batch: int) -> Iterator[dict]:
    for _ in range(steps):
        # Numbers of every length equally often, and none of those that will be asked.
        numbers = (10 ** draw.uniform(0, 6, size=2 * batch)).astype(int)
        yield pairs([n for n in numbers if n not in asked][:batch])


def main() -> None:
    options = arguments()
    axes = {axis.name: axis.size for axis in mn.as_dims(options.mesh)}
    mw.virtual_devices(math.prod(axes.values()))  # leave it out where there are real ones
    model = mn.models.EncoderDecoder(f"length:{SOURCE} vocab:{VOCAB} {options.size}")

    def translated(params, source):
        return model.beam_search(params, source, TARGET, f"beam:{options.beam}", end=END)

    program = mw.named_program(
        lambda params, batch: model.loss(params, batch["source"], batch["target"]),
        lambda: model.init(jax.random.key(0)),
        mn.adafactor(lambda step: 0.05 * (1 - step / options.steps)),
        batch={"source": "batch length", "target": "batch length"},
        forward=translated,
        name="translator",
    )
    placement = mw.Placement.of(mw.create_mesh(axes or {"all": 1}), rules=options.layout)
    trainer = mw.Trainer(program, placement)

    draw = np.random.default_rng(0)
    asked = (10 ** draw.uniform(3, 6, size=options.ask)).astype(int)
    state = trainer.init()
    shown = batches(draw, set(asked.tolist()), options.steps, options.batch)
    for info in trainer.steps(state, shown):
        state = info.state
        if (info.number + 1) % options.every == 0 or info.number == 0:
            print(f"step {info.number + 1:4d}  loss {float(info.logs['loss']):.4f}", flush=True)

    source = mn.named(pairs(asked)["source"], f"batch:{len(asked)} length:{SOURCE}")
    found, _ = trainer.forward(state, source)  # of batch, beam and length; the best beam first
    answers = [read(tokens[0]) for tokens in np.asarray(found)]
    right = [answer == str(number) for answer, number in zip(answers, asked, strict=True)]
    for number, answer, is_right in list(zip(asked, answers, right, strict=True))[:5]:
        print(f"{' '.join(in_words(int(number)))}: {answer} ({'right' if is_right else number})")
    print(f"{np.mean(right):.1%} of {len(right)} numbers that it was never shown are right")


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
        default="d_model:64 d_ff:128 heads:4 d_kv:16 layers:2",
        help="the dims of the model",
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=100, help="print the loss so often")
    parser.add_argument("--ask", type=int, default=400, help="how many numbers to ask at the end")
    parser.add_argument("--beam", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
