"""generate: the cache changes nothing, seeds repeat, ends end."""

import pytest
import torch

from hf_models import NARROW, architecture
from meshwright.errors import ConfigError
from meshwright.inference.generate import Sampling, generate
from meshwright.models.initial import initialize
from meshwright.models.llama import Llama

GREEDY = Sampling(max_new_tokens=24, temperature=0)


def build(seed: int = 0, **changes: object) -> Llama:
    model = Llama(architecture(**changes))
    initialize(model, seed)
    with torch.no_grad():
        # Larger weights make a random model's choices differ from position to position.
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("changes", [{}, NARROW, {"qk_norm": True, "tie_embeddings": True}])
@pytest.mark.parametrize("prompt", [[7], list(range(40, 60))])
def test_greedy_with_a_cache_is_the_argmax_of_full_forwards(changes: dict[str, object], prompt: list[int]) -> None:
    model = build(**changes)
    expected = list(prompt)
    for _ in range(GREEDY.max_new_tokens):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    found = list(generate(model, prompt, GREEDY))
    assert found == expected[len(prompt) :]
    assert len(set(found)) > 3, "a constant text would hide a cache that is not read"


def test_the_same_seed_gives_the_same_tokens_and_another_others() -> None:
    model = build()
    texts = [list(generate(model, [1, 2, 3], Sampling(32, 1.0, seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    model = build()
    full = list(generate(model, [5], GREEDY))
    stop = full[4]
    assert list(generate(model, [5], GREEDY, stop={stop})) == full[: full.index(stop)]


def test_tokens_come_one_by_one() -> None:
    tokens = generate(build(), [5], Sampling(10**4, temperature=0))
    assert [next(tokens) for _ in range(3)] == list(generate(build(), [5], Sampling(3, temperature=0)))


@pytest.mark.slow
def test_rows_that_the_tokenizer_has_no_token_for_are_never_drawn() -> None:
    model = build()
    assert max(generate(model, [5], Sampling(200, temperature=5.0), num_tokens=10)) < 10
    assert max(generate(model, [5], Sampling(200, temperature=5.0))) >= 10


@pytest.mark.parametrize(("prompt", "message"), [([], "prompt is empty"), ([264], "token 264, but the model has 264")])
def test_a_foreign_prompt_is_refused_before_anything_is_computed(prompt: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(build(), prompt, GREEDY)
