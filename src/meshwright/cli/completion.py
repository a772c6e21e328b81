"""Shell completion: commands and options by click; keys of a job and names of the catalogue here. Loads no torch."""

import os
from collections.abc import Iterable

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, shell_complete


class _Bash(BashComplete):
    """Bash's completion, which splits words at "=", and puts a space behind a completion unless asked not to."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace\n\n    return 0\n"
    )
    _is_split = False

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one whole."""
        args, incomplete = super().get_completion_args()
        if incomplete == "=":
            args, incomplete = [*args, "="], ""
        self._is_split = args[-1:] == ["="]
        return (args[:-2], f"{args[-2]}={incomplete}") if self._is_split else (args, incomplete)

    def format_completion(self, item: CompletionItem) -> str:
        """Return a completion as Bash reads it: behind the "=" at which the word is split."""
        value = item.value.rpartition("=")[2] if self._is_split else item.value
        return f"{item.type},{value}"


def answer_shell(group: click.Group, variable: str) -> int:
    """Return the exit code of what a shell asks for in an environment variable, having printed it."""
    add_completion_class(_Bash)
    return shell_complete(group, {}, "meshwright", variable, os.environ[variable])


def job_words(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what a word after a command may become: a file, a key of a job, or one of the key's values."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _starting(incomplete, (f"{key}={value}" for value in _values_of(key)))
    return [*_files(parameter, incomplete), *_starting(incomplete, _key_words(incomplete))]


def cluster_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the catalogue's clusters; a count follows after a colon."""
    from meshwright.hardware.catalogue import cluster_names

    return _starting(incomplete, cluster_names())


def model_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the presets, and files."""
    from meshwright.spec.model.presets import PRESETS

    return [CompletionItem(incomplete, type="file"), *_starting(incomplete, PRESETS)]


def _files(parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return that a file may be named, where the parameter takes one and no key has begun."""
    return [CompletionItem(incomplete, type="file")] if parameter.name == "words" and "." not in incomplete else []


def _key_words(incomplete: str) -> Iterable[str]:
    """Return the sections, or behind a dot the keys of one."""
    from meshwright.config.keys import SECTIONS, job_keys

    section, dot, _ = incomplete.partition(".")
    if not dot:
        return (f"{name}." for name in SECTIONS)
    return (f"{dotted}=" for dotted, key in job_keys().items() if key.section == section)


def _values_of(dotted: str) -> Iterable[str]:
    from meshwright.config.keys import job_keys

    key = job_keys().get(dotted)
    if key is None:
        return ()
    return ("true", "false") if key.kind == "boolean" else key.choices


def _starting(incomplete: str, words: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
