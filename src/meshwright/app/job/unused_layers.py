"""Layers that a model of the user's own makes and never reads, found in its source: their parameters get no gradient.

Such a run ends in its first step, when its data are ready and its ranks have started. Only the file of the class is
read, and a layer is reported only if nothing else in it could read the layer; a traced step (`meshwright simulate`)
finds all others.
"""

import ast
from collections.abc import Iterator
from typing import TypeGuard

_WITH_PARAMETERS = {
    "Bilinear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "GRU", "GroupNorm", "LSTM", "LayerNorm", "Linear",
    "MultiheadAttention", "Parameter", "RMSNorm",
}  # fmt: skip
"""Classes of torch.nn whose instances train."""
_BY_OTHER_NAMES = {
    "__dict__", "__getattr__", "_modules", "_parameters", "children", "get_parameter", "get_submodule", "getattr",
    "modules", "named_children", "named_modules", "requires_grad", "requires_grad_", "vars",
}  # fmt: skip
"""What reads a layer without its name, or keeps it from training."""


def unused_layers(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield (class, attribute, line) of each layer that a file sets on a module of its own and never reads."""
    nodes = [*ast.walk(tree)]
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {node.id for node in nodes if isinstance(node, ast.Name)}
    if words & _BY_OTHER_NAMES:
        return
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    # Tables of names, such as first_parts.
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and derives_from_module_alone(node):
            for attribute, line in _layers_of(node):
                if attribute not in read:
                    yield node.name, attribute, line


def derives_from_module_alone(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """Return whether all that a class has is in its own file, apart from what every torch.nn.Module has."""
    return (
        isinstance(node, ast.ClassDef)
        and not node.decorator_list
        and [ast.unparse(base).rpartition(".")[2] for base in node.bases] == ["Module"]
    )


def _layers_of(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Yield the attributes that a class sets to a layer with parameters, `self.up = nn.Linear(...)`."""
    for statement in ast.walk(node):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target, value in (pair for one in targets for pair in _pairs(one, statement.value)):
            made = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if made in _WITH_PARAMETERS:
                    yield name, statement.lineno


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield what each name is set to; several in one line are set in order."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value
