"""One file's bytes → clean text: decoded, without a byte order mark, with ``\\n`` as its only line end.

Nothing is guessed: what a file's encoding does not allow is an error that names the place.
"""

import codecs
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from minigpt.config import DataConfig
from minigpt.errors import UserError

CHUNK = 1 << 20  # bytes


def normalise_newlines(text: str) -> str:
    r"""``\r\n`` and ``\r`` → ``\n``: the one rule for corpora, prompts and texts to evaluate."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class WrongEncodingError(UserError):
    """A file holds bytes that its encoding does not allow."""


def encoding_name(name: str, option: str = "data.encoding") -> str:
    """Python's own name of a text encoding, whatever its spelling: ``utf-8`` for ``UTF8``.

    Raises:
        UserError: for what is no encoding of text, naming the option that gave it.
    """
    try:
        "".encode(name)  # not decode, which asks no codec about empty bytes
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise UserError(
            f"{option} = {name}: not a text encoding that Python knows; such as utf-8, utf-16, cp1252, gb18030, "
            "shift_jis"
        ) from None


def read_text(path: Path, encoding: str, *, raw: bool = False) -> Iterator[str]:
    """A file's text in chunks, without a byte order mark, every line end a newline.

    With ``raw`` it is taken byte by byte as it is, bytes that are not UTF-8 as lone surrogates (Python's
    "surrogateescape"). The tokenizer ``byte`` turns them back.

    Raises:
        UserError: if the file can't be read, or is not text in that encoding.
    """
    encoding_name(encoding)
    if not raw:
        yield from _decoded(path, encoding)
        return
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                yield block.decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise unreadable(path, error) from None


def is_raw(path: Path, data: DataConfig) -> bool:
    """Whether a file is taken byte by byte: it is not UTF-8, no other encoding was named, and the tokenizer can."""
    if data.tokenizer != "byte" or encoding_name(data.encoding) != "utf-8":
        return False
    try:
        for _ in read_text(path, "utf-8"):
            pass
    except WrongEncodingError:
        return True
    return False


def raw_note(paths: Sequence[Path]) -> str:
    """What is said of the files that ``is_raw`` found."""
    if len(paths) == 1:
        return f"{paths[0]} is not UTF-8: its bytes are taken as they are"
    return f"{paths[0]} and {len(paths) - 1} more are not UTF-8: their bytes are taken as they are"


def whole_text(path: Path, data: DataConfig, say: Callable[[str], None]) -> str:
    """All of a file, read as the text of a run with these settings is; ``say`` is told what is to be said of it."""
    raw = is_raw(path, data)
    if raw:
        say(raw_note([path]))
    return "".join(read_text(path, data.encoding, raw=raw))


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    newlines = io.IncrementalNewlineDecoder(decoder=None, translate=True)
    position, block, at_start = 0, b"", True
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(CHUNK)
                text: str = newlines.decode(decoder.decode(block, not block), final=not block)
                if at_start and (other := _seems_utf16(text, block)):
                    raise WrongEncodingError(
                        f"{path}: more than a tenth of its characters are NUL, as in {other} without a byte order "
                        f"mark; then say so (--data.encoding {other}; outside train.py --encoding), or remove them"
                    )
                if text:
                    yield text.removeprefix("\ufeff") if at_start else text
                    at_start = False
                if not block:
                    return
                position += len(block)
    except UnicodeDecodeError as error:
        # what the decoder was looking at ends where the block ends
        offset = position + len(block) - len(error.object) + error.start
        raise WrongEncodingError(
            f"{path}: byte {offset} (0x{error.object[error.start]:02x}) is not {encoding} text; name the file's "
            "encoding (--data.encoding; outside train.py --encoding), such as cp1252, gb18030, shift_jis or utf-16 (a "
            "run with the tokenizer byte takes any bytes as they are)"
        ) from None
    except UnicodeError as error:  # of some decoders, which do not say where
        raise WrongEncodingError(
            f"{path}: is not {encoding} text ({error}); name the file's encoding (--data.encoding; outside "
            "train.py --encoding), such as utf-16-le where a byte order mark is missing"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


def _seems_utf16(text: str, read: bytes) -> str:
    """The kind of UTF-16 that ``text`` is, decoded from the bytes ``read`` as something else; empty if it is not.

    UTF-16 of Latin letters has a NUL in every other byte. A tenth of NULs is more than any text has.
    """
    if 10 * text.count("\0") <= len(text):
        return ""
    return "utf-16-le" if read[1::2].count(0) >= read[::2].count(0) else "utf-16-be"


def unreadable(path: Path | str, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions")
