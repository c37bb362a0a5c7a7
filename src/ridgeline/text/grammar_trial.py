"""Compile grammars on trial, in processes that end where one takes too long: nothing else stops the Rust library.

A process is `python -m ridgeline.text.grammar_trial FD`. It serves one grammar after another until one ends it.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from ridgeline.core.errors import RequestError

MAX_BYTES = 4 * 2**30  # of address space
MAX_IDLE = 2


class GrammarTrial:
    """Tells which grammars compile within `timeout_s` for a tokenizer: that of llguidance's constructor; any thread."""

    def __init__(self, timeout_s: float, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._timeout_s = timeout_s
        self._begin = json.dumps([timeout_s, tokenizer, vocab_size, list(eos_ids)]).encode()
        self._idle: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def require(self, grammar: str) -> None:
        """Raise RequestError for a grammar that took too much time or memory."""
        try:
            process, connection = self._idle.pop()
        except IndexError:  # other threads have them, or there are none yet
            process, connection = self._start()
        try:
            connection.send_bytes(grammar.encode())
            connection.recv_bytes()
        except (EOFError, OSError):
            process.wait()
            why = f"it takes more than {self._timeout_s:g} s, or too much memory, to compile: make it simpler"
            raise RequestError(why) from None
        if len(self._idle) < MAX_IDLE:
            self._idle.append((process, connection))
        else:
            connection.close()
            process.wait()

    def __del__(self) -> None:
        for process, connection in self._idle:
            connection.close()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", "ridgeline.text.grammar_trial", str(number)]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, pass_fds=[number], stdin=quiet, stderr=quiet, process_group=0)
        with suppress(EOFError, OSError):  # the first grammar is told
            ours.send_bytes(self._begin)
            ours.recv_bytes()
        return process, ours


def main() -> None:
    """Serve the process at the other end of the descriptor of the first argument, until it ends or a grammar does."""
    from llguidance import LLMatcher, LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with suppress(EOFError), Connection(int(sys.argv[1])) as connection:
        timeout_s, tokenizer, vocab_size, eos_ids = json.loads(connection.recv_bytes())
        opened = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids)
        connection.send_bytes(b"open")
        while True:
            grammar = connection.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_REAL, timeout_s)  # whose signal ends the process, whatever it does
            matcher = LLMatcher(opened, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some take their time only there
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(b"done")


if __name__ == "__main__":
    main()
