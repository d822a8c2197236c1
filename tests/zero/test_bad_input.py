"""What does not fit together is refused in one sentence that says what to do; what does is said where it matters."""

from __future__ import annotations

import itertools

import pytest

from femto_core import hookspecs
from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.plugins import activate
from femto_tools.testing import RandomTask, make_trainer
from tests.merging import Values
from tests.zero.tasks import SHARDED, STAGES

ZERO = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("pair", list(itertools.permutations(ZERO, 2)), ids="+".join)
def test_two_stages_at_once_are_refused_by_name(pair: tuple[str, str]) -> None:
    with pytest.raises(UserError) as refused:
        activate(pair)
    first, second = pair
    said = str(refused.value)
    assert f"{first!r}" in said
    assert f"{second!r}" in said
    assert "both take the seat femto_sharding" in said
    assert f"remove {first!r} or {second!r} from --plugins" in said
    assert "\n" not in said


def refusal(plugins: tuple[str, ...], values: Values) -> str:
    """What is said before any process group exists; empty where it is accepted."""
    hooks = Hooks(activate(plugins).manager)
    try:
        config = make_config(config_class(hooks.config_sections()), values, {})
        hooks.call(hookspecs.femto_validate, config=config)
    except UserError as error:
        return str(error)
    return ""


BF16 = ("bf16",)
REFUSED: dict[str, tuple[tuple[str, ...], Values, tuple[str, ...]]] = {
    "narrow sums, wide travel": (
        BF16,
        {"bf16": {"accumulate_dtype": "bfloat16", "reduce_dtype": "float32"}},
        ("bf16.reduce_dtype", "bf16.accumulate_dtype", "float32"),
    ),
    "unknown dtype": (BF16, {"bf16": {"reduce_dtype": "float16"}}, ("bf16.reduce_dtype = 'float16'", "bfloat16")),
    "groups of nothing": (BF16, {"bf16": {"group_mib": 0.0}}, ("bf16.group_mib", "must be greater than 0")),
    "buckets of nothing": (("zero2",), {"zero": {"bucket_mib": 0.0}}, ("zero.bucket_mib", "must be greater than 0")),
    "negative prefetch": (("zero3",), {"zero": {"prefetch": -1}}, ("zero.prefetch", "must not be negative")),
    "another stage's setting": (("zero3",), {"zero": {"bucket_mib": 1.0}}, ("zero.bucket_mib",)),
    "a stage 3 setting in stage 1": (("zero1",), {"zero": {"prefetch": 1}}, ("zero.prefetch",)),
    "settings without plugin": ((), {"zero": {"prefetch": 1}}, ("zero",)),
    "precision without plugin": ((), {"bf16": {"reduce_dtype": "float32"}}, ("bf16",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused(case: str) -> None:
    plugins, values, words = REFUSED[case]
    said = refusal(plugins, values)
    assert "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("plugins", [("bf16", stage) for stage in ZERO], ids="+".join)
def test_precision_and_any_stage_fit_together(plugins: tuple[str, ...]) -> None:
    for accumulate, reduce in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        assert refusal(plugins, {"bf16": {"accumulate_dtype": accumulate, "reduce_dtype": reduce}}) == ""


@pytest.mark.parametrize(("dtype", "words"), [("bfloat16", ("femto plugins",)), ("float16", ("femto plugins",))])
def test_a_narrow_train_dtype_is_refused_with_a_word_on_what_to_do(dtype: str, words: tuple[str, ...]) -> None:
    said = refusal((), {"train": {"dtype": dtype}})
    assert f"train.dtype = {dtype!r}" in said
    assert "precision plugin" in said, said
    assert all(word in said for word in words)


@pytest.mark.parametrize("stage", SHARDED)
def test_one_rank_trains_and_is_told_that_nothing_is_sharded(
    world_of_one: None, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    plugins, settings = STAGES[stage]
    trainer = make_trainer({**settings, "train": {"threads": 0}}, plugins, {"random_task": RandomTask()})
    assert not trainer.train_step().skipped
    trainer.close()
    said = capsys.readouterr().err
    assert said.count("nothing is sharded") == 1
