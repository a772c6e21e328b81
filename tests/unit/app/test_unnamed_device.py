"""What blocks save is chosen for the device that a job runs on, which has to be known."""

from __future__ import annotations

import pytest

from meshwright.app.job import recompute_budget
from meshwright.app.job.recompute_budget import settle_checkpoints
from meshwright.config.load import load_job
from meshwright.errors import ConfigError
from repository import ROOT


def test_gpus_that_nobody_named_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["layout.activation_checkpoint=auto", "layout.dp_shard=2"]
    resolved = load_job(str(ROOT / "examples" / "tiny.toml"), overrides)
    monkeypatch.setattr(recompute_budget, "choose_device_type", lambda _: "cuda")
    with pytest.raises(
        ConfigError, match=r"the catalogue does not know, and cluster.name = \"local\" .* set cluster.device"
    ):
        settle_checkpoints(resolved, 2)
