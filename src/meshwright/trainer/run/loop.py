"""The training loop: resume, step, log, validate, save, stop; read it from top to bottom."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import nullcontext

import torch
from torch.profiler import record_function

from meshwright.checkpoint.parameter_hash import parameter_hash
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.hang_watch import HangWatch
from meshwright.fault_tolerance.injector import under_faults
from meshwright.fault_tolerance.run_findings import RunFindings
from meshwright.fault_tolerance.step_guard import Decision
from meshwright.fault_tolerance.step_ledger import StepLedger
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.fault_tolerance.stragglers.straggler_watch import StragglerWatch
from meshwright.hardware.machine import peak_resident_bytes
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.profiler.window import ProfilerWindow
from meshwright.spec.fault import Faults
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.model.gpt2_architecture import dropout_note
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.spec.trace.timeline import DATA_MARK, STEP_MARK
from meshwright.trainer.launch.compile_cache import load_cache
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.compile_watch import CompileWatch, explained_compilation
from meshwright.trainer.run.memory_post_mortem import MemoryPostMortem
from meshwright.trainer.run.open_run import open_recorder
from meshwright.trainer.run.peak_flops import PeakFlops
from meshwright.trainer.run.run_checkpoints import RunCheckpoints
from meshwright.trainer.run.run_recorder import RunRecorder, StepMetrics
from meshwright.trainer.step.training import Training
from meshwright.units import counted


def train(
    job: Job, run: Run, ranks: Ranks, *, resume: bool, estimate: Estimate | None = None, faults: Faults | None = None
) -> ExitCode:
    """Train to train.steps or until a stop request and return the exit code; a collective.

    `estimate` is the planner's prediction for the layout, for the manifest; `faults` are injected, and a ledger is
    kept. Checkpoints committed to `run` stay valid however this ends.
    """
    compiles = CompileWatch()
    with (
        StopRequest() as stop,
        HangWatch(run, ranks.rank, ranks.num_ranks, job.run) as watch,
        MemoryPostMortem(job, run, ranks) as post_mortem,
        under_faults(run, ranks.rank, faults, watch) as ledger,
    ):
        cached = load_cache(job, run, ranks) if job.layout.compiles_anything else None
        training = Training.build(job, ranks)
        post_mortem.follow(training)
        stragglers = connect(training, watch, run)
        step = training.load_newest(run) if resume else 0
        speed = PeakFlops.of(job, ranks)
        recorder = open_recorder(training, run, step, estimate)
        profiler = ProfilerWindow(run.timelines, ranks.rank, job.run.profile_start, job.run.profile_steps)
        with (
            recorder or nullcontext(),
            profiler,
            stragglers,
            RunCheckpoints(training, run) as checkpoints,
            explained_compilation(stop),
        ):
            announce(training, step, speed.peak_name)
            if cached is not None:
                logger.info("%s", cached)
            # The tracker's hooks would be compiled with the model.
            tracked_step = None if training.layout.compile else step + 1
            asked, validation_loss, first_step = None, None, step + 1
            last_step = job.train.last_step
            while step < last_step and asked is None:
                step += 1
                profiler.before_step(step)
                watch.begin_step(step)
                with watch.tracking(training.model) if step == tracked_step else nullcontext():
                    decision = take_step(training, step, speed, recorder, ledger)
                compiles.after_step(training, step)
                profiler.after_step(step)
                if decision in ("roll back", "restore"):
                    watch.mark("restore")
                    step = roll_back(training, run, checkpoints, step, decision)
                    continue
                if step == first_step:
                    checkpoints.prepare(last_step - step)
                if (news := checkpoints.report()) and recorder is not None:
                    recorder.add_results(**news)
                validation_loss = None
                if is_due(step, job.train.validation_interval):
                    watch.mark("validation")
                    validation_loss = validate(training, step, recorder)
                    compiles.after_validation()
                watch.mark("agree")
                asked = ranks.agree_on(stop.signal)
                stragglers.after_step(step)
                if asked is None and (step == last_step or is_save_due(training, step)):
                    watch.mark("checkpoint")
                    checkpoints.save(step, validation_loss)
            watch.mark("finish" if asked is None else "checkpoint")
            if asked is not None:
                if step < job.train.steps:
                    logger.info("%s: stopping after step %d, with a checkpoint", asked.name, step)
                news = checkpoints.save_before_kill(step, validation_loss, stop.asked_at_s + job.run.grace_s)
            else:
                news = checkpoints.finish()
            if news and recorder is not None:
                recorder.add_results(**news)
            code = exit_code(job, step, asked)
            # After a signal there may be little time left.
            digest = final_hash(training) if asked is None else None
            if recorder is not None:
                recorder.finish(step, code, parameter_hash=digest)
        training.loader.close()
        return code


def connect(training: Training, watch: HangWatch, run: Run) -> StragglerWatch:
    """Let the heartbeat follow the phases of a step and checks write into `run`; return what compares ranks' times.

    The phase is then that of restoring a checkpoint.
    """
    watch.follow(training.model)
    training.step.report_to(watch.mark)
    watch.mark("restore")
    events = RunFindings(run)
    if training.step.replica_guard is not None:
        training.step.replica_guard.findings = events
    return StragglerWatch(watch.phase_times, events, training.layout, training.ranks.device.type)


def announce(training: Training, step: int, peak_name: str | None) -> None:
    """Log the size, the layout and the batch of the run, and the FLOP/s that its MFU refers to."""
    if (note := dropout_note(resolve_architecture(training.job.model))) is not None:
        logger.warning("%s", note)
    ranks, layout = training.ranks, training.layout
    num_microbatches = training.job.num_microbatches(layout)
    tokens = f" of {counted(training.job.train.seq_len, 'token')}" if training.dataset.vocab_size else ""
    logger.info(
        "%s parameters on %d %s rank%s (%s), %s of %s%s each, from step %d",
        f"{training.num_parameters:,}",
        ranks.num_ranks,
        ranks.device.type,
        "" if ranks.num_ranks == 1 else "s",
        layout_text(layout),
        counted(num_microbatches, "microbatch", "microbatches"),
        counted(layout.microbatch_size, "sample"),
        tokens,
        step,
    )
    if (float8 := training.model.float8) is not None:
        logger.log(logging.WARNING if float8.is_fallback else logging.INFO, "%s", float8.text)
    if training.job.train.exact_elastic:
        logger.info(
            "exact sums: the same bits on any number of data-parallel ranks with as many threads each (%d here)",
            torch.get_num_threads(),
        )
    if training.model.pools is not None:
        for note in training.model.pools.notes():
            logger.info("%s", note)
    if layout.activation_offload and ranks.device.type == "cpu":
        logger.warning("layout.activation_offload saves nothing on a CPU: activations are copied within its own memory")
    if layout.cuda_graphs and ranks.device.type == "cpu":
        logger.warning("layout.cuda_graphs has no effect on a CPU: there are no kernel launches to save")
    if layout.communication_sms is not None and ranks.device.type == "cpu":
        logger.warning("layout.communication_sms has no effect on a CPU: gloo runs no kernels that take SMs")
    if peak_name is not None:
        logger.info("MFU is of %s for each rank", peak_name)
    if step >= training.job.train.steps:
        logger.info("the run has %d steps and train.steps = %d: nothing to train", step, training.job.train.steps)


def take_step(
    training: Training, step: int, speed: PeakFlops, recorder: RunRecorder | None, ledger: StepLedger | None = None
) -> Decision:
    """Run one optimizer step, record its metrics, in a chaos run also its samples, and return what became of it.

    A collective.
    """
    guard = training.step.guard
    started_s = time.perf_counter()
    with record_function(f"{STEP_MARK}{step}"):
        with record_function(DATA_MARK):
            # Data positions count from 0, steps from 1.
            microbatches = training.loader.microbatches(step - 1 + (guard.left_out_steps if guard else 0))
        data_wait_s = time.perf_counter() - started_s
        result = training.step(step, microbatches)
    step_s = time.perf_counter() - started_s
    if result.decision == "restore":
        return result.decision
    if ledger is not None:
        ledger.add(step, (one.inputs for one in microbatches))
    if guard is not None and result.decision != "take":
        logger.warning("step %d was skipped: %s", step, guard.reason)
    if recorder is None:
        return result.decision
    recorder.step(
        StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            samples_per_s=training.job.global_batch_size / step_s,
            tokens_per_s=training.job.workload.global_batch_tokens / step_s if training.dataset.vocab_size else None,
            step_ms=step_s * 1e3,
            data_wait_ms=data_wait_s * 1e3,
            memory_bytes=peak_memory_bytes(training.ranks.device),
            mfu=speed.mfu(step_s),
            attempt=recorder.attempt,
            experts=result.experts,
        )
    )
    return result.decision


def roll_back(training: Training, run: Run, checkpoints: RunCheckpoints, step: int, decision: Decision) -> int:
    """Return to an earlier checkpoint after `step`; "roll back" leaves out the data since; a collective."""
    checkpoints.settle()
    if decision == "restore":
        restored = training.restore(run, step)
        logger.warning("restored step %d: steps %d to %d are recomputed", restored, restored + 1, step)
        return restored
    restored = training.roll_back(run, step)
    logger.warning("rolled back to step %d; the data of steps %d to %d is left out", restored, restored + 1, step)
    return restored


def is_save_due(training: Training, step: int) -> bool:
    """Return whether a checkpoint is due after `step`; none is while updates are skipped, which may be spoiled."""
    guard = training.step.guard
    return is_due(step, training.job.checkpoint.interval) and not (guard is not None and guard.is_skipping)


def final_hash(training: Training) -> str | None:
    """Return the hash of all parameters, with run.parameter_hash; a collective."""
    return parameter_hash(canonical_parameters(training.model)) if training.job.run.parameter_hash else None


def validate(training: Training, step: int, recorder: RunRecorder | None) -> float:
    """Measure, record and return the validation loss; a collective."""
    num_batches = min(training.job.train.validation_batches, training.loader.num_validation_batches)
    loss = training.step.validate([training.loader.validation_microbatches(index) for index in range(num_batches)])
    if recorder is not None:
        recorder.validation(step, loss)
    return loss


def is_due(step: int, interval: int) -> bool:
    """Return whether an action with this interval in steps (0: never) is due after `step`."""
    return interval > 0 and step % interval == 0


def exit_code(job: Job, step: int, asked: signal.Signals | None) -> ExitCode:
    """Return 0 when all steps are done, else the code of an interrupt or of a requested restart."""
    if step >= job.train.steps:
        return ExitCode.DONE
    return ExitCode.INTERRUPTED if asked is signal.SIGINT else ExitCode.RETRY


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
