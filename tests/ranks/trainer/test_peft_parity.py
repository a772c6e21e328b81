"""Adapters next to PEFT: the same loss and gradients, and files that both read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from hf_models import some_tokens, their_logits, write_hf
from meshwright.app.conversion.exchange import export
from meshwright.data.loader import Microbatch
from meshwright.inference.loaded_model import load_model
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_ranks

peft: Any = pytest.importorskip("peft", reason="needs PEFT, to compare with")
transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which PEFT adapts")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

THEIRS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def write_adapter(base: Path, folder: Path, kind: str, **options: Any) -> Any:
    """Write an adapter of random numbers of the Llama in `base` as PEFT does, and return PEFT's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given = {"r": 4, "lora_alpha": 10, "target_modules": "all-linear", "use_dora": kind == "dora", **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(0.0, 0.2)
    adapted.save_pretrained(folder)
    return adapted


def job_of(folder: Path, base: Path, **adapter: Any) -> dict[str, Any]:
    job = tiny_job(
        folder,
        adapter={"rank": 4, "alpha": 10.0, **adapter},
        train={"seq_len": 48, "global_batch_size": 2, "steps": 3},
        optimizer={"max_grad_norm": 0.0},
        layout={"microbatch_size": 1},
    )
    job["model"] = {"source": str(base / "config.json"), "initial_weights": str(base)}
    return job


def losses_and_gradients(job: dict[str, Any]) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """Return the loss of one step on `some_tokens`, and its gradients by our names."""
    training = Training.build(Job.from_dict(job), Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    found: dict[str, np.ndarray[Any, Any]] = {}

    def keep(model: Any) -> None:
        for name, parameter in canonical_parameters(model):
            if parameter.grad is not None:
                gradient = parameter.grad
                found[name] = np.array(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)

    training.step.observe_gradients = keep
    tokens_BS = some_tokens()
    rows = [Microbatch(tokens_BS[i : i + 1], tokens_BS[i : i + 1].roll(-1, 1), i) for i in range(2)]
    share = rows[dist.get_rank() :: dist.get_world_size()]
    return training.step(1, share).loss, found


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_loss_and_gradients_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_hf(base, "llama")
    theirs = write_adapter(base, adapter, kind)
    job = job_of(tmp_path, base, kind=kind, initial=str(adapter))
    (loss, gradients), _ = run_ranks(losses_and_gradients, 2, job)
    tokens_BS = some_tokens()
    logits_BSV = theirs(tokens_BS).logits
    their_loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.roll(-1, 1).flatten())
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    named = {name.replace(".default", ""): one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    assert len(gradients) == len(named) == 2 * 7 * (3 if kind == "dora" else 2)
    for layer in range(2):
        for ours, their_name in MODULES.items():
            for part in ("lora_a", "lora_b", *(["magnitude"] if kind == "dora" else [])):
                prefix = f"base_model.model.model.layers.{layer}.{their_name}.{THEIRS[part]}"
                expected = np.array(named.get(prefix, named.get(f"{prefix}.weight")))
                found = gradients[f"blocks.{layer}.{ours}.{part}"]
                scale = np.abs(expected).max()
                assert scale > 0
                np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=0, err_msg=prefix)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_trained_adapter_computes_the_same_in_peft_merged_and_again_here(tmp_path: Path, kind: str) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    write_hf(base, "llama")
    job = job_of(tmp_path, base, kind=kind, targets=["blocks.*.attention.*", "blocks.1.ffn.down"])
    finished = train_on_ranks(job, run, 2)
    assert finished.losses[3] != finished.losses[1]
    export(run, tmp_path / "adapter")
    export(run, tmp_path / "merged", merge=True, verify=True)
    tokens_BS = some_tokens()
    with torch.inference_mode():
        ours = load_model(run, device=torch.device("cpu")).model(tokens_BS)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = model(tokens_BS).logits
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()(tokens_BS).logits
    assert float((theirs - before).abs().max()) > 1e-2
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(their_logits(tmp_path / "merged", tokens_BS), theirs, atol=1e-5, rtol=0)
    # And as a start of another run: nothing is lost on the way.
    again = {**job, "adapter": {**job["adapter"], "initial": str(tmp_path / "adapter")}}
    again["optimizer"] = {**again["optimizer"], "learning_rate": 1e-20}
    train_on_ranks(again, tmp_path / "again", 1)
    with torch.inference_mode():
        torch.testing.assert_close(load_model(tmp_path / "again").model(tokens_BS), ours, atol=1e-6, rtol=0)


def test_an_adapter_of_other_layers_or_sizes_is_refused_by_name(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_hf(base, "llama")
    write_adapter(base, adapter, "lora", target_modules=["q_proj", "v_proj"])
    for changes, message in (
        ({}, "has no use for|lacks"),
        ({"rank": 8}, "has rank 4, and adapter.rank = 8: set adapter.rank to 4"),
        ({"kind": "dora"}, 'set adapter.kind to "lora"'),
        ({"initial": str(base)}, "holds no adapter_config.json"),
    ):
        job = job_of(tmp_path, base, **{"kind": "lora", "initial": str(adapter), **changes})
        with pytest.raises(AssertionError, match=message):
            run_ranks(losses_and_gradients, 1, job)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    job = job_of(tmp_path, base, kind="lora", initial=str(adapter), targets=["blocks.*.query", "blocks.*.value"])
    with pytest.raises(AssertionError, match=r"has use_rslora = True in adapter_config\.json, which is not built"):
        run_ranks(losses_and_gradients, 1, job)
