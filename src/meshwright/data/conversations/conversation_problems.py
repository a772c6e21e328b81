"""Check of conversations before any process starts: records, chat template, targets and lengths."""

from collections.abc import Iterator

from meshwright.data.conversations.chat_template import load_chat_template
from meshwright.data.conversations.encode import ConversationEncoder
from meshwright.data.conversations.records import as_conversation, as_piece, conversation_files, records_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.whole_documents import TARGET_BIT, shortage_of_documents, too_long_problem
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection

_MAX_PROBLEMS = 5


def conversation_problems(section: DataSection, seq_len: int, tokenizer: Tokenizer, read_bytes: int) -> list[str]:
    """Return the problems of the conversations in the first bytes of data.source, one message each.

    Without any, the problems of all of them together: too long ones, too few to learn from.
    """
    try:
        encoder = ConversationEncoder(section, tokenizer, load_chat_template(section, tokenizer))
        files = conversation_files(section)
    except MeshwrightError as error:
        return [str(error)]
    found: list[str] = []
    lengths: list[int] = []
    num_with_targets, left = 0, min(section.max_bytes, read_bytes)
    for path in files:
        records = records_of(path, section)
        while left > 0 and len(found) < _MAX_PROBLEMS:
            where = str(path)
            try:
                where, record = next(records)
                conversation = as_conversation(record, where, section)
                (ids,) = encoder.encode([conversation])
            except StopIteration:
                break
            except MeshwrightError as error:
                found.append(str(error) if str(error).startswith(where) else f"{where}: {error}")
                continue
            left -= len(as_piece(conversation).utf8)
            lengths.append(len(ids))
            num_with_targets += bool((ids[1 : seq_len + 1] & TARGET_BIT).any())
    return found or [*_together(section, seq_len, lengths, num_with_targets)]


def _together(section: DataSection, seq_len: int, lengths: list[int], num_with_targets: int) -> Iterator[str]:
    problem = too_long_problem(lengths, section, seq_len) if section.too_long == "stop" else None
    if problem is not None:
        yield problem
    elif shortage := shortage_of_documents(num_with_targets, section):
        yield shortage
