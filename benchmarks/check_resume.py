"""Kill conversions with SIGKILL at random moments, resume them, and compare every file with an unbroken conversion.

    python benchmarks/check_resume.py --work DIR [--model demo] [--recipe quarot-mxfp4-online] [--kills 20] [--seed 0]

Every round starts `quantrot convert`, kills it after a random part of an unbroken run's time, resumes it and compares
the hashes of the result. One more conversion runs with one thread. Exits 1 if any file differs.
"""

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path


def command(options: argparse.Namespace, out: Path, *flags: str) -> list[str]:
    convert = [sys.executable, "-m", "quantrot", "convert", options.model, "-r", options.recipe, "-o", str(out)]
    return [*convert, "--max-shard-size", "40MB", *flags]


def tree(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--recipe", default="quarot-mxfp4-online")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = time.monotonic()
    subprocess.run(command(options, options.work / "unbroken"), check=True, **quiet)
    seconds = time.monotonic() - started
    expected = tree(options.work / "unbroken")
    subprocess.run(command(options, options.work / "one", "--threads", "1"), check=True, **quiet)
    bad = [] if tree(options.work / "one") == expected else ["one thread"]
    chance = random.Random(options.seed)
    for i in range(options.kills):
        out = options.work / f"killed-{i}"
        moment = chance.uniform(0.2, 1.0) * seconds
        process = subprocess.Popen(command(options, out), **quiet)
        time.sleep(moment)
        process.kill()
        killed = process.wait() == -9
        journal = out.with_name(out.name + ".partial") / "journal.jsonl"
        steps = max(0, len(journal.read_bytes().splitlines()) - 1) if journal.exists() else 0
        subprocess.run(command(options, out, "--resume"), check=True, **quiet)
        same = tree(out) == expected
        print(
            f"killed {killed} after {moment:.2f} s with {steps} steps done: {'identical' if same else 'DIFFERENT'}",
            flush=True,
        )
        bad += [] if same else [out.name]
        shutil.rmtree(out)
    print(
        f"{len(expected)} files; {options.kills - len(bad)} of {options.kills} identical, one thread identical"
        if not bad
        else f"different: {bad}"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
