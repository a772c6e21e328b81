"""`meshwright generate`: a prompt and what the model makes of it, word by word."""

import time
from pathlib import Path

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.log import progress


@result_command
@click.argument("source", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue; without it the model begins a text of its own.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens after which to stop.")
@click.option("--temperature", default=0.8, show_default=True, help="0 always takes the most likely token.")
@click.option("--top-k", type=int, help="Draw from this many most likely tokens; default: all.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest of this probability.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--chat", is_flag=True, help="The prompt is a message in the chat template; print the answer alone.")
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
    chat: bool,
    as_json: bool,
) -> None:
    """Continue a text with the model in RUN_OR_FOLDER: a run, one of its checkpoints, a Hugging Face folder, or the
    id of a model in the cache of huggingface_hub.

    The text goes to standard output, a line about it to standard error.
    """
    from meshwright.checkpoint.format.find_checkpoint import find_checkpoint, is_hugging_face
    from meshwright.spec.model.hf.hub_cache import local_path

    # Before torch is imported, which takes seconds.
    if not is_hugging_face(local_path(str(source))):
        find_checkpoint(source, step)
    from meshwright.inference.generate import Sampling, TextStream, generate
    from meshwright.inference.loaded_model import load_model

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    loaded = load_model(source, step)
    ids = loaded.encode_chat(prompt) if chat else loaded.encode_prompt(prompt)
    shown = "" if chat else prompt
    assert loaded.tokenizer is not None
    tokens = generate(loaded.model, ids, sampling, stop=loaded.stop, num_tokens=loaded.tokenizer.vocab_size)
    stream = TextStream(loaded.tokenizer, ids)
    if not as_json:
        click.echo(shown, nl=False)
    pieces, started_s = [shown], time.perf_counter()
    for token in tokens:
        pieces.append(stream.add(token))
        if not as_json:
            click.echo(pieces[-1], nl=False)
    took_s, num_tokens, last = time.perf_counter() - started_s, len(pieces) - 1, stream.end()
    if as_json:
        text = "".join(pieces) + last
        print_json({"text": text, "num_tokens": num_tokens, "origin": str(loaded.origin), "seed": seed})
    else:
        click.echo(last)
    ending = "" if num_tokens == max_new_tokens else ", then the end of the text"
    rate = f"{num_tokens / took_s:.0f} tokens/s" if took_s else "-"
    progress.info("[%s: %d tokens%s, %s, seed %d]", loaded.origin, num_tokens, ending, rate, seed)
