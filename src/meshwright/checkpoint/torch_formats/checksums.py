"""verify_checksums: the CRC-32 of each record of what torch.save wrote, which torch.load does not compare."""

import io
import zipfile
from pathlib import Path

from meshwright.errors import DamagedCheckpoint

_AT_ONCE = 1 << 20


def verify_checksums(source: Path | io.BytesIO, path: Path, share: tuple[int, int] = (0, 1)) -> bool:
    """Return whether the records of `source`, which lies in the file `path`, carry checksums.

    Raises DamagedCheckpoint for a record whose bytes have another one. `share` is (i, n): of the records every nth,
    from number i on. A file in the format before torch 1.6, which is no zip archive, has no checksums.
    """
    if not zipfile.is_zipfile(source):
        return False
    try:
        with zipfile.ZipFile(source) as archive:
            records = archive.infolist()
            # torch.serialization.set_crc32_options(False) writes 0 for each of them.
            if not any(record.CRC for record in records):
                return False
            for record in records[share[0] :: share[1]]:
                _verify(archive, record, path)
    # A damaged directory of an archive raises almost any of the built-in exceptions.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as a zip archive ({error}): copy it again") from error
    return True


def _verify(archive: zipfile.ZipFile, record: zipfile.ZipInfo, path: Path) -> None:
    """Read one record to its end, where zipfile compares the checksum."""
    try:
        with archive.open(record) as opened:
            while opened.read(_AT_ONCE):
                pass
    except zipfile.BadZipFile as error:
        if "Bad CRC-32" not in str(error):
            raise
        raise DamagedCheckpoint(
            f"{path}: the bytes of {record.filename} do not have the checksum that was written with them: they "
            "changed since, so copy the file again"
        ) from error
