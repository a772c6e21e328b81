"""What the user did that cannot work, and the exit code that says so to a scheduler.

    MeshwrightError           exit 70: do not retry, the same command fails again
    ├── ConfigError           exit 2: bad input
    │   └── InfeasibleLayout
    ├── UnsupportedError      exit 2: a named feature, package or device that is not here
    ├── DataError             exit 2
    ├── CheckpointError       exit 70
    │   └── DamagedCheckpoint
    ├── NonFiniteError        exit 70
    ├── CorruptionError       exit 70
    └── Retryable             exit 75
        ├── LostPeer
        ├── DataUnavailable
        └── Preempted

A message has three parts: the values given, the rule they break, the field to change.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of the process; documented in docs/exit_codes.md."""

    DONE = 0
    BAD_INPUT = 2
    DO_NOT_RETRY = 70
    RETRY = 75
    INTERRUPTED = 130


class MeshwrightError(Exception):
    """Any error that Meshwright explains itself; shown without a traceback."""

    exit_code = ExitCode.DO_NOT_RETRY
    listed: Sequence[str] = ()
    """The problems of a message that lists several."""


class ConfigError(MeshwrightError):
    """The job, or a command's arguments, cannot be carried out as given."""

    exit_code = ExitCode.BAD_INPUT


class InfeasibleLayout(ConfigError):
    """The degrees of a layout do not fit the model, the batch or the number of ranks."""


class UnsupportedError(MeshwrightError):
    """Something that exists elsewhere but not here: a feature, a package, a device."""

    exit_code = ExitCode.BAD_INPUT


class DataError(MeshwrightError):
    """The training data is missing, unreadable, empty or too short."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(MeshwrightError):
    """A checkpoint could not be written, or what lies on disk is not what was written."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are missing, or their bytes are not those that were saved; an older one may be whole."""


class OutOfMemory(MeshwrightError):
    """A rank's device, or its host, had no memory left for an allocation of the training step."""


class NonFiniteError(MeshwrightError):
    """Loss or gradients became NaN or infinite; the optimizer step was not taken."""


class CorruptionError(MeshwrightError):
    """A rank computes or keeps wrong numbers, and training on would spoil the model."""


class Retryable(MeshwrightError):
    """The same command, with --resume, is expected to go further."""

    exit_code = ExitCode.RETRY


class LostPeer(Retryable):
    """Another rank died or could not be reached."""


class DataUnavailable(Retryable):
    """The code of data.source could not reach what it reads."""


class Preempted(Retryable):
    """The run was asked to stop and stopped cleanly after a checkpoint."""


def problems_raised_by(action: Callable[[], object]) -> list[str]:
    """Return each thing that is wrong according to the error that `action` raises; none if it raises none."""
    try:
        action()
    except MeshwrightError as error:
        return [*error.listed] or str(error).splitlines()
    return []
