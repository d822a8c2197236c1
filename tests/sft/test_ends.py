"""What a trained answer ends with: the template's own end of turn, once; and the exported model is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.sft import making
from tests.sft.making import encoded, make_tokenizer, rows_of, said, trained_text, write_lines

TALK = said(("user", "Hi"), ("assistant", "Hello there"), ("user", "Bye"), ("assistant", "See you"))
ONLY_ANSWERS = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
"""A turn's content, with marks around answers."""
ENDS = {
    "a special token": ("<|im_end|>", AddedToken("<|im_end|>", special=True)),
    "an added token that is not special": ("<end_of_turn>", AddedToken("<end_of_turn>", special=False)),
    "EOS": ("<|endoftext|>", None),
}
BEHIND = {"nothing": "''", "a newline": "'\\n'", "white space": "' \\n\\n'"}


def with_end(template: str, end: str) -> PreTrainedTokenizerBase:
    text, token = ENDS[end]
    tokenizer = make_tokenizer(template)
    if token is not None:
        tokenizer.add_tokens([token])
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
    return tokenizer


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("marked", [True, False], ids=["marks", "prefixes"])
def test_the_templates_own_ids_are_trained_up_to_its_end_of_turn(end: str, behind: str, marked: bool) -> None:
    template = making.QWEN_LIKE.replace("END", f"'{ENDS[end][0]}' + {BEHIND[behind]}")
    if not marked:
        template = template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    tokenizer = with_end(template, end)
    own: Any = tokenizer.apply_chat_template(TALK["messages"], return_dict=True)
    for train_on in ("assistant", "last", "all"):
        tokens = encoded(tokenizer, TALK, train_on=train_on)
        assert tokens.ids.tolist() == own["input_ids"]
        assert tokens.ends == {tokenizer.convert_tokens_to_ids(ENDS[end][0])}
        if train_on != "all":
            answers = [f"Hello there{ENDS[end][0]}", f"See you{ENDS[end][0]}"]
            assert trained_text(tokenizer, tokens) == (answers if train_on == "assistant" else answers[1:])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("between", BEHIND.values(), ids=BEHIND)
def test_an_end_of_turn_behind_the_marks_belongs_to_the_answer(end: str, between: str) -> None:
    template = making.QWEN_LIKE.replace(
        "{{- m.content + END }}{%- endgeneration %}", "{{- m.content }}{%- endgeneration %}{{- END }}"
    )
    text = ENDS[end][0]
    tokenizer = with_end(template.replace("END", f"{between} + '{text}\\n'"), end)
    own: Any = tokenizer.apply_chat_template(TALK["messages"], return_dict=True)
    tokens = encoded(tokenizer, TALK)
    assert tokens.ids.tolist() == own["input_ids"]
    assert all(answer.endswith(text) and answer.count(text) == 1 for answer in trained_text(tokenizer, tokens))


def test_a_turn_that_no_token_ends_still_gets_eos() -> None:
    tokenizer = make_tokenizer(making.QWEN_LIKE.replace("END", "'\\n'"))
    assert trained_text(tokenizer, encoded(tokenizer, TALK)) == ["Hello there\n", "See you\n<|endoftext|>"]
    plain = make_tokenizer(making.OPEN)
    plain.add_tokens([AddedToken("</call>", special=False)])
    tokens = encoded(plain, said(("user", "a"), ("assistant", "b</call>")))
    assert trained_text(plain, tokens) == ["b</call>\n<|endoftext|>"]


def test_marks_that_miss_an_answer_are_refused() -> None:
    only_text = making.CALLING.replace("{{ m['content'] }}", ONLY_ANSWERS)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"messages": [*TALK["messages"][:3], calling]}
    problem = making.encode(make_tokenizer(only_text), row)
    assert getattr(problem, "reason", "") == (
        "the template's generation marks are empty for 1 of the 2 turns that the assistant speaks"
    )


# generation_config.json


def ends_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> Any:
    directory = rows_of(folder, write_lines(folder / "a.jsonl", *rows), seq_len=256, **settings).tokenizer_path
    file = directory / "generation_config.json"
    return json.loads(file.read_text()) if file.exists() else None


def test_the_ids_that_end_trained_turns_lie_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    turn, text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    for train_on in ("assistant", "last", "all"):
        assert ends_of(tmp_path, TALK, train_on=train_on) == {"eos_token_id": [turn]}
    prompt = {"prompt": "Hi", "completion": "Hello"}
    assert ends_of(tmp_path, prompt, template="none") == {"eos_token_id": [text]}
    assert ends_of(tmp_path, TALK, template=making.OPEN) == {"eos_token_id": [text]}


def test_all_ends_are_written_the_most_frequent_first(tmp_path: Path) -> None:
    last = making.PLAIN_CHATML.replace("<|im_end|>", "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}")
    once = said(("user", "Hi"), ("assistant", "Hello"))
    tokenizer = make_tokenizer()
    turn, text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    template = last.replace("{{ m['content'] }}", ONLY_ANSWERS)
    assert ends_of(tmp_path, TALK, once, once, template=template) == {"eos_token_id": [text, turn]}
    assert trained_text(make_tokenizer(template), encoded(make_tokenizer(template), TALK)) == [
        "Hello there<|im_end|>",
        "See you<|endoftext|>",
    ]


# Plain text.


def sentencepiece_like(scheme: str) -> PreTrainedTokenizerBase:
    """A tokenizer that writes spaces as "▁", and one before each text."""
    letters = sorted(set("2+=4self.append(x)▁"))
    vocabulary = {token: i for i, token in enumerate(["</s>", "<unk>", "▁=", *letters, ".a", "▁4"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "4"), (".", "a")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    wrap: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = wrap(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    return tokenizer


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize(
    ("prompt", "completion", "trained"),
    [
        ("2+2=", "4", "4</s>"),
        ("2+2=", " 4", "4</s>"),
        ("self.", "append(x)", ".append(x)</s>"),
        ("", "4", "4</s>"),
        ("4", "", "</s>"),
    ],
)
def test_plain_text_is_tokenised_as_one(scheme: str, prompt: str, completion: str, trained: str) -> None:
    tokenizer = sentencepiece_like(scheme)
    tokens = encoded(tokenizer, {"prompt": prompt, "completion": completion}, template="none")
    joined = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
    assert tokens.ids.tolist() == [*joined, tokenizer.eos_token_id]
    assert trained_text(tokenizer, tokens) == [trained]
    assert str(tokenizer.decode(joined)) == prompt + completion


def test_what_lies_on_disk_loads_again(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", TALK))
    assert AutoTokenizer.from_pretrained(rows.tokenizer_path).eos_token == "<|endoftext|>"


def test_a_token_that_begins_the_next_turn_ends_none() -> None:
    begun = making.OPEN.replace("{{ m['role'] }}:", "<|im_start|>{{ m['role'] }}:")
    template = begun.replace("{{ m['content'] }}", ONLY_ANSWERS)
    tokenizer = make_tokenizer(template)
    assert trained_text(tokenizer, encoded(tokenizer, TALK)) == ["Hello there", "See you<|endoftext|>"]
