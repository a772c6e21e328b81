"""`section.key=value`: how text becomes a value, and what is no override."""

from pathlib import Path

import pytest

from meshwright.config.key_problems import override_value
from meshwright.config.load import load_job
from meshwright.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text('[train]\nsteps = 20\nstop_after = 15\n[run]\ndir = "here"\n')
    return file


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=30", "train", "steps", 30),
        ("train.steps = 30", "train", "steps", 30),
        ("train.stop_after=none", "train", "stop_after", None),
        ("run.dir=none", "run", "dir", None),
        ("run.dir=runs/a b=c", "run", "dir", "runs/a b=c"),
        ("run.dir='quoted'", "run", "dir", "quoted"),
        ("run.dir=2024", "run", "dir", "2024"),
        ("run.dir=true", "run", "dir", "true"),
        ("data.source=[1]", "data", "source", "[1]"),
        ("layout.activation_checkpoint=none", "layout", "activation_checkpoint", "none"),
        ("optimizer.betas=[0.8, 0.9]", "optimizer", "betas", (0.8, 0.9)),
        ("optimizer.learning_rate=1e-4", "optimizer", "learning_rate", 1e-4),
        ("data.shuffle=false", "data", "shuffle", False),
        ("model.options={num_layers = 2}", "model", "options", {"num_layers": 2}),
        ("model.options.num_layers=2", "model", "options", {"num_layers": 2}),
        ("data.options.file=my.wav", "data", "options", {"file": "my.wav"}),
        ("data.options.deep.er=1", "data", "options", {"deep": {"er": 1}}),
        ("train.global_batch_tokens=0.512M", "train", "global_batch_tokens", 512_000),
    ],
)
def test_text_becomes_the_value_that_was_meant(
    file: Path, override: str, section: str, key: str, value: object
) -> None:
    resolved = load_job(file, [override])
    assert getattr(getattr(resolved.job, section), key) == value
    assert resolved.origins[f"{section}.{key}"] == "command line"


def test_a_key_may_take_a_word_or_a_number() -> None:
    texts = {"layout.reshard_after_forward": ["4", "never", "true"], "layout.stage_boundaries": ["[1, 3]"]}
    values = {dotted: [override_value(dotted, text) for text in given] for dotted, given in texts.items()}
    assert values == {"layout.reshard_after_forward": [4, "never", "true"], "layout.stage_boundaries": [[1, 3]]}


def test_the_last_one_counts(file: Path) -> None:
    assert load_job(file, ["train.steps=30", "train.steps=40"]).job.train.steps == 40


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "'train.steps' is no override: write section.key=value, such as train.steps=200"),
        ("train={}", "'train={}' replaces the whole section: write train.key=value for each key"),
        ("train.step=3", "train.step is an unknown key: did you mean train.steps?"),
        ("lr=3", "lr is an unknown key: did you mean optimizer.learning_rate?"),
        ("train.steps.x=3", "train.steps.x is an unknown key: leave it out, or use one of [train]'s keys: task, "
         "steps, stop_after, seq_len, global_batch_size, global_batch_tokens, seed, exact_elastic, "
         "validation_interval, validation_batches"),
        ("train.steps=many", 'train.steps = "many" must be a whole number, 1 or more: change it, or leave it out for '
         "the default 100"),
        ("train.steps=1\ntrain.seed=2", 'train.steps = "1\\ntrain.seed=2" must be a whole number, 1 or more: change '
         "it, or leave it out for the default 100"),
        ("model.options.=1", 'model.options."" is an unknown key: leave it out, or use one of [model]\'s keys: '
         "source, options, initial_weights"),
    ],
)  # fmt: skip
def test_what_is_no_override(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(file, [override])
    assert str(caught.value) == f"command line: {message}"


def test_a_section_that_is_no_table_stays_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("train = 5\n")
    with pytest.raises(ConfigError, match="train = 5 is no table"):
        load_job(file, ["train.steps=3"])
