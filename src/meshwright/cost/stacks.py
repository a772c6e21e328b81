"""load_stack: the software stacks that are known by name, one TOML file each."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

from meshwright.errors import ConfigError
from meshwright.spec.problem import did_you_mean
from meshwright.spec.step.stack import Stack

GENERIC = "generic"
OURS = "meshwright"


@lru_cache
def stacks() -> dict[str, Stack]:
    """Return every known stack by name."""
    folder = files("meshwright.cost") / "stacks"
    texts = {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return {name: Stack.from_dict({**tomllib.loads(text), "name": name}) for name, text in sorted(texts.items())}


def load_stack(name: str) -> Stack:
    """Return the stack called `name`; raises ConfigError with the nearest one, if any is near."""
    known = stacks()
    if name not in known:
        raise ConfigError(f"stack = {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]
