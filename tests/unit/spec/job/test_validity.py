"""Layouts that a model or a batch cannot take are told why, and what is suggested cures it."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection, TrainSection
from meshwright.spec.job.validity import layout_problems, split_problems, with_fix
from meshwright.spec.layout.layout import SCHEDULES, Layout, LayoutRequest
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture
from meshwright.spec.problem import Fix, Problem
from random_jobs import jobs

SMALL = Job(train=TrainSection(seq_len=64, global_batch_size=48))
DENSE = resolve_architecture(SMALL.model)
assert DENSE is not None
EXPERTS = MoEArchitecture(
    **DENSE.to_dict(), num_experts=12, experts_per_token=2, expert_ffn_dim=96, num_shared_experts=1, num_dense_layers=1
)
LATENT = EXPERTS.replace(
    num_heads=8,
    num_kv_heads=8,
    head_dim=24,
    latent=LatentAttention(kv_rank=16, plain_head_dim=16, rope_head_dim=8, value_head_dim=16),
)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("dp_shard=5", "train.global_batch_size = 48 does not divide by 5 data-parallel ranks x layout.microbatch_size "
         "= 1: set train.global_batch_size to 45 or 50"),
        ("cp=3", 'train.seq_len = 64 does not divide by 6, as it must for layout.cp = 3 (two chunks a rank for '
         'cp_method = "all-gather"): set train.seq_len to 60 or 66'),
        ("cp=3,cp_method=ring,tp=4", 'train.seq_len = 64 does not divide by 12, as it must for layout.cp = 3 (two '
         'chunks a rank for cp_method = "ring") and layout.tp = 4 (which splits the sequence between matmuls): set '
         "train.seq_len to 60 or 72"),
        ("tp=8", "layout.tp = 8 does not divide the model's num_heads = 4: set layout.tp to 2 or 4"),
        ("cp=8,cp_method=ulysses", 'layout.cp = 8 with layout.cp_method = "ulysses" must divide the num_heads = 4, and '
         "divide the num_kv_heads = 2 or be a multiple of it: set layout.cp to 2 or 4, or layout.cp_method to "
         '"all-gather"'),
        ("cp=4,tp=2,cp_method=ulysses", 'layout.cp = 4 with layout.cp_method = "ulysses" must divide the num_heads = 2 '
         "that layout.tp = 2 leaves each rank, and divide the num_kv_heads = 1 or be a multiple of it: set layout.cp "
         'to 1 or 2, or layout.cp_method to "all-gather"'),
        ("loss_chunks=65", "layout.loss_chunks = 65 are more chunks than the 64 tokens that a rank has of a "
         "microbatch: set layout.loss_chunks to 1 or 64"),
        ("dp_shard=2,ep=2", "layout.ep = 2 splits experts, but the model is dense: set layout.ep to 1"),
        ("pp=4,schedule=Interleaved1F1B", "layout.pp = 4 x 2 stages a rank are 8 stages, but the model's "
         "num_layers = 4 fill 6 at most, with the embedding and the head alone in the first and the last: set "
         "layout.pp to 2"),
        ("pp=2,stage_boundaries=1;3", "layout.stage_boundaries = [1, 3] must be 1 block number, ascending and 4 at "
         "most, for layout.pp = 2 x 1 stages a rank: set layout.stage_boundaries to [2], or leave "
         "layout.stage_boundaries out"),
        ("pp=3,stage_boundaries=3;3", "layout.stage_boundaries = [3, 3] must be 2 block numbers, ascending and 4 at "
         "most, for layout.pp = 3 x 1 stages a rank: set layout.stage_boundaries to [1, 2], or leave "
         "layout.stage_boundaries out"),
        ("pp=2,stage_boundaries=5", "layout.stage_boundaries = [5] must be 1 block number, ascending and 4 at "
         "most, for layout.pp = 2 x 1 stages a rank: set layout.stage_boundaries to [2], or leave "
         "layout.stage_boundaries out"),
        ("stage_boundaries=2", "layout.stage_boundaries = [2] cut up a pipeline: leave "
         "layout.stage_boundaries out, or set layout.pp to 2"),
        ("stage_boundaries=2;3;4", "layout.stage_boundaries = [2, 3, 4] cut up a pipeline: leave "
         "layout.stage_boundaries out, or set layout.pp to 4"),
        ("stage_boundaries=2;2", "layout.stage_boundaries = [2, 2] cut up a pipeline: leave "
         "layout.stage_boundaries out"),
        ("pp=2,virtual_stages=9", 'layout.virtual_stages = 9, but layout.schedule = "1F1B" has one stage on each '
         "pipeline rank: set layout.virtual_stages to 1"),
        ("pp=2,virtual_stages=9,schedule=LoopedBFS", "layout.pp = 2 x 9 stages a rank are 18 stages, but the "
         "model's num_layers = 4 fill 6 at most, with the embedding and the head alone in the first and the last: set "
         "layout.virtual_stages to 2"),
        ("virtual_stages=2", "layout.virtual_stages = 2 cuts up a pipeline rank, but layout.pp = 1: set "
         "layout.virtual_stages to 1"),
        ("virtual_stages=3,schedule=LoopedBFS", "layout.virtual_stages = 3 cuts up a pipeline rank, but layout.pp = 1: "
         "set layout.virtual_stages to 1, or layout.pp to 2"),
        ("pp=2,schedule=ZBVZeroBubble,reshard_after_forward=always", 'layout.reshard_after_forward = "always" frees '
         'parameters that the split backward of layout.schedule = "ZBVZeroBubble" still reads: set '
         'layout.reshard_after_forward to "never" or "auto"'),
        ("dp_shard=12,reshard_after_forward=5", "layout.reshard_after_forward = 5 must divide layout.dp_shard x cp = "
         '12 into groups of several ranks: set layout.reshard_after_forward to 4 or 6 or "always"'),
        ("dp_shard=4,pp=2,tp=2,reshard_after_forward=2", "layout.reshard_after_forward = 2 keeps parameters on groups "
         "of ranks, which torch cannot do with layout.pp = 2 and layout.tp = 2: set layout.reshard_after_forward to "
         '"always" or "auto"'),
        ("dp_shard=2,reshard_after_forward=2", "layout.reshard_after_forward = 2 must divide layout.dp_shard x cp = 2 "
         'into groups of several ranks: set layout.reshard_after_forward to "always"'),
        ("activation_checkpoint_every=2", "layout.activation_checkpoint_every = 2 has nothing to apply with "
         'layout.activation_checkpoint = "none": set layout.activation_checkpoint to "full" or "selective", or '
         "layout.activation_checkpoint_every to 1"),
        ("activation_checkpoint_blocks=full;none", "layout.activation_checkpoint_blocks names 2 blocks of a model with "
         "num_layers = 4: leave layout.activation_checkpoint_blocks out, or name 4"),
        ("activation_checkpoint=full,activation_checkpoint_blocks=full;none;none;none",
         "layout.activation_checkpoint_blocks says what each block saves, but layout.activation_checkpoint = "
         '"full" and layout.activation_checkpoint_every = 1 say it, too: leave '
         "layout.activation_checkpoint_blocks out, or set layout.activation_checkpoint to "
         '"none" and layout.activation_checkpoint_every to 1'),
        ("activation_checkpoint=auto,activation_offload=true", 'layout.activation_checkpoint = "auto" recomputes what '
         "the device alone cannot hold, but layout.activation_offload = true moves it to the host: set "
         'layout.activation_checkpoint to "full" or "none", or layout.activation_offload to false'),
        ("tp=2,async_tp=true,compile_backend=eager", "layout.async_tp = true needs matmuls that are split and "
         'compiled by inductor, but layout.compile = true is not set and layout.compile_backend = "eager": set '
         'layout.compile to true and layout.compile_backend to "inductor", or layout.async_tp to false'),
        ("async_tp=true,compile=true", "layout.async_tp = true needs matmuls that are split and compiled by inductor, "
         "but layout.tp = 1: set layout.tp to 2, or layout.async_tp to false"),
    ],
)  # fmt: skip
def test_golden_messages(layout: str, problem: str) -> None:
    assert layout_problems(SMALL, parse_layout(layout)) == [problem]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("tp=6", "layout.tp = 6 does not divide the model's num_heads = 4 and ffn_dim = 512: set layout.tp to 2 or 4"),
        ("ep=2", "layout.ep = 2 does not divide layout.dp_shard x cp x tp = 1: set layout.ep to 1"),
        ("dp_shard=8,ep=8", "layout.ep = 8 does not divide the model's num_experts = 12: set layout.ep to 2 or 4"),
        (
            "dp_shard=2,tp=2,etp=2,ep=4",
            "layout.ep = 4 does not divide layout.dp_shard x cp = 2: set layout.ep to 1 or 2",
        ),
        ("tp=4,etp=2", "layout.etp = 2 is neither 1 nor layout.tp = 4: set layout.etp to 1 or 4"),
    ],
)
def test_golden_messages_about_experts(layout: str, problem: str) -> None:
    assert split_problems(parse_layout(layout), EXPERTS, 96) == [problem]


def test_the_width_of_an_expert_is_split_by_etp_only() -> None:
    odd = EXPERTS.replace(expert_ffn_dim=9, num_shared_experts=0)
    assert split_problems(Layout(tp=2), odd, 64) == []
    assert split_problems(Layout(tp=2, etp=2), odd, 64) == [
        "layout.etp = 2 does not divide the model's expert_ffn_dim = 9: set layout.etp to 1"
    ]
    shared = EXPERTS.replace(expert_ffn_dim=9)
    assert split_problems(Layout(tp=2), shared, 64) == [
        "layout.tp = 2 does not divide the model's num_shared_experts x expert_ffn_dim = 9: set layout.tp to 1"
    ]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        (DENSE, "dp_replicate=2,dp_shard=2,cp=2,tp=2,pp=2"),
        (DENSE, "tp=4"),  # two ranks share each key head
        (DENSE, "pp=6"),  # embedding, four blocks, head
        (DENSE, "pp=2,stage_boundaries=0"),
        (DENSE, "tp=2,cp=2,cp_method=ulysses"),
        (DENSE, "dp_shard=4,reshard_after_forward=2"),
        (DENSE, "pp=2,schedule=DualPipeV,reshard_after_forward=never"),
        (EXPERTS, "dp_shard=2,cp=2,tp=2,pp=2,ep=4"),
        (EXPERTS, "dp_shard=2,cp=2,tp=2,pp=2,ep=4,etp=2"),
        (EXPERTS.replace(num_dense_layers=0, ffn_dim=7), "tp=2"),  # no layer has an ffn of that width
        (LATENT, "tp=4,cp=2,cp_method=ulysses"),
    ],
)
def test_what_is_valid(architecture: LlamaArchitecture, layout: str) -> None:
    assert split_problems(parse_layout(layout), architecture, 64) == []


def test_eight_key_heads_are_shared_by_sixteen_ranks() -> None:
    llama = Job(model=ModelSection(source="llama3-405b"), train=TrainSection(seq_len=8192, global_batch_size=16))
    assert layout_problems(llama, Layout(tp=16)) == []
    assert layout_problems(llama, Layout(tp=24)) == [
        "layout.tp = 24 does not divide the model's num_heads = 128 and ffn_dim = 53248: set layout.tp to 16 or 32",
    ]


def test_a_key_head_of_odd_width_is_not_cut() -> None:
    heads = DENSE.replace(num_heads=12, num_kv_heads=3, head_dim=2)
    assert split_problems(Layout(tp=6), heads.replace(ffn_dim=12), 60) == []
    assert split_problems(Layout(tp=12), heads.replace(ffn_dim=12), 60) == [
        "layout.tp = 12 neither divides the model's num_kv_heads = 3 nor is a multiple of it that divides num_kv_heads "
        "x head_dim = 6: set layout.tp to 3 or 6"
    ]


def test_everything_is_told_at_once() -> None:
    layout = parse_layout("dp_shard=5,cp=3,tp=8,ep=2,pp=9,etp=3,activation_checkpoint_every=2,schedule=ZBV")
    keys = [text.split()[0] for text in layout_problems(SMALL, layout)]
    assert keys == [
        "train.global_batch_size",
        "train.seq_len",
        "layout.tp",
        "layout.ep",
        "layout.etp",
        "layout.pp",
        "layout.activation_checkpoint_every",
        "layout.schedule",
    ]


def test_what_a_class_of_ones_own_can_take_is_not_guessed() -> None:
    own = SMALL.replace(model=ModelSection(source="mine:Model"))
    assert layout_problems(own, parse_layout("pp=2,tp=8,dp_shard=2,ep=2,cp=2,cp_method=ulysses")) == []
    assert [text.split()[0] for text in layout_problems(own, parse_layout("cp=3,ep=2"))] == [
        "train.seq_len",
        "layout.ep",
    ]


few = st.sampled_from([1, 2, 3, 4, 6, 8])
layouts = st.builds(
    Layout,
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "microbatch_size"), few),
    schedule=st.sampled_from([*SCHEDULES, "mine.csv", "1f1b"]),
    virtual_stages=st.none() | few,
    stage_boundaries=st.none() | st.lists(few, max_size=4).map(tuple),
    cp_method=st.sampled_from(["all-gather", "ring", "ulysses"]),
    activation_checkpoint=st.sampled_from(["none", "full"]),
    activation_checkpoint_every=few,
    reshard_after_forward=st.sampled_from(["auto", "always", "never"]) | few,
    gradient_sync=st.sampled_from(["auto", "step", "microbatch"]),
    **dict.fromkeys(("async_tp", "compile"), st.booleans()),
)


@st.composite
def architectures(draw: st.DrawFn) -> LlamaArchitecture:
    num_kv_heads, sizes = draw(few), {name: draw(few) * draw(few) for name in ("vocab_size", "ffn_dim", "dim")}
    sizes |= {"num_layers": draw(few), "head_dim": 2 * draw(few)}
    sizes |= {"num_kv_heads": num_kv_heads, "num_heads": num_kv_heads * draw(few)}
    if draw(st.booleans()):
        return LlamaArchitecture(**sizes)
    dense, shared = draw(st.integers(0, 1)), draw(st.integers(0, 2))
    return MoEArchitecture(
        **sizes,
        num_experts=draw(few) * 2,
        experts_per_token=2,
        expert_ffn_dim=draw(few) * draw(few),
        num_dense_layers=dense,
        num_shared_experts=shared,
    )


cases = st.tuples(layouts, architectures(), st.integers(1, 100), st.integers(1, 100))


@pytest.mark.parametrize(
    ("layout", "has_other"),
    [
        ("stage_boundaries=2,schedule=ZBVZeroBubble,virtual_stages=1", False),
        ("stage_boundaries=2,schedule=mine.csv,virtual_stages=2", False),
        ("stage_boundaries=1;2;3,schedule=mine.csv,virtual_stages=2", True),
    ],
)
def test_pipeline_ranks_are_suggested_for_boundaries_that_they_would_fill(layout: str, has_other: bool) -> None:
    (text,) = (one for one in split_problems(parse_layout(layout), DENSE, 64) if "stage_boundaries" in one)
    assert ("or set layout.pp to" in text) == has_other


@pytest.mark.slow
@given(cases)
def test_a_message_names_a_key_and_a_cure(case: tuple[Layout, LlamaArchitecture, int, int]) -> None:
    for text in problems_of(*case):
        key, equals, _ = text.split(" ", 2)
        assert key.startswith(("layout.", "train."))
        assert equals == "="
        assert any(f": {cure}" in text for cure in ("set ", "leave ", "choose ")) or not text.fixes, text
        assert "\n" not in text


@pytest.mark.slow
@given(cases)
def test_what_is_suggested_works(case: tuple[Layout, LlamaArchitecture, int, int]) -> None:
    layout, architecture, seq_len, batch = case
    job = job_of(architecture, TrainSection(seq_len=seq_len, global_batch_size=batch))
    problems = layout_problems(job, layout)
    for problem in problems:
        assert sorted(map(json.dumps, suggestions(problem))) == sorted(map(json.dumps, problem.fixes))
        for fix in problem.fixes:
            changed = layout.replace(**{key[7:]: value for key, value in fix.items() if key.startswith("layout.")})
            train = {key: value for key, value in fix.items() if key.startswith("train.")}
            left = layout_problems(with_fix(job, train), changed)
            assert subjects(left) < subjects(problems), (problem, fix, left)
            assert problem not in left


requests = (layouts, st.integers(1, 40), st.integers(1, 100), st.booleans(), st.integers(1, 24))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(*requests)
def test_what_is_suggested_works_on_a_number_of_ranks(
    layout: Layout, seq_len: int, batch: int, in_tokens: bool, num_ranks: int
) -> None:
    assert_what_is_suggested_works(layout, seq_len, batch, in_tokens, num_ranks)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(*requests)
def test_what_is_suggested_works_on_a_number_of_ranks_for_many_jobs(
    layout: Layout, seq_len: int, batch: int, in_tokens: bool, num_ranks: int
) -> None:
    assert_what_is_suggested_works(layout, seq_len, batch, in_tokens, num_ranks)


def assert_what_is_suggested_works(layout: Layout, seq_len: int, batch: int, in_tokens: bool, num_ranks: int) -> None:
    """The degrees that are not named are then changed as well: dp_shard takes what the fix leaves."""
    size = {"global_batch_tokens": batch} if in_tokens else {"global_batch_size": batch}
    request = {name: value for name, value in layout.to_dict().items() if name != "dp_shard" and value is not None}
    job = Job.from_dict({"train": {"seq_len": seq_len, **size}, "layout": request})
    for ranks in (None, num_ranks):
        problems = job.problems(num_ranks=ranks)
        for problem in problems:
            for fix in problem.fixes:
                left = with_fix(job, fix).problems(num_ranks=ranks)
                assert subjects(left) < subjects(problems), (problem, fix, left)
    # A load, which knows no ranks, reports nothing that some number of ranks would not.
    anyhow = {problem.what for problem in job.problems_on_any_ranks()}
    assert anyhow <= {problem.what for problem in job.problems(num_ranks=num_ranks)}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(layouts, st.integers(1, 100), st.integers(1, 24))
def test_one_fix_after_the_other_ends(layout: Layout, batch: int, num_ranks: int) -> None:
    """Each check leaves fewer problems than the last, until none is left or none has a suggestion."""
    request = {name: value for name, value in layout.to_dict().items() if name != "dp_shard" and value is not None}
    job = Job.from_dict({"train": {"seq_len": 96, "global_batch_size": batch}, "layout": request})
    problems = job.problems(num_ranks=num_ranks)
    while fixes := [fix for problem in problems for fix in problem.fixes[:1]]:
        job = with_fix(job, fixes[0])
        before, problems = len(problems), job.problems(num_ranks=num_ranks)
        assert len(problems) < before


@pytest.mark.long
@pytest.mark.slow
@given(jobs())
@settings(max_examples=6, deadline=None)
def test_what_is_suggested_for_any_job_works(job: Job) -> None:
    problems = job.problems()
    for problem in problems:
        for fix in problem.fixes:
            assert subjects(with_fix(job, fix).problems()) < subjects(problems), (problem, fix)


def test_what_a_newcomer_was_told_in_turn() -> None:
    """Messages whose first fix was refused by the next check."""
    short = Job(train=TrainSection(seq_len=128))
    assert [one.fixes for one in with_fix(short, {"layout.tp": 3}).problems()] == [({"layout.tp": 2}, {"layout.tp": 4})]
    deep = with_fix(short, {"layout.pp": 16})
    assert [one.fixes for one in deep.problems()] == [({"layout.pp": 4},)]
    # dp_shard = 4 leaves each rank 2 sequences for 4 stages
    assert [one.fixes for one in deep.problems(num_ranks=16)] == [({"layout.pp": 4, "train.global_batch_size": 16},)]
    bidirectional = with_fix(short, {"layout.pp": 4, "layout.schedule": "ZBVZeroBubble"})
    assert [one.fixes for one in bidirectional.problems()] == [({"layout.pp": 2},)]


@pytest.mark.parametrize(
    ("num_ranks", "fixes"),
    [
        (8, ({"layout.tp": 2}, {"layout.tp": 4})),
        (2, ({"layout.tp": 2}, {"layout.tp": 1})),
        (6, ({"layout.tp": 2, "train.global_batch_size": 6},)),  # dp_shard = 3 does not divide 8
    ],
)
@pytest.mark.parametrize("dp_shard", [{}, {"dp_shard": -1}])
def test_a_wrong_degree_is_all_that_is_reported(
    num_ranks: int, fixes: tuple[Fix, ...], dp_shard: dict[str, int]
) -> None:
    """The ranks and the batch of each follow from it; what is suggested is tried on the ranks that are given."""
    job = Job(train=TrainSection(seq_len=64), layout=LayoutRequest(tp=3, **dp_shard))
    (problem,) = job.problems(num_ranks=num_ranks)
    assert problem.subject == "layout.tp"
    assert problem.fixes == fixes


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ({"dp_shard": 4, "tp": 3}, "set layout.tp to 2 and start 8 ranks"),
        ({"dp_replicate": 4, "tp": 3}, "set layout.tp to 2 and start 8 ranks"),
        ({"dp_shard": 1, "tp": 3}, "set layout.tp to 2 and start 2 ranks"),
    ],
)
def test_a_degree_that_no_change_makes_right_comes_with_a_number_of_ranks(layout: dict[str, int], advice: str) -> None:
    job = Job(train=TrainSection(seq_len=64), layout=LayoutRequest(**layout))
    (problem,) = job.problems(num_ranks=6)
    assert problem == f"layout.tp = 3 does not divide the model's num_heads = 4 and ffn_dim = 512: {advice}"


def test_what_follows_from_a_wrong_tp_is_not_reported_of_experts() -> None:
    assert [one.subject for one in split_problems(parse_layout("tp=3,ep=2,dp_shard=1"), EXPERTS, 96)] == ["layout.tp"]
    assert [one.subject for one in split_problems(parse_layout("tp=8,etp=4"), EXPERTS, 96)] == ["layout.tp"]
    assert [one.subject for one in split_problems(parse_layout("tp=8,ep=5"), EXPERTS, 96)] == ["layout.tp", "layout.ep"]


@pytest.mark.parametrize("num_ranks", [None, 1, 2, 4])
def test_a_batch_of_no_whole_microbatches_is_one_problem_on_any_number_of_ranks(num_ranks: int | None) -> None:
    layout = {"microbatch_size": 3} | ({"dp_shard": -1} if num_ranks is None else {})
    job = Job.from_dict({"train": {"global_batch_size": 16}, "layout": layout})
    problems = [*job.problems_on_any_ranks(), *job.problems(num_ranks=num_ranks)]
    what = "train.global_batch_size = 16 does not divide by layout.microbatch_size = 3"
    assert [problem.what for problem in problems] == [what, what]
    assert {"layout.microbatch_size": 2} in problems[0].fixes


def test_what_a_left_out_dp_shard_decides_waits_for_the_ranks() -> None:
    job = Job.from_dict({"model": {"source": "moe-4m"}, "layout": {"ep": 2}})
    assert job.problems_on_any_ranks() == []
    assert [one.subject for one in job.problems()] == ["layout.ep"]
    assert job.problems(num_ranks=2) == []
    odd = job.replace(layout=LayoutRequest(ep=3))
    assert [one.subject for one in odd.problems(num_ranks=3)] == ["train.global_batch_size", "layout.ep"]


def test_numbers_of_ranks_are_suggested_that_divide_the_batch() -> None:
    job = Job(train=TrainSection(seq_len=64), layout=LayoutRequest(tp=4))
    assert job.problems(num_ranks=14) == [
        "14 ranks do not divide by tp=4, so layout.dp_shard has no value: set layout.tp to 2 and "
        "train.global_batch_size to 7, or start 8 or 16 ranks"
    ]
    assert job.problems(num_ranks=1)[0].startswith("1 rank does not divide by tp=4")


def job_of(architecture: LlamaArchitecture, train: TrainSection) -> Job:
    """Return a job whose model has just these sizes."""
    source = "moe-4m" if isinstance(architecture, MoEArchitecture) else "llama-1m"
    options = {name: value for name, value in architecture.to_dict().items() if value is not None}
    job = Job(model=ModelSection(source=source, options=options), train=train)
    assert resolve_architecture(job.model) == architecture
    return job


def subjects(problems: list[Problem]) -> Counter[str]:
    """Return how many messages begin with each key."""
    return Counter(problem.split()[0] for problem in problems)


def problems_of(layout: Layout, architecture: LlamaArchitecture, seq_len: int, global_batch_size: int) -> list[Problem]:
    """Return what is wrong with a layout of a model of these sizes."""
    train = TrainSection(seq_len=seq_len, global_batch_size=global_batch_size)
    return layout_problems(job_of(architecture, train), layout)


def suggestions(problem: Problem) -> list[Fix]:
    """Return the changes that the words of a message offer: one for each value to choose from."""
    advice = problem.removeprefix(problem.what).removeprefix(": ")
    ways = [way.removeprefix("set ").removesuffix(" or less") for way in advice.split(", or ")]
    found: list[Fix] = []
    for way in ways:
        if not way.startswith("leave ") and " to " not in way:
            continue
        parts = [part.removeprefix("leave ").removesuffix(" out").partition(" to ") for part in way.split(" and ")]
        if len(parts) == 1:
            name, _, values = parts[0]
            found += [{name: json.loads(value)} for value in values.split(" or ")] if values else [{name: None}]
        else:
            found.append({name: json.loads(value) if value else None for name, _, value in parts})
    return found


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("gpt-oss-4m", {}, "attention sinks and sliding_window = 32"),
        ("llama-1m", {"sliding_window": 64}, "sliding_window = 64"),
        ("gpt-oss-4m", {"layer_types": ["full_attention"]}, "attention sinks"),
    ],
)
def test_a_ring_has_neither_sinks_nor_windows(source: str, options: dict[str, Any], message: str) -> None:
    architecture = resolve_architecture(ModelSection(source=source, options=options))
    [problem] = split_problems(Layout(cp=2, cp_method="ring"), architecture, 64)
    assert problem.startswith(f'layout.cp_method = "ring" does not compute the model\'s {message}')
    assert [*problem.fixes] == [{"layout.cp_method": "all-gather"}, {"layout.cp_method": "ulysses"}]
    for method in ("all-gather", "ulysses"):
        assert split_problems(Layout(cp=2, cp_method=method), architecture, 64) == []
