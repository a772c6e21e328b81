"""A layout as one word: there and back, and what is told about a word that is no layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import SCHEDULES, Layout
from meshwright.spec.layout.layout_text import layout_text, parse_layout

numbers = st.integers(1, 64)
layouts = st.builds(
    Layout,
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "microbatch_size"), numbers),
    schedule=st.sampled_from([*SCHEDULES, "orders/mine.csv"]),
    virtual_stages=st.none() | numbers,
    stage_boundaries=st.none() | st.lists(numbers, min_size=1, max_size=3).map(tuple),
    cp_method=st.sampled_from(["all-gather", "ring", "ulysses"]),
    activation_checkpoint=st.sampled_from(["none", "selective", "full"]),
    activation_checkpoint_every=numbers,
    reshard_after_forward=st.sampled_from(["auto", "always", "never"]) | numbers,
    gradient_sync=st.sampled_from(["auto", "step", "microbatch"]),
    prefetch=st.integers(0, 3),
    **dict.fromkeys(
        (
            "async_tp",
            "cpu_offload",
            "activation_offload",
            "compile",
            "compile_loss",
            "compile_optimizer",
            "separate_reduce_group",
            "cuda_graphs",
        ),
        st.booleans(),
    ),
    communication_sms=st.none() | numbers,
    compile_backend=st.sampled_from(["inductor", "aot_eager", "eager"]),
)


@given(layouts)
def test_there_and_back(layout: Layout) -> None:
    assert parse_layout(layout_text(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "dp_shard=1"),
        (Layout(dp_shard=2, tp=2, pp=2), "pp=2,dp_shard=2,tp=2"),
        (
            Layout(pp=2, schedule="ZBVZeroBubble", stage_boundaries=(1, 2, 3), compile=True),
            "pp=2,schedule=ZBVZeroBubble,stage_boundaries=1;2;3,compile=true",
        ),
    ],
)
def test_only_what_differs_from_the_defaults_is_written(layout: Layout, text: str) -> None:
    assert layout_text(layout) == text


def test_spaces_and_order_are_no_matter() -> None:
    assert parse_layout(" tp = 2, dp_shard=2") == parse_layout("dp_shard=2,tp=2") == Layout(tp=2, dp_shard=2)
    assert parse_layout("pp=2,virtual_stages=none") == Layout(pp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layout '': '' must be key=value, such as dp_shard=2,tp=2"),
        ("tp=2,pp", "layout 'tp=2,pp': 'pp' must be key=value, such as dp_shard=2,tp=2"),
        ("tpp=2", "layout 'tpp=2': unknown key tpp: did you mean tp?"),
        ("train.steps=3", "layout 'train.steps=3': unknown key train.steps: give keys of [layout] alone"),
        ("dp=2", "layout 'dp=2': unknown key dp: did you mean dp_replicate or dp_shard?"),
        ("tp=2,tp=3", "layout 'tp=2,tp=3': tp is given twice: write it once"),
        ("tp=0", "layout 'tp=0': tp=0 must be a whole number, 1 or more: write tp=1, for one"),
        ("cp_method=rings", "layout 'cp_method=rings': cp_method=rings must be all-gather or ring or ulysses: write "
         "cp_method=ring, for one"),
        ("compile=yes", "layout 'compile=yes': compile=yes must be true or false or none or blocks or model or auto: "
         "write compile=true, for one"),
        ("stage_boundaries=1;x", "layout 'stage_boundaries=1;x': stage_boundaries=1;x must be whole numbers, 0 or "
         "more, with ; between them: write stage_boundaries=1;2, for one"),
        ("reshard_after_forward=0", "layout 'reshard_after_forward=0': reshard_after_forward=0 must be auto or always "
         "or never or a whole number, 1 or more: write reshard_after_forward=never, for one"),
        ("tp=x,cp=-1", "layout 'tp=x,cp=-1': cp=-1 must be a whole number, 1 or more: write cp=1, for one\n"
         "layout 'tp=x,cp=-1': tp=x must be a whole number, 1 or more: write tp=1, for one"),
    ],
)  # fmt: skip
def test_what_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text)
    assert str(caught.value) == message


keys = st.sampled_from([*Layout.model_fields, "dp", "x", ""])
words = st.text(st.characters(exclude_characters=","), max_size=6) | st.sampled_from(["9" * 5000, "1;2", "none", "-1"])


@given(st.lists(st.tuples(keys, words), max_size=3))
def test_any_word_is_read_or_explained(pairs: list[tuple[str, str]]) -> None:
    text = ",".join(f"{key}={word}" for key, word in pairs)
    try:
        layout = parse_layout(text)
    except ConfigError:
        return
    assert parse_layout(layout_text(layout)) == layout
