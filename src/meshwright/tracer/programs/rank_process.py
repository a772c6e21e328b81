"""main(): traces ranks, each in a process of its own, for trace_ranks()."""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.errors import ExitCode, MeshwrightError
from meshwright.models import initial
from meshwright.parallelism import host_sync
from meshwright.spec.trace.trace import Guess, Trace, Traced
from meshwright.tracer.compiled.torch_compile import record_compiled, recording_compiler
from meshwright.tracer.extrapolate.routing import parse_routing, read_as
from meshwright.tracer.numbers.number_exchange import ObjectExchange, used_numbers, waiting_ranks
from meshwright.tracer.programs.program_builder import find_builder, step_of
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.simulated_device import NAME, device, install
from meshwright.tracer.record.trace_recorder import TraceRecorder
from meshwright.tracer.record.untraceable import explained
from meshwright.tracer.torch_distributed.torch_async_tensor import allow_async_tensor_parallel
from meshwright.tracer.torch_distributed.torch_pipelining import send_objects_by
from meshwright.tracer.torch_distributed.torch_process_group import (
    group_calls,
    own_groups,
    set_torchrun_environment,
    take_over_process_group,
)
from meshwright.tracer.torch_distributed.torch_works import reductions_watched, resizing_watched, waiting_watched
from meshwright.tracer.torch_patches.torch_autocast import cast_on
from meshwright.tracer.torch_patches.torch_cuda import redirect_cuda
from meshwright.tracer.torch_patches.torch_patches import apply_patches
from meshwright.tracer.torch_patches.torch_sync_batch_norm import normalize_over_ranks
from meshwright.units import format_bytes

_POLL_S = 0.01
_MOST_PASSES = 8
"""Maximum of passes over ranks that need numbers from each other."""
_NUM_STEPS_BEFORE = 1
"""The first step makes the optimizer's state; the next are all alike."""


def main(order: dict[str, Any]) -> None:
    """Write the traces that the order of trace_ranks() asks for; ends at the first that fails."""
    with _failure_reported(order):
        mode = prepare(order["device"], order["routing"])
    # Imported once, after what it shall find patched, and shared by the processes that are forked from this one.
    with _failure_reported(order), explained(mode.recorder.scopes):
        find_builder(order["build"])
        if order["compiles"]:
            recording_compiler(mode)
    if failure := _trace_all(mode, order):
        sys.exit(failure)


def _trace_all(mode: RecordingMode, order: dict[str, Any]) -> str:
    """Trace the ranks of an order until their assumed numbers are those that others contribute; return the failure."""
    folder, exchange = _numbers_folder(order), mode.numbers.exchange
    # The few traced ranks of a job represent all others.
    exchange.is_on = order["keeps_earlier"]
    exchange.learn(folder)
    again = sorted(int(rank) for rank in order["out"])
    for left in range(_MOST_PASSES, 0, -1):
        exchange.is_settled = left > 1
        for old in (*_exchange_folder(order).glob("*.waits"), Path(order["failure"])):
            old.unlink(missing_ok=True)
        failure, is_final = _trace_each(mode, order, again)
        unlike = exchange.learn(folder)
        again = [rank for rank in map(int, order["out"]) if rank in unlike or not _is_written(order, rank)]
        if is_final or not unlike.intersection(again):
            break
    return failure


def _trace_each(mode: RecordingMode, order: dict[str, Any], ranks: Sequence[int]) -> tuple[str, bool]:
    """Trace ranks, each in a fork, and the ranks from which they wait for objects.

    Return the failure of the first rank that failed, or "", and whether it is final. After a rank that failed with
    numbers of others, the next ones are traced too, since it may have needed theirs.
    """
    folder, count = _exchange_folder(order), order["num_processes"]
    wanted = list(ranks)
    running: dict[int, int] = {}
    done: set[int] = set()
    failure, is_final = "", False
    for rank in ranks:
        Path(order["out"][str(rank)]).unlink(missing_ok=True)
    while wanted or set(running.values()) & set(ranks):
        waiting = waiting_ranks(folder)
        known = {*running.values(), *done}
        # Awaited ranks come first; waiting ranks take no processor.
        asked = [peer for peer in waiting.values() if peer not in known]
        if (asked or wanted) and sum(rank not in waiting for rank in running.values()) < count:
            rank = asked[0] if asked else wanted[0]
            wanted = [one for one in wanted if one != rank]
            running[_forked(mode, order, rank)] = rank
            continue
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(_POLL_S)
            continue
        rank = running.pop(pid)
        done.add(rank)
        if status or not _is_written(order, rank):
            failure = failure or _failure(order, rank, os.waitstatus_to_exitcode(status))
            is_final = not used_numbers(_numbers_folder(order), rank)
            if is_final or waiting:
                break
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return failure, is_final


def _exchange_folder(order: dict[str, Any]) -> Path:
    return Path(order["failure"]).parent


def _numbers_folder(order: dict[str, Any]) -> Path:
    return Path(order["numbers_folder"] or _exchange_folder(order))


def _forked(mode: RecordingMode, order: dict[str, Any], rank: int) -> int:
    """Return the process that traces `rank`; patches are permanent, so each rank needs its own."""
    pid = os.fork()
    if pid:
        return pid
    code: int = ExitCode.DO_NOT_RETRY
    try:
        send_objects_by(ObjectExchange(_exchange_folder(order), rank))
        with _failure_reported(order, rank), explained(mode.recorder.scopes, mode.numbers.guesses):
            found = trace_here(mode, order["build"], order["arguments"], rank, order["world_size"])
        if str(rank) in order["out"]:
            kept = found if order["keeps_earlier"] else replace(found, earlier=None, own_groups=())
            kept.save(Path(order["out"][str(rank)]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        mode.numbers.exchange.save(_numbers_folder(order), rank)
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _failure_reported(order: dict[str, Any], rank: int | None = None) -> Iterator[None]:
    """Write the message and rank of a MeshwrightError to order["failure"]."""
    try:
        yield
    except MeshwrightError as error:
        _report(order, rank, str(error))
        raise


def _report(order: dict[str, Any], rank: int | None, why: str) -> None:
    whole = Path(f"{order['failure']}.{os.getpid()}")
    whole.write_text(json.dumps({"rank": rank, "why": why}), encoding="utf-8")
    # The first rank to fail is the one that is reported.
    with suppress(FileExistsError):
        os.link(whole, order["failure"])


def _is_written(order: dict[str, Any], rank: int) -> bool:
    return str(rank) not in order["out"] or Path(order["out"][str(rank)]).exists()


def _failure(order: dict[str, Any], rank: int, code: int) -> str:
    """Return why the process of a rank ended without its trace."""
    if code == ExitCode.DO_NOT_RETRY:
        return f"rank {rank} failed as said above"
    if code >= 0:
        why = f"its process exited with code {code}, as by os._exit(): every rank has to return from each step"
        _report(order, rank, why)
        return f"rank {rank}: {why}"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    name = signal.Signals(-code).name
    return f"rank {rank} was ended by {name}; a tracing process held {format_bytes(peak)} at most" + (
        ": does it have enough memory?" if name == "SIGKILL" else ""
    )


def prepare(device_type: str, routing: str = "balanced") -> RecordingMode:
    """Patch this process for tracing, permanently, and return its recording mode."""
    recorder = TraceRecorder()
    if device_type == NAME:
        install(recorder)
        cast_on(NAME)
        redirect_cuda()
        normalize_over_ranks()
        allow_async_tensor_parallel(NAME)
    mode = RecordingMode(recorder, device_type)
    apply_patches(recorder, mode)
    record_compiled(mode)
    # Modules that use these two are imported later, with the builder.
    initial.fill_normal = _leave_as_it_is
    host_sync.read_on_host = read_as(parse_routing(routing), mode.numbers.read)  # type: ignore[assignment]
    return mode


def trace_here(mode: RecordingMode, build: str, arguments: list[str], rank: int, world_size: int) -> Trace:
    """Return the trace of one step on fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    take_over_process_group()
    device.num_devices = set_torchrun_environment(rank, world_size)
    with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True):
        return replace(record_step(mode, build, arguments), group_calls=group_calls(), own_groups=own_groups())


def record_step(mode: RecordingMode, build: str, arguments: list[str]) -> Trace:
    """Return the trace of this rank's second step; the process group, real or fake, exists."""
    recorder, rank, world_size = mode.recorder, dist.get_rank(), dist.get_world_size()
    # Else backward runs in another thread, outside of the mode.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with (
        one_thread,
        mode,
        resizing_watched(mode),
        waiting_watched(mode),
        reductions_watched(mode),
        recorder.scopes.followed(),
    ):
        step = step_of(build, _device(mode.device_type), rank, world_size, *arguments)
        num_of_builder = len(recorder)
        # Branches during initialization, as in trunc_normal_(), do not affect the step.
        mode.numbers.guesses.clear()
        for _ in range(_NUM_STEPS_BEFORE):
            step()
        traced = _traced(build, mode)
        earlier = recorder.earlier(traced, num_of_builder)
        recorder.begin()
        step()
    guesses = tuple(Guess(line, value) for line, value in mode.numbers.guesses.items())
    return replace(recorder.trace(traced), earlier=earlier, guesses=guesses)


def _traced(build: str, mode: RecordingMode) -> Traced:
    return Traced(
        build=build,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        torch_version=torch.__version__,
        num_steps_before=_NUM_STEPS_BEFORE,
        device=mode.device_type,
    )


def _device(device_type: str) -> torch.device:
    """Return the device of a program; that of an accelerator has an index."""
    return torch.device(device_type, 0) if device_type == NAME else torch.device(device_type)


def _leave_as_it_is(*_: Any, **__: Any) -> None:
    """Replace the initialization of weights: fake tensors have no values, and drawing them takes long."""
