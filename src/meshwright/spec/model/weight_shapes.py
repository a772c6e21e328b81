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


def possible_vectors(architecture: LlamaArchitecture) -> list[str]:
    """Return the names that biases and sinks have where a model has them, as `weight_shapes` leaves out."""
    matrices = [name for name, shape in weight_shapes(architecture).items() if len(shape) > 1]
    biases = [
        f"{name.removesuffix('.weight')}.bias" if name.endswith(".weight") else f"{name}_bias" for name in matrices
    ]
    attentions = {name.partition(".attention.")[0] for name in matrices if ".attention." in name}
    others = ("attention.sinks.weight", "ffn.router.logit_bias")
    return [*biases, *(f"{block}.{name}" for block in sorted(attentions) for name in others)]


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
