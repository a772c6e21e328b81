"""Conversion of the linear layers of blocks to float8, and the rule by which some stay as they are.

A layer stays in precision.compute if its name matches a pattern of precision.float8_skip, if its class is not nn.Linear
itself, or if a dim of its weight on one rank is no multiple of 16 (of 32 in MXFP8), as the kernels require. So do
embedding, head and router, and experts without precision.float8_experts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.models.contract import blocks_of
from meshwright.models.moe import Experts
from meshwright.parallelism.float8.float8_kernels import experts_problem, scaled_matmul, supported_recipe
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.sharding_plan import ShardingRole, sharding_plan_of
from meshwright.parallelism.torch_private.torch_compat import import_torchao
from meshwright.parallelism.torch_private.torch_compiler import reduce_one_way
from meshwright.spec.job.sections import Float8Recipe, PrecisionSection
from meshwright.spec.model.op import FLOAT8_ALIGNMENT, float8_alignment
from meshwright.units import counted, first_of


@dataclass(frozen=True)
class Float8Report:
    """What became of the linear layers of this rank's stages."""

    text: str
    is_fallback: bool
    """Whether another recipe runs than the job asks for."""


def convert_linears(stages: Sequence[nn.Module], meshes: Meshes, precision: PrecisionSection) -> Float8Report | None:
    """Convert linear layers of `stages` in place, by the recipe that this device runs; a collective on CUDA.

    None where the job asks for no float8.
    """
    if precision.float8 == "none":
        return None
    recipe, reason = supported_recipe(precision.float8, meshes.device_type)
    if recipe != "none" and meshes.layout.compile:
        reduce_one_way()
    converted, kept = 0, defaultdict[str, list[str]](list)
    for stage in stages:
        features, chosen = _features_by_rank(stage, meshes), set()
        for name, module in _linears_of_blocks(stage):
            if why := _reason_to_keep(name, module, precision.float8_skip, features, float8_alignment(recipe)):
                kept[why].append(name)
            else:
                chosen.add(name)
        converted += len(chosen)
        if recipe != "none":
            _convert(stage, chosen, recipe, meshes.device_type)
    parts = [f"{first_of(names)} ({why})" for why, names in kept.items()]
    num_experts, of_experts = _convert_experts(stages, precision.float8_experts and recipe != "none", meshes)
    parts += of_experts
    rest = f"; in {precision.compute} stay {', '.join(parts)}" if parts else ""
    layers = f"{counted(converted, 'linear layer')} of blocks"
    layers += f" and the experts of {counted(num_experts, 'block')}, by rows" if num_experts else ""
    if recipe == precision.float8:
        return Float8Report(f"float8 {recipe}: {layers}{rest}", is_fallback=False)
    instead = precision.compute if recipe == "none" else f"float8 {recipe}"
    text = f"precision.float8 = {precision.float8} does not run here ({reason}): {layers} are computed in {instead}"
    return Float8Report(text + rest, is_fallback=True)


def set_shard_groups(stage: nn.Module, meshes: Meshes) -> None:
    """Set over which groups each float8 layer of `stage` reduces amax, after tensor parallelism has sharded weights."""
    if not any(hasattr(module, "shard_groups") for module in stage.modules()):
        return
    names = {axis: (meshes.group(axis).group_name,) if meshes.degree(axis) > 1 else () for axis in ("cp", "tp")}
    for module in stage.modules():
        if hasattr(module, "shard_groups"):
            dim = _sharded_dim(module._parameters["weight"])
            # The input of a replicated layer may be a shard of the sequence.
            tokens = (*names["cp"], *(names["tp"] if dim is None else ()))
            inputs, outputs = (names["tp"] if dim == of else () for of in (1, 0))
            module.shard_groups = (tokens, inputs, outputs)  # type: ignore[assignment]


def _convert_experts(stages: Sequence[nn.Module], converts: bool, meshes: Meshes) -> tuple[int, list[str]]:
    """Let the experts of `stages` multiply in float8; return of how many blocks, and what is said of the others."""
    # A collective: on all ranks, whether they have experts or not.
    problem = experts_problem(meshes.device_type) if converts else None
    experts = [module for stage in stages for module in stage.modules() if isinstance(module, Experts)]
    if not converts or problem is not None:
        return 0, ["the experts" + (f" ({problem})" if problem else "")] if experts else []
    scaled_matmul()
    # Imported here: it imports torchao, an extra.
    float8_experts = import_module("meshwright.parallelism.float8.float8_experts")
    aligned = [module for module in experts if min(module.gate.shape[1:]) % FLOAT8_ALIGNMENT == 0]
    for module in aligned:
        module.grouped_matmul = float8_experts.Float8GroupedMatmul(emulates=meshes.device_type == "cpu")
    rest = len(experts) - len(aligned)
    return len(aligned), [
        f"the experts of {counted(rest, 'block')} (not multiples of {FLOAT8_ALIGNMENT})"
    ] if rest else []


def _convert(stage: nn.Module, names: set[str], recipe: Float8Recipe, device_type: str) -> None:
    if recipe == "mxfp8":
        scaled_matmul()
        mx_layer = import_module("meshwright.parallelism.float8.mx_linear").MXFP8Linear
        for name in names:
            module = stage.get_submodule(name)
            module.__class__, module.emulates = mx_layer, device_type == "cpu"  # type: ignore[assignment]
        return
    torchao = import_torchao("torchao.float8", "precision.float8")
    # Imported here: it imports torchao, an extra.
    layer = import_module("meshwright.parallelism.float8.float8_linear").LayoutFreeFloat8Linear
    # Emulated: products of rounded operands are computed in float32.
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=device_type == "cpu")
    torchao.convert_to_float8_training(stage, config=config, module_filter_fn=lambda _, name: name in names)
    for name in names:
        stage.get_submodule(name).__class__ = layer


def _linears_of_blocks(stage: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers of the blocks of `stage`, or of all of a model that has none."""
    blocks = blocks_of(stage)
    # A pipeline stage may be without blocks of a model that has some.
    inside = {part for block in blocks if block is not None for part in block.modules()} if len(blocks) else None
    named = [(name, module) for name, module in stage.named_modules() if isinstance(module, nn.Linear)]
    return [(name, module) for name, module in named if inside is None or module in inside]


def _features_by_rank(stage: nn.Module, meshes: Meshes) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) on one rank of each linear layer of `stage`."""
    tp = meshes.degree("tp")
    plan = sharding_plan_of(stage, meshes.layout) if tp > 1 else {}
    features = {}
    for name, module in stage.named_modules():
        if isinstance(module, nn.Linear):
            role = next((role for pattern, role in plan.items() if fnmatchcase(name, pattern)), None)
            head_dim = getattr(stage.get_submodule(name.rpartition(".")[0]), "head_dim", 0)
            features[name] = _features_of_role(module, role, tp, head_dim)
    return features


def _features_of_role(module: nn.Linear, role: ShardingRole | None, tp: int, head_dim: int) -> tuple[int, int]:
    outputs, inputs = module.out_features, module.in_features
    match role:
        case "column" | "head":
            return outputs // tp, inputs
        case "kv":
            return max(outputs // tp, head_dim), inputs
        case "row" | "row_part":
            return outputs, inputs // tp
    return outputs, inputs


def _reason_to_keep(
    name: str, module: nn.Linear, skip: Sequence[str], features: dict[str, tuple[int, int]], alignment: int
) -> str | None:
    if any(fnmatchcase(name, pattern) for pattern in skip):
        return "precision.float8_skip"
    if type(module) is not nn.Linear:
        return f"of class {type(module).__name__}"
    outputs, inputs = features[name]
    if outputs % alignment or inputs % alignment:
        return f"{outputs} x {inputs} on a rank, not multiples of {alignment}"
    return None


def _sharded_dim(weight: torch.Tensor | None) -> int | None:
    """Return the dim that tensor parallelism shards `weight` along."""
    placements = weight.placements if isinstance(weight, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, Shard)), None)
