import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import Dataset, num_validation
from meshwright.data.token_dataset import num_windows, token_shortage
from meshwright.errors import ConfigError, DataError, DataUnavailable, ExitCode
from meshwright.spec.job.sections import DataSection

USER_MODULE = """
import numpy as np

class Waves:
    def __init__(self, num_samples=10, length=4):
        self.num_samples, self.length = num_samples, length
    def __len__(self):
        return self.num_samples
    def __getitem__(self, index):
        phase = np.arange(self.length, dtype=np.float32) + index
        return np.sin(phase), index % 3

class Tensors(Waves):
    def __getitem__(self, index):
        import torch
        return torch.full((2,), index, dtype=torch.bfloat16), torch.tensor(index)

class Restless(Waves):
    def __getitem__(self, index):
        return np.random.rand(4), 0

class Alone(Waves):
    def __getitem__(self, index):
        return np.zeros(4)

class Triple(Waves):
    def __getitem__(self, index):
        return 1, 2, 3

class Store(Waves):
    def __init__(self, error, fails_at=7):
        super().__init__()
        if fails_at < 0:
            raise error
        self.error, self.fails_at = error, fails_at
    def __getitem__(self, index):
        if index == self.fails_at:
            raise self.error
        return super().__getitem__(index)

def unreachable(fails_at=7):
    return Store(ConnectionError("the store does not answer"), fails_at)

def full():
    return Store(OSError(28, "No space left on device"))

def missing():
    return Store(FileNotFoundError(2, "No such file"))

class NoLength:
    def __getitem__(self, index):
        return 1, 2

def make():
    return Waves(3)
"""


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSection:
    """A section that reads corpus.txt in the working directory, where user_waves.py lies too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("user_waves", "user_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "user_waves.py").write_text(USER_MODULE)
    (tmp_path / "user_broken.py").write_text("import surely_not_installed\n")
    (tmp_path / "corpus.txt").write_text("abcdefghij")
    return DataSection(source="corpus.txt", cache_dir=str(tmp_path / "cache"), validation_fraction=0.3)


def as_lists(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    samples = [dataset.sample(index) for index in range(dataset.num_training_samples)]
    samples += [dataset.validation_sample(index) for index in range(dataset.num_validation_samples)]
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in samples]


def test_samples_are_windows_that_share_one_token(section: DataSection) -> None:
    dataset = build_dataset(section, seq_len=3)
    # 10 letters and an end of text: 11 tokens, 3 windows of 4, the last kept for validation by a fraction of 0.3.
    assert (dataset.num_training_samples, dataset.num_validation_samples, dataset.vocab_size) == (2, 1, 257)
    assert as_lists(dataset) == [
        ([97, 98, 99], [98, 99, 100]),
        ([100, 101, 102], [101, 102, 103]),
        ([103, 104, 105], [104, 105, 106]),
    ]
    inputs, targets = dataset.sample(0)
    assert inputs.dtype == targets.dtype == np.int64


@given(num_tokens=st.integers(0, 300), seq_len=st.integers(1, 40))
def test_windows_fill_the_stream_and_no_more(num_tokens: int, seq_len: int) -> None:
    num_samples = num_windows(num_tokens, seq_len)
    assert num_samples * seq_len + 1 <= max(num_tokens, 1)
    assert (num_samples + 1) * seq_len + 1 > num_tokens


@pytest.mark.parametrize(
    ("num_samples", "fraction", "expected"), [(100, 0.02, 2), (10, 0.02, 1), (10, 0, 0), (2, 0.9, 1)]
)
def test_validation_is_the_fraction_but_one_at_least(num_samples: int, fraction: float, expected: int) -> None:
    assert num_validation(num_samples, fraction) == expected


def test_the_fingerprint_says_what_the_data_was(section: DataSection) -> None:
    fingerprint = build_dataset(section, 3).fingerprint
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint.pop("content_hash") == build_dataset(section, 2).fingerprint["content_hash"]
    assert fingerprint == {
        "source": "corpus.txt",
        "num_bytes": 10,
        "num_documents": 1,
        "num_tokens": 11,
        "tokenizer": "bytes",
        "end_of_text": 256,
        "seq_len": 3,
        "num_training_samples": 2,
        "num_validation_samples": 1,
    }


def test_stdlib_says_which_python(section: DataSection) -> None:
    dataset = build_dataset(section.replace(source="stdlib", max_bytes=10_000), 64)
    assert dataset.fingerprint["source"].startswith("stdlib (Python 3.")
    assert dataset.fingerprint["num_bytes"] == 10_000
    assert dataset.num_training_samples > 100


def test_a_corpus_shorter_than_a_sample_is_refused_with_the_length_that_fits(section: DataSection) -> None:
    with pytest.raises(
        DataError, match=r"corpus.txt' has 11 tokens, but 2 samples.* of train.seq_len = 6 need 13: set t"
    ):
        build_dataset(section, 6)
    assert build_dataset(section, 5).num_training_samples == 1
    whole = section.replace(validation_fraction=0.0)
    with pytest.raises(
        DataError, match=r"has 11 tokens, but one sample of train.seq_len = 11 need 12: .* to 10 or less"
    ):
        build_dataset(whole, 11)
    assert build_dataset(whole, 10).num_validation_samples == 0


@given(num_tokens=st.integers(0, 60), seq_len=st.integers(1, 40), fraction=st.sampled_from([0.0, 0.02, 0.5, 0.97]))
def test_the_shortage_is_said_exactly_when_there_is_one(num_tokens: int, seq_len: int, fraction: float) -> None:
    message = token_shortage(num_tokens, seq_len, fraction)
    num_samples = num_windows(num_tokens, seq_len)
    assert (message is None) == (num_samples - num_validation(num_samples, fraction) >= 1)
    if message and "or less" in message:
        fits = int(message.split("set train.seq_len to ")[1].split()[0])
        assert token_shortage(num_tokens, fits, fraction) is None
        assert token_shortage(num_tokens, fits + 1, fraction) is not None


def test_user_data_is_found_in_the_working_directory(section: DataSection) -> None:
    mine = section.replace(source="user_waves:Waves", options={"num_samples": 20, "length": 6})
    dataset = build_dataset(mine, seq_len=3)
    assert (dataset.num_training_samples, dataset.num_validation_samples, dataset.vocab_size) == (14, 6, None)
    inputs, target = dataset.validation_sample(0)
    assert np.array_equal(inputs, np.sin(np.arange(6, dtype=np.float32) + 14))
    assert target == 14 % 3
    assert dataset.fingerprint["class"] == "Waves"
    assert dataset.fingerprint["options"] == {"num_samples": 20, "length": 6}


def test_user_data_is_known_by_its_samples(section: DataSection) -> None:
    def sample_hash(source: str, **options: Any) -> str:
        mine = section.replace(source=source, options=options)
        return str(build_dataset(mine, 3).fingerprint["sample_hash"])

    assert sample_hash("user_waves:Waves") == sample_hash("user_waves:Waves", length=4)
    assert sample_hash("user_waves:Waves") != sample_hash("user_waves:Waves", length=5)
    assert sample_hash("user_waves:Tensors") != sample_hash("user_waves:Waves")


def test_a_function_may_make_the_data(section: DataSection) -> None:
    assert build_dataset(section.replace(source="user_waves:make"), 3).num_training_samples == 2


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("user_wavs:Waves", {}, ConfigError, r"data.source = .*there is no module user_wavs in the working directory"),
        ("user_broken:Waves", {}, ConfigError, r"user_broken imports surely_not_installed, which is not installed"),
        ("user_waves:Wave", {}, ConfigError, r"user_waves .* has no Wave: did you mean Waves"),
        (
            "user_waves:Waves",
            {"size": 1},
            ConfigError,
            r"data.options = \{'size': 1\} do not fit user_waves:Waves.*'size'",
        ),
        ("user_waves:NoLength", {}, ConfigError, r"is a NoLength with neither numbered samples nor an iterator"),
        ("user_waves:Waves", {"num_samples": 1}, DataError, r"has 1 samples but needs 2, one of them for validation"),
        ("user_waves:Alone", {}, DataError, r"sample 0 of .* is a ndarray: it must be two values, \(inputs, targets\)"),
        ("user_waves:Triple", {}, DataError, r"sample 0 of .* is a tuple of 3: it must be two values"),
        ("user_waves:Restless", {}, DataError, r"sample 0 of .* has different values when it is read twice"),
    ],
)
def test_mistakes_in_user_data_are_explained(
    section: DataSection, source: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_dataset(section.replace(source=source, options=options), 3)


def test_all_but_the_loader_work_without_torch() -> None:
    names = ("sources", "tokenizer", "cache", "dataset", "order", "data_problems", "user_data")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        + "".join(f"import meshwright.data.{name}\n" for name in names)
        + "assert 'pyarrow' not in sys.modules and 'tokenizers' not in sys.modules\n"
        + "from meshwright.data.data_problems import problems\n"
        + "from meshwright.spec.job.sections import DataSection\n"
        + "print(problems(DataSection(), 256, 257))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_store_that_does_not_answer_is_to_be_retried(section: DataSection) -> None:
    source = {"source": "user_waves:unreachable"}
    with pytest.raises(
        DataUnavailable, match=r"reading sample 7 of data\.source = .*ConnectionError.*user_waves"
    ) as one:
        build_dataset(section.replace(**source), 8).read(7)
    assert one.value.exit_code is ExitCode.RETRY
    with pytest.raises(DataUnavailable, match="building data"):
        build_dataset(section.replace(**source, options={"fails_at": -1}), 8)


@pytest.mark.parametrize("name", ["missing", "full"])
def test_an_error_that_another_attempt_gets_again_is_not(section: DataSection, name: str) -> None:
    dataset = build_dataset(section.replace(source=f"user_waves:{name}"), 8)
    with pytest.raises(OSError):
        dataset.read(7)
