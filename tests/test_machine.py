"""What a run computes on: device, arithmetic, threads; and what is told when it changes."""

import os

import pytest

from minigpt.config import validate
from minigpt.errors import UserError
from minigpt.machine import (
    choose_device,
    choose_dtype,
    choose_threads,
    machine_changes,
    machine_facts,
    needs_loss_scaler,
)


def told(call, *args, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("asked", "cuda", "mps", "device"),
    [
        ("auto", 0, False, "cpu"),
        ("auto", 0, True, "mps"),
        ("auto", 2, False, "cuda"),
        ("auto", 1, True, "cuda"),
        ("cpu", 1, True, "cpu"),
        ("mps", 0, True, "mps"),
        ("mps", 1, False, None),
        ("cuda", 1, False, "cuda"),
        ("cuda", 0, True, None),
        ("cuda:1", 2, False, "cuda:1"),
        ("cuda:2", 2, False, None),
        ("cuda:x", 2, False, None),
        ("gpu", 2, True, None),
    ],
)
def test_devices(asked, cuda, mps, device):
    if device:
        assert choose_device(asked, cuda=cuda, mps=mps) == device
    else:
        assert told(choose_device, asked, cuda=cuda, mps=mps).startswith(f"run.device = {asked}: ")


@pytest.mark.parametrize(
    ("device", "bf16", "auto", "bfloat16", "float16"),
    [
        ("cpu", True, "float32", True, False),
        ("cpu", False, "float32", True, False),
        ("mps", True, "float32", True, False),
        ("mps", False, "float32", False, False),
        ("cuda", False, "float32", False, True),
        ("cuda:1", True, "bfloat16", True, True),
    ],
)
def test_arithmetic(device, bf16, auto, bfloat16, float16):
    assert choose_dtype("auto", device, bf16=bf16) == auto
    assert choose_dtype("float32", device, bf16=bf16) == "float32"
    for asked, allowed in (("bfloat16", bfloat16), ("float16", float16)):
        if allowed:
            assert choose_dtype(asked, device, bf16=bf16) == asked
        else:
            assert told(choose_dtype, asked, device, bf16=bf16).startswith(f"run.dtype = {asked}: ")
        assert needs_loss_scaler(device, asked) == (asked == "float16" and device.startswith("cuda"))
    assert not needs_loss_scaler(device, "float32")


def test_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads(3) == 3
    assert 1 <= choose_threads(0) <= (os.cpu_count() or 1)
    assert choose_threads(0, processes=10**6) == 1
    with pytest.raises(UserError, match=r"run\.threads = 100000: this machine has \d+ cores?; choose at most"):
        choose_threads(100_000)


@pytest.mark.parametrize(("value", "wished"), [("3", 3), (" 5,2", 5), ("1", 1), ("0", 0), ("", 0), ("many", 0)])
def test_threads_that_the_environment_wishes(monkeypatch, value, wished):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores, share = choose_threads(0), choose_threads(0, processes=2)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert choose_threads(2) == 2, "run.threads goes before"
    assert choose_threads(0) == (wished or cores)
    assert choose_threads(0, processes=2) == (wished if wished > 1 else share), "1 is what torchrun sets by itself"
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    with pytest.raises(UserError, match=r"OMP_NUM_THREADS = 100000: this machine has \d+ cores?; choose at most"):
        choose_threads(0)


def test_what_changes_the_bits_is_told():
    here = machine_facts(validate({"run": {"device": "cpu", "threads": 2}}), processes=1)
    assert machine_changes(here, here) == []
    there = {**here, "threads": "4", "torch": "1.0", "minigpt": "0.0"}
    assert [sentence.split(":")[0] for sentence in machine_changes(there, here)] == [
        "threads was 4, is 2",
        f"torch was 1.0, is {here['torch']}",
    ]
