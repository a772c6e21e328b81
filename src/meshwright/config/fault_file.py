"""A file of faults, as `meshwright chaos --faults` takes it: TOML with one table for each.

[[faults]]
kind = "crash"
rank = 1
step = 12
phase = "backward"
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import tomlkit
from pydantic import Field, ValidationError

from meshwright.errors import ConfigError
from meshwright.spec.fault import Fault
from meshwright.spec.frozen import Frozen


class _Faults(Frozen):
    faults: tuple[Fault, ...] = Field(strict=False, min_length=1)


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a TOML file; raises ConfigError for what is none."""
    try:
        return _Faults.from_dict(tomllib.loads(path.read_text(encoding="utf-8"))).faults
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a TOML file of [[faults]]") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key} = {first['input']!r}: {first['msg']}") from error


def faults_text(faults: Sequence[Fault]) -> str:
    """Return faults as the text of such a file."""
    tables = tomlkit.aot()
    for fault in faults:
        tables.append(tomlkit.item({name: value for name, value in fault.to_dict().items() if value is not None}))
    document = tomlkit.document()
    document.append("faults", tables)
    return tomlkit.dumps(document)
