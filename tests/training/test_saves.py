import json
import os
import zipfile

import pytest

from lit_msar.training import saves


def write(directory, step, files=("a", "b")):
    """A finished sharded save."""
    final = saves.save_path(directory, step)
    unfinished = saves.unfinished_path(final)
    unfinished.mkdir(parents=True)
    for name in files:
        (unfinished / name).write_text(name * step)
    saves.finish(final, {"step": step})
    os.utime(final, ns=(step, step))
    return final


def write_file(directory, step):
    directory.mkdir(exist_ok=True)
    final = saves.save_path(directory, step)
    with zipfile.ZipFile(saves.unfinished_path(final), "w") as file:  # as torch writes
        file.writestr("step", str(step))
    saves.finish(final, {})
    os.utime(final, ns=(step, step))
    return final


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("writer", [write, write_file], ids=["directory", "file"])
def test_finished_save_is_last_and_leaves_nothing_else(tmp_path, writer):
    final = writer(tmp_path, 3)
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt"]
    assert saves.newest(tmp_path) == final.resolve()
    assert not saves.defect(final)


def test_manifest_lists_the_files(tmp_path):
    final = write(tmp_path, 3)
    assert json.loads((final / "manifest.json").read_text()) == {"step": 3, "files": {"a": 3, "b": 3}}


def test_same_step_again_replaces_the_save(tmp_path):
    write(tmp_path, 3)
    final = write(tmp_path, 3, files=("c",))
    assert (final / "c").exists()
    assert not (final / "a").exists()
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt"]


def test_last_is_what_was_written_last_not_the_highest_step(tmp_path):
    """A run that went back to step 2 writes its own step 3 beside the abandoned step 9."""
    write(tmp_path, 9)
    final = write(tmp_path, 3)
    assert saves.newest(tmp_path) == final.resolve()


BREAK = {
    "missing-file": (lambda path: (path / "a").unlink(), "no a"),
    "short-file": (lambda path: (path / "a").write_text("a"), "a has 1 bytes instead of 4"),
    "no-manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest.json"),
}


@pytest.mark.parametrize(("damage", "why"), BREAK.values(), ids=BREAK)
def test_damaged_save_is_ignored_with_a_warning(tmp_path, damage, why):
    whole, broken = write(tmp_path, 2), write(tmp_path, 4)
    damage(broken)
    assert saves.defect(broken) == why
    with pytest.warns(UserWarning, match=rf"step=4.ckpt is not complete \({why}\): ignored"):
        assert saves.newest(tmp_path) == whole


def test_interrupted_save_is_ignored_with_a_warning_and_removed_by_the_next(tmp_path):
    whole = write(tmp_path, 2)
    unfinished = saves.unfinished_path(saves.save_path(tmp_path, 4))
    unfinished.mkdir()
    (unfinished / "a").write_text("a")
    with pytest.warns(UserWarning, match=r"step=4.ckpt.unfinished is the rest of a save that was interrupted"):
        assert saves.newest(tmp_path) == whole.resolve()
    saves.prune(tmp_path, keep_last=2, keep_every=None, keep=whole)
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt"]


def test_a_file_that_is_cut_off_is_passed_over(tmp_path):
    whole, cut = write_file(tmp_path, 2), write_file(tmp_path, 4)
    os.truncate(cut, cut.stat().st_size - 1)
    with pytest.warns(UserWarning, match=r"step=4.ckpt is not complete \(it is cut off\)"):
        assert saves.newest(tmp_path) == whole.resolve()


def test_newest_of_nothing_is_none(tmp_path):
    assert saves.newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(2, None, [7, 8]), (1, 4, [4, 8]), (-1, None, [*range(1, 9)]), (3, 5, [5, 6, 7, 8]), (1, 1, [*range(1, 9)])],
    ids=["newest", "every-fourth", "all", "both", "every"],
)
def test_prune_keeps_the_newest_and_every_nth(tmp_path, keep_last, keep_every, left):
    for step in range(1, 9):
        final = write_file(tmp_path, step)
    saves.prune(tmp_path, keep_last, keep_every, keep=final)
    assert [saves.step_of(path) for path in saves.complete(tmp_path)] == left
