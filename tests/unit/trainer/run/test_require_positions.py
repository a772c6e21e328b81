"""data.mask_documents is refused for a model that would leave documents unheeded."""

import pytest
from torch import nn

from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.trainer.step.build_pipeline import require_positions


class Plain(nn.Module):
    """Takes inputs alone."""


class Masking(nn.Module):
    takes_positions = True


def test_documents_need_a_model_that_takes_them() -> None:
    job = Job.from_dict({"data": {"mask_documents": True}, "model": {"source": "mine:Plain"}})
    require_positions(job, Masking())
    require_positions(job.replace(data={"mask_documents": False}), Plain())
    with pytest.raises(ConfigError, match=r"mask_documents = true: .*'mine:Plain'.* or set data.mask_documents"):
        require_positions(job, Plain())
