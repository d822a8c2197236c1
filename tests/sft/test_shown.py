"""What the chat template does not show is not lost in silence: the row is refused, or the log says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from femto_sft.conversation import Problem
from tests.sft import making
from tests.sft.making import encode, encoded, log_of, make_tokenizer, refusal, rows_of, said, texts, write_lines

QUESTION, ANSWER = {"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}
PLAIN = {"messages": [QUESTION, ANSWER]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "listen")
]
CALLS = [
    {"type": "function", "function": {"name": name, "arguments": {"at": name}}} for name in ("look", "listen", "look")
]


def row(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def calling(*calls: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


ONLY_FIRST = making.CALLING.replace("for c in m.tool_calls or []", "for c in (m.tool_calls or [])[:1]")
NO_ARGUMENTS = making.CALLING.replace("{{ c.function.arguments | tojson }}", "{}")
ONE_TOOL = making.CALLING.replace("for t in tools", "for t in tools[:1]")
CALL_OR_CONTENT = making.CALLING.replace("{{ m['content'] }}", "{{ m['content'] if not m.tool_calls }}")
FIRST_SYSTEM = making.NO_TOOLS.replace("if m['role'] in", "if (m['role'] != 'system' or loop.first) and m['role'] in")
WITHOUT_SYSTEM_CONTENT = making.PLAIN_CHATML.replace("{{ m['content'] }}", "{% if m['content'] %}said{% endif %}")
HIDDEN = {
    "tools": (making.NO_TOOLS, row(QUESTION, ANSWER, tools=TOOLS[:1]), "its 'tools', so"),
    "one of two tools": (ONE_TOOL, row(QUESTION, ANSWER, tools=TOOLS), "tools[1], so"),
    "calls": (making.NO_TOOLS, row(QUESTION, calling(*CALLS)), "the 'tool_calls' of turn 2 (role 'assistant'), so"),
    "calls beside tools": (
        making.NO_TOOLS,
        row(QUESTION, calling(*CALLS), tools=TOOLS),
        "its 'tools' and the 'tool_calls' of turn 2 (role 'assistant'), so",
    ),
    "the second call": (ONLY_FIRST, row(QUESTION, calling(*CALLS[:2])), "the 'tool_calls[1]' of turn 2"),
    "arguments": (NO_ARGUMENTS, row(QUESTION, calling(CALLS[0])), "the 'tool_calls[0].arguments' of turn 2"),
    "content beside a call": (
        CALL_OR_CONTENT,
        row(QUESTION, calling(CALLS[0], content="I look.")),
        "the 'content' of turn 2 (role 'assistant'), so",
    ),
    "a role": (
        making.NO_TOOLS,
        row(QUESTION, ANSWER, {"role": "tool", "content": "42"}, ANSWER),
        "the 'content' of turn 3 (role 'tool'), so",
    ),
    "a second system turn": (
        FIRST_SYSTEM,
        row({"role": "system", "content": "a"}, {"role": "system", "content": "b"}, QUESTION, ANSWER),
        "the 'content' of turn 2 (role 'system'), so",
    ),
    "a developer beside a system turn": (
        FIRST_SYSTEM,
        row({"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, QUESTION, ANSWER),
        "the 'content' of turn 2 (role 'developer'), so",
    ),
    "a text of which only the presence is shown": (
        WITHOUT_SYSTEM_CONTENT,
        PLAIN,
        "the 'content' of turn 1 (role 'user') and the 'content' of turn 2 (role 'assistant'), so",
    ),
    "a name": (making.PLAIN_CHATML, row({**QUESTION, "name": "Ann"}, ANSWER), "the 'name' of turn 1 (role 'user'), so"),
    **{
        key: (
            making.PLAIN_CHATML,
            row(QUESTION, {**ANSWER, key: "so"}),
            f"the '{key}' of turn 2 (role 'assistant'), so",
        )
        for key in ("reasoning_content", "reasoning", "thinking", "function_call")
    },
    "earlier reasoning in a template that shows none": (
        making.PLAIN_CHATML,
        row(QUESTION, {**ANSWER, "reasoning": "so"}, QUESTION, ANSWER),
        "the 'reasoning' of turn 2 (role 'assistant'), so",
    ),
    "reasoning within the content": (
        making.PLAIN_CHATML.replace("m['content']", "m['content'].split('</think>') | last"),
        row(QUESTION, {**ANSWER, "content": "<think>so</think>yes"}),
        "the 'content before </think>' of turn 2 (role 'assistant'), so",
    ),
}


@pytest.mark.parametrize(("template", "hidden", "words"), HIDDEN.values(), ids=HIDDEN)
def test_a_part_that_is_not_shown_is_refused_by_line_and_name(
    tmp_path: Path, template: str, hidden: dict[str, Any], words: str
) -> None:
    file = write_lines(tmp_path / "a.jsonl", PLAIN if hidden is not PLAIN else {"messages": []}, hidden)
    text = refusal(tmp_path, file, template=template, seq_len=256)
    assert text.startswith(f"{file}, line 2: the chat template (sft.template) does not show {words}")
    assert text.endswith("; correct it, or set --sft.malformed skip")


def test_or_it_is_skipped_and_counted(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", PLAIN, row(QUESTION, calling(*CALLS)), PLAIN)
    rows = rows_of(tmp_path, file, template=making.NO_TOOLS, malformed="skip")
    assert len(texts(rows)) == 2
    assert (
        f"1 malformed rows skipped, the first of them {file}, line 2: the chat template (sft.template) does not show"
        in (log_of(rows, file))
    )


def test_many_parts_are_counted_beyond_the_third() -> None:
    turns = [{**QUESTION, "name": f"{i}"} for i in range(5)]
    problem = encode(make_tokenizer(), row(*turns, ANSWER))
    assert isinstance(problem, Problem)
    assert "the 'name' of turn 3 (role 'user') and 2 more parts, so" in problem.reason


SHOWN = {
    "calls and tools": (making.CALLING, row(QUESTION, calling(*CALLS), tools=TOOLS)),
    "empty texts and lists": (making.NO_TOOLS, row(QUESTION, calling(content="yes", name=""), tools=[])),
    "equal turns": (making.NO_TOOLS, row(QUESTION, ANSWER, QUESTION, ANSWER)),
    "a system prompt equal to the default": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + making.PLAIN_CHATML,
        row({"role": "system", "content": "be kind"}, QUESTION, ANSWER),
    ),
    "a template that refuses turns without their text": (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
        + making.PLAIN_CHATML,
        PLAIN,
    ),
    "reasoning behind the last question": (making.REASONING, row(QUESTION, {**ANSWER, "reasoning_content": "so"})),
}


@pytest.mark.parametrize(("template", "shown"), SHOWN.values(), ids=SHOWN)
def test_what_is_shown_is_not_refused(template: str, shown: dict[str, Any]) -> None:
    assert encoded(make_tokenizer(template), shown).learnable > 0


def test_a_verdict_on_one_structure_does_not_stand_for_another(tmp_path: Path) -> None:
    split = making.PLAIN_CHATML.replace("m['content']", "m['content'].split('</think>') | last")
    thought = row(QUESTION, {**ANSWER, "content": "<think>so</think>yes"})
    file = write_lines(tmp_path / "a.jsonl", PLAIN, thought, PLAIN, thought)
    assert "2 malformed rows skipped" in log_of(rows_of(tmp_path, file, template=split, malformed="skip"), file)


def test_a_developer_becomes_the_system_where_only_that_is_shown_and_the_log_says_so_once(tmp_path: Path) -> None:
    developer = {"role": "developer", "content": "be kind"}
    file = write_lines(tmp_path / "a.jsonl", *[row(developer, QUESTION, ANSWER)] * 3)
    rows = rows_of(tmp_path, file, template=making.NO_TOOLS, packing="pad")
    assert texts(rows)[2].startswith("<|im_start|>system\nbe kind<|im_end|>")
    assert log_of(rows, file).count("developer turns are given to the template as system") == 1
    assert "since it does not show developer (3 turns)" in log_of(rows, file)
    known = rows_of(tmp_path, file, packing="pad")
    assert texts(known)[2].startswith("<|im_start|>developer\nbe kind<|im_end|>")
    assert "developer turns" not in log_of(known, file)


def test_a_developer_becomes_the_system_where_the_template_refuses_the_role() -> None:
    raising = "{% if m.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}"
    refusing = "{% for m in messages %}" + raising + "{% endfor %}" + making.PLAIN_CHATML
    tokens = encoded(make_tokenizer(refusing), row({"role": "developer", "content": "be kind"}, QUESTION, ANSWER))
    tokenizer = make_tokenizer()
    assert str(tokenizer.decode(tokens.ids.tolist())).startswith("<|im_start|>system\nbe kind")


def test_reasoning_before_the_last_question_may_be_dropped_and_the_log_counts_it(tmp_path: Path) -> None:
    thought = {**ANSWER, "reasoning_content": "so"}
    file = write_lines(tmp_path / "a.jsonl", *[row(QUESTION, thought, QUESTION, thought)] * 2)
    rows = rows_of(tmp_path, file, template=making.REASONING, train_on="last", seq_len=128, packing="pad")
    assert [text.count("<think>so</think>") for text in texts(rows)] == [1, 1]
    assert "earlier turns have reasoning that the template shows only in the last turns (2 turns)" in log_of(rows, file)


def test_keys_that_are_not_read_are_named_with_their_counts(tmp_path: Path) -> None:
    first = {**row({**QUESTION, "id": 7, "tool_call_id": "c"}, {**ANSWER, "id": 8}), "source": "a", "score": None}
    file = write_lines(tmp_path / "a.jsonl", {**said(("user", "say no"), ("assistant", "no")), "source": "b"}, first)
    log = log_of(rows_of(tmp_path, file), file)
    assert "; keys not read: source (2 rows), id (2 turns), tool_call_id (1 turns)\n" in log


def test_plain_text_refuses_what_it_cannot_write() -> None:
    tokenizer = make_tokenizer(None)
    for more, turn in ((None, {"reasoning": "so"}), (TOOLS, {}), (None, {"name": "Ann"})):
        rows = {"prompt": [QUESTION], "completion": [{**ANSWER, **turn}], "tools": more}
        problem = encode(tokenizer, rows, template="none")
        assert isinstance(problem, Problem)
        assert (
            problem.reason == f"sft.template = 'none' cannot write {next(iter(turn), 'tools')!r}; it takes texts only"
        )
    problem = encode(tokenizer, {"prompt": "a", "completion": "b", "tools": TOOLS}, template="none")
    assert isinstance(problem, Problem)
