"""Conversions that fail half way, and outputs that are in the way: nothing is lost or half-written."""

import errno
import io
import os
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quantrot.cli.common import parse_size, size
from quantrot.cli.main import app
from quantrot.convert import _sync, convert
from quantrot.device import known_device
from quantrot.manifest import MANIFEST
from tests.damage import FP8, GAIN, Q_PROJ, ROTATE, contents, copy, poison


@pytest.mark.parametrize("recipe", [FP8, ROTATE, {"skip": []}], ids=["fp8", "rotated", "copied"])
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        (Q_PROJ, (-1, -1), float("nan")),
        (Q_PROJ, (0, 0), float("inf")),
        ("lm_head.weight", (100, 3), float("-inf")),
        ("model.embed_tokens.weight", (0, 0), float("nan")),
        (GAIN, (5,), float("nan")),
    ],
)
def test_weight_that_is_not_finite_stops_the_conversion(single, tmp_path, recipe, name, at, value):
    root = copy(single, tmp_path)
    poison(name, value, at)(root)
    before = contents(root)
    out = tmp_path / "out"
    with pytest.raises(ValueError) as caught:
        convert(root, recipe, out)
    found, *rest = str(caught.value).splitlines()
    assert re.fullmatch(rf"model\.safetensors: {re.escape(name)} holds NaN or infinity; repair the checkpoint.*", found)
    begun = (tmp_path / "out.partial").exists()
    assert rest == ["(once that is mended, start again with overwrite, --overwrite)"] * begun
    assert contents(root) == before
    assert not out.exists() and not (tmp_path / "out.partial" / MANIFEST).exists()


def test_conversion_that_failed_resumes_after_the_repair(single, tmp_path, monkeypatch):
    """A write that fails half way leaves no output; with room on the disk, --resume ends with the same bytes."""
    convert(single, FP8, tmp_path / "whole", threads=1)
    out, real, written = tmp_path / "out", os.pwrite, []

    def full(descriptor, data, offset):
        if len(written) == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        return real(descriptor, data, offset)

    before = contents(single)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial/model\.safetensors'"):
            convert(single, FP8, out, threads=1)
    assert len(written) == 7
    assert contents(single) == before
    assert not out.exists() and not (tmp_path / "out.partial" / MANIFEST).exists()
    with pytest.raises(
        ValueError,
        match=r"out\.partial is left from an unfinished conversion; resume .--resume. goes on, overwrite .* again$",
    ):
        convert(single, FP8, out)
    with pytest.raises(
        ValueError,
        match=r"out\.partial holds an unfinished conversion of another source, .*start again with overwrite alone$",
    ):
        convert(single, ROTATE, out, resume=True)
    assert not out.exists()
    convert(single, FP8, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_short_writes_are_continued(single, tmp_path, monkeypatch):
    convert(single, FP8, tmp_path / "whole", threads=1)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:1000], offset))
    convert(single, FP8, tmp_path / "out", threads=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_no_permission_to_write(single, tmp_path, monkeypatch):
    def refuse(descriptor, data, offset):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        convert(single, FP8, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_under_a_file(single, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, ValueError), match="file"):
        convert(single, FP8, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == ""


def test_disk_that_is_too_small(single, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10_000, 9_000, 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError,
        match=r"^output .*out: the disk has 1 KB free and the conversion writes \d\d\d KB; free some space",
    ):
        convert(single, FP8, tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["quarot-mxfp4-online", "int8-weight-only"])
def test_a_disk_has_room_for_all_that_is_written(single, tmp_path, monkeypatch, recipe):
    root = copy(single, tmp_path)
    (root / "LICENSE").write_bytes(bytes(200_000))  # is copied
    out = convert(root, recipe, tmp_path / "whole").out
    needed = sum(len(data) for data in contents(out).values())
    used = namedtuple("usage", "total used free")(1 << 20, 0, needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    with pytest.raises(
        ValueError, match=rf"the disk has {size(needed)} free and the conversion writes \d\d\d KB; free"
    ):
        convert(root, recipe, tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=needed + (64 << 10)))
    convert(root, recipe, tmp_path / "out")


class Full(io.FileIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "README.md", "quantrot.json.tmp", "journal.jsonl"])
def test_a_disk_that_is_full_beside_the_weights_is_an_error_with_the_file(single, tmp_path, monkeypatch, name):
    """Also where only the closing of a file writes to it."""
    real = Path.open

    def opened(path, mode="r", buffering=-1, **how):
        if path != tmp_path / "out.partial" / name or mode == "rb":
            return real(path, mode, buffering, **how)
        raw = Full(path, mode)
        return raw if buffering == 0 else io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(OSError, match=rf"No space left on device: '.*out\.partial/{name}'"):
            convert(single, FP8, tmp_path / "out")
    convert(single, FP8, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(convert(single, FP8, tmp_path / "whole").out)


def test_what_cannot_be_synced_is_named(single, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial/model\.safetensors'"):
        convert(single, FP8, tmp_path / "out")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"):
        _sync(tmp_path)


def test_output_that_exists_is_kept(single, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(
        ValueError,
        match=r"^output .*out exists; choose another, or give overwrite .--overwrite. to replace it when done$",
    ):
        convert(single, FP8, out)
    assert (out / "mine").read_text() == "precious"
    assert not (tmp_path / "out.partial").exists()


def test_output_is_kept_when_its_replacement_fails(single, tmp_path):
    out = tmp_path / "out"
    convert(single, FP8, out)
    before = contents(out)
    root = copy(single, tmp_path)
    poison(Q_PROJ, float("nan"))(root)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        convert(root, FP8, out, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("place", [".", "out", "a/b"])
def test_output_inside_the_source(single, tmp_path, place):
    root = copy(single, tmp_path)
    before = contents(root)
    with pytest.raises(ValueError, match=r"^output .* is inside the source .*; choose another directory$"):
        convert(root, FP8, root / place, overwrite=True)
    assert contents(root) == before


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("model", "out"), [("a/b", "a"), ("a/b/c", "a"), ("a.partial", "a"), ("a.replaced", "a")])
def test_source_that_the_output_would_delete(single, tmp_path, model, out, resumed):
    root = shutil.copytree(single, tmp_path / model)
    with pytest.raises(ValueError, match=r"^the source .* is in .*, which would be replaced; choose another output$"):
        convert(root, FP8, tmp_path / out, overwrite=not resumed, resume=resumed)
    assert contents(root) == contents(single)


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_directories_of_somebody_else_are_not_deleted(single, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(
            ValueError, match=rf"{name} is nothing that a conversion left, and would be replaced; move it"
        ):
            convert(single, FP8, tmp_path / "out", **options)
    assert contents(tmp_path) == {(tmp_path / name / "precious").relative_to(tmp_path): b"mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_in_the_output_s_place_meanwhile_stays(single, tmp_path, overwrite):
    """And the conversion, which is whole, waits for its place."""
    out = tmp_path / "out"

    def progress(name, done, total):
        if done == total and not out.exists():
            out.mkdir()
            (out / "thesis").write_text("mine")

    with pytest.raises(ValueError, match="was not written by quantrot" if overwrite else "exists; choose another"):
        convert(single, FP8, out, progress=progress, overwrite=overwrite)
    assert contents(out) == {(out / "thesis").relative_to(out): b"mine"}
    shutil.rmtree(out)
    convert(single, FP8, out, resume=True)
    convert(single, FP8, tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("exists", [False, True])
def test_an_older_output_that_no_conversion_set_aside_is_not_deleted(single, tmp_path, options, exists):
    convert(single, FP8, tmp_path / "aside").out.rename(tmp_path / "out.replaced")
    if exists:
        convert(single, FP8, tmp_path / "fresh").out.rename(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"out\.replaced is nothing that a conversion left, and would be replaced"):
        convert(single, FP8, tmp_path / "out", **options)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_an_output_has_no_name_of_an_unfinished_or_an_older_one(single, tmp_path, name):
    with pytest.raises(ValueError, match=rf"output .*{name}: names that end so are of unfinished and older outputs"):
        convert(single, FP8, tmp_path / name)


def test_a_resumed_conversion_leaves_no_file_that_the_source_no_longer_has(single, tmp_path, monkeypatch):
    root = copy(single, tmp_path)
    (root / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (root / name).write_text("{{ messages }}")
    module = sys.modules["quantrot.convert"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_manifest", lambda *of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(root, FP8, tmp_path / "out")
    assert (tmp_path / "out.partial" / "additional_chat_templates/rag.jinja").exists()
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (root / name).unlink()
    out = convert(root, FP8, tmp_path / "out", resume=True).out
    assert contents(out) == contents(convert(root, FP8, tmp_path / "fresh").out)


@pytest.mark.parametrize("recipe", [{"linear": [{"match": "*", "weights": {"format": "mxfp4"}}]}, "trained-mxfp4"])
def test_finite_weights_that_round_to_infinity_stop_the_conversion(single, tmp_path, recipe):
    root = copy(single, tmp_path)
    poison(Q_PROJ, 3e38, (0, 0))(root)
    with pytest.raises(ValueError, match=f"{Q_PROJ} holds values that mxfp4 rounds to infinity or NaN; repair"):
        convert(root, recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_that_is_a_link_is_where_it_points(single, tmp_path, exists):
    place, link = tmp_path / "disk" / "place", tmp_path / "out"
    link.symlink_to(place)
    if exists:
        place.mkdir(parents=True)
    for _ in range(2):
        convert(single, FP8, link, overwrite=True)
        assert link.is_symlink() and contents(place) and sorted(p.name for p in tmp_path.iterdir()) == ["disk", "out"]
    assert [p.name for p in place.parent.iterdir()] == ["place"]


@pytest.mark.parametrize("place", ["loop", "loop/out", "to.partial"])
def test_an_output_in_a_loop_of_links_is_named(single, tmp_path, place):
    (tmp_path / place.partition("/")[0]).symlink_to(place.partition("/")[0])
    done = CliRunner().invoke(
        app, ["convert", str(single), "-r", "mxfp4", "-o", str(tmp_path / place.replace(".partial", ""))]
    )
    assert done.exit_code == 2 and f"Too many levels of symbolic links: '{tmp_path / place}'" in done.stderr
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_overwrite_replaces_only_what_quantrot_wrote(single, tmp_path, kind):
    out = tmp_path / "out"
    precious = out if kind == "file" else out / "precious"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(
        ValueError, match=r"^output .*out was not written by quantrot and is not replaced; choose another"
    ):
        convert(single, FP8, out, overwrite=True)
    assert precious.read_text() == "mine"


def test_an_output_that_may_not_be_written_in_is_said_before_the_work(single, tmp_path, monkeypatch):
    out = convert(single, FP8, tmp_path / "out").out
    before = contents(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == out and mode & os.W_OK))  # root may do all
    with pytest.raises(ValueError, match=r"^output .*out: no permission to write in it, and overwrite deletes"):
        convert(single, FP8, out, overwrite=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode & os.W_OK))
    with pytest.raises(ValueError, match=rf"^output .*other: no permission to write in {tmp_path}; change it, or"):
        convert(single, FP8, tmp_path / "new" / "other")
    assert contents(tmp_path) == before


def test_overwrite_deletes_nothing_that_was_put_into_an_output(single, tmp_path):
    out = tmp_path / "out"
    convert(single, FP8, out)
    (out / "mmlu.json").write_text("mine")
    convert(single, FP8, out / "inner")
    with pytest.raises(ValueError, match="also holds inner, mmlu.json, which overwrite would delete; move it"):
        convert(single, FP8, out, overwrite=True)
    assert (out / "mmlu.json").read_text() == "mine" and (out / "inner" / "config.json").exists()
    (out / "mmlu.json").unlink(), shutil.rmtree(out / "inner")
    convert(single, FP8, out, overwrite=True)


@pytest.mark.parametrize(
    "text",
    [
        b"garbage\n",
        b"\0\0\n",
        b"\xff\xfe\n",
        b"GOODgarbage\n",
        b"GOOD[1]\n",
        b"GOOD{}\n",
        b'GOOD{"step": 999, "sha256": {}}\n',
    ]
    + [b'GOOD{"step": 0, "sha256": {"x": ""}}\n', b"GOOD" + b"[" * 100_000 + b"\n"]
    + [b'GOOD{"step": 0, "sha256": {"%b": ""}, "signal": "abc", "error": 0}\n' % b"model.embed_tokens.weight"]
    + [b'GOOD{"step": 0, "sha256": ["%b"], "signal": 0, "error": 0, "source": ""}\n' % b"model.embed_tokens.weight"],
)
def test_journal_that_is_malformed(single, tmp_path, monkeypatch, text):
    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            convert(single, FP8, out, threads=1)
    journal.write_bytes(text.replace(b"GOOD", journal.read_bytes()))
    with pytest.raises(ValueError, match=r"journal\.jsonl: malformed \(.*\); start again with overwrite alone$"):
        convert(single, FP8, out, resume=True)
    assert not out.exists()
    convert(single, FP8, out, overwrite=True)
    assert (out / MANIFEST).exists()


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_below_one(single, tmp_path, threads):
    with pytest.raises(ValueError, match=rf"^threads is {threads}; a positive integer is needed$"):
        convert(single, FP8, tmp_path / "out", threads=threads)


def test_output_at_the_root(single):
    with pytest.raises(ValueError, match=r"^output / has no name of its own"):
        convert(single, FP8, "/")


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_cuda_without_a_gpu(single, tmp_path, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"^device is '{device}', and there is no CUDA GPU"):
        convert(single, FP8, tmp_path / "out", device=device)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "5XB", "GB", "-1GB", "0", "0GB", "1e3MB", "5 G B", "nan", "inf", "5,5GB", "0x10", "9" * 20]
)
def test_shard_size_that_is_no_size(text):
    with pytest.raises(
        ValueError, match=rf"^max-shard-size is '{re.escape(text)}'; write a size such as 5GB, 500MB or 1GiB$"
    ):
        parse_size(text)


def test_a_readme_that_is_no_yaml_stops_nothing(single, tmp_path):
    root = copy(single, tmp_path)
    (root / "README.md").write_text("---\nlicense: mit\ndate: 2024-02-30\n---\n")
    assert (convert(root, FP8, tmp_path / "out").out / "README.md").exists()


def test_nobody_else_resumes_while_the_output_gets_its_name(single, tmp_path, monkeypatch):
    module = sys.modules["quantrot.convert"]  # of that name the package has the function
    finish = module._finish

    def watched(*args):
        with pytest.raises(ValueError, match="another process"):
            convert(single, FP8, tmp_path / "out", resume=True)
        finish(*args)

    monkeypatch.setattr(module, "_finish", watched)
    convert(single, FP8, tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).exists()


def test_what_the_manifest_lists_is_on_the_disk_before_it(single, tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    manifest = convert(single, ROTATE, tmp_path / "out").manifest
    manifests = [i for i, name in enumerate(synced) if MANIFEST in name]
    assert manifests and set(manifest["files"]) <= set(synced[: manifests[0]])


@pytest.mark.parametrize("name", ["meta", "mps", "xpu:3", "cpu:7", "", "cuda:-1"])
def test_devices_that_nothing_here_runs_on(name):
    with pytest.raises(ValueError, match=f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N"):
        known_device(name)
