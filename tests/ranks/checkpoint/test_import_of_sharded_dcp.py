"""Import of a folder that several ranks wrote with torch.distributed.checkpoint, sharded along either dim."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_models import architecture, write_run
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from run_ranks import run_ranks


def save_sharded(run: Path, folder: Path, dim: int) -> None:
    """Save the parameters of a run's checkpoint, sharded over all ranks along `dim` or the last dim."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parameters = load_parameters(run / "checkpoints" / "step-3")
    state = {
        f"model.{name}": distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))])
        for name, tensor in parameters.items()
    }
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.parametrize("dim", [0, 1])
def test_every_shard_is_found(tmp_path: Path, dim: int) -> None:
    model = architecture(dim=40, num_heads=5, num_kv_heads=1)
    write_run(tmp_path / "run", model)
    run_ranks(save_sharded, 3, tmp_path / "run", tmp_path / "dcp", dim)
    (tmp_path / "dcp" / "config.json").write_text(json.dumps(architecture_to_hf(model)))
    import_folder(tmp_path / "dcp", tmp_path / "again")
    before = load_parameters(tmp_path / "run" / "checkpoints" / "step-3")
    after = load_parameters(tmp_path / "again" / "checkpoints" / "step-0")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
