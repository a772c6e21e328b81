"""Which layouts of a table are valid: the rules of spec/job/validity.py, spec/job/rules/size_rules.py and
spec/layout/schedule/schedule_rules.py on arrays.

Those say in words what is wrong with one layout; these say of a hundred thousand at once which are right. A test holds
the two together.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.cost.layout_table import (
    ACTIVATION_CHECKPOINTS,
    ATTENTION_BACKENDS,
    CONTEXT_METHODS,
    Bools,
    LayoutTable,
)
from meshwright.cost.optimizer_update import is_plain
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.graph_rules import captures_ranks, takes_graphs_and_pools
from meshwright.spec.job.rules.adapter_rules import packed_rows
from meshwright.spec.job.rules.attention_rules import device_problem, model_obstacle, precision_obstacle
from meshwright.spec.job.rules.optimizer_rules import INT8_BLOCK_SIZE, quantized_columns
from meshwright.spec.job.rules.size_rules import ring_obstacles, sizes_over_tp
from meshwright.spec.layout.attention_backend import AttentionBackend
from meshwright.spec.layout.device_rules import kernel_problem
from meshwright.spec.layout.layout import SINGLE_STAGE_SCHEDULES, V_SCHEDULES
from meshwright.spec.layout.schedule.schedule_rules import AS_MANY_AS_STAGES, IN_ROUNDS
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.op import float8_alignment
from meshwright.spec.step.adapter import PACKED_BLOCK
from meshwright.spec.step.workload import FLOAT8_PRECISIONS


def is_valid(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return of each layout whether it can run what is asked."""
    return np.asarray(
        shares_batch(layouts, request)
        & splits_model(layouts, request)
        & has_consistent_choices(layouts, request)
        & runs_schedule(layouts, request)
    )


def shares_batch(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether every data-parallel rank gets equally many whole microbatches."""
    rows, workload = layouts.dp * layouts.microbatch_size, request.workload
    is_whole = workload.global_batch_size % rows == 0
    return np.asarray(is_whole & ((workload.global_batch_size == rows) | (not workload.updates_in_backward)))


def splits_model(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether the ranks are as many as there are devices, and divide sequences, heads, widths and experts."""
    architecture = request.architecture
    return np.asarray(
        (layouts.num_ranks == request.num_devices)
        & _divides_sequence(layouts, request.workload.seq_len)
        & _divides_widths(layouts, architecture)
        & _divides_experts(layouts, architecture)
        & _fills_stages(layouts, architecture)
        & _updates_shards(layouts, request)
        & captures_ranks(layouts, request)
    )


def cuts_model(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether there is a block for each stage, and as many stages as the request fixes the first blocks of."""
    return np.asarray(_fills_stages(layouts, request.architecture) & _keeps_boundaries(layouts, request))


def has_consistent_choices(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether what blocks do about memory and overlap fits the split, and what the request fixes."""
    return np.asarray(
        ~(layouts.splits_backward & layouts.is_resharded)
        & ((layouts.activation_checkpoint_every == 1) | (layouts.activation_checkpoint != 0))
        & (~layouts.cpu_offload | (is_plain(request.workload) & (not request.workload.updates_in_backward)))
        & (~layouts.async_tp | ((layouts.tp > 1) & layouts.compile & _compiles_with_inductor(request)))
        & (layouts.loss_chunks <= layouts.microbatch_size * request.workload.seq_len // layouts.cp)
        & _keeps_parameters(layouts, request.fixed.get("reshard_after_forward"))
        & _keeps_default_sync(layouts, request.fixed.get("gradient_sync"))
        & _keeps_boundaries(layouts, request)
        & _takes_float8(layouts, request)
        & takes_graphs_and_pools(layouts, request)
        & _attends(layouts, request)
    )


def runs_schedule(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether the schedule takes the stages of a rank and the microbatches of a step."""
    num_microbatches = np.maximum(1, request.workload.global_batch_size // (layouts.dp * layouts.microbatch_size))
    stages, rounds = layouts.stages_per_rank, np.maximum(1, num_microbatches // layouts.pp)
    takes_stages = (~layouts.has_schedule(SINGLE_STAGE_SCHEDULES) | (stages == 1)) & (
        ~layouts.has_schedule(V_SCHEDULES) | (stages == 2)
    )
    takes_microbatches = (~layouts.has_schedule(IN_ROUNDS) | (num_microbatches % rounds == 0)) & (
        ~layouts.has_schedule(AS_MANY_AS_STAGES) | (num_microbatches >= layouts.num_stages)
    )
    return np.asarray(np.where(layouts.pp == 1, stages == 1, takes_stages & takes_microbatches))


def _fills_stages(layouts: LayoutTable, architecture: LlamaArchitecture) -> Bools:
    # The first stage can do with the embedding alone, the last one with the head.
    return np.asarray((layouts.pp == 1) | (layouts.num_stages <= architecture.num_layers + 2))


def _divides_sequence(layouts: LayoutTable, seq_len: int) -> Bools:
    is_ulysses = _is_ulysses(layouts)
    chunks = np.where((layouts.cp > 1) & ~is_ulysses, 2 * layouts.cp, 1)
    return np.asarray((seq_len % chunks == 0) & (seq_len % (layouts.cp * layouts.tp) == 0))


def _divides_widths(layouts: LayoutTable, architecture: LlamaArchitecture) -> Bools:
    tp, cp = layouts.tp, layouts.cp
    heads, kv_heads, kv_dim = architecture.num_heads, architecture.num_kv_heads, architecture.kv_dim
    divides = np.all([size % tp == 0 for size in sizes_over_tp(architecture).values()], axis=0)
    shares_kv_heads = (kv_heads % tp == 0) | ((tp % kv_heads == 0) & (kv_dim % tp == 0))
    own_heads, own_kv_heads = heads // tp, np.maximum(1, kv_heads // tp)
    # Ulysses swaps heads for sequence: each rank ends with whole query heads, and whole key heads or a copy of one.
    swaps = (np.maximum(1, own_heads) % cp == 0) & ((cp % own_kv_heads == 0) | (own_kv_heads % cp == 0))
    is_ring = (layouts.cp > 1) & (layouts.cp_method == CONTEXT_METHODS.index("ring"))
    takes_ring = ~is_ring | (not ring_obstacles(architecture))
    return np.asarray(divides & shares_kv_heads & (~_is_ulysses(layouts) | swaps) & takes_ring)


def _divides_experts(layouts: LayoutTable, architecture: LlamaArchitecture) -> Bools:
    ep, etp = layouts.ep, layouts.etp
    if not isinstance(architecture, MoEArchitecture):
        return np.asarray((ep == 1) & (etp == 1))
    num_ranks = layouts.fsdp * np.where(etp > 1, 1, layouts.tp)
    return np.asarray(
        ((etp == 1) | (etp == layouts.tp))
        & (num_ranks % ep == 0)
        & (architecture.num_experts % ep == 0)
        & (architecture.expert_ffn_dim % etp == 0)
    )


def _updates_shards(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether the optimizer can update what the split leaves a rank, and blocks of few bits are whole."""
    fits = (layouts.pp == 1) | (not request.workload.updates_in_backward)
    if request.workload.optimizer_state_dtype == "int8":
        for axis, columns in quantized_columns(request.architecture):
            fits = fits & (columns % (getattr(layouts, axis) * INT8_BLOCK_SIZE) == 0)
    for _, inputs in packed_rows(request.workload.adapter, request.architecture):
        fits = fits & (inputs % (layouts.tp * PACKED_BLOCK) == 0)
    return np.asarray(fits)


def _keeps_parameters(layouts: LayoutTable, group: Any) -> Bools | bool:
    """Return whether parameters are kept as the request asks: on groups of a size, or as "auto" has it."""
    if group == "auto":
        return np.asarray(layouts.is_resharded == layouts.reshards_by_default)
    if not isinstance(group, int):
        return True
    is_group = (layouts.fsdp % group == 0) & (group > 1) & (group < layouts.fsdp)
    return np.asarray((layouts.pp * layouts.tp == 1) & is_group)


def _compiles_with_inductor(request: PlanRequest) -> bool:
    return bool(request.fixed.get("compile_backend", "inductor") == "inductor")


def _keeps_default_sync(layouts: LayoutTable, sync: Any) -> Bools | bool:
    """Return whether gradients are reduced as the request's "auto" has it; other values are the menu's only ones."""
    if sync != "auto":
        return True
    return np.asarray(layouts.reduces_each_microbatch == layouts.reduces_each_by_default)


def _takes_float8(layouts: LayoutTable, request: PlanRequest) -> Bools | bool:
    """Return whether our trainer computes float8 matmuls in a layout, if it is to (spec/job/rules/float8_rules.py)."""
    recipe = request.setup.own_float8
    if recipe not in FLOAT8_PRECISIONS.values():
        return True
    tokens = layouts.microbatch_size * request.workload.seq_len // layouts.cp
    gathers = ~layouts.cpu_offload & (layouts.kept_on == 0) | (recipe != FLOAT8_PRECISIONS["tensorwise"])
    return np.asarray((tokens % float8_alignment(recipe) == 0) & ~layouts.async_tp & gathers)


def _attends(layouts: LayoutTable, request: PlanRequest) -> Bools | bool:
    """Return whether the attention backend computes the model's attention (spec/job/rules/attention_rules.py)."""
    workload, codes = request.workload, layouts.attention_backend
    if not codes.any():  # all auto
        return True
    computes = np.array(
        [
            not precision_obstacle(name, workload.activation_dtype)
            and not model_obstacle(name, request.architecture, workload.seq_len)
            and not (name == "flash" and workload.masks_documents)
            and (name == "auto" or not _is_missing(name, request))
            for name in ATTENTION_BACKENDS
        ]
    )[codes]
    is_whole = (layouts.cp == 1) | _is_ulysses(layouts)
    is_flex = codes == ATTENTION_BACKENDS.index("flex")
    saves = layouts.activation_checkpoint == ACTIVATION_CHECKPOINTS.index("selective")
    return np.asarray(((codes == 0) | (is_whole & computes)) & ~(is_flex & (saves | layouts.splits_backward)))


def _is_missing(backend: AttentionBackend, request: PlanRequest) -> bool:
    """Return whether the request's device has no kernel of `backend`."""
    device, dtype = request.cluster.device, request.workload.activation_dtype
    is_lacking = request.setup.is_own and kernel_problem(backend, device) is not None
    return is_lacking or device_problem(backend, dtype, device.torch_type) is not None


def _keeps_boundaries(layouts: LayoutTable, request: PlanRequest) -> Bools | bool:
    boundaries = request.fixed.get("stage_boundaries")
    if boundaries is None:
        return True
    is_ascending = all(first < second for first, second in pairwise(boundaries))
    is_within = max(boundaries, default=0) <= request.architecture.num_layers
    return np.asarray((layouts.num_stages == len(boundaries) + 1) & (is_ascending and is_within))


def _is_ulysses(layouts: LayoutTable) -> Bools:
    return np.asarray(layouts.cp_method == CONTEXT_METHODS.index("ulysses"))
