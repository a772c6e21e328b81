"""What adapters ([adapter]) do not go with, checked before any process starts.

Only what follows from the job. Which patterns of adapter.targets match a layer is known with the model's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from meshwright.spec.job.rules.optimizer_rules import names_like
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import NARROW_WEIGHT_BYTES, Matmul
from meshwright.spec.problem import Fix, Problem, did_you_mean, nearest_first, shown_value
from meshwright.spec.step.adapter import PACKED_BLOCK, Adapter

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KIND, _BASE_DTYPE = "adapter.kind", "adapter.base_dtype"
_OFF: Fix = {_KIND: "none"}
_Rules = Iterator[tuple[str, Any, bool, Any, str]]
"""Of (key, its value, whether that is ruled out, a value that is not, why)."""


def adapter_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job, whatever its layout is, adapters do not go with."""
    if not job.adapter.freezes_base:
        yield from _unused(job.adapter)
        return
    yield from _problems(job.adapter, _job_rules(job))


def adapter_layout_problems(adapter: Adapter, layout: Layout) -> Iterator[Problem]:
    """Yield what of a layout adapters do not go with."""
    if adapter.freezes_base:
        yield from _problems(adapter, _layout_rules(adapter, layout))


def packed_block_problems(adapter: Adapter, layout: Layout, architecture: LlamaArchitecture) -> Iterator[Problem]:
    """Yield why tensor parallelism would cut the blocks of a base in 8 or 4 bits."""
    for name, inputs in packed_rows(adapter, architecture):
        if inputs % (layout.tp * PACKED_BLOCK):
            whole = [n for n in range(1, inputs // PACKED_BLOCK + 1) if inputs % (n * PACKED_BLOCK) == 0]
            yield Problem(
                f'adapter.base_dtype = "{adapter.base_dtype}" has blocks of {PACKED_BLOCK} inputs, which layout.tp = '
                f"{layout.tp} cuts in {name} of {inputs} inputs",
                [{"layout.tp": near} for near in nearest_first(layout.tp, whole)] + [{_BASE_DTYPE: "bfloat16"}],
            )
            return


def packed_rows(adapter: Adapter, architecture: LlamaArchitecture) -> list[tuple[str, int]]:
    """Return (name, inputs) of the layers in 8 or 4 bits whose inputs tp divides, those of the fewest inputs first."""
    if not adapter.packs_base:
        return []
    found = {
        (op.name, op.in_features)
        for group in adapted_model(model_spec(architecture), adapter).groups
        for op in group.ops
        if isinstance(op, Matmul) and op.tensor_split == "rows" and op.weights in NARROW_WEIGHT_BYTES
    }
    return sorted(found, key=lambda each: each[1])


def target_problems(adapter: Adapter, layers: Sequence[str], others: Sequence[str]) -> Iterator[Problem]:
    """Yield which patterns of adapter.targets match no layer that can be adapted.

    `layers` are the names of the linear layers of blocks, `others` those of what else has weights.
    """
    if not layers and adapter.freezes_base:
        yield Problem(f'{_KIND} = "{adapter.kind}" adapts linear layers of blocks, and the model has none', [_OFF])
        return
    for target in adapter.idle_targets(layers):
        given = f'adapter.targets has "{target}", which'
        found = [name for name in others if fnmatchcase(name, target)]
        if found:
            yield Problem(
                f"{given} matches {found[0]}: only linear layers of blocks are adapted, no experts, router, embedding "
                f"or head: leave it out, or name layers such as {layers[0]}"
            )
        else:
            near = did_you_mean(target, names_like(target, layers)) or f": names are such as {layers[0]}"
            yield Problem(f"{given} matches no linear layer of a block{near}")


def _unused(adapter: Adapter) -> Iterator[Problem]:
    for key, default in Adapter().to_dict().items():
        value = adapter.to_dict()[key]
        if value != default:
            what = f'adapter.{key} = {shown_value(value)} has nothing to apply to with {_KIND} = "none"'
            yield Problem(what, [{_KIND: "lora"}, {f"adapter.{key}": None}])


def _problems(adapter: Adapter, rules: _Rules) -> Iterator[Problem]:
    for key, value, is_ruled_out, default, why in rules:
        if is_ruled_out:
            what = f'{key} = {shown_value(value)}: {why}, so {_KIND} = "{adapter.kind}" refuses it'
            yield Problem(what, [{key: default}, _OFF])


def _job_rules(job: Job) -> _Rules:
    float8 = job.precision.float8
    twice = "float8 layers and adapted layers both replace linear layers, and have not been joined"
    yield "precision.float8", float8, float8 != "none", "none", twice
    exact = "the sums of adapters have not been shown to be exact"
    yield "train.exact_elastic", job.train.exact_elastic, job.train.exact_elastic, False, exact
    name, in_backward = job.optimizer.name, job.optimizer.in_backward
    apart = "Muon orthogonalizes the updates of whole weights, of which A and B are factors"
    yield "optimizer.name", name, name == "muon", "adamw", apart
    small = "it saves the memory of gradients, which those of adapters hardly take, and has not been tried"
    yield "optimizer.in_backward", in_backward, in_backward, False, small
    independent = job.replicas.independent
    untried = "sums of adapters' gradients over independent replicas have not been proven"
    yield "replicas.independent", independent, independent, False, untried


def _layout_rules(adapter: Adapter, layout: Layout) -> _Rules:
    graph = "a model that is one graph has not been tried with frozen parameters"
    yield "layout.compile", layout.compile, layout.compile == "model", True, graph
    captured = "CUDA graphs have not been tried with frozen parameters"
    yield "layout.cuda_graphs", layout.cuda_graphs, layout.cuda_graphs, False, captured
    if adapter.dropout:
        # A rank draws for its shard from the seed of the microbatch.
        alike = f"ranks would draw alike for other parts of the input with adapter.dropout = {adapter.dropout}"
        for axis in ("tp", "cp"):
            degree = getattr(layout, axis)
            yield f"layout.{axis}", degree, degree > 1, 1, alike
