"""Comparison of logits with transformers, for an exported folder."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.extras import import_extra
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama

_NUM_SEQUENCES, _SEQ_LEN = 2, 64


def max_logits_difference(model: Llama | GPT2, hf_folder: Path, dtype: torch.dtype) -> float:
    """Return the largest absolute difference of logits between `model` and transformers' reading of `hf_folder`.

    Both compute in float32 on the CPU, on random tokens. The weights of `model`, but no buffers, are rounded to `dtype`
    in place, as in the export. Raises UnsupportedError if transformers is not installed.
    """
    transformers = import_extra("transformers", "comparing with transformers")
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()
    ours = model.cpu()
    for parameter in ours.parameters():
        parameter.copy_(parameter.to(dtype))
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(model.architecture.vocab_size, (_NUM_SEQUENCES, _SEQ_LEN), generator=generator)
    with torch.inference_mode():
        difference_BSV = ours(tokens_BS) - theirs(tokens_BS).logits
    return float(difference_BSV.abs().max())
