"""Reference patterns: the rows they define, the keys they mean, and the files they are read from."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.errors import UserError
from minigpt.inspection.compare import closeness
from minigpt.inspection.patterns import HEAVIEST, Pattern, Reference, links_reference, parse_reference, read_reference
from minigpt.tokenizer import CharTokenizer, train_tokenizer

LETTERS = CharTokenizer("".join(sorted("().,[]ab c")), byte_fallback=False)
BUILT_IN = (
    "uniform", "previous", "first", "self", "window:1", "window:3", "duplicate", "induction", "punctuation", "brackets",
)  # fmt: skip


def keys(name: str, text: str) -> dict[int, list[int]]:
    """Row → the keys a reference means there, after a check that they share the weight evenly."""
    pattern = parse_reference(name, LETTERS).pattern(LETTERS.encode(text))
    found = {int(row): np.flatnonzero(pattern.weights[row]).tolist() for row in np.flatnonzero(pattern.defined)}
    for row, places in found.items():
        assert np.allclose(pattern.weights[row, places], 1 / len(places))
    return found


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(BUILT_IN), ids=st.lists(st.integers(1, LETTERS.vocab_size - 1), min_size=1, max_size=20))
def test_a_perfect_head_scores_perfectly(name: str, ids: list[int]) -> None:
    assert_a_perfect_head_scores_perfectly(parse_reference(name, LETTERS).pattern(np.array(ids)))


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_a_perfect_head_of_known_links_too(pairs: list[tuple[int, int]]) -> None:
    links = [(max(pair), [min(pair)]) for pair in pairs]
    assert_a_perfect_head_scores_perfectly(links_reference(links).pattern(np.arange(10)))


def assert_a_perfect_head_scores_perfectly(pattern: Pattern) -> None:
    """Mass 1, every largest weight right, nothing elsewhere, and lift 1 where there is any."""
    assert_is_a_pattern(pattern)
    head = np.where(pattern.defined[:, None], pattern.weights, np.eye(len(pattern.weights), dtype=np.float32))
    found = closeness(head, pattern)
    assert found.rows == pattern.defined.sum()
    if not found.rows:
        assert np.isnan([found.total_variation, found.mass, found.argmax, found.lift]).all()
        return
    assert found.mass == pytest.approx(1, abs=1e-6) and found.argmax == 1
    assert found.total_variation == pytest.approx(0, abs=1e-6) and found.jensen_shannon == pytest.approx(0, abs=1e-6)
    assert found.kl == 0
    if found.uniform_mass < 1 - 1e-9:
        assert found.lift == pytest.approx(1, abs=1e-5)
    else:
        assert np.isnan(found.lift), "uniform attention has all of the mass: there is nothing to gain"


def assert_is_a_pattern(pattern: Pattern) -> None:
    assert pattern.weights.dtype == np.float32 and pattern.defined.dtype == np.bool_
    assert not np.triu(pattern.weights, 1).any(), "causal"
    assert np.allclose(pattern.weights.sum(axis=1), pattern.defined)
    assert not pattern.defined[0], "in row 0 there is no choice"


def test_patterns_of_positions() -> None:
    rows = range(1, 5)
    assert keys("uniform", "abcab") == {i: list(range(i + 1)) for i in rows}
    assert keys("previous", "abcab") == {i: [i - 1] for i in rows}
    assert keys("first", "abcab") == {i: [0] for i in rows}
    assert keys("self", "abcab") == keys("window:1", "abcab") == {i: [i] for i in rows}
    assert keys("window:3", "abcab") == {1: [0, 1], 2: [0, 1, 2], 3: [1, 2, 3], 4: [2, 3, 4]}


def test_patterns_of_content() -> None:
    assert keys("duplicate", "abcabba") == {3: [0], 4: [1], 5: [1, 4], 6: [0, 3]}
    assert keys("induction", "abcabba") == {3: [1], 4: [2], 5: [2, 5], 6: [1, 4]}
    assert keys("duplicate", "abc") == keys("induction", "abc") == {}
    assert keys("punctuation", "a, b.c") == {1: [1], 2: [1], 3: [1], 4: [1, 4], 5: [1, 4]}
    assert keys("punctuation", "ab c") == {}


def test_brackets_mean_the_innermost_open_one() -> None:
    #                                                      0123456789
    assert keys("brackets", "a(b[c])ab") == {1: [1], 2: [1], 3: [3], 4: [3], 5: [1]}
    assert keys("brackets", "a)[b)c]a") == {2: [2], 3: [2], 4: [2], 5: [2]}, "what closes nothing is passed over"
    assert keys("brackets", "(a") == {1: [0]}, "row 0 is never defined"


def test_marks_and_brackets_in_tokens_of_many_characters() -> None:
    tokenizer = train_tokenizer("bpe", ["so (he said), so (he said), 「そう」。 " * 30], 300)
    ids = tokenizer.encode("so (he said), so")
    texts = [tokenizer.token_bytes(int(token)).decode() for token in ids]
    opener = next(i for i, text in enumerate(texts) if "(" in text)
    assert any(len(text) > 1 for text in texts)
    weights = parse_reference("brackets", tokenizer).pattern(ids)
    closer = next(i for i, text in enumerate(texts) if ")" in text)
    assert weights.defined.tolist() == [opener <= i < closer for i in range(len(ids))]
    assert (weights.weights[opener:closer, opener] == 1).all()
    japanese = tokenizer.encode("「そう」。")
    assert not parse_reference("brackets", tokenizer).pattern(japanese).defined[-1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prevous", "prevous: no such reference; did you mean previous?"),
        ("zzz", "known are uniform, previous"),
        ("window", "did you mean window:W"),
        ("window:0", "a whole number from 1 to 999999999, as in window:4"),
        ("window:x", "from 1 to"),
        ("window:-2", "from 1 to"),
        ("window:" + 20 * "9", "from 1 to"),
        ("window:" + 5000 * "9", "from 1 to"),
        ("nowhere.json", "nowhere.json: cannot be read"),
    ],
)
def test_unknown_references(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        parse_reference(text, LETTERS)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["punctuation", "brackets"])
def test_texts_are_needed(name: str) -> None:
    with pytest.raises(UserError, match="--tokens FILE"):
        parse_reference(name, None)


def test_links_add_up_in_a_row() -> None:
    pattern = links_reference([(3, [1, 2]), (3, [1]), (5, [0])]).pattern(np.arange(6))
    assert_is_a_pattern(pattern)
    assert np.flatnonzero(pattern.defined).tolist() == [3, 5]
    assert np.allclose(pattern.weights[3, :3], [0, 2 / 3, 1 / 3]) and pattern.weights[5, 0] == 1
    with pytest.raises(UserError, match="links: row 5 is beyond the 4 tokens"):
        links_reference([(5, [0])]).pattern(np.arange(4))


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def written(folder: Path, content: object) -> Reference:
    path = folder / "my.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_reference(path)


def test_a_matrix_tells_shares(tmp_path: Path) -> None:
    matrix = [[1, 0, 0, 0], [0, 0, 0, 0], [2, 1, 1, 0], [0, 0, 0.5, 0.5]]
    for content in (matrix, {"matrix": matrix}):
        reference = written(tmp_path, content)
        pattern = reference.pattern(np.arange(4))
        assert_is_a_pattern(pattern)
        assert pattern.defined.tolist() == [False, False, True, True]
        assert pattern.weights[2].tolist() == [0.5, 0.25, 0.25, 0]
    with pytest.raises(UserError, match=r"my\.json: is 4 x 4, but 7 tokens are read; see --length"):
        reference.pattern(np.arange(7))


def test_the_heaviest_weights_still_sum_to_a_number(tmp_path: Path) -> None:
    pattern = written(tmp_path, [[5, key, HEAVIEST] for key in range(4)]).pattern(np.arange(6))
    assert_is_a_pattern(pattern)
    assert pattern.weights[5].tolist() == [0.25] * 4 + [0, 0]
    widest = parse_reference("window:999999999", None).pattern(np.arange(6))
    assert np.array_equal(widest.weights, parse_reference("uniform", None).pattern(np.arange(6)).weights)


def test_pairs_with_and_without_weight(tmp_path: Path) -> None:
    pattern = written(tmp_path, [[4, 0], [4, 2, 3], [2, 1], [0, 0]]).pattern(np.arange(6))
    assert_is_a_pattern(pattern)
    assert np.flatnonzero(pattern.defined).tolist() == [2, 4]
    assert pattern.weights[4].tolist() == [0.25, 0, 0.75, 0, 0, 0]
    with pytest.raises(UserError, match="row 4 is beyond the 3 tokens"):
        written(tmp_path, [[4, 0]]).pattern(np.arange(3))


def test_what_could_be_both_must_be_named(tmp_path: Path) -> None:
    both = [[0, 0], [1, 0]]
    with pytest.raises(UserError, match="could be a matrix or pairs; name it"):
        written(tmp_path, both)
    pairs, matrix = (written(tmp_path, {kind: both}).pattern(np.arange(2)) for kind in ("pairs", "matrix"))
    assert pairs.weights.tolist() == matrix.weights.tolist() == [[0, 0], [1, 0]]
    unlike = [[1, 0], [1, 1]]
    assert written(tmp_path, {"pairs": unlike}).pattern(np.arange(2)).weights[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "content",
    [
        {}, [], 3, "previous", None, {"matrix": [[1]], "pairs": []}, {"pairs": [[1]]}, {"links": [[1, 0]]},
        [[1, 0, 0], [1, 0, 0]], [[0, 1, 0], [0, 0, 1], [1, 0, 0]], [[1, 0, 0, 0]] * 3, [[2, 3]], [[2, -1]], [[2.5, 1]],
        [[2, 1, 0]], [[2, 1, -1]], [[2, True]], [[1.0, 0, 0], [-1, 2, 0], [0, 0, 1]], [["1", "0"]],
        {"matrix": [[1, 0], [float("nan"), 1]]}, {"matrix": [[0, 0], [float("inf"), 0]]},
        [[5, 3, 10**400]], [[10**400, 3]], [[1, 0, 0], [10**400, 1, 0], [1, 1, 1]],
        [[5, 2, 1e308], [5, 3, 1e308], [5, 4, 1e308]],
    ],
)  # fmt: skip
def test_files_that_hold_no_pattern(tmp_path: Path, content: object) -> None:
    with pytest.raises(
        UserError, match=r"my\.json: must be a T x T matrix of weights, 0 above the diagonal, or a list"
    ):
        written(tmp_path, content)


def test_files_that_are_not_json(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_bytes(b"\xff[[")
    with pytest.raises(UserError, match=r"my\.json: not a valid JSON file"):
        read_reference(path)
