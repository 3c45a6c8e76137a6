"""A run's corpus: that of a text, or that of a task, whose examples are drawn anew at each start."""

import numpy as np

from minigpt.config import Config
from minigpt.corpus import PARTS, Corpus, digest, open_corpus
from minigpt.errors import UserError
from minigpt.tasks.synthetic import NONE, PREFIX, examples, task_named
from minigpt.tokenizer import END, CharTokenizer, Tokenizer

TASK_FORMAT = 1  # of the examples: other ones come with the same seed when it changes


def is_task(source: str) -> bool:
    """Whether this value of ``data.source`` names a task."""
    return source.startswith(PREFIX)


def corpus_of(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """What the configuration trains on and validates with; arguments and errors as ``open_corpus``'s."""
    if is_task(config.data.source):
        return task_corpus(config, tokenizer)
    return open_corpus(
        config.data, context_length=config.model.context_length, seed=config.run.seed, tokenizer=tokenizer
    )


def task_corpus(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """Examples of the context's length, one after the other, so that each window is one; a last END closes a part.

    Raises:
        UserError: for a task or options that there are not, and for a tokenizer that does not go with the task.
    """
    name, options, length = config.data.source.removeprefix(PREFIX), config.task, config.model.context_length
    task = task_named(name)
    if config.data.tokenizer != "char" or config.data.vocab_size:
        raise UserError(
            f"data.source = {config.data.source}: the tokens of a task are single characters; give --data.tokenizer "
            "char --data.vocab-size 0, or begin with configs/task.toml"
        )
    own = CharTokenizer(task.alphabet(options), byte_fallback=False)
    if tokenizer and tokenizer.to_dict() | {"unseen": own.unseen} != own.to_dict():
        raise UserError(
            f"data.source = {config.data.source}: these weights were trained with other symbols than the task has; "
            "give the same task.symbols, or train anew"
        )
    idle = task.idle_options(options)
    counts = {part: options.examples if part == "train" else options.held_out for part in PARTS}
    drawn = {
        part: examples(name, options, length=length, count=count, seed=config.run.seed, part=part)
        for part, count in counts.items()
    }
    tokens = {part: np.append(some.tokens, END).astype(np.uint16) for part, some in drawn.items()}
    return Corpus(
        tokenizer=tokenizer or own,
        train=tokens["train"],
        val=tokens["val"],
        test=tokens["test"],
        notes=tuple(f"task.{key} changes nothing: the task {name} has no such option" for key in idle),
        fingerprint=digest(TASK_FORMAT, config.data.source, options.model_dump(), length, config.run.seed),
        targets={part: np.append(some.targets, NONE) for part, some in drawn.items()},
    )
