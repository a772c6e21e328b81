"""docs/exit_codes.md says of each exit code what errors.py says."""

import re

from meshwright.errors import ExitCode
from repository import ROOT

PAGE = ROOT / "docs" / "exit_codes.md"


def test_the_page_lists_exactly_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: int(code) for code in ExitCode}
