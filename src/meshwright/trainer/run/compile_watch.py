"""CompileWatch: what compilation took before the first step, and graphs that a later step compiled, in the log.

explained_compilation: what a compilation that failed means for a retry.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.cost.compile_time import compile_s_of, shared_graphs
from meshwright.errors import Preempted, Retryable
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.hardware.machine import num_usable_cores
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compile_count import CompileCount, compile_count
from meshwright.parallelism.torch_private.torch_compiler import remove_damaged_library
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.step.training import Training
from meshwright.units import counted, format_duration

_NUM_STEADY = 2
"""Steps of an attempt after which nothing more is to be compiled: the second may find other strides than the first."""

_COMPILERS = ("torch._inductor", "torch._dynamo")
"""Modules of the errors of a compilation."""


class CompileWatch:
    """Counts graphs from the start of an attempt; says nothing where nothing is compiled."""

    def __init__(self) -> None:
        self._started_s, self._num_steps = time.perf_counter(), 0
        self._num_graphs = 0

    def after_step(self, training: Training, step: int) -> None:
        """Log the time to the first step; warn of graphs that a step after the second compiled."""
        if not training.layout.compiles_anything:
            return
        self._num_steps += 1
        count = compile_count()
        if self._num_steps == 1:
            took_s = time.perf_counter() - self._started_s
            logger.info(
                "first step done after %s, of which the compiler took %s for %s%s%s",
                format_duration(took_s),
                format_duration(count.wall_s),
                counted(count.num_graphs, "graph"),
                shared_graphs(training.layout),
                _remarks(training, count),
            )
        elif self._num_steps > _NUM_STEADY and count.num_graphs > self._num_graphs:
            logger.warning(
                "step %d compiled %s again: something about its tensors changed; TORCH_LOGS=recompiles says what",
                step,
                counted(count.num_graphs - self._num_graphs, "graph"),
            )
        self._num_graphs = count.num_graphs

    def after_validation(self) -> None:
        """Expect what a validation compiled: its forward keeps nothing for a backward, so the first one compiles."""
        self._num_graphs = compile_count().num_graphs


@contextmanager
def explained_compilation(stop: StopRequest) -> Iterator[None]:
    """Raise what a failed compilation means for a retry; used within all that records why a run ended.

    KeyboardInterrupt or Preempted after a signal, which also ends the C++ compilers of the process group; Retryable
    where a compiler that was ended earlier left half a library in torch's cache, which is then removed.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        if stop.signal is signal.SIGINT:
            raise KeyboardInterrupt from error
        if stop.signal is not None:
            message = f"{stop.signal.name} while compiling: steps since the newest checkpoint are lost"
            raise Preempted(message) from error
        if (library := remove_damaged_library(error)) is not None:
            raise Retryable(
                f"{library} is damaged: the compiler that wrote it was ended. It is removed: start again with --resume"
            ) from error
        raise


def _remarks(training: Training, count: CompileCount) -> str:
    """Return what came from a cache, and what was expected where not all did."""
    of_cache = (
        f"{count.num_cached} of {counted(count.num_passes, 'pass', 'passes')} from a cache" if count.num_cached else ""
    )
    predicted = _predicted(training) if count.num_cached < count.num_passes or not count.num_passes else ""
    said = "; ".join(filter(None, (of_cache, predicted)))
    return f" ({said})" if said else ""


def _predicted(training: Training) -> str:
    """Return what was expected of the compiler, on a processor; "" where only the loss or the update is compiled."""
    architecture, ranks = resolve_architecture(training.job.model), training.ranks
    if architecture is None or ranks.device.type != "cpu" or training.layout.compile_backend != "inductor":
        return ""
    predicted_s = compile_s_of(architecture, training.layout, num_usable_cores())
    return "" if predicted_s is None else f"predicted from an empty cache: {format_duration(predicted_s)}"
