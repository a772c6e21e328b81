"""Menu: the values that each key of a layout may take in a search, and the rules by which values are left out.

Left out, because no other choice makes them the best: tensor parallelism beyond the domain whose devices reach each
other directly; context parallelism that leaves a rank fewer than 256 tokens of a sequence; looped schedules of one
stage a rank, which are 1F1B or GPipe; `compile = false` on an accelerator, where compiled blocks never take longer,
but for schedules that split backwards, which are tried with eager blocks: a compiled block runs its whole backward in
each part.
GPipe and LoopedBFS are tried only where 1F1B and Interleaved1F1B cannot run: they wait as long and hold more. A loss in
chunks, activation_offload and cpu_offload are tried where they let in what does not fit without (memory_keys.py); for
other software only where nothing fits without. Left out to keep the search short: all but a few numbers of virtual
stages, microbatches of more than 64 sequences, recomputation of every n-th block beyond n = 4, and groups of ranks in
reshard_after_forward. Whatever a job sets itself is taken as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, CONTEXT_METHODS
from meshwright.cost.optimizer_update import is_plain
from meshwright.errors import UnsupportedError
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.rules.size_rules import ring_obstacles
from meshwright.spec.layout.device_rules import symmetric_memory_obstacle
from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.problem import shown_value
from meshwright.spec.step.workload import FLOAT8_PRECISIONS

_VIRTUAL_STAGES = (2, 3, 4, 6, 8)
_MAX_MICROBATCH_SIZE = 64
_CHECKPOINT_EVERY = (1, 2, 3, 4)
_MIN_TOKENS_OF_SEQUENCE = 256
LOSS_CHUNKS = 16
"""Of which one has less than half of the bytes of 16-bit logits: docs/design/0018-loss-in-chunks.md."""

Pipeline = tuple[str, int]
"""A schedule and the stages that it gives each pipeline rank."""


@dataclass(frozen=True)
class Menu:
    """Values by key, in the order in which they are tried."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    dp_shard: tuple[int, ...]
    dp_replicate: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    microbatch_size: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    activation_checkpoint: tuple[str, ...]
    activation_checkpoint_every: tuple[int, ...]
    cp_method: tuple[str, ...]
    is_resharded: tuple[bool, ...]
    reduces_each_microbatch: tuple[bool, ...]
    async_tp: tuple[bool, ...]
    cpu_offload: tuple[bool, ...]
    activation_offload: tuple[bool, ...]
    loss_chunks: tuple[int, ...]
    compile: tuple[bool, ...]
    compile_loss: bool
    """Whether the loss is compiled where a job does not say: next to compiled blocks, since it then takes less time and
    memory.
    """
    has_model_graph: tuple[bool]
    """Whether what is compiled is the model as one graph, which is tried only where a job asks for it."""


SEARCHED_KEYS = frozenset(
    {field.name for field in fields(Menu)} | {"schedule", "virtual_stages", "reshard_after_forward", "gradient_sync"}
)
"""Keys of a layout that the search chooses where a job does not set them."""


def pipeline_options(pipelines: Sequence[Pipeline]) -> dict[str, Sequence[Any]]:
    """Return the columns of a table that `pipelines` set, each with the values of all of them."""
    return {
        "schedule": [schedule for schedule, _ in pipelines],
        "stages_per_rank": [number for _, number in pipelines],
    }


def menu_of(request: PlanRequest) -> Menu:
    """Return the values to try for `request`, what it fixes being the only value of its key."""
    architecture, cluster = request.architecture, request.cluster
    degrees = divisors(cluster.num_devices)
    is_mixture = isinstance(architecture, MoEArchitecture)
    # Compiled blocks of a host may take longer, and its ranks write to no other's memory, as async_tp does.
    is_accelerator = cluster.device.torch_type == "cuda"
    pipelines_matmuls = is_accelerator and not (request.setup.is_own and symmetric_memory_obstacle(cluster.device))
    can_move = cluster.device.has_own_memory and not _is_graph(request.fixed)
    batch = request.workload.global_batch_size
    menu = Menu(
        tp=tuple(n for n in degrees if n <= cluster.domain_size),
        cp=tuple(n for n in degrees if n == 1 or n * _MIN_TOKENS_OF_SEQUENCE <= request.workload.seq_len),
        pp=tuple(n for n in degrees if n <= architecture.num_layers + 2),
        dp_shard=degrees,
        dp_replicate=degrees,
        ep=_expert_degrees(request),
        etp=tuple(n for n in degrees if n <= cluster.domain_size) if is_mixture else (1,),
        microbatch_size=tuple(n for n in divisors(batch) if n <= _MAX_MICROBATCH_SIZE),
        pipelines=tuple(_pipelines(SCHEDULES, None)),
        activation_checkpoint=ACTIVATION_CHECKPOINTS,
        activation_checkpoint_every=_CHECKPOINT_EVERY,
        cp_method=tuple(one for one in CONTEXT_METHODS if one != "ring" or not ring_obstacles(architecture)),
        is_resharded=(True, False),
        reduces_each_microbatch=(True, False),
        async_tp=(False, True) if pipelines_matmuls else (False,),
        cpu_offload=(False, True) if can_move and _updates_on_the_host(request) else (False,),
        activation_offload=(False, True) if can_move else (False,),
        loss_chunks=(1, LOSS_CHUNKS),
        compile=(True, False) if is_accelerator else (False,),
        compile_loss=is_accelerator and request.setup.is_own and _is_by_inductor(request.fixed),
        has_model_graph=(request.fixed.get("compile") == "model",),
    )
    menu = _with_graphs(_with_backend(menu, request.fixed.get("attention_backend", "auto")), request.fixed)
    return _constrained(menu, request.fixed)


def _expert_degrees(request: PlanRequest) -> tuple[int, ...]:
    """Return the degrees of expert parallelism, with which sums are not exact (spec/job/rules/exact_rules.py)."""
    architecture = request.architecture
    if request.workload.sums_exactly or not isinstance(architecture, MoEArchitecture):
        return (1,)
    return divisors(architecture.num_experts)


def _with_graphs(menu: Menu, fixed: Mapping[str, Any]) -> Menu:
    """Return the menu without what CUDA graphs (spec/job/rules/cuda_graph_rules.py) or the compiler do not go with."""
    if fixed.get("cuda_graphs"):
        menu = replace(menu, activation_checkpoint=("none",))
    if fixed.get("compile") == "model" or fixed.get("compile_backend", "inductor") != "inductor":
        menu = replace(menu, async_tp=(False,))
    return menu


def _with_backend(menu: Menu, backend: str) -> Menu:
    """Return the menu without what the attention backend does not go with (spec/job/rules/attention_rules.py)."""
    if backend == "auto":
        return menu
    saves = tuple(one for one in menu.activation_checkpoint if (backend, one) != ("flex", "selective"))
    return replace(menu, cp_method=("ulysses",), activation_checkpoint=saves)


MEMORY_KEYS = ("cpu_offload", "activation_offload", "loss_chunks")
"""Keys that save memory and take time for it."""


def memory_options(menu: Menu) -> list[dict[str, Any]]:
    """Return the combinations of the memory keys, those that change fewer of them first: as the menu's first values."""
    values = [getattr(menu, key) for key in MEMORY_KEYS]
    options = sorted(product(*values), key=lambda one: sum(a != b[0] for a, b in zip(one, values, strict=True)))
    return [dict(zip(MEMORY_KEYS, option, strict=True)) for option in options]


def without_memory_keys(menu: Menu) -> Menu:
    """Return the menu with the first value of each memory key alone: what is set, or the default."""
    return replace(menu, **{key: getattr(menu, key)[:1] for key in MEMORY_KEYS})


def unsearched_keys(menu: Menu, request: PlanRequest) -> tuple[str, ...]:
    """Return the memory keys that `menu`, which layouts were found with, leaves at their defaults."""
    full = menu_of(request)
    return tuple(key for key in reversed(MEMORY_KEYS) if len(getattr(menu, key)) < len(getattr(full, key)))


def _is_by_inductor(fixed: Mapping[str, Any]) -> bool:
    """Return whether what is compiled runs as kernels that Inductor fuses."""
    return fixed.get("compile", True) is not False and fixed.get("compile_backend", "inductor") == "inductor"


def _is_graph(fixed: Mapping[str, Any]) -> bool:
    """Return whether the forward is one graph, compiled or captured, into which no host moves anything."""
    return bool(fixed.get("compile") == "model" or fixed.get("cuda_graphs"))


def _updates_on_the_host(request: PlanRequest) -> bool:
    """Return whether cpu_offload goes with what is asked besides the layout (search/rules.py)."""
    workload, setup = request.workload, request.setup
    gathers_float8 = setup.own_float8 == FLOAT8_PRECISIONS["tensorwise"]
    is_usual = is_plain(workload) and not workload.updates_in_backward
    return is_usual and not gathers_float8 and not setup.memory.uses_managed_memory


def divisors(value: int) -> tuple[int, ...]:
    """Return the divisors of `value`, ascending."""
    small = [n for n in range(1, int(value**0.5) + 1) if value % n == 0]
    return tuple(sorted({*small, *(value // n for n in small)}))


def _pipelines(schedules: tuple[str, ...], stages_per_rank: int | None) -> list[Pipeline]:
    """Return the schedules with the numbers of stages a rank that they take, or with the one that is set."""
    numbers: dict[str, tuple[int, ...]] = dict.fromkeys(SINGLE_STAGE_SCHEDULES, (1,))
    numbers |= dict.fromkeys(LOOPED_SCHEDULES, _VIRTUAL_STAGES) | dict.fromkeys(V_SCHEDULES, (2,))
    if stages_per_rank is not None:
        taken = (*numbers.items(), *dict.fromkeys(LOOPED_SCHEDULES, (stages_per_rank,)).items())
        numbers = {name: tuple(number for number in own if number == stages_per_rank) for name, own in taken}
    return [(schedule, number) for schedule in schedules for number in numbers[schedule]]


def _constrained(menu: Menu, fixed: Mapping[str, Any]) -> Menu:
    changes: dict[str, Any] = {}
    per_block = [key for key in ("activation_checkpoint_blocks", "activation_checkpoint") if fixed.get(key) is not None]
    if per_block and (per_block != ["activation_checkpoint"] or fixed["activation_checkpoint"] == "auto"):
        raise UnsupportedError(
            f"layout.{per_block[0]} = {shown_value(fixed[per_block[0]])} chooses what each block saves, but the search "
            f"chooses one value for all blocks: leave it out, or give the whole layout in a job file"
        )
    if "schedule" in fixed or "virtual_stages" in fixed:
        schedule, number = fixed.get("schedule"), fixed.get("virtual_stages")
        if schedule is not None and schedule not in SCHEDULES:
            raise UnsupportedError(
                f'layout.schedule = "{schedule}" is a file, which the search cannot vary the layout around: '
                f"give the whole layout in a job file without layout.search, or set layout.schedule to one of "
                f"{', '.join(SCHEDULES)}"
            )
        changes["pipelines"] = tuple(_pipelines(SCHEDULES if schedule is None else (schedule,), number))
    if fixed.get("reshard_after_forward", "auto") != "auto":
        changes["is_resharded"] = (fixed["reshard_after_forward"] != "never",)
    if fixed.get("gradient_sync", "auto") != "auto":
        changes["reduces_each_microbatch"] = (fixed["gradient_sync"] == "microbatch",)
    changes |= {field.name: (fixed[field.name],) for field in fields(Menu) if field.name in fixed}
    if "compile" in fixed:
        changes["compile"] = (bool(fixed["compile"]),)
    return replace(menu, **changes)
