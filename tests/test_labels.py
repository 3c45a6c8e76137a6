"""Names in columns of tables: never wider than the column, and the telling end kept."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt.console import columns
from minigpt.inspection.labels import filled, shortened


def width(text: str) -> int:
    return sum(map(columns, text))


def test_names_that_fit_stay_and_longer_ones_lose_an_end() -> None:
    assert shortened("previous", 8) == "previous" and shortened("extraordinarily", 11) == "extraord..."
    assert shortened("runs/mine/pattern.json", 15, keep_end=True) == "...pattern.json"
    assert (
        shortened("春の朝小さな駅", 9) == "春の朝..." and shortened("春の朝小さな駅", 9, keep_end=True) == "...さな駅"
    )
    assert filled("previous", 11) == "previous   " and filled("extraordinarily", 11) == "extraor... "


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="ab 春\u0301é", max_size=20), room=st.integers(4, 20), keep_end=st.booleans())
@example(text="春" * 9, room=4, keep_end=False)
def test_never_wider_than_the_column(text: str, room: int, keep_end: bool) -> None:
    assert width(shortened(text, room, keep_end=keep_end)) <= room
    assert width(filled(text, room)) == room and filled(text, room).endswith(" ")
