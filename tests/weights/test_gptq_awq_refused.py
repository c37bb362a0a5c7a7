"""GPTQ and AWQ folders that are refused: settings that nothing computes, parts that do not fit together."""

import numpy as np
import pytest
from quantized_folder import EXAMPLE, LLAMA, change
from small_checkpoint import described
from test_awq import awq
from test_gptq import gptq

from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights.load import load_weights


@pytest.mark.parametrize(
    ("written", "changed", "said"),
    [
        (awq, {"version": "gemv"}, "version='gemv' .*another program"),
        (awq, {"version": "GEMV_fast"}, "version='gemv_fast'"),
        (awq, {"format": "marlin"}, "format='marlin'"),
        (awq, {"bits": 8}, "bits=8"),
        (awq, {"bits": None}, "bits is missing"),
        (awq, {"group_size": 0}, "group_size=0"),
        (awq, {"unheard_of": 1}, "unheard_of"),
        (awq, {"rotation": "hadamard"}, "rotation='hadamard'"),
        (gptq, {"rotation": "hadamard"}, "rotation='hadamard'"),
        (gptq, {"bits": 5}, "bits=5"),
        (gptq, {"group_size": 0}, "group_size=0"),
        (gptq, {"pack_dtype": "int16"}, "pack_dtype"),
        (gptq, {"dynamic": {"-:.*": {}}}, "dynamic: '-:.*' says that .* is plain"),
        (gptq, {"dynamic": {"(a+)+": {}}}, "no repetition of a repetition"),
        (gptq, {"dynamic": {"(a*a)*b": {}}}, "or of any group"),
        (gptq, {"dynamic": {"(?:a|a)+b": {}}}, "or of any group"),
        (gptq, {"dynamic": {"(": {}}}, "no regular expression"),
        (gptq, {"dynamic": {".*": {"bitz": 3}}}, "bitz"),
        (gptq, {"is_marlin_format": True}, "is_marlin_format"),
        (gptq, {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (gptq, {"unheard_of": 1}, "unheard_of"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, written, changed, said):
    written(tmp_path, changed=changed)
    with pytest.raises(ConfigError, match=said):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)


@pytest.mark.parametrize(
    ("written", "part", "make", "said"),
    [
        (awq, "scales", lambda x: None, "has no .*scales"),
        (awq, "qweight", lambda x: x[:, 0], "must be a matrix"),
        (awq, "qweight", lambda x: x[:, :0], "must be a matrix"),
        (awq, "qweight", lambda x: x.astype(np.int64), "I64"),
        (awq, "qzeros", lambda x: x[:, :-1], "I32 .*needs I32"),
        (awq, "scales", lambda x: x[:-1], "beside"),
        (awq, "scales", lambda x: x.astype(np.int32), "needs F32 or F16"),
        (gptq, "qweight", lambda x: x[:0], "must be a matrix"),
        (gptq, "qzeros", lambda x: None, "has no .*qzeros"),
        (gptq, "scales", lambda x: None, "has no .*scales"),
        (gptq, "qweight", lambda x: x[:, 0].copy(), "must be a matrix"),
        (gptq, "qweight", lambda x: x[:-1].copy(), "beside"),
        (gptq, "qweight", lambda x: x.astype(np.int64), "beside"),
        (gptq, "qzeros", lambda x: x[:, :-1].copy(), "beside"),
        (gptq, "scales", lambda x: x[:-1].copy(), "beside"),
        (gptq, "scales", lambda x: x.astype(np.int32), "beside"),
        (gptq, "g_idx", lambda x: x[:-1].copy(), "beside"),
        (gptq, "g_idx", lambda x: np.where(x == 1, 0, x), "g_idx does not put 32 inputs in each of 8 groups"),
        (gptq, "g_idx", lambda x: x + 1, "g_idx does not put"),
        (gptq, "qzeros", lambda x: np.where(np.arange(x.shape[1]) == 3, 0, x).astype(np.int32), "qzeros differ"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, written, part, make, said):
    written(tmp_path)
    change(tmp_path, f"{EXAMPLE}.{part}", make)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {EXAMPLE}.*{said}"):
        load_weights(tmp_path, *described(LLAMA), FLOAT32)
