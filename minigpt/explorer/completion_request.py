"""The body of a request for completions: read, checked, and as an order to write."""

import json
import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minigpt.config import nearest
from minigpt.errors import UserError
from minigpt.explorer.guard import Refused
from minigpt.explorer.orders import Order
from minigpt.reading import normalise_newlines
from minigpt.sampling import SamplingOptions
from minigpt.tokenizer import END, Tokenizer
from minigpt.unseen import UnseenError

MOST_TOKENS = 1 << 16  # that a request's prompts may have, and its texts
MOST_STOPS, LONGEST_STOP = 16, 1000
SHOWN = 60  # characters of a wrong value
# keys of OpenAI's that this model has nothing for, with the values that ask for nothing
WITHOUT = {"suffix": "", "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """OpenAI's keys and defaults, and three of this program; the descriptions say what a value must be."""

    model_config = ConfigDict(strict=True)

    model: str = Field(description="the name of a model, see GET /v1/models")
    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        "", description="a text, a list of texts, a list of ids, or a list of such lists"
    )
    max_tokens: int = Field(16, ge=0, le=MOST_TOKENS, description=f"a whole number from 0 to {MOST_TOKENS}")
    temperature: float = Field(1.0, description="a number of at least 0")
    top_p: float = Field(1.0, description="a number above 0 and at most 1")
    top_k: int = Field(0, description="a whole number of at least 0")
    min_p: float = Field(0.0, description="a number of at least 0 and below 1")
    repetition_penalty: float = Field(1.0, description="a number above 0")
    n: int = Field(1, ge=1, le=128, description="a whole number from 1 to 128")
    stop: str | list[str] = Field([], description=f"a text, or a list of at most {MOST_STOPS}")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="a whole number from 0 to 2^63 - 1")
    echo: bool = Field(False, description="true or false")
    logprobs: int | None = Field(None, ge=0, le=20, description="a whole number from 0 to 20")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(StreamOptions(), description='{"include_usage": true or false}')
    user: str = Field("", description="a text")


def parsed(body: bytes) -> CompletionRequest:
    """The request that a body is; null is as good as nothing.

    Raises:
        Refused: naming the first key that is wrong.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(content, dict):
        raise Refused(400, 'the request must be a JSON object, such as {"model": "NAME", "prompt": "Once"}')
    content = {name: value for name, value in content.items() if value is not None}
    for name, nothing in WITHOUT.items():
        if content.pop(name, nothing) != nothing:
            raise Refused(400, f"{name}: there is no such thing here, leave it out", param=name)
    for name in content:
        if name not in CompletionRequest.model_fields:
            raise Refused(400, f"{name!r}: unknown{nearest(name, list(CompletionRequest.model_fields))}", param=name)
    try:
        asked = CompletionRequest.model_validate(content)
    except ValidationError as error:
        raise _explained(error.errors()[0], content) from None
    if asked.stream and asked.logprobs is not None:
        raise Refused(400, "logprobs are told of whole texts: leave out stream", param="logprobs")
    return asked


def order_of(asked: CompletionRequest, tokenizer: Tokenizer, vocab_size: int) -> Order:
    """What is to be written.

    Raises:
        Refused, UserError: for prompts and numbers that can't be.
    """
    prompts = _prompts(asked.prompt, tokenizer, vocab_size)
    n_token = sum(map(len, prompts))
    if n_token > MOST_TOKENS:
        raise Refused(400, f"the prompt has {n_token} tokens: at most {MOST_TOKENS} are read", param="prompt")
    if len(prompts) * asked.n * max(1, asked.max_tokens) > MOST_TOKENS:
        raise Refused(400, f"prompts x n x max_tokens: at most {MOST_TOKENS} tokens are written", param="max_tokens")
    stops = [stop for stop in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if stop]
    if len(stops) > MOST_STOPS:
        raise Refused(400, f"stop: at most {MOST_STOPS} texts are looked for, not {len(stops)}", param="stop")
    if max(map(len, stops), default=0) > LONGEST_STOP:
        raise Refused(400, f"stop: a text may have at most {LONGEST_STOP} characters", param="stop")
    return Order(
        prompts,
        n=asked.n,
        max_tokens=asked.max_tokens,
        sampling=SamplingOptions(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty),
        stops=[normalise_newlines(stop) for stop in stops],
        seed=secrets.randbelow(1 << 31) if asked.seed is None else asked.seed,
        echo=asked.echo,
        logprobs=asked.logprobs,
    )


def _prompts(prompt: Any, tokenizer: Tokenizer, size: int) -> list[list[int]]:
    """The ids of each; an empty one begins a new text."""
    one_alone = isinstance(prompt, str) or any(isinstance(token, int) for token in prompt)
    several = [prompt] if one_alone else list(prompt)
    if not several:
        raise Refused(400, "prompt: the list is empty", param="prompt")
    found = []
    for one in several:
        ids = _encoded(one, tokenizer) if isinstance(one, str) else one
        if not all(0 <= token < size for token in ids):
            raise Refused(400, f"prompt: ids must be whole numbers from 0 to {size - 1}", param="prompt")
        found.append(ids or [END])
    return found


def _encoded(prompt: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(normalise_newlines(prompt)).tolist()
    except UnseenError as error:  # after the first semicolon it names options, which this client has not
        raise Refused(400, f"prompt: {str(error).partition('; ')[0]}", param="prompt") from None
    except UserError as error:
        raise Refused(400, f"prompt: {error}", param="prompt") from None


def key_named(sentence: str) -> str | None:
    """The key of a request with whose name a sentence begins, such as ``top_p = 7: must be ...``."""
    name = sentence.partition(" = ")[0]
    return name if name in CompletionRequest.model_fields else None


def _explained(problem: Any, content: dict[str, Any]) -> Refused:
    name = str(problem["loc"][0])
    must = CompletionRequest.model_fields[name].description
    if problem["type"] == "missing":
        return Refused(400, f"{name}: is missing; give {must}", param=name)
    value = content[name]
    shown = type(value).__name__ if isinstance(value, list | dict) else f"{value!r:.{SHOWN}}"
    return Refused(400, f"{name} = {shown}: must be {must}", param=name)
