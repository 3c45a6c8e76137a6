"""Long texts on a CPU: ``plain``'s decoder compiled by numba (``compiled.py``), several times as fast.

numba is optional: whoever imports this module needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minigpt import compiled, normal_form, packed, plain, sampling, vectors
from minigpt.console import say
from minigpt.normal_form import Array, NormalForm
from minigpt.packed import PANEL, Crew, Desk, Law, Model
from minigpt.sampling import SamplingOptions, Text
from minigpt.threads import usual_threads
from minigpt.vectors import WIDTH

LONGEST_CHUNK = 128  # tokens written in one call
CHUNK_WEIGHTS = 128_000_000  # weights read in one call: some milliseconds, so that text comes smoothly
MOST_TEXTS, MEMORY_BYTES = 32, 2**29  # side by side
MOST_THREADS = 4  # that read a token together: each product has but a few rows for each
LOOKS = 5_000_000  # a thread looks so often, some milliseconds, whether the others come; and once more for each weight
# that is read and each token: many times as long as the reading
FEW_ALONE, MANY_ALONE = 4, 256  # calls after one in which they did not, for other programs kept the cores busy:
# at first, and at most; each time twice as many as the last time


@dataclass
class FastMemory:
    """Keys and values of the tokens that N texts have so far, with room for a whole context of each."""

    keys: Array  # (N, L, G, C/64, K, 64), C rounded up
    values: Array  # (N, L, G, K/16, C, 16), K rounded up, with zeros
    lengths: Array  # (N,)


class FastEngine:
    """Next-token logits of growing sequences, and several tokens of each at once (``sampling.WritingEngine``)."""

    def __init__(self, model: NormalForm, threads: int = 1) -> None:
        """``model`` in any float type; ``threads`` read each token together, which changes no bit of a number."""
        kept_on_disk()  # forgets code that is too old
        self._form = model.astype(np.float32)
        self._model = Model.of(self._form)
        self._n_weight = sum(array.size for array in self._model.layers) + model.head.size
        self._chunk = max(1, min(LONGEST_CHUNK, CHUNK_WEIGHTS // self._n_weight))
        self._threads = min(threads, MOST_THREADS)
        self._others = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="minigpt-fast")
        self._alone = 0  # calls to come in which no other thread helps
        self._next_alone = FEW_ALONE

    def prepare(self) -> None:
        """Compile all there is to compile, or load it where it was kept: seconds, or a quarter of one."""
        text = Text.begin([0], max_new_tokens=1, options=SamplingOptions(), end=None)
        self._alone += 2  # else other threads would lose patience
        self.logits(text.unread, self.new_memory())
        self.write({0: text}, self.new_memory())

    @property
    def context_length(self) -> int:
        """Most tokens a memory holds of a text."""
        return self._form.context_length

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        return self._form.vocab_size

    @property
    def texts_at_once(self) -> int:
        """As many as MEMORY_BYTES hold, 32 at most."""
        memory = self.new_memory()  # its pages are touched by nobody
        return max(1, min(MOST_TEXTS, MEMORY_BYTES // (memory.keys.nbytes + memory.values.nbytes)))

    def new_memory(self, n_text: int = 1) -> FastMemory:
        """The memory of so many empty texts."""
        outer = n_text, len(self._model.layers.qkv_bias), self._form.n_kv_head
        length, head_dim = self.context_length, self._form.head_dim
        return FastMemory(
            np.empty((*outer, -(-length // PANEL), head_dim, PANEL), np.float32),
            np.zeros((*outer, -(-head_dim // WIDTH), length, WIDTH), np.float32),
            np.zeros(n_text, np.int64),
        )

    def logits(self, tokens: Sequence[int] | Array, memory: FastMemory, text: int = 0) -> Array:
        """Logits (V,) of what follows ``tokens``, which follow those of that text in ``memory`` and are added to it."""
        start, ids = memory.lengths[text], np.asarray(tokens, np.int64)
        assert 0 < len(ids) <= self.context_length - start, f"{len(ids)} tokens do not fit a memory of {start}"
        desk = Desk.of(self._model, n_token=len(ids))
        texts, places = np.full(len(ids), text), np.arange(start, start + len(ids))

        def read(crew: Crew) -> None:
            compiled.read(self._model, memory.keys, memory.values, texts, places, ids, desk, crew)

        self._together(read, n_token=len(ids))
        memory.lengths[text] += len(ids)
        return desk.logits[0, : self.vocab_size]

    def write(self, texts: Mapping[int, Text], memory: FastMemory) -> dict[int, list[int]]:
        """The next few ids of each text, by its number in ``memory``, which takes in what it has not read.

        As many for each, but none after an end, nor where logits are not finite.
        """
        model, keys, values = self._model, memory.keys, memory.values
        behind = {number: ids for number, text in texts.items() if len(ids := text.unread[:-1])}
        begun = {number: memory.lengths[number] + np.arange(len(ids)) for number, ids in behind.items()}
        for number, ids in behind.items():
            memory.lengths[number] += len(ids)
        numbers, rules = np.array(list(texts)), [text.rule for text in texts.values()]
        places = memory.lengths[numbers]
        room = self.context_length - int(places.max())
        assert room > 0, "a text fills its memory"
        count = min(self._chunk, room, *(text.left for text in texts.values()))
        tokens = np.array([text.tokens[-1] for text in texts.values()])
        uniforms = np.stack([text.uniforms.random(count) for text in texts.values()])
        reading = Desk.of(model, n_token=max(map(len, behind.values()), default=0))
        writing = Desk.of(model, n_token=len(texts), n_id=count)

        def write(crew: Crew) -> None:
            for number, ids in behind.items():
                compiled.read(model, keys, values, np.full(len(ids), number), begun[number], ids, reading, crew)
            law = Law.of(rules, self.vocab_size)
            compiled.write(model, keys, values, numbers, places, tokens, law, uniforms, writing, crew)

        self._together(write, n_token=count * len(texts) + sum(map(len, behind.values())))
        written = {number: row[row >= 0].tolist() for number, row in zip(texts, writing.ids, strict=True)}
        memory.lengths[numbers] += [len(ids) for ids in written.values()]
        return written

    def _together(self, work: Callable[[Crew], None], *, n_token: int) -> None:
        """Have all threads do the work at once; this one alone where others are kept from coming."""
        if self._threads > 1 and not self._alone:
            mine, *others = Crew.of(self._threads, LOOKS + n_token * self._n_weight)
            begun, done = list[Future[None]](), False
            try:
                for other in others:
                    begun.append(self._others.submit(work, other))
                work(mine)
                done, self._next_alone = True, FEW_ALONE
            except TimeoutError:
                self._alone, self._next_alone = self._next_alone, min(2 * self._next_alone, MANY_ALONE)
            finally:
                errors = [other.exception() for other in begun]  # once each has ended, however it did
            for error in errors:
                if error and not isinstance(error, TimeoutError):
                    raise error
            if done:
                return
        self._alone = max(0, self._alone - 1)
        work(Crew.of(1, 0)[0])


def compiled_engine(model: NormalForm) -> FastEngine:
    """The model ready to write; that the first time takes a while is told on stderr."""
    if not kept_on_disk():
        say("compiling with numba: once, about 10 s")
    engine = FastEngine(model, usual_threads())
    engine.prepare()
    return engine


def kept_on_disk() -> bool:
    """Whether an earlier process has left the compiled code, as far as can be told without loading it."""
    folder = compiled.write.stats.cache_path
    if not folder:
        return False
    forget_other_code(Path(folder))
    return any(file.exists() for file in Path(folder).glob("compiled.write-*.nbi"))


def forget_other_code(folder: Path) -> None:
    """Delete compiled code that was made from other versions of the files it takes types and constants from.

    numba looks at its own file alone.
    """
    sources = [
        Path(str(module.__file__)).stat() for module in (compiled, packed, normal_form, plain, sampling, vectors)
    ]
    made_from, stamp = str([(file.st_mtime_ns, file.st_size) for file in sources]), folder / "compiled.made-from"
    with suppress(OSError):
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from:
            return
        for file in folder.glob("compiled.*.nb[ci]"):
            file.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(made_from, encoding="utf-8")
