"""What no reader takes of data.source: files of other kinds in a folder, and other compressions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from meshwright.data.formats.read_documents import RECORD_WORDS, TEXT_WORDS
from meshwright.data.formats.source_file import COMPRESSED_SUFFIXES, SourceFile
from meshwright.units import counted

_OTHER_COMPRESSIONS = (".bz2", ".xz", ".lzma", ".lz4", ".zip", ".7z", ".br", ".snappy")
_COMPANION_STEMS = ("readme", "license", "licence", "notice")
_COMPANION_NAMES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "index.json",
    "_success",
)
_COMPANION_SUFFIXES = (".idx", ".index", ".crc", ".md5", ".sha256", ".lock")


def compression_problem(source: str) -> str | None:
    """Return that a file is compressed in a way that is not read; None where its name says no such thing."""
    suffix = PurePosixPath(source).suffix
    if suffix.lower() not in _OTHER_COMPRESSIONS:
        return None
    return (
        f"data.source = {source!r} is compressed, and {suffix} is not read, only {' and '.join(COMPRESSED_SUFFIXES)}: "
        "decompress it, or compress it with gzip or zstd"
    )


def is_companion(name: str) -> bool:
    """Return whether a file is known to be about the data next to it: a README, an index, a checksum."""
    name = name.lower()
    stem = name.partition(".")[0]
    return stem in _COMPANION_STEMS or name in _COMPANION_NAMES or name.endswith(_COMPANION_SUFFIXES)


def unread_files_note(source: str, unread: Sequence[SourceFile], *, takes_text: bool) -> str | None:
    """Return how many files of which suffixes are not read, and an example; None where all are."""
    unread = [file for file in unread if not is_companion(file.name)]
    if not unread:
        return None
    kinds = Counter(_suffix(file.name) for file in unread)
    listed = ", ".join(
        f"{kind} ({number})" for kind, number in sorted(kinds.items(), key=lambda one: (-one[1], one[0]))
    )
    verb = "is" if len(unread) == 1 else "are"
    return (
        f"data.source = {source!r}: {counted(len(unread), 'file')} in it {verb} not read, of other kinds: {listed}, "
        f"such as {unread[0]}: convert what is to be read to {TEXT_WORDS if takes_text else RECORD_WORDS}"
    )


def _suffix(name: str) -> str:
    """Return the last suffix of a name, with the one before that of a compression."""
    suffixes = PurePosixPath(name.lower()).suffixes
    is_compressed = bool(suffixes) and suffixes[-1] in (*COMPRESSED_SUFFIXES, *_OTHER_COMPRESSIONS)
    return "".join(suffixes[-2:] if is_compressed else suffixes[-1:]) or "no suffix"
