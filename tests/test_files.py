"""Atomic writes: whole or not at all, with the permissions of an ordinary file; and by what a folder is known again."""

import errno
import os
import stat
from pathlib import Path

import pytest

from loragate.errors import ConfigError, LoragateError
from loragate.files import atomic_folder, folder_sha256, require_empty_folder, write_atomically, write_json, write_text


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "new" / "record.json"
    write_json(path, {"a": 1})

    def torn(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, torn)
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [item.name for item in path.parent.iterdir()] == ["record.json"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_may_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX alone")
@pytest.mark.parametrize(("number", "fatal"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(tmp_path, monkeypatch, number, fatal):
    """Some network file systems refuse to sync a folder; the file stands in its place all the same."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if fatal:
        with pytest.raises(LoragateError, match="was not written"):
            write_text(tmp_path / "a", "x")
    else:
        write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


def test_a_folder_is_known_by_its_content(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(bytes(9 << 20))
    assert folder_sha256(tmp_path / "one") == folder_sha256(tmp_path / "two")
    (tmp_path / "two" / "adapter_model.safetensors").write_bytes(bytes((9 << 20) - 1) + b"x")
    assert folder_sha256(tmp_path / "one") != folder_sha256(tmp_path / "two")


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    for place in (Path("/proc/nowhere/x"), tmp_path / "file" / "x"):
        with pytest.raises(LoragateError, match=f"{place} was not written: "):
            require_empty_folder(place)
    require_empty_folder(tmp_path / "new" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x/.out.abc.partial/a"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors
        RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0"),
        OSError("4096 requested and 512 written"),  # numpy
    ],
)
def test_a_full_disk_names_the_folder_that_was_asked_for(tmp_path, error):
    def write(temporary):
        raise error

    full = "was not written: the disk is full"
    with pytest.raises(LoragateError, match=f"^{tmp_path}/out {full}"), atomic_folder(tmp_path / "out") as folder:
        write(folder)
    with pytest.raises(LoragateError, match=f"^{tmp_path}/out/a {full}"), atomic_folder(tmp_path / "out") as folder:
        write_atomically(folder / "a", write)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_inside_a_folder_is_said_of_the_folder_that_was_asked_for(tmp_path):
    said = f"^{tmp_path}/out/a: a gate is missing$"
    with pytest.raises(ConfigError, match=said), atomic_folder(tmp_path / "out") as folder:
        raise ConfigError(f"{folder}/a: a gate is missing")
