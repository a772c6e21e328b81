"""Files of faults."""

from pathlib import Path

import pytest

from meshwright.config.fault_file import faults_text, read_faults
from meshwright.errors import ConfigError
from meshwright.spec.fault import Fault

FAULTS = (Fault(kind="crash", rank=1, step=12, phase="backward"), Fault(kind="slow-rank", rank=0, argument=2.5))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(faults_text(FAULTS), encoding="utf-8")
    assert read_faults(file) == FAULTS


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[faults]]\nkind = 'crush'\nrank = 0\n", "fault 1 (crush): kind = 'crush': must be one of crash, segfault, "),
        ("[[faults]]\nkind = 'crash'\nrank = -1\n", "fault 1 (crash): rank = -1"),
        ("[[faults]]\nkind = 'crash'\nrank = 0\nwhen = 2\n", "fault 1 (crash): a fault has no when: its keys "),
        ("[[faults]]\nkind = 'crash'\nrank = 0\nphases = 'data'\n", "a fault has no phases: did you mean phase?"),
        (
            "[[faults]]\nkind = 'crash'\nrank = 0\n[[faults]]\nkind = 'hang'\n",
            "fault 2 (hang): rank is missing: add it",
        ),
        ("faults = []\n", "has no fault: faults = []: write one or more [[faults]] tables"),
        ("", "is empty: write one or more [[faults]] tables"),
        ("# nothing\n", "is empty: write one or more [[faults]] tables"),
        ("[[fault]]\nkind = 'crash'\nrank = 0\n", "has 'fault' and no [[faults]]: write one or more [[faults]] tables"),
        ("[faults]\nkind = 'crash'\nrank = 0\n", "has [faults]: write one or more [[faults]] tables"),
        ("faults = [3]\n", "fault 1 = 3: must be a [[faults]] table"),
        ("seed = 1\n[[faults]]\nkind = 'crash'\nrank = 0\n", "has 'seed' besides [[faults]]"),
        ("kind == 3", "is no TOML file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_faults(file)
    assert what in str(error.value)
    assert str(file) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_faults(tmp_path / "none.toml")
