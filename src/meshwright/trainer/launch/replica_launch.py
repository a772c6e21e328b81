"""Starts independent replicas on this machine, each a group of ranks of its own, and replaces those that are lost."""

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwright.errors import ExitCode, Retryable
from meshwright.fault_tolerance.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import Silence
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.quorum import ReplicaPlace
from meshwright.trainer.launch.launch import combined, raise_stop, report_failures, threads_of_rank
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.rank_group import RankGroup, wait_for_ends
from meshwright.trainer.run.open_run import claim
