"""Write what one request to the bundled model goes through, from HTTP to tokens, as Learn shows it: a real run.

Usage: python tools/walk_data.py, on a quiet machine. It writes `src/ridgeline/server/ui/data-walk.js`: its times are
those of the machine that it names, and all else is what every machine says, which a test holds it to.
"""

import json
import os
import socket
import subprocess
import sys
from math import exp
from typing import Any

from pages_data import UI, rounded

from ridgeline.core.machine import cpu_model
from ridgeline.explain.pricing import price
from ridgeline.weights.folder import ModelFolder

MODEL, PROMPT = "python-9m", "def read_lines(path):"
BODY = {
    "model": MODEL,
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": 5,
    "stream": True,
    "explain": True,
}
WARM_UP, DIGITS = 20, 3
TIMES = ("limit", "predicted", "measured")
SAYS = (
    ("HTTP", "A client sends {sent} bytes. The server checks every field before anything else happens."),
    ("Text becomes tokens", "The tokenizer makes {tokens} tokens of {characters} characters; ␣ is a space."),
    (
        "A place in a step",
        "The scheduler finds nothing of it in the cache, takes blocks for its keys and values, and puts all {tokens} "
        "tokens into one step. By the op table that is {mflop:,.0f} MFLOP and {mb:,.1f} MB [counted].",
    ),
    (
        "Logits become a token",
        "The prompt's last row gives each token of the vocabulary a probability. Temperature 0 takes the likeliest.",
    ),
    (
        "Token by token",
        "The first step was the prompt's, prefill. Each other one computes the newest token and reads the keys of all "
        "before. Three times stand beside each other, in ms: the limit that the machine's measured ceilings allow, "
        "what is predicted [{provenance}], and what was measured.",
    ),
    ("Tokens become text", "A token leaves as soon as it is text, as an event of one stream. The first, and the end:"),
    ("Where the time went", "From arrival to the last token [measured]."),
)
FILE = UI / "data-walk.js"


def request_text(**other: object) -> str:
    """Return the request as it goes over the wire."""
    body = json.dumps(BODY | other)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}"


def exchange(port: int, sent: str) -> str:
    """Send a request to a server and return what it returns, without the marks of chunks."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent.encode())
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode() + "\n\n" + "".join(f"{line}\n\n" for line in body.decode().split("\n") if line[:5] == "data:")


def run() -> tuple[str, list[dict[str, Any]]]:
    """Serve the model, let it reply several times, and return the last reply and its events."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "ridgeline", "serve", MODEL, "--port", str(port)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        while "/ui" not in server.stdout.readline():
            assert server.poll() is None, "the server did not start"
        for _ in range(WARM_UP):
            exchange(port, request_text(explain=False))
        reply = exchange(port, request_text())
        server.terminate()
    events = [json.loads(each[6:]) for each in reply.split("\n\n") if each.startswith("data: {")]
    return reply, events


def shown(token: str) -> str:
    """Return a token so that its spaces and ends of lines can be seen."""
    return token.replace("\n", "⏎").replace(" ", "␣") or "start"


def walk(reply: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stages of a request: a title, what happens, and what to draw."""
    tokenizer = ModelFolder.open(MODEL).tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    tokens = [["text", "|".join(shown(tokenizer.decode([token])) for token in ids), "0" * len(ids)]]
    tokens += [["id", "|".join(map(str, ids)), "1" * len(ids)]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    (life,) = events[-1]["explain"]["outputs"]
    said = price(MODEL, prompt=len(ids))
    likely = choices[0]["logprobs"]["top_logprobs"][0].items()
    rows: list[list[object]] = []
    for values, choice in zip(life["steps"], choices, strict=True):
        step = dict(zip(life["head"], values))
        times = [rounded(step[f"{name}_ms"], DIGITS) for name in TIMES]
        rows.append([step["kind"], step["tokens"], step["start"], *times, shown(choice["text"])])
    known = {
        "sent": len(request_text()),
        "tokens": len(ids),
        "characters": len(PROMPT),
        "mflop": said.cost.flops / 1e6,
        "mb": said.cost.num_bytes / 1e6,
        "provenance": life["provenance"],
    }
    drawn = (
        ("text", request_text().replace("\r\n", "\n")),
        ("cells", ["tokens of the prompt", tokens]),
        ("table", ["Ops of the prompt", ["op", "count", "arithmetic", "bytes"], [row[:4] for row in said.lines()]]),
        (
            "table",
            ["The likeliest", ["token", "probability"], [[shown(key), f"{exp(value):.3f}"] for key, value in likely]],
        ),
        ("table", ["Steps", ["kind", "tokens", "behind", *TIMES, "makes"], rows]),
        ("text", reply.partition("\n\n")[2].partition("\n\n")[0] + "\n\ndata: [DONE]"),
        ("split", [[name, rounded(value, DIGITS), name] for name, value in life["parts"].items()]),
    )
    stages = [[title, says.format_map(known), *each] for (title, says), each in zip(SAYS, drawn, strict=True)]
    return {"machine": f"{MODEL} on {cpu_model()}, {os.cpu_count()} cores", "stages": stages}


def main() -> int:
    """Write the file."""
    data = json.dumps(walk(*run()), ensure_ascii=False, separators=(",", ":"))
    FILE.write_text(f"// Written by: python tools/walk_data.py\nexport default {data};\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
