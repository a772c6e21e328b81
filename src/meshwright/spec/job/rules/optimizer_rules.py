"""What the keys of [optimizer] rule out among themselves, and what they ask of a layout."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from meshwright.spec.job.sections import OptimizerSection, PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import GroupedMatmul, Matmul
from meshwright.spec.problem import Fix, Problem, did_you_mean, nearest_first

INT8_BLOCK_SIZE = 128
"""Columns that share a scale; rows of other widths keep float32 states."""
INT8_MIN_ELEMENTS = 4096
"""Smaller tensors keep float32 states."""
_NAME, _STATE, _IN_BACKWARD = "optimizer.name", "optimizer.state_dtype", "optimizer.in_backward"
_MOMENTUM, _CLIP = "optimizer.momentum", "optimizer.max_grad_norm"
_DEFAULT_MOMENTUM: float = OptimizerSection.model_fields["momentum"].default
_AFTER_BACKWARD: Fix = {_IN_BACKWARD: False}
_WILDCARD, _INDEX = re.compile(r"[*?\[]"), re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_EXAMPLES = 4


def optimizer_problems(optimizer: OptimizerSection, precision: PrecisionSection) -> Iterator[Problem]:
    """Yield what is contradictory in [optimizer], whatever the layout is."""
    if optimizer.state_dtype == "int8" and precision.compute == "float64":
        yield Problem(
            f'{_STATE} = "int8" updates parameters in float32, less than precision.compute = "float64" keeps',
            [{_STATE: "bfloat16"}, {_STATE: "float32"}, {"precision.compute": "float32"}],
        )
    is_muon = optimizer.name == "muon"
    if not is_muon and optimizer.momentum != _DEFAULT_MOMENTUM:
        yield Problem(
            f'{_MOMENTUM} = {optimizer.momentum} is Muon\'s, and optimizer.name = "{optimizer.name}" has '
            f"optimizer.betas = {list(optimizer.betas)}",
            [{_MOMENTUM: None}, {_NAME: "muon"}],
        )
    if is_muon and optimizer.state_dtype == "int8":
        yield Problem(
            f'{_STATE} = "int8" quantizes AdamW\'s moments; optimizer.name = "muon" would orthogonalize the '
            "rounding of its momentum",
            [{_STATE: "bfloat16"}, {_STATE: "float32"}, {_NAME: "adamw"}],
        )
    if not optimizer.in_backward:
        return
    if optimizer.max_grad_norm:
        yield Problem(
            f"{_IN_BACKWARD} = true updates parameters before the norm of all gradients is known, by which "
            f"{_CLIP} = {optimizer.max_grad_norm} clips them",
            [{_CLIP: 0.0}, _AFTER_BACKWARD],
        )
    if is_muon:
        yield Problem(
            f'{_IN_BACKWARD} = true updates parameters one by one, but optimizer.name = "muon" exchanges the matrices '
            "of all blocks at once",
            [{_NAME: "adamw"}, _AFTER_BACKWARD],
        )
    if optimizer.state_dtype == "int8":
        yield Problem(
            f'{_IN_BACKWARD} = true is not built for {_STATE} = "int8"',
            [{_STATE: "bfloat16"}, {_STATE: "float32"}, _AFTER_BACKWARD],
        )


def group_problems(optimizer: OptimizerSection, names: Sequence[str]) -> Iterator[Problem]:
    """Yield which patterns of optimizer.groups take none of a model's parameters, whose `names` these are."""
    taken: set[str] = set()
    for number, group in enumerate(optimizer.groups, start=1):
        matched = {name for name in names if fnmatchcase(name, group.match)}
        given = f'optimizer.groups matches "{group.match}" in group {number}'
        if not matched:
            near = (
                did_you_mean(group.match, names_like(group.match, names)) or f": names are such as {_examples(names)}"
            )
            yield Problem(f"{given}, which none of the model's {len(names)} parameters is named{near}")
        elif matched <= taken:
            yield Problem(f"{given}, but groups above take all of these, and the first that matches counts: move it up")
        taken |= matched


def names_like(pattern: str, names: Sequence[str]) -> Sequence[str]:
    """Return what `pattern` may have meant: a name, or of one with wildcards the patterns of parts of the model."""
    if not _WILDCARD.search(pattern):
        return names
    of_every_block = list(dict.fromkeys(_INDEX.sub("*", name) for name in names))
    parts = {name[: dot.end()] + "*" for name in of_every_block for dot in re.finditer(r"\.", name)}
    return [*of_every_block, *sorted(part for part in parts if not part.endswith("*.*"))]


def _examples(names: Sequence[str]) -> str:
    """Return the first name of each of the first and the last parts of the model, such as its blocks."""
    firsts = list({name.split(".", 1)[0]: name for name in reversed(names)}.values())[::-1]
    shown = firsts if len(firsts) <= _MOST_EXAMPLES else [*firsts[: _MOST_EXAMPLES - 1], firsts[-1]]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def block_problems(optimizer: OptimizerSection, layout: Layout, architecture: LlamaArchitecture) -> Iterator[Problem]:
    """Yield why the layout would cut the blocks of 8-bit states."""
    if optimizer.state_dtype != "int8":
        return
    for axis, columns in quantized_columns(architecture):
        degree = getattr(layout, axis)
        if columns % (degree * INT8_BLOCK_SIZE):
            whole = [n for n in range(1, columns + 1) if columns % (n * INT8_BLOCK_SIZE) == 0]
            yield Problem(
                f'{_STATE} = "int8" has blocks of {INT8_BLOCK_SIZE} columns, which layout.{axis} = {degree} cuts in '
                f"matrices of {columns} columns",
                [{f"layout.{axis}": near} for near in nearest_first(degree, whole)] + [{_STATE: "bfloat16"}],
            )
            return


def quantized_columns(architecture: LlamaArchitecture) -> list[tuple[str, int]]:
    """Return (axis, columns) of the matrices with 8-bit states whose columns an axis divides, widest first."""
    found = {
        ("etp" if isinstance(op, GroupedMatmul) else "tp", op.in_features)
        for group in model_spec(architecture).groups
        for op in group.ops
        if group.name and isinstance(op, Matmul | GroupedMatmul) and op.tensor_split == "rows" and has_int8_states(op)
    }
    return sorted(found, key=lambda each: -each[1])


def has_int8_states(op: Matmul | GroupedMatmul) -> bool:
    """Return whether the states of a block's matrix are 8-bit where optimizer.state_dtype is "int8"."""
    return op.in_features % INT8_BLOCK_SIZE == 0 and op.num_parameters >= INT8_MIN_ELEMENTS


def update_problems(optimizer: OptimizerSection, layout: Layout, num_microbatches: int) -> Iterator[Problem]:
    """Yield why `optimizer` cannot update the shards of `layout`, of which a step runs `num_microbatches`."""
    if layout.cpu_offload and (optimizer.name, optimizer.state_dtype) != ("adamw", "float32"):
        given: dict[str, str] = {_NAME: optimizer.name, _STATE: optimizer.state_dtype}
        key = _NAME if optimizer.name != "adamw" else _STATE
        default = OptimizerSection.model_fields[key.removeprefix("optimizer.")].default
        yield Problem(
            f'{key} = "{given[key]}" is not built for layout.cpu_offload = true, where the host updates parameters',
            [{key: default}, {"layout.cpu_offload": False}],
        )
    if not optimizer.in_backward:
        return
    if num_microbatches > 1:
        yield Problem(
            f"{_IN_BACKWARD} = true needs the gradient of the whole batch in one backward, but a step has "
            f"{num_microbatches} microbatches",
            [{"layout.microbatch_size": layout.microbatch_size * num_microbatches}, _AFTER_BACKWARD],
        )
    for key, is_ruled_out, default, why in (
        ("layout.pp", layout.pp > 1, 1, "whose stages reduce gradients after their last backward"),
        ("layout.cpu_offload", layout.cpu_offload, False, "whose gradients travel to the host meanwhile"),
    ):
        if is_ruled_out:
            value = str(getattr(layout, key.removeprefix("layout."))).lower()
            yield Problem(
                f"{_IN_BACKWARD} = true is not built for {key} = {value}, {why}", [_AFTER_BACKWARD, {key: default}]
            )
