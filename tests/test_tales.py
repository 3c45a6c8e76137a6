"""The tales: the same text everywhere, true links, words that are really determined, nothing held out let in."""

import hashlib
import itertools
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.tasks import tales
from minigpt.tasks.grammar import Grammar, Slot, read_grammar
from minigpt.tasks.tales import KINDS, Span, Story, corpus, guesses, held_out_stories, recognise, sentences, stories

ENGLISH = Path(tales.__file__).with_name("tales_english.toml")
WORD = re.compile(r"[A-Za-z]+")


@cache
def told() -> list[Story]:
    return list(itertools.islice(stories(7), 600))


@cache
def judged() -> list[Story]:
    return held_out_stories(1, 300)


def at(story: Story, span: Span) -> str:
    return story.text[span.start : span.end]


# ── the corpus ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_never_changes():
    text = "\n".join(corpus(0, 20_000))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "6e077d927076e6118a28a9b4a749b9d596d299a96963f59378d447d31a54a70c"
    )
    text = "\n".join(corpus(0, 400_000))
    assert (len(text), len(WORD.findall(text)), text.count('"')) == (401050, 71235, 4328)
    assert corpus(1, 5_000) != corpus(0, 5_000)


def test_the_corpus_is_the_one_that_token_files_are_kept_by():
    assert hashlib.sha256("\n".join(corpus()).encode("ascii")).hexdigest() == tales.CORPUS_SHA256


def test_random_is_the_only_source_of_chance(monkeypatch: pytest.MonkeyPatch):
    expected = corpus(3, 5_000)

    generator = random.Random(3)

    class OnlyRandom:
        def __init__(self, seed: int) -> None:
            assert seed == 3
            self.random = generator.random

    with monkeypatch.context() as patch:
        patch.setattr(tales.random, "Random", OnlyRandom)
        assert corpus(3, 5_000) == expected


def test_corpus_is_the_fewest_stories_of_the_size():
    texts = corpus(2, 10_000)
    sizes = [len(text.encode()) for text in texts]
    assert sum(sizes) >= 10_000 > sum(sizes[:-1])
    assert texts == [story.text for story in itertools.islice(stories(2), len(texts))]
    assert corpus(2, 0) == []


def test_words_are_many_plain_and_ascii():
    texts = corpus()
    assert 2_000_000 <= sum(map(len, texts)) < 2_001_000
    assert len({word.lower() for text in texts for word in WORD.findall(text)}) >= 1_000
    assert set("".join(texts)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,\"'?!")


def test_a_story_fits_a_context_of_128_tokens():
    for story in told():
        words, marks = WORD.findall(story.text), re.findall(r'\."|,"|[.,"]', story.text)
        assert 55 <= len(words) <= 104
        assert len(words) + len(marks) < 128


def test_articles_and_capitals():
    for story in told():
        assert not re.search(r"\b(a [aeiou]|an [^aeiou])", story.text, re.IGNORECASE)
        assert "  " not in story.text and story.text == story.text.strip()
        for sentence in sentences(story.text):
            assert re.match(r'"?[A-Z]', sentence)


# ── links ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_links_join_whole_words_at_5_to_40_words():
    for story in told():
        starts = {match.start(): (number, match.end()) for number, match in enumerate(WORD.finditer(story.text))}
        assert len(story.links) == len(story.determined)
        for link, item in zip(story.links, story.determined, strict=True):
            assert link.source == item.span and link.kind == item.kind
            (source, source_end), (target, target_end) = starts[link.source.start], starts[link.target.start]
            assert (source_end, target_end) == (link.source.end, link.target.end)
            assert 5 <= source - target <= 40
            assert at(story, item.span) in item.candidates


def test_the_target_fixes_the_word():
    grammar = read_grammar(ENGLISH)
    variant = {str(form): i for entry in grammar.tables["name"].entries for i, form in enumerate(entry)}
    copied = {"name", "time", "colour", "object", "quote"}
    signs = grammar.tables["sign"].words
    for story in told():
        for link in story.links:
            source, target = at(story, link.source), at(story, link.target)
            if link.kind in copied:
                assert source == target
            elif link.kind == "pronoun":
                assert source in (("she", "her"), ("he", "his", "him"))[variant[target]]
            elif link.kind == "number":
                assert (source in ("were", "them")) == (target.endswith("s") or target in ("geese", "calves"))
            else:
                cues = [(word, table.places.get(target, ())) for word, table in grammar.tables["cue"].parts.items()]
                fixed = {
                    str(grammar.tables["sign"].parts[word].entries[0][i]) for word, found in cues for _, i in found
                }
                assert fixed == {source} or (source == target and source in signs)


def test_every_kind_is_frequent():
    count = Counter(link.kind for story in told() for link in story.links)
    assert set(count) == set(KINDS)
    assert min(count.values()) > 0.3 * len(told())
    assert 6 <= count.total() / len(told()) <= 14


def test_a_reader_of_the_grammar_knows_determined_words():
    """What may follow the words before, by the grammar, is this very field: never another word or punctuation."""
    grammar = read_grammar(ENGLISH)
    for story in told()[:60]:
        begins = [0]
        for sentence in sentences(story.text):
            begins.append(story.text.index(sentence, begins[-1]) + len(sentence) + 1)
        for item in story.determined:
            begin = max(start for start in begins if start <= item.span.start)
            follow = grammar.expected(story.text[begin : item.span.start])
            assert follow and all(isinstance(part, Slot) for part in follow), story.text[begin : item.span.end]
            assert {part.kind for part in follow if isinstance(part, Slot)} <= {item.kind, ""}
            assert len({part.field for part in follow if isinstance(part, Slot)}) == 1


# ── held-out combinations ──────────────────────────────────────────────────────────────────────────────────────────


def test_training_and_judging_share_no_combination():
    training = {words for story in told() for words in story.combinations}
    held_out = {item.combination for story in judged() for item in story.determined if item.held_out}
    assert training and held_out and not training & held_out
    assert not any(map(tales.is_held_out, training)) and all(map(tales.is_held_out, held_out))
    assert not any(story.held_out for story in told()) and all(story.held_out for story in judged())
    single = {word for words in held_out for word in words}
    assert single <= {word for text in corpus(0, 500_000) for word in WORD.findall(text)}


def test_held_out_none_draws_both():
    drawn = list(itertools.islice(stories(5, held_out=None), 40))
    share = sum(item.held_out for story in drawn for item in story.determined) / sum(len(s.determined) for s in drawn)
    assert 0.02 < share < 0.25


def test_each_kind_is_judged_on_enough_words_and_combinations():
    for kind in KINDS:
        items = [item for story in judged() for item in story.determined if item.held_out and item.kind == kind]
        assert len(items) >= 100
        assert len({item.combination for item in items}) >= 20


def test_guesses_that_read_nothing_fail():
    table = guesses(judged())
    assert set(table) == {*KINDS, "overall"}
    for kind, guess in table.items():
        assert max(guess.commonest, guess.last) <= 0.5, kind
    assert table["overall"].count == sum(table[kind].count for kind in KINDS)


def test_guesses_by_hand():
    colours = frozenset({"red", "blue"})
    text = "red blue red"

    def colour(start: int, end: int) -> tales.Determined:
        return tales.Determined(Span(start, end), "colour", colours, ("red",), held_out=True)

    story = Story(text, (), (colour(4, 8), colour(9, 12), colour(0, 3)), (), held_out=True)
    assert guesses([story])["colour"] == tales.Guess(commonest=2 / 3, last=0.0, count=3)
    repeated = Story("blue a blue", (), (colour(7, 11),), (), held_out=True)
    assert guesses([repeated])["overall"] == tales.Guess(commonest=1.0, last=1.0, count=1)
    assert guesses([]) == {}


# ── sentences and the recogniser ───────────────────────────────────────────────────────────────────────────────────


def test_sentences_keep_quotations_whole():
    text = 'One day he said, "Every frog needs a castle." "My bat is old," said Anna. Who? The end of'
    assert sentences(text) == ['One day he said, "Every frog needs a castle."', '"My bat is old," said Anna.', "Who?"]
    assert sentences("") == [] and sentences("No end mark") == []
    for story in told()[:100]:
        assert " ".join(sentences(story.text)) == story.text


def test_recogniser_takes_every_told_sentence():
    for story in told()[:150]:
        for sentence in sentences(story.text):
            assert recognise(sentence), sentence


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 149), st.randoms(use_true_random=False))
def test_recogniser_refuses_shuffled_words(number: int, chance: random.Random):
    sentence = chance.choice(sentences(told()[number].text))
    words = sentence.split()
    inner = words[1:-1]
    chance.shuffle(inner)
    moved = sum(old != new for old, new in zip(words[1:-1], inner, strict=True))
    # two exchanged words of one class may make a sentence again; more than half of them moved may not
    assert moved <= len(inner) / 2 or not recognise(" ".join([words[0], *inner, words[-1]]))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("Only the wise donkey knew the secret.", "Only the wise donkey knew the secret"),
        ("Only the wise donkey knew the secret.", "only the wise donkey knew the secret."),
        ("Only the wise donkey knew the secret.", "Only the Wise donkey knew the secret."),
        ("Only the wise donkey knew the secret.", "Only the wise  donkey knew the secret."),
        ("They met again on a foggy morning.", "They met again on an foggy morning."),
        (
            "The foxes that lived behind the old bridges were hungry.",
            "The foxes that lived behind the old bridges was hungry.",
        ),
        (
            "The actress Anna walked back to the mill and opened her hat.",
            "The actress Anna walked back to the mill and opened his hat.",
        ),
        (
            "Thanks to the old river the actress Anna noticed that the bank was muddy.",
            "Thanks to the old money the actress Anna noticed that the bank was muddy.",
        ),
        ('The actress Anna said, "Never trust frogs."', 'The actress Anna said, "Never trust castles."'),
        ("The dog on the roof laughed.", "The dog on the roof laughed. The dog on the roof laughed."),
    ],
)
def test_recogniser_on_agreement_and_spelling(right: str, wrong: str):
    assert recognise(right)
    assert not recognise(wrong)


def test_another_language_is_another_file():
    german = Grammar(
        {
            "longest": 50,
            "article": {"mark": "ein(e) ", "forms": ["ein ", "eine "], "second_before": "Ente"},
            "pairs": [{"owners": "ab", "opposite": False, "asked": "st", "first": 0.5}],
            "facts": {"tier": ["tier"]},
            "plot": {"ganz": 1},
            "scenes": [{"part": "ganz", "steps": [["Da kommt ein(e) {a.tier^}.", "Ja, {a.tier!tier} und {tier}."]]}],
            "tables": {"tier": "Ente Hund"},
        }
    )
    assert german.accepts("Da kommt eine Ente.") and german.accepts("Ja, Hund und Hund.")
    assert not german.accepts("Da kommt ein Ente.")
    assert german.expected("Ja, ") == {Slot("a", "tier", "tier", "tier", anchor=True)}
