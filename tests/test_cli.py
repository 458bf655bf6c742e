"""The command line's surface and its behaviour on a small model."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from quantrot.cli.common import parse_size, size
from quantrot.cli.main import app
from quantrot.process import counted

run = CliRunner().invoke

OPTIONS = {
    "convert": "--recipe --output --device --resume --max-shard-size --overwrite --calibration --windows --seq-len "
    "--threads --dry-run",
    "plan": "--recipe --device --max-shard-size --calibration --windows --seq-len --threads",
    "learn": "--recipe --output --text --steps --seq-len --windows --held-out --rate --seed --device",
    "verify": "--against --text --seq-len --windows --max-kl --min-top1 --device",
    "inspect": "",
    "eval mmlu": "--fewshot --limit --batch-size --data --baseline --recipes --work --calibration --windows --seq-len "
    "--output --device --dtype",
    "eval ppl": "--text --seq-len --windows --output --device --dtype",
    "eval compare": "--baseline --text --seq-len --windows --output --device --dtype",
    "recipes show": "",
    "recipes schema": "",
}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return str(tiny(tmp_path_factory.mktemp("model") / "source", hidden=128, intermediate=256, dtype=torch.bfloat16))


@pytest.mark.parametrize("command", OPTIONS)
def test_the_surface_is_frozen(command):
    import typer.main

    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    options = {name for p in found.params for name in p.opts if name.startswith("--")}
    assert options == set(OPTIONS[command].split())


@pytest.mark.parametrize("command", OPTIONS)
def test_an_option_of_one_value_is_given_once(command):
    import typer.main

    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    options = [p for p in found.params if p.param_type_name == "option"]
    model = ["x"] * (len(found.params) - len(options))
    for option in (p for p in options if not (p.is_flag or p.multiple)):
        others = [word for p in options if p.required and p is not option for word in (p.opts[0], "1")]
        name, short = option.opts[0], option.opts[-1]
        done = run(app, [*command.split(), *model, *others, name, "1", short, "1"])
        assert done.exit_code == 2 and done.stderr == f"error: {name} is given 2 times; give it once\n"


def test_an_option_of_several_values_is_given_again(source, tmp_path):
    words = [word for _ in range(2) for word in ("--calibration", str(tmp_path / "no.txt"))]
    assert "no.txt: cannot be read" in run(app, ["plan", source, "-r", "mxfp4-w4a8-gptq", *words]).stderr


def test_convert_inspect_verify(source, tmp_path):
    out = str(tmp_path / "out")
    result = run(app, ["convert", source, "-r", "quarot-mxfp4", "-o", out])
    assert result.exit_code == 0, result.output
    assert "at 4.25 bits" in result.output and "worst weights 1" in result.output and "peak memory" in result.output
    result = run(app, ["inspect", out])
    assert result.exit_code == 0 and "MXFP4 x MXFP4" in result.output and "blocks of 32" in result.output
    assert ", fused, checksum" in result.output and f"vllm serve {out}\n" in result.output
    text = tmp_path / "text.txt"
    text.write_text("Some words to run through both models, again and again. " * 40)
    result = run(app, ["verify", out, "--text", str(text), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "mean KL to the source" in result.output and "files match their hashes; ok" in result.output
    assert run(app, ["verify", out, "--text", str(text), "--max-kl", "1e-9"]).exit_code == 1


def test_dry_run_is_plan_and_writes_nothing(source, tmp_path):
    planned = run(app, ["plan", source, "-r", "fp8-block"])
    assert planned.exit_code == 0 and "FP8 128x128" in planned.output and "predicted peak memory" in planned.output
    dry = run(app, ["convert", source, "-r", "fp8-block", "-o", str(tmp_path / "out"), "--dry-run"])
    said, predicted = (re.sub(r"(?<=peak memory ).*(?= with)", "", of.output) for of in (dry, planned))
    assert said == predicted and not list(tmp_path.iterdir())  # of memory as much as this process has just then


def test_recipes_list_show_schema():
    assert "quarot-mxfp4-full" in run(app, ["recipes"]).output
    assert run(app, ["recipes", "show", "mxfp4"]).output.startswith("# MXFP4 weights and activations")
    schema = json.loads(run(app, ["recipes", "schema"]).output)
    assert set(schema["properties"]) == {"description", "rotations", "linear", "skip", "attention", "kv_cache"}
    unknown = run(app, ["recipes", "show", "mxfp"])
    assert unknown.exit_code == 2 and "called 'mxfp' (did you mean 'mxfp4'?); there are fp8-" in unknown.stderr


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_errors_of_the_recipe_come_before_those_of_the_text(source, tmp_path, command):
    (tmp_path / "recipe.yaml").write_text("skipp: []")
    output = ["-o", str(tmp_path / "out")] * (command == "convert")
    words = ["-r", str(tmp_path / "recipe.yaml"), "--calibration", str(tmp_path / "nope.txt")]
    done = run(app, [command, source, *words, *output])
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {tmp_path / 'recipe.yaml'}:1: unknown key 'skipp'")
    assert "nope" in run(app, [command, source, "-r", "mxfp4-w4a8-gptq", *words[2:], *output]).stderr


def test_missing_output_says_what_to_do(source):
    result = run(app, ["convert", source, "-r", "mxfp4"])
    assert result.exit_code == 2 and "--output is missing" in result.output


@pytest.mark.parametrize(
    "text, nbytes", [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1GiB", 2**30), ("2TB", 2 * 10**12), ("4096", 4096)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("option", ["--windows", "--seq-len"])
@pytest.mark.parametrize("command", ["convert", "plan", "eval mmlu"])
def test_numbers_of_a_text_that_is_not_there_are_refused(source, tmp_path, command, option):
    words = [*command.split(), str(source), option, "8"]
    words += [] if command == "eval mmlu" else ["--recipe", "hadamard-mxfp4"]
    words += ["-o", str(tmp_path / "out")] if command == "convert" else []
    done = run(app, words)
    assert done.exit_code == 2 and f"{option}: 8 of no text; give --calibration TEXT" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_sizes_are_written():
    shown = {12: "12 bytes", 34_500: "34.5 KB", 999.7e6: "1 GB", 1.5e9: "1.5 GB", 1.5e12: "1.5 TB", 1.5e15: "1500 TB"}
    assert [size(n) for n in shown] == list(shown.values())


def test_one_of_something_is_one(source):
    assert [counted(n, "window") for n in (0, 1, 2)] == ["0 windows", "1 window", "2 windows"]
    planned = run(app, ["plan", source, "-r", "fp8-block", "--threads", "1"]).stdout
    assert " steps, 1 shard: " in planned and "with 1 thread\n" in planned


@pytest.mark.parametrize("command", [["recipes"], ["recipes", "show", "mxfp4"]])
def test_a_reader_that_has_enough_is_no_error(command):
    read, write = os.pipe()
    os.close(read)
    made = subprocess.run([sys.executable, "-m", "quantrot", *command], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert made.returncode == 128 + signal.SIGPIPE and not made.stderr


def test_a_path_with_brackets_is_shown_as_it_is(source, tmp_path):
    out = tmp_path / "[red]x[" / "[b]"
    done = run(app, ["convert", str(source), "--recipe", "fp8-dynamic", "-o", str(out)])
    assert done.exit_code == 0 and "[red]x[" in done.stdout.replace("\n", "")
    assert run(app, ["verify", str(out), "--device", "cpu"]).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
def test_a_path_that_is_no_text_is_taken_as_it_is(source, tmp_path):
    """As any name with an accent is in the C locale."""
    model, out = tmp_path / os.fsdecode(b"mod\xe8l"), tmp_path / os.fsdecode(b"\xe8 out")
    shutil.copytree(source, model)
    done = run(app, ["convert", str(model), "--recipe", "fp8-dynamic", "-o", str(out)])
    assert done.exit_code == 0 and "\\udce8 out" in done.stdout, done.output
    assert b"mod\xe8l" in (out / "README.md").read_bytes()
    assert run(app, ["inspect", str(out)]).exit_code == 0
    done = run(app, ["inspect", str(model)])
    assert done.exit_code == 2 and "mod\\udce8l" in done.stderr


def test_a_device_that_is_not_there_is_an_error_of_the_user(source, tmp_path):
    out = tmp_path / "out"
    assert run(app, ["convert", str(source), "--recipe", "fp8-dynamic", "-o", str(out)]).exit_code == 0
    for args in (["verify", str(out)], ["eval", "ppl", str(source), "--text", __file__]):
        done = run(app, [*args, "--device", "gpu7"])
        assert done.exit_code == 2 and "error: device is 'gpu7'; allowed: auto, cpu, cuda, cuda:N" in done.stderr
        done = run(app, [*args, "--device", "cuda:77"])
        assert done.exit_code == 2 and "error: device is 'cuda:77', and there" in done.stderr


def test_errors_are_lines_of_stderr_alone(source, tmp_path, monkeypatch):
    """Without an empty line of a bar that was never shown; what the file system refuses says how to go on."""
    done = run(app, ["convert", source, "-r", "fp8blok", "-o", str(tmp_path / "out")])
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.startswith("error: recipe 'fp8blok' is neither")

    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    done = run(app, ["convert", source, "-r", "fp8-block", "-o", str(tmp_path / "out")])
    first, second = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "No space left on device: " in first and "the same command with --resume goes on" in second
    shutil.rmtree(tmp_path / "out.partial")

    def refused(path, *args, **kwargs):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    done = run(app, ["convert", source, "-r", "fp8-block", "-o", str(tmp_path / "out")])
    assert done.exit_code == 2 and "Permission denied" in done.stderr and "--resume" not in done.stderr


TERMINATED = """
import os, signal, sys
from quantrot.cli.main import app
real = os.pwrite
def terminated(*args):
    os.pwrite = real
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)
os.pwrite = terminated
app(sys.argv[1:])
"""


def test_a_terminated_conversion_says_how_to_go_on(source, tmp_path, alone):
    """As an interrupted one does. timeout sends the signal to the process, and to its group."""
    args = ["convert", source, "-r", "fp8-block", "-o", str(tmp_path / "out")]
    done = alone(TERMINATED, *args)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "interrupted; the same command with --resume goes on from here\n" in done.stderr and not done.stdout
    assert run(app, [*args, "--resume"]).exit_code == 0


def test_a_handler_of_sigterm_is_left_and_put_back(source, monkeypatch):
    seen = []
    monkeypatch.setattr("quantrot.cli.recipes.table", lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))

    def mine(*_):
        pass

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN, mine):
            signal.signal(signal.SIGTERM, handler)
            assert run(app, ["recipes"]).exit_code == 0 and signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0] not in (signal.SIG_DFL, None) and seen[1:] == [signal.SIG_IGN, mine]


def test_inspect_says_which_file_is_not_as_converted(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(app, ["convert", source, "-r", "fp8-dynamic", "-o", str(out)]).exit_code == 0
    monkeypatch.setattr("quantrot.cli.inspect.HASHED", 10_000)  # bytes, which the weights have more of
    raw, whole = (out / "model.safetensors").read_bytes(), "sizes, and hashes of files up to 10 KB, are as converted;"
    (out / "model.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    shown = run(app, ["inspect", str(out)]).stdout
    assert f"\n{whole} `quantrot verify` checks all hashes\n" in shown and "warning" not in shown
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace('"silu"', '"relu"'))
    done = run(app, ["inspect", str(out)])
    assert done.exit_code == 0 and whole not in done.stdout and f"\nwarning: {out}/config.json: differs" in done.stdout
    (out / "config.json").write_text(config)
    (out / "tokenizer.json").unlink()
    assert f"\nwarning: {out}/tokenizer.json: missing, although" in run(app, ["inspect", str(out)]).stdout


def test_inspect_of_another_directory_says_what_it_needs(source):
    done = run(app, ["inspect", str(source)])
    assert "quantrot.json: missing; give a directory that `quantrot convert` wrote" in done.stderr


def test_a_rule_that_another_hides_is_noted(source, tmp_path):
    rules = [{"match": "*", "weights": {"format": "int8", "group": "channel"}} for _ in range(2)]
    rules[1] |= {"match": "lm_head"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"linear": rules}))
    shown = run(app, ["plan", str(source), "--recipe", str(tmp_path / "recipe.yaml")]).stdout
    assert "'lm_head' applies to nothing: its linears are skipped or have an earlier rule" in " ".join(shown.split())
