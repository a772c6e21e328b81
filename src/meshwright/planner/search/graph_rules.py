"""Which layouts of a table go with graphs and memory pools: spec/job/rules/compile_rules.py, cuda_graph_rules.py and
memory_rules.py on arrays.
"""

import numpy as np

from meshwright.cost.layout_table import CONTEXT_METHODS, Bools, LayoutTable
from meshwright.cost.optimizer_update import is_plain
from meshwright.planner.request import PlanRequest
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.step.workload import FLOAT8_PRECISIONS


def takes_graphs_and_pools(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether what is compiled, captured and taken from pools goes with the rest of a layout and the request."""
    is_one_graph, captures = layouts.compiles_model, layouts.cuda_graphs
    return np.asarray(
        (~is_one_graph | _fits_one_graph(layouts, request))
        & (~captures | _repeats_on_the_device(layouts, request))
        & (~layouts.compile_optimizer | _has_plain_update(request))
        & _takes_pools(layouts, request)
    )


def captures_ranks(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return which layouts have as many ranks, and the request such a model, as cuda_graphs captures, if they do."""
    has_experts = isinstance(request.architecture, MoEArchitecture)
    return np.asarray(~layouts.cuda_graphs | ((layouts.num_ranks == 1) & (not has_experts)))


def _fits_one_graph(layouts: LayoutTable, request: PlanRequest) -> Bools:
    has_experts = isinstance(request.architecture, MoEArchitecture)
    is_ring = (layouts.cp > 1) & (layouts.cp_method == CONTEXT_METHODS.index("ring"))
    is_alone = (layouts.pp == 1) & (layouts.ep == 1) & ((layouts.tp == 1) | (not has_experts))
    has_no_hooks = ~layouts.cpu_offload & ~layouts.activation_offload & (layouts.kept_on == 0)
    is_tried = ~layouts.async_tp & ~is_ring & ~layouts.separate_reduce_group
    is_plain_sharding = (layouts.is_resharded | ~_recomputes(layouts)) & layouts.reduces_each_microbatch
    is_sharded_plainly = (layouts.fsdp == 1) | is_plain_sharding
    return np.asarray(is_alone & has_no_hooks & is_tried & is_sharded_plainly & _leaves_gradients(request))


def _repeats_on_the_device(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return in which layouts nothing of a microbatch is decided or moved by the host, as a CUDA graph needs it."""
    stays = ~layouts.cpu_offload & ~layouts.activation_offload & ~_recomputes(layouts)
    return np.asarray(stays & ~layouts.has_sparse_attention & _leaves_gradients(request))


def _takes_pools(layouts: LayoutTable, request: PlanRequest) -> Bools:
    """Return whether the pools of [memory] serve what the layout and the optimizer use."""
    memory, workload = request.setup.memory, request.workload
    takes = np.ones(len(layouts), np.bool_)
    if memory.uses_managed_memory:
        takes &= ~layouts.cpu_offload
    if memory.optimizer_state == "uvm":
        takes &= workload.optimizer_state_dtype != "int8" and not workload.updates_in_backward
    if memory.communication != "device":
        takes &= ~layouts.separate_reduce_group & ~layouts.cuda_graphs & ~layouts.compiles_model
    return takes


def _has_plain_update(request: PlanRequest) -> bool:
    return is_plain(request.workload) and not request.workload.updates_in_backward


def _leaves_gradients(request: PlanRequest) -> bool:
    """Return whether parameters are read as they are, and gradients kept until a backward has finished."""
    reads_float8 = request.setup.own_float8 in FLOAT8_PRECISIONS.values()
    return not reads_float8 and not request.workload.updates_in_backward


def _recomputes(layouts: LayoutTable) -> Bools:
    blocks = layouts.checkpoint_of_block
    return np.asarray((layouts.activation_checkpoint != 0) | (False if blocks is None else (blocks != 0).any(axis=1)))
