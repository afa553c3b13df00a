"""Breaks the gateway on purpose, one rule of its contract at a time, and sees whether the tests notice.

    python scripts/mutants.py                  # all of them; exit 1 if one survives
    python scripts/mutants.py --part 2/4       # the second quarter
    python scripts/mutants.py --only uuid      # those whose rule, file or test has the word in it
    python scripts/mutants.py --doc            # write docs/mutants.md from the table; runs nothing
    python scripts/mutants.py --check          # exit 1 if a mutation does not apply, or the document is out of date

The table is scripts/mutants.yaml: a rule, a piece of source that stands there once, what takes its place, and the test
that has to fail. Each mutation is made in a copy of `src`, never in the checkout.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "mutants.yaml"
DOC = ROOT / "docs" / "mutants.md"
TIMEOUT = 300
# pytest's exit status where tests ran and failed; others mean that nothing was tried.
FAILED = 1
BROKEN = 9
# What every run needs and no mutation touches: imported once, before the forks.
HEAVY = ("blake3", "httptools", "msgspec", "prometheus_client", "pydantic", "uvloop")


class Mutant(NamedTuple):
    """One mutation. file: below src/triptych; test: node id below tests/gateway."""

    section: str
    rule: str
    file: str
    old: str
    new: str
    test: str

    def fits(self, word: str) -> bool:
        return any(word in text for text in (self.section, self.rule, self.file, self.test))

    def apply(self, source: str) -> str:
        """Raises ValueError where the old text does not stand there exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: this stands there {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


def _misfits(mutants: list[Mutant]) -> Iterator[str]:
    """What of the table does not fit the source and the tests any more."""
    for mutant in mutants:
        try:
            mutant.apply((ROOT / "src" / "triptych" / mutant.file).read_text())
        except ValueError as error:
            yield f"{mutant.rule}: {error}"
        file, _, test = mutant.test.partition("::")
        if f"def {test}(" not in (ROOT / "tests" / "gateway" / file).read_text():
            yield f"{mutant.rule}: there is no test {mutant.test}"


def table() -> list[Mutant]:
    sections = yaml.safe_load(TABLE.read_text())
    return [Mutant(section, **fields) for section, rows in sections.items() for fields in rows]


def verdict(mutant: Mutant, tree: Path) -> str:
    """ "killed", or what happened instead."""
    path = tree / "triptych" / mutant.file
    original = path.read_text()
    path.write_text(mutant.apply(original))
    output = tree.parent / "output"
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            status = _test(mutant, tree, output)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        ended = _wait(child)
    finally:
        path.write_text(original)
    if ended == FAILED:
        return "killed"
    if ended is None:
        return f"no end within {TIMEOUT} s"
    return "SURVIVED" if ended == 0 else f"broken run:\n{output.read_text()[-3000:]}"


def _test(mutant: Mutant, tree: Path, output: Path) -> int:
    """In a process of its own: run the test on the mutated source."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree), str(ROOT)]
    import triptych  # noqa: PLC0415 - the mutated one

    if not str(triptych.__file__).startswith(str(tree)):
        return BROKEN
    return int(
        pytest.main(["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"tests/gateway/{mutant.test}"])
    )


def _wait(child: int) -> int | None:
    """The exit status; None where it took too long and was ended."""
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run(mutants: list[Mutant]) -> int:
    left = []
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "src"
        shutil.copytree(ROOT / "src", tree, ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            word = verdict(mutant, tree)
            if word != "killed":
                left.append(mutant)
            print(f"{number}/{len(mutants)} {time.monotonic() - began:5.1f} s  {word:8}  {mutant.rule}", flush=True)
    print(f"{len(mutants) - len(left)} of {len(mutants)} killed")
    return 1 if left else 0


def document(mutants: list[Mutant]) -> str:
    parts = [INTRODUCTION.format(count=len(mutants))]
    for section in dict.fromkeys(m.section for m in mutants):
        parts.append(f"## {section}\n\n| rule | mutation | test that fails |\n|---|---|---|")
        for m in (m for m in mutants if m.section == section):
            change = f"`{m.file}`: {_code(m.old)} → {_code(m.new) if m.new.strip() else 'nothing'}"
            parts.append(f"| {m.rule} | {change} | `{m.test}` |")
        parts.append("")
    return "\n".join(parts)


def _code(text: str) -> str:
    """Source on one line of a table."""
    plain = " ".join(text.split()).replace("|", "\\|")
    fence = "``" if "`" in plain else "`"
    return f"{fence}{plain}{fence}"


INTRODUCTION = """# Mutants

<!-- Generated by scripts/mutants.py from scripts/mutants.yaml: do not edit. -->

Each rule of the gateway's contract is held by a test that fails when the rule is broken. This is the list of {count}
ways in which the rules were broken on purpose, each in a copy of the source, and of the tests that were seen to fail.
`python scripts/mutants.py` does all of it again (some ten minutes; `--only WORD` for a few) and exits with 1 if a
mutant survives. Files are below `src/triptych`, tests below `tests/gateway`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--part", default="1/1", metavar="N/OF")
    parser.add_argument("--doc", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    mutants = table()
    if misfits := list(_misfits(mutants)):
        print("\n".join(misfits))
        return 1
    if arguments.doc:
        DOC.write_text(document(mutants))
        return 0
    if arguments.check:
        if DOC.read_text() != document(mutants):
            print("docs/mutants.md is out of date: run `python scripts/mutants.py --doc`")
            return 1
        return 0
    number, of = map(int, arguments.part.split("/"))
    chosen = [m for m in mutants if m.fits(arguments.only)]
    return run(chosen[number - 1 :: of])


if __name__ == "__main__":
    sys.exit(main())
