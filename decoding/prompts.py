"""Prompts: read from JSONL files, turned into token ids. The one reader for all that decode, train or measure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import InputError
from .safe_files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        id: the record's ``id``, or file name and line number where it has none.
        text: the user's words, never blank.
        record: the whole line as it was read (category, answer, …).
        source: file and line, for messages.
    """

    id: str
    text: str
    record: dict[str, Any]
    source: str


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read JSONL: an object a line with ``prompt`` and optionally ``id``, ``category``, …; blank lines are skipped.

    Raises:
        InputError: the file cannot be read or has no prompts, or a line is malformed (named by file and number).
    """
    if Path(path).is_char_device() or Path(path).is_block_device():
        raise InputError(f"Prompts file '{path}' is a device, which may never end: give a file or a pipe")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"Prompts file '{path}' cannot be read ({error.strerror}): check the path") from error
    # Split at newlines alone: str.splitlines would also cut JSON strings at U+2028 and its like.
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    prompts = [_parse_line(line, f"{path}, line {number}", f"{Path(path).stem}-{number}") for number, line in lines]
    if not prompts:
        raise InputError(f"Prompts file '{path}' is empty: write one JSON object with a 'prompt' a line")
    return prompts


def _parse_line(line: bytes, source: str, default_id: str) -> Prompt:
    try:
        record = parse_json(line)
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        raise InputError(f"{source}: not JSON ({error}); write one object with a 'prompt' a line") from error
    if not isinstance(record, dict):
        raise InputError(f"{source}: a JSON {type(record).__name__}; write an object with a 'prompt'")
    text = record.get("prompt")
    if not isinstance(text, str):
        raise InputError(f"{source}: no text under 'prompt'; each line needs one")
    return Prompt(str(record.get("id", default_id)), check_text(text, source), record, source)


def check_text(text: str, source: str) -> str:
    """The text itself.

    Raises:
        InputError: it is blank; ``source`` says whose it is.
    """
    if not text.strip():
        raise InputError(f"{source}: the prompt is empty; give at least one word")
    return text


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat_template: bool = True) -> list[int]:
    """Token ids of a prompt: as a user's turn of the tokenizer's chat template where there is one and it is wanted.

    Args:
        tokenizer: the target's.
        text: the user's words.
        chat_template: False passes the bare text.
    """
    if not chat_template or tokenizer.chat_template is None:
        return list(cast("list[int]", tokenizer(text)["input_ids"]))
    turns = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(cast("dict[str, list[int]]", encoded)["input_ids"])
