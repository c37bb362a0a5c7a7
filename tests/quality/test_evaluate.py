"""Quality: windows of texts, exact KL, errors of documents in pairs, logits of whole texts, code that parses."""

import math

import numpy as np
import pytest
import torch

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.code import function_heads, parses
from ridgeline.quality.comparison import compare, ratio, score_tokens
from ridgeline.quality.scorer import CHUNK_TOKENS, Scorer
from ridgeline.quality.texts import Document, Texts, cut, make_documents
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

TEXT = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield name\n"


@pytest.fixture(autouse=True)
def threads():
    """Engines set the process's threads; the rest of the suite gets its own number back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 20, 95])
def test_windows_predict_every_token_but_the_first_once(length):
    windows = cut(list(range(length)), 10)
    assert [token_id for window in windows for token_id in window[1:]] == list(range(1, length))
    assert all(2 <= len(window) <= 10 for window in windows)
    assert all(late[0] == early[-1] for early, late in zip(windows, windows[1:]))


def test_few_tokens_are_taken_from_the_front_of_all_texts():
    tokenizer = ModelFolder.open("python-1m").tokenizer()
    texts = Texts("here", {f"{i}.py": f"x{i} = 1\n" + TEXT * 20 for i in range(9)})
    documents = make_documents(texts, tokenizer, 32, 9 * 31)
    assert [len(document.windows) for document in documents] == [1] * 9
    assert sum(document.num_tokens for document in documents) == 9 * 31
    (whole,) = make_documents(Texts("here", {"a": TEXT}), tokenizer, 1024, None)
    assert whole.num_bytes == len(TEXT)  # the first token begins every text
    assert len(make_documents(Texts("here", {"a": TEXT * 9}), tokenizer, 32, None)) > 2  # windows are documents
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        make_documents(Texts("here", {"a": ""}), tokenizer, 32, None)


def test_the_error_of_a_ratio_of_sums():
    same = ratio([2.0, 4.0], [1, 2])
    assert (same.mean, same.standard_error) == (2.0, 0.0)
    found = ratio([3.0, 3.0], [1, 2])
    assert found.mean == 2.0
    assert found.standard_error == pytest.approx(math.sqrt(2 * (1 + 1)) / 3)
    assert math.isnan(ratio([1.0], [1]).standard_error)
    assert math.isnan(ratio([2000.0, 9.0], [1023, 1]).standard_error)  # the rest of a text that was cut off


def test_the_error_is_that_of_many_texts():
    """Beside the spread of the ratio over texts drawn anew."""
    rng = np.random.default_rng(0)

    def draw():
        sizes = rng.integers(50, 500, 40)
        return ratio(sizes * rng.normal(0.3, 0.2, 40), sizes.tolist())

    drawn = [draw() for _ in range(2000)]
    spread = np.std([each.mean for each in drawn])
    assert np.mean([each.standard_error for each in drawn]) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_kl_is_that_of_float64(noise):
    rng = np.random.default_rng(1)
    base = rng.normal(0, 4, (50, 300)).astype(np.float32) + 1000
    base[:, 7] = -np.inf
    other = base + rng.normal(0, noise, base.shape).astype(np.float32)
    next_T = rng.integers(8, 300, 50)
    found = score_tokens(other, base, next_T)
    keep = np.arange(300) != 7
    log_p, log_q = (torch.from_numpy(x[:, keep]).double().log_softmax(-1) for x in (base, other))
    assert np.allclose(found.kl_T, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-4, atol=2e-7)
    assert np.allclose(found.logprob_T, log_q[range(50), next_T - 1], atol=1e-6)
    assert np.allclose(found.base_logprob_T, log_p[range(50), next_T - 1], atol=1e-6)
    assert (found.agrees_T == (log_p.argmax(-1) == log_q.argmax(-1)).numpy()).all()
    assert not score_tokens(base, base, next_T).kl_T.any()


def test_figures_of_two_models():
    p = {0: [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], 1: [[0.5, 0.25, 0.25]]}
    q = {0: [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], 1: [[0.25, 0.25, 0.5]]}

    def of(tables):
        return lambda ids: (np.log(np.array(row, dtype=np.float32))[None] for row in tables[ids[0]])

    done = []
    documents = [Document("a", [[0, 0, 0]], 4), Document("b", [[1, 0]], 2)]
    found = compare(documents, of(q), of(p), done.append)
    assert done == [1, 2, 3]
    assert found.bits_per_byte == pytest.approx((2 + 1 + 2) / 6)
    assert found.perplexity == pytest.approx(2 ** (5 / 3))
    assert found.bits_per_byte_above_base.mean == pytest.approx(2 / 6)
    assert found.top1_agreement.mean == pytest.approx(1 / 3)
    assert found.kl.mean == pytest.approx((0.25 + 0 + 0.25) / 3)
    assert found.kl_quantiles["1"] == pytest.approx(0.25)
    assert found.level is None


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_scorer_gives_the_logits_of_the_whole_text(backend):
    """In chunks over the paged cache, beside the dense model."""
    if backend == "native":
        pytest.importorskip("ridgeline._native", reason="the native code is not built")
    scorer = Scorer(EngineConfig.of("python-1m", dtype="float32", backend=backend, num_threads=1), 4096)
    folder = ModelFolder.open("python-1m")
    spec = read_spec(folder.config)
    program = lower(spec)
    dense = DenseModel(program, as_tensors(load_weights(folder, spec, program, FLOAT32)))
    ids = scorer.tokenizer().encode(TEXT * 15)[: CHUNK_TOKENS + 50]
    for _ in range(2):  # the second time over blocks that were used
        logits_TV = np.concatenate([chunk.copy() for chunk in scorer.logits(ids)])
        with torch.inference_mode():
            assert np.allclose(logits_TV, dense(torch.tensor([ids]))[0].numpy(), atol=2e-3)
    assert scorer.window == spec.max_positions


def test_heads_of_functions_and_what_parses():
    source = 'class A:\n    def f(self, x):\n        """Say."""\n        return x\n\n    def g(self):\n        pass\n'
    assert list(function_heads(source)) == ['def f(self, x):\n    """Say."""\n']
    assert list(function_heads("not python (")) == []
    head = 'def f(x):\n    """Say."""\n'
    assert parses(head, "    return x\n\nprint(")
    assert parses(head, "    if x:\n        return 1\n    return (")  # the last line was cut
    assert not parses(head, "    return (\n    x\ny\n")
    assert not parses(head, "print(1)\n")  # no body
