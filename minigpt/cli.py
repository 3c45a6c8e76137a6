"""What every script shares: options from the configuration's keys, and one manner of telling a mistake.

Exit codes: 0 done; 1 a check did not hold; 2 the user's mistake; 3 training stopped itself; 130 / 143 after a signal.
"""

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from minigpt.config import Config, nearest, section_class
from minigpt.errors import CheckFailed, TrainingStopped, UserError
from minigpt.signals import raised_interrupts

TYPED_TEXT = ("train.sample_prompt", "inspect.text")  # keys whose value is text to be read, not a name or path


def run_script(main: Callable[[], int | None]) -> None:
    """Run ``main`` and leave with its exit code; what ends a script in an orderly way becomes a line on stderr.

    Any other exception is a bug and keeps its traceback. Text that the console can't show is escaped, never fatal.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        raised_interrupts()
        code = main()
        sys.stdout.flush()
    except CheckFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        code = 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except TrainingStopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        code = 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # whoever read the output, such as head, has had enough
            code = 0
        elif error.errno == errno.ENOSPC and error.filename is None:
            print("error: the output can't be written, no space is left for it", file=sys.stderr)
            code = 2
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python would complain when it ends
    sys.exit(code or 0)


def unescape(text: str) -> str:
    r"""``\n``, ``\t`` and ``\\`` as typed on a command line → newline, tab, backslash; all else stays.

    Where Python took the words of the command line for ASCII (the C locale), UTF-8 text is put right again.
    """
    with contextlib.suppress(UnicodeError):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8")
    pieces = text.split("\\\\")
    return "\\".join(piece.replace("\\n", "\n").replace("\\t", "\t") for piece in pieces)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option a key, ``--section.key VALUE``, grouped by table, with type and default in the help.

    Values stay text here, and what was not given is absent: ``validate`` does the typing once for all sources.
    """
    for section, table in Config.model_fields.items():
        keys = section_class(table)
        group = parser.add_argument_group(section, keys.__doc__)
        for key, field in keys.model_fields.items():
            default = field.default if field.default != "" else '""'
            group.add_argument(
                f"--{section}.{key.replace('_', '-')}",
                dest=f"{section}.{key}",
                metavar=_type_name(field),
                default=argparse.SUPPRESS,
                help=f"{field.description} (default: {default})".replace("%", "%%"),
            )


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """``parser.parse_args``, with underscores accepted in option names and the nearest name told for unknown ones.

    Raises:
        UserError: for an unknown option, a missing value, and the like.
    """
    parser.allow_abbrev = False  # else half a name would be taken for the first option that begins so
    parser.error = _refuse
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        options_like = [word for word in unknown if word.startswith("-")]
        if not options_like:
            raise UserError(f"{unknown[0]}: not expected here; see --help")
        raise UserError("\n".join(f"{word}: unknown option{nearest(word, known)}" for word in options_like))
    return options


def config_overrides(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The ``--section.key`` values among parsed options, as nested dictionaries of text."""
    overrides: dict[str, dict[str, str]] = {}
    for name, value in vars(options).items():
        section, dot, key = name.partition(".")
        if dot:
            overrides.setdefault(section, {})[key] = unescape(value) if name in TYPED_TEXT else value
    return overrides


def _type_name(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT"}[field.annotation]  # type: ignore[index]


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; see --help")


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
