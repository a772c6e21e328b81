"""adapted_model: a model whose linear layers have adapters, op by op, all else being frozen.

    y = W x             W frozen
    y = W x + B (A x)   A [rank, in] and B [out, rank] trained; two matmuls and a sum (LoRA)
    y = m (...) / |...|  the same, times a factor of each output from the norms of rows; m [out] trained (DoRA)

A and B stand before the layers they belong to, those of neighbours that read the same tensor one after the other: A, A,
B, B, then the layers and the sums of their outputs. Under tp A of a column-parallel layer is whole on each rank and B
is split like it; A of a row-parallel one is split like it and B is whole. Source: LoRA (arXiv:2106.09685), DoRA
(arXiv:2402.09353). Ignored: what a rank-wide collective sends, which is rank / width of what the layer itself does.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import groupby

from meshwright.errors import ConfigError
from meshwright.spec.model.model_spec import BlockGroup, ModelSpec
from meshwright.spec.model.op import Elementwise, ElementwiseRole, Matmul, Op, WeightUse
from meshwright.spec.step.adapter import LORA_A, LORA_B, Adapter

_OF_BOTH = {"is_wide": True, "has_bias": False}
"""Fields of A and B: in low precision they would cost more to cast than it saves."""


def adapted_model(model: ModelSpec, adapter: Adapter) -> ModelSpec:
    """Return `model` as it is trained with `adapter`; itself where all parameters are trained.

    Groups are cut where blocks differ: by what the adapter's patterns name, and behind the first that is trained.
    """
    return _adapted_model(model, adapter) if adapter.freezes_base else model


@lru_cache(maxsize=64)
def _adapted_model(model: ModelSpec, adapter: Adapter) -> ModelSpec:
    groups, is_behind_trained = [], False
    for group, targets in _cut(model, adapter):
        ops = tuple(_with_adapters(group.ops, adapter, targets))
        num_first = 0
        if not is_behind_trained:
            num_first = 1 if targets else group.count
            groups.append(group.replace(count=num_first, ops=tuple(_without_needless_gradients(ops))))
            is_behind_trained = bool(targets)
        if group.count > num_first:
            groups.append(group.replace(count=group.count - num_first, ops=ops))
    if not is_behind_trained:
        names = sorted({op.name for group in model.groups if group.name for op in group.ops if _takes_adapter(op)})
        raise ConfigError(
            f"adapter.targets = {[*adapter.targets]} match no linear layer of a block: name some of "
            f"{', '.join(f'blocks.*.{name}' for name in names)}"
        )
    return model.replace(groups=tuple(groups))


def _cut(model: ModelSpec, adapter: Adapter) -> Iterator[tuple[BlockGroup, frozenset[str]]]:
    """Yield the groups with the names of ops that are adapted, cut where these change; nothing is around blocks."""
    first = 0
    for group in model.groups:
        if not group.name:
            yield group, frozenset()
            continue
        names = [op.name for op in group.ops if _takes_adapter(op)]
        numbers = range(first, first + group.count)
        for targets, run in groupby(numbers, partial(_targets, names, adapter)):
            yield group.replace(count=len([*run])), targets
        first += group.count


def _targets(names: list[str], adapter: Adapter, number: int) -> frozenset[str]:
    """Return those of the `names` of block `number` that a pattern of the adapter matches."""
    return frozenset(
        name for name in names if any(fnmatchcase(f"blocks.{number}.{name}", pattern) for pattern in adapter.targets)
    )


def _takes_adapter(op: Op) -> bool:
    """Return whether an op of a block may be adapted: a linear layer, but neither router nor experts."""
    return isinstance(op, Matmul) and op.part != "router"


def _with_adapters(ops: tuple[Op, ...], adapter: Adapter, targets: frozenset[str]) -> Iterator[Op]:
    """Yield the ops frozen, with the adapters of those that are targets."""
    for _, alike in groupby(ops, _input_of):
        members = [*alike]
        adapted = [op for op in members if isinstance(op, Matmul) and op.name in targets]
        yield from (_first_matrix(op, adapter) for op in adapted)
        yield from (_second_matrix(op, adapter) for op in adapted)
        yield from (_frozen(op, adapter, is_adapted=op in adapted) for op in members)
        yield from (_on_output(op, "adapter_sum", 2) for op in adapted)
        yield from (_on_output(op, "adapter_gain", 1) for op in adapted if adapter.kind == "dora")


def _input_of(op: Op) -> tuple[object, ...]:
    """Return what distinguishes the tensor that a column-parallel layer reads; other ops stand alone."""
    if isinstance(op, Matmul) and op.tensor_split == "columns":
        return op.kind, op.part, op.in_features
    return op.kind, op.name


def _frozen(op: Op, adapter: Adapter, *, is_adapted: bool) -> Op:
    weights: WeightUse = "frozen" if adapter.base_dtype == "compute" or not is_adapted else adapter.base_dtype
    if isinstance(op, Matmul) and is_adapted and adapter.kind == "dora":
        return op.replace(weights=weights, trains_row_norms=True)
    return op.replace(weights=weights)


def _first_matrix(op: Matmul, adapter: Adapter) -> Op:
    """Return A of a layer."""
    return op.replace(
        name=f"{op.name}.{LORA_A}",
        out_features=adapter.rank,
        tensor_split="rows" if op.tensor_split == "rows" else "none",
        drops_input=adapter.dropout > 0,
        **_OF_BOTH,
        adapter_matrix="A",
    )


def _second_matrix(op: Matmul, adapter: Adapter) -> Op:
    """Return B of a layer."""
    return op.replace(
        name=f"{op.name}.{LORA_B}",
        in_features=adapter.rank,
        tensor_split="columns" if op.tensor_split == "columns" else "none",
        **_OF_BOTH,
        adapter_matrix="B",
    )


def _on_output(op: Matmul, role: ElementwiseRole, num_reads: int) -> Op:
    """Return an op on each element of a layer's output."""
    return Elementwise(
        name=f"{op.name}.{role}",
        part=op.part,
        role=role,
        reads_per_token=num_reads * op.out_features,
        writes_per_token=op.out_features,
        weights="frozen",
    )


def _without_needless_gradients(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Yield the ops of the first block that has trained ones: what reads only what nothing trained has made needs no
    gradient of its input.
    """
    first = next((number for number, op in enumerate(ops) if op.num_trained_parameters), len(ops))
    source = _source(ops[first]) if first < len(ops) else None
    for number, op in enumerate(ops):
        is_needless = number < first or (source is not None and _source(op) == source)
        yield op.replace(has_input_gradient=False) if is_needless else op


def _source(op: Op) -> tuple[object, ...] | None:
    """Return what distinguishes the tensor that a linear layer, or A of its adapter, reads; None of other ops."""
    if not isinstance(op, Matmul) or op.adapter_matrix == "B":
        return None
    return op.name.removesuffix(f".{LORA_A}") if op.tensor_split == "rows" else op.part, op.in_features
