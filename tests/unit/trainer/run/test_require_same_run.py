"""What a resumed run may not change, said before a checkpoint is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.run.run_folder import require_same_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "run")
    found.checkpoint(3).mkdir(parents=True)
    found.manifest.write_text(Manifest(job=Job(), seed=0, num_parameters=1).to_json())
    assert json.loads(found.manifest.read_text())
    return found


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("optimizer", {"name": "muon"}, "optimizer.name was 'adamw', is 'muon'"),
        ("optimizer", {"state_dtype": "int8"}, "optimizer.state_dtype was 'float32', is 'int8'"),
        ("precision", {"compute": "float64"}, "precision.compute was 'float32', is 'float64'"),
    ],
)
def test_other_states_than_the_checkpoints_hold_are_refused_by_key(
    run: Run, section: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="its checkpoints hold other states") as refused:
        require_same_run(run, Job.from_dict({section: values}))
    assert said in str(refused.value)


def test_without_a_checkpoint_there_is_no_state_to_keep(run: Run) -> None:
    run.checkpoint(3).rmdir()
    assert require_same_run(run, Job.from_dict({"optimizer": {"name": "muon"}}))


def test_another_format_of_matmuls_is_a_change_and_no_error(run: Run) -> None:
    job = Job.from_dict({"precision": {"compute": "bfloat16", "float8": "rowwise"}})
    assert len(require_same_run(run, job)) == 2


def test_data_may_have_moved_and_be_read_by_other_processes(run: Run) -> None:
    job = Job.from_dict({"data": {"source": "/data/moved.txt", "num_workers": 2, "prefetch_batches": 4}})
    # What is in it, the checkpoint compares.
    (change,) = require_same_run(run, job)
    assert change.startswith("data.source was")
    run.checkpoint(3).rmdir()
    with pytest.raises(ConfigError, match=r"the job is another one: data.source was 'stdlib'"):
        require_same_run(run, job)


def test_data_that_is_read_otherwise_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"the job is another one: data.mask_documents was False, is True"):
        require_same_run(run, Job.from_dict({"data": {"mask_documents": True}}))


@pytest.mark.parametrize("key", ["beta", "label_smoothing"])
def test_a_run_keeps_its_loss_of_preferences(run: Run, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"the job is another one: dpo\.{key} was 0\.\d, is 0\.3: change it back"):
        require_same_run(run, Job.from_dict({"dpo": {key: 0.3}}))
