"""`meshwright evaluate`: accuracy of a trained model on multiple-choice questions and other tasks."""

from pathlib import Path

import click

from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("source", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--tasks",
    required=True,
    metavar="TASK,...",
    help="JSONL files of questions; with the extra eval also tasks of lm-evaluation-harness, or YAML files of one.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Questions of each task, the first ones; default: all.")
@click.option("--step", type=int, help="Checkpoint of a run to use; default: the newest.")
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before each question; default: the task's.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Rows at once.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Tokens that the model reads at most; default: a run's train.seq_len, else the model's context length.",
)
@click.option(
    "--delimiter", default=" ", show_default=True, help="Text between a query of a JSONL file and each choice."
)
def command(
    source: Path,
    tasks: str,
    limit: int | None,
    step: int | None,
    num_fewshot: int | None,
    batch_size: int,
    max_tokens: int | None,
    delimiter: str,
    as_json: bool,
) -> None:
    """Ask the model in RUN_OR_FOLDER the questions of tasks: a run, one of its checkpoints, a Hugging Face folder, or
    the id of a model in the cache of huggingface_hub.

    A line of a JSONL file is {"query": "The sky is", "choices": ["blue", "wet"], "answer": 0}: acc is the share of
    questions whose answer is the most likely choice, acc_norm that by character, acc_bytes that by byte.
    """
    from meshwright.checkpoint.format.find_checkpoint import find_checkpoint, is_hugging_face
    from meshwright.data.questions.question_set import QUESTION_SUFFIXES, read_questions
    from meshwright.spec.model.hf.hub_cache import local_path

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    # Before torch is imported, which takes seconds.
    if not is_hugging_face(local_path(str(source))):
        find_checkpoint(source, step)
    for name in names:
        if name.endswith(QUESTION_SUFFIXES):
            list(read_questions(Path(name), limit))
    from meshwright.app.conversion.evaluate_tasks import evaluate

    found = evaluate(
        source,
        names,
        step=step,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        max_tokens=max_tokens,
        delimiter=delimiter,
    )
    print_result(found, as_json)
