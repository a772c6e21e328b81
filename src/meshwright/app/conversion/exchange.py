"""export and generate: what a trained model is used for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from meshwright.app.arguments import NotNegative, Positive, checked
from meshwright.app.conversion.conversion_ranks import share
from meshwright.app.progress import elapsed
from meshwright.app.results.result import Result
from meshwright.checkpoint.hf.export import ExportDType, ExportFormat, ExportRequest, export_together
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp as _export_dcp
from meshwright.errors import CheckpointError, ConfigError
from meshwright.extras import import_extra
from meshwright.inference.generate import Sampling, TextStream
from meshwright.inference.generate import generate as _generate
from meshwright.inference.loaded_model import load_model, load_module
from meshwright.inference.transformers_parity import max_logits_difference
from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.spec.step.adapter import Adapter
from meshwright.units import counted, format_bytes, format_count

# Float32 sums in another order differ by some 1e-5 in models of billions of parameters; a wrong weight by 0.1 and more.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class LogitsComparison:
    """How far the exported model's logits are from transformers', in float32."""

    max_difference: float
    transformers_version: str

    def __str__(self) -> str:
        return (
            f"logits equal those of transformers {self.transformers_version} within {self.max_difference:.1e} (float32)"
        )


@dataclass(frozen=True, repr=False)
class Export(Result):
    """A folder that was written. Data frame: one row."""

    checkpoint: Path
    folder: Path
    dtype: ExportDType
    num_parameters: int
    num_bytes: int
    num_files: int
    comparison: LogitsComparison | None
    """None where it was not asked for."""
    note: str = ""
    """What to know before it is used."""

    def to_json(self) -> str:
        """Return what `meshwright export --json` prints."""
        return json.dumps({**asdict(self), "checkpoint": str(self.checkpoint), "folder": str(self.folder)}, indent=2)

    def _summary(self) -> str:
        return (
            f"Export {self.checkpoint} -> {self.folder}: {format_count(self.num_parameters)} parameters in "
            f"{self.dtype}, {format_bytes(self.num_bytes)} in {counted(self.num_files, 'file')}"
        )

    def _page(self) -> Iterator[Text]:
        yield Text(self._summary().removeprefix("Export "))
        if self.comparison is not None:
            yield Text(str(self.comparison))
        if self.note:
            yield Text(self.note)

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(self)]


@checked
def export(
    run: Path | str,
    out: Path | str,
    *,
    step: NotNegative | None = None,
    dtype: ExportDType = "float32",
    verify: bool = False,
    overwrite: bool = False,
    merge: bool = False,
    ranks: Positive = 1,
) -> Export:
    """Write the model of `run`, a run or checkpoint folder, as the new Hugging Face folder `out`.

    Of a run that trains an adapter ([adapter]) that alone is written, in PEFT's format, or with `merge` the model with
    the adapter added to its weights.

    `step` is a checkpoint; None takes the newest. With `overwrite` an older Hugging Face folder may be replaced. With
    `verify` the logits are compared with those that transformers computes from the written folder, before it gets its
    name. `ranks` processes share the work. Raises ConfigError if `out` exists, CheckpointError for a damaged source, a
    full disk or other logits, UnsupportedError where transformers, which `verify` needs, is not installed.
    """
    request = ExportRequest(Path(run), Path(out), step, ExportFormat(dtype), overwrite, merge)
    with elapsed(f"writing {out}"):
        return share(export_as_peer, {"request": request, "verify": verify}, ranks, Path(out))


def export_as_peer(request: ExportRequest, verify: bool, peers: GroupPeers) -> Export:
    """Do what `export` does as one of `peers`; a collective."""
    if verify:
        import_extra("transformers", "the comparison of logits (--verify)")
    out, dtype = request.out, request.weights.dtype
    comparisons: list[LogitsComparison] = []

    def compare(model: SavedModel, folder: Path) -> None:
        if verify:
            comparisons.append(_comparison(model, folder, out, dtype))

    if verify and not request.merge and find_saved_model(request.source, request.step).job.adapter.freezes_base:
        raise ConfigError(
            "--verify compares logits of a whole model, and an adapter is written without its model: add --merge, or "
            "leave out --verify"
        )
    done = export_together(request, peers, compare)
    comparison = comparisons[0] if comparisons else None
    counts = done.num_parameters, done.num_bytes, done.num_files
    note = "" if request.merge else _rounded_base_note(done.model.job.adapter)
    return Export(done.model.checkpoint, out, dtype, *counts, comparison, note)


def _rounded_base_note(adapter: Adapter) -> str:
    if not adapter.freezes_base or adapter.base_dtype == "compute":
        return ""
    return (
        f"it was trained on a base in {adapter.base_dtype}: on weights that are not rounded so, as PEFT loads them, it "
        "computes other logits; --merge writes a whole model that computes what was trained"
    )


@checked
def export_dcp(
    run: Path | str,
    out: Path | str,
    *,
    step: NotNegative | None = None,
    dtype: ExportDType = "float32",
    overwrite: bool = False,
) -> Export:
    """Write the model of `run` as the new folder `out`, which torch.distributed.checkpoint.load reads.

    Arguments and errors are those of `export`.
    """
    out = Path(out)
    with elapsed(f"writing {out}"):
        done = _export_dcp(Path(run), out, step=step, dtype=dtype, overwrite=overwrite)
    return Export(done.model.checkpoint, out, dtype, done.num_parameters, done.num_bytes, done.num_files, None)


@checked
def generate(
    source: Path | str,
    prompt: str = "",
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    step: NotNegative | None = None,
    chat: bool = False,
) -> str:
    """Return `prompt` and its continuation by the model in `source`: a run, a checkpoint or a Hugging Face folder.

    With `chat` the prompt is a user's message in the model's chat template, and the answer alone is returned.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    loaded = load_model(Path(source), step)
    ids = loaded.encode_chat(prompt) if chat else loaded.encode_prompt(prompt)
    assert loaded.tokenizer is not None
    tokens = _generate(loaded.model, ids, sampling, stop=loaded.stop, num_tokens=loaded.tokenizer.vocab_size)
    stream = TextStream(loaded.tokenizer, ids)
    return ("" if chat else prompt) + "".join([stream.add(token) for token in tokens]) + stream.end()


def _comparison(model: SavedModel, folder: Path, out: Path, dtype: str) -> LogitsComparison:
    import transformers

    silence_known_warnings()
    checkpoint = model.checkpoint
    try:
        difference = max_logits_difference(load_module(model), folder, getattr(torch, dtype))
    except CheckpointError as error:
        raise CheckpointError(f"{out} was not written from {checkpoint}: {error}") from error
    # A difference of NaN is no agreement either.
    if not difference <= _TOLERANCE:
        advice = "report this as a bug" if model.built_in else "correct hugging_face of the class, or its forward"
        raise CheckpointError(
            f"transformers {transformers.__version__} computes other logits from the export of {checkpoint}, off by up "
            f"to {difference:.1e} where rounding explains {_TOLERANCE:.0e}: {out} was not written; {advice}, and "
            "export without --verify to look into it"
        )
    return LogitsComparison(difference, transformers.__version__)
