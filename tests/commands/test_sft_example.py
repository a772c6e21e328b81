"""The example of supervised fine-tuning, from its conversations to an answer, as a user calls the commands."""

import json
from pathlib import Path

import pytest

import meshwright as mw
from hf_models import architecture, write_run
from meshwright.cli.main import run
from repository import ROOT
from training_runs import TINY_MODEL

EXAMPLE = str(ROOT / "examples" / "tiny-sft.toml")
SMALL = [f"model.options.{key}={value}" for key, value in TINY_MODEL["options"].items()]


@pytest.mark.slow
def test_from_conversations_to_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    words = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}", "run.device=cpu"]
    with pytest.raises(SystemExit) as end:
        run(["train", EXAMPLE, *words, *SMALL, "train.steps=3", "checkpoint.export=float32"])
    assert end.value.code == 0
    capsys.readouterr()
    say = ["--chat", "--prompt", "Count to two.", "--temperature", "0", "--max-new-tokens", "8"]
    assert run(["generate", str(tmp_path / "run"), *say, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["text"]
    assert not answer.startswith("Count")
    exported = tmp_path / "run" / "exports" / "step-3"
    # The folder answers the same, and transformers renders the same prompt.
    assert mw.generate(exported, "Count to two.", temperature=0, max_new_tokens=8, chat=True) == answer
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "Count to two."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "user:\nCount to two.\nassistant:\n"
    said = [*messages, {"role": "assistant", "content": "one, two."}]
    found = tokenizer.apply_chat_template(said, return_dict=True, return_assistant_tokens_mask=True)
    learned = [
        token for token, is_target in zip(found["input_ids"], found["assistant_masks"], strict=True) if is_target
    ]
    assert tokenizer.decode(learned) == "one, two.<|end_of_text|>"
    # And a further training starts from it, with its template.
    again = [f"model.source={exported / 'config.json'}", f"model.initial_weights={exported}"]
    assert run(["check", EXAMPLE, *again, f"data.tokenizer={exported}", f"run.dir={tmp_path / 'again'}"]) == 0


def test_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", architecture())
    assert run(["generate", str(tmp_path / "run"), "--chat", "--prompt", "Hi"]) == 2
    assert "has no chat template, which --chat needs" in capsys.readouterr().err
