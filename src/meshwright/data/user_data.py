"""User data: data.source = "my_module:MyData", any object with __len__ and __getitem__, or any iterable."""

import errno
import hashlib
import json
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from meshwright.errors import ConfigError, DataError, DataUnavailable, MeshwrightError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import make_object, place_of

_NUM_HASHED_SAMPLES = 3
_END = object()
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of the operating system that another attempt gets again: a wrong path, a missing right, a full disk."""


class UserData(Protocol):
    """Interface of a class in data.source.

    Sample i must be a function of i: after a resume, or with another number of ranks, another process reads it.
    """

    def __len__(self) -> int:
        """Return the number of samples, validation samples included."""
        ...

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of one sample: numbers, NumPy arrays or tensors, of equal shapes and dtypes."""
        ...


def is_stream(data: UserData | Iterable[Any]) -> TypeGuard[Iterable[Any]]:
    """Return whether a user's object is an iterable of samples, in an order of its own, not numbered samples."""
    # Torch's has a __getitem__, which raises, and its subclass may have a __len__.
    is_declared = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)
    return is_declared or not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def load_user_data(section: DataSection) -> UserData | Iterable[Any]:
    """Return the object of data.source, constructed with data.options; raises ConfigError if it is invalid.

    Raises DataUnavailable where building it raises an OSError that may pass.
    """
    try:
        data = make_object("data", section.source, section.options)
    except ConfigError as error:
        if is_transient(error.__cause__):
            raise unavailable("building", section.source, error.__cause__) from error.__cause__
        raise
    if is_stream(data) and (problem := _stream_problem(data)) is not None:
        raise ConfigError(f"data.source = {section.source!r} is a {type(data).__name__} {problem}")
    return data  # type: ignore[no-any-return]


def _stream_problem(data: Any) -> str | None:
    """Return why an object without numbered samples is no stream of them; None if it is."""
    if not hasattr(data, "__iter__"):
        return (
            "with neither numbered samples nor an iterator: it must have __len__() and __getitem__(index), which "
            "returns (inputs, targets), or __iter__(), which yields them"
        )
    if hasattr(data, "state_dict") != hasattr(data, "load_state_dict"):
        return "with one of state_dict() and load_state_dict(): add the other, or remove it"
    if getattr(data, "batch_size", None) is not None and any(
        base.__name__ == "DataLoader" for base in type(data).__mro__
    ):
        return f"with batch_size = {data.batch_size}: set batch_size=None, since Meshwright stacks samples itself"
    return None


def num_samples_of(data: UserData, source: str) -> int:
    """Return the number of a user's samples; raises DataError where its __len__ returns none."""
    length_of = type(data).__len__
    try:
        found = length_of(data)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"len() of data.source = {source!r} raised {place_of(error)}: its __len__ must return the number of samples"
        ) from error
    # Not len(), whose own error would name no line of the user's.
    if hasattr(found, "__index__") and found >= 0:
        return operator.index(found)
    code = getattr(length_of, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
    raise DataError(
        f"__len__ of data.source = {source!r} returned {found!r}{place}: it must return the number of samples, an "
        "integer of 0 or more"
    )


def read_pair(data: UserData, index: int, source: str) -> tuple[Any, Any]:
    """Return (inputs, targets) of one sample; raises DataError if it is not a pair.

    Raises DataUnavailable where reading it raises an OSError that may pass.
    """
    with explained_reading(index, source):
        sample: Any = data[index]
    return require_pair(sample, index, source)


@contextmanager
def explained_reading(index: int, source: str) -> Iterator[None]:
    """Raise DataUnavailable for an OSError that may pass, MeshwrightError for what would end this process unexplained.

    That is SystemExit above all: code of the user's that ends itself has not read the sample.
    """
    try:
        yield
    except OSError as error:
        if is_transient(error):
            raise unavailable(f"reading sample {index} of", source, error) from error
        raise
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise MeshwrightError(
            f"reading sample {index} of data.source = {source!r} raised {place_of(error)}: let that code return a "
            "sample, or raise an error, then start again with --resume"
        ) from error


def require_pair(sample: Any, index: int, source: str) -> tuple[Any, Any]:
    """Return (inputs, targets), each a tensor or an array of numbers; raises DataError if the sample is not that."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        length = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise DataError(
            f"sample {index} of data.source = {source!r} is a {type(sample).__name__}{length}: "
            "it must be two values, (inputs, targets)"
        )
    inputs, targets = (_numbers(value, index, what) for value, what in zip(sample, ("inputs", "targets"), strict=True))
    return inputs, targets


def _numbers(value: Any, index: int, what: str) -> Any:
    """Return a tensor as it is, and anything else as an array; raises DataError where it holds no numbers."""
    if hasattr(value, "detach"):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise no_tensor(value, index, what, error) from error
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise no_tensor(value, index, what, f"its dtype as an array is {array.dtype}")
    return array


def no_tensor(value: Any, index: int, what: str, reason: object) -> DataError:
    """Return the error to raise for a value of a sample that no tensor can hold."""
    return DataError(
        f"the {what} of sample {index} are a {type(value).__name__} that no tensor can hold ({reason}): "
        "return numbers, NumPy arrays of numbers or tensors from __getitem__ of the class in data.source"
    )


def first_sample(section: DataSection) -> tuple[Any, Any]:
    """Return (inputs, targets) of a first sample, whatever data.source is."""
    data = load_user_data(section)
    if not is_stream(data):
        return read_pair(cast(UserData, data), 0, section.source)
    with explained_reading(0, section.source):
        sample = next(iter(data), _END)
    if sample is not _END:
        return require_pair(sample, 0, section.source)
    raise DataError(f"data.source = {section.source!r} ended without a sample: let it give some")


def is_transient(error: BaseException | None) -> TypeGuard[OSError]:
    """Return whether another attempt may pass `error`: of a network or a store, not of a wrong path or a full disk."""
    return isinstance(error, OSError) and not isinstance(error, _LASTING) and error.errno not in _FULL


def unavailable(doing: str, source: str, error: OSError) -> DataUnavailable:
    """Return the error to raise for one of the code that data.source names, with the place in that code."""
    return DataUnavailable(
        f"{doing} data.source = {source!r} raised {place_of(error)}: such errors mostly pass: start again with "
        "--resume, or let run.max_restarts do so; if it comes back, correct that code"
    )


def sample_hash(data: UserData, source: str) -> str:
    """Return a hash of a few samples; raises DataError if reading them twice gives different values."""
    num_samples = num_samples_of(data, source)
    indices = sorted({round(i * (num_samples - 1) / (_NUM_HASHED_SAMPLES - 1)) for i in range(_NUM_HASHED_SAMPLES)})
    total = hashlib.blake2b(digest_size=16)
    for index in indices:
        first, second = (_digest(read_pair(data, index, source)) for _ in range(2))
        if first != second:
            raise DataError(
                f"sample {index} of data.source = {source!r} has different values when it is read twice: a sample must "
                "be a function of its index, so draw random numbers from a generator seeded with the index"
            )
        total.update(first)
    return total.hexdigest()


def sample_digest(sample: tuple[Any, ...]) -> str:
    """Return a hash of the values of (inputs, targets)."""
    return _digest(sample).hex()


def _digest(sample: tuple[Any, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for value in sample:
        array = as_array(value)
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return numbers, arrays and tensors as an array, without importing torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16; float32 holds each of its values.
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def user_fingerprint(section: DataSection, data: object) -> dict[str, Any]:
    """Return which class and options a user's samples are of, as JSON for manifests and checkpoints."""
    options = json.loads(json.dumps(section.options, default=str))
    return {"source": section.source, "class": type(data).__name__, "options": options}
