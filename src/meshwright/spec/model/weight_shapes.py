"""weight_shapes: the shapes of a built-in model's weights, from its ops; needs no torch."""

from collections.abc import Iterator

from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import Embedding, GroupedMatmul, Head, Matmul, Norm, Op


def weight_shapes(architecture: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names in a checkpoint, for all but biases and sinks."""
    shapes: dict[str, tuple[int, ...]] = {}
    num_blocks = 0
    for group in model_spec(architecture).groups:
        for _ in range(group.count):
            prefix = f"{group.name}.{num_blocks}." if group.name else ""
            shapes |= {f"{prefix}{name}": shape for op in group.ops for name, shape in _weights(op)}
            num_blocks += bool(group.name)
    return shapes


def bias_names(architecture: LlamaArchitecture) -> list[str]:
    """Return the names of biases and sinks, which `weight_shapes` leaves out."""
    names: list[str] = []
    num_blocks = 0
    for group in model_spec(architecture).groups:
        for _ in range(group.count):
            prefix = f"{group.name}.{num_blocks}." if group.name else ""
            names += [f"{prefix}{name}" for op in group.ops for name in _biases(op)]
            if group.name and architecture.has_sinks_and_output_bias:
                names.append(f"{prefix}attention.sinks.weight")
            num_blocks += bool(group.name)
    return names


def _biases(op: Op) -> Iterator[str]:
    if not isinstance(op, Matmul | GroupedMatmul | Norm) or not op.has_bias:
        return
    if isinstance(op, GroupedMatmul):
        yield f"{op.name}_bias"
    else:
        yield f"{op.name}.logit_bias" if op.part == "router" else f"{op.name}.bias"


def _weights(op: Op) -> Iterator[tuple[str, tuple[int, ...]]]:
    match op:
        case Matmul():
            yield f"{op.name}.weight", (op.out_features, op.in_features)
        case GroupedMatmul():
            yield op.name, (op.num_experts, op.out_features, op.in_features)
        case Norm():
            yield f"{op.name}.weight", (op.width,)
        case Embedding():
            yield f"{op.name}.weight", (op.vocab_size, op.dim)
        case Head(tied=False):
            yield f"{op.name}.weight", (op.vocab_size, op.dim)
