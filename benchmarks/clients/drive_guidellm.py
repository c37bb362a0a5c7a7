"""guidellm: benchmarks over each endpoint that it knows, every request of which must succeed with its tokens."""

import json
from pathlib import Path

from driving import FOLDER, URL, check, command, run_checks


def benchmark(path: str, profile: str = "kind=concurrent,streams=2", count: int = 6, num_output: int = 8) -> dict:
    report = Path(f"{path.replace('/', '_')}-{profile[5:9]}.json").resolve()
    command(
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},request_format={path}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={count}"),
        *("--tokenizer", f"kind=huggingface_auto,model={FOLDER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={num_output}"),
        *("--output", f"kind=json,path={report}"),
    )
    found = json.loads(report.read_text())["benchmarks"]
    for each in found:
        requests = each["requests"]
        assert (len(requests["successful"]), len(requests["errored"])) == (count, 0), requests["errored"][:1]
        tokens = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
        assert tokens == {num_output}, tokens
    return found[0]["metrics"]["request_latency"]["successful"]["median"]


@check
def completions():
    return benchmark("/v1/completions")


@check
def chat():
    return benchmark("/v1/chat/completions")


@check
def responses():
    return benchmark("/v1/responses", num_output=16)


@check
def throughput():
    return benchmark("/v1/completions", "kind=throughput,max_concurrency=8", 20)


@check
def synchronous():
    return benchmark("/v1/chat/completions", "kind=synchronous", 4)


run_checks("guidellm")
