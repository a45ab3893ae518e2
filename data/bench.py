"""`python -m data.bench`: speed of tokenizing, loading and starting, each beside its limit in the same run.

python -m data.bench tokenize --input 'corpus/*.jsonl.zst' --tokenizer DIR   prepare against the bare tokenizer library
python -m data.bench load [--litdata PYTHON]                                 samples against a plain memmap loop, and
litdata python -m data.bench start                                                   start-up and memory from 1e8 to
1e11 tokens
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.documents import documents
from data.inputs import find_inputs
from data.order import Lookahead, Shuffle
from data.pool import available_cores
from data.prepare import prepare
from data.shards import SHARD_TOKENS, Manifest, Shard, ShardSet, check_sizes, load_manifest
from data.split import TokenSplit
from data.tokenizer import load_tokenizer

SEQ_LEN = 8192
BATCH = 8
VOCABULARY = 50_000
ROUNDS = 5  # measured in turn, so that a busy machine slows all alike; medians are printed
ROUND_SECONDS = 1.0
DOCUMENT_TOKENS = 1000

LITDATA = """
import json, sys, time
import numpy as np
import torch
from litdata import StreamingDataset, TokensLoader, optimize

tokens_file, folder, seq_len, batch, seconds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5])

def chunks(start):
    yield torch.from_numpy(np.fromfile(tokens_file, dtype=np.uint16, count=1 << 22, offset=2 * start))

if __name__ == "__main__":
    n = np.memmap(tokens_file, dtype=np.uint16, mode="r").size
    optimize(chunks, list(range(0, n, 1 << 22)), folder, chunk_size=1 << 25, num_workers=1,
             item_loader=TokensLoader(), verbose=False)
    start = time.perf_counter()
    data = StreamingDataset(folder, item_loader=TokensLoader(block_size=seq_len + 1), shuffle=True, drop_last=False)
    stream = iter(data)
    next(stream)
    started = time.perf_counter() - start
    rates = []
    for _ in range(5):
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            try:
                rows = torch.stack([next(stream).to(torch.int64) for _ in range(batch)])
            except StopIteration:
                stream = iter(data)
                continue
            rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            count += batch * seq_len
        rates.append(count / (time.perf_counter() - start))
    print(json.dumps({"rate": sorted(rates)[2], "start": started}))
"""


def bench_tokenize(input: str, tokenizer: str, workers: int, megabytes: float) -> None:
    """Time of `prepare` against the tokenizer library alone, in as many processes on the same documents."""
    texts, size = _texts(input, megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        with open(file, "w", encoding="utf-8") as f:
            for text in texts:
                f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        model = load_tokenizer(tokenizer).path
        ratios = []
        for k in range(ROUNDS):
            bare, bare_cpu = _timed(lambda: _bare_encode(texts, str(model), workers))
            ours, ours_cpu = _timed(lambda k=k: _prepare(file, model, workers, f"{folder}/out{k}"))
            ratios.append((bare / ours, bare_cpu / ours_cpu))
            print(f"{size / 1e6:.1f} MB in {workers} processes: library {size / bare / 1e6:.2f} MB/s, ", end="")
            print(f"prepare {size / ours / 1e6:.2f} MB/s; processor time {bare_cpu:.1f} s and {ours_cpu:.1f} s")
        wall, cpu = (statistics.median(r) for r in zip(*ratios, strict=True))
        print(f"prepare at {wall:.1%} of the library, {cpu:.1%} by processor time (medians of {ROUNDS})")


def _prepare(file: Path, model: Path, workers: int, output: str) -> None:
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        prepare(output, input=str(file), tokenizer=str(model), workers=workers, split="val=0")


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds that `work` takes, on the clock and of all processors."""

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in usages)

    start, start_cpu = time.perf_counter(), cpu()
    work()
    return time.perf_counter() - start, cpu() - start_cpu


def _texts(input: str, limit: float) -> tuple[list[str], int]:
    texts, size = [], 0
    for source in find_inputs(input, "--input"):
        for block in source.blocks():
            for _, *document in documents(block.data, block.line, source.is_text):
                if len(document) == 2 and size < limit:
                    texts.append(document[0])
                    size += len(document[0].encode())
            if size >= limit:
                return texts, size
    return texts, size


def _bare_encode(texts: list[str], model: str, workers: int) -> None:
    """The library alone: each process encodes its share, one text after another, and drops the ids."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_encode, args=(texts[i::workers], model)) for i in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _encode(texts: list[str], model: str) -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"
    if model.endswith(".json"):
        import tokenizers

        library = tokenizers.Tokenizer.from_file(model)
        library.encode_special_tokens = True
        encode: Callable = lambda text: library.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        import sentencepiece

        encode = sentencepiece.SentencePieceProcessor(model_file=model).encode
    for text in texts:
        encode(text)


def bench_load(n_tokens: int, litdata_python: str | None) -> None:
    """Tokens per second of one process from a warm page cache, in random order: samples, and a memmap loop."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        manifest = fake_data(root, n_tokens, sparse=False)
        split = TokenSplit(root, manifest, "train", SEQ_LEN)
        order = Lookahead(Shuffle(split.sizes, seed=0), BATCH, BATCH)
        maps = [np.memmap(root / (s.path + ".bin"), dtype=np.uint16, mode="r") for s in manifest.shards()]
        for m in maps:
            m.max()  # reads all into the page cache
        rng = np.random.default_rng(0)

        def ours(i: int) -> None:
            split.batch(*order(i * BATCH))

        def memmap(i: int) -> None:
            m = maps[int(rng.integers(len(maps)))]
            starts = rng.integers(0, len(m) - SEQ_LEN - 1, BATCH)
            np.stack([m[s : s + SEQ_LEN].astype(np.int64) for s in starts])
            np.stack([m[s + 1 : s + 1 + SEQ_LEN].astype(np.int64) for s in starts])

        rates: dict[str, list[float]] = {"samples": [], "memmap loop": []}
        for _ in range(ROUNDS):
            rates["samples"].append(_rate(ours))
            rates["memmap loop"].append(_rate(memmap))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        for name, rate in medians.items():
            print(f"{name:<12} {rate / 1e6:8.0f}M tokens/s   {rate / medians['memmap loop']:6.1%} of the memmap loop")
        if litdata_python:
            joined = root / "all.bin"
            with open(joined, "wb") as f:
                for m in maps:
                    f.write(m[: len(m) // (1 << 22) * (1 << 22)].tobytes())
            arguments = [joined, root / "litdata", SEQ_LEN, BATCH, ROUND_SECONDS]
            script = root / "litdata_bench.py"
            script.write_text(LITDATA)
            out = subprocess.run([litdata_python, script, *map(str, arguments)], capture_output=True, text=True)
            if out.returncode:
                raise RuntimeError(f"litdata: {out.stderr.strip().splitlines()[-1]}")
            result = json.loads(out.stdout.strip().splitlines()[-1])
            rate = result["rate"]
            print(
                f"{'litdata':<12} {rate / 1e6:8.0f}M tokens/s   {rate / medians['memmap loop']:6.1%} of the memmap loop"
            )


def _rate(batch: Callable[[int], None]) -> float:
    """Tokens per second of consecutive batches."""
    start, i = time.perf_counter(), 0
    while time.perf_counter() - start < ROUND_SECONDS:
        batch(i)
        i += 1
    return i * BATCH * SEQ_LEN / (time.perf_counter() - start)


def fake_data(root: Path, n_tokens: int, sparse: bool) -> Manifest:
    """A prepared directory of one set: random tokens, or sparse files of zeros that take no disk."""
    (root / "train/set").mkdir(parents=True)
    rng = np.random.default_rng(0)
    shards = []
    for at in range(0, n_tokens, SHARD_TOKENS):
        n = min(SHARD_TOKENS, n_tokens - at)
        path = f"train/set/shard-{len(shards):05d}"
        n_documents = max(1, n // DOCUMENT_TOKENS)
        if sparse:
            for suffix, size in ((".bin", 2 * n), (".idx", 8 * (n_documents + 1))):
                with open(root / (path + suffix), "wb") as f:
                    f.truncate(size)
        else:
            rng.integers(1, VOCABULARY, n, dtype=np.uint16).tofile(root / (path + ".bin"))
            np.linspace(0, n, n_documents + 1).astype("<u8").tofile(root / (path + ".idx"))
        shards.append(Shard(path, n, n_documents, 4 * n, "", ""))
    tokenizer = {"file": "", "kind": "", "sha256": "", "vocab_size": VOCABULARY, "eod_id": 0}
    manifest = Manifest("uint16", tokenizer, {"train": [ShardSet("set", "train/set", shards)], "val": []})
    (root / "manifest.json").write_text(manifest.to_json())
    return manifest


def bench_start() -> None:
    """Start-up and resident memory of a fresh process for corpora of 1e8 to 1e11 tokens."""
    for exponent in (8, 9, 10, 11):
        with tempfile.TemporaryDirectory() as folder:
            fake_data(Path(folder), 10**exponent, sparse=True)
            command = [sys.executable, "-m", "data.bench", "one-start", "--data", folder]
            print(
                f"1e{exponent} tokens:",
                subprocess.run(command, check=True, capture_output=True, text=True).stdout,
                end="",
            )


def _one_start(folder: str, n_batches: int = 500) -> None:
    before = _resident()
    start = time.perf_counter()
    manifest = load_manifest(folder)
    check_sizes(folder, manifest)
    split = TokenSplit(folder, manifest, "train", SEQ_LEN)
    order = Lookahead(Shuffle(split.sizes, seed=0), BATCH, BATCH)
    split.batch(*order(0))
    started = time.perf_counter() - start
    for i in range(n_batches):
        split.batch(*order(i * BATCH))
    grown = (_resident() - before) / 1e6
    print(
        f"{len(manifest.shards()):4d} shards, {split.sizes[0]:,} samples, first batch after {started * 1e3:.0f} ms, "
        f"{grown:.1f} MB more resident after {n_batches * BATCH:,} random samples"
    )


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tokenize = commands.add_parser("tokenize", help="prepare against the bare tokenizer library")
    tokenize.add_argument("--input", required=True, help="documents, as of prepare")
    tokenize.add_argument("--tokenizer", required=True, help="tokenizer file or prepared directory")
    tokenize.add_argument("--workers", type=int, default=available_cores(), help="processes (one per core)")
    tokenize.add_argument("--megabytes", type=float, default=60.0, help="text to tokenize (MB, default 60)")
    load = commands.add_parser("load", help="samples against a memmap loop")
    load.add_argument("--tokens", type=int, default=200_000_000, help="size of the data (tokens, default 2e8)")
    load.add_argument("--litdata", metavar="PYTHON", help="interpreter that has litdata, to compare with")
    commands.add_parser("start", help="start-up and memory from 1e8 to 1e11 tokens")
    commands.add_parser("one-start", help="the part of `start` in a process of its own").add_argument("--data")
    options = parser.parse_args(arguments)
    if options.command == "tokenize":
        bench_tokenize(options.input, options.tokenizer, options.workers, options.megabytes)
    elif options.command == "load":
        bench_load(options.tokens, options.litdata)
    elif options.command == "start":
        bench_start()
    else:
        _one_start(options.data)


if __name__ == "__main__":
    main()
