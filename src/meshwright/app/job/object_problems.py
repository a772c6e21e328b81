"""What is wrong with a `my_module:MyName` of a job, read from its source: nothing of the user's is imported or run."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from meshwright.app.job.own_head_problems import own_head_problems
from meshwright.app.job.unused_layers import derives_from_module_alone, unused_layers
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, ModelSection
from meshwright.spec.job.user_object import is_object_source, options_problem
from meshwright.spec.problem import Problem

_ATTRIBUTES = {"tp": "tensor_parallel", "pp": "first_parts", "cp": "takes_positions"}
"""What a model needs for a parallelism (models/contract.py)."""
_FORMAT = "hugging_face"
"""The attribute of a model that maps it to Hugging Face folders (models/contract.py)."""
_OTHER_FORMATS = {"Dict", "List", "Tuple", "Set", "Constant", "NameMap", "Rename", "dict", "list", "tuple"}
"""What may be written there by mistake: literals by their syntax, and calls by the name of what is called."""
_ATTENTION = "CausalAttention"
_WITHOUT_ATTENTION = (
    "torch", "numpy", "meshwright.errors", "meshwright.hf", "meshwright.models.contract", "meshwright.models.initial",
    "meshwright.models.rope",
)  # fmt: skip
"""Packages and modules that a model may import without taking attention of ours from them."""


def object_problems(name: str, section: ModelSection | DataSection, folder: Path, job: Job | None = None) -> list[str]:
    """Return what is wrong with the source of the section `name`, looked for in `folder`, here and on sys.path.

    What only running the module would show is not known, such as what a base class of the user's adds.
    """
    key, source = f"{name}.source", section.source
    module = source.partition(":")[0]
    places = [str(folder.resolve()), str(Path.cwd()), *sys.path]
    spec = _find(module, places)
    if spec is None:
        return [
            f"{key} = {source!r}: there is no module {module} in {places[0]}, the working directory or the "
            f"environment: put {module.replace('.', '/')}.py there, or change {key}"
        ]
    if spec.origin is None or not spec.origin.endswith(".py"):
        return []
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), filename=spec.origin)
    except SyntaxError as error:
        return [f"{key} = {source!r}: {spec.origin}:{error.lineno} is not Python ({error.msg}): correct that line"]
    except OSError as error:
        return [f"{key} = {source!r}: {spec.origin} cannot be read ({error.strerror}): check its permissions"]
    return list(_definition_problems(name, section, spec.origin, tree, job))


def _find(module: str, places: Sequence[str]) -> ModuleSpec | None:
    importlib.invalidate_caches()
    spec = None
    for part in module.split("."):
        # By its last name alone: with the whole name, Python looks for the packages above among those imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def _definition_problems(
    section_name: str,
    section: ModelSection | DataSection,
    file: str,
    tree: ast.Module,
    job: Job | None,
) -> Iterator[str]:
    key, (module, _, name) = f"{section_name}.source", section.source.partition(":")
    bindings = list(_top_level_bindings(tree))
    found = [node for bound, node in bindings if bound in (name, "*")]
    if not found:
        close = get_close_matches(name, [bound for bound, _ in bindings], n=1)
        advice = f"did you mean {module}:{close[0]}?" if close else f"define it there, or change {key}"
        yield f"{key} = {section.source!r}: {file} defines no {name}: {advice}"
    if len(found) != 1:
        return
    signature = _signature(found[0])
    if (
        signature is not None
        and (problem := options_problem(section_name, section.source, section.options, signature)) is not None
    ):
        yield problem
    if not isinstance(section, ModelSection):
        return
    if isinstance(found[0], ast.ClassDef):
        yield from _format_problems(section, found[0], file)
    if job is None or not derives_from_module_alone(found[0]):
        return
    if not is_object_source(job.data.source) or job.data.source.startswith(f"{module}:"):
        # Data from another file may have a loss that reads them.
        yield from _unused_problems(section, file, tree)
    words = {*_words(tree)}
    for axis, attribute in _ATTRIBUTES.items():
        if (degree := getattr(job.layout, axis)) > 1 and attribute not in words:
            yield Problem(
                f"layout.{axis} = {degree}: {name} ({file}) has no attribute {attribute}",
                [{f"layout.{axis}": 1}],
                after=", or add it (see meshwright/models/contract.py)",
            )
    yield from own_head_problems(job.layout.loss_chunks, found[0], file)
    if job.layout.activation_offload and "blocks" not in words:
        yield (
            f"layout.activation_offload = true: {name} ({file}) has no attribute blocks, between which saved tensors "
            "are moved: make its repeated modules an nn.ModuleList of that name, or set layout.activation_offload to "
            "false"
        )
    backend = job.layout.attention_backend
    if backend != "auto" and _ATTENTION not in words and not _may_import_attention(tree):
        yield Problem(
            f'layout.attention_backend = "{backend}": {name} ({file}) has no {_ATTENTION}, which a backend replaces',
            [{"layout.attention_backend": "auto"}],
            after=f", or compute its attention by meshwright.models.attention.causal_attention.{_ATTENTION}",
        )
    needing = {"model.initial_weights": section.initial_weights}
    if job.checkpoint.export != "none":
        needing["checkpoint.export"] = job.checkpoint.export
    for key, value in needing.items():
        if value is not None and _FORMAT not in words:
            yield (
                f"{key} = {value!r}: {name} ({file}) has no attribute {_FORMAT}, which names its tensors in a Hugging "
                f"Face folder: add it (see docs/how_to/own_model.md), or leave {key} out"
            )


def _unused_problems(section: ModelSection, file: str, tree: ast.Module) -> Iterator[str]:
    for owner, attribute, line in unused_layers(tree):
        yield (
            f"model.source = {section.source!r}: {owner}.{attribute} ({file}:{line}) is read nowhere in that file, so "
            "that its parameters would get no gradient in the first step: use it in forward, remove it, or keep it "
            "from training by requires_grad_(False)"
        )


def _format_problems(section: ModelSection, node: ast.ClassDef, file: str) -> Iterator[str]:
    """Yield why the table of a class is no HuggingFaceFormat, where its own text says so."""
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if not isinstance(target, ast.Name) or target.id != _FORMAT or value is None:
            continue
        given = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else type(value).__name__
        if given in _OTHER_FORMATS:
            yield (
                f"model.source = {section.source!r}: {_FORMAT} ({file}:{line.lineno}) is a {given}, but must "
                "be a meshwright.hf.HuggingFaceFormat: correct it"
            )


def _may_import_attention(tree: ast.AST) -> bool:
    """Return whether a file imports modules that may define attention: all but Python's own and those listed."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), level=0, names=names):
                modules |= {f"{module}.{alias.name}" for alias in names}
            case ast.ImportFrom():
                return True
    known = (*sys.stdlib_module_names, *_WITHOUT_ATTENTION)
    return any(not any(f"{module}.".startswith(f"{one}.") for one in known) for module in modules)


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module reads, binds or defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                yield name


def _top_level_bindings(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield every name bound outside functions and classes, also under if and try, and where; "*" for any name."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
                continue
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0], node
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node
        pending.extend(ast.iter_child_nodes(node))


class _SourceText(str):
    """A default as it is written."""

    __repr__ = str.__str__


def _signature(node: ast.AST) -> inspect.Signature | None:
    """Return what a class or a function is called with; None where a decorator or a base class may change that."""
    method: list[ast.arg] = []
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        node = next((part for part in node.body if getattr(part, "name", "") == "__init__"), node)
        method = node.args.args[:1] if isinstance(node, ast.FunctionDef) else []
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    arguments, kinds = node.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = [
        kinds(one.arg, kind, default=kinds.empty if default is None else _SourceText(ast.unparse(default)))
        for kind, names, values in (
            (kinds.POSITIONAL_OR_KEYWORD, positional, defaults),
            (kinds.VAR_POSITIONAL, [arguments.vararg], [None]),
            (kinds.KEYWORD_ONLY, arguments.kwonlyargs, arguments.kw_defaults),
            (kinds.VAR_KEYWORD, [arguments.kwarg], [None]),
        )
        for one, default in zip(names, values, strict=True)
        if one is not None and one not in method
    ]
    return inspect.Signature(parameters)
