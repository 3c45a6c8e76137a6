"""Every number of a run, typed and checked: defaults ← a TOML file ← the command line.

The three sources are merged as plain dictionaries and validated once, so that all problems are told together,
one line each. No value is ever None: ``0`` and ``"auto"`` mean "derive it", and the file saved with a run holds
what was derived.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from minigpt.errors import UserError
from minigpt.shipped import CONFIGS

DEFAULT_CONFIG = CONFIGS / "tales.toml"

LARGEST = 2**31 - 1  # of every count: what no library chokes on
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrAuto = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of the tables below: unknown keys are refused and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation in (int, float):
            raise ValueError("a truth value instead of a number")
        return value


class RunConfig(Section):
    """Where a run lives and what it runs on."""

    name: str = Field(default="", description="folder name; empty: the config's or the source's stem")
    dir: str = Field(default="runs", description="folder that holds all runs")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=1, description="fixes data order, initial weights, dropout"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="arithmetic of the forward"
    )
    threads: CountOrAuto = Field(default=0, description="CPU threads; 0: OMP_NUM_THREADS, or all cores")
    compile: bool = Field(default=False, description="torch.compile the model (pays on long GPU runs)")
    overwrite: bool = Field(default=False, description="move a run of the same name aside first")


class DataConfig(Section):
    """Which text, cut into which tokens and parts."""

    source: str = Field(
        default="tales", description="tales, a name in data/sources.toml, a file, a folder, a glob, or task:NAME"
    )
    tokenizer: str = Field(
        default="bpe",
        description="char (the one for tasks), bpe, byte, or a tiktoken encoding (gpt2, cl100k_base, ...)",
    )
    vocab_size: CountOrAuto = Field(default=0, description="ids in all; 0: every character / chosen by text size")
    val_fraction: Fraction = Field(default=0.1, description="part held back for validation")
    test_fraction: Fraction = Field(default=0.0, description="last part, read by evaluate.py --source test alone")
    text_field: str = Field(default="text", description="field of .jsonl and .csv that holds the text")
    encoding: str = Field(default="utf-8", description="encoding of the text files")
    unseen: Literal["stop", "skip", "replace"] = Field(
        default="stop", description="characters that the tokenizer has never seen"
    )
    cache_dir: str = Field(default="auto", description="folder for token files and downloads")

    @field_validator("source")
    @classmethod
    def _tales_are_a_text(cls, value: str) -> str:
        return "tales" if value == "task:tales" else value


class ModelConfig(Section):
    """The network. The defaults are what the fastest small-model recipes agree on."""

    kind: Literal["gpt", "rnn", "lstm", "gru"] = Field(
        default="gpt", description="a Transformer, or a recurrent network (n_layer, d_model, dropout, tie_embeddings)"
    )
    n_layer: Count = Field(default=2, description="blocks")
    n_head: Count = Field(default=4, description="query heads a block")
    n_kv_head: CountOrAuto = Field(default=0, description="key/value heads, shared by groups of query heads; 0: n_head")
    d_model: Count = Field(default=128, description="width of the residual stream")
    d_ff: CountOrAuto = Field(default=0, description="width inside the feed-forward; 0: 4 x d_model (swiglu: 8/3)")
    context_length: Annotated[int, Field(ge=2, le=2**20)] = Field(
        default=128, description="tokens in a window; a Transformer sees no more"
    )
    position: Literal["rotary", "sinusoidal", "learned", "none"] = Field(
        default="rotary", description="how order is told"
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="normalisation")
    norm_weight: bool = Field(default=False, description="learned gain (and, for layernorm, shift)")
    embedding_norm: bool = Field(default=True, description="normalise after the embedding")
    embedding_scale: bool = Field(default=False, description="multiply embeddings by sqrt(d_model)")
    mlp: Literal["relu2", "relu", "gelu", "gelu_tanh", "swiglu"] = Field(
        default="relu2", description="feed-forward activation"
    )
    qk_norm: bool = Field(default=True, description="RMS-normalise queries and keys")
    bias: Literal["none", "all", "no_qkv"] = Field(default="none", description="which linear layers have a bias")
    attention_init: Literal["copy", "zero"] = Field(
        default="copy", description="what a head adds at first: a copy of what it attends to, or nothing"
    )
    tie_embeddings: bool = Field(default=True, description="output head = token embedding")
    logit_softcap: Rate = Field(default=0.0, description="squash logits into (-c, c); 0: off")
    dropout: Fraction = Field(default=0.0, description="dropout on the embedding and on each block's two outputs")

    @property
    def head_dim(self) -> int:
        """Size of one head, K."""
        return self.d_model // self.n_head

    @property
    def key_value_heads(self) -> int:
        """n_kv_head, or what 0 stands for: one for each query head."""
        return self.n_kv_head or self.n_head

    @property
    def feed_forward_width(self) -> int:
        """d_ff, or what 0 stands for: 4·D; for the gated swiglu ⅔ of that, up to a multiple of 8 (Shazeer 2020)."""
        if self.d_ff:
            return self.d_ff
        return 4 * self.d_model if self.mlp != "swiglu" else -(-8 * self.d_model // 24) * 8


class OptimConfig(Section):
    """How weights move."""

    name: Literal["muon", "adamw"] = Field(
        default="muon",
        description="muon for block matrices (adamw for the rest), or adamw (the one for recurrent networks)",
    )
    lr: Rate = Field(default=0.03, description="peak learning rate: muon's, or adamw's for everything")
    adam_lr: Rate = Field(default=0.006, description="with muon: peak rate of embeddings, head and vectors")
    beta1: Fraction = Field(default=0.9, description="adamw: decay of the first moment")
    beta2: Fraction = Field(default=0.98, description="adamw: decay of the second moment")
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1e-8, description="adamw: added to the denominator"
    )
    momentum: Fraction = Field(default=0.95, description="muon: decay of the momentum")
    ns_steps: Annotated[int, Field(ge=1, le=10)] = Field(default=3, description="muon: Newton-Schulz iterations")
    weight_decay: Rate = Field(default=0.0, description="decay of matrices, times the learning rate")
    grad_clip: Rate = Field(default=1.0, description="largest gradient norm; 0: off")
    schedule: Literal["linear", "cosine", "constant"] = Field(default="linear", description="decay after warm-up")
    warmup_steps: CountOrAuto = Field(default=0, description="steps of linear warm-up")
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="rate at the end, part of the peak"
    )


class TrainConfig(Section):
    """How long, in what pieces, and what is told on the way."""

    batch_size: Count = Field(default=8, description="sequences per update")
    grad_accumulation: Count = Field(default=1, description="passes an update is cut into (same result, less memory)")
    max_steps: Count = Field(default=1300, description="updates in all")
    minutes: Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)] = Field(
        default=0.0, description="end after so many, with whatever else is not set chosen for it; 0: as set"
    )
    eval_interval: CountOrAuto = Field(default=150, description="steps between validations; 0: only at the end")
    eval_tokens: CountOrAuto = Field(default=20_000, description="validate on at most so many tokens; 0: all")
    save_interval: CountOrAuto = Field(default=0, description="steps between checkpoints; 0: at each validation")
    log_interval: Count = Field(default=10, description="steps between logged rows")
    sample_interval: CountOrAuto = Field(default=0, description="steps between samples; 0: at each validation")
    sample_prompt: str = Field(default="", description="text the samples go on from")
    early_stop: CountOrAuto = Field(
        default=0, description="stop after so many validations without improvement; 0: never"
    )
    keep_last: CountOrAuto = Field(default=3, description="checkpoints kept besides the first and the best; 0: all")


class InspectConfig(Section):
    """What is looked at while training."""

    interval: CountOrAuto = Field(default=0, description="steps between frames of attention; 0: at each validation")
    text: str = Field(default="", description="text whose attention is drawn; empty: the start of the validation text")
    scores: str = Field(
        default="previous,first,self,uniform,induction",
        description="patterns that heads are held against, parted by commas; empty: none",
    )


class TaskConfig(Section):
    """Examples of a task (data.source task:NAME), model.context_length tokens each."""

    order: Literal["same", "reversed", "sorted"] = Field(default="same", description="copy: what comes out")
    symbols: Annotated[int, Field(ge=2, le=62)] = Field(
        default=62, description="different ones (recall: half are keys)"
    )
    length: CountOrAuto = Field(
        default=0, description="symbols to copy, pairs to recall, symbols that come twice; 0: as many as suit"
    )
    distance: CountOrAuto = Field(
        default=0, description="filler before the bar; induction: tokens until symbols come again, 0: varies"
    )
    depth: Count = Field(default=4, description="brackets open at once, at most")
    examples: Count = Field(default=20_000, description="to train on")
    held_out: Count = Field(default=500, description="for validation, and as many for the test")


class Config(Section):
    """A whole run: one attribute a table of the TOML file."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    inspect: InspectConfig = InspectConfig()
    task: TaskConfig = TaskConfig()

    def with_values(self, **sections: Mapping[str, object]) -> "Config":
        """A copy with some keys replaced: ``config.with_values(run={"name": "bard"})``. Validated anew."""
        return validate(merge(self.model_dump(), sections))


Values = Mapping[str, Any]


def merge(base: Values, override: Values) -> dict[str, Any]:
    """Tables of ``override`` laid over those of ``base``; neither is changed."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def validate(values: Values) -> Config:
    """Plain dictionaries → Config.

    Raises:
        UserError: naming every wrong or unknown key, one line each.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_explain(problem) for problem in error.errors())) from None
    if problems := _conflicts(config):
        raise UserError("\n".join(problems))
    return config


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file (a byte order mark is dropped).

    Raises:
        UserError: if the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; give the path of a TOML file, such as those in configs/"
        ) from None
    except (ValueError, RecursionError) as error:  # besides what TOML refuses: endless numbers, endless nesting
        raise UserError(f"{path}: not a valid TOML file ({error})") from None


def to_toml(config: Config) -> str:
    """The complete configuration as TOML text."""
    return tomli_w.dumps(config.model_dump())


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: ``{"optim.lr": (old, new)}``."""
    return {
        f"{section}.{key}": (value, other)
        for section, table in old.model_dump().items()
        for key, value in table.items()
        if (other := getattr(getattr(new, section), key)) != value
    }


# ── checks between keys ────────────────────────────────────────────────────────────────────────────────────────


def _conflicts(config: Config) -> list[str]:
    model, data, train = config.model, config.data, config.train
    paths = {"run.dir": config.run.dir, "data.source": data.source, "data.cache_dir": data.cache_dir}
    problems = [f"{key} = {path!r}: no system has such a path" for key, path in paths.items() if not _is_path(path)]
    if model.d_model % model.n_head:
        problems.append(f"model.d_model = {model.d_model}: must be a multiple of model.n_head = {model.n_head}")
    elif model.position == "rotary" and model.head_dim % 2:
        problems.append(f"model.d_model / model.n_head = {model.head_dim}: rotary positions need an even head size")
    if model.n_kv_head and model.n_head % model.n_kv_head:
        problems.append(f"model.n_kv_head = {model.n_kv_head}: must divide model.n_head = {model.n_head}")
    if model.position == "sinusoidal" and model.d_model % 2:
        problems.append(f"model.d_model = {model.d_model}: sinusoidal positions need an even width")
    if model.kind != "gpt" and config.optim.name == "muon":
        problems.append(
            f"optim.name = muon: moves the matrices of a Transformer's blocks; {model.kind} takes --optim.name adamw "
            "--optim.lr 0.003"
        )
    if data.val_fraction + data.test_fraction >= 1:
        problems.append(
            f"data.val_fraction + data.test_fraction = {data.val_fraction + data.test_fraction:g}: "
            "must leave something to train on, so below 1"
        )
    if train.batch_size % train.grad_accumulation:
        problems.append(
            f"train.grad_accumulation = {train.grad_accumulation}: must divide train.batch_size = {train.batch_size}"
        )
    return problems


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


# ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────


def section_class(field: FieldInfo) -> type[Section]:
    """The class of one of Config's tables."""
    assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    return field.annotation


def _explain(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path)
    known_sections = list(Config.model_fields)
    if problem["type"] == "extra_forbidden":
        if len(path) == 1:
            return f"{name}: unknown table{nearest(name, known_sections)}"
        keys = [
            f"{table}.{key}"
            for table, field in Config.model_fields.items()
            for key in section_class(field).model_fields
        ]
        return f"{name}: unknown key{nearest(name, keys)}"
    if len(path) < 2:
        return f"{name or 'a configuration'}: must be a table of keys, not {_beginning(problem['input'])}"
    field = section_class(Config.model_fields[path[0]]).model_fields[path[1]]
    return f"{name} = {_beginning(problem['input'])}: must be {_requirement(field)}"


def _beginning(value: object) -> str:
    """As much of a value as a message should show."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # of numbers with thousands of digits, of endless nesting
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _requirement(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{word} {getattr(rule, name)}"
        for rule in field.metadata
        for name, word in words.items()
        if hasattr(rule, name)
    ]
    kind = "a whole number" if annotation is int else "a number"
    return ", ".join([kind, *([" and ".join(bounds)] if bounds else [])])


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: the known one most like it, or those it could have been.

    Names are ``table.key`` or options, ``--table.key``: the same key of another table comes first, then the most
    similar key of the same table.
    """
    name = word.partition("=")[0]
    table, _, key = name.rpartition(".")
    parted = {other: other.rpartition(".") for other in known}
    match = [other for other, part in parted.items() if part[2].lstrip("-") == key.lstrip("-")]
    siblings = {part[2]: other for other, part in parted.items() if table and part[0] == table}
    if not match and siblings:
        match = [siblings[other] for other in difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)]
    elif not match:
        match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match:
        return f"; did you mean {match[0]}?"
    candidates = list(siblings.values()) or known
    return f"; known are {', '.join(candidates)}" if len(candidates) < 25 else "; see --help"
