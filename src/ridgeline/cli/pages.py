"""Write the pages of a server as files that a browser opens without one."""

from pathlib import Path
from typing import Annotated

import typer

MAX_REQUESTS = 40


def pages(
    out: Annotated[Path, typer.Argument(help="The folder to write to.")],
    journal: Annotated[Path | None, typer.Option(help="A file of --journal: its steps, requests, diagnosis.")] = None,
) -> None:
    """Write the pages without a server: Learn, Numbers, Steps, and with a journal Request and Doctor."""
    import json
    import shlex
    from base64 import b64encode
    from hashlib import sha256
    from importlib import resources

    import msgspec

    from ridgeline.core.errors import ConfigError
    from ridgeline.core.files import write_whole
    from ridgeline.engine.recording import read_recording
    from ridgeline.explain.lives import life
    from ridgeline.server.explained import reply_of
    from ridgeline.server.pages import told

    replies: dict[str, object] = {"explain/server": {"use": "files", "models": ["files, no server"]}}
    if journal is not None:
        found, name = read_recording(journal), str(journal)
        rings = {ring: (0, getattr(found, ring)) for ring in ("steps", "spans", "decisions", "outputs")}
        replies |= {"explain/steps": told(rings, found.cache_reasons), "explain/doctor": reply_of("doctor", name)}
        for seq_id in found.outputs["seq_id"][-MAX_REQUESTS:].tolist():
            command = f"ridgeline doctor {shlex.quote(name)} --request={seq_id}"
            replies[f"explain/doctor?request={seq_id}"] = {"command": command, "found": life(found, seq_id)}
    ui = resources.files("ridgeline.server") / "ui"
    files = {file.name: file.read_text(encoding="utf-8") for file in ui.iterdir()}
    files["api.js"] = files["static.js"]
    files["data-static.js"] = f"export default {msgspec.json.encode(replies).decode()};"
    modules = {  # a page from a disk may load no other file as a module: all of them are in it
        name: "data:text/javascript;base64," + b64encode(text.replace('"./', '"').encode()).decode()
        for name, text in files.items()
        if name.endswith(".js")
    }
    scripts = {"importmap": json.dumps({"imports": modules}), "module": 'import "app.js";'}
    hashes = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts.values())
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = f"default-src 'none'; script-src {allowed} data:; style-src 'self'; img-src 'self'; base-uri 'none'"
    head = [f'<meta http-equiv="content-security-policy" content="{policy}">']
    head += [f'<script type="{kind}">{script}</script>' for kind, script in scripts.items()]
    html = files["index.html"].replace('<script type="module" src="app.js"></script>', "\n".join(head))
    try:
        for name in ("style.css", "ridge.svg", "index.html"):
            write_whole(out / name, (html if name == "index.html" else files[name]).encode())
    except OSError as error:
        raise ConfigError(f"the pages cannot be written to {out}: {error.strerror}") from None
    typer.echo(f"open {out / 'index.html'}")
