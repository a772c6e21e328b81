"""The training loop: resume, step, log, validate, save, stop; read it from top to bottom."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from typing import NamedTuple

from torch.profiler import record_function

from meshwright.checkpoint.parameter_hash import parameter_hash
from meshwright.data.loader import Microbatch
from meshwright.errors import DataError, DataUnavailable, ExitCode
from meshwright.fault_tolerance.hangs.hang_watch import HangWatch
from meshwright.fault_tolerance.injection.injector import under_faults
from meshwright.fault_tolerance.run_findings import RunFindings
from meshwright.fault_tolerance.step_guard import Decision
from meshwright.fault_tolerance.step_ledger import StepLedger
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.fault_tolerance.stragglers.straggler_watch import StragglerWatch
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.profiler.window import ProfilerWindow
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.trace.timeline import DATA_MARK, STEP_MARK
from meshwright.trainer.launch.compile_cache import load_cache
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.announcement import announce
from meshwright.trainer.run.compile_watch import CompileWatch, explained_compilation
from meshwright.trainer.run.memory_post_mortem import MemoryPostMortem
from meshwright.trainer.run.peak_flops import PeakFlops, peak_memory_bytes
from meshwright.trainer.run.recording import Recording
from meshwright.trainer.run.reference_scores import give_reference
from meshwright.trainer.run.replica_training import agree, begin, join_others, watched_section
from meshwright.trainer.run.run_checkpoints import RunCheckpoints
from meshwright.trainer.run.run_recorder import RunRecorder, StepMetrics
from meshwright.trainer.run.source_use import source_columns, source_lines
from meshwright.trainer.step.training import Training


class LastStep(NamedTuple):
    """Where a run ends."""

    step: int
    validation_loss: float | None
    """Measured at this step, if any."""
    asked: signal.Signals | None
    """The signal that ended it; None after all steps."""


def train(config: RankConfig, ranks: Ranks) -> ExitCode:
    """Train to train.steps or until a stop request and return the exit code; a collective.

    Checkpoints committed to the run stay valid however this ends.
    """
    job, run, place = config.job, config.run, config.replica
    own, number = (
        (run, ranks.rank)
        if place is None
        else (run.of_replica(place.replica), place.number_of(ranks.rank, ranks.num_ranks))
    )
    compiles = CompileWatch()
    with (
        StopRequest() as stop,
        HangWatch(own, ranks.rank, ranks.num_ranks, watched_section(config)) as watch,
        MemoryPostMortem(job, own, ranks) as post_mortem,
        under_faults(run, number, config.faults, watch) as ledger,
    ):
        cached = load_cache(job, run, ranks) if job.layout.compiles_anything else None
        training = Training.build(job, ranks, awaits_state=config.resume or config.warms_up)
        post_mortem.follow(training)
        stragglers = connect(training, watch, own)
        replicas = None if place is None else join_others(place, job, watch)
        step, in_memory = begin(training, config, replicas)
        speed = PeakFlops.of(job, ranks)
        profiler = ProfilerWindow(run.timelines, ranks.rank, job.run.profile_start, job.run.profile_steps)
        with (
            Recording(training, run, replicas, config.estimate) as recording,
            profiler,
            stragglers,
            RunCheckpoints(training, run, step, in_memory) as checkpoints,
            explained_compilation(stop),
        ):
            recording.follow(step)
            if recording.is_ours:
                announce(training, step, speed.peak_name)
            give_reference(training, run, step, watch.mark)
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
                    decision = take_step(training, step, speed, recording.recorder, ledger)
                compiles.after_step(training, step)
                profiler.after_step(step)
                if decision == "again":
                    step, asked = agree(training, replicas, step - 1, stop)
                    recording.follow(step)
                    continue
                if decision in ("roll back", "restore"):
                    watch.mark("restore")
                    step = roll_back(training, run, checkpoints, decision, step, recording.recorder)
                    continue
                if step == first_step:
                    checkpoints.prepare(last_step - step)
                recording.add_results(checkpoints.report(step))
                validation_loss = None
                if is_due(step, job.train.validation_interval):
                    watch.mark("validation")
                    validation_loss = validate(training, step, recording.recorder)
                recording.answer_if_due(step, watch)
                compiles.after_validation()
                watch.mark("agree")
                step, asked = agree(training, replicas, step, stop)
                recording.follow(step)
                stragglers.after_step(step)
                if asked is None and recording.saves:
                    save_if_due(recording, checkpoints, watch, LastStep(step, validation_loss, None), last_step)
            watch.mark("finish" if asked is None else "checkpoint")
            code = finish(training, recording, checkpoints, LastStep(step, validation_loss, asked), stop)
        if replicas is not None:
            replicas.leave()
        training.loader.close()
        return code


def finish(
    training: Training, recording: Recording, checkpoints: RunCheckpoints, last: LastStep, stop: StopRequest
) -> ExitCode:
    """Save what is to be saved after the last step, record how the run ended, and return its exit code; a collective.

    After a stop signal there may be little time left.
    """
    job = training.job
    if training.replicas is not None:
        training.replicas.settle()
    if last.asked is None:
        recording.add_results(checkpoints.finish(last.step))
        digest = final_hash(training)
    else:
        if last.step < job.train.steps:
            logger.info("%s: stopping after step %d, with a checkpoint", last.asked.name, last.step)
        digest, deadline_s = None, stop.asked_at_s + job.run.grace_s
        recording.save_before_kill(checkpoints, last.step, last.validation_loss, deadline_s)
    code = exit_code(job, last.step, last.asked)
    if recording.recorder is not None:
        guard = training.step.guard
        for line in source_lines(training, last.step + (guard.left_out_steps if guard else 0)):
            logger.info("%s", line)
        recording.recorder.finish(last.step, code, parameter_hash=digest)
    return code


def connect(training: Training, watch: HangWatch, run: Run) -> StragglerWatch:
    """Let the heartbeat follow the phases of a step and checks write into `run`; return what compares ranks' times.

    The phase is then that of restoring a checkpoint.
    """
    watch.follow(training.model)
    training.step.report_to(watch.mark)
    watch.mark("restore")
    findings = RunFindings(run)
    if training.step.replica_guard is not None:
        training.step.replica_guard.findings = findings
    return StragglerWatch(watch.phase_times, findings, training.layout, training.ranks.device.type)


def take_step(
    training: Training, step: int, speed: PeakFlops, recorder: RunRecorder | None, ledger: StepLedger | None = None
) -> Decision:
    """Run one optimizer step, record its metrics, in a chaos run also its samples, and return what became of it.

    A collective.
    """
    guard = training.step.guard
    started_s, summed_bytes = time.perf_counter(), training.summed_bytes
    with record_function(f"{STEP_MARK}{step}"):
        with record_function(DATA_MARK):
            # Data positions count from 0, steps from 1.
            position = step - 1 + (guard.left_out_steps if guard else 0)
            microbatches = read_batch(training, step, position)
        data_wait_s = time.perf_counter() - started_s
        if ledger is not None and training.step.replicas is not None:
            # Once the others have its part, the step may count whatever becomes of this rank.
            ledger.add(step, microbatches, training.step.epoch, is_finished=False)
        result = training.step(step, microbatches)
    step_s = time.perf_counter() - started_s
    if result.decision == "restore":
        return result.decision
    if ledger is not None and result.decision != "again":
        ledger.add(step, microbatches, training.step.epoch)
    if guard is not None and result.decision != "take":
        logger.warning("step %d was skipped: %s", step, guard.reason)
    if recorder is None or result.decision == "again":
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
            summed_bytes=None if training.replicas is None else training.summed_bytes - summed_bytes,
            decision=result.decision,
            experts=result.experts,
            loss_metrics=result.loss_metrics,
            sources=source_columns(training, position + 1),
        )
    )
    return result.decision


def read_batch(training: Training, step: int, position: int) -> list[Microbatch]:
    """Return this rank's microbatches at a position of the data; an error of reading names the step that needs them."""
    try:
        return training.loader.microbatches(position)
    except (DataError, DataUnavailable) as error:
        raise type(error)(f"step {step}: {error}") from error.__cause__


def roll_back(
    training: Training,
    run: Run,
    checkpoints: RunCheckpoints,
    decision: Decision,
    step: int,
    recorder: RunRecorder | None,
) -> int:
    """Return to an earlier checkpoint after `step`; "roll back" leaves out the data since; a collective."""
    checkpoints.settle()
    checkpoints.forget_copies()
    started_s = time.perf_counter()
    restored = training.restore(run, step) if decision == "restore" else training.roll_back(run, step)
    if recorder is not None:
        recorder.event("restore", step, time.perf_counter() - started_s)
    if decision == "restore":
        logger.warning("restored step %d: steps %d to %d are recomputed", restored, restored + 1, step)
        return restored
    logger.warning("rolled back to step %d; the data of steps %d to %d is left out", restored, restored + 1, step)
    return restored


def save_if_due(
    recording: Recording, checkpoints: RunCheckpoints, watch: HangWatch, done: LastStep, last_step: int
) -> None:
    """Save the state after a step to disk, where that is due or it is the last, and to memory; a collective."""
    if done.step == last_step or checkpoints.is_due(done.step):
        watch.mark("checkpoint")
        recording.save(checkpoints, done.step, done.validation_loss)
    if recording.is_ours:
        checkpoints.copy_to_memory(done.step)


def final_hash(training: Training) -> str | None:
    """Return the hash of all parameters, with run.parameter_hash; a collective."""
    return parameter_hash(canonical_parameters(training.model)) if training.job.run.parameter_hash else None


def validate(training: Training, step: int, recorder: RunRecorder | None) -> float:
    """Measure, record and return the validation loss; a collective."""
    num_batches = min(training.job.train.validation_batches, training.loader.num_validation_batches)
    started_s = time.perf_counter()
    loss = training.step.validate([training.loader.validation_microbatches(index) for index in range(num_batches)])
    loss_metrics = training.step.loss_metrics()
    if recorder is not None:
        recorder.validation(step, loss, loss_metrics)
        recorder.event("validation", step, time.perf_counter() - started_s)
    return loss


def is_due(step: int, interval: int) -> bool:
    """Return whether an action with this interval in steps (0: never) is due after `step`."""
    return interval > 0 and step % interval == 0


def exit_code(job: Job, step: int, asked: signal.Signals | None) -> ExitCode:
    """Return 0 when all steps are done, else the code of an interrupt or of a requested restart."""
    if step >= job.train.steps:
        return ExitCode.DONE
    return ExitCode.INTERRUPTED if asked is signal.SIGINT else ExitCode.RETRY
