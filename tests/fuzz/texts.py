"""Fuzzers of what reads texts: templates, tokenizers, outputs of models, grammars, event streams."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tests.fuzz.harness import Drawn, Finding, Target, pieces, refusing

from ridgeline.bench.sse import SSEParser
from ridgeline.core.errors import ModelLoadError, RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.text.outputs import BlockReader, OutputFormat, OutputReader, ReasoningTokens
from ridgeline.text.reasoning import FORMATS as REASONING
from ridgeline.text.stages import PanicError
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools import formats
from ridgeline.text.tools.reader import Piece
from ridgeline.weights.folder import ModelFolder

CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "y"]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a\U0001f525"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00000", "content": "{}"},
    {"role": "user", "content": [{"type": "text", "text": "b"}]},
]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
    "{%- macro show(x) %}{{ x | tojson(indent=2) }}{% endmacro -%}{% for m in messages if m.role != 'tool' %}{% if "
    "m.tool_calls is defined %}{% for c in m.tool_calls %}{{ show(c.function.arguments) }}{% endfor %}{% else %}"
    "{{ m.content if m.content is string else m.content[0].text }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ loop.index0 ~ ns.n }}{% if "
    "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not two alike') }}{% endif %}{% endfor %}",
    "{% for a in range(9) %}{{ 'x' * a }}{{ messages[::-1][:1] | map(attribute='role') | join(',') }}{% endfor %}"
    "{{ strftime_now('%Y') }}{% generation %}{{ messages | length }}{% endgeneration %}",
)
JINJA = (
    *(b"{{", b"}}", b"{%", b"%}", b"for a in range(10**9)", b"__class__", b"|tojson", b"|attr('x')", b"* 10**9"),
    *(b"recursive", b"{% include 'x' %}", b"caller()", b"loop.cycle()", b"'%s' % messages", b".format(messages)"),
)


def template(folder: Path) -> Target:
    def run(data: bytes) -> bool:
        source = data.decode("utf-8", "replace")
        with refusing(ModelLoadError, RequestError) as refused:
            compiled = ChatTemplate({"default": source}, {"bos_token": "<s>"})
            for tools in (None, [TOOL]):
                compiled.render(TALK, tools=tools)
        return not refused

    return Target(run, [text.encode() for text in TEMPLATES], JINJA)


def messages(folder: Path) -> Target:
    compiled = [ChatTemplate({"default": text}, {}) for text in TEMPLATES]

    def run(data: bytes) -> bool:
        try:
            talk = json.loads(data[1:].decode("utf-8", "replace"))
        except (ValueError, RecursionError):  # the server's reader refuses it before
            return False
        with refusing(RequestError) as refused:
            compiled[data[0] % len(compiled)].render(talk if isinstance(talk, list) else [talk], tools=[TOOL])
        return not refused

    seeds = [bytes([number]) + json.dumps(TALK).encode() for number in range(len(compiled))]
    return Target(run, seeds, (b'"role"', b'"content"', b'"tool_calls"', b'"function"', b"{}", b"[]"))


def tokenizer(folder: Path) -> Target:
    def run(data: bytes) -> bool:
        content, _, text = data.partition(b"\0")
        with refusing(ModelLoadError, RequestError, PanicError) as refused:
            read = Tokenizer.from_json(content, folder / "tokenizer.json", {"bos_token": "<s>"}, {})
            ids = read.encode(text.decode("utf-8", "replace"))
            read.decode(ids)
            stream = IncrementalDetokenizer(read)
            whole = "".join(map(stream.push, ids)) + stream.flush()
            whole.encode()
            for token_id in range(min(read.vocab_size, 300)):
                read.token_bytes(token_id)
        return not refused

    texts = (b"ab a b\n1", "é\U0001f525 a\u0300 <s> ab".encode())
    seeds = [made + b"\0" + text for made in _tokenizers() for text in texts]
    return Target(run, seeds, (b'"Replace"', b'"Precompiled"', b'"Regex": "(a+)+$"', b'"ByteLevel"', b'"Prepend"'))


def _tokenizers() -> Iterable[bytes]:
    """Make small ones of each kind of model, with the stages of each family."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "a", "b", "ab", "1", "Ġ", "▁", "<0x0A>"])}
    models = tokenizers.models
    kinds = [
        (models.BPE(vocab, [("a", "b")], unk_token="<unk>"), tokenizers.pre_tokenizers.ByteLevel()),
        (models.BPE(vocab, [("a", "b")], byte_fallback=True), tokenizers.pre_tokenizers.Metaspace()),
        (models.Unigram([(token, -1.0) for token in vocab], 0, True), tokenizers.pre_tokenizers.Metaspace()),
        (models.WordLevel(vocab, "<unk>"), tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s+|\d"), "isolated")),
        (models.WordPiece(vocab, unk_token="<unk>"), tokenizers.pre_tokenizers.BertPreTokenizer()),
    ]
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    for number, (model, before) in enumerate(kinds):
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = before
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("c", "ab")])
        fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.ByteLevel() if number == 0 else decoders.Sequence(fused)
        made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        made.add_special_tokens(["<s>"])
        yield made.to_str().encode()


def tool_calls(folder: Path) -> Target:
    """Every format with every reasoning: cut at each character an output is what it is as a whole."""
    forms = [
        OutputFormat(calls=calls, names=("f", "get_weather"), reasoning=thinks, is_open=is_open)
        for calls in formats.FORMATS.values()
        for thinks, is_open in ((None, False), (REASONING[-1], False), (REASONING[0], True))
    ]
    seeds = [bytes([number]) + text.encode() for number, form in enumerate(forms) for text in _calls_of(form)]
    return Target(
        lambda data: _read_both_ways(forms, data), seeds, sorted({m.encode() for f in forms for m in f.markers})
    )


def reasoning(folder: Path) -> Target:
    forms = [
        OutputFormat(reasoning=thinks, is_open=is_open, leads=leads)
        for thinks in REASONING
        for is_open in (False, True)
        for leads in (False, True)
    ]

    def run(data: bytes) -> bool:
        form = forms[data[0] % len(forms)]
        tokens = list(pieces(data[1:], 1 + len(data) % 7))
        if not 0 <= ReasoningTokens(form).count(tokens) <= len(tokens):
            raise Finding("more tokens of reasoning than tokens")
        return _read_both_ways(forms, data)

    texts = [f"{form.reasoning.begin} a\n{form.reasoning.end}\n\nb" for form in forms if form.reasoning is not None]
    seeds = [bytes([number]) + text.encode() for number, text in enumerate(texts)]
    return Target(run, seeds, sorted({marker.encode() for form in forms for marker in form.markers}))


def _calls_of(form: OutputFormat) -> Iterable[str]:
    calls, thinks = form.calls, form.reasoning
    assert calls is not None
    call = calls.call.replace("$NAME", "get_weather").replace("$ARGS", '{"a": ["}\\"", 1.5], "b": {}}')
    before = "" if thinks is None else f"{thinks.begin}\nthinks{thinks.end}\n"
    yield f"{before}{calls.opening}{call}{calls.separator or ''}{call}{calls.closing} and more"
    yield f"{before}text {''.join(calls.begin)}{call}{calls.end}"


def _read_both_ways(forms: Sequence[OutputFormat], data: bytes) -> bool:
    form = forms[data[0] % len(forms)]
    text = data[1:].decode("utf-8", "replace")
    whole = _joined(OutputReader(form).feed(text, last=True))
    cut = OutputReader(form)
    found = _joined(itertools.chain(*(cut.feed(char, last=False) for char in text), cut.feed("", last=True)))
    if whole != found:
        raise Finding(f"streamed {found}, as a whole {whole}")
    blocks = BlockReader(form)
    steps = [*itertools.chain(*(blocks.feed(char, last=False) for char in text)), *blocks.feed("", last=True)]
    if [step.what for step in steps if step.what != "more"] != ["begin", "end"] * sum(s.what == "end" for s in steps):
        raise Finding("blocks overlap")
    return any(kind != "content" for kind, _, _ in whole)


def _joined(read: Iterable[Piece]) -> list[tuple[str, int, str]]:
    joined: list[tuple[str, int, str]] = []
    for piece in read:
        if joined and piece.kind != "call" and joined[-1][:2] == (piece.kind, piece.call):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + piece.text)
        else:
            joined.append((piece.kind, piece.call, piece.text))
    return joined


def grammar(folder: Path) -> Target:
    """Schemas, regular expressions, grammars and choices, compiled on trial as a request's are; some tokens follow."""
    read = ModelFolder.open("python-1m").tokenizer()
    assert read is not None
    of = read, read.vocab_size, frozenset([0])
    trial, compiler = GrammarTrial(1.0, *of), GrammarCompiler(*of)
    kinds = ("json", "regex", "grammar", "choice")

    def run(data: bytes) -> bool:
        kind, text = kinds[data[0] % len(kinds)], data[1:].decode("utf-8", "replace")
        with refusing(RequestError) as refused:
            params = StructuredOutputsParams(**{kind: text.split("|") if kind == "choice" else text})
            trial.require(params)
            state, rng = compiler.compile(params).start(), Drawn(data)
            for _ in range(8):
                allowed = [i for i, word in enumerate(state.mask().tolist()) if word]
                if not allowed:
                    raise Finding("a grammar that allows nothing")
                index = rng.choice(allowed)
                if state.accept(64 * index + (int(state.mask()[index]) & -int(state.mask()[index])).bit_length() - 1):
                    break
        return not refused

    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3}},
        "$defs": {"d": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "integer", "minimum": 2}]}},
        "required": ["a"],
    }
    texts = (json.dumps(schema), r"(a|b{2,5})+\d*[^x]", 'root ::= "a" b*\nb ::= [a-z] | "(" root ")"', "yes|no")
    lark = b'\x02start: "a" b+\nb: /[0-9]/ | "-" start'
    words = (b'"$ref": "#"', b'"multipleOf": 0.1', b"{1,100000}", b'"allOf": [', b'"pattern": "(a*)*$"', b"::=")
    return Target(run, [*(bytes([n]) + text.encode() for n, text in enumerate(texts)), lark], words)


def events(folder: Path) -> Target:
    """The load generator's reader of event streams: cut anywhere, the events are the same."""

    def run(data: bytes) -> bool:
        whole, cut = SSEParser(), SSEParser()
        found = whole.feed(data)
        if (again := [event for piece in pieces(data, 1 + data[0] % 9) for event in cut.feed(piece)]) != found:
            raise Finding(f"in pieces {again}, as a whole {found}")
        return bool(found)

    seeds = [
        b'\xef\xbb\xbfdata: {"a": 1}\n\nevent: error\r\ndata: x\r\ndata:y\r\n\r\ndata: [DONE]\n\n',
        b": c\rid: 1\rdata\rretry: 3\r\r",
    ]
    return Target(run, seeds, (b"data:", b"event:", b"\r", b"\n\n", b"\r\n\r\n", b"\xef\xbb\xbf"))
