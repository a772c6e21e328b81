"""A model scored through lm-evaluation-harness by us and by its own class for transformers: the same numbers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from hf_models import architecture, require_transformers, write_run
from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.errors import ConfigError, DataError, UnsupportedError
from meshwright.inference.harness_run import HarnessOptions, run_harness
from meshwright.inference.loaded_model import load_model

lm_eval = pytest.importorskip("lm_eval", reason="needs meshwright[eval]")
pytestmark = [
    pytest.mark.slow,
    # Of lm_eval and what it imports.
    pytest.mark.filterwarnings("ignore"),
]

MAX_TOKENS = 128
DOCUMENTS = [
    {"query": "The sky is", "choices": ["blue", "wet and green"], "answer": 0, "text": "Short.", "prompt": "One"},
    {"query": "Größe: ", "choices": ["zwölf", "süß", "x"], "answer": 1, "text": "Ä ö ü. " * 40, "prompt": "Two "},
    {"query": "", "choices": ["a", "bc"], "answer": 1, "text": "x", "prompt": "def f(x):\n"},
    {"query": "word " * 60, "choices": ["yes", "no"], "answer": 0, "text": "word " * 60, "prompt": "word " * 60},
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: byte_perplexity}]
""",
    "prompts": """
output_type: generate_until
doc_to_text: prompt
doc_to_target: text
generation_kwargs: {until: ["zq"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder, next to the tasks' files in the working directory."""
    require_transformers()
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/documents.jsonl}}\ntest_split: train\n"
        Path(f"{name}.yaml").write_text(f"task: {name}\n{source}{text}")
    write_run(tmp_path / "run", architecture(max_seq_len=MAX_TOKENS, vocab_size=257))
    mw.export(tmp_path / "run", tmp_path / "exported")
    return tmp_path / "exported"


def answers(model: Any, **options: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the results of all tasks, and of each task what the model answered to each request."""
    tasks = [f"{name}.yaml" for name in TASKS]
    found = lm_eval.simple_evaluate(model=model, tasks=tasks, log_samples=True, bootstrap_iters=0, **options)
    answered = {name: [sample["filtered_resps"] for sample in found["samples"][name]] for name in TASKS}
    return found["results"], answered


def test_the_numbers_are_those_of_their_own_model(exported: Path) -> None:
    model_class = import_module("meshwright.inference.harness_model").HarnessModel
    loaded = load_model(exported)
    assert loaded.tokenizer is not None
    encoder = ContinuationEncoder(loaded.tokenizer, MAX_TOKENS, loaded.start)
    arguments = {"pretrained": str(exported), "dtype": "float32", "device": "cpu", "batch_size": 2}
    their_results, theirs = answers("hf", model_args=arguments)
    our_results, ours = answers(model_class(loaded, encoder, batch_size=3))
    for their_answer, our_answer in zip(theirs["choices"], ours["choices"], strict=True):
        assert [value for value, _ in our_answer] == pytest.approx([value for value, _ in their_answer], abs=1e-4)
        assert [is_greedy for _, is_greedy in our_answer] == [is_greedy for _, is_greedy in their_answer]
    for their_answer, our_answer in zip(theirs["texts"], ours["texts"], strict=True):
        assert our_answer == pytest.approx(their_answer, abs=1e-4, rel=1e-6)
    assert ours["prompts"] == theirs["prompts"]
    for name in ("acc,none", "acc_norm,none", "acc_bytes,none"):
        assert our_results["choices"][name] == their_results["choices"][name]


def test_a_task_measures_what_its_file_of_questions_does(exported: Path) -> None:
    found = mw.evaluate(exported, ["documents.jsonl", "choices.yaml"], limit=3)
    assert found.max_tokens == MAX_TOKENS
    own, theirs = found.measures[:3], found.measures[3:]
    assert [one._replace(task="choices") for one in own] == [
        one._replace(standard_error=pytest.approx(one.standard_error)) for one in theirs
    ]
    assert {one.num_questions for one in found.measures} == {3}


def test_unknown_tasks_and_arguments_are_named(exported: Path) -> None:
    loaded, options = load_model(exported), HarnessOptions(2, None, None)
    assert loaded.tokenizer is not None
    encoder = ContinuationEncoder(loaded.tokenizer, MAX_TOKENS)
    with pytest.raises(ConfigError, match=r"--tasks arc_eazy: neither a file nor .*did you mean arc_easy"):
        run_harness(loaded, encoder, ["arc_eazy"], options)
    Path("lost.yaml").write_text(Path("texts.yaml").read_text().replace("documents.jsonl", "gone.jsonl"))
    with pytest.raises(DataError, match=r"the data of --tasks lost.yaml cannot be read \(.*gone.jsonl"):
        run_harness(loaded, encoder, ["lost.yaml"], options)
    task = Path("prompts.yaml")
    text = task.read_text()
    task.write_text(text.replace("max_gen_toks: 12", "num_beams: 2"))
    with pytest.raises(UnsupportedError, match="generation_kwargs hold num_beams, which generation here"):
        run_harness(loaded, encoder, ["prompts.yaml"], options)
    task.write_text(text.replace("max_gen_toks: 12", "max_gen_toks: 128"))
    with pytest.raises(ConfigError, match="asks for up to 128 new tokens, but the model reads 128"):
        run_harness(loaded, encoder, ["prompts.yaml"], options)
