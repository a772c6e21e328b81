"""Comparison of logits with transformers, for an exported folder."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.errors import CheckpointError, UnsupportedError
from meshwright.extras import import_extra
from meshwright.units import counted, first_of

_NUM_SEQUENCES, _SEQ_LEN = 2, 64
_NUM_NAMED = 4


def max_logits_difference(model: nn.Module, hf_folder: Path, dtype: torch.dtype) -> float:
    """Return the largest absolute difference of logits between `model` and transformers' reading of `hf_folder`.

    Both compute in float32 on the CPU, on random tokens. The weights of `model`, but no buffers, are rounded to `dtype`
    in place, as in the export. Sequences stay within the model's sliding window: Meshwright computes no longer ones.
    Raises CheckpointError for a folder in which transformers does not find exactly its tensors, and for weights or
    logits that are not finite, which equal nothing, UnsupportedError if transformers is not installed or knows no
    causal language model of that model_type.
    """
    theirs = _their_model(hf_folder)
    ours = model.cpu()
    for parameter in ours.parameters():
        parameter.copy_(parameter.to(dtype))
    _require_finite_weights(ours)
    generator, seq_len = torch.Generator().manual_seed(0), _seq_len(theirs.config)
    tokens_BS = torch.randint(theirs.config.vocab_size, (_NUM_SEQUENCES, seq_len), generator=generator)
    context = {"positions_S": torch.arange(seq_len), "documents_BS": None} if _takes_positions(ours) else {}
    with torch.inference_mode():
        ours_BSV, theirs_BSV = ours(tokens_BS, **context), theirs(tokens_BS).logits
    if not isinstance(ours_BSV, Tensor) or ours_BSV.shape != theirs_BSV.shape:
        given = list(ours_BSV.shape) if isinstance(ours_BSV, Tensor) else type(ours_BSV).__name__
        raise CheckpointError(
            f"the model's forward returned {given} where transformers computes logits of {list(theirs_BSV.shape)}: "
            "correct forward or config, or export without --verify"
        )
    for whose, logits_BSV in {"Meshwright": ours_BSV, "transformers": theirs_BSV}.items():
        if num_wrong := _num_not_finite(logits_BSV):
            raise CheckpointError(
                f"{counted(num_wrong, 'logit')} of {logits_BSV.numel():,} that {whose} computes are NaN or infinite, "
                "though all weights are finite: take an earlier checkpoint, or export without --verify to look into it"
            )
    return float((ours_BSV - theirs_BSV).abs().max())


def _their_model(folder: Path) -> Any:
    """Return transformers' causal language model of `folder`, which has exactly the tensors that it needs."""
    transformers = import_extra("transformers", "comparing with transformers")
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    version = f"transformers {transformers.__version__}"
    model_type = read_json(folder / CONFIG)["model_type"]
    if model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(
            f"config.json has model_type = {model_type!r}, of which {version} knows no causal language model: correct "
            "model_type, or export without --verify"
        )
    verbosity = logging.get_verbosity()
    # What it would report is in the error below.
    logging.set_verbosity_error()
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, found = load(folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{version} cannot load it ({type(error).__name__}: {reason}): correct config") from error
    finally:
        logging.set_verbosity(verbosity)
    sizes = [f"{name} {list(here)} (needs {list(needed)})" for name, here, needed in sorted(found["mismatched_keys"])]
    wrong = {"misses": found["missing_keys"], "has no use for": found["unexpected_keys"], "has other sizes of": sizes}
    if texts := [f"{what} {first_of(sorted(names), _NUM_NAMED)}" for what, names in wrong.items() if names]:
        raise CheckpointError(f"{version} {', '.join(texts)}: correct the rows of these names, or config")
    return model.eval()


def _seq_len(config: Any) -> int:
    return min(_SEQ_LEN, getattr(config, "max_position_embeddings", None) or _SEQ_LEN)


def _takes_positions(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_positions", False))


def _require_finite_weights(model: nn.Module) -> None:
    counts = {name: _num_not_finite(parameter) for name, parameter in model.named_parameters()}
    if wrong := [f"{name} ({count:,} of its values)" for name, count in counts.items() if count]:
        raise CheckpointError(
            f"NaN or infinity is in {first_of(wrong)}, so there are no logits to compare: take an earlier checkpoint, "
            "or export without --verify to look into it"
        )


def _num_not_finite(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.isfinite().sum())
