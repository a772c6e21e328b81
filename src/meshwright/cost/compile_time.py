"""Time that torch.compile takes before the first step on a processor, and whether a run repays it.

    compile_s = max(1, ranks / cores) x (FIRST_S + kinds x BLOCK_S)
    repaid    = steps x step_s x SAVED_SHARE > compile_s

kinds is the number of different blocks: equal blocks share a graph, however many they are. In one graph of the model
each block is compiled, so there kinds is their number. Each rank compiles for
itself, and ranks beyond the cores wait for them.

Ignored: how large a block is, since Inductor's time follows its operators, not its shapes; that a block with an eager
part is compiled in several; the forward that a first validation compiles; what an earlier run left in Inductor's
folder, which takes nearly all of it away; the processor's speed. On an accelerator nothing has been measured.

Source: cost/constants.toml; `python -m benchmarks.compile_cold_start` and `python -m benchmarks.compiled_blocks`.
"""

from meshwright.cost.constants import fixed_constant
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec

FIRST_S = fixed_constant("compile.first_s")
BLOCK_S = fixed_constant("compile.block_s")
SAVED_SHARE = fixed_constant("compile.saved_share")


def compile_s(num_kinds: int, num_ranks: int, num_cores: int) -> float:
    """Return the seconds that ranks on one machine take to compile their blocks, from an empty cache."""
    return max(1.0, num_ranks / num_cores) * (FIRST_S + num_kinds * BLOCK_S)


def saved_s(num_steps: int, eager_step_s: float) -> float:
    """Return the seconds that compiled blocks save in a run."""
    return num_steps * eager_step_s * SAVED_SHARE


def num_kinds(architecture: LlamaArchitecture) -> int:
    """Return the number of different blocks of a model, whatever stages hold them."""
    return sum(group.name == "blocks" for group in model_spec(architecture).distinct_groups)


def num_compiled(architecture: LlamaArchitecture, layout: Layout) -> int:
    """Return the blocks that are compiled: one of each kind, all where the model is one graph, or none."""
    if not layout.compiles_blocks:
        return 0
    return architecture.num_layers if layout.compile == "model" else num_kinds(architecture)


def shared_graphs(layout: Layout) -> str:
    """Return which graphs count once, as a note on their number; "" where no blocks are compiled one by one."""
    return " (equal blocks share one)" if layout.compiles_blocks and layout.compile != "model" else ""
