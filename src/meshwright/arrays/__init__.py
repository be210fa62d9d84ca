"""Lay arrays out on a mesh, take them apart, put them together, wait for them.

A distributed array is a ``jax.Array`` and nothing else, so ``np.asarray``, ``jax.jit`` and
``jax.grad`` take it as it is. Names and meanings are those of TensorFlow DTensor. A layout may be
given unbound, or as bare specs, inside :class:`default_mesh`; a Keras variable stands for the array
that it holds.
"""

from .barriers import barrier as barrier
from .calling import call_with_layout as call_with_layout
from .default import default_mesh as default_mesh
from .default import get_default_mesh as get_default_mesh
from .layout_of import check_layout as check_layout
from .layout_of import fetch_layout as fetch_layout
from .layout_of import is_dtensor as is_dtensor
from .packing import pack as pack
from .packing import unpack as unpack
from .relayouts import copy_to_mesh as copy_to_mesh
from .relayouts import relayout as relayout
from .relayouts import relayout_like as relayout_like
