"""Imports of torch.save files and torch.distributed.checkpoint folders, against a Llama with complex RoPE as Meta's."""

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata

from hf_models import NARROW, architecture, some_tokens, write_hf
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.torch_formats.dcp_folder import read_dcp_metadata
from meshwright.errors import CheckpointError, ConfigError, DamagedCheckpoint, UnsupportedError
from meshwright.inference.loaded_model import load_model
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_to_hf

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def meta_state(model: LlamaArchitecture) -> dict[str, Tensor]:
    """Return random weights under Meta's names."""
    generator = torch.Generator().manual_seed(3)
    kv_dim = model.num_kv_heads * model.head_dim
    shapes = {"tok_embeddings": (model.vocab_size, model.dim), "output": (model.vocab_size, model.dim)}
    for i in range(model.num_layers):
        shapes |= {
            f"layers.{i}.attention.wq": (model.attention_dim, model.dim),
            f"layers.{i}.attention.wk": (kv_dim, model.dim),
            f"layers.{i}.attention.wv": (kv_dim, model.dim),
            f"layers.{i}.attention.wo": (model.dim, model.attention_dim),
            f"layers.{i}.feed_forward.w1": (model.ffn_dim, model.dim),
            f"layers.{i}.feed_forward.w2": (model.dim, model.ffn_dim),
            f"layers.{i}.feed_forward.w3": (model.ffn_dim, model.dim),
        }
    state = {f"{name}.weight": torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}
    norms = ["norm", *(f"layers.{i}.{kind}_norm" for i in range(model.num_layers) for kind in ("attention", "ffn"))]
    return state | {f"{name}.weight": 1 + torch.randn(model.dim, generator=generator) / 5 for name in norms}


def meta_logits(model: LlamaArchitecture, state: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Return what Llama computes by its paper and Meta's convention: neighbouring elements are one complex number."""
    seq_len, head_dim = tokens_BS.shape[1], model.head_dim
    frequencies = model.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    turns = torch.polar(torch.ones(seq_len, head_dim // 2), torch.outer(torch.arange(seq_len).float(), frequencies))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.norm_eps) * state[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ state[f"{name}.weight"].T).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    x = state["tok_embeddings.weight"][tokens_BS]
    for i in range(model.num_layers):
        at, ffn = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        y = norm(x, f"layers.{i}.attention_norm")
        query, key, value = rotate(heads(y, f"{at}.wq")), rotate(heads(y, f"{at}.wk")), heads(y, f"{at}.wv")
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ state[f"{at}.wo.weight"].T
        y = norm(x, f"layers.{i}.ffn_norm")
        gated = F.silu(y @ state[f"{ffn}.w1.weight"].T) * (y @ state[f"{ffn}.w3.weight"].T)
        x = x + gated @ state[f"{ffn}.w2.weight"].T
    return norm(x, "norm") @ state["output.weight"].T


def write_config(folder: Path, model: LlamaArchitecture) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(model)))


def save_file(state: dict[str, Any], folder: Path) -> Path:
    torch.save({**state, "rope.freqs": torch.ones(4)}, folder / "consolidated.00.pth")
    return folder / "consolidated.00.pth"


def save_nested_file(state: dict[str, Any], folder: Path) -> Path:
    torch.save({"model": state, "train_state": {"step": 7}, "optimizer": {"a": torch.ones(2)}}, folder / "last.pt")
    return folder / "last.pt"


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    # As torchtitan writes it: the model flat, next to the optimizer and the position.
    extra = {"optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(32)}}}, "train_state": {"step": 7}}
    dcp.save({**state, **extra}, checkpoint_id=folder, no_dist=True)
    return folder


WRITERS: list[Callable[[dict[str, Any], Path], Path]] = [save_file, save_nested_file, save_dcp]


@pytest.mark.parametrize("save", WRITERS)
@pytest.mark.parametrize("changes", [{}, NARROW], ids=["square", "narrow"])
def test_metas_names_and_rope_give_metas_logits(
    tmp_path: Path, save: Callable[[dict[str, Any], Path], Path], changes: dict[str, Any]
) -> None:
    model = architecture(rope_theta=10_000.0, **changes)
    state = meta_state(model)
    write_config(tmp_path / "meta", model)
    source = save(state, tmp_path / "meta")
    imported = import_folder(source, tmp_path / "run")
    assert sum(map(len, imported.dropped.values())) == {save_file: 1, save_nested_file: 2, save_dcp: 2}[save]
    expected = meta_logits(model, state, some_tokens())
    assert expected.std() > 0.1
    with torch.inference_mode():
        logits = load_model(tmp_path / "run", device=torch.device("cpu")).model(some_tokens())
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_names_of_hugging_face_with_the_prefix_of_a_wrapper(tmp_path: Path, kind: str, prefix: str) -> None:
    write_hf(tmp_path / "theirs", kind, dtype=torch.bfloat16)
    import_folder(tmp_path / "theirs", tmp_path / "expected")
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    torch.save({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / "a.pt")
    import_folder(tmp_path / "a.pt", tmp_path / "run", config=tmp_path / "theirs")
    expected, found = (load_parameters(tmp_path / run / "checkpoints" / "step-0") for run in ("expected", "run"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3"])
def test_fused_tensors_of_transformers_5_are_those_of_its_folder(tmp_path: Path, kind: str) -> None:
    options = {"pad_token_id": None} if kind == "phi3" else {}
    state = write_hf(tmp_path / "theirs", kind, **options).state_dict()
    if kind != "phi3" and not any(name.endswith("experts.gate_up_proj") for name in state):
        pytest.skip("transformers 4 does not fuse experts")
    import_folder(tmp_path / "theirs", tmp_path / "expected")
    torch.save(state, tmp_path / "a.pt")
    dcp.save({f"model.{name}": tensor for name, tensor in state.items()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = load_parameters(tmp_path / "expected" / "checkpoints" / "step-0")
    for source in ("a.pt", "dcp"):
        import_folder(tmp_path / source, tmp_path / f"run-{source}", config=tmp_path / "theirs")
        found = load_parameters(tmp_path / f"run-{source}" / "checkpoints" / "step-0")
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    model = architecture()
    state = meta_state(model)
    write_config(tmp_path / "meta", model)

    def imported(**changes: Any) -> None:
        torch.save({**state, **changes}, tmp_path / "meta" / "a.pt")
        import_folder(tmp_path / "meta" / "a.pt", tmp_path / "run")

    with pytest.raises(ConfigError, match=r"1 unknown: layers\.0\.attention\.bias"):
        imported(**{"layers.0.attention.bias": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"norm\.weight is \[31\], the architecture has \[32\]"):
        imported(**{"norm.weight": torch.ones(31)})
    with pytest.raises(UnsupportedError, match=r"holds norm\.weight as torch\.int64"):
        imported(**{"norm.weight": torch.ones(32, dtype=torch.int64)})
    torch.save({"weight": torch.ones(1)}, tmp_path / "meta" / "a.pt")
    with pytest.raises(ConfigError, match=r"holds weight, but no embedding under a name that is known"):
        import_folder(tmp_path / "meta" / "a.pt", tmp_path / "run")
    (tmp_path / "meta" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json, and .*a\.pt does not describe .*--config FOLDER"):
        import_folder(tmp_path / "meta" / "a.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Evil:
    """An object whose unpickling calls os.mkdir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_no_pickle_runs_code(tmp_path: Path) -> None:
    write_config(tmp_path / "meta", architecture())
    torch.save({"tok_embeddings.weight": Evil(tmp_path / "made")}, tmp_path / "meta" / "a.pt")
    with pytest.raises(CheckpointError, match=r"with weights_only \(it names posix\.mkdir, .*: save a state_dict"):
        import_folder(tmp_path / "meta" / "a.pt", tmp_path / "run")
    (tmp_path / "meta" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(
        CheckpointError, match=r"\.metadata cannot be read \(it names posix\.mkdir, which no such index"
    ):
        import_folder(tmp_path / "meta", tmp_path / "run")
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def dcp_index(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The .metadata of a small folder."""
    folder = tmp_path_factory.mktemp("dcp")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.ones(2, 3), "b": {"c": torch.ones(4), "step": 3}}, checkpoint_id=folder, no_dist=True)
    tensors, others = read_dcp_metadata(folder)
    assert ({name: tensor.shape for name, tensor in tensors.items()}, others) == (
        {"a": (2, 3), "b.c": (4,)},
        ["b.step"],
    )
    return (folder / ".metadata").read_bytes()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_index_is_read_or_is_an_error(
    dcp_index: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(dcp_index)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("changed")
    (folder / ".metadata").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        tensors, _ = read_dcp_metadata(folder)
        assert all(sum(shard.box.numel for shard in t.shards) == torch.Size(t.shape).numel() for t in tensors.values())


def test_a_file_that_cannot_be_read_comes_without_the_advice_of_torch(tmp_path: Path) -> None:
    write_config(tmp_path, architecture())
    contents = {
        "it ends too early": b"",
        "it is damaged or holds more": pickle.dumps([1], protocol=0)[:-1] + b"\x00.",
    }
    for reason, content in contents.items():
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"\({reason}[^.]*\): copy it again") as caught:
            import_folder(tmp_path / "a.pt", tmp_path / "run")
        assert "set to `False`" not in str(caught.value)


def test_a_folder_without_its_index_is_named(tmp_path: Path) -> None:
    write_config(tmp_path / "meta", architecture())
    save_dcp(meta_state(architecture()), tmp_path / "meta")
    (tmp_path / "meta" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"holds __0_0\.distcp of torch.* but not its index \.metadata"):
        import_folder(tmp_path / "meta", tmp_path / "run")


def test_an_index_of_an_older_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before_3_11_4(member: Any, _: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", before_3_11_4)
    model = architecture()
    write_config(tmp_path / "meta", model)
    save_dcp(meta_state(model), tmp_path / "meta")
    assert b"getattr" in (tmp_path / "meta" / ".metadata").read_bytes()
    import_folder(tmp_path / "meta", tmp_path / "run")


def test_a_damaged_shard_is_an_error(tmp_path: Path) -> None:
    model = architecture()
    write_config(tmp_path / "meta", model)
    save_dcp(meta_state(model), tmp_path / "meta")
    data = tmp_path / "meta" / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        import_folder(tmp_path / "meta", tmp_path / "run")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read \(No such file"):
        import_folder(tmp_path / "meta", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def flip_a_weight(file: Path, tensor: Tensor) -> None:
    """Change one bit of the tensor's bytes in a file that holds them as they are."""
    content = bytearray(file.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 5] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("save", WRITERS)
def test_a_flipped_bit_is_damage(tmp_path: Path, save: Callable[[dict[str, Any], Path], Path]) -> None:
    model = architecture()
    state = meta_state(model)
    write_config(tmp_path / "meta", model)
    source = save(state, tmp_path / "meta")
    file = source if source.is_file() else source / "__0_0.distcp"
    flip_a_weight(file, state["layers.1.attention.wq.weight"])
    with pytest.raises(DamagedCheckpoint, match=rf"{file.name}: the bytes of .*data.* do not have the checksum"):
        import_folder(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["legacy", "no checksums"])
def test_a_file_without_checksums_is_read_with_a_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, architecture())
    torch.serialization.set_crc32_options(kind == "legacy")
    try:
        options = {"_use_new_zipfile_serialization": kind != "legacy"}
        torch.save(meta_state(architecture()), tmp_path / "a.pt", **options)
    finally:
        torch.serialization.set_crc32_options(True)
    import_folder(tmp_path / "a.pt", tmp_path / "run")
    assert "a.pt has no checksums, so a change of its bytes would not be noticed" in caplog.text
    assert load_parameters(tmp_path / "run" / "checkpoints" / "step-0")


def test_a_text_file_is_said_to_be_no_file_of_torch(tmp_path: Path) -> None:
    write_config(tmp_path, architecture())
    (tmp_path / "a.pt").write_text("hello")
    with pytest.raises(
        CheckpointError, match=r"\(it is no file that torch\.save wrote, or is damaged\): copy it again"
    ):
        import_folder(tmp_path / "a.pt", tmp_path / "run")
