"""What `ridgeline inspect` says of folders of quantized weights: how each matrix is stored, and what becomes of it."""

from quantized_folder import LLAMA
from test_awq import awq
from test_gptq import gptq
from test_more_formats import mlx

from ridgeline.cli._inspect_stored import stored_tensors
from ridgeline.cli._inspection import examine
from ridgeline.cli.inspect import inspect
from ridgeline.weights.folder import ModelFolder

NUM_WEIGHTS = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)


def rows(folder):
    return stored_tensors(ModelFolder.open(folder), examine(LLAMA | {"dtype": "bfloat16"}))


def test_what_stays_and_what_is_converted(tmp_path):
    awq(tmp_path, group=64)
    stored, plain = rows(tmp_path)
    assert (plain.type, plain.becomes, plain.num_tensors) == ("F32", "converted to bfloat16", 7)
    assert (stored.type, stored.becomes.removeprefix("as stored: ")) == 2 * ("int4 in groups of 64 with zero points",)
    assert (stored.num_tensors, stored.num_weights) == (14, NUM_WEIGHTS)
    assert stored.loaded_bytes == NUM_WEIGHTS * (4 + 24 / 64) / 8  # a zero point becomes a byte
    assert 8 * stored.num_bytes / stored.num_weights == 4 + 20 / 64


def test_what_is_decoded_has_its_reason(tmp_path):
    gptq(tmp_path, sym=False, bits=8, group=64)
    assert "8 bits with zero points" in rows(tmp_path)[0].becomes


def test_a_router_stays_with_floats(tmp_path):
    """MLX quantizes it with the rest."""
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "dtype": "bfloat16"}
    mlx(tmp_path, config=config, what=("_proj.weight", "moe.gate.weight"))
    found = stored_tensors(ModelFolder.open(tmp_path), examine(config))
    (router,) = [row for row in found if "dequantized" in row.becomes]
    assert router.num_tensors == 2 and router.becomes.endswith("its op computes with floats alone")


def test_the_table_has_bits_per_weight(tmp_path, capsys):
    awq(tmp_path, group=128, points=False)
    inspect(str(tmp_path), None, None, 1, None, "auto", "auto", json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "as stored" in line]
    assert line.split()[-8:] == ["of", "128", "14", "4.12", "148", "Ki", "148", "Ki"]
