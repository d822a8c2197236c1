"""`femto sft-inspect`: conversations token by token, what of them is trained, and the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from femto_core.errors import UserError
from femto_sft.cache import packed_rows, report
from femto_sft.conversation import Problem
from femto_sft.counts import Counts
from femto_sft.encoder import make_encoder
from femto_sft.prepare import Reader, cut
from femto_sft.section import SFTSection
from femto_sft.sources import find_sources
from femto_sft.tokenizer import load_tokenizer
from femto_sft.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USAGE = (
    "Show conversations token by token, and what of them is trained: [RUN.toml] [--plugins sft] [--show 0,3,7] "
    "[--section.key value ...]. Trained tokens are green and in [brackets], the others grey between bars."
)
TRAINED, UNTRAINED, NOTE = "bold green", "bright_black", "cyan"


def inspect_command(words: Sequence[str]) -> int:
    """`femto sft-inspect [RUN.toml] --plugins sft [--show NUMBERS] [--section.key value ...]`."""
    from femto_core.cli import quiet_libraries, read_run

    rest = list(words)
    numbers = take_numbers(rest, "--show", (0, 1, 2))
    config, _ = read_run("sft-inspect", rest, USAGE)
    section = config.section(SFTSection)
    console = Console(highlight=False, soft_wrap=True)
    quiet_libraries()
    tokenizer = load_tokenizer(section.tokenizer, section.template, config.model.path)
    for text in conversations(section, tokenizer, config.data.seq_len, numbers):
        console.print(text)
    for line in report(packed_rows(section, seq_len=config.data.seq_len, model=config.model.path)):
        console.print(line)
    return 0


def take_numbers(words: list[str], flag: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Remove `flag` and its value from `words` and return the numbers in it."""
    if flag not in words:
        return default
    at = words.index(flag)
    value = words[at + 1] if at + 1 < len(words) else ""
    parts = [part for part in value.split(",") if part]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"{flag} needs numbers, separated by commas, got {value!r}")
    del words[at : at + 2]
    return tuple(map(int, parts))


def conversations(
    section: SFTSection, tokenizer: PreTrainedTokenizerBase, seq_len: int, numbers: Sequence[int]
) -> Iterator[Text]:
    """Yield the conversations `numbers` (from 0, in order of reading) as text to show."""
    wanted, last, seen = set(numbers), max(numbers), 0
    encoder = make_encoder(tokenizer, section)
    for number, found in enumerate(Reader(find_sources(section.path, section.split), section.format, Counts()).read()):
        seen = number + 1
        if number > last:
            break
        if number not in wanted:
            continue
        read = found.conversation
        if isinstance(read, Problem):
            result: Tokens | Problem = read
        else:
            result = encoder.encode([read])[0] if read.turns else Problem("holds no turns")
        yield show(result, f"conversation {number}: {found.where}", tokenizer, seq_len, section)
    if seen <= last and (absent := [number for number in numbers if number >= seen]):
        raise UserError(f"there is no conversation {absent[0]}: {', '.join(section.path)} has 0 to {seen - 1}")


def show(
    result: Tokens | Problem,
    title: str,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    section: SFTSection,
) -> Text:
    """Return one conversation: a title, its tokens, and what becomes of it."""
    text = Text(f"{title}\n", style=NOTE)
    if isinstance(result, Problem):
        return text.append(f"  {result.reason}\n", style="red")
    text.append("  ")
    pieces = [str(tokenizer.decode([token])) for token in result.ids.tolist()]
    for piece, trained in zip(pieces, result.trained.tolist(), strict=True):
        visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)
        text.append(f"[{visible}]" if trained else f"{visible}|", style=TRAINED if trained else UNTRAINED)
        if piece.endswith("\n"):
            text.append("\n  ")
    documents = cut(result, seq_len, section, Counts())
    fate = "" if len(result) <= seq_len else f", over-long for rows of {seq_len}: {section.overlong}"
    left = ", nothing to learn" if not result.learnable else "" if documents else ", left out"
    text.append(f"\n  {len(result)} tokens, {result.learnable} trained{fate}{left}\n", style=NOTE)
    return text
