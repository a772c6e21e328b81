"""Exports as a plain torch.distributed.checkpoint folder: torch's loader and our import read the same tensors."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from hf_models import architecture, moe_architecture, write_run
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.errors import ConfigError
from meshwright.models.build import build_architecture
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.run.run import Run

MODELS: dict[str, LlamaArchitecture] = {"llama": architecture(), "deepseek": PRESETS["mla-moe-4m"]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", MODELS)
def test_torch_loads_the_same_tensors_and_an_import_brings_them_back(tmp_path: Path, name: str) -> None:
    written = write_run(tmp_path / "run", MODELS[name]).state_dict()
    export_dcp(tmp_path / "run", tmp_path / "out")
    state = {key: torch.zeros_like(value) for key, value in build_architecture(MODELS[name]).state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state.keys() == written.keys()
    assert all(torch.equal(state[key], written[key]) for key in state)
    import_folder(tmp_path / "out", tmp_path / "again")
    before, after = (load_parameters(Run(tmp_path / run).checkpoint(n)) for run, n in (("run", 3), ("again", 0)))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_bfloat16_overwriting_and_models_that_transformers_lacks(tmp_path: Path) -> None:
    write_run(tmp_path / "run", moe_architecture(num_shared_experts=1))
    done = export_dcp(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert done.num_bytes < 3 * done.num_parameters
    suffixes = [path.suffix or path.name for path in (tmp_path / "out").iterdir()]
    assert sorted(suffixes) == [".distcp"] * done.num_files + [".metadata"]
    with pytest.raises(ConfigError, match="exists, and export replaces nothing"):
        export_dcp(tmp_path / "run", tmp_path / "out")
    export_dcp(tmp_path / "run", tmp_path / "out", overwrite=True)
    with pytest.raises(ConfigError, match="is nothing that export writes"):
        export_dcp(tmp_path / "run", tmp_path / "run", overwrite=True)
