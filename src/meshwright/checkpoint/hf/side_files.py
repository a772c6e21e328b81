"""Files next to the weights in a Hugging Face folder: configs and the tokenizer's files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from meshwright.checkpoint.hf.hf_model import HfModel
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.checkpoint.saved_model import SavedModel
from meshwright.data.conversations.chat_template import TEMPLATE_FILE, load_chat_template
from meshwright.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from meshwright.data.tokenizer_files import TOKENIZER, advice_to_make_one
from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.hf.hf_config import architecture_to_hf, hf_obstacles
from meshwright.spec.model.hf.hub_cache import local_path
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Run

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
)
"""Files of a tokenizer; a folder has some of them."""
SIDE_FILES = "|".join(re.escape(name) for name in (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES))
"""Regular expression of the names of all of these files."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_side_files(model: SavedModel, described: HfModel, folder: Path, dtype: str) -> None:
    """Write the configs and the tokenizer of `model` into `folder`; imported files are copied unchanged."""
    tokenizer = model.load_tokenizer()
    rows = described.vocab_size
    if tokenizer is not None and rows is not None and tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer of {model.run.folder} has {tokenizer.vocab_size} tokens, more than the model's vocab_size "
            f"= {rows}: put the tokenizer.json that it was trained with into that folder"
        )
    ids = _token_ids(model, tokenizer)
    # transformers 4 and 5 and inference engines read torch_dtype; 5 prefers dtype where both are there.
    config = {name: value for name, value in described.config().items() if name != "dtype"}
    _write(folder / CONFIG, {**config, **ids, "torch_dtype": dtype})
    if model.is_imported and (model.run.folder / GENERATION_CONFIG).is_file():
        shutil.copyfile(model.run.folder / GENERATION_CONFIG, folder / GENERATION_CONFIG)
    else:
        _write(folder / GENERATION_CONFIG, ids)
    if tokenizer is None and model.is_imported:
        source = model.job.model.initial_weights or "ORIGINAL"
        logger.warning(
            "%s has no %s, so the export has no tokenizer: %s",
            *(model.run.folder, TOKENIZER, advice_to_make_one(source, "EXPORT")),
        )
    if tokenizer is not None:
        _write_tokenizer(model, tokenizer, folder, described.max_seq_len)


def keep_side_files(job: Job, run: Run) -> None:
    """Copy the files that the job refers to into the run folder, so that it can be moved and exported."""
    architecture = resolve_architecture(job.model)
    # A mixture of experts that transformers lacks has no config.json; the job defines it.
    has_config = architecture is not None and not hf_obstacles(architecture)
    if architecture is not None and has_config and not (run.folder / CONFIG).exists():
        temporary = run.folder / f".{CONFIG}.tmp"
        _write(temporary, architecture_to_hf(architecture))
        temporary.replace(run.folder / CONFIG)
    _keep_tokenizer(job, run)
    if job.train.task != "pretrain":
        # After a folder's own template, which data.chat_template replaces.
        temporary = run.folder / f".{TEMPLATE_FILE}.tmp"
        template = load_chat_template(job.data, load_tokenizer(job.data.tokenizer))
        temporary.write_text(template.source, encoding="utf-8")
        temporary.replace(run.folder / TEMPLATE_FILE)


def _keep_tokenizer(job: Job, run: Run) -> None:
    if is_object_source(job.data.source) or job.data.tokenizer == BYTES or (run.folder / TOKENIZER).exists():
        return
    tokenizer = local_path(job.data.tokenizer)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    # TOKENIZER is copied last: if it exists, all files do.
    for name in reversed(TOKENIZER_FILES):
        source = tokenizer if name == TOKENIZER and tokenizer.is_file() else folder / name
        if source.is_file():
            temporary = run.folder / f".{name}.tmp"
            shutil.copyfile(source, temporary)
            temporary.replace(run.folder / name)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the generation config and the tokenizer's files that `source` has."""
    for name in (GENERATION_CONFIG, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _token_ids(model: SavedModel, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if model.is_imported:
        config = read_json(model.run.folder / CONFIG)
        return {name: config[name] for name in _TOKEN_IDS if name in config}
    # One token separates documents, so it is both bos and eos. Without a tokenizer, null keeps transformers from
    # assuming the ids of Llama 2.
    end = None if tokenizer is None else tokenizer.end_of_text
    return {"bos_token_id": end, "eos_token_id": end}


def _write_tokenizer(model: SavedModel, tokenizer: Tokenizer, folder: Path, max_seq_len: int | None) -> None:
    source = _tokenizer_folder(model)
    for name in TOKENIZER_FILES if source is not None else ():
        assert source is not None
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if source is None and (model.run.folder / TEMPLATE_FILE).is_file():
        shutil.copyfile(model.run.folder / TEMPLATE_FILE, folder / TEMPLATE_FILE)
    (folder / TOKENIZER).write_text(tokenizer.to_tokenizer_json(), encoding="utf-8")
    if not (folder / "tokenizer_config.json").is_file():
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.end_of_text_token,
            **({} if max_seq_len is None else {"model_max_length": max_seq_len}),
            # True would drop spaces before punctuation in decoding.
            "clean_up_tokenization_spaces": False,
        }
        _write(folder / "tokenizer_config.json", config)
        _write(folder / "special_tokens_map.json", {"eos_token": tokenizer.end_of_text_token})


def _tokenizer_folder(model: SavedModel) -> Path | None:
    """Return the folder of the tokenizer's files, None for the byte tokenizer."""
    if (model.run.folder / TOKENIZER).is_file():
        return model.run.folder
    if model.job.data.tokenizer == BYTES:
        return None
    path = Path(model.job.data.tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
