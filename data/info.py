"""`python -m lit_msar data-info`: sets, lengths and a sample of a prepared directory, in the terminal."""

from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data.prepare import verify_shards
from data.remote import fetch_manifest, fetch_shards, is_remote
from data.shards import IDX_DTYPE, Manifest, ShardSet, check_sizes, load_manifest
from data.split import ShardFiles
from data.tokenizer import load_tokenizer

HISTOGRAM_DOCUMENTS = 1 << 20  # of each shard: enough for a picture, and bounded at a terabyte
BAR = 40  # columns
WIDTH = 100  # columns where the output is no terminal


def data_info(
    path: str, sample_tokens: int = 120, histogram: bool = True, verify: bool = False, cache_dir: str | None = None
) -> None:
    """Prints what a prepared directory holds, if its shards are as long as the manifest says.

    Args:
        path: prepared directory, or an fsspec URL of one.
        sample_tokens: length of the decoded sample; 0 for none (tokens).
        histogram: show how long documents are.
        verify: re-read all shards against the manifest first, not only their sizes.
        cache_dir: where remote data is copied to (default: ~/.cache/lit_msar/data).
    Raises:
        FileNotFoundError, ValueError: no such data, or a damaged file; names it.
    """
    if sample_tokens < 0:
        raise ValueError(f"sample_tokens must not be negative, got {sample_tokens}")
    root = fetch_manifest(path, cache_dir) if is_remote(path) else path
    manifest = load_manifest(root)
    if not is_remote(path):
        check_sizes(root, manifest)
    elif verify or histogram or sample_tokens:
        fetch_shards(path, root, manifest, manifest.shards())
    if verify:
        verify_shards(Path(root))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_table(path, manifest))
    console.print(escape(_counts(manifest)))
    if not any(s.documents for s in manifest.splits["train"]):
        console.print("\nno document for training: every one was empty, skipped, or taken for validation")
        return
    if histogram:
        _print_histogram(console, np.concatenate([_lengths(root, s) for s in manifest.splits["train"]]))
    if sample_tokens:
        _print_sample(console, root, manifest, sample_tokens)


def _table(path: str, manifest: Manifest) -> Table:
    t = manifest.tokenizer
    title = f"{escape(str(path))}: {t['kind']} tokenizer, {t['vocab_size']:,} ids, {manifest.dtype}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("split")
    table.add_column("set", no_wrap=True)
    for name in ("documents", "tokens", "share", "MB of text", "bytes/token"):
        table.add_column(name, justify="right", min_width=len(name), no_wrap=True)
    for split, sets in manifest.splits.items():
        total = sum(s.tokens for s in sets)
        for s in sets:
            table.add_row(split, escape(s.name), *_row([s], s.tokens / total))
        if len(sets) > 1:
            table.add_row(split, "all", *_row(sets, 1.0), end_section=True)
    return table


def _row(sets: list[ShardSet], share: float) -> list[str]:
    tokens, n_bytes = sum(s.tokens for s in sets), sum(s.bytes for s in sets)
    figures = (f"{tokens:,}", f"{share:.1%}", f"{n_bytes / 1e6:,.1f}", f"{n_bytes / tokens:.3f}")
    return [f"{sum(s.documents for s in sets):,}", *figures]


def _counts(manifest: Manifest) -> str:
    counts = manifest.counts
    parts = [f"{len(manifest.shards())} shards from {len(manifest.inputs)} inputs"]
    parts += [f"{counts.get('empty', 0):,} empty documents dropped"]
    parts += [f"{n:,} bad lines skipped ({reason})" for reason, n in counts.get("skipped", {}).items()]
    return ", ".join(parts)


def _lengths(root: object, s: ShardSet) -> np.ndarray:
    """Tokens of the documents of a set, of the first million of each shard."""
    parts = [
        np.diff(
            np.fromfile(f"{root}/{shard.path}.idx", dtype=IDX_DTYPE, count=HISTOGRAM_DOCUMENTS + 1).astype(np.int64)
        )
        for shard in s.shards
    ]
    return np.concatenate(parts)


def _print_histogram(console: Console, lengths: np.ndarray) -> None:
    """Documents by length, one line for each power of two."""
    quantiles = np.quantile(lengths, [0.1, 0.5, 0.9])
    console.print(
        f"\ndocument length of train (tokens): 10 % up to {quantiles[0]:,.0f}, "
        f"median {quantiles[1]:,.0f}, 90 % up to {quantiles[2]:,.0f}, longest {lengths.max():,}"
    )
    console.print(f"{'from':>9} {'':{BAR}} {'documents':>10} {'of tokens':>9}")
    bins = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    for b in range(bins.min(), len(counts)):
        bar = "█" * round(BAR * counts[b] / counts.max())
        share = tokens[b] / tokens.sum()
        console.print(f"{2**b:>9,} {bar:<{BAR}} {counts[b]:>10,} {share:>9.1%}", highlight=False)


def _print_sample(console: Console, root: object, manifest: Manifest, n_tokens: int) -> None:
    """The beginning of the middle document of the largest training set."""
    largest = max(manifest.splits["train"], key=lambda s: s.tokens)
    shard = largest.shards[len(largest.shards) // 2]
    where = shard.documents // 2
    start, end = np.fromfile(f"{root}/{shard.path}.idx", dtype=IDX_DTYPE, count=2, offset=8 * where).astype(np.int64)
    ids = ShardFiles(root, manifest.dtype).read(shard, int(start), min(n_tokens, int(end - start)))
    console.print(f"\nfirst {len(ids)} tokens of document {where} of {escape(shard.path)}:")
    console.print(load_tokenizer(root).decode(ids), markup=False, highlight=False)
