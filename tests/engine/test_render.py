"""Several tokens at once are rendered as one by one."""

from pathlib import Path

import pytest

import ridgeline
from ridgeline import SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import TokenEvent, TokensEvent
from ridgeline.text.tokenizer import Tokenizer

BUNDLED = Path(ridgeline.__file__).parent / "models" / "python-9m"
TEXT = "def add(a, b):\n    # größer, 長い, 🙂 STOP\n    return a + b\n"


@pytest.mark.parametrize("stop", [(), ("STOP",), ("a +", "🙂")])
@pytest.mark.parametrize("size", [2, 5, 1000])
def test_tokens_that_come_together_are_rendered_as_one_by_one(stop, size):
    tokenizer = Tokenizer.from_folder(BUNDLED)
    token_ids = list(tokenizer.encode(TEXT))
    params = SamplingParams(stop=list(stop), max_tokens=1000)
    request = Request(
        request_id="a", prompt_ids=(1,), params=params, arrival_s=0.0, seed=0, max_tokens=1000, stop_ids=frozenset()
    )
    found = []
    for together in (False, True):
        renderer = Renderer(tokenizer)
        text, ids = "", []
        for begin in range(0, len(token_ids), size):
            some = token_ids[begin : begin + size]
            events = [TokenEvent(request, 0, each, None, False) for each in some]
            rendered = renderer.render([events[0], TokensEvent(request, 0, some[1:])] if together else events)
            for delta in rendered.deltas.values():
                text, ids = text + delta.text, [*ids, *delta.token_ids]
            if rendered.stopped:
                break
        found.append((text, ids))
    assert found[0] == found[1]
    assert stop or found[0] == (TEXT, token_ids)
