"""Files with which other platforms run the server: they scale, route and restart it."""

from .write import PLATFORMS as PLATFORMS
from .write import Deployment as Deployment
from .write import files_for as files_for
from .write import memory_for as memory_for
from .write import write_files as write_files
