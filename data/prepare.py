"""`python -m lit_msar prepare`: text files to token shards, in parallel, in bounded memory, and again after a kill.

One process reads the inputs in order and cuts them into blocks, others tokenize, and the first one writes the results
in order: so the output depends neither on the number of workers nor on interruptions.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from data.documents import BadLine, Tokenized, bad_line, documents, split_of
from data.inputs import Block, Input, find_inputs
from data.job import JOURNAL_SECONDS, Job, sweep, write_atomic
from data.pool import TokenizerPool, available_cores
from data.progress import PrepareProgress, each
from data.python_source import python_inputs
from data.shards import (
    SHARD_TOKENS,
    VERSION,
    Manifest,
    ShardWriter,
    check_content,
    check_sizes,
    hash_file,
    load_manifest,
    safe_name,
)
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from data.verify import record_verified

DEFAULT_SPLIT = "val=0.01"
PYTHON_SPLIT, PYTHON_VOCABULARY = (
    "val=0.03",
    4096,
)  # of a small corpus a larger share, for some 0.3M tokens of validation
MAX_SETS = 256  # two open files each


def prepare(
    output: str,
    input: str | list[str] | None = None,
    tokenizer: str | None = None,
    train_tokenizer: int | None = None,
    workers: int = 0,
    source: Literal["python"] | None = None,
    split: str | None = None,
    val_input: str | list[str] | None = None,
    skip_bad_lines: bool = False,
    verify: bool = False,
    eod_token: str | None = None,
    tokenizer_bytes: int = 1 << 26,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Turns text into token shards that `fit` reads.

    Run again after an interruption, it continues and gives the same bytes; run again after success, it does nothing.

    Args:
        output: directory to make; it appears when everything is in it.
        input: .jsonl, .jsonl.zst, .jsonl.gz or .txt files: a path, a glob pattern, a directory, or a list of them. A
            line is {"text": ..., "meta": {"pile_set_name": ...}}; a .txt is one document.
        tokenizer: SentencePiece .model, Hugging Face tokenizer.json, or prepared directory whose tokenizer to use.
        train_tokenizer: train a lossless byte-fallback BPE tokenizer with this many ids instead (ids; 4096 with
            --source python).
        workers: tokenizing processes; 0 is one per core (processes).
        source: "python" takes the Python sources of this machine instead of --input.
        split: share of documents for validation, as "val=0.01", chosen by a hash of the text ("val=0" for none; default
            "val=0.01", "val=0.03" with --source python, and none with --val_input).
        val_input: files whose documents are all for validation, as --input.
        skip_bad_lines: skip and count lines that are no documents, instead of stopping at the first.
        verify: re-read all shards against the manifest, also where the output was complete before; needs no --input
            then.
        eod_token: the tokenizer's special token that ends a document (its eos, or the first of the usual names).
        tokenizer_bytes: text that --train_tokenizer learns from, from the beginning of each input (bytes).
        shard_tokens: length at which a shard is closed (tokens).
    Returns:
        The manifest of the output.
    Raises:
        FileNotFoundError: an input, the tokenizer, or a shard of an output that was complete, is missing.
        ValueError: a wrong option, damaged input, a bad line, or a damaged shard.
    """
    target = Path(output) if Path(output).name else Path(output).resolve()
    if verify and input is None and source is None:
        return verify_shards(target)
    inputs = _inputs(input, val_input, source, _split(split, source, val_input is not None))
    if tokenizer is None and train_tokenizer is None and source == "python":
        train_tokenizer = PYTHON_VOCABULARY
    if (tokenizer is None) == (train_tokenizer is None):
        raise ValueError(
            "give one of --tokenizer PATH and --train_tokenizer VOCABULARY_SIZE, or --source python for a default"
        )
    if workers < 0 or shard_tokens < 1 or tokenizer_bytes < 1:
        raise ValueError(
            f"workers={workers}, shard_tokens={shard_tokens} and tokenizer_bytes={tokenizer_bytes} must be positive"
        )
    if tokenizer is not None:
        model = load_tokenizer(tokenizer, eod_token)  # says what is wrong with it before anything is written
        tokenizer, eod_token = str(model.path), model.eod_token
    identity = {
        "version": VERSION,
        "inputs": [i.identity() | {"split": side} for i, side in inputs],
        "tokenizer": f"train {train_tokenizer} on {tokenizer_bytes}" if tokenizer is None else hash_file(tokenizer),
        "eod_token": eod_token,
        "shard_tokens": shard_tokens,
    }
    manifest = _make(target, inputs, identity, tokenizer, train_tokenizer, tokenizer_bytes, workers, skip_bad_lines)
    return verify_shards(target) if verify else manifest


def verify_shards(output: Path) -> Manifest:
    """Re-reads every shard against the manifest.

    Raises:
        FileNotFoundError, ValueError: a shard is missing or is not what the manifest says; names the file.
    """
    manifest = load_manifest(output)
    shards = manifest.shards()
    sizes = [shard.tokens * manifest.token_bytes for shard in shards]
    each("checking shards", shards, lambda s: check_content(output, s, manifest), sizes, min(8, available_cores()))
    print(f"{output}: {len(shards)} shards are as the manifest says")
    return manifest


def _split(split: str | None, source: str | None, has_val_input: bool) -> float:
    """The validation fraction of `val=FRACTION`, or of the default."""
    default = "val=0" if has_val_input else PYTHON_SPLIT if source == "python" else DEFAULT_SPLIT
    text = split if split is not None else default
    name, _, value = text.partition("=")
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if name != "val" or not 0 <= fraction < 1:
        raise ValueError(f"split must be val=FRACTION with a fraction in [0, 1), as {DEFAULT_SPLIT}, got {split!r}")
    return fraction


def _inputs(
    input: str | list[str] | None, val_input: str | list[str] | None, source: str | None, fraction: float
) -> list[tuple[Input, str | float]]:
    """Inputs in order, each with its split: `train`, `val` or the validation fraction."""
    if source not in (None, "python"):
        raise ValueError(f"source must be python, got {source!r}")
    if (source is None) == (input is None):
        raise ValueError("give one of --input FILES and --source python")
    files: list[Input] = python_inputs() if source else list(find_inputs(input, "--input"))
    side: str | float = fraction if fraction > 0 else "train"
    return [(f, side) for f in files] + [(f, "val") for f in find_inputs(val_input, "--val_input")]


def _make(
    target: Path,
    inputs: list[tuple[Input, str | float]],
    identity: dict,
    tokenizer: str | None,
    vocab_size: int | None,
    tokenizer_bytes: int,
    workers: int,
    skip_bad_lines: bool,
) -> Manifest:
    if (done := _finished(target, identity)) is not None:
        sweep(target)
        print(f"{target}: already prepared")
        return done
    job = Job(target, identity, print)
    try:
        if (done := _finished(target, identity)) is not None:  # by the process that held the lock
            job.discard()
            print(f"{target}: already prepared")
            return done
        model = _tokenizer(job, inputs, identity, tokenizer, vocab_size, tokenizer_bytes, skip_bad_lines)
        run = Preparation(job, inputs, model, identity)
        with PrepareProgress(sum(i.size for i, _ in inputs)) as progress:
            run.run(workers or available_cores(), skip_bad_lines, progress)
        manifest = run.finish()
    except BaseException:
        job.keep()
        raise
    job.publish()
    record_verified(target, manifest.shards())
    print(f"{target}: {_summary(manifest)}")
    return manifest


def _finished(target: Path, identity: dict) -> Manifest | None:
    """The manifest where the output is complete, its shards as long as it says; None where it is to be made."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / "manifest.json").is_file():
        raise ValueError(f"output {target}: exists and is no prepared data; choose another --output or remove it")
    manifest = load_manifest(target)
    before, now = _lasting(manifest.options), _lasting(identity)
    if before != now:
        keys = sorted(k for k in now if before.get(k) != now[k])
        raise ValueError(
            f"output {target}: was prepared with other {', '.join(keys)}; choose another --output or remove it"
        )
    check_sizes(target, manifest)
    return manifest


def _lasting(identity: dict) -> dict:
    """An identity without the files of `--source python`: installing a package does not make prepared data wrong."""
    inputs = [i | {"size": 0, "head": ""} if i["name"].startswith("python:") else i for i in identity["inputs"]]
    return identity | {"inputs": inputs}


def _tokenizer(
    job: Job,
    inputs: list,
    identity: dict,
    given: str | None,
    vocab_size: int | None,
    tokenizer_bytes: int,
    skip_bad_lines: bool,
) -> Tokenizer:
    """Puts the tokenizer's file into the output: copied, trained, or found from the interrupted run."""
    file = job.data / ("tokenizer.json" if given and given.endswith(".json") else "tokenizer.model")
    if not file.is_file():
        if given:
            write_atomic(file, Path(given).read_bytes())
        else:
            print(f"training a tokenizer with {vocab_size} ids on up to {tokenizer_bytes / 1e6:.0f} MB of text")
            sample = list(_sample(inputs, tokenizer_bytes, skip_bad_lines))
            if not sample:
                raise ValueError("the input holds no training document with text to train a tokenizer on")
            write_atomic(file, train_tokenizer(sample, vocab_size))
        job.save(None)
    model = Tokenizer(file, identity["eod_token"])
    if not model.is_lossless:
        print(f"warning: {given} does not give every text back unchanged (tabs, newlines, spaces, rare characters)")
    return model


def _sample(inputs: list[tuple[Input, str | float]], n_bytes: int, skip_bad_lines: bool) -> Iterator[str]:
    """Training documents of about `n_bytes` from the beginnings of the inputs."""
    sources = [(i, side) for i, side in inputs if side != "val"]
    left = n_bytes
    for k, (source, side) in enumerate(sources):
        share = left // (len(sources) - k)  # what a short input does not use goes to the later ones
        left -= share
        for block in source.blocks():
            for number, *document in documents(block.data, block.line, source.is_text):
                if isinstance(document[0], BadLine):
                    if not skip_bad_lines:
                        raise bad_line(source.name, number, document[0])
                    continue
                raw = document[0].encode(errors="replace")  # a lone surrogate is for the main pass to name
                if share > 0 and raw and (side == "train" or split_of(raw, side) == "train"):
                    share -= len(raw)
                    yield raw.decode()
            if share <= 0:
                break
        left += max(share, 0)


class Preparation:
    """The main pass: blocks out, tokens in, shards written, and the journal of it."""

    def __init__(self, job: Job, inputs: list[tuple[Input, str | float]], tokenizer: Tokenizer, identity: dict) -> None:
        self.job = job
        self.inputs = inputs
        self.tokenizer = tokenizer
        self.identity = identity
        self.writers: dict[tuple[str, str], ShardWriter] = {}
        self.done = (0, 0)  # input and block to continue at
        self.counts = {"documents": 0, "empty": 0, "skipped": {}, "tokens": 0}
        self.finished: list[dict] = []  # what the manifest says of each input
        self._input_documents = 0
        if job.state is not None:
            self._restore(job.state)

    def _restore(self, state: dict) -> None:
        self.done = tuple(state["done"])
        self.counts, self.finished, self._input_documents = state["counts"], state["finished"], state["input_documents"]
        for split, saved in state["writers"]:
            name, path = saved["set"]["name"], saved["set"]["path"]
            writer = ShardWriter(self.job.data, name, path, self.tokenizer.dtype, self.identity["shard_tokens"])
            writer.restore(saved)
            self.writers[split, name] = writer

    def _save(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        writers = [(split, writer.state()) for (split, _), writer in self.writers.items()]
        self.job.save(
            {
                "done": self.done,
                "counts": self.counts,
                "finished": self.finished,
                "input_documents": self._input_documents,
                "writers": writers,
            }
        )

    def run(self, workers: int, skip_bad_lines: bool, progress: PrepareProgress) -> None:
        """Tokenizes what is left; what the pool or an input raises leaves the journal as it stands."""
        offsets = [0]
        for source, _ in self.inputs:
            offsets.append(offsets[-1] + source.size)
        saved = time.monotonic()
        with TokenizerPool(self.tokenizer, workers, self.identity["eod_token"], skip_bad_lines) as pool:
            try:
                for where, block, tokens in pool.map(self._blocks(progress, offsets)):
                    self._finish_inputs(where["input"])
                    self._write(tokens)
                    self.done = (where["input"], where["index"] + 1)
                    progress.update(offsets[where["input"]] + block.position, len(block.data), self.counts)
                    if time.monotonic() - saved > JOURNAL_SECONDS:
                        self._save()
                        saved = time.monotonic()
                self._finish_inputs(len(self.inputs))
            finally:
                if len(self.finished) < len(self.inputs):  # something stopped us; the journal stays at its last entry
                    for writer in self.writers.values():
                        writer.abandon()

    def _blocks(self, progress: PrepareProgress, offsets: list[int]) -> Iterator[tuple[dict, Block]]:
        first, skip = self.done
        for i in range(first, len(self.inputs)):
            source, split = self.inputs[i]
            where = {"input": i, "name": source.name, "is_text": source.is_text, "split": split}
            for index, block in enumerate(source.blocks()):
                if i == first and index < skip:
                    progress.skip(offsets[i] + block.position)
                    continue
                yield where | {"index": index}, block

    def _finish_inputs(self, upto: int) -> None:
        """Notes the inputs before `upto` as finished; all their blocks are written, and read to their end."""
        while len(self.finished) < upto:
            source, split = self.inputs[len(self.finished)]
            side = split if isinstance(split, str) else f"val={split}"
            self.finished.append(
                {
                    "name": source.name,
                    "split": side,
                    "size": source.size,
                    "sha256": source.sha256(),
                    "documents": self._input_documents,
                }
            )
            self._input_documents = 0
            self.done = (len(self.finished), 0)

    def _write(self, tokens: Tokenized) -> None:
        for (split, name), arrays in tokens.sets.items():
            writer = self.writers.get((split, name))
            if writer is None:
                writer = self.writers[split, name] = self._open(split, name)
            writer.append(*arrays)
            self.counts["tokens"] += len(arrays[0])
        self.counts["documents"] += tokens.documents
        self._input_documents += tokens.documents
        self.counts["empty"] += tokens.empty
        for reason, n in tokens.skipped.items():
            self.counts["skipped"][reason] = self.counts["skipped"].get(reason, 0) + n

    def _open(self, split: str, name: str) -> ShardWriter:
        """A writer for a new set. A set has the same directory name in both splits."""
        paths = {n: Path(w.set.path).name for (_, n), w in self.writers.items()}
        if name not in paths and len(paths) >= MAX_SETS:
            raise ValueError(
                f"more than {MAX_SETS} different meta.pile_set_name, the last is {name!r}; is it a set's name?"
            )
        slug = paths.get(name) or safe_name(name, set(paths.values()))
        return ShardWriter(self.job.data, name, f"{split}/{slug}", self.tokenizer.dtype, self.identity["shard_tokens"])

    def finish(self) -> Manifest:
        """Closes the shards and writes the manifest."""
        if not self.counts["documents"]:
            raise ValueError("the input holds no document with text")
        splits: dict[str, list] = {"train": [], "val": []}
        for (split, _), writer in sorted(self.writers.items()):
            splits[split].append(writer.finish())
        tokenizer = {
            "file": self.tokenizer.path.name,
            "kind": self.tokenizer.kind,
            "sha256": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "eod_id": self.tokenizer.eod_id,
            "eod_token": self.identity["eod_token"],
        }
        counts = {k: self.counts[k] for k in ("documents", "empty", "skipped")}
        manifest = Manifest(self.tokenizer.dtype, tokenizer, splits, self.finished, counts, self.identity)
        write_atomic(self.job.data / "manifest.json", manifest.to_json())
        return manifest


def _summary(manifest: Manifest) -> str:
    parts = []
    for split, sets in manifest.splits.items():
        parts.append(f"{split} {sum(s.documents for s in sets):,} documents, {sum(s.tokens for s in sets):,} tokens")
    skipped = sum(manifest.counts["skipped"].values())
    return "; ".join(parts) + (f"; {skipped:,} bad lines skipped {manifest.counts['skipped']}" if skipped else "")
