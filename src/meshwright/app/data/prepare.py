"""prepare: tokenise the data of a job ahead of training, on this machine or in shards on many."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.app.arguments import JobSource, checked
from meshwright.app.data.byte_counter import byte_counter
from meshwright.app.data.job_data import of_each, source_name
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import PreparationResult
from meshwright.data.cache.prepared_folder import require_absent, write_prepared
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.data_findings import PreparedTokens

_SHARD = re.compile(r"(\d+)/(\d+)")


@checked
def prepare(
    job: JobSource, *overrides: str, shard: str | None = None, out: Path | str | None = None
) -> PreparationResult:
    """Tokenise the job's data into data.cache_dir, where training finds it, and return what was made.

    Parts that an earlier call has finished are kept, however it ended. With `shard` "I/N" (I from 0 to N - 1) only
    every N-th part is made, and a last call without it joins them; all calls share one data.cache_dir. `out` is a
    new folder that holds all that training needs, as data.source and data.tokenizer, without the text. Raises
    UnsupportedError where data.source is a class of the user's.
    """
    place = None if shard is None else _parsed(shard)
    folder = None if out is None else Path(out)
    found = as_job(job, overrides).job
    section = found.data
    _require_out(folder, shard)
    name = source_name(section)
    if folder is not None and section.mixture:
        raise UnsupportedError(
            f"--out {folder} holds one source, and data.mixture has {len(section.mixture)}: prepare each by a job of "
            "its own, and name the folders as sources of the mixture"
        )
    with elapsed(f"reading {name}") as show:
        count = byte_counter(f"reading {name}", None, show)
        found_texts = of_each(found, lambda one: (one.cache(count), one.unread_files) if one.is_text else None)
        texts = [one for one in found_texts if one is not None]
        if not texts:
            raise UnsupportedError(
                f"{name} holds tokens, or makes its samples itself, so that nothing can be prepared: set data.source "
                "to a text"
            )
        made = [_prepared(cache, place, show, lines) for cache, lines in texts]
        if folder is not None:
            show(f"writing {folder}")
            write_prepared(folder, texts[0][0], load_tokenizer(section.tokenizer))
            made = [one.replace(folder=str(folder)) for one in made]
    return PreparationResult(sources=made)


def _require_out(folder: Path | None, shard: str | None) -> None:
    """Raise ConfigError where the folder of --out cannot be written after all of the work."""
    if folder is None:
        return
    if shard is not None:
        raise ConfigError(f"--out {folder} needs all parts and --shard {shard} makes some: give --out to the last call")
    require_absent(folder)


def _prepared(
    cache: TokenCache, place: tuple[int, int] | None, show: Callable[[str], None], unread: list[str]
) -> PreparedTokens:
    start_s, num_tokens, num_parts = time.perf_counter(), None, len(cache.content.parts)
    text = f"tokenising {cache.source}"
    show(text)
    if place is None:
        num_tokens = len(cache.tokens(byte_counter(text, cache.content.num_bytes, show)))
    else:
        numbers = range(place[0], num_parts, place[1])
        share_bytes = sum(cache.content.parts[number].num_bytes for number in numbers)
        cache.build_parts(numbers, byte_counter(text, share_bytes, show))
    missing = cache.parts_missing
    return PreparedTokens(
        source=cache.source,
        path=str(cache.path),
        num_bytes=cache.content.num_bytes,
        num_documents=cache.content.num_documents,
        num_parts=num_parts,
        num_parts_made=cache.num_parts_made,
        num_parts_missing=len(missing),
        parts_missing=missing,
        left_out=[*cache.content.left_out.lines(), *unread],
        num_tokens=num_tokens,
        duration_s=time.perf_counter() - start_s,
    )


def _parsed(shard: str) -> tuple[int, int]:
    found = _SHARD.fullmatch(shard)
    if found is None or not int(found[1]) < int(found[2]):
        raise ConfigError(
            f"--shard {shard} must be I/N, with I from 0 to N - 1, such as 0/4 for the first of four: change it"
        )
    return int(found[1]), int(found[2])
