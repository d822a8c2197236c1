"""Turns as people write them: tool calls as text, weights, nulls and empty lists that stand for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from femto_sft.conversation import NoConversation, Problem
from tests.sft import making
from tests.sft.making import encode, encoded, make_tokenizer, refusal, rows_of, said, texts, trained_text, write_lines

QUESTION = {"role": "user", "content": "look"}


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function, **more}
    return {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]}


OBJECT = {"at": "Zürich", "times": [1, None], "within": {"m": 3}, "tags": []}
SHOWN = '"arguments": {"at": "Zürich", "times": [1, null], "within": {"m": 3}, "tags": []}}</tool_call><|im_end|>'
WAYS = {
    "an object": calling(OBJECT),
    "text": calling(json.dumps(OBJECT)),
    "text with other spaces and escapes": calling(json.dumps(OBJECT, ensure_ascii=True, indent=2)),
    "nulls for absent keys": calling({**OBJECT, "how": None, "within": {"m": 3, "s": None}}, index=None),
    "nulls in the text": calling(json.dumps({**OBJECT, "how": None})),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("template", [making.CALLING, making.CALLING_WITH_TEXT], ids=["as objects", "as text"])
def test_arguments_are_the_same_however_they_are_written(template: str, way: str) -> None:
    tokenizer = make_tokenizer(template)
    [answer] = trained_text(tokenizer, encoded(tokenizer, WAYS[way]))
    assert answer == '<tool_call>{"name": "look", ' + SHOWN


@pytest.mark.parametrize("text", ["", "{", "[1]", '"at"', "3", "null", "{} {}", "at=1"])
def test_arguments_that_are_no_object_are_refused_by_line(tmp_path: Path, text: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", calling({"at": "a"}), calling(text))
    place = f"{file}, line 2: messages[1].tool_calls[0].function.arguments holds "
    assert refusal(tmp_path, file, template=making.CALLING).startswith(f"{place}{text!r}, not a JSON object")


@pytest.mark.parametrize("calls", ["yes", 3, {"name": "look"}, ["look"], "[1]"])
def test_tool_calls_that_are_none_are_refused_by_place(calls: Any) -> None:
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]}
    assert reason(row).startswith("messages[1].tool_calls")
    assert reason({**said(("user", "a"), ("assistant", "b")), "tools": calls}).startswith("'tools'")


def test_calls_and_tools_may_be_json_text() -> None:
    tokenizer = make_tokenizer(making.CALLING)
    row = {**calling({"at": "a"}), "tools": [{"type": "function", "function": {"name": "look"}}]}
    messages = [QUESTION, {**row["messages"][1], "tool_calls": json.dumps(row["messages"][1]["tool_calls"])}]
    text = {"messages": messages, "tools": json.dumps(row["tools"])}
    assert encoded(tokenizer, text).ids.tolist() == encoded(tokenizer, row).ids.tolist()


def reason(row: dict[str, Any]) -> str:
    with pytest.raises(NoConversation) as caught:
        encode(make_tokenizer(making.CALLING), row)
    return str(caught.value)


def test_parquet_that_gives_all_rows_the_same_keys_says_what_the_lines_say(tmp_path: Path) -> None:
    rows = []
    for name, argument in (("look", "at"), ("listen", "to")):
        schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "a"}}}
        turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append(
            {"messages": turns, "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}]}
        )
    rows.append(said(("user", "say yes"), ("assistant", "yes")))
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert '"to": null' not in "".join(json.dumps(row) for row in rows)
    assert '"to": null' in json.dumps(pq.read_table(tmp_path / "a.parquet").to_pylist())
    options: dict[str, Any] = {"template": making.CALLING, "seq_len": 512, "packing": "pad"}
    found = texts(rows_of(tmp_path, tmp_path / "a.parquet", **options))
    assert found == texts(rows_of(tmp_path, lines, **options))
    assert "null" not in "".join(found)
    assert '{"to": "a"}' in found[1]


def test_empty_lists_and_nulls_of_a_turn_count_as_absent() -> None:
    asking = making.PLAIN_CHATML.replace("<|im_end|>", "{% if 'tool_calls' in m %}calls{% endif %}<|im_end|>")
    tokenizer, plain = make_tokenizer(asking), said(("user", "say yes"), ("assistant", "yes"))
    question, answer = plain["messages"]
    turns = [{**question, "tool_calls": [], "name": None}, {**answer, "tool_calls": None, "name": []}]
    tokens = encoded(tokenizer, {"messages": turns, "tools": [], "system": None})
    assert tokens.ids.tolist() == encoded(tokenizer, plain).ids.tolist()


def test_a_row_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep = '{"messages": ' + "[" * 900 + "]" * 900 + "}"
    file = write_lines(tmp_path / "a.jsonl", said(("user", "say yes"), ("assistant", "yes")), deep)
    assert refusal(tmp_path, file).startswith(f"{file}, line 2: ")


def test_a_column_of_nulls_is_named_as_such(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", said(("user", "say yes"), ("assistant", "yes")), {"messages": None, "id": 1}
    )
    assert f"{file}, line 2: 'messages' is null, and format messages needs it; " in refusal(tmp_path, file)
    only = write_lines(tmp_path / "b.jsonl", {"messages": None, "id": 1})
    assert f"{only}, line 1: the keys 'messages' (null), 'id' match no known format (" in refusal(tmp_path, only)
    said_so = refusal(tmp_path, only, format="messages")
    assert said_so.startswith(f"{only}, line 1: 'messages' is null, and format messages needs it; ")


# Weights.

TEMPLATES = {
    "prefixes": making.PLAIN_CHATML,
    "marks": making.MARKED,
    "marks without the end": making.MARKED_WITHOUT_END,
    "marks with an end and a newline": making.QWEN_LIKE.replace("END", "'<|im_end|>\\n'"),
}
MARKS: dict[str, list[tuple[Any, Any]]] = {
    "weight": [(0, 1), (0.0, 1.0), (False, True)],
    "train": [(False, True), (0, 1)],
    "training": [(False, True), (0.0, 1.0)],
}


def talk(*marks: dict[str, Any]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for number, mark in enumerate(marks):
        turns += [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}.", **mark}]
    return {"messages": turns}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("key", MARKS)
def test_a_turn_of_weight_zero_is_shown_and_not_trained(template: str, key: str) -> None:
    tokenizer = make_tokenizer(template)
    for no, yes in MARKS[key]:
        tokens = encoded(tokenizer, talk({key: no}, {key: yes}, {}, {key: no}, {key: None}))
        assert trained_text(tokenizer, tokens) == ["1.<|im_end|>", "2.<|im_end|>", "4.<|im_end|>"]
        assert tokens.ids.tolist() == encoded(tokenizer, talk({}, {}, {}, {}, {})).ids.tolist()


def test_as_in_the_case_of_fourteen_tokens() -> None:
    tokenizer = make_tokenizer()
    row = said(("user", "2+2?"), ("assistant", "5, clearly wrong"), ("user", "Sure?"), ("assistant", "4"))
    row["messages"][1]["weight"], row["messages"][3]["weight"] = 0, 1
    assert trained_text(tokenizer, encoded(tokenizer, row)) == ["4<|im_end|>"]
    assert encoded(tokenizer, row).learnable == 2


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_last_answer_is_the_last_even_if_it_is_not_trained(template: str) -> None:
    tokenizer = make_tokenizer(template)
    assert encoded(tokenizer, talk({}, {"weight": 0}), train_on="last").learnable == 0
    last = encoded(tokenizer, talk({"weight": 0}, {}), train_on="last")
    assert trained_text(tokenizer, last) == ["1.<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_where_all_text_is_trained_a_turn_of_weight_zero_is_not(template: str, overlong: str) -> None:
    tokenizer = make_tokenizer(template)
    row = talk({"train": False}, {})
    row["messages"][2]["train"] = False
    tokens = encoded(tokenizer, row, train_on="all", overlong=overlong)
    untrained = str(tokenizer.decode(tokens.ids[~tokens.trained].tolist()))
    assert untrained.startswith("<|im_start|>assistant\n0.<|im_end|>")
    assert untrained.rstrip() == "<|im_start|>assistant\n0.<|im_end|>\n<|im_start|>user\nsay 1<|im_end|>"


def test_a_system_prompt_beside_the_turns_moves_no_weight() -> None:
    tokenizer = make_tokenizer()
    tokens = encoded(tokenizer, {**talk({"weight": 0}, {}), "system": "be kind"})
    assert trained_text(tokenizer, tokens) == ["1.<|im_end|>"]
    row = {"prompt": talk({})["messages"], "completion": talk({"weight": 0}, {})["messages"]}
    assert trained_text(tokenizer, encoded(tokenizer, row)) == ["1.<|im_end|>"]


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"weight": 0.5}, "weight is 0.5, and must be 0 or 1"),
        ({"weight": 2}, "weight is 2, and must be 0 or 1"),
        ({"weight": "0"}, "weight is '0', and must be 0 or 1"),
        ({"weight": float("nan")}, "weight is nan, and must be 0 or 1"),
        ({"train": "false"}, "train is 'false', and must be true or false"),
        ({"training": {}}, "training is {}, and must be true or false"),
        ({"weight": 0, "train": True}, "weight and train contradict each other"),
    ],
)
def test_other_weights_are_refused_by_line(tmp_path: Path, mark: dict[str, Any], words: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk({}), talk(mark))
    text = refusal(tmp_path, file)
    assert text.startswith(f"{file}, line 2: messages[1]")
    assert words in text


def test_a_row_of_which_no_turn_is_trained_has_nothing_to_learn() -> None:
    for template in TEMPLATES.values():
        found = encode(make_tokenizer(template), talk({"weight": 0}, {"weight": 0}))
        assert not isinstance(found, Problem)
        assert found.learnable == 0
