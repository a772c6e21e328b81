"""Job files to jobs: origins, and what one is told about a file that is wrong."""

import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.load import inspect_job, load_job
from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def refusal(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *overrides: str) -> str:
    """Return the message for a job file called job.toml in the working directory."""
    write(folder, text)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        load_job("job.toml", overrides)
    return str(caught.value)


def test_an_empty_file_is_the_default_job(tmp_path: Path) -> None:
    resolved = load_job(write(tmp_path, ""))
    assert resolved.job == Job()
    assert set(resolved.origins.values()) == {"default"}


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    text = '[train]\nsteps = 7\nseq_len = 64\n\n[model]\noptions.num_layers = 2\noptions."head_dim" = 32\n'
    file = write(tmp_path, text)
    resolved = load_job(file, ["train.seq_len=32", "model.options.vocab_size=512", "run.dir=here"])
    assert resolved.job.train.steps == 7
    assert resolved.job.train.seq_len == 32
    assert resolved.job.model.options == {"num_layers": 2, "head_dim": 32, "vocab_size": 512}
    given = {key: origin for key, origin in resolved.origins.items() if origin != "default"}
    assert given == {
        "train.steps": f"{file}:2",
        "train.seq_len": "command line",
        "model.options": "command line",
        "model.options.num_layers": f"{file}:6",
        "model.options.head_dim": f"{file}:7",
        "model.options.vocab_size": "command line",
        "run.dir": "command line",
    }


def test_the_run_folder_is_named_by_the_job_file(tmp_path: Path) -> None:
    file = write(tmp_path, "", name="first.toml")
    assert load_job(file).run_dir == Path("runs/first")
    assert load_job(file, ["run.dir=elsewhere"]).run_dir == Path("elsewhere")
    assert load_job(file).folder == tmp_path


def test_a_count_of_tokens_may_have_a_suffix(tmp_path: Path) -> None:
    file = write(tmp_path, '[train]\nglobal_batch_tokens = "1.024M"\n')
    assert load_job(file).job.train.global_batch_tokens == 1_024_000
    assert load_job(file, ["train.global_batch_tokens=512k"]).job.train.global_batch_tokens == 512_000
    with pytest.raises(ConfigError, match=r"train\.steps"):
        load_job(file, ["train.steps=1k"])


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_job(file).origins["train.steps"] == f"{file}:2"


EVERYTHING_WRONG = """\
schema_version = 1
steps = 3

[model]
sauce = "llama-1m"

[training]
lr = 1e-3
seq_len = 512

[train]
global_batch_tokens = "lots"
seed = -1
stop_after = 200

[optimizer]
lr = 3e-4
betas = [0.9, 1]
learning_rate = "1e-3"
schedule = "Cosine "
warmup_steps = 10.0

[data]
validation_fraction = 2
shuffle = "yes"
text_key = 5
options = { when = 1979-05-27 }

[layout]
tp = 0
dp = 3
reshard_after_forward = true

[precision]
compute = "fp16"

[parallelism]
tensor_parallel_degree = 8

[notes]
by = "me"
"""

EVERYTHING_TOLD = """\
job.toml has 21 problems:
  1. job.toml:2: steps = 3 is an unknown key: did you mean train.steps?
  2. job.toml:5: model.sauce = "llama-1m" is an unknown key: did you mean model.source?
  3. job.toml:7: [training] is no section of a job: did you mean [train]?
  4. job.toml:8: training.lr = 0.001 is an unknown key: did you mean optimizer.learning_rate?
  5. job.toml:12: train.global_batch_tokens = "lots" must be a whole number, 1 or more, or a count such as "4M" \
(4_000_000): change it, or leave it out
  6. job.toml:13: train.seed = -1 must be a whole number, 0 or more: write train.seed = 0
  7. job.toml:17: optimizer.lr = 0.0003 is an unknown key: did you mean optimizer.learning_rate?
  8. job.toml:18: optimizer.betas = [0.9, 1] must be a list of 2 numbers, each 0 or more and below 1: change it, or \
leave it out for the default [0.9, 0.95]
  9. job.toml:19: optimizer.learning_rate = "1e-3" must be a number, above 0: write optimizer.learning_rate = 0.001
  10. job.toml:20: optimizer.schedule = "Cosine " must be "cosine" or "linear" or "wsd" or "constant": write \
optimizer.schedule = "cosine"
  11. job.toml:21: optimizer.warmup_steps = 10.0 must be a whole number, 0 or more: write optimizer.warmup_steps = 10
  12. job.toml:24: data.validation_fraction = 2 must be a number, 0 or more and below 1: write \
data.validation_fraction = 0.02
  13. job.toml:25: data.shuffle = "yes" must be true or false: write data.shuffle = true
  14. job.toml:26: data.text_key = 5 must be a string: write data.text_key = "5"
  15. job.toml:27: data.options.when = 1979-05-27 is neither a string, a finite number, true or false, nor a list or \
table of them: write it as one of these
  16. job.toml:30: layout.tp = 0 must be a whole number, 1 or more, or -1 for the rest of the ranks: write layout.tp = 1
  17. job.toml:31: layout.dp = 3 is an unknown key: did you mean layout.dp_shard?
  18. job.toml:32: layout.reshard_after_forward = true must be "auto" or "always" or "never", or a whole number, 1 or \
more: write layout.reshard_after_forward = "always"
  19. job.toml:35: precision.compute = "fp16" must be "float32" or "bfloat16" or "float64": write \
precision.compute = "bfloat16"
  20. job.toml:38: parallelism.tensor_parallel_degree = 8 is an unknown key: did you mean layout.tp?
  21. job.toml:40: [notes] is no section of a job: leave it out, or use one of model, adapter, data, train, \
evaluation, dpo, optimizer, precision, layout, memory, cluster, planner, checkpoint, guards, replicas, run"""


def test_everything_wrong_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusal(monkeypatch, tmp_path, EVERYTHING_WRONG) == EVERYTHING_TOLD


CONTRADICTIONS = """\
[model]
source = "llama3-8x"
[train]
steps = 100
stop_after = 200
seq_len = 1000
global_batch_tokens = 4_096
[optimizer]
warmup_steps = 101
[layout]
pp = -1
tp = -1
[data]
validation_fraction = 0.0
"""

CONTRADICTIONS_TOLD = """\
job.toml has 6 problems:
  1. job.toml:10: layout.pp = -1 and layout.tp = -1 both ask for the rest of the ranks: give all but one of them a \
number
  2. job.toml:7: train.global_batch_tokens = 4096 is no multiple of train.seq_len = 1000: set \
train.global_batch_tokens to 4000 or 5000
  3. job.toml:5: train.stop_after = 200 lies after train.steps = 100: set train.stop_after to 100, or leave \
train.stop_after out
  4. job.toml:9: optimizer.warmup_steps = 101 is more than train.steps = 100: set optimizer.warmup_steps to 100 or \
less
  5. command line: train.validation_interval = 5 but data.validation_fraction = 0 keeps no samples for validation: \
set train.validation_interval to 0, or data.validation_fraction to 0.02
  6. job.toml:2: model.source = 'llama3-8x' is no preset, no file and no my_module:MyModel: did you mean llama3-8b? \
(`meshwright list models` shows the presets)"""


def test_keys_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = refusal(monkeypatch, tmp_path, CONTRADICTIONS, "train.validation_interval=5")
    assert message == CONTRADICTIONS_TOLD


def test_what_follows_from_a_wrong_key_is_left_unsaid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # With the default of 100 steps, stop_after would be wrong too; but 100 is not what was meant.
    message = refusal(monkeypatch, tmp_path, '[train]\nsteps = "1k"\nstop_after = 500\n')
    assert message == 'job.toml:2: train.steps = "1k" must be a whole number, 1 or more: write train.steps = 1000'
    message = refusal(monkeypatch, tmp_path, "[tarin]\nsteps = 1000\n[train]\nstop_after = 500\n")
    assert message == "job.toml:1: [tarin] is no section of a job: did you mean [train]?"


def test_the_inspection_keeps_what_is_right(tmp_path: Path) -> None:
    inspection = inspect_job(write(tmp_path, "[train]\nsteps = 0\nseq_len = 64\n"))
    assert inspection.resolved.job.train.seq_len == 64
    assert inspection.wrong >= {"train.steps"}
    assert inspection.is_about_wrong("train.steps = 3 is odd")
    assert not inspection.is_about_wrong("train.seq_len = 3 is odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 5", "job.toml:1: train = 5 is no table of keys (How long, on how much, and from which seed.): write "
         "a line [train] and its keys below it"),
        ("schema_version = 7\n", "job.toml:1: schema_version = 7 is a newer job format than this Meshwright knows (up "
         "to 1): install a newer Meshwright, or write the job for version 1"),
        ("schema_version = 0\n", "job.toml:1: schema_version = 0 must be a whole number, 1: write schema_version = 1"),
        ("[optimizer]\nbetas = [2, 2]\n", "job.toml:2: optimizer.betas = [2, 2] must be a list of 2 numbers, each 0 or "
         "more and below 1: change it, or leave it out for the default [0.9, 0.95]"),
        ("[train]\nsteps 5\n", "job.toml:2:7: 'steps 5' is not TOML: expected '=' after a key in a key/value pair: "
         'write key = value, with "quotes" around text'),
        ("[train]\nsteps = 5\nsteps = 6\n", "job.toml:3:10: 'steps = 6' is not TOML: this key or section is set above: "
         "remove one of the two"),
        ("[train]\n[train]\n", "job.toml:2:7: '[train]' is not TOML: this key or section is set above: remove "
         "one of the two"),
        ('[run]\ndir = """x', "job.toml: the file ends in the middle of something: Unterminated string: close what is "
         "open, or remove it"),
        ('[[optimizer.groups]]\nmatch = "*.bias"\nweight_decay = "no"\n', "job.toml:1: optimizer.groups, group 1: "
         'weight_decay = "no" must be a number, 0 or more: change it, or leave it out'),
        ("[[optimizer.groups]]\nweight_decay = 0\n", "job.toml:1: optimizer.groups, group 1 has no match: add it; it "
         "must be a string"),
        ("[model.options]\nlayers = 2\n", "job.toml:1: model.options.layers is no field of the architecture of "
         "'llama-1m': did you mean num_layers? (fields: vocab_size, dim, num_layers, num_heads, num_kv_heads, "
         "head_dim, ffn_dim, norm_eps, rope_theta, rope_scaling, tie_embeddings, qk_norm, qkv_bias, "
         "sliding_window, layer_types, max_seq_len)"),
    ],
)  # fmt: skip
def test_one_mistake_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str) -> None:
    assert refusal(monkeypatch, tmp_path, text) == message


_names = st.sampled_from(
    ["train", "model", "layout", "options", "source", "steps", "tp", "betas", "x", "", "a.b", "é", "schema_version"]
)
_values = st.recursive(
    st.sampled_from([0, -1, 1.5, float("nan"), float("inf"), True, "", "4M", "\0", "~x/y", "a\nb", date(2026, 1, 2)]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)
_overrides = st.lists(st.text("=.[]{}\"'trainsteps.options#\n ", max_size=20) | _names, max_size=2)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(_names, _values, max_size=4), _overrides)
def test_whatever_toml_says_is_read_or_explained(values: dict[str, Any], overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(tomlkit.dumps(values), encoding="utf-8")
        inspection = inspect_job(file, overrides)
    for problem in inspection.problems:
        assert "\n" not in problem
        assert problem.startswith((f"{file}:", "command line: "))
    assert Job.from_json(inspection.resolved.job.to_json()) == inspection.resolved.job


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "")
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    messages = {
        "jbo.toml": "there is no job file jbo.toml: did you mean job.toml?",
        "folder/x.toml": "there is no job file folder/x.toml: `meshwright init MODEL --out folder/x.toml` writes one",
        "folder": "folder is a folder without a run: name a job file or a run folder",
        "latin.toml": "latin.toml is no UTF-8 text (byte 2): save the job file as UTF-8",
        "loop.toml": "loop.toml cannot be read (Too many levels of symbolic links): check its permissions",
    }
    for name, message in messages.items():
        with pytest.raises(ConfigError) as caught:
            load_job(name)
        assert str(caught.value) == message


def test_a_run_folder_is_its_job_and_stays_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moved").mkdir()
    Path("moved/job.toml").write_text('[train]\nsteps = 7\n[run]\ndir = "runs/first"\n')
    with pytest.raises(
        ConfigError, match=r"moved is a folder without a run: name a job file in it, such as moved/job\.toml"
    ):
        load_job("moved")  # no run
    Path("moved/manifest.json").write_text("{}")
    resolved = load_job("moved", ["train.seq_len=64"])
    assert (resolved.job.train.steps, resolved.job.train.seq_len) == (7, 64)
    assert resolved.run_dir == Path("moved")
    assert load_job(resolved.path, resolved.overrides) == resolved


def test_a_model_in_place_of_a_job_file_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="llama3-8b is a model: plan for it with `meshwright plan --model llama3-8b`"):
        load_job("llama3-8b")
