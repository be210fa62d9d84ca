"""Input: batches laid out as a placement says, ahead of the step that takes them."""

from .ahead import Ahead as Ahead
from .context import InputContext as InputContext
from .own_batches import OwnBatches as OwnBatches
from .putter import Putter as Putter
from .putter import put as put
from .rows import HostRows as HostRows
from .rows import LocalBatch as LocalBatch
from .rows import LocalRows as LocalRows
from .shard import ShardedRows as ShardedRows
from .shard import shard as shard
