"""The programs of examples/user_programs.py are simulated as they are; FSDP1 is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repository import ROOT

PROGRAMS = ROOT / "examples" / "user_programs.py"
QUICK = ("ddp_loader",)
SIMULATED = (
    "hf_llama",
    "ddp_loader",
    "accelerate_ddp",
    "tensor_parallel",
    "adapters",
    "torch_pipeline",
    "compiled_blocks",
)


def simulated(program: str) -> subprocess.CompletedProcess[str]:
    where = ["--build", f"{PROGRAMS}:{program}", "--ranks", "4", "--cluster", "h100-ib400:4", "--json"]
    command = [sys.executable, "-m", "meshwright", "simulate", *where]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.long,)) for name in SIMULATED]
)
def test_a_program_of_a_user_is_simulated(program: str) -> None:
    found = simulated(program)
    assert found.returncode == 0, found.stderr
    page = json.loads(found.stdout)
    assert page["problems"] == page["hazards"] == []
    parts = page["outcome"]["parts"]
    assert parts["compute_s"] > 0
    if program == "torch_pipeline":
        # Stages wait for each other, and no other ranks.
        assert parts["pipeline_bubble_s"] > parts["other_communication_s"]


@pytest.mark.long
def test_the_first_version_of_fsdp_is_refused() -> None:
    found = simulated("fsdp1")
    assert found.returncode == 2
    assert "use torch.distributed.fsdp.fully_shard (FSDP2)" in found.stderr
