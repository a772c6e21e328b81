"""What an error suggests is accepted when it is applied as written: to each key of [layout], on several jobs."""

import re
import shlex
from pathlib import Path

import pytest

from meshwright.app.check import check
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.spec.problem import Problem, override_of

EXAMPLES = Path(__file__).parents[2] / "examples"
BROKEN = [
    *(f"layout.{axis}={degree}" for axis in ("pp", "tp", "cp") for degree in (3, 16)),
    "layout.dp_shard=3",
    "layout.dp_replicate=3",
    "layout.ep=3",
    "layout.etp=2",
    "layout.microbatch_size=3",
    "layout.virtual_stages=3",
    "layout.stage_boundaries=[3, 1]",
    "layout.async_tp=true",
    "layout.activation_checkpoint_every=2",
    'layout.activation_checkpoint_blocks=["full"]',
    "layout.reshard_after_forward=3",
    "layout.loss_chunks=1000000",
    "layout.cuda_graphs=true",
    "layout.attention_backend=cudnn",
    "layout.pp=4 layout.schedule=ZBVZeroBubble",
    "layout.pp=4 layout.microbatch_size=2",
    "layout.cp=3 layout.cp_method=ulysses",
    "layout.cp=2 layout.cp_method=ring",
    "layout.dp_shard=4 layout.tp=3",
    "layout.dp_shard=4 layout.pp=3",
    "layout.dp_shard=2 layout.async_tp=true",
    "layout.cp=3 layout.tp=3",
]
_LONG = pytest.mark.long
JOBS = [
    ("tiny.toml", None),
    ("tiny.toml", 2),
    pytest.param("tiny.toml", 4, marks=_LONG),
    pytest.param("tiny.toml", 8, marks=_LONG),
    pytest.param("tiny-moe.toml", None, marks=_LONG),
    ("tiny-moe.toml", 8),
    pytest.param("llama3-8b.toml", None, marks=_LONG),
    ("spectral_denoiser.toml", None),
]


def problems_of(job: str, overrides: list[str], ranks: int | None) -> tuple[list[str], str]:
    """Return what `meshwright check` finds wrong, and the whole of its message."""
    try:
        checked = check(str(EXAMPLES / job), *overrides, "run.dir=new", ranks=ranks)
    except ConfigError as error:
        return list(error.listed or error.args), str(error)
    except MeshwrightError as error:
        return [str(error)], str(error)
    return ([] if checked.misfit is None else [str(checked.misfit)]), ""


@pytest.mark.parametrize(("job", "ranks"), JOBS)
def test_what_is_suggested_for_a_broken_key_works(
    job: str, ranks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not problems_of(job, [], ranks)[0]
    num_tried = 0
    for words in BROKEN:
        overrides = re.findall(r"\S+=(?:\[.*\]|\S+)", words)
        problems, message = problems_of(job, overrides, ranks)
        ways = [override_of(fix) for one in problems if isinstance(one, Problem) for fix in one.fixes]
        if len(problems) > 1:
            ways = re.findall("all at once: (.*)", message)
            assert ways, message
        for way in ways:
            num_tried += 1
            left, _ = problems_of(job, [*overrides, *shlex.split(way)], ranks)
            assert not left, (overrides, message, way)
    assert num_tried > len(BROKEN) // 2


@pytest.mark.parametrize(
    ("job", "overrides", "ranks", "message"),
    [
        ("tiny.toml", ["layout.tp=3"], 8, "set layout.tp to 2 or 4"),
        ("tiny.toml", ["layout.dp_shard=1", "layout.tp=3"], 8, "set layout.tp to 2 and layout.dp_shard to 4"),
        ("tiny.toml", ["layout.cp=3"], 4, "all at once: layout.cp=2"),
        ("llama3-8b.toml", ["layout.microbatch_size=3"], None, "set layout.microbatch_size to 1"),
        ("spectral_denoiser.toml", ["layout.tp=3"], None, "set layout.tp to 1, or add it (see "),
    ],
)
def test_changes_are_joined_where_one_is_not_enough(
    job: str, overrides: list[str], ranks: int | None, message: str
) -> None:
    assert message in problems_of(job, overrides, ranks)[1]
