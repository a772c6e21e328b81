"""Phi-3: projections that transformers fuses along their outputs are split, and an export is a Llama."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import some_tokens, their_logits, write_hf
from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.errors import UnsupportedError
from meshwright.inference.loaded_model import load_model
from meshwright.spec.model.hf.hf_config import architecture_from_hf

SIZES: dict[str, dict[str, Any]] = {
    "square, as many key heads": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "window": {"sliding_window": 64},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES.keys())
def test_logits_are_those_of_transformers_both_ways(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_hf(tmp_path / "theirs", "phi3", **{"pad_token_id": 0, **options})
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    with torch.inference_mode():
        expected = theirs(some_tokens()).logits
        logits = load_model(tmp_path / "run", device=torch.device("cpu")).model(some_tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), expected, rtol=0, atol=1e-5)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == ("mistral" if options.get("sliding_window") else "llama")
    assert f"was imported as phi3 and is exported as {written['model_type']}, which" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type = 'longrope'"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_hf(tmp_path / "theirs", "phi3", pad_token_id=0)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    if "rope_scaling" in changes:
        config.pop("rope_parameters")
    with pytest.raises(UnsupportedError, match=message):
        architecture_from_hf({**config, **changes})
