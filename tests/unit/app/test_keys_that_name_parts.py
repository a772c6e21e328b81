"""What `check` finds in float8 and optimizer keys that name parts of a model, and in a folder with a compile cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("precision.float8=tensorwise", 'precision.float8_skip=["blocks.0.attention.qurey"]'),
            'precision.float8_skip has "blocks.0.attention.qurey", which matches no linear layer',
        ),
        (('optimizer.groups=[{match="*.bias",weight_decay=0.0}]',), 'optimizer.groups matches "*.bias" in group 1'),
    ],
)
def test_patterns_that_match_nothing_are_found(
    keys: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao", reason="needs meshwright[torchao]")
    assert run(["check", TINY, *keys]) == ExitCode.BAD_INPUT
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.*.experts*", "matches experts alone: leave it out, and set precision.float8_experts"),
        ("blocks.*.ffn.router", "matches routers alone, and those are never in float8: leave it out"),
    ],
)
def test_patterns_of_float8_that_match_no_layer_it_takes_are_found(
    pattern: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao", reason="needs meshwright[torchao]")
    keys = ("model.source=mixtral-8x7b", "precision.float8=tensorwise", f'precision.float8_skip=["{pattern}"]')
    assert run(["check", TINY, *keys]) == ExitCode.BAD_INPUT
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_precompile_wrote_is_one_to_train_into(tmp_path: Path) -> None:
    (tmp_path / "run" / "compile_cache").mkdir(parents=True)
    assert run(["check", TINY, f"run.dir={tmp_path / 'run'}"]) == 0


@pytest.mark.slow
def test_a_key_that_float8_refuses_is_named_by_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama3-8b", "--cluster", "dgx-h100:8", "--global-batch-size", "16"]
    assert run([*plan, "precision.float8=tensorwise", "layout.cpu_offload=true"]) == ExitCode.BAD_INPUT
    assert "layout.cpu_offload" in capsys.readouterr().err
