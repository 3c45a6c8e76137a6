"""Folders of Hugging Face's transformers: out, in, and what can be in none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tables

from minigpt.assembly import load_model
from minigpt.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import DEFAULT_CONFIG, ModelConfig, read_toml, validate
from minigpt.errors import UserError
from minigpt.interop.hugging_face import write_folder
from minigpt.model import GPT
from minigpt.sampling import greedy_ids
from minigpt.tokenizer import tokenizer_from_dict, train_tokenizer
