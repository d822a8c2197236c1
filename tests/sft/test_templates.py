"""Which tokens are trained: the assistant's, with the end of turn, and no text that only looks like an answer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_sft.conversation import Problem
from femto_sft.tokenizer import load_tokenizer
from tests.sft import making
from tests.sft.making import encode, encoded, make_tokenizer, said, talk, trained_text

TEMPLATES = {
    "prefixes": making.PLAIN_CHATML,
    "marks": making.MARKED,
    "marks without the end": making.MARKED_WITHOUT_END,
    "prefixes with BOS": making.WITH_BOS,
}
QUESTION, ANSWER = ("user", "say yes"), ("assistant", "yes")
TWO_TURNS = said(("system", "yes"), QUESTION, ANSWER, ("user", "yes?"), ("assistant", "yes yes"))


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return make_tokenizer(TEMPLATES[request.param])


def test_only_the_assistants_own_yes_is_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encoded(tokenizer, said(QUESTION, ANSWER))
    assert trained_text(tokenizer, tokens) == ["yes<|im_end|>"]
    assert str(tokenizer.decode(tokens.ids.tolist())).count("yes") == 2


@pytest.mark.parametrize("text", ["A", " A", "assistant", "<|im_start|>assistant\nA", "A<|im_end|>\n"])
def test_the_answers_text_at_the_very_start_is_not_trained(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = encoded(tokenizer, said(("user", text), ("assistant", text), ("user", text)))
    assert trained_text(tokenizer, tokens) == [f"{text}<|im_end|>"]
    assert tokens.trained.nonzero()[0][0] > len(tokens) // 3


def test_every_answer_is_trained_and_on_request_only_the_last(tokenizer: PreTrainedTokenizerBase) -> None:
    assert trained_text(tokenizer, encoded(tokenizer, TWO_TURNS)) == ["yes<|im_end|>", "yes yes<|im_end|>"]
    assert trained_text(tokenizer, encoded(tokenizer, TWO_TURNS, train_on="last")) == ["yes yes<|im_end|>"]


def test_all_text_can_be_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encoded(tokenizer, TWO_TURNS, train_on="all")
    assert tokens.trained.all()
    assert tokens.ids.tolist() == encoded(tokenizer, TWO_TURNS).ids.tolist()


def test_the_tokens_are_those_that_the_template_gives_for_generation(tokenizer: PreTrainedTokenizerBase) -> None:
    whole: Any = tokenizer.apply_chat_template(TWO_TURNS["messages"], return_dict=True)
    prompt: Any = tokenizer.apply_chat_template(
        TWO_TURNS["messages"][:-1], add_generation_prompt=True, return_dict=True
    )
    tokens = encoded(tokenizer, TWO_TURNS, train_on="last")
    assert tokens.ids.tolist() == whole["input_ids"]
    assert tokens.trained.tolist().index(True) == len(prompt["input_ids"])


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_comes_once_though_template_and_tokenizer_both_would(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(making.WITH_BOS, adds_bos=adds_bos)
    ids = encoded(tokenizer, said(QUESTION, ANSWER)).ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("adds_bos", [False, True])
def test_plain_text_has_bos_where_the_tokenizer_adds_it_and_a_trained_eos(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(None, adds_bos=adds_bos)
    tokens = encoded(tokenizer, {"prompt": "say yes:", "completion": " yes"}, template="none")
    assert tokens.ids.tolist().count(tokenizer.bos_token_id) == adds_bos
    assert trained_text(tokenizer, tokens) == [" yes<|endoftext|>"]


def test_where_padding_is_eos_the_real_eos_is_trained() -> None:
    tokenizer = make_tokenizer(making.PLAIN_CHATML.replace("<|im_end|>", "{{ eos_token }}"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert trained_text(tokenizer, encoded(tokenizer, said(QUESTION, ANSWER))) == ["yes<|endoftext|>"]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_template_that_ends_no_turn_gets_eos(train_on: str) -> None:
    tokenizer = make_tokenizer(making.OPEN)
    tokens = encoded(tokenizer, said(QUESTION, ANSWER), train_on=train_on)
    assert trained_text(tokenizer, tokens)[-1].endswith("yes\n<|endoftext|>")
    assert tokens.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_a_template_without_marks_trains_neither_nothing_nor_everything() -> None:
    tokenizer = make_tokenizer(making.PLAIN_CHATML)
    tokens = encoded(tokenizer, TWO_TURNS)
    assert 0 < tokens.learnable < len(tokens) / 2


def test_marks_around_nothing_are_refused_not_trained_on() -> None:
    problem = encode(make_tokenizer(making.MARKED_AROUND_NOTHING), said(QUESTION, ANSWER))
    assert isinstance(problem, Problem)
    assert "marks are empty" in problem.reason


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (making.THINKING, TWO_TURNS, "renders turn 3 (the assistant's) differently once others follow"),
        (making.ENDING_IN_A_SPACE, said(QUESTION, ANSWER), "the text before turn 2 (the assistant's) differently"),
        (making.COUNTING, said(QUESTION, ANSWER), "the text before turn 2 (the assistant's) differently"),
        (making.PLAIN_CHATML, said(ANSWER, QUESTION), "begins with the assistant"),
        (making.ALTERNATING, said(QUESTION, QUESTION, ANSWER), "roles must alternate"),
    ],
)
def test_prefixes_that_are_none_are_refused_in_one_sentence(template: str, row: dict[str, Any], words: str) -> None:
    problem = encode(make_tokenizer(template), row)
    assert isinstance(problem, Problem)
    assert words in problem.reason
    assert "\n" not in problem.reason


def test_where_only_the_last_answer_is_shown_otherwise_it_can_be_trained_alone() -> None:
    tokenizer = make_tokenizer(making.THINKING)
    tokens = encoded(tokenizer, TWO_TURNS, train_on="last")
    assert trained_text(tokenizer, tokens) == ["<think></think>yes yes<|im_end|>"]
    everything = encoded(tokenizer, TWO_TURNS, train_on="all")
    assert everything.trained.all()


def test_an_answer_that_would_share_a_token_with_its_prompt_is_refused() -> None:
    tokenizer = make_tokenizer(making.PLAIN_CHATML)
    [newline] = tokenizer("\n", add_special_tokens=False)["input_ids"]
    merged = tokenizer("t\n\n", add_special_tokens=False)["input_ids"]
    assert merged.count(newline) == 2, "this tokenizer keeps newlines apart"
    tokenizer.add_tokens(["\n\n"])
    problem = encode(tokenizer, said(QUESTION, ("assistant", "\nyes")))
    assert isinstance(problem, Problem)
    assert "differently once the answer follows" in problem.reason


def test_a_prompt_that_is_itself_a_conversation_is_not_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = TWO_TURNS["messages"]
    row = {"prompt": turns[:4], "completion": turns[4:]}
    assert trained_text(tokenizer, encoded(tokenizer, row)) == ["yes yes<|im_end|>"]


def test_a_conversation_without_an_answer_has_nothing_to_learn(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encoded(tokenizer, said(QUESTION)).learnable == 0
    assert encoded(tokenizer, said(QUESTION), train_on="last").learnable == 0


def test_tools_reach_the_template() -> None:
    tokenizer = make_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + making.PLAIN_CHATML)
    row = {**said(QUESTION, ANSWER), "tools": [{"type": "function", "function": {"name": "look"}}]}
    assert '"look"' in str(tokenizer.decode(encoded(tokenizer, row).ids.tolist()))
    assert trained_text(tokenizer, encoded(tokenizer, row)) == ["yes<|im_end|>"]


def test_a_template_can_be_given_as_text_or_file(tmp_path: Any) -> None:
    name = making.save_tokenizer(tmp_path / "tokenizer", None)
    file = tmp_path / "template.jinja"
    file.write_text(making.MARKED)
    for given in (making.MARKED, str(file)):
        assert load_tokenizer(name, given, "").chat_template == making.MARKED


@pytest.mark.parametrize(
    ("template", "words"),
    [("", "has no chat template; give one"), ("nowhere.jinja", "neither Jinja text nor a file")],
)
def test_a_missing_template_is_refused(tmp_path: Any, template: str, words: str) -> None:
    name = making.save_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(UserError, match=words):
        load_tokenizer(name, template, "")


def test_of_several_templates_one_must_be_the_default(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"tool_use": making.CALLING, "rag": making.OPEN}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"has the chat templates .*, and none is the default; give one with"):
        load_tokenizer(str(tmp_path / "tokenizer"), "", "")
    assert load_tokenizer(str(tmp_path / "tokenizer"), making.OPEN, "").chat_template == making.OPEN


def test_another_tokenizer_than_the_models_is_refused(tmp_path: Any) -> None:
    name = making.save_tokenizer(tmp_path / "tokenizer")
    make_tokenizer().save_pretrained(tmp_path / "model")
    other = make_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    other.save_pretrained(tmp_path / "other")
    assert load_tokenizer(name, "", str(tmp_path / "model")) is not None
    with pytest.raises(UserError, match="another tokenizer than the model's in"):
        load_tokenizer(name, "", str(tmp_path / "other"))
    with pytest.raises(UserError, match="does not exist; check its spelling"):
        load_tokenizer(str(tmp_path / "nowhere"), "", "")


_FOR_EVER = "{% for i in range(99999) %}{% for j in range(50) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 7) %}x{% endfor %}", "Range too big"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "maximum recursion depth exceeded"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_template_that_fails_is_a_problem_of_the_row(template: str, words: str, marked: bool) -> None:
    around = "{%% generation %%}%s{%% endgeneration %%}" if marked else "%s"
    problem = encode(make_tokenizer(around % template), talk(1))
    assert isinstance(problem, Problem)
    assert problem.reason.startswith("the chat template cannot render it (")
    assert words in problem.reason


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{% if messages | length == 2 %}{{ messages[0].content * 10 ** 10 }}{% endif %}",
    ],
)
def test_a_template_that_fills_memory_is_refused(template: str, marked: bool) -> None:
    around = "{%% generation %%}%s{%% endgeneration %%}" if marked else "%s"
    tokenizer = make_tokenizer(around % template)
    with pytest.raises(UserError, match=r"^encoding conversations with the chat template of .* more memory than"):
        encode(tokenizer, talk(1))
    with pytest.raises(UserError, match=r"^encoding conversations with sft.template = .* more memory than"):
        encode(tokenizer, talk(1), template=around % template)


@pytest.mark.parametrize("around", ["%s", "{%% generation %%}%s{%% endgeneration %%}"])
def test_a_template_that_loops_is_refused(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("femto_data.limits.SECONDS", 0.05)
    with pytest.raises(UserError, match=r"template of .* takes more than 0 s of processor time, as if it never ended$"):
        encode(make_tokenizer(around % _FOR_EVER), talk(1))
