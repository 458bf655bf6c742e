"""Scripts in processes of their own, forked by one that has imported for all: torch takes each three seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]

FORKED = """
import json, os, signal, sys

for line in sys.stdin:
    files, code, *sys.argv[1:] = json.loads(line)
    if process := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
        continue
    for stream, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    signal.alarm(600)  # who hangs is ended
    exec(code)
    break
"""


@contextmanager
def scripts(prelude: str, folder: Path, **env: str) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """`run(code, *args)` -> what became of it, one after another, with the names of `prelude`, which runs once."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    command, pipes = [sys.executable, "-c", prelude + FORKED], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as server:
        out, err = folder / "stdout", folder / "stderr"

        def run(code: str, *args: object) -> subprocess.CompletedProcess:
            print(json.dumps([[str(out), str(err)], code, *map(str, args)]), file=server.stdin, flush=True)
            return subprocess.CompletedProcess(args, int(server.stdout.readline()), out.read_text(), err.read_text())

        yield run
        server.stdin.close()
