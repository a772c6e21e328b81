"""adapter_config.json of PEFT: what we write, and what one that is read must say; needs no torch.

Format: peft.LoraConfig of PEFT 0.18 to 0.21.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.find_checkpoint import ADAPTER_CONFIG
from meshwright.checkpoint.peft.peft_names import TheirModule
from meshwright.checkpoint.safetensors.weight_index import read_json
from meshwright.spec.problem import shown_value
from meshwright.spec.step.adapter import Adapter

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian")
"""Values of init_lora_weights that leave the base as it is; others subtract the adapter's start from it."""
_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("r", "lora_alpha", "lora_dropout", "use_dora", "bias", "init_lora_weights", "fan_in_fan_out"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_version"),
        *("megatron_core", "qalora_group_size", "runtime_config"),
    )
)
"""Keys that are compared below, or whose effect is in the names of the tensors."""


def peft_config(
    adapter: Adapter, modules: Collection[TheirModule], others: Collection[str], base: str | None
) -> dict[str, Any]:
    """Return the configuration of an adapter of these modules; `others` are the model's that are not adapted."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "target_modules": _target_modules([module.name for module in modules], others),
        "inference_mode": True,
    }


def config_problems(folder: Path, adapter: Adapter) -> list[str]:
    """Return why an adapter of `adapter` cannot start as that in `folder`; raises CheckpointError if it is damaged."""
    given = f"adapter.initial = {str(folder)!r}"
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            return [f"{given} holds no {name}, so it is no adapter that PEFT has saved: name another folder"]
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        return [f"{given} is of the type {config.get('peft_type')!r}, and only LORA is built: name another folder"]
    return [*_other_sizes(given, config, adapter), *_unsupported(given, config)]


def _other_sizes(given: str, config: Mapping[str, Any], adapter: Adapter) -> list[str]:
    kind = "dora" if config.get("use_dora") else "lora"
    theirs = {"kind": kind, "rank": config.get("r"), "alpha": config.get("lora_alpha")}
    return [
        f"{given} has {key} {shown_value(value)}, and adapter.{key} = {shown_value(getattr(adapter, key))}: set "
        f"adapter.{key} to {shown_value(value)}"
        for key, value in theirs.items()
        if getattr(adapter, key) != value
    ]


def _unsupported(given: str, config: Mapping[str, Any]) -> list[str]:
    found = {key: value for key, value in config.items() if value and key not in _WITHOUT_EFFECT}
    if config.get("bias", "none") != "none":
        found["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        found["init_lora_weights"] = config["init_lora_weights"]
    return [
        f"{given} has {key} = {value!r} in {ADAPTER_CONFIG}, which is not built: merge it into its model with PEFT, "
        "and name the result in model.initial_weights"
        for key, value in found.items()
    ]


def _target_modules(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the last words of the names if these mean no other module, which engines expect; else whole names."""
    last = {name.rpartition(".")[2] for name in names}
    return sorted(names) if last & {name.rpartition(".")[2] for name in others} else sorted(last)
