"""Linear layers that are predicted to be slower in float8 than in precision.compute: precision.float8_filter.

A block of each kind is priced whole, forward and backward, with layers taken out of float8 one after the other, that
which saves most first: alone, or with the others that read the same input, since they round it once. Its seconds are
matmuls, kernels that round, and the host where that is longer. Sizes are of whole layers and of one microbatch, so that
the choice, which changes numerics, depends on no degree of the layout, but for one by which blocks are not compiled
(Layout.compiles_blocks). Ignored: float8 all-gathers, which are shorter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost.achieved_rates import peaks_of, rates_of
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.block_time import BlockPricer
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Floats, layout_table
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import BlockGroup, ModelSpec
from meshwright.spec.model.op import GroupedMatmul, Matmul, Op

Ops = tuple[Op, ...]


def slower_layers(setup: TrainingSetup, microbatch_size: int) -> list[str]:
    """Return the names of the linear layers of `setup` that are slower in its float8 recipe, such as blocks.0.ffn.up.

    A name whose layer is slower in every block that has it is a pattern: blocks.*.ffn.up.
    """
    slower: list[tuple[str, str]] = []
    others: set[str] = set()
    first = 0
    for group in setup.model.groups:
        if not group.name:
            continue
        found = _slower_of_block(group, setup, microbatch_size)
        for block in range(first, first + group.count):
            names = [op.name for op in group.ops if op.name in found]
            slower += [(f"{group.name}.{block}.{name}", f"{group.name}.*.{name}") for name in names]
        others |= {f"{group.name}.*.{op.name}" for op in group.ops if is_low(op) and op.name not in found}
        first += group.count
    return list(dict.fromkeys(name if pattern in others else pattern for name, pattern in slower))


def experts_are_slower(setup: TrainingSetup, microbatch_size: int) -> bool:
    """Return whether the blocks of `setup` that have experts are slower with their grouped matmuls in float8."""
    wide = replace(setup, workload=setup.workload.replace(float8_experts=False))
    groups = [group for group in setup.model.groups if any(isinstance(op, GroupedMatmul) for op in group.ops)]
    if not groups:
        return False
    blocks, counts = [group.ops for group in groups], np.array([group.count for group in groups])
    low_s, wide_s = (float(counts @ _block_s(blocks, one, microbatch_size)) for one in (setup, wide))
    return wide_s < low_s


def is_low(op: Op) -> bool:
    """Return whether an op of a block is a linear layer that float8 takes by name."""
    return isinstance(op, Matmul) and op.part != "router" and not op.is_wide


def _slower_of_block(group: BlockGroup, setup: TrainingSetup, microbatch_size: int) -> set[str]:
    ops, taken = group.ops, set[str]()
    while choices := [*_choices(ops)]:
        variants = [ops, *(_without(ops, names) for names in choices)]
        seconds = _block_s(variants, setup, microbatch_size)
        best = int(np.argmin(seconds))
        if best == 0:
            break
        ops, taken = variants[best], taken | choices[best - 1]
    return taken


def _choices(ops: Ops) -> Iterator[set[str]]:
    """Yield the layers that may leave float8 at once: each, those that read the same input, and all."""
    low = [op for op in ops if isinstance(op, Matmul) and is_low(op)]
    inputs = {(op.part, op.in_features, op.tensor_split) for op in low}
    together = [[op for op in low if (op.part, op.in_features, op.tensor_split) == one] for one in sorted(inputs)]
    for layers in [*([op] for op in low), *together, *([low] if low else [])]:
        yield {op.name for op in layers}


def _without(ops: Ops, names: set[str]) -> Ops:
    return tuple(op.replace(is_wide=True) if isinstance(op, Matmul) and op.name in names else op for op in ops)


def _block_s(variants: Sequence[Ops], setup: TrainingSetup, microbatch_size: int) -> Floats:
    """Return the seconds of a block of each variant for one microbatch on one device, forward and backward."""
    setups = tuple(
        replace(setup, model=ModelSpec(groups=(BlockGroup(name="blocks", count=1, ops=ops),))) for ops in variants
    )
    layouts = layout_table([Layout(microbatch_size=microbatch_size)] * len(setups))
    work = work_of(Configurations(setups, np.arange(len(setups)), layouts))
    peaks, constants = peaks_of(setups), fitted_constants()
    times = BlockPricer(work, setups, peaks).price(rates_of(setups, peaks, constants), constants)
    passes = [
        np.maximum(times.matmul[way] + times.attention[way] + times.memory[way], times.host[way]) for way in (0, 1)
    ]
    seconds = np.empty(len(setups))
    seconds[work.setup_index[work.blocks.key]] = passes[0] + passes[1]
    return seconds
