"""A training that takes as long as asked: what it needs is chosen for the text and measured on this machine.

What the user has set stays; the rest follows rules that were found by training at equal time on texts of 50 kB, 1 MB
and 20 MB, English and Japanese. The answer is plain numbers, so that the run can be repeated and resumed anywhere.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.assembly import initial_config
from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.config import Config, DataConfig, merge, validate
from minigpt.console import say
from minigpt.corpora import is_task
from minigpt.corpus import Corpus, cache_folder, open_corpus
from minigpt.errors import UserError
from minigpt.machine import choose_threads, machine_choices
from minigpt.pace import Pace, measured_pace, update_seconds
from minigpt.sources import open_source
from minigpt.tokenizer import END, tokenizer_from_dict

Tables = dict[str, Any]

# layers, width
SIZES = (
    (1, 64),
    (2, 64),
    (2, 96),
    (3, 96),
    (3, 128),
    (4, 128),
    (4, 192),
    (4, 256),
    (6, 256),
    (6, 384),
    (8, 512),
    (12, 768),
)
MIDDLING = (3, 128)
HEAD_DIM = 64
TOKENS_A_PARAMETER = 4.0  # that a network must be trained on, at least, to be worth its size
EPOCHS = 12.0  # of a small text; time left over goes into a larger network rather than into more of them
PARAMETERS_A_TOKEN = 50.0  # of text, at most
DROPOUT = ((3, 0.0), (8, 0.1), (15, 0.2), (30, 0.3), (math.inf, 0.4))  # up to so many epochs
DROPOUT_TOKENS = 2048  # that count of an update: by larger ones a text is learned by heart no sooner
UPDATES, UPDATE_TOKENS = 2000, (1024, 65_536)  # about so many updates, of no fewer and no more tokens
KNOWN_BY_HEART = 1.5  # after so many updates times n √n is a text that has each of its tokens n times: no more then
SELDOM, SELDOM_RATE = 50.0, 0.003  # times that it has each, on average, below which embeddings are moved this slowly
LEAST_PACE = 0.1  # of the quickest measured: no line is trusted further down
PASS_TOKENS = 8192  # in one pass of an update, at most: more need memory and are no faster
PROBE_TOKENS = 2048  # in the updates that are timed to choose
CHARACTERS = 500_000  # in a text up to this length each is a token; of a longer one BPE makes better use
CONTEXTS, LONG_MINUTES, SHORTEST_CONTEXT = (128, 256), 10.0, 8
VALIDATIONS, FORWARD_SPEED = 12, 3  # a network reads about so much faster than it learns
VALIDATION_SHARE, REHEARSAL_SHARE = 0.005, 0.02  # of the time, for one validation, for timing the chosen network
LONGEST_REHEARSAL = 15.0  # seconds
MODERN = {"attention_init": "zero", "tie_embeddings": False, "logit_softcap": 15.0}


@dataclass(frozen=True)
class Plan:
    """Tables whose training takes the asked minutes, and its pace here."""

    tables: Tables
    minutes: float
    pace: Pace


def plan_training(overrides: Tables, *, begun: float, init_from: Path | None = None) -> Plan | None:
    """The training that ends ``train.minutes`` after ``begun``, in seconds of ``time.monotonic``; None for 0 minutes.

    Args:
        overrides: what the user has set, ``train.minutes`` among it; all of it is kept.
        begun: when the user's clock began.
        init_from: run whose network and tokenizer are taken over.

    Raises:
        UserError: for what the user can mend.
    """
    parent = find_checkpoint(init_from, "best") if init_from else None
    least = smallest(overrides, parent)
    asked = 60 * least.train.minutes
    if not asked:
        return None
    if is_task(least.data.source):
        raise UserError("train.minutes chooses a network for a text; a task takes train.max_steps")
    if least.model.kind != "gpt":
        raise UserError("train.minutes chooses a Transformer; a recurrent network takes train.max_steps")
    if "max_steps" in overrides.get("train", {}):
        raise UserError("train.minutes and train.max_steps both say how long to train: give one of them")
    say("choosing a network and timing a few steps of it ...")
    tables: Tables = merge(overrides, {"train": {"minutes": 0}})
    if not parent:
        tables = merge({"model": MODERN, "data": chosen_tokenizer(tables)}, tables)
    corpus = opened(tables, parent)
    if not parent:
        tables = merge({"model": {"context_length": chosen_context(corpus, asked / 60)}}, tables)
        tables = merge({"optim": chosen_rates(corpus, smallest(tables, parent).optim.name)}, tables)
    tables = merge(tables, {"run": chosen_machine(smallest(tables, parent), corpus)})
    left = begun + asked - time.monotonic()
    if left < asked / 4:
        raise UserError(
            f"train.minutes = {asked / 60:g}: starting, reading the text and timing a few steps have taken "
            f"{asked - left:.0f} s, which leaves too little for training: give {math.ceil((asked - left) / 15)} or more"
        )
    tables = merge(chosen_size(tables, corpus, parent, seconds=left), tables)
    pace = measured_pace(
        initial_config(parent, tables), corpus, seconds=min(REHEARSAL_SHARE * asked, LONGEST_REHEARSAL)
    )
    left = begun + asked - time.monotonic()
    given, steps = tables, pace.steps(initial_config(parent, tables).with_values(train={"eval_interval": 0}), left)
    for _ in range(2):  # validations take their time too, and the last of them comes with the last step
        intervals = {"eval_interval": math.ceil(steps / VALIDATIONS), "log_interval": max(1, steps // 100)}
        tables = merge({"train": intervals}, given)
        steps = pace.steps(initial_config(parent, tables), left)
    return Plan(merge(tables, {"train": {"max_steps": steps}}), asked / 60, pace)


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def chosen_tokenizer(tables: Tables) -> Tables:
    """Characters for a short text; for a longer one BPE, with a vocabulary that grows with the text."""
    given = tables.get("data", {})
    if given.get("tokenizer", "bpe") != "bpe":
        return {}
    n_character = text_length(smallest(tables, None).data)
    if n_character <= CHARACTERS and not given.keys() & {"tokenizer", "vocab_size"}:
        return {"tokenizer": "char"}
    grown = 10 + 0.46 * math.log2(max(n_character, CHARACTERS) / 1e6)
    return {"tokenizer": "bpe", "vocab_size": 2 ** min(13, max(9, round(grown)))}


def text_length(data: DataConfig) -> int:
    """Characters of a run's text."""
    source = open_source(data, cache_folder(data.cache_dir))
    return sum(len(chunk) for document in source.documents() for chunk in document)


def opened(tables: Tables, parent: Checkpoint | None) -> Corpus:
    """The text as tokens, however short a context it allows, unless the user has set one."""
    config = smallest(tables, parent)
    given = parent or "context_length" in tables.get("model", {})
    return open_corpus(
        config.data,
        context_length=config.model.context_length if given else SHORTEST_CONTEXT,
        seed=config.run.seed,
        tokenizer=tokenizer_from_dict(parent.tokenizer, unseen=config.data.unseen) if parent else None,
    )


def chosen_context(corpus: Corpus, minutes: float) -> int:
    """A power of two: longer for a longer training, yet no longer than two usual documents or a 16th of the text."""
    documents = int(np.count_nonzero(corpus.train == END)) - 1  # one more END closes a part of several
    most = len(corpus.train) / 16 if documents < 2 else 2 * len(corpus.train) / documents
    power = 2 ** math.floor(math.log2(max(most, SHORTEST_CONTEXT)))
    return min(CONTEXTS[minutes > LONG_MINUTES], power)


def occurrences(corpus: Corpus) -> float:
    """How often the text has each token of the vocabulary, on average."""
    return len(corpus.train) / corpus.tokenizer.vocab_size


def chosen_rates(corpus: Corpus, optimizer: str) -> Tables:
    """AdamW's one rate; or Muon's, and what goes with it for embeddings."""
    if optimizer == "adamw":
        return {"lr": 0.002}
    return {"lr": 0.03, "adam_lr": SELDOM_RATE if occurrences(corpus) < SELDOM else 0.01, "momentum": 0.9}


# ── machine and size ───────────────────────────────────────────────────────────────────────────────────────────


def chosen_machine(config: Config, corpus: Corpus) -> Tables:
    """The quickest device and number of threads for a middling network."""
    device, cores = str(machine_choices(config)["device"]), choose_threads(config.run.threads)
    devices = ["mps", "cpu"] if device == "mps" and config.run.device == "auto" else [device]
    threads = [cores]
    if "cpu" in devices and not config.run.threads:
        threads = [*takewhile(lambda n: n < cores, (2**i for i in range(16))), cores]
    choices = [{"device": device, "threads": n} for device in devices for n in threads]
    if len(choices) == 1:
        return choices[0]
    n_layer, d_model = MIDDLING
    shape = {"n_layer": n_layer, "d_model": d_model, "n_head": d_model // HEAD_DIM, "n_kv_head": 0, "d_ff": 0}
    middling = probe(config.with_values(model=shape))
    seconds = [update_seconds(middling.with_values(run=choice), corpus) for choice in choices]
    return choices[seconds.index(min(seconds))]


def chosen_size(tables: Tables, corpus: Corpus, parent: Checkpoint | None, *, seconds: float) -> Tables:
    """The largest network that so many seconds train enough, with the dropout and the batch that suit it."""
    options = [initial_config(parent, tables)] if parent else sizes(tables)
    choice = options[0]
    paces: dict[float, float] = {}  # seconds a token, by its work
    untimed = [options[0], options[len(options) // 2]]  # two sizes tell the pace of all, then the chosen one its own
    while untimed:
        for option in untimed:
            tokens = probe(option).train.batch_size * option.model.context_length
            paces[work(option, corpus)] = update_seconds(probe(option), corpus) / tokens
        tokens_of = [seconds / pace_at(work(option, corpus), paces) for option in options]
        worth = [enough(option, corpus, n) for option, n in zip(options, tokens_of, strict=True)]
        choice = options[max((i for i, good in enumerate(worth) if good), default=0)]
        untimed = [] if work(choice, corpus) in paces else [choice]
    tokens = seconds / pace_at(work(choice, corpus), paces)
    length = choice.model.context_length
    updates = min(UPDATES, KNOWN_BY_HEART * occurrences(corpus) ** 1.5)
    update = 2 ** round(math.log2(min(max(tokens / updates, UPDATE_TOKENS[0]), UPDATE_TOKENS[1])))
    given = tables.get("train", {}).keys() & {"batch_size", "grad_accumulation"}
    passes = choice.train.grad_accumulation if given else max(1, update // PASS_TOKENS)
    names = () if parent else ("n_layer", "n_head", "d_model")
    epochs = min(tokens, DROPOUT_TOKENS * updates) / len(corpus.train)
    dropout = next(rate for most, rate in DROPOUT if epochs <= most)
    return {
        "model": {name: getattr(choice.model, name) for name in names} | {"dropout": dropout},
        "train": {
            "batch_size": max(1, update // (length * passes)) * passes,
            "grad_accumulation": passes,
            "eval_tokens": max(10_000, round(VALIDATION_SHARE * FORWARD_SPEED * tokens, -4)),
        },
    }


def sizes(tables: Tables) -> list[Config]:
    """The networks to choose from, the smallest first: those of SIZES that go with what the user has set."""
    options, mistake = {}, None
    given_width, passes = tables.get("model", {}).get("d_model"), tables.get("train", {}).get("grad_accumulation", 8)
    for n_layer, d_model in SIZES:
        width = int(given_width) if str(given_width).isdecimal() else d_model
        shape = {"n_layer": n_layer, "d_model": width, "n_head": suitable_heads(width)}
        try:
            option = validate(merge({"model": shape, "train": {"batch_size": passes}}, tables))
        except UserError as error:  # a width that the user's number of heads doesn't divide, for one
            mistake = error
            continue
        options[option.model.n_layer, option.model.d_model] = option
    if mistake and not options:
        raise mistake
    return sorted(options.values(), key=blocks_size)


def smallest(tables: Tables, parent: Checkpoint | None) -> Config:
    """What the user has set, with the smallest network that goes with it where nothing is set."""
    return initial_config(parent, tables) if parent else sizes(tables)[0]


def suitable_heads(width: int) -> int:
    """As many as make heads of HEAD_DIM, two at least; fewer if the width is not divided so into even numbers."""
    return next((n for n in range(max(2, width // HEAD_DIM), 1, -1) if width % (2 * n) == 0), 1)


def enough(config: Config, corpus: Corpus, tokens: float) -> bool:
    """Whether so many tokens are worth a network of this size."""
    size, n_token = blocks_size(config), len(corpus.train)
    return size <= PARAMETERS_A_TOKEN * n_token and tokens >= min(TOKENS_A_PARAMETER * size, EPOCHS * n_token)


def blocks_size(config: Config) -> int:
    """Parameters of the blocks, 12·L·D² in the usual layout."""
    return 12 * config.model.n_layer * config.model.d_model**2


def work(config: Config, corpus: Corpus) -> int:
    """About the multiplications a token: the blocks' matrices, the head's, and attention to the whole context."""
    shape = config.model
    return blocks_size(config) + shape.d_model * (corpus.tokenizer.vocab_size + shape.n_layer * shape.context_length)


def pace_at(amount: float, paces: Mapping[float, float]) -> float:
    """Seconds a token, on the line through the two measurements whose work is nearest."""
    near = sorted(sorted(paces, key=lambda known: abs(math.log(known / amount)))[:2])
    if len(near) == 1:
        return paces[near[0]]
    slope = max(0.0, (paces[near[1]] - paces[near[0]]) / (near[1] - near[0]))
    return max(paces[near[0]] + slope * (amount - near[0]), LEAST_PACE * min(paces.values()))


def probe(config: Config) -> Config:
    """The same network with updates as they are timed."""
    passes = config.train.grad_accumulation
    batch = max(1, PROBE_TOKENS // (config.model.context_length * passes)) * passes
    return config.with_values(train={"batch_size": batch})
