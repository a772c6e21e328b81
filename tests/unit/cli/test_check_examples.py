"""Every example job is right as it stands, on any machine, and fits the cluster that it names."""

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


def test_every_example_on_a_named_cluster_fits_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for path in (*EXAMPLES.glob("llama3-*.toml"), EXAMPLES / "deepseek-v3.toml"):
        with pytest.raises(SystemExit):
            main(["check", str(path)])
        found[path.stem] = "on pipeline rank" in capsys.readouterr().out
    assert len(found) >= 4
    assert all(found.values()), found


def test_a_layout_that_does_not_fit_ends_with_its_rank_and_what_would_cure_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", str(EXAMPLES / "llama3-70b.toml"), "layout.microbatch_size=8"])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "[layout] does not fit: pipeline rank 0 needs" in message
    assert "a step)" in message
