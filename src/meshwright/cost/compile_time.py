"""Time that torch.compile takes before the first step on a processor, and whether a run repays it.

    blocks    = max(1, ranks / cores) x (FIRST_S + kinds x BLOCK_S)
    model     = max(1, ranks / cores) x (FIRST_S + kinds x BLOCK_S + GRAPH_S + layers x LAYER_S)
    repaid    = steps x step_s x SAVED_SHARE > blocks

kinds is the number of different blocks: equal blocks share a graph, however many they are. One graph of the model has
each block in it: what is compiled once for equal ones is still the larger part, up to some fourteen blocks. Each rank
compiles for itself, and ranks beyond the cores wait for them.

Ignored: how large a block is, since Inductor's time follows its operators, not its shapes; that a block with an eager
part is compiled in several; the forward that a first validation compiles; what an earlier run left in Inductor's
folder, which takes nearly all of it away; the processor's speed. On an accelerator nothing has been measured.

Source: cost/constants.toml; `python -m benchmarks.compile_cold_start` (`--way model --layers N` for one graph) and
`python -m benchmarks.compiled_blocks`.
"""

from meshwright.cost.constants import fixed_constant
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec

FIRST_S = fixed_constant("compile.first_s")
BLOCK_S = fixed_constant("compile.block_s")
GRAPH_S = fixed_constant("compile.graph_s")
LAYER_S = fixed_constant("compile.layer_s")
SAVED_SHARE = fixed_constant("compile.saved_share")


def compile_s(num_kinds: int, num_ranks: int, num_cores: int, num_layers: int = 0) -> float:
    """Return the seconds that ranks on one machine take to compile their blocks, from an empty cache.

    With `num_layers` all of the model's are in one graph.
    """
    of_graph_s = GRAPH_S + num_layers * LAYER_S if num_layers else 0.0
    return max(1.0, num_ranks / num_cores) * (FIRST_S + num_kinds * BLOCK_S + of_graph_s)


def compile_s_of(architecture: LlamaArchitecture, layout: Layout, num_cores: int) -> float | None:
    """Return the seconds that the ranks of `layout` take, all on one machine; None where no blocks are compiled."""
    if not layout.compiles_blocks:
        return None
    in_graph = architecture.num_layers if layout.compile == "model" else 0
    return compile_s(num_kinds(architecture), layout.num_ranks, num_cores, in_graph)


def saved_s(num_steps: int, eager_step_s: float) -> float:
    """Return the seconds that compiled blocks save in a run."""
    return num_steps * eager_step_s * SAVED_SHARE


def num_kinds(architecture: LlamaArchitecture) -> int:
    """Return the number of different blocks of a model, whatever stages hold them."""
    return sum(group.name == "blocks" for group in model_spec(architecture).distinct_groups)


def shared_graphs(layout: Layout) -> str:
    """Return which graphs count once, as a note on their number; "" where no blocks are compiled one by one."""
    return " (equal blocks share one)" if layout.compiles_blocks and layout.compile != "model" else ""
