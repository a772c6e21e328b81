"""Loading of a model for generation, from a run, a checkpoint or a Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.format.find_checkpoint import is_hugging_face
from meshwright.checkpoint.hf.side_files import GENERATION_CONFIG
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.data.conversations.chat_template import TEMPLATE_FILE, find_chat_template
from meshwright.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.errors import ConfigError
from meshwright.extras import import_extra
from meshwright.models.build import build_architecture, build_model
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, persistent_buffers
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.hf.hub_cache import local_path
from meshwright.spec.model.hf.name_map import BUFFER


@dataclass(frozen=True)
class LoadedModel:
    """A model in float32 with its tokenizer."""

    model: Llama | GPT2
    tokenizer: Tokenizer | None
    """None if the folder has none."""
    origin: Path
    """Checkpoint or Hugging Face folder of the weights."""
    start: tuple[int, ...]
    """Ids before every prompt, as in the model's training."""
    stop: frozenset[int]
    """Ids that end a text."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, end of text for an empty one; raises ConfigError without a tokenizer."""
        ids = [*self.start, *(int(token) for token in self._own_tokenizer.encode(text))]
        return ids or [self._own_tokenizer.end_of_text]

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a user's message, before the answer; raises ConfigError without a chat template."""
        tokenizer = self._own_tokenizer
        template = find_chat_template(self._folder, tokenizer)
        if template is None:
            raise ConfigError(
                f"{self._folder} has no chat template, which --chat needs: put the model's {TEMPLATE_FILE} into it, or "
                "leave --chat out"
            )
        messages = [{"role": "user", "content": text}]
        ((ids, _, _),) = tokenizer.encode_located([template.render(messages, add_generation_prompt=True).text])
        return [int(token) for token in ids]

    @property
    def _own_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"{self.origin} has no tokenizer: put the model's {TOKENIZER} into {self._folder}")
        return self.tokenizer

    @property
    def _folder(self) -> Path:
        """Return the folder of the tokenizer's files: that of a run or of a Hugging Face model."""
        return self.origin if is_hugging_face(self.origin) else self.origin.parent.parent


def load_model(source: Path, step: int | None = None, device: torch.device | None = None) -> LoadedModel:
    """Return the model in `source`: a run (newest checkpoint, or that of `step`), a checkpoint, a Hugging Face folder.

    A hub id means the folder in the cache of Hugging Face. Raises ConfigError for another kind of folder,
    CheckpointError for damage, UnsupportedError for other models.
    """
    source = local_path(str(source))
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not is_hugging_face(source):
        saved = find_saved_model(source, step)
        model = build_with(saved.architecture, load_parameters(saved.checkpoint), device)
        return _with_tokens(model, saved.load_tokenizer(), saved.checkpoint, _hf_side(saved))
    if step is not None:
        raise ConfigError(f"{source} is a Hugging Face folder, which has no steps: omit --step {step}")
    architecture = architecture_from_hf(read_json(source / CONFIG), str(source / CONFIG))
    model = build_with(architecture, load_hf_parameters(source, architecture), device)
    tokenizer = load_tokenizer(str(source)) if (source / TOKENIZER).is_file() else None
    return _with_tokens(model, tokenizer, source, source)


def build_with(architecture: LlamaArchitecture, parameters: Mapping[str, Tensor], device: torch.device) -> Llama | GPT2:
    """Return the model with these parameters in float32, for inference."""
    with torch.device("meta"):
        model = build_architecture(architecture)
    # Training statistics are not in checkpoints, and would stay on the meta device.
    for name, buffer in list(model.named_buffers()):
        module_name, _, buffer_name = name.rpartition(".")
        setattr(model.get_submodule(module_name), buffer_name, torch.zeros_like(buffer, device=device))
    state = {
        name.removeprefix(BUFFER): tensor.to(device=device, dtype=torch.float32) for name, tensor in parameters.items()
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def load_module(saved: SavedModel) -> nn.Module:
    """Return the model of a checkpoint in float32 on the CPU, for inference; a user's class is built as it is."""
    parameters = load_parameters(saved.checkpoint)
    if saved.built_in is not None:
        return build_with(saved.built_in, parameters, torch.device("cpu"))
    model = build_model(saved.section).requires_grad_(False).eval()
    own = {**dict(canonical_parameters(model)), **{f"{BUFFER}{k}": v for k, v in persistent_buffers(model).items()}}
    for name, tensor in own.items():
        tensor.copy_(parameters[name])
    return model


def _hf_side(saved: SavedModel) -> Path | None:
    """Return the folder whose Hugging Face files define start and stop ids, None for a model that we trained."""
    return saved.run.folder if saved.is_imported else None


def _with_tokens(model: Llama | GPT2, tokenizer: Tokenizer | None, origin: Path, hf_side: Path | None) -> LoadedModel:
    stop = frozenset(() if tokenizer is None else (tokenizer.end_of_text,))
    if hf_side is None or tokenizer is None:
        # Our training windows start anywhere in a document, so prompts need no start ids.
        return LoadedModel(model, tokenizer, origin, (), stop)
    return LoadedModel(model, tokenizer, origin, _start_ids(tokenizer), _stop_ids(hf_side) or stop)


def _stop_ids(folder: Path) -> frozenset[int]:
    """Return eos_token_id of the folder's configs; chat models have several."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer's template prepends, such as Llama 3's <|begin_of_text|>."""
    text = tokenizer.to_tokenizer_json()
    if tokenizer.identity == BYTES or json.loads(text).get("post_processor") is None:
        return ()
    library = import_extra("tokenizers", "the template of a tokenizer.json")
    encoder = library.Tokenizer.from_str(text)
    marked, plain = (encoder.encode("a", add_special_tokens=add).ids for add in (True, False))
    return tuple(marked[: next(i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)])
