"""Every example job is right as it stands, on any machine."""

from pathlib import Path

import pytest

from meshwright.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_check_finds_nothing_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The modules of the user's own lie beside the jobs.
    monkeypatch.chdir(EXAMPLES)
    with pytest.raises(SystemExit) as end:
        main(["check", str(path)])
    assert not end.value.code
