"""Models written in the named language: the Transformers of the Mesh-TensorFlow paper."""

from __future__ import annotations

from . import decoding as decoding
from .decoding import beam_search as beam_search
from .decoding import greedy as greedy
from .encoder_decoder import EncoderDecoder as EncoderDecoder
from .halting import Halting as Halting
from .lines import decode_file as decode_file
from .lines import for_each as for_each
from .lines import score_file as score_file
from .packing import pack as pack
from .stack import Block as Block
from .stack import Stack as Stack
from .transformer import Transformer as Transformer
