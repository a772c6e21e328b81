"""The matmuls of a model that stay in 16 or 32 bits where its others have fewer, marked by name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from meshwright.spec.model.model_spec import BlockGroup, ModelSpec
from meshwright.spec.model.op import Matmul, Op


def with_wide_matmuls(model: ModelSpec, patterns: Sequence[str]) -> ModelSpec:
    """Return `model` with the linear layers of blocks marked whose names, such as blocks.0.ffn.up, match a pattern."""
    if not patterns:
        return model
    groups: list[BlockGroup] = []
    first = 0
    for group in model.groups:
        if not group.name:
            groups.append(group)
            continue
        each = [_marked(group, first + index, patterns) for index in range(group.count)]
        groups += [group.replace(count=len([*run]), ops=ops) for ops, run in groupby(each)]
        first += group.count
    return ModelSpec(groups=tuple(groups))


def _marked(group: BlockGroup, block: int, patterns: Sequence[str]) -> tuple[Op, ...]:
    return tuple(
        op.replace(is_wide=True)
        if isinstance(op, Matmul)
        and any(fnmatchcase(f"{group.name}.{block}.{op.name}", pattern) for pattern in patterns)
        else op
        for op in group.ops
    )
