"""What a class of the user's own lacks for layout.loss_chunks, read from its source: the loss computes its head itself.

parallelism/head.py finds the same, and what only the model as built shows, such as which layer has the role.
"""

import ast
from collections.abc import Iterator

from meshwright.spec.problem import Fix, Problem

_KEY, _PLAN, _LOSS, _ROLE = "layout.loss_chunks", "tensor_parallel", "loss", "head"
_WHOLE: Fix = {_KEY: 1}


def own_head_problems(loss_chunks: int, node: ast.ClassDef, file: str) -> Iterator[Problem]:
    """Yield why the loss of a class, which derives from torch.nn.Module alone, cannot be computed in chunks."""
    if loss_chunks == 1:
        return
    asked, name = f"{_KEY} = {loss_chunks}", f"{node.name} ({file})"
    if _sets(node, _LOSS):
        yield Problem(
            f"{asked} computes the next-token loss, but {name} has a loss of its own",
            [_WHOLE],
            after=", or remove its method loss",
        )
    elif _has_no_head(node):
        yield Problem(
            f"{asked} needs the head of {name}, one module with the role {_ROLE} in {_PLAN}, which names none",
            [_WHOLE],
            after=f', or add {_PLAN} = {{"{_ROLE}": "{_ROLE}", ...}} with the name of its last layer (see '
            "meshwright/models/contract.py)",
        )


def _has_no_head(node: ast.ClassDef) -> bool:
    """Return whether no module of a class has the role, where its own text says so."""
    if not _sets(node, _PLAN):
        return True
    plan = next((value for name, value in _class_attributes(node) if name == _PLAN), None)
    # What else is written there is known once the model is built.
    if not isinstance(plan, ast.Dict) or not all(isinstance(role, ast.Constant) for role in plan.values):
        return False
    return None not in plan.keys and not any(getattr(role, "value", None) == _ROLE for role in plan.values)


def _sets(node: ast.ClassDef, name: str) -> bool:
    """Return whether a class has an attribute: a method, a value of the class, or one that a method sets."""
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    if name in methods or any(name == attribute for attribute, _ in _class_attributes(node)):
        return True
    stored = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return any(part.attr == name and isinstance(part.value, ast.Name) and part.value.id == "self" for part in stored)


def _class_attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that the body of a class sets, with their values."""
    for line in node.body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, getattr(line, "value", None)
