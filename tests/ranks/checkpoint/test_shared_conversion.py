"""Export and import by several processes: the bytes of one process, an even share each, one error for all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import meshwright as mw
from hf_models import architecture, moe_architecture, write_run
from meshwright.app.conversion.conversion_ranks import preemptible, share
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.export import ExportFormat, ExportRequest, export, export_together
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.output_folder import output_folder
from meshwright.checkpoint.peers import GroupPeers
from meshwright.cli.main import run
from meshwright.config.write import to_toml
from meshwright.errors import CheckpointError, Preempted
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.units import format_count
from own_models import own_job, write_own_run
from run_ranks import run_ranks

FORMAT = ExportFormat("bfloat16", max_shard_bytes=30_000)
NUM_RANKS = 3


def there_and_back(source: Path, folder: Path) -> None:
    """Export the run `source` and import the result, as one of the ranks."""
    export_together(ExportRequest(source, folder / "out", weights=FORMAT), GroupPeers())
    import_folder(folder / "out", folder / "again", peers=GroupPeers())


def refused(source: Path, folder: Path) -> list[str]:
    """Return why the export and the import fail on this rank."""
    with pytest.raises(CheckpointError) as of_export:
        export_together(ExportRequest(source, folder / "out"), GroupPeers())
    with pytest.raises(CheckpointError) as of_import:
        import_folder(folder / "whole", folder / "again", peers=GroupPeers())
    return [str(of_export.value), str(of_import.value)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("model", [architecture(), moe_architecture()], ids=["dense", "experts"])
def test_ranks_write_what_one_process_writes(tmp_path: Path, model: LlamaArchitecture) -> None:
    write_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "alone", weights=FORMAT)
    run_ranks(there_and_back, NUM_RANKS, tmp_path / "run", tmp_path)
    assert len(contents(tmp_path / "out")) > 3
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    checkpoint = tmp_path / "again" / "checkpoints" / "step-0"
    before, after = load_parameters(tmp_path / "run" / "checkpoints" / "step-3"), load_parameters(checkpoint)
    assert all(torch.equal(before[name].bfloat16().float(), after[name].float()) for name in before)
    sizes = [path.stat().st_size for path in sorted(checkpoint.glob("rank-*.bin"))]
    assert len(sizes) == NUM_RANKS
    assert max(sizes) < 2 * sum(sizes) / NUM_RANKS


def test_damage_is_one_error_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "whole")
    for file, place in (
        (tmp_path / "run" / "checkpoints" / "step-3" / "rank-00000.bin", -1),
        (tmp_path / "whole" / "model.safetensors", None),
    ):
        data = bytearray(file.read_bytes())
        if place is None:
            del data[-10:]
        else:
            data[place] ^= 1
        file.write_bytes(data)
    texts = run_ranks(refused, NUM_RANKS, tmp_path / "run", tmp_path)
    assert texts[0] == texts[1] == texts[2]
    assert "rank-00000.bin" in texts[0][0]
    assert "model.safetensors" in texts[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


def test_the_commands_start_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", architecture())
    mw.export(tmp_path / "run", tmp_path / "alone")
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--ranks", "2"]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert run(["import", str(tmp_path / "out"), str(tmp_path / "again"), "--ranks", "2"]) == 0
    assert len(list((tmp_path / "again" / "checkpoints" / "step-0").glob("rank-*.bin"))) == 2
    capsys.readouterr()
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--ranks", "2"]) == 2
    assert "exists, and export replaces nothing" in capsys.readouterr().err


def stops_the_command(command: int, target: Path, peers: GroupPeers) -> None:
    """Send SIGTERM to the process `command` while `target` is half written."""
    with output_folder(target, 1, peers) as new:
        (new.path / f"rank-{peers.rank}").write_text("half")
        if peers.rank == 0:
            os.kill(command, signal.SIGTERM)
        time.sleep(60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "out"
    message = r"SIGTERM: .*out was not written, and what was begun is removed: start the command again"
    with pytest.raises(Preempted, match=message), preemptible(out):
        share(stops_the_command, {"command": os.getpid(), "target": out}, ranks, out)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_ranks_of_torchrun_share_the_work_and_one_of_them_speaks(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "alone")
    command = ["torchrun", "--nproc-per-node", "2", "-m", "meshwright", "export", "run", "out"]
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("29.3k parameters in float32") == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.stderr.count("out exists, and export replaces nothing") == 1


def test_ranks_share_an_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write_own_run(tmp_path / "run", "EveryRow")
    mw.export(tmp_path / "run", tmp_path / "alone")
    mw.export(tmp_path / "run", tmp_path / "out", ranks=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    (tmp_path / "job.toml").write_text(to_toml(own_job("EveryRow")))
    job = str(tmp_path / "job.toml")
    done = mw.import_weights(tmp_path / "out", tmp_path / "again", job=job, ranks=2)
    again = load_parameters(done.checkpoint)
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())
    parameters = format_count(sum(tensor.numel() for name, tensor in ours.items() if name != "buffer.scale"))
    assert repr(done) == f"<Import {tmp_path / 'out'} -> {done.checkpoint}: {parameters} parameters in float32>"
    assert done.table().splitlines()[-1] == f"next: meshwright train {tmp_path / 'again' / 'job.toml'} run.dir=NEW"
    assert run(["import", str(tmp_path / "out"), str(tmp_path / "again"), "--job", job, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == done.num_parameters
