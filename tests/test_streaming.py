"""What of a text may be shown while it comes (its bytes: ``test_tokenizer``)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.errors import UserError
from minigpt.streaming import StopFilter


def let_through(pieces: list[str], stops: list[str]) -> list[str]:
    """What a stop filter gives for each piece up to a stop string, and at the end."""
    stop, out = StopFilter(stops), list[str]()
    for piece in pieces:
        out.append(stop.push(piece))
        if stop.met:
            break
    assert not (stop.met and stop.flush())
    return [*out, stop.flush()]


def text_before_stop(text: str, stops: list[str]) -> str:
    """The same, seeing the whole text at once."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    out = let_through(pieces, stops)
    assert "".join(out) == text_before_stop("".join(pieces), stops)


def test_text_streams_as_soon_as_it_is_sure() -> None:
    assert let_through(["a\n", "b\n", "\n", "c"], ["\n\n"]) == ["a", "\nb", "", ""]
    assert let_through(["a\n", "b\n"], ["\n\n"]) == ["a", "\nb", "\n"]
    assert let_through(["a", "", "b"], []) == ["a", "", "b", ""]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop string is empty"):
        StopFilter(["a", ""])
