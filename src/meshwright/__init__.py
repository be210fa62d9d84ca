"""Meshwright: one model, any mesh.

The public list. What is light is imported here; what needs JAX or Keras is imported when it is
first asked for, so that ``import meshwright`` stays fast.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING

from .backend import settle_keras_backend as _settle_keras_backend
from .errors import AgreementError as AgreementError
from .errors import ArrayError as ArrayError
from .errors import BackendError as BackendError
from .errors import BatchError as BatchError
from .errors import CancelledError as CancelledError
from .errors import CheckpointError as CheckpointError
from .errors import ClusterError as ClusterError
from .errors import CompileError as CompileError
from .errors import DataError as DataError
from .errors import DeadlineError as DeadlineError
from .errors import DimError as DimError
from .errors import DivisibilityError as DivisibilityError
from .errors import DoesNotFitError as DoesNotFitError
from .errors import ExhaustedError as ExhaustedError
from .errors import FencedError as FencedError
from .errors import LayoutError as LayoutError
from .errors import LayoutTypeError as LayoutTypeError
from .errors import MeshError as MeshError
from .errors import MeshwrightError as MeshwrightError
from .errors import MeshwrightWarning as MeshwrightWarning
from .errors import ModelError as ModelError
from .errors import ModelFailedError as ModelFailedError
from .errors import NotFiniteError as NotFiniteError
from .errors import NotReadyError as NotReadyError
from .errors import OverloadedError as OverloadedError
from .errors import PipelineError as PipelineError
from .errors import PlacementError as PlacementError
from .errors import PlanError as PlanError
from .errors import Preempted as Preempted
from .errors import ProcessError as ProcessError
from .errors import ProtocolError as ProtocolError
from .errors import RequestError as RequestError
from .errors import ScheduledError as ScheduledError
from .errors import ServingError as ServingError
from .errors import ShippingError as ShippingError
from .errors import TargetError as TargetError
from .errors import TaskError as TaskError
from .errors import TopologyError as TopologyError
from .errors import TracingError as TracingError
from .errors import UnknownModelError as UnknownModelError
from .errors import UnknownVariableError as UnknownVariableError
from .errors import UnreachableError as UnreachableError
from .layouts.dim_names import DimNames as DimNames
from .layouts.dim_names import dims as dims
from .layouts.layout import MATCH as MATCH
from .layouts.layout import UNSHARDED as UNSHARDED
from .layouts.layout import Layout as Layout
from .layouts.layout_map import LayoutMap as LayoutMap
from .layouts.mesh import Mesh as Mesh
from .layouts.mesh import create_mesh as create_mesh
from .layouts.params import ParamInfo as ParamInfo
from .layouts.placement import Placement as Placement
from .lazy import lazily as _lazily
from .topology import settle_cpu_pool as _settle_cpu_pool
from .topology import settle_tpu_library as _settle_tpu_library
from .topology import virtual_devices as virtual_devices
from .views import register_views as _register_views

if TYPE_CHECKING:
    from . import named as named
    from . import ps as ps
    from . import testing as testing
    from .arrays import barrier as barrier
    from .arrays import call_with_layout as call_with_layout
    from .arrays import check_layout as check_layout
    from .arrays import copy_to_mesh as copy_to_mesh
    from .arrays import default_mesh as default_mesh
    from .arrays import fetch_layout as fetch_layout
    from .arrays import get_default_mesh as get_default_mesh
    from .arrays import is_dtensor as is_dtensor
    from .arrays import pack as pack
    from .arrays import relayout as relayout
    from .arrays import relayout_like as relayout_like
    from .arrays import unpack as unpack
    from .checkpoint import CheckpointInfo as CheckpointInfo
    from .checkpoint import Checkpoints as Checkpoints
    from .checkpoint import Position as Position
    from .checkpoint import read_checkpoint as read_checkpoint
    from .data import InputContext as InputContext
    from .data import LocalRows as LocalRows
    from .data import shard as shard
    from .display.drawing import show as show
    from .frontends import keras as keras
    from .frontends.dry_runs import dry_run as dry_run
    from .frontends.dry_runs import dry_serve as dry_serve
    from .frontends.jax import jax_program as jax_program
    from .frontends.keras import DataParallel as DataParallel
    from .frontends.keras import Sharded as Sharded
    from .frontends.keras import layout_map_scope as layout_map_scope
    from .frontends.keras.abstract import abstract as abstract
    from .frontends.measures import measure as measure
    from .frontends.named import named_program as named_program
    from .frontends.plans import Plan as Plan
    from .frontends.plans import plan as plan
    from .launch.join import join as join
    from .launch.keys import Keys as Keys
    from .launch.local import LocalCluster as LocalCluster
    from .launch.membership import Membership as Membership
    from .launch.on_ray import RayLauncher as RayLauncher
    from .launch.on_spark import SparkLauncher as SparkLauncher
    from .launch.progress import begin_step as begin_step
    from .launch.resolvers import KubernetesResolver as KubernetesResolver
    from .launch.resolvers import SimpleResolver as SimpleResolver
    from .launch.resolvers import SlurmResolver as SlurmResolver
    from .launch.resolvers import TFConfigResolver as TFConfigResolver
    from .launch.spec import ClusterSpec as ClusterSpec
    from .planning.dry_run import DryRun as DryRun
    from .planning.goals import ServingGoal as ServingGoal
    from .planning.measurement import Measured as Measured
    from .planning.serving import ServingReport as ServingReport
    from .program import Program as Program
    from .program import TrainState as TrainState
    from .ps.coordinator.coordinator import ClusterCoordinator as ClusterCoordinator
    from .ps.current import get_strategy as get_strategy
    from .ps.shared.consistency import Async as Async
    from .ps.shared.consistency import Backup as Backup
    from .ps.shared.consistency import Stale as Stale
    from .ps.shared.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
    from .ps.shared.partitioners import MaxSizePartitioner as MaxSizePartitioner
    from .ps.shared.partitioners import MinSizePartitioner as MinSizePartitioner
    from .ps.strategy import ParameterServer as ParameterServer
    from .ps.task import run_task as run_task
    from .ps.training import DiLoCo as DiLoCo
    from .ps.training import LocalSGD as LocalSGD
    from .run import Trainer as Trainer
    from .serving.delta_exporter import DeltaExporter as DeltaExporter
    from .serving.http.app import serving_app as serving_app
    from .serving.http.limits import Limits as Limits
    from .serving.server import Server as Server
    from .stages.branches import Branches as Branches
    from .stages.pipeline import Pipeline as Pipeline
    from .stages.table import TickTable as TickTable
    from .step.compression import PowerSGD as PowerSGD
    from .step.compression import TopK as TopK
    from .step.options import StepOptions as StepOptions
    from .step.remat import block_output as block_output
    from .step.summing import GradientSum as GradientSum
    from .targets.calibrate import calibrate as calibrate
    from .targets.hardware import hardware_of as hardware_of
    from .targets.hardware import load_hardware as load_hardware

__version__ = "0.1.0"

_LAZY = {  # name -> the room that it lives in
    **dict.fromkeys(
        (
            "barrier",
            "call_with_layout",
            "check_layout",
            "copy_to_mesh",
            "default_mesh",
            "fetch_layout",
            "get_default_mesh",
            "is_dtensor",
            "pack",
            "relayout",
            "relayout_like",
            "unpack",
        ),
        "arrays",
    ),
    **dict.fromkeys(("CheckpointInfo", "Checkpoints", "Position", "read_checkpoint"), "checkpoint"),
    **dict.fromkeys(("DataParallel", "Sharded", "layout_map_scope"), "frontends.keras"),
    "DryRun": "planning.dry_run",
    **dict.fromkeys(("dry_run", "dry_serve"), "frontends.dry_runs"),
    **dict.fromkeys(("Plan", "plan"), "frontends.plans"),
    "calibrate": "targets.calibrate",
    **dict.fromkeys(("hardware_of", "load_hardware"), "targets.hardware"),
    "Measured": "planning.measurement",
    "ServingGoal": "planning.goals",
    "ServingReport": "planning.serving",
    "measure": "frontends.measures",
    **dict.fromkeys(("Program", "TrainState"), "program"),
    "abstract": "frontends.keras.abstract",
    "Limits": "serving.http.limits",
    "serving_app": "serving.http.app",
    "Branches": "stages.branches",
    "Pipeline": "stages.pipeline",
    "TickTable": "stages.table",
    "StepOptions": "step.options",
    "GradientSum": "step.summing",
    **dict.fromkeys(("PowerSGD", "TopK"), "step.compression"),
    "block_output": "step.remat",
    **dict.fromkeys(("LocalRows", "shard"), "data"),
    **dict.fromkeys(("InputContext", "LocalRows"), "data"),
    "Trainer": "run",
    "Server": "serving.server",
    "DeltaExporter": "serving.delta_exporter",
    "jax_program": "frontends.jax",
    "named_program": "frontends.named",
    "show": "display.drawing",
    "join": "launch.join",
    "begin_step": "launch.progress",
    "Keys": "launch.keys",
    "Membership": "launch.membership",
    "RayLauncher": "launch.on_ray",
    "SparkLauncher": "launch.on_spark",
    "LocalCluster": "launch.local",
    **dict.fromkeys(
        ("KubernetesResolver", "SimpleResolver", "SlurmResolver", "TFConfigResolver"),
        "launch.resolvers",
    ),
    "ClusterSpec": "launch.spec",
    **dict.fromkeys(("Async", "Backup", "Stale"), "ps.shared.consistency"),
    "ClusterCoordinator": "ps.coordinator.coordinator",
    **dict.fromkeys(
        ("FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner"),
        "ps.shared.partitioners",
    ),
    "ParameterServer": "ps.strategy",
    "get_strategy": "ps.current",
    "run_task": "ps.task",
    **dict.fromkeys(("DiLoCo", "LocalSGD"), "ps.training"),
}
_LAZY_MODULES = {"keras": "frontends.keras", "named": "named", "ps": "ps", "testing": "testing"}

__getattr__ = _lazily(
    __name__, {**_LAZY, **{name: f"{room}:" for name, room in _LAZY_MODULES.items()}}
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


_register_views("meshwright.display")
_settle_keras_backend()
_settle_cpu_pool()
_settle_tpu_library()
if "MESHWRIGHT_JOIN" in _os.environ:  # `meshwright launch` has started this process
    from .launch.join import join_if_launched as _join_if_launched

    _join_if_launched()
