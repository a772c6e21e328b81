"""config.json: understood or refused by name, never ignored."""

from typing import Any

import pytest

from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.gpt2_architecture import GPT2Architecture, dropout_note
from meshwright.spec.model.hf.hf_config import architecture_from_hf, architecture_to_hf
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS

LLAMA = architecture_to_hf(PRESETS["llama3.1-8b"])
QWEN3 = architecture_to_hf(PRESETS["qwen3-0.6b"])


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name: str) -> None:
    assert architecture_from_hf(architecture_to_hf(PRESETS[name])) == PRESETS[name]


def test_newer_spelling_of_rope_means_the_same() -> None:
    old = dict(LLAMA)
    parameters = {"rope_theta": old.pop("rope_theta"), **old.pop("rope_scaling")}
    assert architecture_from_hf({**old, "rope_parameters": parameters}) == PRESETS["llama3.1-8b"]


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    bare = {"model_type": "llama", **{key: LLAMA[key] for key in sizes}}
    architecture = architecture_from_hf(bare)
    assert (architecture.num_kv_heads, architecture.head_dim) == (32, 128)
    assert (architecture.norm_eps, architecture.rope_theta, architecture.tie_embeddings) == (1e-6, 10_000.0, False)


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"model_type": "mamba"}, UnsupportedError, "model_type = 'mamba'"),
        (
            {"model_type": None},
            UnsupportedError,
            "llama, mistral, qwen2, .* and deepseek_v3 only",
        ),
        ({"attention_bias": True}, UnsupportedError, "attention_bias = True"),
        ({"mlp_bias": True}, UnsupportedError, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, UnsupportedError, "attention_dropout = 0.1"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "quantization_config"),
        ({"use_sliding_window": True}, UnsupportedError, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedError, "sliding_attention"),
        ({"logit_scale": 2.0}, UnsupportedError, "logit_scale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedError, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, UnsupportedError, "'linear'"),
        ({"rope_scaling": {"factor": 4.0}}, UnsupportedError, "factor with the default RoPE"),
        ({"rope_scaling": {"rope_type": "llama3"}}, ConfigError, "no rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, UnsupportedError, "partial"),
        ({"rope_scaling": "llama3"}, ConfigError, "an object was expected"),
        ({"hidden_size": None}, ConfigError, "hidden_size = null, which must be a whole number, 1 or more"),
        ({"hidden_size": -3072}, ConfigError, "hidden_size = -3072, which must"),
        ({"hidden_size": "big"}, ConfigError, 'hidden_size = "big", which must'),
        ({"num_attention_heads": "32"}, ConfigError, "num_attention_heads"),
        ({"num_key_value_heads": 7}, ConfigError, "set num_key_value_heads to 4 or 8"),
        ({"rms_norm_eps": "tiny"}, ConfigError, 'rms_norm_eps = "tiny", which must be a number'),
        (
            {"num_key_value_heads": "few"},
            ConfigError,
            'num_key_value_heads = "few", which must be a whole number, 1 or',
        ),
        ({"hidden_size": 4100, "head_dim": None}, ConfigError, "4100 does not divide"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], kind: type[MeshwrightError], told: str
) -> None:
    with pytest.raises(kind, match=told) as raised:
        architecture_from_hf({**LLAMA, **changes}, "folder/config.json")
    assert "folder/config.json" in str(raised.value)


def test_keys_that_say_nothing_are_accepted_and_no_others_that_are_unknown() -> None:
    off = {"use_mrope": False, "pruned": None, "extra": {}, "rope_interleaved": False, "names": [], "word": ""}
    known = {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True}
    known |= {"max_sequence_length": 2048, "finetuning_task": "a", "attn_implementation": "eager"}
    assert architecture_from_hf({**LLAMA, **off, **known}) == PRESETS["llama3.1-8b"]
    with pytest.raises(UnsupportedError, match="use_mrope = True, which Meshwright does not compute"):
        architecture_from_hf({**LLAMA, "use_mrope": True})
    for value in (True, False, 0, 1.5):
        with pytest.raises(UnsupportedError, match=r"has use_rope, of which .*--config of `meshwright import`"):
            architecture_from_hf({**LLAMA, "use_rope": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group = 3 with topk_group = 4 does not fit n_routed_experts = 256"),
        ({"topk_group": 1, "num_experts_per_tok": 60}, r"is more than topk_group = 1 groups .*: raise topk_group$"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads = 4 does not .*: set it to num_attention_heads = 128$"),
    ],
)
def test_errors_name_the_keys_of_the_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_from_hf({**architecture_to_hf(PRESETS["deepseek-v3"]), **changes})


def test_qwen3_normalises_queries_and_keys() -> None:
    assert architecture_from_hf(QWEN3).qk_norm
    assert QWEN3["architectures"] == ["Qwen3ForCausalLM"]


def test_a_sliding_window_is_read_and_computed() -> None:
    mistral = architecture_to_hf(PRESETS["llama3.2-1b"].replace(sliding_window=4096, rope_scaling=None))
    assert mistral["architectures"] == ["MistralForCausalLM"]
    assert architecture_from_hf(mistral).sliding_window == 4096
    assert architecture_from_hf({**mistral, "sliding_window": None}).sliding_window is None
    # Without the key transformers takes 4096.
    assert architecture_from_hf({k: v for k, v in mistral.items() if k != "sliding_window"}).sliding_window == 4096
    assert split_problems(Layout(), architecture_from_hf(mistral), 8192) == []
    with pytest.raises(UnsupportedError, match="Mistral of transformers does not read"):
        architecture_from_hf({**mistral, "layer_types": ["full_attention", *["sliding_attention"] * 15]})


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 1024, 1024]),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 1024] * 2),
        ({"use_sliding_window": True, "max_window_layers": 4}, [None] * 4),
        ({"use_sliding_window": False}, [None] * 4),
        ({}, [None] * 4),
    ],
)
def test_qwen_has_a_window_in_some_layers_where_it_is_switched_on(
    keys: dict[str, Any], windows: list[int | None]
) -> None:
    config = {**QWEN3, "num_hidden_layers": 4, "sliding_window": 1024, **keys}
    architecture = architecture_from_hf(config)
    assert [architecture.window_of(layer) for layer in range(4)] == windows
    assert architecture_from_hf(architecture_to_hf(architecture)) == architecture
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    for theirs in (config, architecture_to_hf(architecture)):
        kinds = transformers.AutoConfig.for_model(**theirs).layer_types
        assert kinds == ["full_attention" if window is None else "sliding_attention" for window in windows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types of 3 layers, but num_hidden_layers = 28"),
        ({"layer_types": ["linear_attention"] * 28}, "layers of type linear_attention in layer_types"),
        ({"layer_types": ["sliding_attention"] * 28}, "computes full_attention only without a sliding_window"),
    ],
)
def test_other_kinds_of_layers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        architecture_from_hf({**QWEN3, **changes})


PUBLISHED_GPT_OSS: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "hidden_act": "silu"},
    **{"attention_dropout": 0.0, "eos_token_id": 200002, "pad_token_id": 199999, "experts_per_token": 4},
    **{"head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12},
    **{"max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4},
    **{"num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False},
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    **{"rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128},
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    **{"swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088},
}
"""config.json of openai/gpt-oss-20b, 2026-11."""


def test_the_published_gpt_oss_is_the_preset() -> None:
    assert architecture_from_hf(PUBLISHED_GPT_OSS) == PRESETS["gpt-oss-20b"]
    sparse = {key: PUBLISHED_GPT_OSS[key] for key in PUBLISHED_GPT_OSS if key not in ("rope_scaling", "layer_types")}
    assert architecture_from_hf(sparse) == PRESETS["gpt-oss-20b"]
    larger = {**PUBLISHED_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}
    larger["layer_types"] = ["sliding_attention", "full_attention"] * 18
    assert architecture_from_hf(larger) == PRESETS["gpt-oss-120b"]
    with pytest.raises(UnsupportedError, match=r"swiglu_alpha = 1\.5"):
        architecture_from_hf({**PUBLISHED_GPT_OSS, "swiglu_alpha": 1.5})


def test_transformers_default_gpt_oss_is_the_larger_one() -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    assert architecture_from_hf(transformers.GptOssConfig().to_dict()) == PRESETS["gpt-oss-120b"]


def test_qwen2_adds_a_bias_to_queries_keys_and_values() -> None:
    qwen2 = architecture_to_hf(PRESETS["qwen3-0.6b"].replace(qk_norm=False, qkv_bias=True, head_dim=64))
    assert qwen2["architectures"] == ["Qwen2ForCausalLM"]
    architecture = architecture_from_hf(qwen2)
    assert (architecture.qkv_bias, architecture.qk_norm) == (True, False)
    plain = model_spec(architecture.replace(qkv_bias=False)).num_parameters
    biases = architecture.attention_dim + 2 * architecture.kv_dim
    assert model_spec(architecture).num_parameters - plain == architecture.num_layers * biases


PUBLISHED_GPT2: dict[str, Any] = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024},
    **{"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_positions": 1024},
    **{"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256},
    **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
    **{"summary_type": "cls_index", "summary_use_proj": True, "initializer_range": 0.02},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
"""config.json of openai-community/gpt2, 2026-11."""


def test_the_published_gpt2_is_read() -> None:
    architecture = architecture_from_hf(PUBLISHED_GPT2)
    assert isinstance(architecture, GPT2Architecture)
    assert (architecture.ffn_dim, architecture.head_dim, architecture.tie_embeddings) == (3072, 64, True)
    # The number that transformers counts.
    assert model_spec(architecture).num_parameters == 124_439_808
    assert architecture_from_hf(architecture_to_hf(architecture)) == architecture


def test_gpt2_needs_a_position_for_every_token() -> None:
    architecture = architecture_from_hf(PUBLISHED_GPT2)
    assert split_problems(Layout(), architecture, 1024) == []
    [problem] = split_problems(Layout(), architecture, 1025)
    assert "max_seq_len = 1024" in problem
    [problem] = split_problems(Layout(tp=3), architecture.replace(vocab_size=50304), 768)
    assert "max_seq_len = 1024" in problem


def test_dropout_that_is_not_applied_is_said() -> None:
    note = dropout_note(architecture_from_hf(PUBLISHED_GPT2))
    assert note is not None
    assert "dropout 0.1" in note
    assert dropout_note(architecture_from_hf(PUBLISHED_GPT2).replace(dropout=0.0)) is None
    assert dropout_note(PRESETS["llama-1m"]) is None


@pytest.mark.parametrize(
    "changes", [{"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}, {"n_shared": 2}]
)
def test_a_gpt2_of_another_kind_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        architecture_from_hf({**PUBLISHED_GPT2, **changes})


def test_errors_name_the_keys_of_gpt2() -> None:
    with pytest.raises(ConfigError, match="n_embd = 770 does not divide by n_head = 12"):
        architecture_from_hf({**PUBLISHED_GPT2, "n_embd": 770})


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig", "Qwen3Config"])
def test_reads_what_transformers_writes_by_default(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    config = getattr(transformers, kind)()
    architecture = architecture_from_hf(config.to_dict())
    assert architecture.dim == config.hidden_size
    assert architecture.head_dim == config.head_dim
    assert architecture.num_kv_heads == config.num_key_value_heads
    assert architecture.rope_theta == config.rope_parameters["rope_theta"]


def test_transformers_default_gpt2_is_the_published_one() -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    published = architecture_from_hf(PUBLISHED_GPT2)
    assert architecture_from_hf(transformers.GPT2Config().to_dict()) == published
    assert architecture_from_hf(transformers.GPT2Config(**architecture_to_hf(published)).to_dict()) == published


@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen3-8b", "gpt-oss-20b"])
def test_transformers_reads_what_we_write(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    written = architecture_to_hf(PRESETS[name])
    config = transformers.AutoConfig.for_model(**written)
    assert architecture_from_hf(config.to_dict()) == PRESETS[name]
