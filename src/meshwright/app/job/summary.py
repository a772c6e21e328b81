"""What a sound job would do, on one screen: printed by check."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from meshwright.app.job.adapter_job_problems import adapter_parameters
from meshwright.app.job.cpu_training import int8_note
from meshwright.app.job.initial_weights import tokenizer_note
from meshwright.checkpoint.memory.memory_dir_notes import memory_dir_notes
from meshwright.config.load import DEFAULT, ResolvedJob
from meshwright.cost.communication.nccl_ctas import idle_limit_note
from meshwright.data.corpus import map_corpora
from meshwright.data.examine.target_notes import target_notes
from meshwright.hardware.catalogue import LOCAL, load_device
from meshwright.hardware.choice import cluster_of_section, named_cluster
from meshwright.hardware.machine import free_disk_bytes, nearest_existing
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.memory_rules import idle_group_keys
from meshwright.spec.job.rules.mixture_rules import stage_weights
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.layout_text import checkpoint_words
from meshwright.spec.layout.schedule.schedule_rules import idle_schedule_note
from meshwright.spec.layout.stage_split import stage_boundaries
from meshwright.spec.machine.device import Device
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.gpt2_architecture import dropout_note
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import KEPT_WEIGHT_BYTES
from meshwright.spec.run.run import Run
from meshwright.units import counted, format_bytes, format_count

# A checkpoint holds the float32 weights and AdamW's two float32 moments.
_CHECKPOINT_BYTES_PER_PARAMETER = 12
_WEIGHT_BYTES = 4
_LEAST_RUN = 3
_OUTER_BYTES_PER_PARAMETER = 8
"""An outer parameter and its momentum, where replicas sum every few steps."""


def summary(resolved: ResolvedJob, num_ranks: int | None) -> Iterator[tuple[str, str]]:
    """Yield a label and a line for each aspect of a job without problems; num_ranks is None where it is unknown."""
    job = resolved.job
    layout = concrete_layout(job, num_ranks)
    yield "job", f"{resolved.path}: configuration valid"
    yield "model", _model_line(job)
    if job.train.task == "dpo":
        yield "dpo", _dpo_line(job)
    if job.adapter.freezes_base:
        yield "adapter", _adapter_line(job)
    yield "batch", _batch_line(resolved, layout)
    yield "layout", _layout_line(job, layout)
    if layout is not None and layout.pp > 1:
        yield "stages", _stages_line(job, layout)
    own = is_object_source(job.data.source)
    source = _mixture_words(job) if job.data.mixture else job.data.source
    yield "data", f"{source}, samples of its own" if own else f"{source}, tokenizer {job.data.tokenizer}"
    yield "run", _run_line(resolved)
    yield from _notes(resolved, layout)


def precision_note(resolved: ResolvedJob, device: Device) -> str | None:
    """Return that a job computes in float32, since it names no format, on a device that is faster in bfloat16."""
    if resolved.job.precision.compute != "float32" or resolved.origins["precision.compute"] != DEFAULT:
        return None
    fast, slow = (device.peak_flops_per_s(dtype) for dtype in ("bfloat16", "float32"))
    if device.torch_type == "cpu" or fast is None or (slow is not None and fast <= slow):
        return None
    times = "" if slow is None else f" {fast / slow:.3g} times as fast"
    return (
        f"precision.compute is float32, the default: {device.name} computes matmuls{times} in bfloat16 on its tensor "
        'cores; set precision.compute = "bfloat16" to use them'
    )


def concrete_layout(job: Job, num_ranks: int | None) -> Layout | None:
    """Return the concrete layout, None where its -1 has no value yet, or the planner chooses it."""
    if job.layout.search or (num_ranks is None and job.layout.rest_axis is not None):
        return None
    return job.layout.resolve(num_ranks or job.layout.num_ranks)


def _mixture_words(job: Job) -> str:
    """Return the sources of a mixture with their shares in each stage."""
    stages = [[100 * weight / sum(weights) for weight in weights] for weights in stage_weights(job.data)]
    of_sources = zip(job.data.mixture, zip(*stages, strict=True), strict=True)
    words = (f"{table.label} {', then '.join(f'{share:.3g}' for share in shares)} %" for table, shares in of_sources)
    return f"mixture of {'; '.join(words)}"


def _model_line(job: Job) -> str:
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return f"{job.model.source}, your own: its parameters are counted when training starts"
    spec = model_spec(architecture)
    flops = adapted_model(spec, job.adapter).flops_per_token(job.train.seq_len)
    return (
        f"{job.model.source}, {format_count(spec.num_parameters)} parameters, {format_count(flops)} FLOPs a token "
        f"forward and backward, {job.precision.matmuls}"
    )


def _adapter_line(job: Job) -> str:
    adapter = job.adapter
    line = f"{adapter.kind} of rank {adapter.rank}, alpha {adapter.alpha:g}"
    if (found := adapter_parameters(job)) is None:
        return f"{line}: its layers are counted when training starts"
    num_layers, num_parameters = found
    return f"{line}, of {counted(num_layers, 'linear layer')}: {format_count(num_parameters)} parameters are trained"


def _dpo_line(job: Job) -> str:
    smoothing = f", label smoothing {job.dpo.label_smoothing:g}" if job.dpo.label_smoothing else ""
    return (
        f"{job.dpo.loss} loss, beta {job.dpo.beta:g}{smoothing}; the reference is the model at the start: one forward "
        "of all pairs before the first step"
    )


def _batch_line(resolved: ResolvedJob, layout: Layout | None) -> str:
    job = resolved.job
    tokens = job.workload.global_batch_tokens
    is_text = not is_object_source(job.data.source)
    line = f"{counted(job.global_batch_size, 'sample')} a step"
    if is_text:
        sequences = counted(job.global_batch_size, "sequence")
        line = f"{sequences} x {counted(job.train.seq_len, 'token')} = {format_count(tokens)} tokens a step"
    if layout is not None:
        microbatches = counted(job.num_microbatches(layout), "microbatch", "microbatches")
        is_default = resolved.origins["layout.microbatch_size"] == DEFAULT
        size = f"{layout.microbatch_size} (layout.microbatch_size's default)" if is_default else layout.microbatch_size
        line += f", {microbatches} of {size} on each data-parallel rank"
    in_all = f"{format_count(tokens * job.train.steps)} tokens"
    if not is_text:
        in_all = f"{format_count(job.global_batch_size * job.train.steps)} samples"
    return f"{line}; {counted(job.train.steps, 'step')}, {in_all} in all"


def _layout_line(job: Job, layout: Layout | None) -> str:
    if job.layout.search:
        return "chosen by the planner when training starts: `meshwright plan JOB` shows it" + _cluster_words(job, None)
    if layout is None:
        rest = job.layout.rest_axis
        others = "" if job.layout.num_fixed_ranks == 1 else f", divided by {job.layout.num_fixed_ranks}"
        return f"{rest} is the number of ranks{others}; the batch is checked when ranks are given"
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) != 1]
    ranks = counted(layout.num_ranks, "rank")
    pools = [f"memory.{key} {value}" for key, value in job.memory.changed.items()]
    choices = ", ".join([*_split_choices(layout), *_step_choices(layout), *pools])
    return f"{' x '.join(degrees) or 'no split'} = {ranks}; {choices}" + _cluster_words(job, layout.num_ranks)


def _split_choices(layout: Layout) -> Iterator[str]:
    """Yield how the axes split that are more than one rank."""
    if layout.ep > 1 or layout.etp > 1:
        yield f"experts over ep {layout.ep} x etp {layout.etp} x expert_dp_shard {layout.expert_dp_shard}"
    if layout.cp > 1:
        yield f"cp_method {layout.cp_method}"
    if layout.async_tp:
        yield "async_tp"
    if layout.pp > 1:
        yield f"schedule {layout.schedule}"


def _step_choices(layout: Layout) -> Iterator[str]:
    """Yield what each block does about its memory and time."""
    every = f" every {layout.activation_checkpoint_every}" if layout.activation_checkpoint_every > 1 else ""
    blocks = layout.activation_checkpoint_blocks
    saves = layout.activation_checkpoint if blocks is None else checkpoint_words(blocks)
    yield f"activation_checkpoint {saves}{every}"
    if layout.compile == "auto":
        yield "compile auto"
    elif layout.compile:
        what = "compile the model" if layout.compile == "model" else "compile"
        what = what if layout.compiles_blocks else "compile without effect on blocks with eager attention or experts"
        yield what if layout.compile_backend == "inductor" else f"{what} by {layout.compile_backend}"
    said = {*AXES, "ep", "etp", "microbatch_size", "cp_method", "async_tp", "schedule", "compile", "compile_backend"}
    for name, field in Layout.model_fields.items():
        value = getattr(layout, name)
        if name not in said and not name.startswith("activation_checkpoint") and value != field.default:
            yield name if value is True else f"{name} {_listed(value) if isinstance(value, tuple) else value}"


def _stages_line(job: Job, layout: Layout) -> str:
    boundaries = layout.stage_boundaries
    architecture = resolve_architecture(job.model)
    if architecture is None:
        given = "" if boundaries is None else f", which begin with blocks {_listed([0, *boundaries])}"
        return f"{layout.num_stages} of your own model{given}"
    boundaries = stage_boundaries(layout, model_spec(architecture), job.train.seq_len)
    sizes = [end - start for start, end in pairwise([0, *boundaries, architecture.num_layers])]
    return f"{layout.num_stages}, of {_listed(list(_runs(sizes)))} blocks{_without_blocks(sizes)}"


def _without_blocks(sizes: Sequence[int]) -> str:
    """Return what the first and the last stage hold where they have no block; no other stage can be without."""
    ends = (("the first", sizes[0], "the embedding"), ("the last", sizes[-1], "the final norm and the head"))
    return "".join(f"; {which} holds {what} alone" for which, size, what in ends if size == 0)


def _runs(sizes: Sequence[int]) -> Iterator[str]:
    """Yield each size, three or more equal ones in a row as one: 126 x 1."""
    for size, same in groupby(sizes):
        count = len(list(same))
        yield from [f"{count} x {size}"] if count >= _LEAST_RUN else [str(size)] * count


def _listed(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers))


def _cluster_words(job: Job, num_ranks: int | None) -> str:
    name = job.cluster.name
    if name == LOCAL:
        return ""
    # A device names its usual cluster, as which the prediction next to it is labelled.
    found = named_cluster(name, job.cluster.num_devices or num_ranks).name
    return f"; on {found}" if found == name else f'; on {found} (cluster.name = "{name}")'


def _run_line(resolved: ResolvedJob) -> str:
    job, run = resolved.job, Run(resolved.run_dir)
    steps = run.checkpoint_steps()
    if not run.manifest.exists():
        state = "new"
    else:
        state = f"exists, newest checkpoint after step {steps[-1]}" if steps else "exists, no checkpoint"
    every, interval = job.checkpoint.interval, "at the end"
    if every == "auto":
        interval = 'as often as failures make best (checkpoint.interval = "auto")'
    elif every:
        interval = f"every {counted(every, 'step')}"
    return f"{run.folder} ({state}); checkpoint {interval}, newest {job.checkpoint.keep} kept{_checkpoint_size(job)}"


def _checkpoint_size(job: Job) -> str:
    size_bytes = checkpoint_bytes(job)
    return f", {format_bytes(size_bytes)} each" if size_bytes else ""


def checkpoint_bytes(job: Job) -> int | None:
    """Return what a checkpoint takes; None for a user's model, which is known once it is built."""
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return None
    if (adapted := adapter_parameters(job)) is not None:
        # The base without states.
        frozen = [
            group.count * op.num_parameters * KEPT_WEIGHT_BYTES.get(op.weights, _WEIGHT_BYTES)
            for group in adapted_model(model_spec(architecture), job.adapter).groups
            for op in group.ops
            if op.is_frozen
        ]
        return round(sum(frozen)) + _CHECKPOINT_BYTES_PER_PARAMETER * adapted[1]
    outer_bytes = _OUTER_BYTES_PER_PARAMETER * job.replicas.trains_locally
    return (_CHECKPOINT_BYTES_PER_PARAMETER + outer_bytes) * model_spec(architecture).num_parameters


def _sync_note(job: Job, layout: Layout | None) -> str | None:
    """Return what predictions leave out of replicas that sum every few steps; None for others."""
    if not job.replicas.trains_locally:
        return None
    every = f"replicas.sync_every = {job.replicas.sync_every}"
    note = f"{every}: time and memory are predicted as with replicas.sync_every = 1, which sums gradients in every step"
    architecture = resolve_architecture(job.model)
    if architecture is None or layout is None:
        return note
    parameters = model_spec(architecture).num_parameters / (layout.dp_shard * layout.cp * layout.tp * layout.pp)
    summed_bytes = parameters * (2 if job.replicas.outer_dtype == "bfloat16" else 4) / job.replicas.sync_every
    outer = format_bytes(_OUTER_BYTES_PER_PARAMETER * parameters)
    return (
        f"{note}; a rank sums about {format_bytes(summed_bytes)} a step over replicas instead of "
        f"{format_bytes(4 * parameters)}, and holds {outer} of outer parameters and momentum more"
    )


def _named_device(job: Job) -> Device | None:
    """Return the device that the job names, by itself or by its cluster; None where it is this machine's own."""
    if job.cluster.name != LOCAL:
        return named_cluster(job.cluster.name).device
    return None if job.cluster.device is None else load_device(job.cluster.device)


def _notes(resolved: ResolvedJob, layout: Layout | None) -> Iterator[tuple[str, str]]:
    job = resolved.job
    if job.optimizer.warmup_steps > job.train.steps:
        yield "note", f"the warmup of {job.optimizer.warmup_steps} steps is longer than the run's {job.train.steps}"
    idle_schedule = "" if layout is None else idle_schedule_note(layout)
    sync_note = _sync_note(job, layout)
    of_model = dropout_note(resolve_architecture(job.model))
    yield from (
        ("note", note)
        for note in (of_model, tokenizer_note(resolved), int8_note(job), idle_schedule, sync_note)
        if note
    )
    if job.data.document_tokens is not None and not job.data.mask_documents:
        yield (
            "note",
            f"data.document_tokens = {job.data.document_tokens:g} does nothing without data.mask_documents = true: "
            "attention crosses documents, and is priced so",
        )
    if layout is not None and (idle := list(idle_group_keys(job.memory, layout))):
        verb = "does" if len(idle) == 1 else "do"
        yield (
            "note",
            f"{' and '.join(idle)} {verb} nothing in this layout: FSDP2 communicates where dp_shard, cp or "
            "dp_replicate share parameters among ranks",
        )
    on_cpu = job.cluster.name == LOCAL and job.run.device == "cpu"
    if layout is not None and (note := idle_limit_note(layout, cluster_of_section(job.cluster), on_cpu=on_cpu)):
        yield "note", note
    for unread_files in map_corpora(job.data, job.train.task, lambda corpus: corpus.unread_files):
        yield from (("note", line) for line in unread_files)
    yield from (("note", note) for note in target_notes(job.data, job.train.task))
    device = _named_device(job)
    if device is not None and (of_precision := precision_note(resolved, device)) is not None:
        yield "note", of_precision
    if job.checkpoint.memory_interval and job.cluster.name == LOCAL:
        notes = memory_dir_notes(job.checkpoint.memory_dir, checkpoint_bytes(job) or 0)
        yield from (("note", note) for note in notes)
    # A new checkpoint is complete before the oldest is removed.
    needed_bytes = (checkpoint_bytes(job) or 0) * (job.checkpoint.keep + 1)
    free_bytes = free_disk_bytes(nearest_existing(resolved.run_dir))
    if job.cluster.name == LOCAL and free_bytes < needed_bytes:
        yield (
            "note",
            f"this machine's disk has {format_bytes(free_bytes)} free for {resolved.run_dir}, "
            f"{job.checkpoint.keep} kept checkpoints and a new one take {format_bytes(needed_bytes)}",
        )
