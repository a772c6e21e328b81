"""Comparison of logits with transformers, for an exported folder."""

from pathlib import Path

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.extras import import_extra
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.units import counted, first_of

_NUM_SEQUENCES, _SEQ_LEN = 2, 64


def max_logits_difference(model: Llama | GPT2, hf_folder: Path, dtype: torch.dtype) -> float:
    """Return the largest absolute difference of logits between `model` and transformers' reading of `hf_folder`.

    Both compute in float32 on the CPU, on random tokens. The weights of `model`, but no buffers, are rounded to `dtype`
    in place, as in the export. Sequences stay within the model's sliding window: Meshwright computes no longer ones.
    Raises CheckpointError for weights or logits that are not finite, which equal nothing, UnsupportedError if
    transformers is not installed.
    """
    transformers = import_extra("transformers", "comparing with transformers")
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()
    ours = model.cpu()
    for parameter in ours.parameters():
        parameter.copy_(parameter.to(dtype))
    _require_finite_weights(ours)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(model.architecture.vocab_size, (_NUM_SEQUENCES, _seq_len(ours)), generator=generator)
    with torch.inference_mode():
        ours_BSV, theirs_BSV = ours(tokens_BS), theirs(tokens_BS).logits
    for whose, logits_BSV in {"Meshwright": ours_BSV, "transformers": theirs_BSV}.items():
        if num_wrong := _num_not_finite(logits_BSV):
            raise CheckpointError(
                f"{counted(num_wrong, 'logit')} of {logits_BSV.numel():,} that {whose} computes are NaN or infinite, "
                "though all weights are finite: take an earlier checkpoint, or export without --verify to look into it"
            )
    return float((ours_BSV - theirs_BSV).abs().max())


def _seq_len(model: Llama | GPT2) -> int:
    window = model.architecture.sliding_window
    return min(_SEQ_LEN, model.architecture.max_seq_len, window or _SEQ_LEN)


def _require_finite_weights(model: Llama | GPT2) -> None:
    counts = {name: _num_not_finite(parameter) for name, parameter in model.named_parameters()}
    if wrong := [f"{name} ({count:,} of its values)" for name, count in counts.items() if count]:
        raise CheckpointError(
            f"NaN or infinity is in {first_of(wrong)}, so there are no logits to compare: take an earlier checkpoint, "
            "or export without --verify to look into it"
        )


def _num_not_finite(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.isfinite().sum())
