"""What a layout asks of a class of the user's own is refused by check and by train alike, before a rank starts."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError

MODEL = """\
from torch import nn
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 256)
    {more}
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
JOB = '[model]\nsource = "mine:Mine"\n[data]\nsource = "stdlib"\n[train]\nsteps = 1\nglobal_batch_size = 2\n'
CHUNKS = "layout.loss_chunks=2"


def job_of(folder: Path, more: str = "pass") -> str:
    (folder / "mine.py").write_text(MODEL.replace("{more}", more))
    (folder / "job.toml").write_text(f'{JOB}[run]\ndir = "{folder / "run"}"\n')
    return str(folder / "job.toml")


@pytest.mark.parametrize(
    ("more", "override", "message"),
    [
        ("def loss(self, output, targets): ...", CHUNKS, r"next-token loss, but Mine \(.*\) has a loss of its own"),
        ("loss = staticmethod(my_loss)", CHUNKS, "has a loss of its own: set layout.loss_chunks to 1, or remove"),
        ("pass", CHUNKS, "the role head in tensor_parallel, which names none: set layout.loss_chunks to 1"),
        ("tensor_parallel = {}", CHUNKS, "which names none"),
        ('tensor_parallel = {"blocks.*": "column"}', CHUNKS, "which names none"),
        (
            "pass",
            "layout.activation_checkpoint=auto",
            'needs to know how many blocks a model has, and model.source = "mine:Mine" is your own: set '
            'layout.activation_checkpoint to "none" or "selective" or "full", or say of each block',
        ),
    ],
)
def test_check_and_train_refuse_the_same(tmp_path: Path, more: str, override: str, message: str) -> None:
    job = job_of(tmp_path, more)
    with pytest.raises(ConfigError, match=message) as by_check:
        mw.check(job, override, ranks=1)
    with pytest.raises(ConfigError) as by_train:
        mw.train(job, override, ranks=1)
    assert str(by_train.value) == str(by_check.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more",
    [
        'tensor_parallel = {"head": "head"}',
        "tensor_parallel = TABLE",
        'tensor_parallel = {"head": ROLE}',
        'tensor_parallel = {**TABLE, "blocks.*": "column"}',
        'def build(self): other = Mine(); other.loss = 1; self.tensor_parallel = {"head": "head"}',
    ],
)
def test_what_only_the_model_as_built_shows_is_not_refused(tmp_path: Path, more: str) -> None:
    assert dict(mw.check(job_of(tmp_path, more), CHUNKS, ranks=1).lines)["layout"].endswith("loss_chunks 2")
