"""The sections of a job without a module of their own: [model] [data] [train] [optimizer] [precision] ...

Every field has a default, and the sentence below it says its meaning and unit: `show`, `init` and the JSON
Schema print exactly that sentence.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.mixture_source import MixtureSource
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.step.workload import FLOAT8_PRECISIONS, Precision

DEFAULT_WARMUP_STEPS = 10
FAILURES_PER_DEVICE_DAY = round(419 / (54 * 16_384), 10)
"""419 unexpected endings in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, 3.3.4), in seven digits."""
DEFAULT_MEMORY_MARGIN = 0.07
"""The mean error of predicted reserved memory on the published runs that report it is 6.6 %, all of it too low
(docs/accuracy.md, n = 7): that, in whole per cent. Where a prediction is 7 % too low, a pick still fits."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_is_plain(inner) for inner in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not _is_plain(value):
            raise ValueError(
                f"options.{name} = {value} is neither a string, a finite number, true or false, nor a list or table "
                "of them: write it as one of these"
            )
    return options


Options = Annotated[dict[str, Any], AfterValidator(_plain_options)]
"""Values of options that TOML and JSON both represent exactly."""


class ModelSection(Frozen):
    """What is trained."""

    source: str = "llama-1m"
    """A preset (see `meshwright list models`), a Hugging Face config.json or hub id, or my_module:MyModel."""
    options: Options = Field(default_factory=dict)
    """Fields of the architecture to change, such as num_layers = 2; keyword arguments for my_module:MyModel."""
    initial_weights: str | None = Field(None, examples=["weights/llama3-8b"])
    """A Hugging Face folder or hub id to start from; without it weights are drawn from train.seed."""


TooLong = Literal["stop", "cut", "skip"]


class DataSection(Frozen):
    """What it is trained on."""

    source: str = "stdlib"
    """stdlib (Python's library), a file, folder or URL of text, records or tokens, or my_module:MyData."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments for my_module:MyData, which has numbered samples or is an iterable."""
    text_key: str = "text"
    """The field of a record or row that holds the text; of a .tar also the extension of such members: ".txt"."""
    messages_key: str = "messages"
    """The field of a record that holds a conversation: a list of { role, content }; else prompt and completion."""
    chosen_key: str = "chosen"
    """The field of a record that holds the preferred answer (dpo): messages, or text; with a prompt, or all of it."""
    rejected_key: str = "rejected"
    """The field of a record that holds the other answer, in the same form."""
    chat_template: str | None = Field(None, examples=["chatml.jinja"])
    """A Jinja file, or plain (Meshwright's own); default: that of data.tokenizer's folder, plain for bytes."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Messages of a conversation whose tokens are targets: the assistant's, its last one, or all messages."""
    tokenizer: str = "bytes"
    """bytes (one token a byte), the path of a tokenizer.json, or a hub id."""
    max_bytes: PositiveInt = 16_000_000
    """Bytes of text, or of stored tokens, to read at most; the rest of the source is left out."""
    mixture: tuple[MixtureSource, ...] = Field((), strict=False)
    """Tables { source, weight, name, weights, max_bytes, keys of records }, in exact shares; excludes source."""
    stage_steps: tuple[PositiveInt, ...] = Field((), strict=False)
    """Steps after which the next one of each table's weights counts."""
    deduplicate: bool = False
    """Whether documents equal to an earlier one, of this source or of one before it in the mixture, are left out."""
    on_bad_document: Literal["stop", "skip"] = "stop"
    """Whether a document that cannot be read ends the run or is left out and counted."""
    validation_fraction: float = Field(0.02, ge=0, lt=1)
    """Share of the samples, the last ones, kept out of training for validation; of an iterable none are."""
    packing: Literal["split", "whole", "none"] = "split"
    """How documents fill sequences: joined and split, whole ones that fit together, or one in each; the rest padded."""
    too_long: TooLong = "stop"
    """What becomes of a document longer than a sequence that packing keeps whole: an error, cut off, or left out."""
    mask_documents: bool = False
    """Mask attention across documents that are packed into one sequence."""
    document_tokens: PositiveFloat | None = Field(None, examples=[900.0])
    """Mean tokens of a document, by which a plan prices attention that skips other documents; changes no training."""
    shuffle: bool = True
    """Whether each epoch visits the samples in a new random order drawn from train.seed; an iterable has its own."""
    num_workers: NonNegativeInt = 0
    """Processes of each rank that read samples; 0 reads in a thread. The samples and their order stay the same."""
    prefetch_batches: PositiveInt = 2
    """Global batches that are read ahead of the one in use."""
    cache_dir: str = "~/.cache/meshwright"
    """Folder of the token cache; files in it are named by content and shared between runs."""

    @property
    def restarts_positions(self) -> bool:
        """Return whether each document of a sequence counts its positions from 0, as if it were alone."""
        return self.packing != "split" and self.mask_documents


Task = Literal["pretrain", "sft", "dpo"]
"""What is learned."""


class TrainSection(Frozen):
    """How long, on how much, and from which seed."""

    task: Task = "pretrain"
    """What is learned: all text (pretrain), the assistant's part of conversations (sft), or preferred answers (dpo)."""
    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    stop_after: PositiveInt | None = Field(None, examples=[50])
    """Step after which to save and exit 75, as a preemption would; none runs to the end."""
    seq_len: PositiveInt = 256
    """Tokens in one sequence."""
    global_batch_size: PositiveInt | None = Field(None, examples=[8])
    """Sequences in one optimizer step over all ranks; excludes global_batch_tokens; default 8."""
    global_batch_tokens: PositiveInt | None = Field(None, examples=["4M"])
    """Tokens in one optimizer step over all ranks; excludes global_batch_size."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the sample order and every random number of a step."""
    exact_elastic: bool = False
    """Whether sums over microbatches and ranks are exact: the same bits on any number of data-parallel ranks."""
    validation_interval: NonNegativeInt = 0
    """Steps between two validations; 0 never validates."""
    validation_batches: PositiveInt = 4
    """Global batches in one validation."""

    @property
    def last_step(self) -> int:
        """Return the step that a start of the run ends after: train.stop_after, or the last of all."""
        return min(self.steps, self.stop_after or self.steps)


MomentDecay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moving average; 1 would never forget, and divides by zero in AdamW's bias correction."""


class ParameterGroup(Frozen):
    """One table of [[optimizer.groups]]: what differs for some parameters."""

    match: str = Field(min_length=1)
    """Pattern of whole parameter names, such as "*.bias": * is any text, ? one character."""
    weight_decay: NonNegativeFloat | None = None
    """Their weight decay; that of [optimizer] where it is left out, also for vectors."""
    learning_rate_ratio: NonNegativeFloat = 1.0
    """Their learning rate as a share of the schedule's; 0 leaves them as they are."""


OptimizerName = Literal["adamw", "muon"]
StateDType = Literal["float32", "bfloat16", "int8"]
"""Formats of optimizer states."""


class OptimizerSection(Frozen):
    """The optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """The optimizer; muon orthogonalizes the updates of the blocks' matrices and leaves the rest to AdamW."""
    state_dtype: StateDType = "float32"
    """Format of the states between steps; bfloat16 is rounded stochastically, int8 needs the extra torchao."""
    in_backward: bool = False
    """Whether each parameter is updated in backward, as its gradient is reduced, so that not all gradients are kept."""
    groups: tuple[ParameterGroup, ...] = Field((), strict=False)
    """Tables { match, weight_decay, learning_rate_ratio }; the first that matches a parameter's name counts."""
    momentum: MomentDecay = 0.95
    """Muon's decay rate of the momentum."""
    learning_rate: PositiveFloat = 1e-3
    """Highest learning rate, reached at the end of the warmup."""
    betas: tuple[MomentDecay, MomentDecay] = Field((0.9, 0.95), strict=False)
    """AdamW's decay rates of the first and second moment; under muon of what is not a matrix of a block."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices (parameters of two or more dimensions); vectors and what ends in "bias" are never decayed."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 never clips."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warmup; wsd stays at the top, then decays linearly over decay_fraction."""
    warmup_steps: NonNegativeInt = DEFAULT_WARMUP_STEPS
    """Steps of linear warmup from 0."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps over which wsd decays."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Last learning rate as a share of the highest."""


DType = Literal["float32", "bfloat16", "float64"]
"""Formats that the runtime computes and communicates in."""


Float8Recipe = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
"""Scales of float8 matmuls, by torchao's names."""


class PrecisionSection(Frozen):
    """Number formats; master weights are float32 (float64 where compute is float64)."""

    compute: DType = "float32"
    """Format of parameters and activations in forward and backward."""
    reduce: DType = "float32"
    """Format in which gradients are summed over ranks; float64 wherever compute is float64."""
    float8: Float8Recipe = "none"
    """Scales of blocks' float8 matmuls: by tensor, by row (also with wide weight gradients) or by 32; extra torchao."""
    float8_skip: tuple[str, ...] = Field((), strict=False, examples=[["blocks.0.*", "blocks.*.attention.key"]])
    """Patterns of names of linear layers that stay in compute, as embedding, head and router always do."""
    float8_filter: Literal["none", "slower"] = "none"
    """Which layers stay in compute besides: none, or those that are predicted to be slower in float8 on the device."""
    float8_experts: bool = False
    """Whether experts' grouped matmuls are in float8, too: forward and the gradients of rows."""

    @property
    def matmuls(self) -> Precision:
        """Return the format of the matmuls of blocks."""
        return self.compute if self.float8 == "none" else FLOAT8_PRECISIONS[self.float8]

    @property
    def has_wide_float8(self) -> bool:
        """Return whether float32 lies between matmuls in float8."""
        return self.float8 != "none" and self.compute == "float32"


class ClusterSection(Frozen):
    """The machine that runs, or would run, the job."""

    name: Annotated[str, StringConstraints(to_lower=True)] = "local"
    """local (this machine) or a cluster of the catalogue (see `meshwright list clusters`)."""
    num_devices: PositiveInt | None = Field(None, examples=[64])
    """Devices of the cluster that the job uses; default: the ranks of the layout, or the devices present."""
    device: Annotated[str, StringConstraints(to_lower=True)] | None = Field(None, examples=["h100-sxm"])
    """Catalogue name of the local device (see `meshwright list devices`); default: detected from the name that CUDA
    reports."""
    failures_per_device_day: NonNegativeFloat = FAILURES_PER_DEVICE_DAY
    """Unexpected endings of the run for each device and day, for checkpoint.interval = "auto" and plans; Llama 3's."""


class PlannerSection(Frozen):
    """How the planner chooses a layout."""

    memory_margin: float = Field(DEFAULT_MEMORY_MARGIN, ge=0, lt=1)
    """Share of a device's usable memory that a chosen layout leaves free; 0 allows all of it."""
    simulate: NonNegativeInt = 0
    """Number of best layouts to trace and simulate before one is chosen; 0 chooses by the cost model alone."""


class CheckpointSection(Frozen):
    """When the training state is saved and how much of it is kept."""

    interval: NonNegativeInt | Literal["auto"] = 50
    """Steps between two checkpoints; 0 saves only at the end or when asked to stop, auto by how often devices fail."""
    memory_interval: NonNegativeInt = 0
    """Steps between two copies of the state in memory of its own and of another node, read at a restart; 0: none."""
    memory_dir: str = Field("/dev/shm", examples=["/mnt/memory"])
    """Folder in memory (tmpfs) of each node for these copies; {host} in it is the node's host name."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; older ones are removed after a newer one is complete."""
    keep_every: NonNegativeInt = 0
    """Steps whose multiples are never removed; 0 for none."""
    keep_best: NonNegativeInt = 0
    """Checkpoints with the lowest validation loss to keep as well; needs one measured at steps that are saved."""
    mode: Literal["auto", "async", "sync"] = "auto"
    """Whether training continues while a checkpoint is written; auto does so from 64 MiB of state a rank on."""
    niceness: NonNegativeInt = 10
    """Niceness of the processes that write in the background; 19 yields the CPU to anything else."""
    max_bytes_per_s: PositiveFloat | None = Field(None, examples=[500e6])
    """Most bytes that each rank writes in a second in the background; no limit by default."""
    remote: str | None = Field(None, examples=["s3://bucket/run"])
    """URL to which complete checkpoints are copied in the background; needs the extra remote."""
    export: Literal["none", "float32", "bfloat16"] = "none"
    """Type of the weights of a Hugging Face folder, exports/step-N in the run, that each checkpoint gets as well."""

    @property
    def retention(self) -> RetentionRule:
        """Return which checkpoints are kept."""
        return RetentionRule(keep=self.keep, keep_every=self.keep_every, keep_best=self.keep_best)


class RunSection(Frozen):
    """Where the run is written and what is logged."""

    dir: str | None = Field(None, examples=["runs/first"])
    """Run folder; default runs/NAME where NAME is the job file's; not overwritten without --overwrite."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device to train on; auto takes CUDA devices where there are any."""
    log_interval: PositiveInt = 1
    """Steps between two log lines."""
    deterministic: bool = False
    """Whether CUDA uses only kernels that give the same bits every time, slower ones included; a CPU always does."""
    max_restarts: NonNegativeInt = 0
    """Times that the launcher restarts all ranks from the newest checkpoint after one of them died."""
    restart_backoff_s: NonNegativeFloat = 1.0
    """Seconds before a restart once two attempts reached no new step; doubled each time, up to 60; 0: never wait."""
    grace_s: PositiveFloat = 120.0
    """Seconds from SIGTERM to the kill by the scheduler: ranks save if they can in this time, and are then ended."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that a collective waits for a lost peer before the run ends with exit code 75."""
    hang_after_s: NonNegativeFloat = 120.0
    """Seconds without progress before a rank writes its stacks for `meshwright diagnose`; 0 turns this off."""
    hang_limit_s: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds that end a step without progress; auto: 20 steps, hang_after_s + 60 or more; first 3 steps: timeout_s."""
    parameter_hash: bool = True
    """Whether the final parameters are hashed into the manifest, each rank its own part."""
    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard; needs the extra tensorboard."""
    wandb: bool = False
    """Whether metrics are also sent to Weights & Biases; needs the extra wandb."""
    profile_start: PositiveInt | None = Field(None, examples=[20])
    """First step of a torch.profiler window; none profiles nothing."""
    profile_steps: PositiveInt = 2
    """Steps in the profiler window, written to timelines/ as Chrome traces."""
