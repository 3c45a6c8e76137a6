"""What a person sees of a run: the plan before it, samples and attention on the way."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from minigpt.assembly import Parts
from minigpt.config import Config
from minigpt.console import counted, visible, wrapped
from minigpt.errors import CheckFailed, UserError
from minigpt.inspection.capture import attention_maps
from minigpt.inspection.film import add_frame, begin_film, frame_rows, probe_of, strongest
from minigpt.inspection.picture import attention_grid
from minigpt.network import Network, TorchEngine
from minigpt.sampling import SamplingOptions, generate
from minigpt.tokenizer import END, Tokenizer
from minigpt.tracking import Tracker
from minigpt.training import Observer

SAMPLE_TOKENS = 120
EXAMPLES = 2  # of a task, that are shown
WIDTH = 78  # columns of the console that a sample takes


def what_is_trained(parts: Parts, path: Path) -> list[str]:
    """The network, the text and the amount of training, a line each."""
    config, corpus, model = parts.config, parts.corpus, parts.model
    shape, settings = config.model, config.train
    checked = min(len(corpus.val) - 1, settings.eval_tokens or len(corpus.val))
    epochs = settings.max_steps * settings.batch_size * shape.context_length / max(1, len(corpus.train))
    heads = f"{counted(shape.n_head, 'head')}, " if shape.kind == "gpt" else ""
    kind = "" if shape.kind == "gpt" else f"{shape.kind}, "
    return [
        f"{path}: {kind}{counted(shape.n_layer, 'layer')}, {heads}{shape.d_model} wide, "
        f"context {shape.context_length}: {model.n_parameter:,} parameters"
        + (f", dropout {shape.dropout:g}" if shape.dropout else ""),
        f"text {config.data.source}: {len(corpus.train):,} tokens to train on, "
        f"{max(0, checked):,} of {len(corpus.val):,} to validate on"
        if not corpus.targets
        else f"{config.data.source}: {counted(config.task.examples, 'example')} to train on, "
        f"{config.task.held_out:,} to validate on with {counted((corpus.targets['val'] >= 0).sum(), 'answer')}",
        f"tokens: {corpus.tokenizer.name}, a vocabulary of {corpus.tokenizer.vocab_size:,}",
        f"{counted(settings.max_steps, 'step')} of {settings.batch_size} x {shape.context_length} tokens "
        f"({amount_of_text(epochs)}), {config.run.device}, {config.run.dtype}, threads {config.run.threads}",
    ]


def amount_of_text(epochs: float) -> str:
    """How often the text is read, in words: ``2.4 epochs``, ``1 epoch``, ``8.5 % of an epoch``."""
    if epochs < 0.995:
        return f"{100 * epochs:.2g} % of an epoch"
    rounded = f"{epochs:.2g}" if epochs < 100 else f"{epochs:,.0f}"
    return f"{rounded} epoch" if rounded == "1" else f"{rounded} epochs"


def sampler(parts: Parts, tracker: Tracker) -> Observer:
    """Writes a few words now and then: to the console, TensorBoard and ``samples/``."""

    def look(step: int, model: nn.Module) -> None:
        if step == 0:
            return
        if parts.corpus.targets:
            text, does = answers_text(model, parts), "answers"
        else:
            text, does = sample_text(model, parts.corpus.tokenizer, parts.config), "writes"
        tracker.text("sample", text, step)
        tracker.say(f"\n── step {step} {does} ──\n{wrapped(visible(text).strip(), WIDTH)}\n")

    return Observer(parts.config.train.sample_interval, look)


@torch.inference_mode()
def answers_text(model: nn.Module, parts: Parts) -> str:
    """A few of a task's examples for validation, as lines: what is read, what is answered, what is right."""
    length, corpus = parts.config.model.context_length, parts.corpus
    shown = min(EXAMPLES, len(corpus.val) // length)
    tokens, targets = (ids[: shown * length].reshape(shown, length) for ids in (corpus.val, corpus.targets["val"]))
    tokens_BT = torch.from_numpy(tokens.astype(np.int64)).to(parts.config.run.device)
    answers = model(tokens_BT).argmax(dim=-1).cpu().numpy()
    decode = corpus.tokenizer.decode
    return "\n".join(
        f"{decode(row[1:])}  answers {decode(said[asked >= 0])}, right is {decode(asked[asked >= 0])}"
        for row, said, asked in zip(tokens, answers, targets, strict=True)
    )


def sample_text(model: nn.Module, tokenizer: Tokenizer, config: Config) -> str:
    """The run's prompt and what the model writes after it."""
    assert isinstance(model, Network)
    prompt = config.train.sample_prompt
    ids = generate(
        TorchEngine(model),
        tokenizer.encode(prompt).tolist() or [END],
        max_new_tokens=SAMPLE_TOKENS,
        options=SamplingOptions(),
        seed=config.run.seed,
        banned=tokenizer.undefined_ids,
    )
    return prompt + tokenizer.decode(list(ids))


def attention_watcher(parts: Parts, tracker: Tracker, folder: Path, begun: int) -> Observer:
    """Looks at every head on one text: a frame of the film in ``folder``, one picture and three heads in TensorBoard.

    ``begun`` is the step at which training goes on; later frames are cut.
    """
    config, tokenizer = parts.config, parts.corpus.tokenizer
    probe = probe_of(config, parts.corpus)
    tokens = torch.from_numpy(probe.tokens).to(config.run.device)
    if probe.note:
        tracker.say(probe.note)
    tracker.attempt("attention", lambda: begin_film(folder, probe.to_dict(tokenizer), begun))

    def look(step: int, model: nn.Module) -> None:
        try:
            maps = attention_maps(model, tokens)
        except (UserError, CheckFailed) as error:  # a picture is no reason to end a training
            tracker.say(f"no picture of attention at step {step}: {error}")
            return
        rows = frame_rows(step, maps, probe)
        tracker.attempt("attention", lambda: add_frame(folder, step, maps, rows))
        tracker.image("attention", attention_grid(maps), step)
        if table := strongest(rows):
            tracker.note("attention", table, step)

    return Observer(config.inspect.interval, look)
