"""Do to minigpt what happens to programs: kill it, feed it rubbish, let it run for long.

  python -m minigpt.studies.stress kill --times 100     SIGKILL at random moments; equal ends, bit for bit?
  python -m minigpt.studies.stress fuzz --inputs 10000  random files, options and headers; a sentence or a result?
  python -m minigpt.studies.stress memory               20,000 steps with everything on; does memory grow?
  python -m minigpt.studies.stress report               all faults in a Markdown table, each tried now, a few minutes

Exit code 1 if something did not hold.
"""

import argparse

from minigpt.cli import parse_options, run_script


def main() -> int:
    options = parse_options(make_parser())
    return {"kill": kill}[options.what](options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minigpt.studies.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["kill", "fuzz", "memory", "report"], help="what to do")
    parser.add_argument("--times", type=int, default=100, metavar="N", help="kill: processes that are killed (100)")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="fuzz: inputs in all (10000)")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="memory: steps (20000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="kill, fuzz: another seed tries others (1)")
    return parser


def kill(options: argparse.Namespace) -> int:
    from minigpt.studies.killing import kills

    equal = number = 0
    for number, one in enumerate(kills(options.times, options.seed), start=1):
        equal += not one.differences
        saved = "nothing saved" if one.saved_step is None else f"step {one.saved_step} saved"
        end = "equal" if not one.differences else "DIFFERENT: " + "; ".join(one.differences)
        print(f"{number:4}/{options.times}  {one.kind:10}  after {one.seconds:5.2f} s  {saved:16}  {end}", flush=True)
    print(f"{number} killed, {equal} ended bit for bit as the undisturbed run")
    return 0 if number == equal else 1


if __name__ == "__main__":
    run_script(main)
