"""Arguments of the application's functions: checked against their annotations, and named as the caller writes them."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError, MeshwrightError

JobSource = Path | str | ResolvedJob
"""A job file or a run folder, or a job that is already loaded."""
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NotNegative = Annotated[int, Field(ge=0)]

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

_RULES = {
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than_equal": "{le:g} or less",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "True or False",
    "string_type": "a string",
    "tuple_type": "a tuple",
    "list_type": "a list",
    "callable_type": "a function",
    "literal_error": "{expected}",
    "is_instance_of": "a {class}",
    "dataclass_exact_type": "a {class_name}",
    "model_type": "a {class_name}",
}
"""What a value must be, by the kind of pydantic's error."""


def checked(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return `function`, which raises ConfigError for an argument that its annotation does not allow."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if isinstance(value, np.generic):
                bound.arguments[name] = value.item()
        require_allowed(function, bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call


def require_allowed(target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise ConfigError that names the first of `values` that the annotation of `target` does not allow."""
    for name, parameter in inspect.signature(target).parameters.items():
        adapter = _adapters(target).get(name)
        if adapter is None or name not in values:
            continue
        for value in values[name] if parameter.kind is parameter.VAR_POSITIONAL else [values[name]]:
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError as error:
                raise ConfigError(_refusal(parameter, value, error.errors(include_url=False))) from None


@cache
def _adapters(target: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    hints, names = get_type_hints(target, include_extras=True), inspect.signature(target).parameters
    return {name: TypeAdapter(hints[name]) for name in names if name in hints}


def _refusal(parameter: inspect.Parameter, value: Any, details: list[ErrorDetails]) -> str:
    rules = dict.fromkeys(_RULES.get(one["type"], one["msg"]).format(**one.get("ctx", {})) for one in details)
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    given = f"{_flag(parameter.name)} {value!r}" if is_option else f"{parameter.name} = {value!r}"
    default = "" if parameter.default in (None, ()) else f" for the default {parameter.default!r}"
    advice = "" if parameter.default is parameter.empty else f", or leave it out{default}"
    return f"{given} must be {' or '.join(rules)}: change it{advice}"


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").removesuffix("_days").replace("_", "-")


_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
_OUTSIDE_BACKTICKS = r"(?=[^`]*(?:`[^`]*`[^`]*)*$)"


def in_python(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return `function`, whose errors name its options as Python does: top_k=3, not --top-k 3."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except MeshwrightError as error:
            given = signature.bind(*args, **kwargs).arguments
            error.args = (_in_python_words(str(error), signature, given),)
            raise

    return call


def _in_python_words(text: str, signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    """Return a message with the options of a command line as keyword arguments; commands in backticks stay."""
    for name, parameter in signature.parameters.items():
        value, is_switch = given.get(name), parameter.annotation in (bool, "bool")
        forms = "|".join([re.escape(repr(value)), re.escape(str(value) or "''"), r"[\w.-]*[\dA-Z][\w.:-]*\b"])

        def written(found: re.Match[str], name: str = name, value: Any = value, is_switch: bool = is_switch) -> str:
            if found[1] is None:
                return f"{name}=True" if is_switch else name
            is_literal = value != found[1] and (found[1] == repr(value) or _NUMBER.fullmatch(found[1]))
            return f"{name}={found[1]}" if is_literal else f'{name}="{found[1]}"'

        text = re.sub(rf"(?<![\w-]){_flag(name)}(?![\w-])(?: ({forms}))?{_OUTSIDE_BACKTICKS}", written, text)
    return text
