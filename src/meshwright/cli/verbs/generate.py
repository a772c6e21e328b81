"""`meshwright generate`: a prompt and what the model makes of it, word by word."""

from __future__ import annotations

import time
from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue; without it the model begins a text of its own.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens after which to stop.")
@click.option("--temperature", default=0.8, show_default=True, help="0 always takes the most likely token.")
@click.option("--top-k", type=int, help="Draw from this many most likely tokens; default: all.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest that have this probability.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--step", type=int, help="Checkpoint of a run to use; default: the newest.")
def command(
    source: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    step: int | None,
) -> None:
    """Continue a text with the model in RUN_OR_FOLDER: a run, one of its checkpoints, or a Hugging Face folder.

    The text goes to standard output, a line about it to standard error.
    """
    from meshwright.inference.generate import generate
    from meshwright.inference.load import load_model
    from meshwright.inference.sampling import Sampling
    from meshwright.inference.text_stream import TextStream

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    loaded = load_model(source, step)
    ids = loaded.encode_prompt(prompt)
    assert loaded.tokenizer is not None
    tokens = generate(loaded.model, ids, sampling, stop=loaded.stop, num_tokens=loaded.tokenizer.vocab_size)
    stream = TextStream(loaded.tokenizer)
    num_tokens = 0
    click.echo(prompt, nl=False)
    started_s = time.perf_counter()
    for token in tokens:
        num_tokens += 1
        click.echo(stream.add(token), nl=False)
    took_s = time.perf_counter() - started_s
    click.echo(stream.end())
    ending = "" if num_tokens == max_new_tokens else ", then the end of the text"
    rate = f"{num_tokens / took_s:.0f} tokens/s" if took_s else "-"
    click.echo(f"[{loaded.origin}: {num_tokens} tokens{ending}, {rate}, seed {seed}]", err=True)
