"""The example that prepares data by Ray's tasks."""

import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT


@pytest.mark.slow
def test_shards_are_made_by_tasks_and_joined(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is no dependency: pip install ray")
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    (tmp_path / "job.toml").write_text(f'[data]\nsource = "{tmp_path}/text.txt"\ncache_dir = "{tmp_path}/cache"\n')
    script = ROOT / "examples" / "prepare_with_ray.py"
    printed = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "job.toml"), "2"], check=True, capture_output=True, text=True
    ).stdout
    assert "1 parts made in 2 shards" in printed
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
