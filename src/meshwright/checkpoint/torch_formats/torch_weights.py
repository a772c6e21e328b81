"""Weights of a torch.save file or a torch.distributed.checkpoint folder under our names, each key accounted for."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.hf.hf_model import BuiltInModel
from meshwright.checkpoint.hf.maps.families import name_map, with_tied_head
from meshwright.checkpoint.hf.maps.llama import meta_map
from meshwright.checkpoint.hf.maps.moe import FUSED_EXPERTS, with_fused_experts
from meshwright.checkpoint.hf.tensor_source import TensorSource
from meshwright.checkpoint.hf.weights import HfWeights, checked_weights
from meshwright.checkpoint.torch_formats.dcp_folder import FILE_NAME, DcpFolder
from meshwright.checkpoint.torch_formats.torch_file import TorchFile
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import BUFFER, Drop, NameMap, Rename
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.units import first_of

_PREFIXES = ("", "model.", "module.", "_orig_mod.", "state_dict.", "model.module.", "model._orig_mod.")
"""What training programs put before a parameter's name."""
_TRAINING_STATE = ("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "ema", "rng")


def is_torch_checkpoint(source: Path) -> bool:
    """Return whether `source` is a torch.distributed.checkpoint folder, or a file."""
    return source.is_file() or (source / FILE_NAME).is_file()


def require_index(source: Path) -> None:
    """Raise CheckpointError for a torch.distributed.checkpoint folder without its index."""
    shards = sorted(path.name for path in source.glob("*.distcp"))
    if shards and not (source / FILE_NAME).exists():
        raise CheckpointError(
            f"{source} holds {first_of(shards)} of torch.distributed.checkpoint, but not its index {FILE_NAME}, which "
            "is written last: copy the whole folder again, or take one whose save was complete"
        )


def load_torch_parameters(source: Path, architecture: LlamaArchitecture, model_type: str | None = None) -> HfWeights:
    """Return the tensors of `source` by our names, as stored; each is read on access.

    Names may be ours, those of the Hugging Face model of `model_type` (None: that of an export) or, for a Llama,
    Meta's, with a prefix of a wrapper. Raises ConfigError for other names and tensors of another architecture,
    CheckpointError for damaged files.
    """
    opened = TorchFile(source) if source.is_file() else DcpFolder(source)
    shapes = BuiltInModel(architecture).shapes
    table = _table_for(opened, architecture, shapes, model_type)
    drops = [Drop(f"{name}.{{rest}}", "training state, which an import leaves out") for name in _TRAINING_STATE]
    table = replace(table, drops=(*table.drops, *drops))
    return checked_weights(opened, table, shapes)


def _table_for(
    opened: TensorSource, architecture: LlamaArchitecture, shapes: Collection[str], model_type: str | None
) -> NameMap:
    """Return the name map whose name of the embedding `opened` has, with its prefix."""
    names = opened.names
    theirs = name_map(architecture, model_type)
    is_fused = any(name.endswith(FUSED_EXPERTS) for name in names)
    # GPT-OSS has them fused in its folders, too.
    of_folder = any(rename.theirs.endswith(FUSED_EXPERTS) for rename in theirs.renames)
    if isinstance(architecture, MoEArchitecture) and is_fused and not of_folder:
        theirs = with_fused_experts(theirs)
    tables = [NameMap(tuple(Rename(name, name.removeprefix(BUFFER)) for name in shapes)), theirs]
    if type(architecture) is LlamaArchitecture and not (architecture.qk_norm or architecture.qkv_bias):
        tables.append(with_tied_head(meta_map(architecture)) if architecture.tie_embeddings else meta_map(architecture))
    for prefix in _PREFIXES:
        for table in tables:
            if f"{prefix}{table.theirs('embedding.weight')[0]}" in names:
                renames = tuple(replace(rename, theirs=f"{prefix}{rename.theirs}") for rename in table.renames)
                drops = tuple(replace(drop, theirs=f"{prefix}{drop.theirs}") for drop in table.drops)
                return NameMap(renames, drops)
    expected = [table.theirs("embedding.weight")[0] for table in tables]
    raise ConfigError(
        f"{opened.path} holds {first_of(sorted(names)) or 'no tensor'}, but no embedding under a name that is known "
        f"({', '.join(expected)}): rename its tensors to those of Hugging Face first"
    )
