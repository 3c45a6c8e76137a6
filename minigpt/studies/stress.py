"""Do to minigpt what happens to programs: kill it, feed it rubbish, run it long.

  python -m minigpt.studies.stress kill --times 100
      SIGKILL at random moments of a training: equal ends, bit for bit?
  python -m minigpt.studies.stress fuzz --inputs 10000
      random files, options and headers: a result or a sentence?
  python -m minigpt.studies.stress memory
      20,000 steps with everything on: does memory grow?
  python -m minigpt.studies.stress report
      all faults, each tried now, in a Markdown table (a few minutes)

Exit code 1 if something did not hold.
"""

import argparse

from minigpt.cli import parse_options, run_script
from minigpt.errors import UserError

QUICK_KILLS, QUICK_STEPS = 8, 4_000  # in the report


def main() -> int:
    options = parse_options(make_parser())
    return {"kill": kill, "fuzz": fuzz, "memory": memory, "report": report}[options.what](options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minigpt.studies.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "what", choices=["kill", "fuzz", "memory", "report"], metavar="WHAT", help="kill, fuzz, memory or report"
    )
    parser.add_argument("--times", type=int, default=100, metavar="N", help="kill: processes that are killed (100)")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="fuzz: inputs in all (10000)")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="memory: steps (20000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="kill, fuzz: another seed tries others (1)")
    return parser


def kill(options: argparse.Namespace) -> int:
    """Kill processes; say of each whether its run ended equal."""
    from minigpt.studies.killing import kills

    equal = 0
    for number, one in enumerate(kills(options.times, options.seed), start=1):
        equal += not one.differences
        saved = "nothing saved" if one.saved_step is None else f"step {one.saved_step} saved"
        end = "equal" if not one.differences else "DIFFERENT: " + "; ".join(one.differences)
        print(f"{number:4}/{options.times}  {one.kind:10}  at {one.seconds:5.2f} s  {saved:14}  {end}", flush=True)
    print(f"{options.times} killed, {equal} ended bit for bit as the run that nobody disturbed")
    return 0 if equal == options.times else 1


def fuzz(options: argparse.Namespace) -> int:
    """Read rubbish; what ends in a traceback comes out with the smallest input that leads to it."""
    from minigpt.studies.fuzzing import fuzz_all

    tried = 0
    for name, tally in fuzz_all(options.inputs, options.seed):
        tried += tally.tried
        print(f"{name:18}  {tally.tried:6,} tried  {tally.tried - tally.refused:6,} read  "
              f"{tally.refused:6,} refused in a sentence", flush=True)  # fmt: skip
    print(f"{tried:,} inputs, no traceback")
    return 0


def memory(options: argparse.Namespace) -> int:
    """Train for long; show memory every 1,000 steps."""
    from minigpt.studies.memory import LARGEST_GROWTH, SETTLED, growth, readings

    if options.steps <= SETTLED:
        raise UserError(f"--steps = {options.steps}: must be above {SETTLED}, where memory has settled")
    series = readings(options.steps, tell=lambda r: print(f"step {r.step:7,}  {r.megabytes:7.1f} MB", flush=True))
    found = growth(series)
    print(f"grows by {found:.2f} MB in 1,000 steps after {SETTLED:,}; at most {LARGEST_GROWTH:g} is allowed")
    return 0 if found <= LARGEST_GROWTH else 1


def report(options: argparse.Namespace) -> int:
    """Try all faults, the long checks in a short form, and print the table."""
    from minigpt.studies.killing import kills
    from minigpt.studies.memory import LARGEST_GROWTH, growth, readings
    from minigpt.studies.trust import Count, counts, markdown

    rows = {"a training process is killed at a random moment (`stress kill` for more)": Count()}
    for one in kills(QUICK_KILLS, options.seed):
        (count,) = rows.values()
        count.tried, count.held = count.tried + 1, count.held + (not one.differences)
    rows |= counts()
    grown = growth(readings(QUICK_STEPS))
    rows[f"memory in {QUICK_STEPS:,} steps with everything on grows by at most {LARGEST_GROWTH:g} MB in 1,000"] = Count(
        1, int(grown <= LARGEST_GROWTH)
    )
    print(markdown(rows))
    print("\nMade by `python -m minigpt.studies.stress report`. A test that fails counts none of its faults as held.")
    return 0 if all(count.held == count.tried > 0 for count in rows.values()) else 1


if __name__ == "__main__":
    run_script(main)
