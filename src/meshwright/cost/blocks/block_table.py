"""BlockTable: what one block of each group does on one rank besides matmuls, a column each."""

from dataclasses import dataclass

from meshwright.cost.layout_table import Floats, Ints

BLOCK, FIRST, LAST = 0, 1, 2
"""Kinds of blocks: one block of a group, what stands before the blocks, what stands after them."""


@dataclass(frozen=True)
class BlockTable:
    """One row for each key and each block group: what one of its blocks does besides matmuls."""

    key: Ints
    kind: Ints
    count: Floats
    """Blocks of this kind."""
    tokens: Floats
    """Tokens of one microbatch on one rank, before tp divides them."""
    width: Floats
    """Elements of a token between blocks."""
    attention_flops: Floats
    """Model FLOPs of attention's forward pass."""
    context: Floats
    """Tokens that each token attends to in the mean."""
    computed_context: Floats
    """The same of kernels that skip what documents and windows hide (spec/model/op.py)."""
    head_width: Floats
    score_elements: Floats
    """Elements of the whole matrix of scores, masked ones included."""
    kv_elements: Floats
    """Elements of the keys and values of this rank's part of the sequence."""
    swapped_kv_elements: Floats
    """The same with heads repeated until cp ranks get equally many, as ulysses needs them."""
    memory_elements: Floats
    """Elements that memory-bound ops of the forward pass read and write."""
    own_forward_elements: Floats
    """The same of our own trainer, whose memory_elements are 0: counted kernel by kernel (own_elements.py)."""
    own_backward_elements: Floats
    network_share: Floats
    """Of own_backward_elements those in graphs where only networks are compiled; else 1."""
    recomputed_elements: Floats
    """What a compiled block reads and writes more that recomputes all of forward; NaN where no graph has both."""
    eager_forward_elements: Floats
    """What a mixture of experts that runs operator by operator reads and writes, which is in none of these."""
    eager_backward_elements: Floats
    biased_elements: Floats
    """Elements that experts' biases, clamps and scales read and write, an operator each."""
    loss_elements: Floats
    """Logits."""
    last_matmul_share: Floats
    """Share of the block's matmul FLOPs in its last one, whose output backward does not need, or 0 if it does."""
    second_matmuls_share: Floats
    """Share in every second one."""
    early_terms_share: Floats
    """Share in row-parallel ones but the last where tp divides them, else 0."""
    num_ops: Floats
    """Without those of adapters."""
    num_adapters: Floats
    """Adapters whose output is added to a matmul's, those of fused matmuls as one."""
    num_row_norms: Floats
    """Linear layers whose rows have norms that are trained."""
    num_tensors: Floats
    """Parameters as tensors: weights and biases."""
    num_trained_tensors: Floats
    """Those of them that have gradients."""
    num_large_tensors: Floats
    """Those of them whose gradients in float32 replicas sum one by one (spec/step/gradient_sums.py)."""
    large_parameters: Floats
    """Elements of these."""
    num_biases: Floats
    """Of matmuls."""
    has_rope: Floats
    num_tp_collectives: Floats
    """All-gathers and reduce-scatters of the residual stream in the forward pass; as many undo them in backward."""
    num_tp_inputs: Floats
    """Those of the all-gathers whose result column-parallel matmuls need again for the gradients of their weights."""
    routed_copies: Floats
    """Experts that each token goes to; 0 in a dense block."""
    dense_parameters: Floats
    """Parameters that data-parallel ranks share, on this rank before they are sharded."""
    trained_dense_parameters: Floats
    """Those of them that have gradients."""
    tied_parameters: Floats
    """Parameters of a tied head on this rank, which are the embedding's; a pipeline's last stage has a copy of them."""
    trained_tied_parameters: Floats
    low_parameters: Floats
    """Those of dense_parameters that our trainer gathers in 8 bits."""
    num_low_matmuls: Floats
    """Linear layers that it computes in 8 bits."""
    num_low_around_attention: Floats
    """Those of them around attention."""
    num_low_experts: Floats
    """Grouped matmuls of experts that it does."""
    replicated_parameters: Floats
    """Trained ones of them that tp does not divide."""
    expert_parameters: Floats
    """The same of experts."""
    trained_expert_parameters: Floats
    cast_frozen_parameters: Floats
    """Frozen ones on this rank that are kept as the optimizer keeps the others, and cast as these are."""
    narrow_gather_bytes: Floats
    """Bytes that gathering is less because frozen weights have 8 or 4 bits."""
    num_local_experts: Floats
    """Experts of one rank, before data-parallel ranks share them."""
