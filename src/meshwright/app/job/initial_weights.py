"""What a job makes of the folder in model.initial_weights, seen without torch."""

from meshwright.config.load import DEFAULT, ResolvedJob
from meshwright.data.tokenizer_files import TOKENIZER, advice_to_make_one, other_tokenizer_files
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.hf.hub_cache import local_path


def tokenizer_note(resolved: ResolvedJob) -> str | None:
    """Return that the job leaves data.tokenizer out while its initial weights come with a tokenizer; else None."""
    weights = resolved.job.model.initial_weights
    if weights is None or resolved.origins["data.tokenizer"] != DEFAULT or is_object_source(resolved.job.data.source):
        return None
    folder = local_path(weights)
    others = other_tokenizer_files(folder)
    if not others and not (folder / TOKENIZER).is_file():
        return None
    advice = f"set data.tokenizer to {str(folder / TOKENIZER)!r}"
    if others:
        advice = f"{advice_to_make_one(str(folder), str(folder))}, then {advice}"
    return (
        "data is tokenized as bytes, the default of data.tokenizer, while model.initial_weights comes with a tokenizer "
        f"({', '.join(others) or TOKENIZER}): {advice}"
    )
