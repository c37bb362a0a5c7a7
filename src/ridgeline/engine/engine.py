"""Engine: the parts of a model that runs, as `engine/build.py` puts them together."""

from dataclasses import dataclass

from ridgeline.cache.layout import CacheLayout
from ridgeline.engine.client import EngineInfo
from ridgeline.engine.executor import Executor
from ridgeline.engine.intake import Intake
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.recording import EngineSetup
from ridgeline.program.op import Program
from ridgeline.spec.spec import DecoderSpec
from ridgeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """A model ready to run: what it serves, the loop that computes, and the intake that makes requests."""

    info: EngineInfo
    setup: EngineSetup
    loop: EngineLoop
    executor: Executor
    intake: Intake
    spec: DecoderSpec
    program: Program
    layout: CacheLayout
    tokenizer: Tokenizer | None
