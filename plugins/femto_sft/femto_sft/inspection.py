"""`femto sft-inspect`: conversations token by token, with the trained tokens marked, and the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
from rich.console import Console
from rich.text import Text

from femto_core.cli import quiet_libraries
from femto_core.errors import UserError
from femto_sft.cache import packed_rows, report
from femto_sft.conversation import Problem
from femto_sft.encoder import make_encoder
from femto_sft.filter_report import ConversationCounts
from femto_sft.prepare import Reader, cut
from femto_sft.section import SFTSection, day_of
from femto_sft.sources import find_sources
from femto_sft.tokenizer import load_tokenizer
from femto_sft.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from femto_core.config import Config

TRAINED, UNTRAINED, NOTE = "bold green", "bright_black", "cyan"


def inspect_run(config: Config, numbers: Sequence[int]) -> int:
    """Print the conversations `numbers` of a run, and the counts of all."""
    section = config.section(SFTSection)
    section = attrs.evolve(section, date=str(day_of(section)))
    console = Console(highlight=False, soft_wrap=True)
    quiet_libraries()
    tokenizer = load_tokenizer(section.tokenizer, section.template, config.model.path)
    for text in conversations(section, tokenizer, config.data.seq_len, numbers):
        console.print(text)
    for line in report(packed_rows(section, seq_len=config.data.seq_len, model=config.model.path)):
        console.print(line)
    return 0


def conversations(
    section: SFTSection, tokenizer: PreTrainedTokenizerBase, seq_len: int, numbers: Sequence[int]
) -> Iterator[Text]:
    """Yield the conversations `numbers` (counted from 0, in order of reading) as text to show."""
    wanted, last, seen = set(numbers), max(numbers), 0
    encoder = make_encoder(tokenizer, section)
    for number, found in enumerate(
        Reader(find_sources(section.path, section.split), section.format, ConversationCounts()).read()
    ):
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
    """Return one conversation as text: the title, its tokens, and whether it is kept."""
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
    documents = cut(result, seq_len, section, ConversationCounts())
    fate = "" if len(result) <= seq_len else f", over-long for rows of {seq_len}: {section.overlong}"
    left = ", nothing to learn" if not result.learnable else "" if documents else ", left out"
    text.append(f"\n  {len(result)} tokens, {result.learnable} trained{fate}{left}\n", style=NOTE)
    return text
