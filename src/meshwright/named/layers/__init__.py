"""Layers written in the named language; each is a frozen dataclass of dims and choices.

``init(key)`` makes a layer's parameters, a dict of named arrays, and calling it with them computes.
What it computes is the same under any rules.
"""

from __future__ import annotations

from .adaptive import AdaptiveVocabulary as AdaptiveVocabulary
from .attention import attend as attend
from .attention import attend_locally as attend_locally
from .compressed import CompressedAttention as CompressedAttention
from .dense import Dense as Dense
from .dense import DenseProduct as DenseProduct
from .dense import FeedForward as FeedForward
from .dense import dense as dense
from .dense import geglu as geglu
from .dense import glu as glu
from .dense import reglu as reglu
from .dense import swiglu as swiglu
from .embedding import Embedding as Embedding
from .embedding import embed as embed
from .initialisers import Normal as Normal
from .initialisers import VarianceScaling as VarianceScaling
from .layer import Layer as Layer
from .layer import Params as Params
from .losses import sigmoid_cross_entropy as sigmoid_cross_entropy
from .losses import softmax_cross_entropy as softmax_cross_entropy
from .losses import weighted_mean as weighted_mean
from .multi_head import Attention as Attention
from .normalisation import LayerNorm as LayerNorm
from .normalisation import RMSNorm as RMSNorm
from .normalisation import layer_norm as layer_norm
from .normalisation import rms_norm as rms_norm
from .positions import RelativeBias as RelativeBias
from .positions import rotated as rotated
from .positions import sinusoids as sinusoids
from .product_keys import ProductKeyMemory as ProductKeyMemory
from .vocabulary import FactorizedVocabulary as FactorizedVocabulary
from .vocabulary import MixtureOfSoftmaxes as MixtureOfSoftmaxes
from .vocabulary import Vocabulary as Vocabulary
