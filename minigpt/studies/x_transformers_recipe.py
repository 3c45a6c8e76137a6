"""x-transformers' decoder trained in a process of its own, at the size of nanoGPT's recipe for a CPU.

  python -m minigpt.studies.x_transformers_recipe SOURCE SEED THREADS

The library brings a network and no trainer: this is AdamW with the rate, warm-up and number of steps that were found
best for it, and nothing that it does not need. One JSON object tells what came of it.
"""

import json
import sys
from importlib.metadata import version

import torch
from torch import nn

from minigpt.config import Config, validate
from minigpt.corpus import Corpus, open_corpus
from minigpt.training import evaluate, loss_sum, next_batch

STEPS, WARM_UP = 520, 50
RATE, BETAS, WEIGHT_DECAY, LARGEST_NORM = 3e-3, (0.9, 0.99), 0.1, 1.0
N_LAYER, N_HEAD, D_MODEL = 4, 4, 128
LAYOUT = {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_relu_squared": True, "ff_no_bias": True}


def recipe_config(source: str, seed: int) -> Config:
    """The text and the shape of a batch, as ours are named."""
    return validate(
        {
            "run": {"seed": seed, "device": "cpu", "dtype": "float32"},
            "data": {"source": source, "tokenizer": "char"},
            "model": {"context_length": 64},
            "train": {"batch_size": 12, "max_steps": STEPS},
        }
    )


def network(config: Config, vocab_size: int) -> nn.Module:
    """(B, T) → (B, T, V)."""
    from x_transformers import Decoder, TransformerWrapper  # type: ignore[import-not-found, unused-ignore]

    decoder = Decoder(
        dim=D_MODEL, depth=N_LAYER, heads=N_HEAD, attn_dim_head=D_MODEL // N_HEAD, attn_flash=True, **LAYOUT
    )
    length = config.model.context_length
    return TransformerWrapper(num_tokens=vocab_size, max_seq_len=length, use_abs_pos_emb=False, attn_layers=decoder)


def trained(config: Config, corpus: Corpus) -> nn.Module:
    """The network after all steps: linear warm-up, linear decay to 0."""
    torch.manual_seed(config.run.seed)
    model = network(config, corpus.tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / STEPS)
        inputs_BT, targets_BT = next_batch(corpus, config, step)
        loss = loss_sum(model(inputs_BT), targets_BT) / targets_BT.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def main() -> None:
    """Train, and print parameters, steps, loss over the whole validation part, and the library's version."""
    source, seed, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(True)
    config = recipe_config(source, int(seed))
    corpus = open_corpus(config.data, context_length=config.model.context_length, seed=config.run.seed)
    model = trained(config, corpus)
    answer = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": STEPS,
        "loss": evaluate(model, corpus.val, config, corpus.tokenizer.byte_lengths).loss,
        "version": version("x-transformers"),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
