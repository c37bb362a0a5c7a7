"""A hybrid of recurrent layers and attention with drafts of a known acceptance, beside the same without drafts.

usage: python -m benchmarks.speculation.hybrid [--model FOLDER] [further options of benchmarks.speculation.oracle]

FOLDER is written where it is not there: a Qwen3-Next of random weights, dense, 0.3 billion parameters, three of four
layers gated delta nets (needs transformers). The drafts are those of `benchmarks.speculation.oracle`.
"""

import argparse
from pathlib import Path

from benchmarks.common import model_folder, write_random
from benchmarks.speculation import oracle

NUM_LAYERS = 16


def write_checkpoint(folder: Path) -> None:
    """Write a Qwen3-Next of random weights in bfloat16, without experts and without a tokenizer."""
    write_random(
        folder,
        "Qwen3NextForCausalLM",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mlp_only_layers=list(range(NUM_LAYERS)),
        tie_word_embeddings=True,
        pad_token_id=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="reused, and written where it is not there; default: a temporary one"
    )
    options, further = parser.parse_known_args()
    with model_folder(options.model, write_checkpoint) as folder:
        oracle.main(["--model", str(folder), *further])


if __name__ == "__main__":
    main()
