"""Preparation gives the same bytes whatever the workers, interruptions and rivals, and loses no document."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from conftest import python_path

from data import inputs, pool
from data import prepare as prepare_module
from data.job import Job
from data.prepare import prepare
from data.shards import IDX_DTYPE, Manifest, hash_file, load_manifest
from data.tokenizer import load_tokenizer
from data.verify import RECORD

ROOT = Path(__file__).parents[2]


def hashes(root: Path) -> dict[str, str]:
    """SHA-256 of every file of an output, but for the record of file times."""
    files = [f for f in root.rglob("*") if f.is_file() and f.name != RECORD]
    return {str(f.relative_to(root)): hash_file(f) for f in files}


def texts_of(root: Path, split: str) -> dict[str, list[str]]:
    """All documents of a split by set, decoded."""
    manifest, tokenizer = load_manifest(root), load_tokenizer(root)
    out: dict[str, list[str]] = {}
    for s in manifest.splits[split]:
        for shard in s.shards:
            tokens = np.fromfile(root / (shard.path + ".bin"), dtype=manifest.dtype)
            starts = np.fromfile(root / (shard.path + ".idx"), dtype=IDX_DTYPE).astype(int)
            documents = np.split(tokens, starts[1:-1])
            assert all((d == tokenizer.eod_id).sum() == 1 and d[-1] == tokenizer.eod_id for d in documents)
            out.setdefault(s.name, []).extend(tokenizer.decode(d) for d in documents)
    return out


@pytest.fixture
def corpus(write_jsonl: Callable, make_text: Callable, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Documents of three sets in a.jsonl, b.jsonl.zst and c.jsonl; blocks of 4 KiB, so that there are many."""
    monkeypatch.setattr(inputs, "BLOCK", 4096)
    rng = random.Random(1)
    documents = [
        (rng.choice(["Wiki (en)", "wiki EN", "Code"]), make_text(i, rng.randrange(1, 200))) for i in range(400)
    ]
    write_jsonl("a.jsonl", documents[:150])
    b = write_jsonl("b.jsonl", documents[150:300])
    b.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(b.read_bytes()))
    b.unlink()
    write_jsonl("c.jsonl", documents[300:])
    return documents


def run(tmp_path: Path, output: str = "out", **options: object) -> Path:
    defaults = {"input": f"{tmp_path}/[abc].jsonl*", "workers": 1, "shard_tokens": 3000}
    prepare(str(tmp_path / output), **(defaults | options))
    return tmp_path / output


def test_every_document_arrives_once_in_order(tmp_path: Path, corpus: list, model_file: Path) -> None:
    out = run(tmp_path, tokenizer=str(model_file), split="val=0.1", verify=True)
    train, val = texts_of(out, "train"), texts_of(out, "val")
    for name in ("Wiki (en)", "wiki EN", "Code"):
        expected = [t for n, t in corpus if n == name]
        held_out = set(val[name])
        assert train[name] == [t for t in expected if t not in held_out]
        assert val[name] == [t for t in expected if t in held_out]
    manifest = load_manifest(out)
    assert len({s.path for s in manifest.splits["train"]}) == 3
    assert 10 < sum(len(v) for v in val.values()) < 90
    total = sum(s.bytes for sets in manifest.splits.values() for s in sets)
    assert total == sum(len(t.encode()) for _, t in corpus)
    assert [i["documents"] for i in manifest.inputs] == [150, 150, 100]
    assert [i["sha256"] for i in manifest.inputs] == [hash_file(f) for f in sorted(tmp_path.glob("[abc].*"))]
    assert manifest.tokenizer["sha256"] == hash_file(model_file)
    assert not list(tmp_path.glob("*.partial"))


def test_workers_and_tokenizer_training_do_not_change_the_bytes(tmp_path: Path, corpus: list) -> None:
    one = run(tmp_path, "one", train_tokenizer=330)
    three = run(tmp_path, "three", train_tokenizer=330, workers=3)
    assert hashes(one) == hashes(three)
    assert (one / "tokenizer.model").is_file()


def test_second_run_does_nothing_and_other_options_are_refused(
    tmp_path: Path, corpus: list, model_file: Path, capsys: pytest.CaptureFixture
) -> None:
    out = run(tmp_path, tokenizer=str(model_file))
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*")}
    run(tmp_path, tokenizer=str(model_file), workers=2)
    assert "already prepared" in capsys.readouterr().out
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*")} == before
    with pytest.raises(ValueError, match="was prepared with other shard_tokens"):
        run(tmp_path, tokenizer=str(model_file), shard_tokens=5000)


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_anywhere_it_continues_to_the_same_bytes(
    tmp_path: Path, corpus: list, model_file: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    options = {"tokenizer": str(model_file), "split": "val=0.1", "workers": workers}
    expected = hashes(run(tmp_path, "straight", **options))
    monkeypatch.setattr(prepare_module, "JOURNAL_SECONDS", -1.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here loses power, and syncing is most of the time
    write = prepare_module.Preparation._write
    calls = 0

    def dying_write(self: object, tokens: object) -> None:
        nonlocal calls
        calls += 1
        write(self, tokens)
        if calls % 9 == 0:  # the tokens are in the files, and not in the journal
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module.Preparation, "_write", dying_write)
    interruptions = 0
    while True:
        try:
            out = run(tmp_path, **options)
            break
        except KeyboardInterrupt:
            interruptions += 1
            assert not (tmp_path / "out").exists()
    assert interruptions >= 3
    assert hashes(out) == expected
    assert not list(tmp_path.glob("*.partial"))


PREPARE = """
import sys
from data import inputs, prepare
inputs.BLOCK = 2048
prepare.JOURNAL_SECONDS = -1.0
prepare.prepare(sys.argv[2], input=sys.argv[1], train_tokenizer=330, workers=2, shard_tokens=3000)
"""


def start(tmp_path: Path, output: str = "out") -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": python_path(str(ROOT)), "OMP_NUM_THREADS": "1"}
    arguments = [f"{tmp_path}/[abc].jsonl*", str(tmp_path / output)]
    return subprocess.Popen([sys.executable, "-c", PREPARE, *arguments], env=env, stdout=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def written(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "data.worker" in Path(f"/proc/{pid}/cmdline").read_text()  # empty for a zombie
    return False


@pytest.mark.slow
def test_sigkill_at_ten_random_moments_leaves_the_same_bytes(tmp_path: Path, corpus: list) -> None:
    assert start(tmp_path, "straight").wait() == 0
    expected = hashes(tmp_path / "straight")
    rng = random.Random(0)
    journal = tmp_path / "out.partial/state.json"
    tries, kills, workers = 0, 0, []
    while kills < 10:
        tries += 1
        assert tries <= 40  # else it is done before the moments drawn here
        before = written(journal)
        process = start(tmp_path)
        # one kill in two at any moment from the start on, the other after blocks that this process has journalled
        awaited = kills % 2 == 1
        pause = rng.uniform(0, 0.1) if awaited else rng.uniform(0.05, 0.9)
        deadline = None if awaited else time.monotonic() + pause
        while process.poll() is None and (deadline is None or time.monotonic() < deadline):
            if deadline is None and written(journal) not in (None, before):
                deadline = time.monotonic() + pause
            time.sleep(0.002)
        if process.poll() is None:
            workers += children(process.pid)
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        if (tmp_path / "out").exists():
            assert hashes(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
    assert start(tmp_path).wait() == 0
    assert hashes(tmp_path / "out") == expected
    assert not list(tmp_path.glob("*.partial"))
    time.sleep(0.2)
    assert not [pid for pid in workers if is_running(pid)]  # no tokenizing process is left behind


@pytest.mark.slow
def test_two_processes_at_once_give_one_output(tmp_path: Path, corpus: list) -> None:
    both = [start(tmp_path) for _ in range(2)]
    said = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert "already prepared" in said[0] + said[1]
    assert hashes(tmp_path / "out") == hashes(run(tmp_path, "straight", train_tokenizer=330))


def test_unfinished_work_with_other_options_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path / "out", {"inputs": 1, "version": 1}, print)
    job.save({"done": [0, 1]})
    job.keep()
    with pytest.raises(ValueError, match=r"out.partial is an unfinished preparation with other inputs; repeat it"):
        Job(tmp_path / "out", {"inputs": 2, "version": 1}, print)
    again = Job(tmp_path / "out", {"inputs": 1, "version": 1}, print)
    assert again.state == {"done": [0, 1]}
    again.discard()


def test_tokenizer_of_another_killed_job_is_not_taken_over(tmp_path: Path) -> None:
    job = Job(tmp_path / "out", {"tokenizer": 1}, print)
    (job.data / "tokenizer.model").touch()
    (job.data / ".manifest.json.123").touch()  # half-written
    job.save(None)  # and killed here
    os.close(job._lock)
    same = Job(tmp_path / "out", {"tokenizer": 1}, print)
    assert [f.name for f in same.data.iterdir()] == ["tokenizer.model"]
    os.close(same._lock)
    other = Job(tmp_path / "out", {"tokenizer": 2}, print)
    assert not (other.data / "tokenizer.model").exists()
    other.keep()
    assert not other.partial.exists()


def test_kill_after_the_output_got_its_name_leaves_nothing_for_long(
    tmp_path: Path, write_jsonl: Callable, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl("a.jsonl", ["text"])
    with monkeypatch.context() as patch:
        patch.setattr(Job, "discard", lambda job: os.close(job._lock))
        run(tmp_path, tokenizer=str(model_file))
    assert (tmp_path / "out.partial").exists()
    run(tmp_path, tokenizer=str(model_file))
    assert not (tmp_path / "out.partial").exists()


def test_bad_line_stops_cleanly_or_is_counted(
    tmp_path: Path, write_jsonl: Callable, model_file: Path, capsys: pytest.CaptureFixture
) -> None:
    file = write_jsonl("a.jsonl", ["one", "two", "", "three"])
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], '{"text": 3}', *lines[2:], "{"]))
    with pytest.raises(ValueError, match=r"a.jsonl: line 3: `text` must be a string"):
        run(tmp_path, tokenizer=str(model_file))
    assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]
    out = run(tmp_path, tokenizer=str(model_file), skip_bad_lines=True, split="val=0")
    manifest = load_manifest(out)
    assert manifest.counts == {"documents": 3, "empty": 1, "skipped": {"text": 1, "json": 1}}
    assert "2 bad lines skipped" in capsys.readouterr().out
    assert manifest.splits["val"] == []


@pytest.mark.parametrize("lines", ['{"text": 3}\n', '{"text": ""}\n', '{"text": "ok"}\n{\n'])
def test_tokenizer_training_says_what_is_wrong_with_the_text(tmp_path: Path, lines: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"a.jsonl: line [12]: |no training document with text"):
        run(tmp_path, train_tokenizer=330)
    assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]


def test_truncated_input_stops_cleanly(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    whole = zstandard.compress(write_jsonl("x.jsonl", ["text"] * 50).read_bytes())
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=rf"a.jsonl.zst: truncated, it ends at byte {len(whole) - 4}"):
        run(tmp_path, tokenizer=str(model_file))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.jsonl.zst", "x.jsonl"]


def test_validation_files_of_their_own(tmp_path: Path, write_jsonl: Callable, json_file: Path) -> None:
    write_jsonl("a.jsonl", ["train one", "train two"])
    val = write_jsonl("val.jsonl", ["held out"])
    (tmp_path / "b.txt").write_text("plain text\n")
    out = run(
        tmp_path, input=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt"], val_input=str(val), tokenizer=str(json_file)
    )
    assert texts_of(out, "train") == {"Wiki (en)": ["train one", "train two"], "text": ["plain text\n"]}
    assert texts_of(out, "val") == {"Wiki (en)": ["held out"]}
    assert (out / "tokenizer.json").is_file()


def test_long_line_of_many_tokens(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    text = "alpha beta\n" * 200_000
    write_jsonl("a.jsonl", ["short", text, "end"])
    out = run(tmp_path, tokenizer=str(model_file), split="val=0", verify=True)
    assert texts_of(out, "train")["Wiki (en)"] == ["short", text, "end"]


def test_worker_that_dies_is_an_error_that_names_the_place(
    tmp_path: Path, corpus: list, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = pool.send

    def send_and_kill(pipe: object, header: object, data: bytes = b"") -> None:
        if isinstance(header, dict) and header["line"] > 1:
            for pid in children(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        send(pipe, header, data)

    monkeypatch.setattr(pool, "send", send_and_kill)
    with pytest.raises(RuntimeError, match=r"signal 9\) at .*a.jsonl from line \d+ on; .* fewer --workers"):
        run(tmp_path, tokenizer=str(model_file))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of --tokenizer PATH and --train_tokenizer"),
        ({"tokenizer": "t.model", "train_tokenizer": 400}, "give one of --tokenizer"),
        ({"train_tokenizer": 400, "input": None}, "give one of --input FILES and --source python"),
        ({"train_tokenizer": 400, "source": "python"}, "give one of --input FILES and --source python"),
        ({"train_tokenizer": 400, "input": None, "source": "java"}, "source must be python, got 'java'"),
        ({"train_tokenizer": 400, "split": "0.1"}, "split must be val=FRACTION"),
        ({"train_tokenizer": 400, "split": "val=1.5"}, "split must be val=FRACTION"),
        ({"train_tokenizer": 400, "workers": -1}, "workers=-1"),
        ({"train_tokenizer": 10}, "train_tokenizer must be at least 300, got 10|at least 300"),
    ],
    ids=lambda x: "-".join(f"{k}" for k in x) or "none" if isinstance(x, dict) else None,
)
def test_wrong_options_are_named_and_leave_nothing(
    tmp_path: Path, write_jsonl: Callable, options: dict, message: str
) -> None:
    write_jsonl("a.jsonl", ["text"])
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **options)
    assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]


def test_output_that_is_something_else_is_refused(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    write_jsonl("a.jsonl", ["text"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").touch()
    with pytest.raises(ValueError, match="exists and is no prepared data"):
        run(tmp_path, tokenizer=str(model_file))
    (tmp_path / "out/precious").unlink()
    run(tmp_path, tokenizer=str(model_file))


def test_verify_alone_reads_the_shards_again(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    write_jsonl("a.jsonl", ["text", "more"])
    out = run(tmp_path, tokenizer=str(model_file), split="val=0")
    assert isinstance(prepare(str(out), verify=True), Manifest)
    shard = out / "train/wiki-en/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00000.bin: truncated"):
        prepare(str(out), verify=True)


def test_complete_output_with_a_truncated_shard_is_not_taken_for_prepared(
    tmp_path: Path, write_jsonl: Callable, model_file: Path, capsys: pytest.CaptureFixture
) -> None:
    write_jsonl("a.jsonl", ["text", "more"])
    shard = run(tmp_path, tokenizer=str(model_file), split="val=0") / "train/wiki-en/shard-00000.bin"
    capsys.readouterr()
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00000.bin: truncated.*or remove the directory and prepare"):
        run(tmp_path, tokenizer=str(model_file), split="val=0")
    assert capsys.readouterr().out == ""
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, tokenizer=str(model_file), split="val=0", verify=True)


def test_too_many_sets_are_refused(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    write_jsonl("a.jsonl", [(f"set {i}", "text") for i in range(300)])
    with pytest.raises(ValueError, match=r"more than 256 different meta.pile_set_name, the last is 'set 256'"):
        run(tmp_path, tokenizer=str(model_file), split="val=0")
    assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]


def test_input_without_text_is_refused(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    write_jsonl("a.jsonl", ["", ""])
    with pytest.raises(ValueError, match="holds no document with text"):
        run(tmp_path, tokenizer=str(model_file))


def test_manifest_is_plain_json_of_the_run(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> None:
    write_jsonl("a.jsonl", ["text"])
    raw = json.loads((run(tmp_path, tokenizer=str(model_file), split="val=0") / "manifest.json").read_text())
    assert (raw["format"], raw["version"], raw["dtype"]) == ("lit_msar.tokens", 1, "uint16")
    assert raw["options"]["shard_tokens"] == 3000
