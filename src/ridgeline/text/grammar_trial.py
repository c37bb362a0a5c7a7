"""Compile grammars on trial, in processes that end where one takes too long: nothing else stops the Rust library.

A process is `python -m ridgeline.text.grammar_trial`. It reads lines of JSON: how long a grammar may take and the
model's tokenizer, then what one request after another asks for, and replies to each what is wrong with it. What turns
schemas and GBNF into llguidance's words takes its time as well, so it is done there, too.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Set
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar import MAX_CACHED, MAX_GRAMMAR_CHARS, compiled, grammar_text, open_tokenizer, refused
from ridgeline.text.tokenizer import Tokenizer

MAX_BYTES = 4 * 2**30  # of address space
MAX_ASKED_CHARS = 4 * MAX_GRAMMAR_CHARS  # of JSON, in which a character may be written as two
_FIELDS = tuple(field.name for field in fields(StructuredOutputsParams))


class Problem(NamedTuple):
    """Holds the arguments of a RequestError; "" for none."""

    message: str = ""
    param: str | None = None
    code: str | None = None


class GrammarTrial:
    """Tells which grammars compile for a model within `timeout_s`, from any thread; the rest is GrammarCompiler's."""

    def __init__(self, timeout_s: float, tokenizer: Tokenizer, vocab_size: int, eos_ids: Set[int]) -> None:
        self._timeout_s = timeout_s
        self._model = tokenizer, max(vocab_size, tokenizer.vocab_size), sorted(eos_ids)
        self._idle: list[subprocess.Popen[str]] = []
        self._problem = lru_cache(MAX_CACHED)(self._find_problem)

    def require(self, params: StructuredOutputsParams) -> None:
        """Raise RequestError for what cannot be compiled, or takes too much time or memory."""
        (kind, *_) = params.kinds
        try:
            asked = json.dumps({name: getattr(params, name) for name in _FIELDS}, ensure_ascii=False)
        except RecursionError as error:
            raise refused(kind, "it is nested too deeply") from error
        if len(asked) > MAX_ASKED_CHARS:
            raise refused(kind, f"it has {len(asked)} characters, and may have {MAX_GRAMMAR_CHARS}")
        try:
            problem = self._problem(asked)
        except EOFError:  # the next one may have a faster machine: nothing is cached of it
            why = f"it takes more than {self._timeout_s:g} s, or too much memory, to compile: make it simpler"
            raise refused(kind, why) from None
        if problem.message:
            raise RequestError(problem.message, param=problem.param, code=problem.code)

    @cached_property
    def _begin(self) -> list[object]:
        tokenizer, vocab_size, eos_ids = self._model
        return [self._timeout_s, tokenizer.to_json(), vocab_size, eos_ids]

    def _find_problem(self, asked: str) -> Problem:
        """Return why a grammar cannot be compiled. Raises EOFError where its process ended."""
        try:
            process = self._idle.pop()
        except IndexError:  # other threads have them, or there are none yet
            process = self._start()
        problem = _reply(process, asked)
        self._idle.append(process)
        return problem

    def __del__(self) -> None:
        for process in self._idle:
            process.communicate()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "ridgeline.text.grammar_trial"]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, process_group=0)
        problem = _reply(process, self._begin)
        if problem.message:
            process.communicate()
            raise RequestError(problem.message, param=problem.param)
        return process


def _reply(process: "subprocess.Popen[str]", message: object) -> Problem:
    """Return what a process replies. Raises EOFError where it ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        print(json.dumps(message), file=process.stdin, flush=True)
        return Problem(*json.loads(process.stdout.readline()))
    except (BrokenPipeError, ValueError):  # half a line, or none
        process.kill()
        process.communicate()
        raise EOFError from None


def main() -> None:
    """Serve the process that writes to the standard input, until it ends or a grammar takes too long."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    timeout_s, *model = json.loads(sys.stdin.readline())
    try:
        opened = open_tokenizer(*model)
    except RequestError as error:
        sys.stdout.write(f"{json.dumps(Problem(str(error), error.param))}\n")
        return
    problem = Problem()
    while True:
        sys.stdout.write(f"{json.dumps(problem)}\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # whose signal ends the process, whatever it does
        problem = _tried(opened, json.loads(line), *model[1:])
        signal.setitimer(signal.ITIMER_REAL, 0)


def _tried(tokenizer: Any, asked: str, vocab_size: int, eos_ids: list[int]) -> Problem:
    """Compile what a request asks for; return what is wrong with it."""
    name = ""
    try:
        name, text = grammar_text(StructuredOutputsParams(**json.loads(asked)))
        compiled(tokenizer, text, vocab_size, frozenset(eos_ids))
    except RequestError as error:
        told = error if error.param else refused(name, str(error))
        return Problem(str(told), told.param, told.code)
    return Problem()


if __name__ == "__main__":
    main()
