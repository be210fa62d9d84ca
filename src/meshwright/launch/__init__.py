"""Processes of a cluster: which tasks there are, who says so, and who starts them."""

from .cluster import Cluster as Cluster
from .cluster import DescribedCluster as DescribedCluster
from .cluster import ThisProcess as ThisProcess
from .joining import settings_from as settings_from
from .keys import Keys as Keys
from .resolvers import ClusterResolver as ClusterResolver
from .resolvers import EnvironmentResolver as EnvironmentResolver
from .resolvers import KubernetesResolver as KubernetesResolver
from .resolvers import SimpleResolver as SimpleResolver
from .resolvers import SlurmResolver as SlurmResolver
from .resolvers import TFConfigResolver as TFConfigResolver
from .resolvers import resolve as resolve
from .settings import TaskSettings as TaskSettings
from .spec import ClusterSpec as ClusterSpec
from .spec import Task as Task
