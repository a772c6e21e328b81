"""Settings of torch's compiler without public names: overlap of collectives, async tensor parallelism, random states.

Checked in 2.11 to 2.15.
"""

import platform
import re
import subprocess
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed import _symmetric_memory

_COLLECTIVE, _FUSED = "torch.ops._c10d_functional.", "torch.ops.symm_mem."
_WAIT = f"{_COLLECTIVE}wait_tensor"
_KNOWS_AMX = 12
"""Series of GCC and of Clang that know AMX, the newest of x86's instructions that Inductor takes for granted then."""
_DAMAGED = re.compile(r"(/\S+\.so): (file too short|invalid ELF header|ELF load command|cannot read file data)")
"""What glibc's loader says of a shared library that is cut off."""


def overlap_collectives() -> None:
    """Have inductor, for this process, start collectives early and schedule a matmul or attention after each start.

    By default each collective is waited for right after its start. In the backward of column-parallel layers the
    weights' gradients depend on no pending collective, so each can hide one.
    """
    config: Any = torch._inductor.config
    config.reorder_for_compute_comm_overlap = True
    config.reorder_for_compute_comm_overlap_passes = ["reorder_compute_for_overlap", _start_after_fused_kernels]
    # The default estimates from measured device speed; ranks with different estimates would deadlock.
    config.estimate_op_runtime = _cost


def _start_after_fused_kernels(steps: list[Any]) -> list[Any]:
    """Return the steps with each collective moved after the fused matmul (async tp) that would run with it.

    A fused matmul communicates over the same links itself. A kernel after it can hide the collective.
    """
    ordered = list(steps)
    for step in steps:
        if not _kernel(step).startswith(_COLLECTIVE) or _kernel(step).startswith(_WAIT):
            continue
        place = ordered.index(step)
        for later in range(place + 1, len(ordered)):
            # Only its wait depends on it. Collectives keep their order, which must be equal on all ranks.
            if _kernel(ordered[later]).startswith(_COLLECTIVE):
                break
            if _kernel(ordered[later]).startswith(_FUSED):
                ordered.insert(later, ordered.pop(place))
                break
    return ordered


def _cost(step: Any) -> float:
    """Return 1 for a collective or a library kernel, which can hide one; 0 for a generated kernel."""
    return float(bool(_kernel(step)))


def _kernel(step: Any) -> str:
    """Return the library kernel that a step calls; "" for others, such as those that select one of its outputs."""
    return getattr(step.node, "python_kernel_name", None) or ""


def reduce_one_way() -> None:
    """Have inductor, for this process, make no kernel that reduces the same tensor along rows and along columns.

    Inductor would fuse the backward of RMSNorm with the sum for its weight, in a kernel that holds whole rows, and then
    with copies of float8 operands: written transposed, row by row, they made that kernel take 1.84 ms where two take
    0.3 (8,192 tokens of width 4,096 on an H200, torch 2.11.0, 2026-11-26).
    """
    config: Any = torch._inductor.config
    config.triton.mix_order_reduction = False


@cache
def trust_vector_instructions() -> None:
    """Have Inductor, for this process, take an x86 processor's vector instructions without compiling tests of them.

    The tests ask whether the C++ compiler knows what the processor reports, and are a third of what the first blocks of
    an empty cache take to compile. Compilers of the last years know all that Inductor uses; for others, and where
    TORCHINDUCTOR_VEC_ISA_OK is set, nothing changes.
    """
    config: Any = torch._inductor.config
    is_open = config.cpp.vec_isa_ok is None and platform.machine() == "x86_64" and sys.platform == "linux"
    if is_open and _compiler_series() >= _KNOWS_AMX:
        config.cpp.vec_isa_ok = True


def _compiler_series() -> int:
    """Return the first number of the version of the C++ compiler that Inductor calls; 0 where there is none."""
    # Imported here: it takes seconds.
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415

    try:
        found = subprocess.run((cpp_builder.get_cpp_compiler(), "-dumpversion"), capture_output=True, text=True)
    except (exc.InvalidCxxCompiler, OSError):
        return 0
    number = found.stdout.partition(".")[0].strip()
    return int(number) if number.isdecimal() else 0


def has_symmetric_memory(device_type: str) -> bool:
    """Return whether a device type supports symmetric memory (CUDA only in 2.13)."""
    return device_type == "cuda" and dist.is_nccl_available()


def pipeline_matmuls(group: dist.ProcessGroup) -> None:
    """Have inductor, for this process, fuse each matmul over `group` with its all-gather or reduce-scatter.

    torch 2.13 documents that a group need not be enabled for symmetric memory, but its pass skips one that is not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    # Imported here: it takes seconds.
    from torch._inductor.fx_passes import micro_pipeline_tp  # noqa: PLC0415

    # With overlap_collectives the pass would skip collectives that another matmul could hide, although that matmul
    # runs only after the collective's own: in backward most would stay exposed.
    assert hasattr(micro_pipeline_tp, "_get_unexposed_collectives"), torch.__version__
    torch_pass: Any = micro_pipeline_tp
    torch_pass._get_unexposed_collectives = lambda _: []


@cache
def save_meshes_last() -> None:
    """Fix, for this process, the order in which compiled forwards save random states and DTensor meshes for backward.

    A compiled forward saves tensors first, then the meshes of its DTensors. On a CPU a recomputed block also saves
    random-generator states, which torch puts after the meshes; it then reads a mesh as its last tensor and raises an
    AssertionError. In 2.11 graphs hold no meshes, so nothing moves. In 2.13 attention counts as random even without
    dropout, in 2.15 only random ops do.

    Cached: a rank compiles each of its stages, and a tracer replaces the same function after the first.
    """
    # Imported here: it takes seconds.
    from torch._functorch import partitioners  # noqa: PLC0415

    module: Any = partitioners
    module.functionalize_rng_ops = partial(_with_meshes_last, module.functionalize_rng_ops)


def _with_meshes_last(
    functionalize: Any,
    joint_module: fx.GraphModule,
    fw_module: fx.GraphModule,
    bw_module: fx.GraphModule,
    num_sym_nodes: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's forward and backward, with the random states before the meshes in both."""
    num_outputs, inputs = len(_output(fw_module).args[0]), _inputs(bw_module)
    forward, backward = functionalize(joint_module, fw_module, bw_module, num_sym_nodes)
    num_states = len(_output(forward).args[0]) - num_outputs
    if num_states:
        _move_outputs(forward, num_states, num_sym_nodes)
        _move_inputs(backward, set(inputs))
    return forward, backward


def _move_outputs(forward: fx.GraphModule, num_states: int, num_sym_nodes: int) -> None:
    """Move the states, which only `num_sym_nodes` numbers follow, before the meshes."""
    output = _output(forward)
    outputs = list(output.args[0])
    end = len(outputs) - num_sym_nodes
    first_state = first_mesh = end - num_states
    while first_mesh and _is_mesh(outputs[first_mesh - 1]):
        first_mesh -= 1
    outputs[first_mesh:end] = [*outputs[first_state:end], *outputs[first_mesh:first_state]]
    output.args = (tuple(outputs),)
    forward.recompile()


def _move_inputs(backward: fx.GraphModule, old: set[fx.Node]) -> None:
    """Move the meshes after the states, which are the inputs that are not `old`."""
    inputs = _inputs(backward)
    states = [node for node in inputs if node not in old]
    for mesh in filter(_is_mesh, reversed(inputs[: inputs.index(states[0])])):
        states[-1].append(mesh)
    backward.recompile()


def _output(module: fx.GraphModule) -> Any:
    return next(iter(module.graph.find_nodes(op="output")))


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _is_mesh(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), FakeScriptObject)


def remove_damaged_library(error: Exception) -> Path | None:
    """Remove the shared library in inductor's cache that `error` says is cut off, and return it; None for no such.

    Inductor compiles a library only where no file has its name, so half of one would fail every later run.
    """
    found = _DAMAGED.search(str(error))
    inductor: Any = torch._inductor
    if found is None or not Path(found[1]).is_relative_to(inductor.runtime.cache_dir_utils.cache_dir()):
        return None
    library = Path(found[1])
    library.unlink(missing_ok=True)
    return library
