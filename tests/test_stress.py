"""The long checks themselves: they notice what they are there to notice, and the table counts honestly."""

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from conftest import Tables
from running import command, environment
from tiny_runs import begun

from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.studies.killing import differences
from minigpt.studies.memory import Reading, growth, resident_megabytes
from minigpt.studies.trust import ROWS, Count, _count, _names, markdown


def test_one_changed_bit_is_a_difference(tiny: Tables) -> None:
    run = begun(tiny, train={"max_steps": 4}).path
    other = run.with_name("other")
    shutil.copytree(run, other)
    assert differences(run, other) == []
    saved = find_checkpoint(other, "last")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    arrays["model.token_embedding.weight"].view(np.uint32)[0, 0] ^= 1
    header = {key: value for key, value in saved.metadata.items() if key != "checksum"}
    save_checkpoint(saved.path, arrays, {**header, "train_loss": 1.0})
    (other / "checkpoints" / ".step-00000004.tmp").write_bytes(b"")
    with (other / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5}\n')
    assert differences(run, other) == [
        "model of step 4", "losses of step 4", "metrics.jsonl", "left behind: .step-00000004.tmp",
    ]  # fmt: skip
    saved.path.unlink()
    assert differences(run, other)[0].startswith("checkpoints of steps [0]")


def test_growth_is_counted_when_memory_has_settled() -> None:
    series = [Reading(0, 100.0), Reading(1000, 160.0), Reading(2000, 200.0), Reading(3000, 203.0), Reading(4000, 205.0)]
    assert growth(series) == pytest.approx(2.5)
    assert 20 < resident_megabytes() < 20_000


def test_every_row_of_the_table_has_its_tests() -> None:
    for patterns in ROWS.values():
        assert list(_names(patterns))


RESULTS = """
<testsuite>
  <testcase classname="tests.test_a" name="test_one[x]"/>
  <testcase classname="tests.test_a" name="test_one[y]"><failure/></testcase>
  <testcase classname="tests.test_a" name="test_one[z]"><skipped/></testcase>
  <testcase classname="tests.test_a" name="test_many">
    <properties><property name="tried" value="70"/></properties>
  </testcase>
  <testcase classname="tests.test_b" name="test_many"><error/></testcase>
</testsuite>
"""


def test_the_table_counts_what_was_tried_and_what_held() -> None:
    cases = list(ElementTree.fromstring(RESULTS).iter("testcase"))
    assert _count(cases, [("test_a.py", "test_one"), ("test_a.py", "test_many")]) == Count(72, 71)
    assert _count(cases, [("test_b.py", "test_many")]) == Count(1, 0)
    assert markdown({"fault": Count(1234, 7)}).splitlines()[-1] == "| fault | 1,234 | 7 |"


def test_help_and_a_mistake() -> None:
    for words, code in ((["--help"], 0), (["memory", "--steps", "10"], 2)):
        done = subprocess.run(
            command("-m", "minigpt.studies.stress", *words),
            env=environment(), capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert max(map(len, done.stdout.splitlines()), default=0) <= 80
    assert done.stderr == "error: --steps = 10: must be above 2000, where memory has settled\n"
