"""Every sampling parameter has an HTTP field, and what a request says is what the engine gets."""

import pytest

from away_from_default import away
from ridgeline import DiffusionParams, SamplingParams, SpeculationParams
from ridgeline.core.errors import RequestError
from ridgeline.core.options import table
from ridgeline.engine.intake import Intake

ENDPOINTS = {
    "completions": {"prompt": "Once", "logprobs": 3},
    "chat/completions": {
        "messages": [{"role": "user", "content": "Once"}],
        "logprobs": True,
        "top_logprobs": 3,
    },
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_arrives(endpoint, live, monkeypatch):
    rows = table(SamplingParams)
    own = {row.field: away(row) for row in rows if row.part is None} | {"logprobs": 3}
    diffusion = {row.field: away(row) for row in rows if row.part == "diffusion"}
    arrived = []

    def request(self, prompt_ids, params, **others):
        arrived.append(params)
        raise RequestError("enough")

    monkeypatch.setattr(Intake, "request", request)
    speculation = {"enabled": False, "num_speculative_tokens": 3, "pool": False}
    body = own | {"diffusion": diffusion, "speculation": speculation} | ENDPOINTS[endpoint]
    assert "enough" in live.post(endpoint, **body).text
    expected = {"diffusion": DiffusionParams(**diffusion), "speculation": SpeculationParams(**speculation)}
    assert arrived == [SamplingParams(**own, **expected)]
