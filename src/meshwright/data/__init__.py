"""Input: batches laid out as a placement says, ahead of the step that takes them."""

from .context import InputContext as InputContext
from .own_batches import OwnBatches as OwnBatches
from .prefetch import Prefetch as Prefetch
from .putter import Putter as Putter
from .putter import put as put
from .rows import HostRows as HostRows
from .rows import LocalBatch as LocalBatch
from .rows import LocalRows as LocalRows
from .shard import ShardedRows as ShardedRows
from .shard import shard as shard
