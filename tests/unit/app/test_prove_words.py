"""Words of `meshwright prove`: layouts with or without their section, and keys of the job's other sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.app.prove import layouts_of, prove, split_words
from meshwright.config.load import load_job
from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import Layout
from repository import ROOT


def test_keys_of_the_job_are_distinguished_from_layouts() -> None:
    words = ["dp_shard=2,tp=2", "model.options.qk_norm=true", "layout.pp=2,layout.schedule=GPipe", "train.seed=3"]
    layouts, overrides = split_words([*words, Layout(tp=2)])
    assert overrides == ("model.options.qk_norm=true", "train.seed=3")
    assert layouts == [words[0], words[2], Layout(tp=2)]
    resolved = load_job(ROOT / "examples" / "tiny.toml", overrides)
    assert resolved.job.train.seed == 3
    assert layouts_of(resolved, layouts) == [Layout(dp_shard=2, tp=2), Layout(pp=2, schedule="GPipe"), Layout(tp=2)]


def test_a_key_of_the_layout_next_to_another_layout_is_refused() -> None:
    assert split_words(["layout.cp=2"]) == (["layout.cp=2"], ())
    with pytest.raises(ConfigError, match="write cp=2,attention_backend=flash for one with both"):
        split_words(["cp=2", "layout.attention_backend=flash"])


@pytest.mark.parametrize("word", [{"tp": 2}, 2, None, ["tp=2"]])
def test_what_is_neither_text_nor_layout_is_refused(word: Any) -> None:
    with pytest.raises(ConfigError, match=r'is no layout: write "tp=2" or Layout\(tp=2\)'):
        split_words([word])


def test_layouts_that_an_own_class_lacks_an_attribute_for_are_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "own_of_proof.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    (tmp_path / "own.toml").write_text('[model]\nsource = "own_of_proof:Net"\n')
    with pytest.raises(ConfigError, match=r"^layout\.tp = 2: Net .* has no attribute tensor_parallel"):
        prove(tmp_path / "own.toml", "tp=2")
    with pytest.raises(ConfigError) as error:
        prove(tmp_path / "own.toml", "dp_shard=2", "dp_shard=2,tp=2", "cp=2")
    assert [problem.partition(": Net")[0] for problem in error.value.listed] == [
        "dp_shard=2,tp=2: layout.tp = 2",
        "cp=2: layout.cp = 2",
    ]
