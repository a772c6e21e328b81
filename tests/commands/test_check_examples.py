"""Every example job is right as it stands, on any machine, fits the cluster that it names, and is near the pick."""

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.load import load_job
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import Options, plan_request
from repository import ROOT

_MOST_ABOVE_PICK = 1.05
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_check_finds_nothing_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The modules of the user's own lie next to the jobs.
    monkeypatch.chdir(EXAMPLES)
    with pytest.raises(SystemExit) as end:
        main(["check", str(path)])
    assert end.value.code in (None, 0)


ON_CLUSTERS = [path for path in sorted(EXAMPLES.glob("*.toml")) if load_job(str(path)).job.cluster.name != "local"]


SLOW = ("deepseek-v3", "llama3-405b-16k")


def test_every_large_example_names_its_cluster() -> None:
    assert {path.stem for path in ON_CLUSTERS} >= {"llama3-8b", "llama3-70b", "llama3-405b-16k", "deepseek-v3"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=(pytest.mark.long,) if path.stem in (*SLOW, "llama3-70b") else (),
            id=path.stem,
        )
        for path in ON_CLUSTERS
    ],
)
def test_an_example_on_a_named_cluster_fits_and_is_near_the_pick(path: Path) -> None:
    plan = make_plan(plan_request(load_job(str(path)), Options()))
    assert plan.given is not None
    assert plan.given.free_bytes >= 0
    assert plan.given.estimate.step.total_s <= _MOST_ABOVE_PICK * plan.pick.estimate.step.total_s


@pytest.mark.parametrize(
    ("pipeline", "rank"), [((), "a rank"), (("layout.pp=2", "layout.dp_shard=32"), "pipeline rank 0")]
)
def test_a_layout_that_does_not_fit_ends_with_its_rank_and_what_would_cure_it(
    pipeline: tuple[str, ...], rank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", str(EXAMPLES / "llama3-70b.toml"), "layout.microbatch_size=8", *pipeline])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert f"[layout] does not fit: {rank} needs" in message
    assert "a step)" in message
