"""The jobs that init writes are sound for every model that has a name."""

import pytest

from meshwright.config.starting import starting_job
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_starting_job_is_sound_and_suits_the_size(name: str) -> None:
    num_parameters = model_spec(PRESETS[name]).num_parameters
    job = starting_job(name, num_parameters, PRESETS[name].max_seq_len)
    assert job.problems() == []
    assert job.model.source == name
    assert job.train.seq_len <= PRESETS[name].max_seq_len
    assert job.layout.rest_axis == "dp_shard"
    if num_parameters < 5e7:
        assert job.precision.compute == "float32"
        assert not job.layout.compile
    if num_parameters > 7e9:
        assert job.precision.compute == "bfloat16"
        assert job.train.seq_len == min(8192, PRESETS[name].max_seq_len)
        assert job.layout.activation_checkpoint != "none"
    for num_ranks in (1, 8, 256):
        per_pass = num_ranks * job.layout.microbatch_size
        if job.global_batch_size % per_pass == 0:
            assert job.num_microbatches(job.layout.resolve(num_ranks)) == job.global_batch_size // per_pass


def test_larger_models_learn_more_slowly() -> None:
    rates = [starting_job("x", size, 8192).optimizer.learning_rate for size in (10**6, 10**9, 10**10, 10**11, 10**12)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)
