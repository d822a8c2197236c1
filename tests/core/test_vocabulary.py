"""A tokenizer may have more tokens than the embedding has rows: what the rows of data hold decides."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_tools.testing import RandomRows, RandomTask, make_trainer

EMBEDDED = 32


@attrs.frozen
class Rows(RandomRows):
    """Rows of a tokenizer with 40 tokens."""

    largest: int = 0

    def largest_id(self) -> int:
        return self.largest


@attrs.frozen
class Task(RandomTask):
    train: int = EMBEDDED - 1
    held_out: int = EMBEDDED - 1

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        largest = {"train": self.train, "held_out": self.held_out}[split]
        return Rows(self, config.data.seq_len, 40, 0, largest=largest)


class Wide(RandomTask):
    """Rows that do not say which ids they hold."""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return RandomRows(self, config.data.seq_len, 40, 0)


def test_tokens_that_no_row_holds_are_no_obstacle(world_of_one: None) -> None:
    make_trainer({}, (), {"task": Task()}).close()


@pytest.mark.parametrize(
    ("task", "largest"), [(Task(train=EMBEDDED), 32), (Task(held_out=35), 35), (Wide(), 39)], ids=["32", "35", "39"]
)
def test_a_row_with_a_token_that_the_model_lacks_is_refused(world_of_one: None, task: RandomTask, largest: int) -> None:
    with pytest.raises(
        UserError, match=rf"^the data holds token ids up to {largest}, the model has only 32 tokens; use"
    ):
        make_trainer({}, (), {"task": task})
