"""The moments of a rank's step: what its units of parameters hold while a block's backward runs."""

from typing import Any

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import Footprint, footprint
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.workload import Workload

GIB = 2**30


def _setup(model: str, **workload: Any) -> TrainingSetup:
    sizes = {"seq_len": 4096, "global_batch_size": 64} | workload
    return TrainingSetup(
        model_spec(PRESETS[model]), Workload(**sizes), load_cluster("h100-ib400"), load_stack("meshwright")
    )


def _footprint(setup: TrainingSetup, layout: Layout) -> Footprint:
    return footprint(Configurations.of_one(setup, layout_table([layout])))


def test_a_tied_head_has_gradients_from_its_loss_on() -> None:
    setup = _setup("llama3.2-1b")
    memory = _footprint(setup, Layout(dp_shard=8, activation_checkpoint="full", loss_chunks=8))
    first, block, *_, last = (group.num_parameters for group in setup.model.groups)
    # Gathered: the embedding, the last norm, the block at work and the next. Gradients: the head's and the last norm's.
    assert memory.unsharded_parameters_bytes[0] == 2 * (2 * (first + last) + 2 * block)


def test_a_block_is_reduced_next_to_the_activations_of_the_others_where_they_are_less() -> None:
    short, long = (
        _footprint(_setup("llama3-8b", seq_len=length), Layout(dp_shard=8, loss_chunks=8)) for length in (2048, 32_768)
    )
    assert short.communication_buffers_bytes[0] == 4 * _setup("llama3-8b").model.groups[1].num_parameters
    # What one block keeps is more than that: the first to run backward has them all, and nothing is reduced yet.
    assert long.communication_buffers_bytes[0] == 0


def test_one_graph_reserves_no_memory_of_other_streams() -> None:
    setup = _setup("llama3-8b", global_batch_size=8)
    blocks, graph = (_footprint(setup, Layout(dp_shard=8, compile=how)) for how in (True, "model"))
    # The embedding is gathered for the forward alone.
    embedding = 2 * setup.model.groups[0].num_parameters
    assert blocks.unsharded_parameters_bytes[0] - graph.unsharded_parameters_bytes[0] == embedding
    # Streams of their own gather the ends and a block, and reduce to shards: 16 bits and 32.
    streams = 4 * setup.model.num_parameters / 8 + 2 * setup.model.groups[1].num_parameters
    assert blocks.fragmentation_bytes[0] - graph.fragmentation_bytes[0] > streams


def test_float8_experts_are_rounded_next_to_what_they_are_rounded_from() -> None:
    # One operator at a time a copy of the weights, that in float32, and scaled; a kernel rounds at once.
    for layout, of_weight in ((Layout(dp_shard=8, loss_chunks=8), 10), (Layout(dp_shard=8, compile=True), 1)):
        _require_rounded(layout, of_weight)


def _require_rounded(layout: Layout, of_weight: int) -> None:
    plain = {"precision": "float8-rowwise", "seq_len": 1024}
    wide, low = (_footprint(_setup("mixtral-8x7b", **plain, float8_experts=on), layout) for on in (False, True))
    weights, rows = 8 * 4096 * 14336, 1024 * 2 * 14336
    assert low.workspace_bytes[0] - wide.workspace_bytes[0] == of_weight * weights + rows


def test_no_more_blocks_are_gathered_ahead_than_a_stage_has() -> None:
    setup = _setup("llama3.2-1b", global_batch_size=4)
    # Of 16 blocks, 15 come after the first; the longer of two stages has 10, since the head weighs on the other.
    for pp, ahead in ((1, 15), (2, 9)):
        few, all_of_them, endless = (
            _footprint(setup, Layout(dp_shard=2, pp=pp, reshard_after_forward="always", prefetch=number))
            for number in (1, ahead, 1000)
        )
        assert endless.reserved_bytes[0] == all_of_them.reserved_bytes[0] > few.reserved_bytes[0]
