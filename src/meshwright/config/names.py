"""Which key was meant: for a key or section that a job does not have.

People arrive with the words of other trainers. The table holds the ones that no spelling distance would find, as they
occur in torchtitan's job files, Megatron-LM's command line and Hugging Face's TrainingArguments (their documentation
of 2025-2026). A value with a space is an explanation, not a key.
"""

from difflib import get_close_matches

from meshwright.config.keys import SECTIONS, job_keys
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import FIELD_NAMES

_BATCH = "follows from train.global_batch_size, layout.microbatch_size and the data-parallel degrees"
_BFLOAT16 = 'write precision.compute = "bfloat16"'

ALIASES: dict[str, str] = {
    # how long and how much
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "num_train_steps": "train.steps",
    "total_steps": "train.steps",
    "train_iters": "train.steps",
    "train_steps": "train.steps",
    "iterations": "train.steps",
    "epochs": "a run is counted in steps: set train.steps",
    "num_epochs": "a run is counted in steps: set train.steps",
    "num_train_epochs": "a run is counted in steps: set train.steps",
    "sequence_length": "train.seq_len",
    "seq_length": "train.seq_len",
    "context_length": "train.seq_len",
    "block_size": "train.seq_len",
    "max_length": "train.seq_len",
    "batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "local_batch_size": "layout.microbatch_size",
    "micro_batch_size": "layout.microbatch_size",
    "per_device_train_batch_size": "layout.microbatch_size",
    "batch_tokens": "train.global_batch_tokens",
    "tokens_per_batch": "train.global_batch_tokens",
    "gradient_accumulation": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_microbatches": _BATCH,
    "random_seed": "train.seed",
    "eval_interval": "train.validation_interval",
    "eval_steps": "train.validation_interval",
    "eval_iters": "train.validation_batches",
    # the optimizer
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "optimizer.min_lr_ratio",
    "min_lr_factor": "optimizer.min_lr_ratio",
    "optim": "optimizer.name",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "adam_eps": "optimizer.eps",
    "adam_epsilon": "optimizer.eps",
    "wd": "optimizer.weight_decay",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "max_norm": "optimizer.max_grad_norm",
    "warmup": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_decay_style": "optimizer.schedule",
    "decay_type": "optimizer.schedule",
    "decay_ratio": "optimizer.decay_fraction",
    # number formats
    "bf16": _BFLOAT16,
    "fp16": _BFLOAT16,
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "mixed_precision_param": "precision.compute",
    "mixed_precision_reduce": "precision.reduce",
    # the layout
    "dp": "layout.dp_shard",
    "ddp": "layout.dp_replicate",
    "fsdp": "layout.dp_shard",
    "hsdp": "layout.dp_replicate",
    "data_parallel_degree": "layout.dp_shard",
    "data_parallel_shard_degree": "layout.dp_shard",
    "data_parallel_replicate_degree": "layout.dp_replicate",
    "tensor_parallel": "layout.tp",
    "tensor_parallel_degree": "layout.tp",
    "tensor_parallel_size": "layout.tp",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_parallel": "layout.pp",
    "pipeline_parallel_degree": "layout.pp",
    "pipeline_parallel_size": "layout.pp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel": "layout.cp",
    "context_parallel_degree": "layout.cp",
    "context_parallel_size": "layout.cp",
    "expert_parallel": "layout.ep",
    "expert_parallel_degree": "layout.ep",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_degree": "layout.etp",
    "expert_tensor_parallel_size": "layout.etp",
    "sequence_parallel": "it comes with layout.tp: leave it out",
    "enable_async_tensor_parallel": "layout.async_tp",
    "context_parallel_rotate_method": "layout.cp_method",
    "cp_comm_type": "layout.cp_method",
    "pipeline_parallel_schedule": "layout.schedule",
    "pipeline_parallel_microbatch_size": "layout.microbatch_size",
    "virtual_pipeline_model_parallel_size": "layout.virtual_stages",
    "num_layers_per_virtual_pipeline_stage": "layout.virtual_stages",
    "enable_cpu_offload": "layout.cpu_offload",
    "gradient_checkpointing": "layout.activation_checkpoint",
    "recompute": "layout.activation_checkpoint",
    "recompute_granularity": "layout.activation_checkpoint",
    "fsdp_reshard_after_forward": "layout.reshard_after_forward",
    "defer_fsdp_grad_sync": "layout.gradient_sync",
    "sync_each_batch": "layout.gradient_sync",
    "torch_compile": "layout.compile",
    # model and data
    "flavor": "model.source",
    "preset": "model.source",
    "architecture": "model.source",
    "model_name_or_path": "model.source",
    "init_from": "model.initial_weights",
    "initial_load_path": "model.initial_weights",
    "dataset": "data.source",
    "dataset_path": "data.source",
    "data_path": "data.source",
    "train_file": "data.source",
    "text_field": "data.text_key",
    "text_column": "data.text_key",
    "tokenizer_path": "data.tokenizer",
    "tokenizer_model": "data.tokenizer",
    # checkpoints and the run
    "save_interval": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "checkpoint_interval": "checkpoint.interval",
    "every": "checkpoint.interval",
    "save_every": "checkpoint.interval",
    "keep_latest_k": "checkpoint.keep",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "run.dir",
    "out_dir": "run.dir",
    "dump_folder": "run.dir",
    "folder": "run.dir",
    "save": "run.dir",
    "load": "checkpoints are found in run.dir: start train with --resume",
    "resume": "resuming belongs to a start, not to a job: start train with --resume",
    "resume_from_checkpoint": "checkpoints are found in run.dir: start train with --resume",
    "log_freq": "run.log_interval",
    "logging_steps": "run.log_interval",
    "activation_checkpoint.mode": "layout.activation_checkpoint",
    "compile.enable": "layout.compile",
    "mixed_precision.param": "precision.compute",
    "model.name": "model.source",
    "model.path": "model.source",
    "enable_tensorboard": "run.tensorboard",
    "enable_wandb": "run.wandb",
    "num_gpus": "cluster.num_devices",
    "gpus": "cluster.num_devices",
    "world_size": "cluster.num_devices",
}

SECTION_ALIASES: dict[str, str] = {
    "training": "train",
    "trainer": "train",
    "dataset": "data",
    "parallelism": "layout",
    "parallel": "layout",
    "mesh": "layout",
    "optim": "optimizer",
    "lr_scheduler": "optimizer",
    "scheduler": "optimizer",
    "mixed_precision": "precision",
    "activation_checkpoint": "layout",
    "compile": "layout",
    "hardware": "cluster",
    "metrics": "run",
    "profiling": "run",
    "job": "run",
    "logging": "run",
}


def meant_section(section: str) -> str | None:
    """Return the section that an unknown name most probably means, or None."""
    close = get_close_matches(section, SECTIONS, n=1, cutoff=0.6)
    return SECTION_ALIASES.get(section) or (close[0] if close else None)


def advice_for_key(dotted: str) -> str:
    """Return what to write instead of an unknown key: the end of a sentence."""
    section, _, name = dotted.rpartition(".")
    section = section.partition(".")[0]
    meant = _meant_key(section, name)
    if meant is None:
        return _where_to_look(section)
    return meant if " " in meant else f"did you mean {meant}?"


def _meant_key(section: str, name: str) -> str | None:
    keys = job_keys()
    same_name = [dotted for dotted, key in keys.items() if key.name == name]
    here = meant_section(section) if section not in SECTIONS else section
    if f"{section}.{name}" in ALIASES:
        return ALIASES[f"{section}.{name}"]
    if f"{here}.{name}" in keys:
        return f"{here}.{name}"
    if here == "model" and (field := FIELD_NAMES.get(name, name)) in LlamaArchitecture.model_fields:
        return f"model.options.{field}"
    if len(same_name) == 1:
        return same_name[0]
    if name in ALIASES:
        return ALIASES[name]
    in_section = [key.name for key in keys.values() if key.section == here]
    close = get_close_matches(name, in_section, n=1, cutoff=0.6)
    if close:
        return f"{here}.{close[0]}"
    close = get_close_matches(f"{here or ''}.{name}", keys, n=1, cutoff=0.75)
    return close[0] if close else None


def _where_to_look(section: str) -> str:
    section = meant_section(section) or section
    if section in SECTIONS:
        names = ", ".join(key.name for key in job_keys().values() if key.section == section)
        return f"leave it out, or use one of [{section}]'s keys: {names}"
    return f"leave it out, or use one of the sections: {', '.join(SECTIONS)}"
